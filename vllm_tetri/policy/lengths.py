"""How long an output will be, given what was predicted and what it has already.

A predictor names a bucket (paper section 3.3.2); what outputs of that bucket turned
out to be is learnt here and tells how many tokens to expect (docs/policies.md).

- One histogram per predicted bucket, one over all outputs for those without a
  prediction. Counts are halved when a histogram is full, so it forgets.
- Before anything was seen, a bucket is uniform over its tokens, the last one (which is
  open) goes on for one more granularity in the mean, wherever it is, and an output
  without a prediction has a granularity of tokens in the mean. That counts as
  `_PRIOR_OUTPUTS` observed outputs.
- An output that has outlived its bucket is in the bucket of the tokens that it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from math import inf
from typing import Any, Protocol

from vllm_tetri.types import Prediction

# An output is heavy above this many tokens (paper section 5.1.1).
HEAVY_TOKENS = 128
_BINS_PER_BUCKET = 10
_MAX_BINS = 640  # of one histogram, which many narrow buckets share out
_PRIOR_OUTPUTS = 4.0
_FULL_OUTPUTS = 1024.0  # of one histogram: it is halved then


class End(StrEnum):
    """Which length of a bucket stands for it (paper section 5.2.3 takes the lower end)."""

    LOWER = "lower"
    EXPECTED = "expected"
    UPPER = "upper"


class Lengths:
    """What outputs turned out to be, per predicted bucket of `granularity_tokens`; the last one
    is open. Owner: one thread. The defaults are the paper's. A prediction of another granularity
    is taken for the bucket that its lower end is in."""

    def __init__(self, granularity_tokens: int = 200, num_buckets: int = 10) -> None:
        self.granularity_tokens = granularity_tokens
        self.num_buckets = num_buckets
        span_tokens = granularity_tokens * num_buckets
        width = max(1, granularity_tokens // _BINS_PER_BUCKET, -(-span_tokens // _MAX_BINS))
        num_bins = -(-span_tokens // width)

        def histogram(start: int, stop: int) -> _Histogram:
            bins = range(0, num_bins * width, width)
            prior = [_prior_tokens(bin_, granularity_tokens, start, stop) for bin_ in bins]
            return _Histogram(width, granularity_tokens, prior)

        starts = range(0, span_tokens - granularity_tokens, granularity_tokens)
        self._all = histogram(0, 0)
        self._rows = [histogram(start, start + granularity_tokens) for start in starts]
        self._rows.append(histogram(span_tokens - granularity_tokens, 0))

    def observe(self, predicted: Prediction | None, actual_tokens: int) -> None:
        """Learn from an output that ended by itself."""
        if actual_tokens < 1:
            return
        self._all.add(actual_tokens)
        if predicted is not None:
            self._row(predicted).add(actual_tokens)

    def total_tokens(self, predicted: Prediction | None, produced_tokens: int, end: End) -> int:
        """Return the tokens that the whole output is expected to have: more than
        `produced_tokens`, and not yet capped by `max_tokens` and window.

        `EXPECTED` is the mean of the outputs that had as many. It stands for every end without a
        prediction, and for the upper end of the open bucket.
        """
        if predicted is None:
            return self._all.expected_tokens(produced_tokens)
        if end is End.EXPECTED:
            return self._row(predicted).expected_tokens(produced_tokens)
        granularity = predicted.granularity_tokens
        bucket = max(predicted.bucket, produced_tokens // granularity)
        if end is End.LOWER:
            return max(produced_tokens + 1, bucket * granularity)
        if bucket + 1 >= predicted.num_buckets:
            return self._row(predicted).expected_tokens(produced_tokens)
        return (bucket + 1) * granularity

    def bucket_tokens(self) -> tuple[int, ...]:
        """Expected tokens of an output by predicted bucket, at the end without a prediction;
        empty before any output ended (any thread)."""
        if not self._all.num_outputs:
            return ()
        return tuple(row.expected_tokens(0) for row in (*self._rows, self._all))

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
            "all": self._all.values,
            "rows": [row.values for row in self._rows],
        }

    @classmethod
    def from_state(cls, state: Any) -> Lengths:
        """Return what `state` was taken from; ValueError if that is something else."""
        try:
            rows = state["rows"]
            if len(rows) != state["num_buckets"]:
                raise ValueError("rows do not match the buckets")
            lengths = cls(state["granularity_tokens"], len(rows))
            for histogram, row in zip(lengths._rows, rows, strict=True):
                histogram.load(row)
            lengths._all.load(state["all"])
        except (LookupError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"not a state of lengths: {error!r}") from error
        return lengths


class _Histogram:
    """Lengths of outputs in bins, and `_prior_tokens` at the start of each. `values` are the counts
    of the bins, then the outputs that are longer than the last bin, and their tokens."""

    def __init__(self, width_tokens: int, granularity_tokens: int, prior: list[float]) -> None:
        self._width_tokens = width_tokens
        self._granularity_tokens = granularity_tokens
        self._prior_tokens = prior
        self.values = [0.0] * (len(prior) + 2)
        self.num_outputs = 0.0
        self._table: list[int] = []  # expected tokens by bin of what is there
        self._rest_tokens = 0  # expected beyond the bins, on top of what is there

    def add(self, num_tokens: int) -> None:
        num_bins, bin_ = len(self._prior_tokens), num_tokens // self._width_tokens
        self.values[min(bin_, num_bins)] += 1.0
        if bin_ >= num_bins:
            self.values[-1] += num_tokens
        self.num_outputs += 1.0
        if self.num_outputs >= _FULL_OUTPUTS:
            self.values = [value / 2 for value in self.values]
            self.num_outputs /= 2
        self._table = []

    def expected_tokens(self, produced_tokens: int) -> int:
        table = self._table or self._tabulate()
        bin_ = produced_tokens // self._width_tokens
        if bin_ >= len(table):
            return produced_tokens + self._rest_tokens
        expected = table[bin_]
        return expected if expected > produced_tokens else produced_tokens + 1

    def _tabulate(self) -> list[int]:
        """Tabulate the mean of outputs at least as long as the start of each bin, the prior's
        among them."""
        *counts, num_beyond, beyond_tokens = self.values
        middle = (self._width_tokens - 1) / 2
        sums = [count * (bin_ * self._width_tokens + middle) for bin_, count in enumerate(counts)]
        outputs = list(accumulate(reversed(counts), initial=num_beyond))
        tokens = list(accumulate(reversed(sums), initial=beyond_tokens))
        table = self._table = [
            round((_PRIOR_OUTPUTS * prior + its_tokens) / (_PRIOR_OUTPUTS + its_outputs))
            for prior, its_tokens, its_outputs in zip(
                self._prior_tokens, tokens[:0:-1], outputs[:0:-1], strict=True
            )
        ]
        excess_tokens = max(0.0, beyond_tokens - num_beyond * len(counts) * self._width_tokens)
        prior_tokens = _PRIOR_OUTPUTS * self._granularity_tokens
        rest_tokens = (prior_tokens + excess_tokens) / (_PRIOR_OUTPUTS + num_beyond)
        self._rest_tokens = max(1, round(rest_tokens))
        return table

    def load(self, values: list[float]) -> None:
        if len(values) != len(self.values) or not all(0 <= each < inf for each in values):
            raise ValueError("a histogram has another size, or no counts from 0 on")
        self.values = [*map(float, values)]
        self.num_outputs = sum(self.values[:-1])
        self._table = []


def _prior_tokens(produced_tokens: int, granularity: int, start: int, stop: int) -> float:
    """Mean before any output was seen, of outputs of at least `produced_tokens`: geometric, and
    so without a memory, where there is no `stop`; uniform in any other bucket."""
    if not stop:
        return max(start, produced_tokens) + granularity
    if produced_tokens >= stop:  # it has outlived its bucket
        start, stop = 0, (produced_tokens // granularity + 1) * granularity
    return (max(start, produced_tokens) + stop - 1) / 2


class RequestView(Protocol):
    """What policies read of a request; vLLM's `Request` and the simulator's fit as they are."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...  # prompt and output so far
    @property
    def num_computed_tokens(self) -> int: ...  # tokens whose KV is computed
    @property
    def num_output_tokens(self) -> int: ...  # so far
    @property
    def num_output_placeholders(self) -> int: ...  # sampled by a step under way
    @property
    def max_tokens(self) -> int: ...  # bound on the output of this instance
    @property
    def priority(self) -> int: ...  # the smaller, the earlier it is computed


@dataclass(frozen=True, slots=True)
class OutputLengths:
    """How long the outputs of one instance's requests will be, by what is predicted of them."""

    lengths: Lengths
    predict: Callable[[str], Prediction | None]  # what is predicted of a request, by its id
    window: int  # the longest prompt plus output, in tokens

    def total_tokens(self, request: RequestView, end: End, *, produced_tokens: int) -> int:
        """Return the tokens of the whole output, given that it has `produced_tokens`: more than
        those, and no more than `max_tokens` and the window allow (any thread)."""
        predicted = self.predict(request.request_id)
        total_tokens = self.lengths.total_tokens(predicted, produced_tokens, end)
        most_tokens = min(request.max_tokens, self.window - request.num_prompt_tokens)
        return max(produced_tokens + 1, min(total_tokens, most_tokens))
