"""Changing role and draining: what one instance does from the order to its end.

An instance drains before it changes role (paper section 3.5): it gets no new work of its old
role, and what `DRAINS` names comes to an end. Or it takes the new role at once (`now`) and
finishes old work along with new work. Both are legal because direction is per request.

An instance that is to leave goes when it has nothing, no router has anything for it, and both
have stayed so for a few report periods, since requests may be on their way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

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

    def heard(self, router: int, now: float) -> None:
        """Record any message of a router."""
        self._heard_s[router] = now

    def told(self, router: int, in_flight: int, now: float) -> None:
        """Record how many requests a router has for this instance."""
        self.heard(router, now)
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


class Stage(StrEnum):
    """Where an instance is."""

    STEADY = "steady"
    DRAINING = "draining"
    SWITCHING = "switching"  # the engine takes the new role at its next step


class FlipEvent(StrEnum):
    """What can happen to it."""

    ORDER = "order"
    ORDER_NOW = "order_now"
    DRAINED = "drained"
    TAKEN = "taken"  # by the engine
    LATE = "late"  # the deadline has passed
    WITHDRAWN = "withdrawn"  # before the engine took it
    CALL_OFF = "call_off"


TRANSITIONS = {
    (Stage.STEADY, FlipEvent.ORDER): Stage.DRAINING,
    (Stage.STEADY, FlipEvent.ORDER_NOW): Stage.SWITCHING,
    (Stage.DRAINING, FlipEvent.ORDER): Stage.DRAINING,
    (Stage.DRAINING, FlipEvent.ORDER_NOW): Stage.SWITCHING,
    (Stage.DRAINING, FlipEvent.DRAINED): Stage.SWITCHING,
    (Stage.DRAINING, FlipEvent.LATE): Stage.STEADY,
    (Stage.DRAINING, FlipEvent.CALL_OFF): Stage.STEADY,
    (Stage.SWITCHING, FlipEvent.TAKEN): Stage.STEADY,
    (Stage.SWITCHING, FlipEvent.WITHDRAWN): Stage.STEADY,
}


@dataclass(slots=True)
class _Attempt:
    """One flip from its order on: what is reported of it, and when its stage began. Times are
    monotonic seconds; `committing_s` is since when there was nothing left to wait for."""

    flip: Flip
    deadline: float | None
    ordered_s: float
    stage_s: float
    committing_s: float = 0.0


class Flipping:
    """The role of one instance, and the `stage` on its way to another. Owner: one thread.

    `epoch` is that of the newest order that it took. Orders have the number after the newest
    that their router knows of, so of two at once one counts; repeats and late ones do nothing.
    Times are monotonic seconds.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self.stage = Stage.STEADY
        self.epoch = 0
        self.num_flips = 0  # roles taken
        self._attempt: _Attempt | None = None
        self._expected = Expected()

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
        if epoch <= self.epoch or self.stage is Stage.SWITCHING:
            return False  # in the latter case its router repeats it
        self.epoch = epoch
        if role is self.role:
            if self.stage is Stage.STEADY:
                return False
            self._roll_back(FlipEvent.CALL_OFF, f"called off: {reason}", now)
            return True
        flip = Flip(epoch, self.role, role, FlipStage.DRAINING, reason=reason)
        deadline = None if deadline_s is None else now + deadline_s
        self._attempt = _Attempt(flip, deadline, now, now)
        self._advance(FlipEvent.ORDER_NOW if is_now else FlipEvent.ORDER)
        self._expected.ask_again(now)
        return True

    def heard(self, router: int, now: float) -> None:
        """Record any message of a router."""
        self._expected.heard(router, now)

    def told(self, router: int, in_flight: int, now: float) -> None:
        """Record how many requests a router has for this instance."""
        self._expected.told(router, in_flight, now)

    def look(self, left: str, now: float) -> None:
        """Go on if the old role's work is done, or back if that takes too long. `left` names the
        unfinished work of `DRAINS` in words; it is empty if there is none."""
        one = self._attempt
        if one is None or self.stage is not Stage.DRAINING:
            return
        is_expected = self._expected.is_any(now) or not self._expected.is_known(now)
        if not left and not is_expected:
            one.committing_s = now
            one.flip = replace(one.flip, drain_s=now - one.ordered_s)
            self._advance(FlipEvent.DRAINED)
        elif self._is_late(now):
            problem = f"not drained in time: {left or 'more is on its way'}"
            self._roll_back(FlipEvent.LATE, problem, now)

    @property
    def wanted(self) -> Role | None:
        """The role that the engine is to take at its next step."""
        one = self._attempt
        return one.flip.target if one and self.stage is Stage.SWITCHING else None

    def is_overdue(self, now: float) -> bool:
        """Whether the engine should have taken the wanted role by now."""
        return self.stage is Stage.SWITCHING and self._is_late(now)

    def withdrawn(self, now: float, why: str = "the engine takes no step") -> None:
        """Record that the engine was told to keep the role that it has."""
        self._roll_back(FlipEvent.WITHDRAWN, why, now)

    def taken(self, now: float) -> None:
        """Record that the engine took the wanted role, at a step boundary at time `now`."""
        self._advance(FlipEvent.TAKEN)
        one = self._end(FlipStage.DONE, "", now)
        self.role = one.flip.target
        self.num_flips += 1
        one.committing_s = one.committing_s or now

    def known(self, epoch: int, at_s: float, now: float) -> bool:
        """Record that a router knows the role of this epoch since `at_s`; False if that is
        nothing new.

        `at_s` is by the router's clock. If that is another machine's, it is hardly ever between
        the two times here, and if it is, it is right within them.
        """
        one = self._attempt
        if one is None or one.flip.epoch != epoch or one.flip.stage is not FlipStage.DONE:
            return False
        if one.flip.commit_s:
            return False
        is_ours = one.committing_s < at_s <= now
        one.flip = replace(one.flip, commit_s=(at_s if is_ours else now) - one.committing_s)
        return True

    def newest(self, now: float) -> Flip | None:
        """Return what to report of the newest flip."""
        one = self._attempt
        if one is None:
            return None
        stage = FlipStage.SWITCHING if self.stage is Stage.SWITCHING else one.flip.stage
        return replace(one.flip, stage=stage, age_s=now - one.stage_s)

    def _is_late(self, now: float) -> bool:
        deadline = self._attempt.deadline if self._attempt is not None else None
        return deadline is not None and now >= deadline

    def _roll_back(self, event: FlipEvent, problem: str, now: float) -> None:
        self._advance(event)
        self._end(FlipStage.ROLLED_BACK, problem, now)

    def _end(self, stage: FlipStage, problem: str, now: float) -> _Attempt:
        one = self._attempt
        assert one is not None
        one.flip, one.stage_s = replace(one.flip, stage=stage, problem=problem), now
        return one

    def _advance(self, event: FlipEvent) -> None:
        try:
            self.stage = TRANSITIONS[self.stage, event]
        except KeyError:
            raise ValueError(f"event {event} cannot happen to one that is {self.stage}") from None


