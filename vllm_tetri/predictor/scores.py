"""How good guesses are, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_tetri.policy.lengths import HEAVY_TOKENS
from vllm_tetri.predictor.dataset import Buckets, Example
from vllm_tetri.predictor.guesses import Floats, Guesses, Integers

_CONFIDENCE_BINS = 10
_RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)

Metric = Callable[["Truth", Guesses, Integers], float]


@dataclass(frozen=True, slots=True)
class Truth:
    """What the answers turned out to be: tokens, and the buckets they fall into."""

    tokens: Floats
    buckets: Integers


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def text(self, factor: float = 1.0, digits: int = 1, *, signed: bool = False) -> str:
        """``75.3 [72.1, 78.2]``."""
        sign = "+" if signed else ""
        low, high = (f"{each * factor:{sign}.{digits}f}" for each in (self.low, self.high))
        return f"{self.value * factor:{sign}.{digits}f} [{low}, {high}]"


@dataclass(frozen=True, slots=True)
class Reliability:
    """Prompts whose bucket got a probability of about the same size."""

    confidence: float
    accuracy: float
    num: int


def truth_of(examples: Sequence[Example], buckets: Buckets) -> Truth:
    """Of one answer to each prompt."""
    return truth_of_lengths([each.tokens for each in examples], buckets)


def truth_of_lengths(lengths: Sequence[int], buckets: Buckets) -> Truth:
    """Of answers of these lengths, in tokens."""
    return Truth(np.array(lengths, np.float64), np.array([buckets.of(each) for each in lengths]))


def accuracy(truth: Truth, guesses: Guesses, picked: Integers) -> float:
    """Part of the prompts whose bucket is right."""
    return float((truth.buckets[picked] == guesses.buckets[picked]).mean())


def spearman(truth: Truth, guesses: Guesses, picked: Integers) -> float:
    """Rank correlation of expected and true lengths; 0 where all guesses are alike."""
    first, second = ranks(truth.tokens[picked]), ranks(guesses.mean_tokens[picked])
    if first.std() == 0 or second.std() == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def error_tokens(truth: Truth, guesses: Guesses, picked: Integers) -> float:
    """Mean absolute error, in tokens."""
    return float(np.abs(truth.tokens[picked] - guesses.median_tokens[picked]).mean())


def heavy_auc(truth: Truth, guesses: Guesses, picked: Integers) -> float:
    """How often a heavy decode is expected to be longer than a light one; 0.5 is chance."""
    heavy = truth.tokens[picked] > HEAVY_TOKENS
    num_heavy, num_light = int(heavy.sum()), int((~heavy).sum())
    if not num_heavy or not num_light:
        return 0.5
    total = ranks(guesses.mean_tokens[picked])[heavy].sum()
    return float((total - num_heavy * (num_heavy + 1) / 2) / (num_heavy * num_light))


METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "spearman": spearman,
    "mae_tokens": error_tokens,
    "heavy_auc": heavy_auc,
}


def everyone(truth: Truth) -> Integers:
    """All prompts."""
    return np.arange(len(truth.tokens))


def interval(metric: Metric, truth: Truth, guesses: Guesses, seed: int = 0) -> Interval:
    """A metric, over prompts drawn with replacement."""
    values = [metric(truth, guesses, picked) for picked in _draws(truth, seed)]
    return _interval(metric(truth, guesses, everyone(truth)), values)


def difference(
    metric: Metric, truth: Truth, ours: Guesses, other: Guesses, seed: int = 0
) -> Interval:
    """How far two methods lie apart on the same prompts, ours minus the other."""
    values = [
        metric(truth, ours, picked) - metric(truth, other, picked) for picked in _draws(truth, seed)
    ]
    all_of_them = everyone(truth)
    apart = metric(truth, ours, all_of_them) - metric(truth, other, all_of_them)
    return _interval(apart, values)


def skill(own_accuracy: float, majority_accuracy: float) -> float:
    """Part of what the majority bucket gets wrong that is right here; 1 is perfect."""
    return (own_accuracy - majority_accuracy) / max(1 - majority_accuracy, 1e-9)


def reliability(truth: Truth, guesses: Guesses) -> list[Reliability]:
    """Accuracy by confidence, in bins that are not empty; none without probabilities."""
    if guesses.probabilities is None:
        return []
    confidence = guesses.probabilities.max(axis=1)
    right = truth.buckets == guesses.buckets
    bins = np.minimum((confidence * _CONFIDENCE_BINS).astype(int), _CONFIDENCE_BINS - 1)
    return [
        Reliability(
            float(confidence[bins == each].mean()),
            float(right[bins == each].mean()),
            int((bins == each).sum()),
        )
        for each in np.unique(bins)
    ]


def calibration_error(found: list[Reliability]) -> float:
    """Expected calibration error: mean distance of confidence and accuracy."""
    total = sum(each.num for each in found)
    return sum(abs(each.confidence - each.accuracy) * each.num for each in found) / max(total, 1)


def ranks(values: Floats) -> Floats:
    """Ranks from 1; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    shared: Floats = ends - (counts - 1) / 2
    return shared[place]


def _draws(truth: Truth, seed: int) -> Integers:
    rng = np.random.default_rng(seed)
    num = len(truth.tokens)
    return rng.integers(num, size=(_RESAMPLES, num))


def _interval(value: float, values: list[float]) -> Interval:
    low, high = np.percentile(values, _INTERVAL)
    return Interval(value, float(low), float(high))
