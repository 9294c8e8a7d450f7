"""Goodput: the highest rate at which enough requests keep both SLOs (DistServe).

It is found by bisection over simulated rates. Requests at one rate are those of any other rate,
only closer together, so that more load does not come with luckier requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.config import ClusterConfig
from vllm_tetri.sim.figures import Slo
from vllm_tetri.sim.workload import Lengths, RequestSpec, draw

_WARM_UP = 0.2  # part of the requests, while the cluster fills up
_PRECISION = 0.03
_STRIDE, _FASTER = 1.3, 1.5
_LEAST, _MOST = 1 / 40, 64  # times the guess; rates beyond are not searched
_SAMPLE = 1000
_MOST_REQUESTS = 100_000


@dataclass(frozen=True, slots=True)
class Goal:
    """SLOs, and the share of requests that must keep them; raises ConfigError if it is none."""

    slo: Slo
    attainment: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.attainment <= 1:
            raise ConfigError(f"an attainment of {self.attainment:g}: must be above 0, at most 1")


@dataclass(frozen=True)
class Demand:
    """Requests at any rate; `known` lengths replace those of the kind."""

    kind: str = "mixed"
    known: tuple[Lengths, ...] | None = None
    accuracy: float = 1.0
    least_requests: int = 1000
    seed: int = 0

    def specs(self, rate: float, span_s: float) -> list[RequestSpec]:
        """Return the requests of a time span, and at least `least_requests`."""
        count = max(self.least_requests, math.ceil(rate * span_s))
        return self._draw(min(count, _MOST_REQUESTS), rate)

    def other(self, number: int) -> Demand:
        """Return the demand with another seed; 0 keeps it."""
        return replace(self, seed=self.seed + number)

    @cached_property
    def sample(self) -> list[RequestSpec]:
        """Requests to take means of."""
        return self._draw(_SAMPLE, 1.0)

    @cached_property
    def longest(self) -> Lengths:
        """The longest prompt, and the longest output."""
        lengths = self.known or [(a.prompt_tokens, a.output_tokens) for a in self.sample]
        return max(prompt for prompt, _ in lengths), max(output for _, output in lengths)

    @cached_property
    def prompt_tokens(self) -> float:
        """Mean length of prompts."""
        return fmean(spec.prompt_tokens for spec in self.sample)

    @cached_property
    def output_tokens(self) -> float:
        """Mean length of outputs."""
        return fmean(spec.output_tokens for spec in self.sample)

    def _draw(self, count: int, rate: float) -> list[RequestSpec]:
        return draw(self.kind, count, rate, self.seed, accuracy=self.accuracy, known=self.known)


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of requests that kept both SLOs, and that missed either."""

    kept: float
    ttft_missed: float
    tpot_missed: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests per second, 0 if the SLOs cannot be kept; and the score at the next higher rate
    that was tried."""

    rate: float
    beyond: Score


def score(config: ClusterConfig, specs: Sequence[RequestSpec], slo: Slo) -> Score:
    """Simulate, and judge all requests but the first ones."""
    from_s = specs[int(len(specs) * _WARM_UP)].arrival_s
    judged = [each for each in simulate(config, specs) if each.spec.arrival_s >= from_s]
    late = [each.ttft_s > slo.ttft_s for each in judged]
    slow = [each.tpot_s > slo.tpot_s for each in judged]
    kept = [not (first or second) for first, second in zip(late, slow, strict=True)]
    return Score(fmean(kept), fmean(late), fmean(slow))


def highest_rate(
    scored: Callable[[float], Score], guess: float, attainment: float, stride: float = _STRIDE
) -> Goodput:
    """Search the rate at which the share of kept requests falls below the attainment, to 3 %.

    The search begins at `guess`, takes `stride` as first factor between rates, and gives up at
    64 times the guess.
    """
    low, high = 0.0, math.inf
    beyond = Score(1.0, 0.0, 0.0)
    rate = guess
    while not low or high / low > 1 + _PRECISION:
        found = scored(rate)
        if found.kept >= attainment:
            low = rate
            if rate >= guess * _MOST:
                return Goodput(rate, beyond)
        else:
            high, beyond = rate, found
        if low and high < math.inf:
            rate = math.sqrt(low * high)
        elif low:
            rate *= stride
        else:
            rate /= stride
            stride *= _FASTER  # the guess was far off, or no rate is low enough
            if rate < guess * _LEAST:
                return Goodput(0.0, beyond)
    return Goodput(low, beyond)
