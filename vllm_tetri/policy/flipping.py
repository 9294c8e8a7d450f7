"""Changing role: what one instance does from the order to the new role (paper section 3.5).

An instance drains first: nobody sends it work of its old role any more, and what it has
comes to its end. Or it takes the new role at once (`now`) and finishes old work beside
new work. Both are legal because direction is per request; a late request of the old role
is served all the same.

| it was  | who stops sending  | what comes to its end                      |
|---------|--------------------|--------------------------------------------|
| prefill | routers            | its queue, and KV on its way to others     |
| decode  | prefill instances  | running and waiting answers, and the arena |
| both    | all of them        | all of it                                  |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from vllm_tetri.policy.expected import Expected
from vllm_tetri.types import Flip, FlipStage, Role


class Work(StrEnum):
    """What an engine may still have."""

    REQUESTS = "unfinished requests"
    HAND_OVERS = "hand-overs to other instances"
    TRANSFERS = "transfers in the arena"


DRAINS: Mapping[Role, frozenset[Work]] = MappingProxyType(
    {
        Role.PREFILL: frozenset({Work.REQUESTS, Work.HAND_OVERS}),
        Role.DECODE: frozenset({Work.REQUESTS, Work.TRANSFERS}),
        Role.BOTH: frozenset(Work),
    }
)
"""What must come to its end before an instance has another role."""


class Stage(StrEnum):
    """Where an instance is."""

    STEADY = "steady"
    DRAINING = "draining"
    SWITCHING = "switching"  # the engine takes the new role at its next step


class Event(StrEnum):
    """What can happen to it."""

    ORDER = "order"
    ORDER_NOW = "order_now"
    DRAINED = "drained"
    TAKEN = "taken"  # by the engine
    LATE = "late"  # the deadline has passed
    WITHDRAWN = "withdrawn"  # before the engine took it
    CALL_OFF = "call_off"


TRANSITIONS: Mapping[tuple[Stage, Event], Stage] = MappingProxyType(
    {
        (Stage.STEADY, Event.ORDER): Stage.DRAINING,
        (Stage.STEADY, Event.ORDER_NOW): Stage.SWITCHING,
        (Stage.DRAINING, Event.ORDER): Stage.DRAINING,
        (Stage.DRAINING, Event.ORDER_NOW): Stage.SWITCHING,
        (Stage.DRAINING, Event.DRAINED): Stage.SWITCHING,
        (Stage.DRAINING, Event.LATE): Stage.STEADY,
        (Stage.DRAINING, Event.CALL_OFF): Stage.STEADY,
        (Stage.SWITCHING, Event.TAKEN): Stage.STEADY,
        (Stage.SWITCHING, Event.WITHDRAWN): Stage.STEADY,
    }
)


@dataclass(slots=True)
class _Try:
    """One flip, from its order on. Times are monotonic seconds."""

    epoch: int
    source: Role
    target: Role
    deadline: float | None
    reason: str
    ordered_s: float
    stage_s: float
    stage: FlipStage = FlipStage.DRAINING
    committing_s: float = 0.0  # since when there was nothing to wait for
    drain_s: float = 0.0
    commit_s: float = 0.0
    problem: str = ""


class Flipping:
    """The role of one instance. Owner: one thread. Times are monotonic seconds.

    Attributes:
        role: What it is now.
        stage: Where it is on its way to another.
        epoch: Of the newest order that it took. Orders have the number after the newest
            that their router knows of, so of two at once one is heard; repeats and late
            ones do nothing.
        num_flips: Roles taken.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self.stage = Stage.STEADY
        self.epoch = 0
        self.num_flips = 0
        self._try: _Try | None = None
        self._expected = Expected()

    def order(
        self,
        epoch: int,
        role: Role,
        *,
        is_now: bool,
        deadline_s: float | None,
        reason: str,
        now: float,
    ) -> bool:
        """A router wants another role; its present one calls off what is under way.

        Returns:
            Whether the order is new and changes anything.
        """
        if epoch <= self.epoch or self.stage is Stage.SWITCHING:
            return False  # in the latter case its router says it again
        self.epoch = epoch
        if role is self.role:
            if self.stage is Stage.STEADY:
                return False
            self._roll_back(Event.CALL_OFF, f"called off: {reason}", now)
            return True
        deadline = None if deadline_s is None else now + deadline_s
        self._try = _Try(epoch, self.role, role, deadline, reason, now, now)
        self._advance(Event.ORDER_NOW if is_now else Event.ORDER)
        self._expected.ask_again(now)
        return True

    def heard(self, router: int, now: float) -> None:
        """A router said something, of whatever."""
        self._expected.heard(router, now)

    def told(self, router: int, in_flight: int, now: float) -> None:
        """A router says how many requests it has for this instance."""
        self._expected.told(router, in_flight, now)

    def look(self, left: str, now: float) -> None:
        """Go on if the old role's work is done, or back if that takes too long.

        Args:
            left: Of the work that `DRAINS` names, in words; empty when there is none.
        """
        flip = self._try
        if flip is None or self.stage is not Stage.DRAINING:
            return
        is_expected = self._expected.is_any(now) or not self._expected.is_known(now)
        if not left and not is_expected:
            flip.drain_s, flip.committing_s = now - flip.ordered_s, now
            self._advance(Event.DRAINED)
        elif self._is_late(now):
            self._roll_back(Event.LATE, f"not drained in time: {left or 'more is on its way'}", now)

    @property
    def wanted(self) -> Role | None:
        """The role that the engine is to take at its next step."""
        return self._try.target if self._try and self.stage is Stage.SWITCHING else None

    def is_overdue(self, now: float) -> bool:
        """Whether the engine should have taken the wanted role by now."""
        return self.stage is Stage.SWITCHING and self._is_late(now)

    def withdrawn(self, now: float, why: str = "the engine takes no step") -> None:
        """The engine is told to keep the role that it has."""
        self._roll_back(Event.WITHDRAWN, why, now)

    def taken(self, now: float) -> None:
        """The engine has taken the wanted role, at a step boundary at time `now`."""
        flip = self._try
        assert flip is not None
        self._advance(Event.TAKEN)
        self.role = flip.target
        self.num_flips += 1
        flip.committing_s = flip.committing_s or now
        flip.stage, flip.stage_s = FlipStage.DONE, now

    def known(self, epoch: int, at_s: float, now: float) -> bool:
        """A router knows the role of this epoch since `at_s`; False if that is nothing new.

        That is its own clock, which is ours too if it runs on this machine. If not, it is
        hardly ever between the two times here, and if it is, it is right within them.
        """
        flip = self._try
        if flip is None or flip.epoch != epoch or flip.stage is not FlipStage.DONE or flip.commit_s:
            return False
        is_ours = flip.committing_s < at_s <= now
        flip.commit_s = (at_s if is_ours else now) - flip.committing_s
        return True

    def newest(self, now: float) -> Flip | None:
        """What to say of the newest flip."""
        flip = self._try
        if flip is None:
            return None
        return Flip(
            epoch=flip.epoch,
            source=flip.source,
            target=flip.target,
            stage=FlipStage.SWITCHING if self.stage is Stage.SWITCHING else flip.stage,
            age_s=now - flip.stage_s,
            drain_s=flip.drain_s,
            commit_s=flip.commit_s,
            reason=flip.reason,
            problem=flip.problem,
        )

    def _is_late(self, now: float) -> bool:
        deadline = self._try.deadline if self._try is not None else None
        return deadline is not None and now >= deadline

    def _roll_back(self, event: Event, problem: str, now: float) -> None:
        flip = self._try
        assert flip is not None
        self._advance(event)
        flip.stage, flip.stage_s, flip.problem = FlipStage.ROLLED_BACK, now, problem

    def _advance(self, event: Event) -> None:
        try:
            self.stage = TRANSITIONS[self.stage, event]
        except KeyError:
            raise ValueError(f"event {event} cannot happen to one that is {self.stage}") from None
