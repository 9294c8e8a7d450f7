"""Changing role and draining: what one instance does from the order to its end.

An instance drains before it changes role (paper section 3.5): it gets no new work of its old
role, and what `DRAINS` names comes to an end. Or it takes the new role at once (`now`) and
finishes old work along with new work. Both are legal because direction is per request.

An instance that is to leave goes when it has nothing, no router has anything for it, and both
have stayed so for a few report periods, since requests may be on their way.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from math import inf

from vllm_tetri.types import ClusterView, Flip, FlipStage, InstanceState, InstanceView, Role

ROUTER_LOST_S = 1.0  # a router without a message for this long does not count any more


class Expected:
    """Requests that every router has for one instance. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._heard_s: dict[int, float] = {}
        self._in_flight: dict[int, tuple[int, float]] = {}

    def ask_again(self, now: float) -> None:
        """Discard what routers reported before now."""
        self._since = now
        self._in_flight.clear()

    def record_message(self, router: int, now: float) -> None:
        """Record any message of a router."""
        self._heard_s[router] = now

    def record_in_flight(self, router: int, in_flight: int, now: float) -> None:
        """Record how many requests a router has for this instance."""
        self.record_message(router, now)
        self._in_flight[router] = in_flight, now

    def is_any(self, now: float) -> bool:
        """Whether a router that is not lost has a request for it."""
        return any(num and now - at_s < ROUTER_LOST_S for num, at_s in self._in_flight.values())

    def is_known(self, now: float) -> bool:
        """Whether all routers that are not lost have reported since `ask_again`."""
        if now - self._since >= ROUTER_LOST_S:
            return True  # a router holds things up no longer than this
        return bool(self._in_flight) and all(
            router in self._in_flight
            for router, at_s in self._heard_s.items()
            if now - at_s < ROUTER_LOST_S
        )


class Work(StrEnum):
    """What an engine may still have."""

    REQUESTS = "unfinished requests"
    HAND_OVERS = "hand-overs to other instances"
    TRANSFERS = "transfers in the arena"


DRAINS = {  # what must come to its end before an instance has another role
    Role.PREFILL: frozenset({Work.REQUESTS, Work.HAND_OVERS}),
    Role.DECODE: frozenset({Work.REQUESTS, Work.TRANSFERS}),
    Role.BOTH: frozenset(Work),
}


