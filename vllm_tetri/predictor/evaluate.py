"""``vllm-tetri predictor eval``: predictors beside trivial guesses, on held-out prompts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from vllm_tetri.bench.picture import require_pictures
from vllm_tetri.errors import ConfigError
from vllm_tetri.predictor import guesses, scores
from vllm_tetri.predictor.answers import Answers, read_answers
from vllm_tetri.predictor.artefact import Artefact, load
from vllm_tetri.predictor.dataset import Buckets, Dataset, dataset, repeated
from vllm_tetri.predictor.guesses import Floats, Guesses
from vllm_tetri.predictor.report import draw, table, write_json
from vllm_tetri.predictor.scores import Interval, Reliability, Truth

_FILE_COLUMNS = 150
_FACTORS = (1, 2, 4)  # coarser buckets come from adding up finer ones
MAJORITY, LENGTH, OURS, AGAIN = "majority", "prompt length", "predictor", "target again"
SERVED = "its median bucket"


@dataclass(frozen=True, slots=True)
class Scored:
    """One method at one granularity.

    Attributes:
        metrics: By name, with their intervals.
        skill: Part of the majority's mistakes that it does not make.
        reliability: Accuracy by confidence.
        calibration_error: None where it gives no probabilities.
        num: Prompts that it was measured on.
    """

    metrics: dict[str, Interval]
    skill: float
    reliability: list[Reliability]
    calibration_error: float | None
    num: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All methods at one granularity.

    Attributes:
        buckets: What was to be guessed.
        base_model: What the predictor was fine-tuned from.
        methods: By name.
        differences: Predictor minus a trivial method on the same prompts, by method
            and metric.
    """

    buckets: Buckets
    base_model: str
    methods: dict[str, Scored]
    differences: dict[str, dict[str, Interval]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add = parser.add_argument
    add("answers", type=Path, metavar="ANSWERS", help="file that predictor collect has written")
    add(
        "artefacts",
        type=Path,
        nargs="+",
        metavar="ARTEFACT",
        help="one, or several of one granularity that hold out other prompts",
    )
    add(
        "--output",
        type=Path,
        default=Path("predictor-eval"),
        metavar="FOLDER",
        help="where eval.json and eval.svg go (%(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Print the tables, write numbers and picture."""
    require_pictures()
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {options.output}: {error.strerror}") from error
    answers = read_answers(options.answers)
    groups: dict[int, list[Artefact]] = {}
    for folder in options.artefacts:
        artefact = load(folder, num_threads=os.cpu_count() or 1)
        _require_target(folder, artefact, answers)
        groups.setdefault(artefact.about.granularity_tokens, []).append(artefact)
    for granularity, artefacts in groups.items():
        _require_apart(granularity, artefacts)
    console = Console() if Console().is_terminal else Console(width=_FILE_COLUMNS)
    evaluations = []
    for _, artefacts in sorted(groups.items()):
        for found in evaluate(artefacts, answers):
            evaluations.append(found)
            console.print(table(found))
    write_json(options.output / "eval.json", answers, evaluations)
    draw(options.output / "eval.svg", answers, evaluations)
    console.print(f"numbers and picture: {options.output}/eval.json, eval.svg")
    return 0


def evaluate(artefacts: Sequence[Artefact], answers: Answers) -> list[Evaluation]:
    """Score predictors of one granularity, what they have to beat, and the target
    against itself, at that granularity and coarser ones.

    Args:
        artefacts: Each is asked about the quarter of the prompts that it has not seen.
    """
    about = artefacts[0].about
    asked = []
    for artefact in artefacts:
        parts = dataset(answers, artefact.about.held_out)
        asked.append((parts, guesses.predicted(artefact, parts.test)))
    return [
        _evaluate(asked, about.buckets.coarser(factor), factor, about.base_model, answers)
        for factor in _FACTORS
        if about.buckets.coarser(factor).num > 1
    ]


def _evaluate(
    asked: Sequence[tuple[Dataset, Floats]],
    buckets: Buckets,
    factor: int,
    base_model: str,
    answers: Answers,
) -> Evaluation:
    said: dict[str, list[Guesses]] = {MAJORITY: [], LENGTH: [], OURS: [], SERVED: []}
    for parts, rows in asked:
        known = guesses.Known(parts.train, buckets)
        said[MAJORITY].append(guesses.majority(known, len(parts.test)))
        said[LENGTH].append(guesses.by_prompt_length(known, buckets, parts))
        coarse = guesses.coarser(rows, factor)
        said[OURS].append(known.guesses(coarse))
        said[SERVED].append(guesses.served(known, coarse))
    truth = scores.truth_of([each for parts, _ in asked for each in parts.test], buckets)
    whole = {name: guesses.joined(each) for name, each in said.items()}
    # It ranks nothing; that its mean differs between quarters would look as if it did.
    whole[MAJORITY] = replace(whole[MAJORITY], mean_tokens=np.zeros(len(truth.tokens)))
    methods = {name: _scored(truth, each, whole[MAJORITY]) for name, each in whole.items()}
    pairs = repeated(answers)
    if pairs:
        methods[AGAIN] = _again(pairs, known, buckets)
    return Evaluation(buckets, base_model, methods, _differences(truth, whole))


def _again(pairs: Sequence[tuple[int, int]], known: guesses.Known, buckets: Buckets) -> Scored:
    """How well one answer of the target foretells another to the same prompt."""
    truth = scores.truth_of_lengths([second for _, second in pairs], buckets)
    first = guesses.as_answered([first for first, _ in pairs], buckets)
    return _scored(truth, first, guesses.majority(known, len(pairs)))


def _scored(truth: Truth, said: Guesses, trivial: Guesses) -> Scored:
    metrics = {
        name: scores.interval(metric, truth, said) for name, metric in scores.METRICS.items()
    }
    base = scores.accuracy(truth, trivial, scores.everyone(truth))
    reliability = scores.reliability(truth, said)
    return Scored(
        metrics,
        scores.skill(metrics["accuracy"].value, base),
        reliability,
        scores.calibration_error(reliability) if reliability else None,
        len(truth.tokens),
    )


def _differences(truth: Truth, said: Mapping[str, Guesses]) -> dict[str, dict[str, Interval]]:
    return {
        other: {
            name: scores.difference(metric, truth, said[OURS], said[other])
            for name, metric in scores.METRICS.items()
        }
        for other in (MAJORITY, LENGTH)
    }


def _require_target(folder: Path, artefact: Artefact, answers: Answers) -> None:
    trained, asked = artefact.about.target, answers.target
    if (trained.model, trained.route) != (asked.model, asked.route):
        raise ConfigError(
            f"{folder} predicts answers of {trained.model} ({trained.route}), the file holds "
            f"answers of {asked.model} ({asked.route})"
        )


def _require_apart(granularity: int, artefacts: Sequence[Artefact]) -> None:
    """Several of one granularity make sense when each was tested on other prompts."""
    held_out = [each.about.held_out for each in artefacts]
    if len(set(held_out)) != len(held_out):
        raise ConfigError(
            f"two artefacts of granularity {granularity} hold out the same prompts; train them "
            "with another --held-out each"
        )
    if len({each.about.num_buckets for each in artefacts}) > 1:
        raise ConfigError(
            f"artefacts of granularity {granularity} differ in their buckets; train them on the "
            "same answers"
        )
