"""Leaving in good order: who may be asked to, and when one that was asked may go.

Nobody who dispatches learns at once that an instance leaves: a view is one period old,
and a request may be on its way. So an instance goes when it has nothing, no router has
anything for it, and both have stayed so for a few periods.
"""

from __future__ import annotations

from enum import StrEnum

from vllm_tetri.policy.expected import Expected
from vllm_tetri.types import ClusterView, FlipStage, InstanceState, InstanceView, Role

QUIET_S = 0.5  # five report periods: a view, a report, and a request on its way


class Verdict(StrEnum):
    """What an instance that leaves does now."""

    STAY = "stay"
    GO = "go"  # nothing is left
    CUT_OFF = "cut_off"  # the deadline has passed


class Leaving:
    """What one instance knows about its own leaving. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.is_asked = False
        self._deadline: float | None = None
        self._quiet_since: float | None = None
        self._expected = Expected()

    def ask(self, deadline_s: float | None, now: float) -> None:
        """A router wants it to leave, at the latest in `deadline_s`. The last word counts."""
        self.is_asked = True
        self._deadline = None if deadline_s is None else now + deadline_s

    def told(self, router: int, in_flight: int, now: float) -> None:
        """A router says how many requests it has for this instance."""
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
    """Why an instance should stay, or keep its role: the cluster could not do without it
    what it can do now. Empty when others stand in for it, or it can itself as what it
    `becomes`. Where no roles are needed, anybody stands in for anybody."""
    others = {
        each.info.role
        for each in view.instances
        if each.state is InstanceState.READY
        and not _is_switching(each)
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


def _is_switching(one: InstanceView) -> bool:
    """Whether it is about to give up the role that it still has."""
    return one.flip is not None and one.flip.stage is FlipStage.SWITCHING
