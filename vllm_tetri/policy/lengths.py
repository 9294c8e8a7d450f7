"""How long an answer will be, given what was predicted and what it has already.

A predictor names a bucket (paper section 3.3.2); what answers of that bucket turned
out to be is learnt here and tells how many tokens to expect (docs/policies.md).

- One histogram per predicted bucket, one over all answers for those without a
  prediction. Counts are halved when a histogram is full, so it forgets.
- Before anything was seen, a bucket is uniform over its tokens, the last one (which is
  open) goes on for one more granularity in the mean, wherever it is, and an answer
  without a prediction has a granularity of tokens in the mean. That counts as
  `_PRIOR_ANSWERS` observed answers.
- An answer that has outlived its bucket is in the bucket of the tokens that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from statistics import fmean

from vllm_tetri.types import ClusterView, Prediction

# An answer is heavy above this many tokens (paper section 5.1.1).
HEAVY_TOKENS = 128
_BINS_PER_BUCKET = 10
_MAX_BINS = 640  # of one histogram, which many narrow buckets share out
_PRIOR_ANSWERS = 4.0
_FULL_ANSWERS = 1024.0  # of one histogram: it is halved then


class End(StrEnum):
    """Which length of a bucket stands for it (paper section 5.2.3 takes the lower end)."""

    LOWER = "lower"
    EXPECTED = "expected"
    UPPER = "upper"


_EXPECTED, _LOWER = End.EXPECTED, End.LOWER  # an attribute of an enum is slow


class Lengths:
    """What answers turned out to be, per predicted bucket.

    Owner: one thread. A prediction of another granularity than this one's is taken for
    the bucket that its lower end is in.

    Args:
        granularity_tokens: Width of a bucket; the default is the paper's.
        num_buckets: Of the predictor; the last one is open.
    """

    def __init__(self, granularity_tokens: int = 200, num_buckets: int = 10) -> None:
        if granularity_tokens < 1 or num_buckets < 1:
            raise ValueError(f"no buckets: {num_buckets} of {granularity_tokens} tokens")
        self.granularity_tokens = granularity_tokens
        self.num_buckets = num_buckets
        span_tokens = granularity_tokens * num_buckets
        width = max(1, granularity_tokens // _BINS_PER_BUCKET, -(-span_tokens // _MAX_BINS))
        num_bins = -(-span_tokens // width)
        priors = [
            range(start, start + granularity_tokens)
            for start in range(0, span_tokens, granularity_tokens)
        ]
        priors[-1] = range(priors[-1].start, 0)
        self._all = _Histogram(num_bins, width, granularity_tokens, None)
        self._rows = [_Histogram(num_bins, width, granularity_tokens, prior) for prior in priors]

    def observe(self, predicted: Prediction | None, actual_tokens: int) -> None:
        """An answer ended by itself with so many tokens."""
        if actual_tokens < 1:
            return
        self._all.add(actual_tokens)
        if predicted is not None:
            self._row(predicted).add(actual_tokens)

    def total_tokens(self, predicted: Prediction | None, produced_tokens: int, end: End) -> int:
        """Tokens that the whole answer is expected to have.

        Without a prediction there is no bucket, and the open one has no upper end: the
        expected length then stands for every end.

        Args:
            produced_tokens: What it has already.
            end: `EXPECTED` is the mean of the answers that had as many.

        Returns:
            More than `produced_tokens`. The caller caps it by `max_tokens` and window.
        """
        if predicted is None:
            return self._all.expected_tokens(produced_tokens)
        if end is _EXPECTED:
            return self._row(predicted).expected_tokens(produced_tokens)
        granularity = predicted.granularity_tokens
        bucket = max(predicted.bucket, produced_tokens // granularity)
        if end is _LOWER:
            return max(produced_tokens + 1, bucket * granularity)
        if bucket + 1 >= predicted.num_buckets:
            return self._row(predicted).expected_tokens(produced_tokens)
        return (bucket + 1) * granularity

    def _row(self, predicted: Prediction) -> _Histogram:
        bucket = predicted.bucket
        if predicted.granularity_tokens != self.granularity_tokens:
            bucket = bucket * predicted.granularity_tokens // self.granularity_tokens
        rows = self._rows
        return rows[bucket] if bucket < len(rows) else rows[-1]

    def state(self) -> dict[str, object]:
        """Everything learnt, as plain JSON values; see `from_state`."""
        return {
            "granularity_tokens": self.granularity_tokens,
            "num_buckets": self.num_buckets,
            "all": self._all.state(),
            "rows": [row.state() for row in self._rows],
        }

    @classmethod
    def from_state(cls, state: object) -> Lengths:
        """What `state` gave.

        Raises:
            ValueError: It gave something else.
        """
        if not isinstance(state, dict) or set(state) != _STATE_KEYS:
            raise ValueError("not a state of lengths")
        granularity, num_buckets, rows = map(
            state.get, ("granularity_tokens", "num_buckets", "rows")
        )
        if type(granularity) is not int or not 0 < granularity < _TOO_MANY:
            raise ValueError(f"not a state of lengths: granularity {granularity!r}")
        if not isinstance(rows, list) or not rows or len(rows) != num_buckets:
            raise ValueError("not a state of lengths: rows do not match the buckets")
        lengths = cls(granularity, len(rows))
        lengths._all.load(state["all"])
        for histogram, row in zip(lengths._rows, rows, strict=True):
            histogram.load(row)
        return lengths


_STATE_KEYS = {"granularity_tokens", "num_buckets", "all", "rows"}
_TOO_MANY = 1e9


class _Histogram:
    """Lengths of answers in bins, the last of which is open, and the prior.

    Args:
        prior: The tokens of a bucket; only its start counts if it is empty: an open
            one. None for no bucket.
    """

    def __init__(
        self, num_bins: int, width_tokens: int, granularity_tokens: int, prior: range | None
    ) -> None:
        self._width_tokens = width_tokens
        self._granularity_tokens = granularity_tokens
        span = None if prior is None else (prior.start, prior.stop)
        self._prior_tokens = _prior_table(num_bins, width_tokens, granularity_tokens, span)
        self._prior_round = _rounded(self._prior_tokens)
        self._middle_tokens = _middles(num_bins, width_tokens)
        self._counts = [0.0] * num_bins
        self._used_bins = 0  # no answer is in a later one
        self._beyond = [0.0, 0.0]  # answers beyond the bins, and their tokens
        self._num_answers = 0.0
        self._table: list[int] = []  # expected tokens by bin of what is there
        self._rest_tokens = 0  # expected beyond the bins, on top of what is there

    def add(self, num_tokens: int) -> None:
        bin_ = num_tokens // self._width_tokens
        if bin_ < len(self._counts):
            self._counts[bin_] += 1.0
            self._used_bins = max(self._used_bins, bin_ + 1)
        else:
            self._beyond[0] += 1.0
            self._beyond[1] += num_tokens
            self._used_bins = len(self._counts)
        self._num_answers += 1.0
        if self._num_answers >= _FULL_ANSWERS:
            self._counts = [count / 2 for count in self._counts]
            self._beyond = [value / 2 for value in self._beyond]
            self._num_answers /= 2
        self._table = []

    def expected_tokens(self, produced_tokens: int) -> int:
        table = self._table or self._tabulate()
        bin_ = produced_tokens // self._width_tokens
        if bin_ >= len(table):
            return produced_tokens + self._rest_tokens
        expected = table[bin_]
        return expected if expected > produced_tokens else produced_tokens + 1

    def _tabulate(self) -> list[int]:
        """Mean of answers at least as long as the start of each bin, the prior's among them.

        Behind the last bin with an answer that is the prior alone.
        """
        used, (num_beyond, beyond_tokens) = self._used_bins, self._beyond
        counts = self._counts[:used]
        sums = [count * middle for count, middle in zip(counts, self._middle_tokens, strict=False)]
        answers = list(accumulate(reversed(counts), initial=num_beyond))
        tokens = list(accumulate(reversed(sums), initial=beyond_tokens))
        table = self._table = [
            round((_PRIOR_ANSWERS * prior_tokens + its_tokens) / (_PRIOR_ANSWERS + its_answers))
            for prior_tokens, its_tokens, its_answers in zip(
                self._prior_tokens, reversed(tokens), reversed(answers), strict=False
            )
        ]
        del table[used:]
        table += self._prior_round[used:]
        end_tokens = len(self._counts) * self._width_tokens
        excess_tokens = max(0.0, beyond_tokens - num_beyond * end_tokens)
        self._rest_tokens = max(
            1,
            round(
                (_PRIOR_ANSWERS * self._granularity_tokens + excess_tokens)
                / (_PRIOR_ANSWERS + num_beyond)
            ),
        )
        return table

    def state(self) -> list[float]:
        """Counts, then answers and tokens beyond them."""
        return [*self._counts, *self._beyond]

    def load(self, state: object) -> None:
        if not isinstance(state, Sequence) or len(state) != len(self._counts) + 2:
            raise ValueError("not a histogram of lengths: wrong size")
        if not all(type(value) in (int, float) and 0 <= value < _TOO_MANY for value in state):
            raise ValueError("not a histogram of lengths: counts are numbers from 0 on")
        values = [float(value) for value in state]
        self._counts, self._beyond = values[:-2], values[-2:]
        self._used_bins = len(values) - 2
        self._num_answers = sum(self._counts) + self._beyond[0]
        self._table = []


@lru_cache(maxsize=256)
def _middles(num_bins: int, width_tokens: int) -> tuple[float, ...]:
    """What stands for an answer of each bin."""
    return tuple(bin_ * width_tokens + (width_tokens - 1) / 2 for bin_ in range(num_bins))


@lru_cache(maxsize=256)
def _prior_table(
    num_bins: int, width_tokens: int, granularity_tokens: int, span: tuple[int, int] | None
) -> tuple[float, ...]:
    """`_prior_tokens` at the start of each bin; empty ranges are all equal, so none is a key."""
    prior = None if span is None else range(*span)
    return tuple(
        _prior_tokens(bin_ * width_tokens, granularity_tokens, prior) for bin_ in range(num_bins)
    )


@lru_cache(maxsize=256)
def _rounded(tokens: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(map(round, tokens))


def _prior_tokens(produced_tokens: int, granularity: int, prior: range | None) -> float:
    """Mean before anything was seen, of answers of at least `produced_tokens`."""
    if prior is None:
        return produced_tokens + granularity
    if not prior and produced_tokens >= prior.start:  # geometric: it has no memory
        return produced_tokens + granularity
    if not prior:
        return prior.start + granularity
    if produced_tokens < prior.stop:
        return (max(prior.start, produced_tokens) + prior.stop - 1) / 2
    end_tokens = (produced_tokens // granularity + 1) * granularity
    return (produced_tokens + end_tokens - 1) / 2


def reported_tokens(view: ClusterView, num_buckets: int) -> list[float]:
    """What instances report of answers by predicted bucket, then without a prediction: means
    over those that have seen answers end, empty if none has."""
    rows = [
        each.load.bucket_tokens
        for each in view.instances
        if len(each.load.bucket_tokens) == num_buckets + 1
    ]
    return [fmean(column) for column in zip(*rows, strict=True)]
