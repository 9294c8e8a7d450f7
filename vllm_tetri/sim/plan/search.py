"""How many prefill and decode instances, or none: DistServe's search, by simulation.

Goodput per GPU is what is to be had most of. Single instances say which tensor parallel
degree, chunk and ratio of roles to look at; then whole clusters are simulated, those with
roles beside those whose instances all do both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cost.profiles import Profile
from vllm_tetri.sim.plan.goodput import Goal
from vllm_tetri.sim.plan.layout import Layout, System, kv_tokens
from vllm_tetri.sim.plan.single import Single, Trials
from vllm_tetri.sim.plan.values import SERVES, Found, Plan, Question

_OTHER_SEEDS = (1, 2)
_NEAR = 1.1  # how far another seed may lead
_MOST_INSTANCES = 256
_POOLED = 1.5  # times what one instance serves, at most, that each of several does
_CLOSE = 0.95  # to the best goodput, for being looked at with other requests
_WORTHY = 0.85  # of the best promise, for being simulated as a cluster


def plan(question: Question, tell: Callable[[str], None] = lambda _: None) -> Plan:
    """Compare layouts.

    Args:
        tell: Called before every search, with what it is about.

    Raises:
        ConfigError: No instance can keep the SLOs, or hold the longest request.
    """
    return _Search(question, tell).plan()


class _TooManyError(Exception):
    """More instances would be needed than are looked at."""


class _Search:
    def __init__(self, question: Question, tell: Callable[[str], None]) -> None:
        self._question = question
        self._tell = tell
        self._skipped: list[str] = []
        self._trials: dict[str, Trials] = {}

    def plan(self) -> Plan:
        singles = self._singles()
        layouts = [
            *self._possible(self._whole, _worthy(singles, _whole_rate)),
            *self._possible(self._split, self._splittable(singles)),
        ]
        found = sorted((each for each in layouts if self._serves(each)), key=self._rank)
        if not found:
            hopeless = _hopeless(singles, self._question.goal)
            raise ConfigError("; ".join(self._skipped) or hopeless)
        found = self._checked(found)
        rival = _best_of(found, is_coupled=not found[0].layout.is_coupled)
        return Plan(self._question, tuple(singles), tuple(found), rival, tuple(self._skipped))

    def _possible(
        self, layouts: Callable[[Single], list[Found]], singles: Sequence[Single]
    ) -> list[Found]:
        """Of those that need no more instances than anybody has."""
        found = []
        for single in singles:
            try:
                found += layouts(single)
            except _TooManyError as error:
                self._skipped.append(f"{single.profile.name}: {error}")
        return found

    def _checked(self, found: Sequence[Found]) -> list[Found]:
        """The best of either kind with more seeds, and those that are close: the first seed
        flatters whoever wins by it. Again until all who are the best now have them."""
        while True:
            wanted = [each for each in found if len(each.rates) == 1 and _is_near(each, found)]
            if not wanted:
                return list(found)
            checked = [self._again(each) if each in wanted else each for each in found]
            found = sorted(checked, key=self._rank)

    def _serves(self, found: Found) -> bool:
        rate = self._question.rate
        return found.rate > 0 if rate is None else found.rate >= rate * SERVES

    def _rank(self, found: Found) -> tuple[float, float]:
        """Lowest first."""
        few = float(found.devices) if self._question.rate is not None else 0.0
        return (few, -found.per_device)

    # -- one instance ------------------------------------------------------------------

    def _singles(self) -> list[Single]:
        question = self._question
        singles = []
        for profile in question.profiles:
            trials = Trials(profile, question.demand, question.goal, question.site, self._tell)
            reason = self._misfit(profile) or trials.hopeless
            if reason:
                self._skipped.append(f"{profile.name}: {reason}")
                continue
            self._trials[profile.name] = trials
            singles.append(trials.single())
        if not singles:
            raise ConfigError("; ".join(self._skipped) or "no profile to plan with")
        return singles

    def _misfit(self, profile: Profile) -> str:
        """Why no instance can be made of it; nothing if one can."""
        question = self._question
        need, has = sum(question.demand.longest), kv_tokens(profile)
        if need > has:
            return f"its KV pool holds {has} tokens, a request may have {need}"
        if question.devices is not None and profile.num_devices > question.devices:
            return f"an instance takes {profile.num_devices} GPUs"
        return ""

    # -- clusters ----------------------------------------------------------------------

    def _whole(self, single: Single) -> list[Found]:
        """Replicas that do both."""
        tuned = {
            System.STOCK: single.stock,
            System.WHOLE: single.whole,
            System.ADAPTIVE: single.whole,
        }
        return [
            self._replicas(system, single, each.tokens, each.rate)
            for system, each in tuned.items()
            if each.rate
        ]

    def _replicas(self, system: System, single: Single, tokens: int, each_rate: float) -> Found:
        def of(count: int) -> Layout:
            return Layout(system, single.profile, 0, 0, count, tokens)

        question = self._question
        if question.devices is not None:
            count = question.devices // single.profile.num_devices
        else:
            assert question.rate is not None
            count = self._fewest(of, math.ceil(question.rate / each_rate))
        return self._measured(of(count), count * each_rate)

    def _fewest(self, of: Callable[[int], Layout], count: int) -> int:
        """Replicas that serve the rate."""
        if self._keeps(of(count)):
            while count > 1 and self._keeps(of(count - 1)):
                count -= 1
            return count
        while count < _MOST_INSTANCES:
            count += 1
            if self._keeps(of(count)):
                return count
        raise _TooManyError(f"{_MOST_INSTANCES} instances do not serve this rate; plan for less")

    def _splittable(self, singles: Sequence[Single]) -> list[Single]:
        devices = self._question.devices
        fit = [
            each for each in singles if devices is None or devices >= 2 * each.profile.num_devices
        ]
        return _worthy(fit, _split_rate)

    def _split(self, single: Single) -> list[Found]:
        """Prefill and decode instances, and the best of these in adaptive mode."""
        if self._question.devices is not None:
            splits = self._ratios(single, self._question.devices // single.profile.num_devices)
        else:
            splits = [self._fewest_split(single)]
        best = max(splits, key=lambda each: each.rate)
        adaptive = replace(best.layout, system=System.ADAPTIVE)
        return [*splits, self._measured(adaptive, best.rate)] if best.rate else splits

    def _ratios(self, single: Single, count: int) -> list[Found]:
        """Those on both sides of the ratio that single instances promise, and on as long as
        it gets better and could."""
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

    def _pair(self, single: Single, prefill: int, decode: int) -> Found:
        layout = _roles(single, prefill, decode)
        return self._measured(layout, _promise(single, prefill, decode))

    def _fewest_split(self, single: Single) -> Found:
        """What one of each can do says how many; then more of what is short, or fewer."""
        rate = self._question.rate
        assert rate is not None
        prefill = math.ceil(rate / single.prefill.rate)
        decode = math.ceil(rate / single.decode.rate)
        while not self._keeps(_roles(single, prefill, decode)):
            if prefill + decode >= _MOST_INSTANCES:
                raise _TooManyError(f"{_MOST_INSTANCES} instances do not serve it; plan for less")
            if prefill * single.prefill.rate < decode * single.decode.rate:
                prefill += 1
            else:
                decode += 1
        while prefill > 1 and self._keeps(_roles(single, prefill - 1, decode)):
            prefill -= 1
        while decode > 1 and self._keeps(_roles(single, prefill, decode - 1)):
            decode -= 1
        return self._pair(single, prefill, decode)

    # -- simulations -------------------------------------------------------------------

    def _keeps(self, layout: Layout) -> bool:
        assert self._question.rate is not None
        self._tell(f"{layout.system} {layout.instances} at {self._question.rate:g} requests/s")
        return self._trials[layout.profile.name].keeps(layout, self._question.rate)

    def _measured(self, layout: Layout, guess: float) -> Found:
        self._tell(f"{layout.system} {layout.instances}, {layout.tokens} tokens a step")
        found = self._trials[layout.profile.name].search(layout, guess)
        devices = self._question.devices or layout.num_devices
        return Found(layout, found, (found.rate,), devices)

    def _again(self, found: Found) -> Found:
        """With other requests."""
        layout = found.layout
        self._tell(f"{layout.system} {layout.instances} with other requests")
        trials = self._trials[layout.profile.name]
        others = [
            trials.search(layout, found.rate, seed=seed, stride=_NEAR).rate for seed in _OTHER_SEEDS
        ]
        return Found(layout, found.goodput, (found.goodput.rate, *others), found.devices)


def _is_near(one: Found, found: Sequence[Found]) -> bool:
    """To the best of its kind, or that itself."""
    best = _best_of(found, is_coupled=one.layout.is_coupled)
    assert best is not None, "at least itself"
    return one is best or one.per_device >= best.per_device * _CLOSE


def _best_of(found: Sequence[Found], *, is_coupled: bool) -> Found | None:
    """The first one of its kind."""
    return next((each for each in found if each.layout.is_coupled is is_coupled), None)


def _roles(single: Single, prefill: int, decode: int) -> Layout:
    tokens = single.prefill.tokens
    return Layout(System.SPLIT, single.profile, prefill, decode, 0, tokens)


def _promise(single: Single, prefill: int, decode: int) -> float:
    """Several of each serve at least as much: they share their queues."""
    return min(prefill * single.prefill.rate, decode * single.decode.rate)


def _whole_rate(single: Single) -> float:
    return single.whole_rate


def _split_rate(single: Single) -> float:
    return single.split_rate


def _worthy(singles: Sequence[Single], rate: Callable[[Single], float]) -> list[Single]:
    """Those that promise most per GPU, or nearly."""
    best = max((rate(each) for each in singles), default=0.0)
    return [each for each in singles if rate(each) > 0 and rate(each) >= best * _WORTHY]


def _hopeless(singles: Sequence[Single], goal: Goal) -> str:
    beyond = max((each.stock.goodput.beyond for each in singles), key=lambda each: each.kept)
    return (
        f"no layout keeps {goal.slo.ttft_s:g} s to the first token and {goal.slo.tpot_s:g} s per "
        f"token for {goal.attainment:.0%} of these requests, even if few come: "
        f"{beyond.ttft_missed:.0%} miss the first, {beyond.tpot_missed:.0%} the second; allow more "
        "time, or take faster GPUs or more of them per instance"
    )