QUIET_S = 0.5  # five report periods: a view, a report, and a request on its way


class Verdict(StrEnum):
    """What an instance does now that was told to leave."""

    STAY = "stay"
    GO = "go"  # nothing is left
    CUT_OFF = "cut_off"  # the deadline has passed


class Leaving:
    """Whether an instance that was told to leave may go. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.is_asked = False
        self._deadline: float | None = None
        self._quiet_since: float | None = None
        self._expected = Expected()

    def ask(self, deadline_s: float | None, now: float) -> None:
        """Record a router's order to leave, at the latest in `deadline_s`; the last one counts."""
        self.is_asked = True
        self._deadline = None if deadline_s is None else now + deadline_s

    def told(self, router: int, in_flight: int, now: float) -> None:
        """Record how many requests a router has for this instance."""
        self._expected.told(router, in_flight, now)

    def look(self, *, is_at_rest: bool, now: float) -> Verdict:
        """Whether it may go, given whether its engine has anything left."""
        if not self.is_asked:
            return Verdict.STAY
        if self._expected.is_any(now) or not is_at_rest:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        if self._quiet_since is not None and now - self._quiet_since >= QUIET_S:
            return Verdict.GO
        is_late = self._deadline is not None and now >= self._deadline
        return Verdict.CUT_OFF if is_late else Verdict.STAY


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
