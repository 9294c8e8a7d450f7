"""``vllm-tetri predictor train``: a classifier of answer lengths out of collected answers."""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from vllm_tetri.errors import ConfigError
from vllm_tetri.predictor import guesses, scores
from vllm_tetri.predictor.answers import Answers, read_answers
from vllm_tetri.predictor.artefact import (
    ABOUT_FILE,
    About,
    Artefact,
    digest_of,
    load,
    require_torch,
    write_about,
)
from vllm_tetri.predictor.dataset import (
    QUARTERS,
    Buckets,
    Dataset,
    Example,
    buckets_for,
    dataset,
    repeated,
)
from vllm_tetri.predictor.learner import Recipe, find_base, fine_tune

_QUANTILES = (10, 50, 90)
# Spread of answers to one prompt where no prompt was asked twice.
_DEFAULT_SPREAD = 0.4
_FEWEST_PAIRS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add = parser.add_argument
    add("answers", type=Path, metavar="ANSWERS", help="file that predictor collect has written")
    add("--output", type=Path, default=Path("predictor"), metavar="FOLDER", help="(%(default)s)")
    add(
        "--base",
        default="",
        metavar="MODEL",
        help="pretrained model to start from, folder or name (facebook/opt-125m where it is in "
        "reach, else a packaged encoder)",
    )
    add("--granularity", type=int, default=200, metavar="N", help="tokens per bucket (%(default)s)")
    add("--epochs", type=int, default=4, metavar="N", help="passes over the data (%(default)s)")
    add("--learning-rate", type=float, default=2e-4, metavar="X", help="(%(default)s)")
    add("--batch-size", type=int, default=16, metavar="N", help="prompts per step (%(default)s)")
    add(
        "--held-out",
        type=int,
        default=0,
        choices=range(QUARTERS),
        metavar="N",
        help=f"quarter of the prompts that is for testing, 0 to {QUARTERS - 1} (%(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of everything random (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Train, save the artefact, and say how good it is on the validation part."""
    _check(options)
    answers = read_answers(options.answers)
    parts = dataset(answers, options.held_out)
    buckets = buckets_for(answers, options.granularity)
    require_torch()
    base = find_base(options.base)
    recipe = Recipe(
        epochs=options.epochs,
        learning_rate=options.learning_rate,
        batch_size=options.batch_size,
        spread=spread_of(repeated(answers)),
        seed=options.seed,
    )
    print(
        f"{len(parts.train)} prompts to learn from, {len(parts.validation)} to choose by; "
        f"{buckets.num} buckets: {', '.join(buckets.names())} tokens\n"
        f"base: {base.name}; answers to one prompt spread by a factor of "
        f"{math.exp(recipe.spread):.2f}"
    )
    (options.output / ABOUT_FILE).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        window = fine_tune(
            base, buckets, parts, recipe, scratch=Path(scratch), output=options.output
        )
    about = replace(
        _about(answers, parts, buckets),
        base_model=base.name,
        window_tokens=window,
        held_out=options.held_out,
        weights_digest=digest_of(options.output),
    )
    write_about(options.output, about)
    artefact = load(options.output, num_threads=os.cpu_count() or 1)
    validation = _validated(artefact, parts)
    write_about(options.output, replace(about, validation=validation))
    print(
        f"{options.output}: " + ", ".join(f"{name} {value}" for name, value in validation.items())
    )
    return 0


def spread_of(pairs: Sequence[tuple[int, int]]) -> float:
    """Standard deviation of the logarithm of the length of answers to one prompt.

    By the median of the differences, so that an answer that ran away does not count.
    """
    if len(pairs) < _FEWEST_PAIRS:
        return _DEFAULT_SPREAD
    apart = [abs(math.log(max(one, 1) / max(other, 1))) for one, other in pairs]
    return statistics.median(apart) / (0.6745 * math.sqrt(2))


def _check(options: argparse.Namespace) -> None:
    for name in ("granularity", "epochs", "batch_size"):
        if getattr(options, name) < 1:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {getattr(options, name)}: must be at least 1")
    if not 0 < options.learning_rate < 1:
        raise ConfigError(f"--learning-rate {options.learning_rate}: must be within 0 and 1")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {options.output}: {error.strerror}") from error


def _about(answers: Answers, parts: Dataset, buckets: Buckets) -> About:
    """What the data tell."""
    filled = [_lengths_in(parts.train, buckets, index) for index in range(buckets.num)]
    versions = ("vllm-tetri", "torch", "transformers")
    return About(
        target=answers.target,
        base_model="",
        granularity_tokens=buckets.granularity_tokens,
        num_buckets=buckets.num,
        window_tokens=0,
        held_out=0,
        bucket_tokens=tuple(round(statistics.fmean(lengths), 1) for lengths in filled),
        bucket_quantiles=tuple(_quantiles(lengths) for lengths in filled),
        num_prompts={
            "train": len(parts.train),
            "validation": len(parts.validation),
            "test": len(parts.test),
        },
        data_digest=answers.digest,
        weights_digest="",
        versions={name: importlib.metadata.version(name) for name in versions},
        validation={},
    )


def _lengths_in(train: Sequence[Example], buckets: Buckets, index: int) -> list[int]:
    """Answers in a bucket; its middle where there is none."""
    found = [each.tokens for each in train if buckets.of(each.tokens) == index]
    return found or [(2 * index + 1) * buckets.granularity_tokens // 2]


def _quantiles(lengths: Sequence[int]) -> tuple[float, float, float]:
    low, middle, high = np.percentile(lengths, _QUANTILES)
    return float(low), float(middle), float(high)


def _validated(artefact: Artefact, parts: Dataset) -> dict[str, float]:
    """Metrics on the part that the best epoch was chosen by, and for comparison how
    often the commonest bucket would be right."""
    buckets = artefact.about.buckets
    known = guesses.Known(parts.train, buckets)
    truth = scores.truth_of(parts.validation, buckets)
    ours = known.guesses(guesses.predicted(artefact, parts.validation))
    trivial = guesses.majority(known, len(parts.validation))
    everyone = scores.everyone(truth)
    found = {name: metric(truth, ours, everyone) for name, metric in scores.METRICS.items()}
    found["majority_accuracy"] = scores.accuracy(truth, trivial, everyone)
    return {name: round(value, 4) for name, value in found.items()}
