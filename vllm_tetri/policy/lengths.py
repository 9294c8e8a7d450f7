"""How long an output will be, given what was predicted and what it has already.

A predictor gives equally likely lengths (`Prediction`); what outputs turned out to be is learnt
here and corrects them (docs/policies.md).

- A line from the logarithms of predicted means to those of lengths tells what a mean is worth, and
  how far the mean of outputs is off it: where a predictor knows nothing the line is flat. All
  lengths of a prediction are scaled by that. Outputs that the client's limit cut count as
  well, and what was predicted up to that limit: else only the short ones would.
- The lengths at both ends are moved after every output, so that `_OUTSIDE` of the outputs are
  below the lower one and as many above the upper one, whatever a predictor says and however
  traffic shifts (quantile tracking: Angelopoulos et al., Conformal PID control, 2023).
- Without a prediction, and beyond all that was predicted, the outputs of the request's route
  count, or of all routes while it has few. Before anything was seen the mean of what is left is
  `_PRIOR_TOKENS`.
- Counts are halved when there are `_FULL_OUTPUTS`, so it forgets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from math import exp, inf, log
from operator import add
from typing import Any, Protocol

from vllm_tetri.types import NUM_LENGTHS, Prediction

# An output is heavy above this many tokens (paper section 5.1.1).
HEAVY_TOKENS = 128
_BIN_TOKENS, _NUM_BINS = 16, 640
_PRIOR_OUTPUTS, _PRIOR_TOKENS = 4.0, 200
_FULL_OUTPUTS = 1024.0  # of one histogram, or with predictions: counts are halved then
# Of some outputs that were as predicted: their number, the sums of the logarithms that were said
# and that were, of the squares of the former and of the products, and of tokens, and by the line.
_PRIOR_SUMS = 8.0, 40.0, 40.0, 208.0, 208.0, 2000.0, 2000.0
_MOST_ROUTES, _ROUTE_OUTPUTS = 32, 32  # routes, and outputs from which on one counts alone
_OUTSIDE = 0.05  # of outputs, on either side of the ends
_TRACKING = 0.1  # of the logarithm of an end, for an output outside
_MOST_SHIFT = 5.0
_MEMORY_OUTPUTS = 256  # of the coverage


class End(StrEnum):
    """Which length of a distribution stands for it (paper section 5.2.3 takes the lower end)."""

    LOWER = "lower"  # 5 % of outputs are shorter
    EXPECTED = "expected"
    UPPER = "upper"  # 5 % of outputs are longer


class Lengths:
    """What outputs turned out to be. Owner: one thread. `coverage` is the part of the newest
    outputs with a prediction that were between its ends."""

    def __init__(self) -> None:
        self._all = _Histogram()
        self._routes: dict[str, _Histogram] = {}
        self._sums = [0.0] * len(_PRIOR_SUMS)  # as those, of outputs
        self._line = (0.0, 1.0, 1.0)  # offset, slope and factor
        self._ends = [0.0, 0.0]  # logarithms by which the lower and the upper one are moved
        self.coverage, self._num_covered = 1 - 2 * _OUTSIDE, 0

    def observe(
        self,
        predicted: Prediction | None,
        actual_tokens: int,
        route: str = "",
        most_tokens: int = 1 << 53,
        *,
        is_cut: bool = False,
    ) -> None:
        """Learn from an output that ended by itself, or that `most_tokens` cut (`is_cut`)."""
        if actual_tokens < 1:
            return
        if not is_cut:
            self._all.add(actual_tokens)
            own = self._routes.pop(route, None) or _Histogram()
            own.add(actual_tokens)
            self._routes[route] = own  # the last: adapters come and go
            if len(self._routes) > _MOST_ROUTES:
                del self._routes[next(iter(self._routes))]
        if predicted is None or len(predicted.lengths) == 1:
            return
        if not is_cut:
            self._track_ends(predicted.lengths, actual_tokens)
        lengths = _up_to(predicted.lengths, most_tokens)
        said, was = log(sum(lengths) / NUM_LENGTHS + 1), log(actual_tokens + 1)
        by_line = self._factor(lengths) * sum(lengths) / NUM_LENGTHS / self._line[-1]
        new = 1.0, said, was, said * said, said * was, actual_tokens, by_line
        kept = 0.5 if self._sums[0] >= _FULL_OUTPUTS else 1.0
        self._sums = [kept * each + one for each, one in zip(self._sums, new, strict=True)]
        self._fit()

    def _track_ends(self, lengths: tuple[float, ...], actual_tokens: int) -> None:
        lower, upper = self._between(lengths)
        outside = actual_tokens < lower, actual_tokens > upper
        self._num_covered = min(self._num_covered + 1, _MEMORY_OUTPUTS)
        self.coverage += (1 - sum(outside) - self.coverage) / self._num_covered
        moves = [_TRACKING * (each - _OUTSIDE) for each in outside]
        self._ends = [_bounded(end + move) for end, move in zip(self._ends, moves, strict=True)]

    def _fit(self) -> None:
        sums = map(add, _PRIOR_SUMS, self._sums)
        count, said, was, squares, products, tokens, by_line = sums
        slope = (products - said * was / count) / max(1.0, squares - said * said / count)
        self._line = ((was - slope * said) / count, slope, tokens / by_line)

    def _factor(self, lengths: tuple[float, ...]) -> float:
        if len(lengths) == 1:
            return 1.0
        (offset, slope, factor), mean = self._line, log(sum(lengths) / NUM_LENGTHS + 1)
        return factor * exp(_bounded(offset + slope * mean - mean))

    def _between(self, lengths: tuple[float, ...]) -> tuple[float, float]:
        low, high = self._ends if len(lengths) > 1 else (0.0, 0.0)
        factor = self._factor(lengths)
        return factor * lengths[0] * exp(-low), factor * lengths[-1] * exp(high)

    def total_tokens(
        self,
        predicted: Prediction | None,
        produced_tokens: int,
        end: End,
        route: str = "",
        most_tokens: int = 1 << 53,
    ) -> int:
        """Return the expected tokens of the whole output: more than `produced_tokens`, else at most
        `most_tokens`. Without a prediction the mean stands for every end."""
        if predicted is not None and end is not End.EXPECTED:
            total = round(self._between(predicted.lengths)[end is End.UPPER])
            if total > produced_tokens or end is End.LOWER:
                return max(produced_tokens + 1, min(total, most_tokens))
            predicted = None
        return self.outlook(predicted, produced_tokens, route, most_tokens)[0]

    def outlook(
        self,
        predicted: Prediction | None,
        produced_tokens: int,
        route: str = "",
        most_tokens: int = 1 << 53,
    ) -> tuple[int, float]:
        """Return the expected tokens of the whole output, and the probability that it is heavy, of
        the outputs that had `produced_tokens` and more, all of which end at `most_tokens`."""
        if predicted is not None:
            lengths = _up_to(predicted.lengths, most_tokens)
            factor, count = self._factor(lengths), len(lengths)
            first = bisect_right(lengths, produced_tokens / factor)
            if left := lengths[first:]:
                left = _up_to(left, most_tokens / factor)
                total = round(sum(left) * factor / len(left))
                num_heavy = count - max(first, bisect_right(lengths, HEAVY_TOKENS / factor))
                is_long = most_tokens > HEAVY_TOKENS
                return max(total, produced_tokens + 1), is_long * num_heavy / len(left)
        usual = self._usual(route)
        heavy = usual.heavy_part(produced_tokens) if most_tokens > HEAVY_TOKENS else 0.0
        return max(
            min(usual.expected_tokens(produced_tokens), most_tokens), produced_tokens + 1
        ), heavy

    def usual_tokens(self) -> int:
        """Return the expected tokens of any output; 0 before one ended (any thread)."""
        return self._all.expected_tokens(0) if self._all.num_outputs else 0

    def _usual(self, route: str) -> _Histogram:
        own = self._routes.get(route)
        return self._all if own is None or own.num_outputs < _ROUTE_OUTPUTS else own

    def state(self) -> dict[str, object]:
        """Everything learnt, as plain JSON values; see `from_state`."""
        return {
            "all": [*self._all.values],
            "routes": {route: [*each.values] for route, each in self._routes.items()},
            "sums": self._sums,
            "ends": self._ends,
        }

    @classmethod
    def from_state(cls, state: Any) -> Lengths:
        """Return what `state` was taken from; ValueError if that is something else."""
        lengths = cls()
        try:
            lengths._all.load(state["all"])
            for route, values in state["routes"].items():
                lengths._routes.setdefault(str(route), _Histogram()).load(values)
            if len(lengths._routes) > _MOST_ROUTES:
                raise ValueError("too many routes")
            lengths._sums = _sound(state["sums"], len(_PRIOR_SUMS))
            lengths._fit()
            lengths._ends = [*map(_bounded, _sound(state["ends"], 2, least=-_MOST_SHIFT))]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"not a state of lengths: {error!r}") from error
        return lengths


def _sound(values: Any, count: int, least: float = 0.0) -> list[float]:
    """Return so many finite numbers of at least that; ValueError if they are something else."""
    numbers = [*map(float, values)]
    if len(numbers) != count or not all(least <= each < inf for each in numbers):
        raise ValueError("too many or too few numbers, or some that are none")
    return numbers


def _bounded(shift: float) -> float:
    return max(-_MOST_SHIFT, min(_MOST_SHIFT, shift))


def _up_to(lengths: tuple[float, ...], most_tokens: float) -> tuple[float, ...]:
    """Return lengths as they are if outputs end at `most_tokens`."""
    if lengths[-1] <= most_tokens:
        return lengths
    return tuple([min(each, most_tokens) for each in lengths])


class _Histogram:
    """Lengths of outputs in bins. `values` are the counts of the bins, then the outputs that are
    longer than the last bin, and their tokens."""

    def __init__(self) -> None:
        self.values = [0.0] * (_NUM_BINS + 2)
        self.num_outputs = 0.0
        self._table: list[int] = []  # expected tokens by bin of what is there
        self._outlived: list[float] = []  # outputs of at least as many tokens, by bin
        self._rest_tokens = 0  # expected beyond the bins, on top of what is there

    def add(self, num_tokens: int) -> None:
        bin_ = num_tokens // _BIN_TOKENS
        self.values[min(bin_, _NUM_BINS)] += 1.0
        if bin_ >= _NUM_BINS:
            self.values[-1] += num_tokens
        self.num_outputs += 1.0
        if self.num_outputs >= _FULL_OUTPUTS:
            self.values = [value / 2 for value in self.values]
            self.num_outputs /= 2
        self._table = []

    def expected_tokens(self, produced_tokens: int) -> int:
        table = self._table or self._tabulate()
        bin_ = produced_tokens // _BIN_TOKENS
        if bin_ >= len(table):
            return produced_tokens + self._rest_tokens
        expected = table[bin_]
        return expected if expected > produced_tokens else produced_tokens + 1

    def heavy_part(self, produced_tokens: int) -> float:
        """Return the part of the outputs with `produced_tokens` and more that is heavy."""
        if produced_tokens > HEAVY_TOKENS:
            return 1.0
        if not self._table:
            self._tabulate()
        prior = _PRIOR_OUTPUTS * exp((produced_tokens - HEAVY_TOKENS) / _PRIOR_TOKENS)
        heavy = prior + self._outlived[HEAVY_TOKENS // _BIN_TOKENS]
        return heavy / (_PRIOR_OUTPUTS + self._outlived[produced_tokens // _BIN_TOKENS])

    def _tabulate(self) -> list[int]:
        """Tabulate the mean of outputs at least as long as the start of each bin, the prior's
        among them: geometric, and so without a memory."""
        *counts, num_beyond, beyond_tokens = self.values
        middle = (_BIN_TOKENS - 1) / 2
        sums = [count * (bin_ * _BIN_TOKENS + middle) for bin_, count in enumerate(counts)]
        outputs = list(accumulate(reversed(counts), initial=num_beyond))[:0:-1]
        tokens = list(accumulate(reversed(sums), initial=beyond_tokens))[:0:-1]
        self._outlived = outputs  # first, as another thread may read while there is a table
        table = self._table = [
            round(
                (_PRIOR_OUTPUTS * (bin_ * _BIN_TOKENS + _PRIOR_TOKENS) + its_tokens)
                / (_PRIOR_OUTPUTS + its_outputs)
            )
            for bin_, (its_tokens, its_outputs) in enumerate(zip(tokens, outputs, strict=True))
        ]
        excess_tokens = max(0.0, beyond_tokens - num_beyond * _NUM_BINS * _BIN_TOKENS)
        prior_tokens = _PRIOR_OUTPUTS * _PRIOR_TOKENS
        rest_tokens = (prior_tokens + excess_tokens) / (_PRIOR_OUTPUTS + num_beyond)
        self._rest_tokens = max(1, round(rest_tokens))
        return table

    def load(self, values: list[float]) -> None:
        self.values = _sound(values, len(self.values))
        self.num_outputs = sum(self.values[:-1])
        self._table = []


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
    route: Callable[[Any], str] = lambda request: ""  # requests of one route are alike

    def total_tokens(self, request: RequestView, end: End, *, produced_tokens: int) -> int:
        """Return the tokens of the whole output, given that it has `produced_tokens`: more than
        those, and no more than `max_tokens` and the window allow (any thread)."""
        most_tokens = self.most_tokens(request)
        if most_tokens <= produced_tokens + 1:  # as of all prompts that are handed over
            return produced_tokens + 1
        predicted, route = self.predict(request.request_id), self.route(request)
        return self.lengths.total_tokens(predicted, produced_tokens, end, route, most_tokens)

    def outlook(self, request: RequestView, produced_tokens: int) -> tuple[int, float]:
        """Return the expected tokens of the whole output, as `total_tokens`, and the probability
        that it is heavy (any thread)."""
        predicted, route = self.predict(request.request_id), self.route(request)
        return self.lengths.outlook(predicted, produced_tokens, route, self.most_tokens(request))

    def most_tokens(self, request: RequestView) -> int:
        """Return the bound of an output by the client and the window."""
        return min(request.max_tokens, self.window - request.num_prompt_tokens)
