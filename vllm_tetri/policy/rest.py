"""Flips for want of work: the paper's policies `idle` and `threshold` (section 3.5)."""

from __future__ import annotations

from collections import deque

from vllm_tetri.policy.watch_group import OTHER, ROLES, FlipOrder, Group, Look
from vllm_tetri.types import InstanceId, InstanceLoad, InstanceView, Role

_PARTS = 20  # of the time that is looked back


class Rest:
    """Flips what had work for less than `limit` of the last `after_s` seconds, or none at
    all, if nobody of the other role had as little.

    The paper leaves open what a load of 10 % is. Here it is the part of its time that an
    instance had any work, queued or running, since that means the same for both roles.
    Time between two looks counts if there was work at its end or was done in it.
    """

    def __init__(self, after_s: float, limit: float) -> None:
        self._after_s = after_s
        self._limit = limit
        self._times: dict[tuple[InstanceId, Role], _BusyTime] = {}

    def look(self, group: Group, now: float) -> Look:
        self._saw(group, now)
        rested = [
            (self._part(each), each.info.id, role)
            for role in ROLES
            for each in group.able(role)
            if self._is_low(each) and self._times[each.info.id, role].is_full
        ]
        least = ", ".join(self._least(group, role) for role in ROLES if group.ready[role])
        seen = f"{group}; least busy in the last {self._after_s:g} s: {least or 'nobody'}"
        if not rested:
            return Look(None, f"{seen}; nobody may flip who had little to do for so long")
        part, id_, role = min(rested)
        other = OTHER[role]
        if not self._is_short(group, other):
            return Look(None, f"{seen}; {other} has little to do too")
        reason = f"{id_} was busy {part:.0%} of the last {self._after_s:g} s"
        return Look(FlipOrder(id_, other, now=False, reason=reason), f"{seen}; {id_} flips")

    def _saw(self, group: Group, now: float) -> None:
        times = self._times
        self._times = {}
        for role in ROLES:
            for each in group.ready[role]:
                key = each.info.id, role
                self._times[key] = times.get(key) or _BusyTime(self._after_s)
                self._times[key].saw(each.load, now)

    def _least(self, group: Group, role: Role) -> str:
        part, id_ = min((self._part(each), each.info.id) for each in group.ready[role])
        return f"{id_} {part:.0%}"

    def _is_short(self, group: Group, role: Role) -> bool:
        """Whether all with a role have had work, and some have it right now. Otherwise two
        roles with one at rest each would swap them for ever."""
        others = group.ready[role]
        has_work = any(_has_work(each.load) for each in others)
        return has_work and not any(self._is_low(each) for each in others)

    def _part(self, one: InstanceView) -> float:
        return self._times[one.info.id, one.info.role].part

    def _is_low(self, one: InstanceView) -> bool:
        part = self._part(one)
        return part < self._limit or part == 0


class _BusyTime:
    """Which part of the last `window_s` an instance had work."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._parts: deque[tuple[float, float]] = deque()  # seconds, and busy ones of them
        self._newest_s = self._newest_busy_s = 0.0
        self._load: InstanceLoad | None = None
        self._at_s = 0.0
        self.part = 0.0
        self.is_full = False  # whether it was watched for so long

    def saw(self, load: InstanceLoad, now: float) -> None:
        if self._load is not None:
            is_busy = _has_work(load) or _tokens_done(load) != _tokens_done(self._load)
            self._newest_s += now - self._at_s
            self._newest_busy_s += (now - self._at_s) * is_busy
            self._sum_up()
        self._load, self._at_s = load, now

    def _sum_up(self) -> None:
        passed_s = self._newest_s + sum(each_s for each_s, _ in self._parts)
        while self._parts and passed_s - self._parts[0][0] >= self._window_s:
            passed_s -= self._parts.popleft()[0]
        busy_s = self._newest_busy_s + sum(each_s for _, each_s in self._parts)
        self.part = busy_s / passed_s if passed_s > 0 else 0.0
        self.is_full = passed_s >= self._window_s
        if self._newest_s >= self._window_s / _PARTS:
            self._parts.append((self._newest_s, self._newest_busy_s))
            self._newest_s = self._newest_busy_s = 0.0


def _has_work(load: InstanceLoad) -> bool:
    return any((load.running, load.waiting, load.held, load.queued_prefill_tokens))


def _tokens_done(load: InstanceLoad) -> tuple[int, int]:
    return load.prompt_tokens_done, load.answer_tokens_done
