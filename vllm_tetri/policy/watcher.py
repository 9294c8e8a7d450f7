"""Which instance flips its role, and when: the transition watcher (paper section 3.5).

It looks at views and orders at most one flip at a look. Every policy keeps to the same
rules: instances of one model flip among each other, only ready ones do, one at a time,
and a role never loses its last ready one. Instances that do both never flip and stand in
for nobody. When the last flips were is read from the view: other routers may have
ordered them, or this one before it was started anew.

`balance` goes by what is foretold for both roles (`policy.balance`); `idle` and `threshold`
are the paper's and flip what had nothing, or little, to do (`policy.rest`).
"""

from __future__ import annotations

from enum import StrEnum
from math import inf
from typing import Protocol

from vllm_tetri.policy.balance import Balance
from vllm_tetri.policy.rest import Rest
from vllm_tetri.policy.watch_group import Group, Look
from vllm_tetri.types import ClusterView

ORDER_SEEN_S = 2.0  # by then a report shows an order, or it was lost
LOW_LOAD = 0.1  # of `threshold`: the paper's example


class WatchPolicy(StrEnum):
    """What makes an instance flip."""

    BALANCE = "balance"  # what is foretold for both roles
    THRESHOLD = "threshold"  # little to do for a while
    IDLE = "idle"  # nothing to do for a while
    OFF = "off"  # nobody watches


class Watcher(Protocol):
    """Decides on flips."""

    def look(self, view: ClusterView, now: float) -> Look:
        """What to do about the newest view. To be asked several times a second, with
        times that only grow; it remembers what it saw."""


def make_watcher(policy: WatchPolicy, *, after_s: float = 60.0) -> Watcher:
    """A watcher that has seen nothing yet.

    Args:
        policy: What makes an instance flip.
        after_s: How long `idle` and `threshold` watch before they say so.

    Raises:
        ValueError: With `off` nobody watches.
    """
    if policy is WatchPolicy.OFF:
        raise ValueError("nobody watches with off")
    return _Watcher(policy, after_s)


class _ModelWatch(Protocol):
    """A policy that watches the instances of one model."""

    def look(self, group: Group, now: float) -> Look: ...


class _Watcher:
    """One watch per model, and what they have in common."""

    def __init__(self, policy: WatchPolicy, after_s: float) -> None:
        self._policy = policy
        self._after_s = after_s
        self._watches: dict[str, _ModelWatch] = {}
        self._ordered_s: dict[str, float] = {}

    def look(self, view: ClusterView, now: float) -> Look:
        groups = {model: Group(view, model) for model in sorted(_models(view))}
        self._watches = {model: self._watches.get(model) or self._new() for model in groups}
        order, explanations = None, []
        for model, group in groups.items():
            look = self._held_back(model, group, self._watches[model].look(group, now), now)
            explanations.append(f"{model}: {look.explanation}")
            if order is None and look.order is not None:
                order = look.order
                self._ordered_s[model] = now
        return Look(order, "; ".join(explanations) or "no instance is there")

    def _new(self) -> _ModelWatch:
        if self._policy is WatchPolicy.BALANCE:
            return Balance()
        return Rest(self._after_s, LOW_LOAD if self._policy is WatchPolicy.THRESHOLD else 0.0)

    def _held_back(self, model: str, group: Group, look: Look, now: float) -> Look:
        """The same, without the order while another flip is under way."""
        if look.order is None:
            return look
        if group.flipping:
            return Look(None, f"{look.explanation}, but {group.flipping[0]} is flipping")
        if now - self._ordered_s.get(model, -inf) < ORDER_SEEN_S:
            return Look(None, f"{look.explanation}, but an order is on its way")
        return look


def _models(view: ClusterView) -> set[str]:
    return {each.info.models[0] for each in view.instances}
