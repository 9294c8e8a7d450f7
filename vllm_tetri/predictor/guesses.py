"""Guesses of answer lengths: a predictor's, and the trivial ones it has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.predictor.artefact import Artefact, median_bucket
from vllm_tetri.predictor.dataset import Buckets, Dataset, Example

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_BATCH = 32
# Bins of equal numbers of training prompts; the best on the validation part is taken.
_BIN_COUNTS = (4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Guesses:
    """What one method says of every prompt.

    Attributes:
        buckets: The bucket it names.
        probabilities: Of every bucket, a row per prompt; None where it gives none.
        median_tokens: Its guess of the length, for the error in tokens.
        mean_tokens: Its expectation, for ranking.
    """

    buckets: Integers
    probabilities: Floats | None
    median_tokens: Floats
    mean_tokens: Floats


class Known:
    """Lengths of training answers: turns probabilities of buckets into tokens."""

    def __init__(self, train: Sequence[Example], buckets: Buckets) -> None:
        self._tokens: Floats = np.sort(np.array([each.tokens for each in train], np.float64))
        self._buckets: Integers = np.array([buckets.of(tokens) for tokens in self._tokens])
        self._counts: Integers = np.bincount(self._buckets, minlength=buckets.num)

    @property
    def frequencies(self) -> Floats:
        """Of the buckets."""
        parts: Floats = self._counts / self._counts.sum()
        return parts

    def guesses(self, probabilities: Floats) -> Guesses:
        """Mean and median of the training answers, weighed so that every bucket has its
        probability."""
        weights = (probabilities / np.maximum(self._counts, 1))[:, self._buckets]
        weights /= weights.sum(axis=1, keepdims=True)
        at = (np.cumsum(weights, axis=1) < 0.5).sum(axis=1).clip(max=len(self._tokens) - 1)
        return Guesses(
            buckets=probabilities.argmax(axis=1),
            probabilities=probabilities,
            median_tokens=self._tokens[at],
            mean_tokens=(weights @ self._tokens).round(3),  # equal rows, equal ranks
        )


def majority(known: Known, num: int) -> Guesses:
    """Always the commonest bucket."""
    return known.guesses(np.tile(known.frequencies, (num, 1)))


def by_prompt_length(known: Known, buckets: Buckets, parts: Dataset) -> Guesses:
    """Frequencies of the buckets among training prompts of about the same length."""
    fits = [_Bins(known, buckets, parts.train, count) for count in _BIN_COUNTS]
    truth = np.array([buckets.of(each.tokens) for each in parts.validation])
    losses = [
        -np.log(bins.probabilities(parts.validation)[np.arange(len(truth)), truth] + 1e-9).mean()
        for bins in fits
    ]
    return known.guesses(fits[int(np.argmin(losses))].probabilities(parts.test))


def predicted(artefact: Artefact, examples: Sequence[Example]) -> Floats:
    """Probabilities of a predictor's buckets, a row per prompt."""
    encoded = [artefact.encode(example.text) for example in examples]
    rows = np.zeros((len(examples), artefact.about.num_buckets))
    order = sorted(range(len(examples)), key=lambda index: len(encoded[index]))
    for start in range(0, len(order), _BATCH):
        part = order[start : start + _BATCH]
        rows[part] = artefact.classify([encoded[index] for index in part])
    return rows


def coarser(rows: Floats, factor: int) -> Floats:
    """Probabilities of buckets `factor` times as wide."""
    starts = np.arange(0, rows.shape[1], factor)
    added: Floats = np.add.reduceat(rows, starts, axis=1)
    return added


def served(known: Known, rows: Floats) -> Guesses:
    """What travels with a request: nothing but the bucket of the median."""
    picked = np.array([median_bucket(row) for row in rows.tolist()], np.int64)
    alone = known.guesses(np.eye(rows.shape[1])[picked])
    return Guesses(picked, None, alone.median_tokens, alone.mean_tokens)


def as_answered(lengths: Sequence[int], buckets: Buckets) -> Guesses:
    """Another answer of the target itself."""
    tokens = np.array(lengths, np.float64)
    return Guesses(
        buckets=np.array([buckets.of(each) for each in lengths], np.int64),
        probabilities=None,
        median_tokens=tokens,
        mean_tokens=tokens,
    )


def joined(parts: Sequence[Guesses]) -> Guesses:
    """Guesses of one method about several groups of prompts, one behind the other."""
    rows = [each.probabilities for each in parts if each.probabilities is not None]
    return Guesses(
        buckets=np.concatenate([each.buckets for each in parts]),
        probabilities=np.concatenate(rows) if len(rows) == len(parts) else None,
        median_tokens=np.concatenate([each.median_tokens for each in parts]),
        mean_tokens=np.concatenate([each.mean_tokens for each in parts]),
    )


class _Bins:
    """Frequencies of buckets by length of prompt, drawn towards the overall ones."""

    def __init__(
        self, known: Known, buckets: Buckets, train: Sequence[Example], count: int
    ) -> None:
        lengths = np.array([each.prompt_tokens for each in train], np.float64)
        self._edges = np.unique(np.quantile(lengths, np.linspace(0, 1, count + 1)[1:-1]))
        self._rows = np.tile(known.frequencies, (len(self._edges) + 1, 1))
        for each in train:
            self._rows[self._bin(each), buckets.of(each.tokens)] += 1
        self._rows /= self._rows.sum(axis=1, keepdims=True)

    def probabilities(self, examples: Sequence[Example]) -> Floats:
        """A row per prompt."""
        rows: Floats = self._rows[[self._bin(each) for each in examples]]
        return rows

    def _bin(self, example: Example) -> int:
        return int(np.searchsorted(self._edges, example.prompt_tokens, side="right"))
