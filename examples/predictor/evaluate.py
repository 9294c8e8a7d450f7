"""Compare predictors with trivial guesses: `python -m examples.predictor.evaluate OUTPUTS DIR ...`

Every prompt is scored by a predictor that held it out; several predictors hold out different
quarters. The table has 95 % bootstrap intervals, and rows for buckets two and four times as wide.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu, spearmanr

from examples.predictor.model import Artefact, load, median_bucket
from examples.predictor.outputs import Buckets, Example, read_outputs, split
from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.lengths import HEAVY_TOKENS

Floats = NDArray[np.float64]
FACTORS = (1, 2, 4)  # coarser buckets come from adding up finer ones
_BATCH, _BINS = 32, 16


class Guess(NamedTuple):
    """What one method predicts of every prompt: its bucket, and two estimates of its length."""

    buckets: NDArray[np.int64]
    mean_tokens: Floats
    median_tokens: Floats


def predicted(artefact: Artefact, examples: Sequence[Example]) -> Floats:
    """Probabilities of a predictor's buckets, a row per prompt."""
    encoded = [artefact.encode(each.text) for each in examples]
    rows = np.zeros((len(examples), artefact.about.num_buckets))
    order = sorted(range(len(examples)), key=lambda index: len(encoded[index]))
    for start in range(0, len(order), _BATCH):
        part = order[start : start + _BATCH]
        rows[part] = artefact.classify([encoded[index] for index in part])
    return rows


def majority(train: Sequence[Example], buckets: Buckets, num: int) -> Floats:
    """Frequencies of the buckets, the same row for every prompt."""
    counts = np.bincount([buckets.of(each.tokens) for each in train], minlength=buckets.num)
    return np.tile(counts / counts.sum(), (num, 1))


def by_prompt_length(train: Sequence[Example], test: Sequence[Example], buckets: Buckets) -> Floats:
    """Frequencies of the buckets among training prompts of about the same length."""
    lengths = np.array([each.prompt_tokens for each in train], np.float64)
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, _BINS + 1)[1:-1]))
    rows = majority(train, buckets, len(edges) + 1)  # draws small bins to the overall row
    for each in train:
        rows[np.searchsorted(edges, each.prompt_tokens, "right"), buckets.of(each.tokens)] += 1
    rows /= rows.sum(axis=1, keepdims=True)
    found: Floats = rows[np.searchsorted(edges, [each.prompt_tokens for each in test], "right")]
    return found


def guess_of(rows: Floats, train: Sequence[Example], buckets: Buckets) -> Guess:
    """Turn probabilities into lengths: training outputs, weighted so that every bucket has its
    probability."""
    tokens = np.sort(np.array([each.tokens for each in train], np.float64))
    of_token = np.array([buckets.of(each) for each in tokens])
    counts = np.bincount(of_token, minlength=buckets.num)
    weights = (rows / np.maximum(counts, 1))[:, of_token]
    weights /= weights.sum(axis=1, keepdims=True)
    at = (np.cumsum(weights, axis=1) < 0.5).sum(axis=1).clip(max=len(tokens) - 1)
    return Guess(rows.argmax(axis=1), (weights @ tokens).round(3), tokens[at])


def served(rows: Floats) -> Floats:
    """What travels with a request: nothing but the bucket of the median."""
    return np.eye(rows.shape[1])[[median_bucket(row) for row in rows.tolist()]]


def scores_of(tokens: Floats, guess: Guess, buckets: Buckets) -> dict[str, float]:
    """Accuracy, rank correlation, mean absolute error, and how often a heavy decode (paper
    section 3.3.4) is expected to be longer than a light one."""
    right = np.array([buckets.of(each) for each in tokens]) == guess.buckets
    heavy = tokens > HEAVY_TOKENS
    is_ranking = len(np.unique(guess.mean_tokens)) > 1 and len(np.unique(tokens)) > 1
    auc = 0.5
    if heavy.any() and not heavy.all():
        longer = mannwhitneyu(guess.mean_tokens[heavy], guess.mean_tokens[~heavy]).statistic
        auc = float(longer / (heavy.sum() * (~heavy).sum()))
    return {
        "accuracy": float(right.mean()),
        "spearman": float(spearmanr(tokens, guess.mean_tokens).statistic) if is_ranking else 0.0,
        "mae_tokens": float(np.abs(tokens - guess.median_tokens).mean()),
        "heavy_auc": auc,
    }


def with_intervals(tokens: Floats, guess: Guess, buckets: Buckets, num: int) -> dict[str, str]:
    """Scores with their 95 % bootstrap intervals over prompts, out of `num` resamples."""
    rng = np.random.default_rng(0)
    draws = rng.integers(len(tokens), size=(num, len(tokens)))
    drawn = [scores_of(tokens[at], Guess(*(each[at] for each in guess)), buckets) for at in draws]
    low, high = pd.DataFrame(drawn).quantile([0.025, 0.975]).to_dict("records")
    return {
        name: f"{value:.3g} [{low[name]:.3g}, {high[name]:.3g}]"
        for name, value in scores_of(tokens, guess, buckets).items()
    }


def evaluate(path: Path, artefacts: Sequence[Artefact], resamples: int) -> pd.DataFrame:
    """A row per width and method, over the prompts that the predictors held out; ConfigError if
    their buckets differ, or they hold out the same prompts."""
    outputs = read_outputs(path)
    found_buckets = {Buckets(a.about.num_buckets, a.about.granularity_tokens) for a in artefacts}
    if len(found_buckets) > 1 or len({a.about.held_out for a in artefacts}) < len(artefacts):
        raise ConfigError("predictors need the same buckets, and different --held-out quarters")
    (fine,) = found_buckets
    asked = [(split(outputs.examples, each.about.held_out), each) for each in artefacts]
    found = [(parts, predicted(each, parts.test)) for parts, each in asked]
    tokens = np.array([each.tokens for parts, _ in found for each in parts.test], np.float64)
    table = []
    for buckets in (fine.coarser(factor) for factor in FACTORS):
        starts = np.arange(0, fine.num, buckets.width // fine.width)
        guesses: dict[str, list[Guess]] = {}
        for parts, fine_rows in found:
            rows = np.add.reduceat(fine_rows, starts, axis=1)
            methods = {
                "commonest bucket": majority(parts.train, buckets, len(rows)),
                "prompt length": by_prompt_length(parts.train, parts.test, buckets),
                "likeliest bucket": rows,
                "median bucket, as served": served(rows),
            }
            for name, each in methods.items():
                guesses.setdefault(name, []).append(guess_of(each, parts.train, buckets))
        for name, parted in guesses.items():
            joined = Guess(*(np.concatenate(column) for column in zip(*parted, strict=True)))
            scores = with_intervals(tokens, joined, buckets, resamples)
            table.append({"tokens per bucket": buckets.width, "method": name, **scores})
    return pd.DataFrame(table)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("outputs", type=Path, help="file that collect.py has written")
    parser.add_argument("predictors", type=Path, nargs="+", help="folders of train.py")
    parser.add_argument("--resamples", type=int, default=500, help="(%(default)s)")
    parser.add_argument("--csv", type=Path, help="write the table there, too")
    options = parser.parse_args(words)
    try:
        artefacts = [load(each, num_threads=os.cpu_count() or 1) for each in options.predictors]
        table = evaluate(options.outputs, artefacts, options.resamples)
    except ConfigError as error:
        print(error)
        return 2
    print(table.to_string(index=False))
    if options.csv is not None:
        table.to_csv(options.csv, index=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
