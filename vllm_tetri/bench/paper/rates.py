"""How many requests a second: capacity under one SLO, goodput under two; simulated.

DistServe's example is a 13B model on A100 cards, prompts of 512 and answers of 64 tokens.
Sarathi-Serve's is Mistral-7B on one of them, with long prompts (its table 2 gives medians and
90th percentiles; lengths here are log-normal through both, within its window).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import median

from vllm_tetri.bench.paper.case import Case, Size, shape_of
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.figures import Slo
from vllm_tetri.sim.gaps import Gaps
from vllm_tetri.sim.links import LINKS
from vllm_tetri.sim.plan.goodput import Demand, Score, highest_rate, score
from vllm_tetri.sim.setting import Setting
from vllm_tetri.sim.systems import Parts, system_of
from vllm_tetri.sim.workload import Ask, Lengths, draw

_NVLINK = LINKS["nvlink"]
_ATTAINMENT = 0.9
_GUESS = 2.0  # requests per second and instance
_SPAN_S = 60.0

_DISTSERVE = "roofline:opt-13b:a100-80g"
_DISTSERVE_LENGTHS: tuple[Lengths, ...] = ((512, 64),)
# What its example promises is not in its text as far as we have it: 0.4 s and 40 ms are ours.
_DISTSERVE_SLO = Slo(0.4, 0.04)

_SARATHI = "roofline:mistral-7b:a100-80g"
_SARATHI_ITL_S = 0.1  # strict, its table 3
_SARATHI_WAIT_S = 2.0  # in the median
_PROMPT_MEDIAN, _PROMPT_P90, _ANSWER_MEDIAN, _ANSWER_P90 = 1730, 5696, 415, 834
_WINDOW_TOKENS = 8192
_P90 = 1.2816  # of the normal distribution

# Roughly what the paper's device does for one mixed request alone, five times over.
_MIXED_SLO = Slo(1.0, 0.125)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Systems that are to keep one goal on as many instances."""

    experiment: str
    group: str
    profile: str
    instances: int
    systems: Sequence[str]
    prefill: int | None = None
    window_tokens: int = 2048

    def setting(self, system: str, seed: int) -> Setting:
        parts = Parts(
            self.instances,
            shape_of(self.profile),
            self.prefill,
            window_tokens=self.window_tokens,
            seed=seed,
        )
        return replace(system_of(system, parts), link=_NVLINK)


def cases(size: Size) -> Iterator[Case]:
    """Capacity, then goodput by ratio, then beside chunked prefill."""
    count = size.requests["e12"]
    capacity = _Asked(
        "e11", "mixed", _SARATHI, 1, ("orca", "vllm-2023", "vllm", "sarathi"),
        window_tokens=_WINDOW_TOKENS,
    )  # fmt: skip
    yield from _cases(capacity, "sustained_per_s", partial(_sustains, count), 1.0)
    known = Demand(known=_DISTSERVE_LENGTHS, least_requests=count)
    kept = partial(_keeps, known, _DISTSERVE_SLO)
    for group, prefill, decode in (("1P1D", 1, 1), ("2P1D", 2, 1)):
        asked = _Asked(
            "e12", group, _DISTSERVE, prefill + decode,
            ("vllm-2023", "vllm", "sarathi", "distserve", "tetri", "adaptive"), prefill,
        )  # fmt: skip
        yield from _cases(asked, "goodput", kept)
    mixed = _Asked(
        "e13", "mixed", "opt-13b-2xv100", 4,
        ("vllm-2023", "vllm", "sarathi", "distserve", "splitwise", "tetri", "adaptive", "whole"),
    )  # fmt: skip
    yield from _cases(mixed, "goodput", partial(_keeps, Demand(least_requests=count), _MIXED_SLO))


Judge = Callable[[Setting, float, int], Score]
"""How a setting fares at a rate, with a seed."""


def _cases(
    asked: _Asked, metric: str, judge: Judge, attainment: float = _ATTAINMENT
) -> Iterator[Case]:
    for system in asked.systems:
        play = partial(_highest, asked, metric, judge, attainment, system)
        yield Case(asked.experiment, asked.group, system, play)


def _highest(
    asked: _Asked, metric: str, judge: Judge, attainment: float, system: str, seed: int
) -> dict[str, float]:
    """Per instance, since clusters of several sizes are compared."""
    setting = asked.setting(system, seed)
    found = highest_rate(
        lambda rate: judge(setting, rate, seed), _GUESS * asked.instances, attainment
    )
    return {metric: found.rate / asked.instances}


def _keeps(demand: Demand, slo: Slo, setting: Setting, rate: float, seed: int) -> Score:
    return score(setting, demand.other(seed).asks(rate, _SPAN_S), slo)


def _sustains(count: int, setting: Setting, rate: float, seed: int) -> Score:
    """All or nothing: the p99 of gaps and the median of waits."""
    served = simulate(setting, _long(count, rate, seed))
    is_slow = Gaps(served).quantile(0.99) > _SARATHI_ITL_S
    is_late = median(each.ttft_s for each in served) > _SARATHI_WAIT_S
    return Score(float(not (is_slow or is_late)), float(is_late), float(is_slow))


def _long(count: int, rate: float, seed: int) -> list[Ask]:
    """Conversations of Sarathi-Serve's first data set, one after the other."""
    rng = Random(f"long {seed}")
    lengths: list[Lengths] = []
    while len(lengths) < count:
        prompt = _log_normal(rng, _PROMPT_MEDIAN, _PROMPT_P90)
        answer = _log_normal(rng, _ANSWER_MEDIAN, _ANSWER_P90)
        if prompt + answer <= _WINDOW_TOKENS:
            lengths.append((prompt, answer))
    return draw("mixed", count, rate, seed, known=lengths)


def _log_normal(rng: Random, middle: float, p90: float) -> int:
    sigma = math.log(p90 / middle) / _P90
    return max(1, round(rng.lognormvariate(math.log(middle), sigma)))
