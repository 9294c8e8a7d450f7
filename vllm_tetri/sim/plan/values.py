"""Layouts that a plan compares, what it is asked, and what it finds."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum

from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.sim.cost.profiles import Least, Profile
from vllm_tetri.sim.plan.goodput import Demand, Score

_WORTH = 0.05  # by which handing over must be better: more than goodputs scatter


class System(StrEnum):
    """What serves: stock vLLM, or this package in the mode of that name."""

    STOCK = "stock vLLM"
    WHOLE = "whole"
    ADAPTIVE = "adaptive"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class Layout:
    """Instances of each role; `tokens` is the most prompt tokens of a step: the chunk, or the
    budget of stock vLLM, which decodes share. A role alone serves its part of the requests: prompts
    whose first token is the last, or decodes of prompts that cost nothing. With `nodes`, each has
    these instances, and KV stays within it."""

    system: System
    profile: Profile  # of all instances, but decode instances may have another one
    prefill: int
    decode: int
    both: int
    tokens: int
    decode_profile: Profile | None = None
    nodes: int = 1

    @property
    def profiles(self) -> Counter[Profile]:
        """The number of instances of every profile."""
        counts = Counter({self.profile: self.nodes * (self.prefill + self.both)})
        counts[self.decode_profile or self.profile] += self.nodes * self.decode
        return +counts

    @property
    def num_devices(self) -> int:
        """GPUs of all instances."""
        return sum(count * each.num_devices for each, count in self.profiles.items())

    def total(self, what: Least) -> float:
        """GPUs, their price an hour, watts or rack units."""
        return sum(count * what.of(each) for each, count in self.profiles.items())

    @property
    def is_aggregated(self) -> bool:
        """Whether every request stays on one instance."""
        return self.system in (System.STOCK, System.WHOLE)

    @property
    def name(self) -> str:
        """The system and its instances, as `split 3P+1D`."""
        counts = {"P": self.prefill, "D": self.decode, "B": self.both}
        shown = "+".join(f"{count}{letter}" for letter, count in counts.items() if count)
        return f"{f'{self.nodes} x ' if self.nodes > 1 else ''}{self.system} {shown}"


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned; either devices or rate are given."""

    profiles: tuple[Profile, ...]  # one per kind of GPU and tensor parallel degree
    demand: Demand
    slo: Objective
    attainment: float = 0.9  # share of requests that must keep both SLOs
    link: float | None = None  # bytes per second; None for the simulator's own hand-over times
    devices: int | None = None  # number of GPUs; None to find how many are needed
    rate: float | None = None  # requests per second; None for as many as possible
    least: Least = Least.GPUS
    node: int | None = None  # GPUs of a node that KV does not leave; None if it goes anywhere


@dataclass(frozen=True, slots=True)
class Found:
    """A layout with its goodput, the score at the next higher rate that was tried, and the GPUs
    that its goodput is divided by: all that there are."""

    layout: Layout
    rate: float
    beyond: Score
    devices: int

    @property
    def per_device(self) -> float:
        """Goodput per GPU."""
        return self.rate / self.devices

    def total(self, what: Least) -> float:
        """What all GPUs take; those that no instance has, as much as those that one has."""
        return self.layout.total(what) * self.devices / self.layout.num_devices

    def on_nodes(self, nodes: int, devices: int | None) -> Found:
        """Return this, found on one node, on so many: requests go to one of them by chance."""
        layout = replace(self.layout, nodes=nodes)
        return Found(layout, nodes * self.rate, self.beyond, devices or layout.num_devices)


@dataclass(frozen=True, slots=True)
class Single:
    """One instance of a profile: prompts alone, decodes alone, and both on stock vLLM and in mode
    `whole`."""

    profile: Profile
    prefill: Found
    decode: Found
    stock: Found
    whole: Found

    @property
    def whole_rate(self) -> float:
        """Rate per instance of those that do both."""
        return max(self.stock.rate, self.whole.rate)


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of a search."""

    question: Question
    singles: tuple[Single, ...]  # of every profile that can hold the requests
    found: tuple[Found, ...]  # layouts that serve what was asked, the best one first
    skipped: tuple[str, ...] = ()  # why profiles were left out

    @property
    def best(self) -> Found:
        """The layout that serves most per unit, or with fewest units."""
        return self.found[0]

    @property
    def rival(self) -> Found | None:
        """The best aggregated layout if the best one splits, and the other way round."""
        kind = self.best.layout.is_aggregated
        return next((each for each in self.found if each.layout.is_aggregated is not kind), None)

    def per_unit(self, found: Found) -> float:
        """Goodput per GPU, or per unit of what is to be least."""
        return found.rate / self._total(found)

    @property
    def margin(self) -> float:
        """By how much more the best layout serves per unit than its rival, as a part; for a given
        rate, how much more the rival takes, if it does."""
        if self.rival is None:
            return math.inf
        if self.is_cheaper:
            return self._total(self.rival) / self._total(self.best) - 1
        return self.per_unit(self.best) / self.per_unit(self.rival) - 1

    @property
    def is_cheaper(self) -> bool:
        """Whether a rate is given for which the rival takes more in all."""
        is_more = self.rival is not None and self._total(self.rival) > self._total(self.best)
        return self.question.rate is not None and is_more

    def _total(self, found: Found) -> float:
        return found.total(self.question.least)

    @property
    def is_clear(self) -> bool:
        """Whether the best layout is better by more than what chance may bring."""
        return self.margin > _WORTH

    @property
    def recommended(self) -> Found:
        """The best layout; a hand-over is recommended only if it is clearly better."""
        if self.rival is None or self.best.layout.is_aggregated or self.is_clear:
            return self.best
        return self.rival
