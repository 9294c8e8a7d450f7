"""Which instance flips its role, and when: the transition watcher (paper section 3.5).

Every policy orders at most one flip at a time and keeps to the same rules: instances of one
model flip among each other, only ready ones do, and a role never loses its last ready instance.
Instances that do both never flip and stand in for none. When the last flips were is read from
the view: other routers may have ordered them.

`balance` goes by a forecast for both roles (`policy.balance`); `idle` and `threshold` are the
paper's and flip instances that had nothing, or little, to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from math import inf

from vllm_tetri.policy.balance import OTHER, Balance, FlipOrder, Group, Look
from vllm_tetri.policy.scale import ROLES, Bounds, Change
from vllm_tetri.types import ClusterView, InstanceId, InstanceLoad, Role

ORDER_SEEN_S = 2.0  # by then a report shows an order, or it was lost
LOW_LOAD = 0.1  # of `threshold`: the paper's example


class WatchPolicy(StrEnum):
    """What makes an instance flip."""

    BALANCE = "balance"  # a forecast for both roles
    THRESHOLD = "threshold"  # little to do for a while
    IDLE = "idle"  # nothing to do for a while
    OFF = "off"  # no watcher


class Rest:
    """Flips what had work for less than `limit` of the last `after_s` seconds, or none at
    all, if no instance of the other role had as little.

    The paper leaves open what a load of 10 % is. Here it is the part of its time that an
    instance had any work, queued or running, since that means the same for both roles.
    Time between two looks counts if there was work at its end or was done in it.
    """

    def __init__(self, after_s: float, limit: float) -> None:
        self._after_s = after_s
        self._limit = limit
        self._times: dict[tuple[InstanceId, Role], _BusyTime] = {}

    def look(self, group: Group, now: float) -> Look:
        before, self._times = self._times, {}
        parts: dict[Role, list[tuple[float, InstanceId]]] = {role: [] for role in ROLES}
        for role, ready in group.ready.items():
            for each in ready:
                key = each.info.id, role
                self._times[key] = times = before.get(key) or _BusyTime(self._after_s)
                times.add(each.load, now)
                parts[role].append((times.part, each.info.id))
        rested = [
            (times.part, each.info.id, role)
            for role in ROLES
            for each in group.able(role)
            if (times := self._times[each.info.id, role]).is_full and self._is_low(times.part)
        ]
        leasts = [min(some) for some in parts.values() if some]
        least = ", ".join(f"{id_} {part:.0%}" for part, id_ in leasts)
        seen = f"{group}; least busy in the last {self._after_s:g} s: {least or 'none'}"
        if not rested:
            return Look(None, f"{seen}; no instance that may flip had little to do for that time")
        part, id_, role = min(rested)
        other = OTHER[role]
        has_work = any(_has_work(each.load) for each in group.ready[other])
        # All of the other role must have had work, and some have it now; otherwise two roles with
        # one instance at rest each would swap these again and again.
        if not has_work or self._is_low(min(parts[other])[0]):
            return Look(None, f"{seen}; {other} has little to do too")
        reason = f"{id_} was busy {part:.0%} of the last {self._after_s:g} s"
        return Look(FlipOrder(id_, other, now=False, reason=reason), f"{seen}; {id_} flips")

    def _is_low(self, part: float) -> bool:
        return part < self._limit or part == 0


class _BusyTime:
    """The part of the last `window_s` in which an instance had work; `is_full` once it was
    watched for that long."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._looks: deque[tuple[float, float]] = deque()  # times, and busy seconds until then
        self._load = InstanceLoad()
        self.part = 0.0
        self.is_full = False

    def add(self, load: InstanceLoad, now: float) -> None:
        before, self._load = self._load, load
        at_s, busy_s = self._looks[-1] if self._looks else (now, 0.0)
        has_advanced = (load.prompt_tokens_done, load.output_tokens_done) != (
            before.prompt_tokens_done, before.output_tokens_done,
        )  # fmt: skip
        busy_s += (now - at_s) * (has_advanced or _has_work(load))
        looks = self._looks
        looks.append((now, busy_s))
        while len(looks) > 1 and now - looks[1][0] >= self._window_s:
            looks.popleft()
        passed_s = now - looks[0][0]
        self.part = (busy_s - looks[0][1]) / passed_s if passed_s > 0 else 0.0
        self.is_full = passed_s >= self._window_s


def _has_work(load: InstanceLoad) -> bool:
    return any((load.running, load.waiting, load.held, load.queued_prefill_tokens))


class Watcher:
    """Decides on flips: a watch for each model, and what they have in common. `idle` and
    `threshold` watch for `after_s` before they order a flip. Flips keep to the `bounds` of roles,
    between which `balance` also asks for instances, or has some drained."""

    def __init__(
        self,
        policy: WatchPolicy,
        after_s: float = 60.0,
        bounds: Mapping[Role, Bounds] | None = None,
    ) -> None:
        limit = LOW_LOAD if policy is WatchPolicy.THRESHOLD else 0.0
        is_balance = policy is WatchPolicy.BALANCE
        self._bounds = bounds
        self._new = partial(Balance, bounds) if is_balance else partial(Rest, after_s, limit)
        self._watches: dict[str, Balance | Rest] = {}
        self._ordered_s: dict[str, float] = {}

    def look(self, view: ClusterView, now: float) -> Look:
        """Decide on the newest view. Called several times a second, with times that only grow;
        what earlier views showed is remembered."""
        models = sorted({each.info.models[0] for each in view.instances})
        self._watches = {model: self._watches.get(model) or self._new() for model in models}
        order, changes, explanations = None, list[Change](), []
        for model, watch in self._watches.items():
            group = Group(view, model, self._bounds)
            look = watch.look(group, now)
            changes += look.changes
            if look.order is not None and group.flipping:
                look = Look(None, f"{look.explanation}, but {group.flipping[0]} is flipping")
            elif look.order is not None and now - self._ordered_s.get(model, -inf) < ORDER_SEEN_S:
                look = Look(None, f"{look.explanation}, but an order is on its way")
            explanations.append(f"{model}: {look.explanation}")
            if order is None and look.order is not None:
                order = look.order
                self._ordered_s[model] = now
        return Look(order, "; ".join(explanations) or "no instance is there", tuple(changes))
