"""Layouts that a plan compares, what it is asked, and what it finds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.config import (
    ClusterConfig,
    EngineConfig,
    InstanceConfig,
    Stock,
    make_instances,
    of_profile,
)
from vllm_tetri.sim.cost.profiles import Profile
from vllm_tetri.sim.links import Link
from vllm_tetri.sim.plan.goodput import Demand, Goal, Goodput
from vllm_tetri.types import InstanceId, Role, StepCoefficients

SERVES = 0.97  # of a rate that was asked for: goodput is only found to 3 %
_ARENA_TOKENS = 16384
_ARENA_REQUESTS = 8  # longest requests that may be on their way to an instance at once
_INSTANT = StepCoefficients(base_s=1e-9, confidence=1.0)
_ENDLESS = 1 << 24


class System(StrEnum):
    """What serves: stock vLLM, or this package in the mode of that name."""

    STOCK = "stock vLLM"
    WHOLE = "whole"
    ADAPTIVE = "adaptive"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class Layout:
    """Instances of each role with one profile; `tokens` is the most prompt tokens of a step: the
    chunk, or the budget of stock vLLM, which decodes share."""

    system: System
    profile: Profile
    prefill: int
    decode: int
    both: int
    tokens: int

    @property
    def num_devices(self) -> int:
        """GPUs of all instances."""
        return (self.prefill + self.decode + self.both) * self.profile.num_devices

    @property
    def is_aggregated(self) -> bool:
        """Whether every request stays on one instance."""
        return self.system in (System.STOCK, System.WHOLE)

    @property
    def name(self) -> str:
        """The system and its instances, as `split 3P+1D`."""
        counts = {"P": self.prefill, "D": self.decode, "B": self.both}
        shown = "+".join(f"{count}{letter}" for letter, count in counts.items() if count)
        return f"{self.system} {shown}"


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned.

    Attributes:
        profiles: Instances that may be used: one per tensor parallel degree.
        link: Between instances; None for the simulator's own hand-over times.
        devices: Number of GPUs; None to find how many are needed.
        rate: Requests per second to serve; None for as many as possible.

    Raises:
        ConfigError: Neither or both are given, or a number is out of range.
    """

    profiles: tuple[Profile, ...]
    demand: Demand
    goal: Goal
    link: Link | None = None
    devices: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.devices is None) == (self.rate is None):
            raise ConfigError("give either how many GPUs there are, or the rate to serve")
        if self.devices is not None and self.devices < 1:
            raise ConfigError(f"{self.devices} GPUs: must be at least 1")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ConfigError(f"a rate of {self.rate:g} requests/s: must be above 0")

    def config(self, layout: Layout) -> ClusterConfig:
        """Return a layout as the simulator takes it."""
        engine, mode = self._engine(layout.profile, layout.tokens), layout.system.value
        if layout.system is System.STOCK:
            engine, mode = replace(engine, kind=Stock(layout.tokens)), "least-in-flight"
        instances = make_instances(layout.prefill, layout.decode, layout.both, engine=engine)
        return self._cluster(instances, mode, layout.profile)

    def decode_only(self, profile: Profile, tokens: int) -> ClusterConfig:
        """Return a decode instance that gets computed prompts at no cost."""
        engine = self._engine(profile, tokens)
        instant = replace(engine, cost=_INSTANT, chunk_tokens=_ENDLESS, kv_blocks=_ENDLESS)
        pair = (
            InstanceConfig(InstanceId("instant"), Role.PREFILL, instant),
            InstanceConfig(InstanceId("decode"), Role.DECODE, engine),
        )
        return self._cluster(pair, "split", profile)

    def _engine(self, profile: Profile, tokens: int) -> EngineConfig:
        arena_tokens = max(_ARENA_TOKENS, _ARENA_REQUESTS * self.demand.longest[0])
        return of_profile(EngineConfig(arena_tokens=arena_tokens, chunk_tokens=tokens), profile)

    def _cluster(
        self, instances: tuple[InstanceConfig, ...], mode: str, profile: Profile
    ) -> ClusterConfig:
        # A link cannot be simulated without the KV bytes of a token.
        link = None if profile.kv_token_bytes is None else self.link
        return ClusterConfig(instances, mode, self.demand.seed, link=link)


@dataclass(frozen=True, slots=True)
class Found:
    """A layout that was simulated.

    Attributes:
        goodput: With the first seed.
        rates: With all seeds that were tried.
        devices: GPUs that its goodput is divided by: all that there are.
    """

    layout: Layout
    goodput: Goodput
    rates: tuple[float, ...]
    devices: int

    @property
    def rate(self) -> float:
        """Requests per second, mean over seeds."""
        return fmean(self.rates)

    @property
    def per_device(self) -> float:
        """Goodput per GPU."""
        return self.rate / self.devices


@dataclass(frozen=True, slots=True)
class Single:
    """Goodput of one instance of a profile: prompts alone as TTFT allows, decodes alone as TPOT
    allows, and both on stock vLLM and in mode `whole`."""

    profile: Profile
    prefill: Found
    decode: Goodput
    stock: Found
    whole: Found

    @property
    def split_rate(self) -> float:
        """Rate per GPU of prefill and decode instances in the best ratio."""
        if not self.prefill.rate or not self.decode.rate:
            return 0.0
        return 1 / (1 / self.prefill.rate + 1 / self.decode.rate) / self.profile.num_devices

    @property
    def whole_rate(self) -> float:
        """Rate per GPU of instances that do both."""
        return max(self.stock.rate, self.whole.rate) / self.profile.num_devices


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of a search.

    Attributes:
        singles: What one instance can do, of every profile that can hold the requests.
        found: Layouts that serve what was asked, the best one first.
        rival: The best aggregated layout if the best one splits, and the other way round.
        skipped: Why profiles were left out.
    """

    question: Question
    singles: tuple[Single, ...]
    found: tuple[Found, ...]
    rival: Found | None
    skipped: tuple[str, ...]

    @property
    def best(self) -> Found:
        """The layout that serves most, or with fewest GPUs."""
        return self.found[0]

    @property
    def recommended(self) -> Found:
        """The best layout; a hand-over is recommended only if it is clearly better."""
        if not self.best.layout.is_aggregated and self.rival is not None and not self.is_clear:
            return self.rival
        return self.best

    @property
    def saves_devices(self) -> bool:
        """Whether the best layout serves a given rate with fewer GPUs than its rival."""
        rival = self.rival
        return bool(self.question.rate and rival and rival.devices != self.best.devices)

    @property
    def margin(self) -> float:
        """By how much more the best layout serves per GPU than its rival, as a part; for a given
        rate, how many more GPUs the rival takes."""
        if self.rival is None:
            return math.inf
        if self.saves_devices:
            return self.rival.devices / self.best.devices - 1
        return self.best.per_device / self.rival.per_device - 1

    @property
    def is_clear(self) -> bool:
        """Whether the best layout is better with every seed, by more than the precision."""
        if self.rival is None:
            return True
        if self.saves_devices:
            return min(self.best.rates) >= (self.question.rate or 0.0) * SERVES
        pairs = zip(self.best.rates, self.rival.rates, strict=True)
        factor = self.rival.devices / self.best.devices
        return all(own * factor * SERVES > other for own, other in pairs)
