"""Goodput: the highest rate at which enough requests keep both SLOs (DistServe).

It is found by bisection over simulated rates. Requests at one rate are those of any other rate,
only closer together, so that more load does not come with luckier requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.config import ClusterConfig
from vllm_tetri.sim.workload import Lengths, RequestSpec, draw

_WARM_UP = 0.2  # part of the requests, while the cluster fills up
_PRECISION = 0.03
_STRIDE, _FASTER = 1.3, 1.5  # between the first two rates, and how that grows
_LEAST, _MOST = 1 / 40, 256  # times the guess; rates beyond are not searched
_SAMPLE = 1000
_MOST_REQUESTS = 100_000


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
        count = min(max(self.least_requests, math.ceil(rate * span_s)), _MOST_REQUESTS)
        return draw(self.kind, count, rate, self.seed, accuracy=self.accuracy, known=self.known)

    @cached_property
    def lengths(self) -> Sequence[Lengths]:
        """Lengths of some requests, the longest ones among them."""
        sample = self.specs(1.0, _SAMPLE)
        return self.known or [(each.prompt_tokens, each.output_tokens) for each in sample]

    @cached_property
    def prompt_tokens(self) -> float:
        """Mean length of prompts."""
        return fmean(prompt for prompt, _ in self.lengths)

    @cached_property
    def output_tokens(self) -> float:
        """Mean length of outputs."""
        return fmean(output for _, output in self.lengths)


class Score(NamedTuple):
    """Shares of requests that kept both SLOs, and that missed either."""

    kept: float
    ttft_missed: float
    tpot_missed: float


def score(config: ClusterConfig, specs: Sequence[RequestSpec], slo: Objective) -> Score:
    """Simulate, and judge all requests but the first ones."""
    from_s = specs[int(len(specs) * _WARM_UP)].arrival_s
    judged = [each for each in simulate(config, specs) if each.spec.arrival_s >= from_s]
    late = [each.ttft_s > slo.ttft_s for each in judged]
    slow = [each.tpot_s > slo.tpot_s for each in judged]
    kept = [not (first or second) for first, second in zip(late, slow, strict=True)]
    return Score(fmean(kept), fmean(late), fmean(slow))


def highest_rate(
    scored: Callable[[float], Score], guess: float, attainment: float
) -> tuple[float, Score]:
    """Search, from `guess` on, the rate at which the share of kept requests falls below the
    attainment, to 3 %. Returns it, 0 if the SLOs cannot be kept, and the score at the next higher
    rate that was tried."""
    low, high, beyond = 0.0, math.inf, Score(1.0, 0.0, 0.0)
    rate, stride = guess, _STRIDE
    while guess * _LEAST <= rate <= guess * _MOST and (not low or high / low > 1 + _PRECISION):
        found = scored(rate)
        if found.kept >= attainment:
            low = rate
        else:
            high, beyond = rate, found
        if low and high < math.inf:
            rate = math.sqrt(low * high)
        else:
            rate = rate * stride if low else rate / stride
            stride *= _FASTER
    return low, beyond
