"""The instances of one model, as those who decide on flips see them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from vllm_tetri.types import ClusterView, FlipStage, InstanceId, InstanceState, InstanceView, Role

ROLLED_BACK_S = 60.0  # an instance whose flip failed is not asked again for so long
ROLES = (Role.PREFILL, Role.DECODE)
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class FlipOrder:
    """What to do.

    Attributes:
        role: What the instance is to become.
        now: It takes new-role work at once while it finishes old-role work.
        reason: Short, with the numbers that decided.
    """

    instance: InstanceId
    role: Role
    now: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Look:
    """Outcome of one look; `explanation` says why there is an order, or none."""

    order: FlipOrder | None
    explanation: str


class Group:
    """The instances of one model in one view."""

    def __init__(self, view: ClusterView, model: str) -> None:
        self.all = [each for each in view.instances if each.info.models[0] == model]
        ready = [each for each in self.all if each.state is InstanceState.READY]
        self.ready = {role: [each for each in ready if each.info.role is role] for role in ROLES}
        self.flipping = [each.info.id for each in self.all if _is_flipping(each)]

    @property
    def counts(self) -> dict[Role, int]:
        return {role: len(self.ready[role]) for role in ROLES}

    def able(self, role: Role) -> list[InstanceView]:
        """Those with a role who may give it up."""
        if len(self.ready[role]) < 2:
            return []
        return [each for each in self.ready[role] if not _has_just_failed(each)]

    def last_flip_s(self) -> float:
        """How long ago any of them got anywhere with a flip."""
        ages = (each.flip.age_s + each.age_s for each in self.all if each.flip is not None)
        return min(ages, default=inf)

    def __str__(self) -> str:
        return f"{self.counts[Role.PREFILL]} prefill, {self.counts[Role.DECODE]} decode"


def _is_flipping(one: InstanceView) -> bool:
    """With `now` it is ready all the while."""
    if one.state is InstanceState.READY:
        return one.flip is not None and one.flip.is_under_way
    return one.state is InstanceState.FLIPPING


def _has_just_failed(one: InstanceView) -> bool:
    flip = one.flip
    if flip is None or flip.stage is not FlipStage.ROLLED_BACK:
        return False
    return flip.age_s + one.age_s < ROLLED_BACK_S