class Flipping:
    """The role of one instance, and its newest flip to another. Owner: one thread.

    A flip drains until nothing of the old role is left or `expected`, then waits for the engine
    to take the new role at its next step. `epoch` is that of the newest order that was taken.
    Orders have the number after the newest that their router knows of, so of two at once one
    counts; repeats and late ones do nothing. Times are monotonic seconds.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self.epoch = 0
        self.expected = Expected()
        self._flip: Flip | None = None
        self._deadline = inf
        self._ordered_s = self._ended_s = 0.0
        self._committing_s = 0.0  # since when there was nothing left to wait for

    @property
    def stage(self) -> FlipStage | None:
        """How far the flip under way is; None if there is none."""
        flip = self._flip
        return flip.stage if flip is not None and flip.is_under_way else None

    @property
    def wanted(self) -> Role | None:
        """The role that the engine is to take at its next step."""
        flip = self._flip
        return flip.target if flip is not None and self.stage is FlipStage.SWITCHING else None

    def order(
        self,
        epoch: int,
        role: Role,
        is_now: bool,
        deadline_s: float | None,
        reason: str,
        now: float,
    ) -> bool:
        """Take a router's order of a role; the present role calls off what is under way. Returns
        whether the order is new and changes anything."""
        if epoch <= self.epoch or self.wanted is not None:
            return False  # in the latter case its router repeats it
        self.epoch = epoch
        if role is self.role:
            return self.roll_back(f"called off: {reason}", now)
        stage = FlipStage.SWITCHING if is_now else FlipStage.DRAINING
        self._flip = Flip(epoch, self.role, role, stage, reason=reason)
        self._deadline = inf if deadline_s is None else now + deadline_s
        self._ordered_s, self._committing_s = now, 0.0
        self.expected.ask_again(now)
        return True

    def advance(self, left: str, now: float) -> None:
        """End a drain if the old role's work is done, or the flip if that takes too long. `left`
        names the unfinished work of `DRAINS` in words; it is empty if there is none."""
        flip = self._flip
        if flip is None or self.stage is not FlipStage.DRAINING:
            return
        if not left and not self.expected.is_any(now) and self.expected.is_known(now):
            self._committing_s, drain_s = now, now - self._ordered_s
            self._flip = replace(flip, stage=FlipStage.SWITCHING, drain_s=drain_s)
        elif now >= self._deadline:
            self.roll_back(f"not drained in time: {left or 'more is on its way'}", now)

    def is_overdue(self, now: float) -> bool:
        """Whether the engine should have taken the wanted role by now."""
        return self.wanted is not None and now >= self._deadline

    def roll_back(self, problem: str, now: float) -> bool:
        """Keep the role; False if no flip is under way."""
        if self._flip is None or self.stage is None:
            return False
        self._flip = replace(self._flip, stage=FlipStage.ROLLED_BACK, problem=problem)
        self._ended_s = now
        return True

    def record_taken(self, now: float) -> None:
        """Record that the engine took the wanted role, at a step boundary at time `now`."""
        assert self._flip is not None
        self.role, self._ended_s = self._flip.target, now
        self._flip = replace(self._flip, stage=FlipStage.DONE)
        self._committing_s = self._committing_s or now

    def record_commit(self, epoch: int, at_s: float, now: float) -> bool:
        """Record that a router knows the role of this epoch since `at_s`; False if that is
        nothing new.

        `at_s` is by the router's clock. If that is another machine's, it is hardly ever between
        the two times here, and if it is, it is right within them.
        """
        flip = self._flip
        if flip is None or (flip.epoch, flip.stage) != (epoch, FlipStage.DONE) or flip.commit_s:
            return False
        is_ours = self._committing_s < at_s <= now
        self._flip = replace(flip, commit_s=(at_s if is_ours else now) - self._committing_s)
        return True

    def newest(self, now: float) -> Flip | None:
        """Return what to report of the newest flip."""
        since_s = self._ended_s if self.stage is None else self._ordered_s
        return None if self._flip is None else replace(self._flip, age_s=now - since_s)


QUIET_S = 0.5  # five report periods: a view, a report, and a request on its way


class Verdict(StrEnum):
    """What an instance does now that was told to leave."""

    STAY = "stay"
    GO = "go"  # nothing is left
    CUT_OFF = "cut_off"  # the deadline has passed


class Leaving:
    """Whether an instance that was told to leave may go. Times are monotonic seconds."""

    def __init__(self, expected: Expected) -> None:
        self.is_asked = False
        self._deadline = inf
        self._quiet_since: float | None = None
        self.expected = expected

    def ask(self, deadline_s: float | None, now: float) -> None:
        """Record a router's order to leave, at the latest in `deadline_s`; the last one counts."""
        self.is_asked = True
        self._deadline = inf if deadline_s is None else now + deadline_s

    def decide(self, *, is_at_rest: bool, now: float) -> Verdict:
        """Decide whether it may go, given whether its engine has anything left."""
        if not self.is_asked:
            return Verdict.STAY
        if self.expected.is_any(now) or not is_at_rest:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        if self._quiet_since is not None and now - self._quiet_since >= QUIET_S:
            return Verdict.GO
        return Verdict.CUT_OFF if now >= self._deadline else Verdict.STAY


def why_needed(
    view: ClusterView,
    one: InstanceView,
    *,
    becomes: Role | None = None,
    are_roles_needed: bool = True,
) -> str:
    """Say what the cluster could not do without an instance, or without its role; empty when
    others stand in for it, or it can itself as what it `becomes`. Where no roles are needed,
    every instance stands in for every other one."""
    others = {
        each.info.role
        for each in view.instances
        if each.state is InstanceState.READY
        and not (each.flip is not None and each.flip.stage is FlipStage.SWITCHING)
        and each.info.id != one.info.id
        and each.info.models[0] == one.info.models[0]
    }
    if becomes is not None:
        others.add(becomes)
    if Role.BOTH in others or (others and not are_roles_needed):
        return ""
    needed = {Role.PREFILL, Role.DECODE} if one.info.role is Role.BOTH else {one.info.role}
    missing = sorted(role.value for role in needed - others)
    return f"{one.info.id} is the last instance for {' and '.join(missing)}" if missing else ""
