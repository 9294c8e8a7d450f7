"""What a plan is asked, and what it answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cost.profiles import Profile
from vllm_tetri.sim.plan.goodput import Demand, Goal, Goodput
from vllm_tetri.sim.plan.layout import Layout, Site
from vllm_tetri.sim.plan.single import Single

SERVES = 0.97  # of a rate that was asked for: goodput is only found to 3 %


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned.

    Attributes:
        profiles: Instances that may be taken: one per tensor parallel degree.
        devices: GPUs that there are; None to find how many it takes.
        rate: Requests per second that are to be served; None for as many as possible.

    Raises:
        ConfigError: Neither or both are given, or a number makes no sense.
    """

    profiles: tuple[Profile, ...]
    demand: Demand
    goal: Goal
    site: Site
    devices: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.devices is None) == (self.rate is None):
            raise ConfigError("give either how many GPUs there are, or the rate to serve")
        if self.devices is not None and self.devices < 1:
            raise ConfigError(f"{self.devices} GPUs: must be at least 1")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ConfigError(f"a rate of {self.rate:g} requests/s: must be above 0")


@dataclass(frozen=True, slots=True)
class Found:
    """A layout that was simulated.

    Attributes:
        goodput: Of the first seed.
        rates: Of all seeds that were tried.
        devices: GPUs that its goodput is to be divided by: all that there are.
    """

    layout: Layout
    goodput: Goodput
    rates: tuple[float, ...]
    devices: int

    @property
    def rate(self) -> float:
        """Requests per second, in the mean of seeds."""
        return fmean(self.rates)

    @property
    def per_device(self) -> float:
        """Goodput per GPU."""
        return self.rate / self.devices


@dataclass(frozen=True, slots=True)
class Plan:
    """What came of a question.

    Attributes:
        singles: What one instance can do, of every profile that can hold the requests.
        found: Layouts that serve what was asked, the best one first.
        rival: The best coupled one if the best one is not coupled, and the other way round;
            None where there is none.
        skipped: Why profiles were left out.
    """

    question: Question
    singles: tuple[Single, ...]
    found: tuple[Found, ...]
    rival: Found | None
    skipped: tuple[str, ...]

    @property
    def best(self) -> Found:
        """That serves most, or with fewest GPUs."""
        return self.found[0]

    @property
    def recommended(self) -> Found:
        """The best one; but handing over is only worth its trouble where it clearly is."""
        if not self.best.layout.is_coupled and self.rival is not None and not self.is_clear:
            return self.rival
        return self.best

    @property
    def margin(self) -> float:
        """By how much more the best one serves than its rival per GPU, as a part; for a given
        rate, how many more GPUs the rival takes."""
        if self.rival is None:
            return math.inf
        if self.question.rate is not None and self.rival.devices != self.best.devices:
            return self.rival.devices / self.best.devices - 1
        return self.best.per_device / self.rival.per_device - 1

    @property
    def is_clear(self) -> bool:
        """Whether requests of every seed say so, by more than goodput is found to."""
        if self.rival is None:
            return True
        if self.question.rate is not None and self.rival.devices != self.best.devices:
            return min(self.best.rates) >= self.question.rate * SERVES
        pairs = zip(self.best.rates, self.rival.rates, strict=True)
        factor = self.rival.devices / self.best.devices
        return all(own * factor * SERVES > other for own, other in pairs)
