"""How many prefill and decode instances, or none: DistServe's search, by simulation.

The aim is goodput per GPU. Single instances tell which tensor parallel degree, chunk and ratio of
roles to simulate; then whole clusters are simulated, with roles and without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.plan.trials import Tell, Trials
from vllm_tetri.sim.plan.values import SERVES, Found, Layout, Plan, Question, Single, System

_OTHER_SEEDS = (1, 2)
_NEAR = 1.1  # first factor between rates with another seed
_MOST_INSTANCES = 256
_POOLED = 1.5  # times what one instance serves, at most, that each of several does
_CLOSE = 0.95  # of the best goodput: simulated again with other seeds
_WORTHY = 0.85  # of the best promise: simulated as a cluster


def plan(question: Question, tell: Tell = lambda _: None) -> Plan:
    """Compare layouts; `tell` is called before every search with its subject.

    Raises:
        ConfigError: No instance can keep the SLOs, or hold the longest request.
    """
    return _Search(question, tell).plan()


class _TooManyError(Exception):
    """More instances would be needed than are simulated."""


class _Search:
    def __init__(self, question: Question, tell: Tell) -> None:
        self._question = question
        self._tell = tell
        self._skipped: list[str] = []
        self._trials: dict[str, Trials] = {}
        self._kept: dict[Layout, bool] = {}

    def plan(self) -> Plan:
        singles, devices = self._singles(), self._question.devices
        pairs = [
            each for each in singles if devices is None or devices >= 2 * each.profile.num_devices
        ]
        layouts: list[Found] = []
        for search, candidates in (
            (self._aggregated, _worthy(singles, attrgetter("whole_rate"))),
            (self._split, _worthy(pairs, attrgetter("split_rate"))),
        ):
            for single in candidates:
                try:
                    layouts += search(single)
                except _TooManyError as error:
                    self._skipped.append(f"{single.profile.name}: {error}")
        least_rate = (self._question.rate or 0.0) * SERVES
        found = sorted((a for a in layouts if a.rate and a.rate >= least_rate), key=self._rank)
        if not found:
            raise ConfigError("; ".join(self._skipped) or self._hopeless(singles))
        found = self._checked(found)
        rival = _best_of(found, is_aggregated=not found[0].layout.is_aggregated)
        return Plan(self._question, tuple(singles), tuple(found), rival, tuple(self._skipped))

    def _rank(self, found: Found) -> tuple[float, float]:
        few = float(found.devices) if self._question.rate is not None else 0.0
        return (few, -found.per_device)

    def _singles(self) -> list[Single]:
        """Search what one instance of each profile serves."""
        for profile in self._question.profiles:
            trials = Trials(profile, self._question, self._tell)
            if trials.misfit:
                self._skipped.append(f"{profile.name}: {trials.misfit}")
            else:
                self._trials[profile.name] = trials
        if not self._trials:
            raise ConfigError("; ".join(self._skipped) or "no profile to plan with")
        return [trials.single() for trials in self._trials.values()]

    def _checked(self, found: list[Found]) -> list[Found]:
        """Simulate the best of either kind and those close to it with more seeds, since the first
        seed favours the winner; repeat until the best ones have all seeds."""
        while True:
            wanted = [each for each in found if len(each.rates) == 1 and _is_near(each, found)]
            if not wanted:
                return found
            checked = [self._again(each) if each in wanted else each for each in found]
            found = sorted(checked, key=self._rank)

    # -- clusters ----------------------------------------------------------------------

    def _aggregated(self, single: Single) -> list[Found]:
        """Simulate replicas that do both."""
        found = []
        for system, each in (
            (System.STOCK, single.stock),
            (System.WHOLE, single.whole),
            (System.ADAPTIVE, single.whole),
        ):
            if not each.rate:
                continue
            layout = replace(each.layout, system=system)
            if self._question.devices is not None:
                layout = replace(layout, both=self._question.devices // single.profile.num_devices)
            else:
                layout = self._fewest(layout, {"both": each.rate})
            found.append(self._measured(layout, layout.both * each.rate))
        return found

    def _split(self, single: Single) -> list[Found]:
        """Simulate prefill and decode instances, and the best of these in adaptive mode."""
        if self._question.devices is not None:
            splits = self._ratios(single, self._question.devices // single.profile.num_devices)
        else:
            rates = {"prefill": single.prefill.rate, "decode": single.decode.rate}
            layout = self._fewest(_roles(single, 0, 0), rates)
            splits = [self._pair(single, layout.prefill, layout.decode)]
        best = max(splits, key=attrgetter("rate"))
        adaptive = replace(best.layout, system=System.ADAPTIVE)
        return [*splits, self._measured(adaptive, best.rate)] if best.rate else splits

    def _ratios(self, single: Single, count: int) -> list[Found]:
        """Simulate ratios on both sides of what single instances promise, as long as it gets
        better."""
        wanted = count * single.decode.rate / (single.prefill.rate + single.decode.rate)
        below = min(max(1, math.floor(wanted)), count - 1)
        found = {below: self._pair(single, below, count - below)}
        for step in (1, -1):
            prefill = below + step
            while 1 <= prefill < count:
                promise = _promise(single, prefill, count - prefill)
                if promise * _POOLED < max(each.rate for each in found.values()):
                    break
                found[prefill] = self._pair(single, prefill, count - prefill)
                if found[prefill].rate <= found[prefill - step].rate:
                    break
                prefill += step
        return list(found.values())

    def _fewest(self, layout: Layout, rates: dict[str, float]) -> Layout:
        """Find the fewest instances that serve the rate: begin with what one of each role
        promises, add what is short, and remove the rest."""
        asked = self._question.rate
        assert asked is not None
        counts: dict[str, Any] = {role: math.ceil(asked / each) for role, each in rates.items()}
        while not self._keeps(replace(layout, **counts)):
            if sum(counts.values()) >= _MOST_INSTANCES:
                raise _TooManyError(f"{_MOST_INSTANCES} instances do not serve it; plan for less")
            counts[min(reversed(counts), key=lambda role: counts[role] * rates[role])] += 1
        for role in counts:
            while counts[role] > 1:
                if not self._keeps(replace(layout, **{**counts, role: counts[role] - 1})):
                    break
                counts[role] -= 1
        return replace(layout, **counts)

    # -- simulations -------------------------------------------------------------------

    def _keeps(self, layout: Layout) -> bool:
        rate = self._question.rate
        assert rate is not None
        if layout not in self._kept:
            self._tell(f"{layout.name} at {rate:g} requests/s")
            self._kept[layout] = self._trials[layout.profile.name].keeps(layout, rate)
        return self._kept[layout]

    def _pair(self, single: Single, prefill: int, decode: int) -> Found:
        return self._measured(_roles(single, prefill, decode), _promise(single, prefill, decode))

    def _measured(self, layout: Layout, guess: float) -> Found:
        self._tell(f"{layout.name}, {layout.tokens} tokens a step")
        return self._trials[layout.profile.name].search(layout, guess)

    def _again(self, found: Found) -> Found:
        """Add the rates with other requests."""
        self._tell(f"{found.layout.name} with other requests")
        search, layout = self._trials[found.layout.profile.name].search, found.layout
        others = [search(layout, found.rate, seed=seed, stride=_NEAR) for seed in _OTHER_SEEDS]
        return replace(found, rates=(found.rate, *(each.rate for each in others)))

    def _hopeless(self, singles: Sequence[Single]) -> str:
        goal = self._question.goal
        beyond = max((each.stock.goodput.beyond for each in singles), key=attrgetter("kept"))
        return (
            f"no layout keeps {goal.slo.ttft_s:g} s to the first token and {goal.slo.tpot_s:g} s "
            f"per token for {goal.attainment:.0%} of these requests, even if few come: "
            f"{beyond.ttft_missed:.0%} miss the first, {beyond.tpot_missed:.0%} the second; allow "
            "more time, or take faster GPUs or more of them per instance"
        )


def _best_of(found: Sequence[Found], *, is_aggregated: bool) -> Found | None:
    return next((each for each in found if each.layout.is_aggregated is is_aggregated), None)


def _is_near(one: Found, found: Sequence[Found]) -> bool:
    """Whether it is the best of its kind, or close to it."""
    best = _best_of(found, is_aggregated=one.layout.is_aggregated)
    return best is not None and (one is best or one.per_device >= best.per_device * _CLOSE)


def _roles(single: Single, prefill: int, decode: int) -> Layout:
    return Layout(System.SPLIT, single.profile, prefill, decode, 0, single.prefill.layout.tokens)


def _promise(single: Single, prefill: int, decode: int) -> float:
    """Rate that several of each serve at least: they share their queues."""
    return min(prefill * single.prefill.rate, decode * single.decode.rate)


def _worthy(singles: Sequence[Single], rate: Callable[[Single], float]) -> list[Single]:
    """Profiles that promise most per GPU, or nearly."""
    best = max(map(rate, singles), default=0.0)
    return [each for each in singles if rate(each) > 0 and rate(each) >= best * _WORTHY]
