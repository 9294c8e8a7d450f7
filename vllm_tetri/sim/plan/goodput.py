"""Goodput: the highest rate at which enough requests keep both SLOs (DistServe).

It is found by bisection over simulated rates. Requests at one rate are those of any other
one, only closer together, so that more load does not come with luckier requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.figures import Slo
from vllm_tetri.sim.setting import Setting
from vllm_tetri.sim.workload import Ask, Lengths, draw

_WARM_UP = 0.2  # part of the requests, while the cluster fills up
_PRECISION = 0.03
_STRIDE, _FASTER = 1.3, 1.5
_LEAST = 1 / 40  # of what was guessed; below it nothing is served in time
_MOST = 64  # times what was guessed; beyond it the rate does not bind
_SAMPLE = 1000
_MOST_REQUESTS = 100_000


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be kept.

    Attributes:
        attainment: Share of requests that must keep the SLO.

    Raises:
        ConfigError: It is no share.
    """

    slo: Slo
    attainment: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.attainment <= 1:
            raise ConfigError(f"an attainment of {self.attainment:g}: must be above 0, at most 1")


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests, at any rate.

    Attributes:
        known: Lengths to draw from, instead of those of the kind.
        least_requests: In a simulation.
    """

    kind: str = "mixed"
    known: tuple[Lengths, ...] | None = None
    accuracy: float = 1.0
    least_requests: int = 1000
    seed: int = 0

    def asks(self, rate: float, span_s: float) -> list[Ask]:
        """Those that come in so much time, and not fewer than is asked for."""
        count = max(self.least_requests, math.ceil(rate * span_s))
        return self._draw(min(count, _MOST_REQUESTS), rate)

    def sample(self) -> list[Ask]:
        """Some, for means."""
        return self._draw(_SAMPLE, 1.0)

    def other(self, number: int) -> Demand:
        """Requests of the same kind, but other ones; those of 0 are these."""
        return replace(self, seed=self.seed + number)

    @property
    def longest(self) -> Lengths:
        """The longest prompt, and the longest answer."""
        lengths = self.known or [(a.prompt_tokens, a.output_tokens) for a in self.sample()]
        return max(prompt for prompt, _ in lengths), max(answer for _, answer in lengths)

    def _draw(self, count: int, rate: float) -> list[Ask]:
        return draw(self.kind, count, rate, self.seed, accuracy=self.accuracy, known=self.known)


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of requests.

    Attributes:
        kept: Within both SLOs.
        ttft_missed, tpot_missed: Beyond either.
    """

    kept: float
    ttft_missed: float
    tpot_missed: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """What was found.

    Attributes:
        rate: Requests per second; 0 where the SLOs cannot be kept at all.
        beyond: The score at the next higher rate that was tried.
    """

    rate: float
    beyond: Score


def score(setting: Setting, asks: Sequence[Ask], slo: Slo) -> Score:
    """How requests fare, apart from the first ones."""
    from_s = asks[int(len(asks) * _WARM_UP)].arrival_s
    judged = [each for each in simulate(setting, asks) if each.ask.arrival_s >= from_s]
    late = [each.ttft_s > slo.ttft_s for each in judged]
    slow = [each.tpot_s > slo.tpot_s for each in judged]
    kept = [not (first or second) for first, second in zip(late, slow, strict=True)]
    return Score(fmean(kept), fmean(late), fmean(slow))


def prompts_only(asks: Sequence[Ask]) -> list[Ask]:
    """The same with answers of one token."""
    return [replace(ask, output_tokens=1) for ask in asks]


def highest_rate(
    scored: Callable[[float], Score], guess: float, attainment: float, stride: float = _STRIDE
) -> Goodput:
    """Where the share of kept requests falls below the attainment, to 3 %; 64 times the guess
    where it does not until there.

    Args:
        scored: What comes of a rate.
        guess: A rate somewhere near.
        stride: How far to look around it at first.
    """
    low, high = 0.0, math.inf
    beyond = Score(1.0, 0.0, 0.0)
    rate = guess
    while low == 0.0 or high == math.inf:
        found = scored(rate)
        if found.kept >= attainment:
            low = rate
            if rate >= guess * _MOST:
                return Goodput(rate, beyond)
            rate *= stride
        else:
            high, beyond = rate, found
            rate /= stride
            stride *= _FASTER  # a guess that was that wrong, or nothing is served in time
            if rate < guess * _LEAST:
                return Goodput(0.0, beyond)
    while high / low > 1 + _PRECISION:
        rate = math.sqrt(low * high)
        found = scored(rate)
        if found.kept >= attainment:
            low = rate
        else:
            high, beyond = rate, found
    return Goodput(low, beyond)
