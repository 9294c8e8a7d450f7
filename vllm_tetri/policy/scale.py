"""How many instances a load needs, between bounds. Pure.

The demand on a role is how many of its instances the load would keep at work all the time.
Roles flip first: an instance is started only when all together are too few, whatever their roles,
and one is drained only when all together are too many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf

from vllm_tetri.types import InstanceId, Role

ROLES = (Role.PREFILL, Role.DECODE)
MOST_BUSY = 0.8  # part of their time that instances may be at work before there are more
LEAST_BUSY = 0.5  # with one instance less, before there is one less
START_AFTER_S = 10.0  # more than a flip and its cool-down take
DRAIN_AFTER_S = 60.0  # an instance takes tens of seconds to start


@dataclass(frozen=True, slots=True)
class Bounds:
    """The fewest and the most instances of a role; ValueError if these are not in order."""

    least: int = 1
    most: float = inf

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ValueError(f"{self}: write N, or MIN:MAX with 1 <= MIN <= MAX")

    @classmethod
    def parse(cls, text: str) -> Bounds:
        """Read `N` or `MIN:MAX`; ValueError if it is neither."""
        least, colon, most = text.partition(":")
        bounds = cls(int(least), int(most if colon else least))
        if colon and not bounds.least:
            raise ValueError(f"{text}: a role never loses its last instance")
        return bounds

    @property
    def is_range(self) -> bool:
        """Whether the number may change."""
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most:.0f}" if self.is_range else str(self.least)


def all_bounds(given: Mapping[Role, Bounds] | None) -> dict[Role, Bounds]:
    """Return the bounds of every role, of which not all need be given."""
    return {role: (given or {}).get(role, Bounds()) for role in ROLES}


@dataclass(frozen=True, slots=True)
class Change:
    """One instance more of a role, or `drained` to be drained; `reason` has the numbers."""

    model: str
    role: Role
    reason: str
    drained: InstanceId | None = None


def missing(
    demand: Mapping[Role, float], counts: Mapping[Role, int], bounds: Mapping[Role, Bounds]
) -> tuple[Role, int] | None:
    """Return the role that needs an instance more (1) or has one too many (-1); None if flips can
    do all that has to be done."""
    need = {role: _within(bounds[role], demand[role] / MOST_BUSY) for role in ROLES}
    enough = {role: _within(bounds[role], demand[role] / LEAST_BUSY) for role in ROLES}
    have = sum(counts[role] for role in ROLES)
    if have < sum(need.values()):
        return max(ROLES, key=lambda role: need[role] - counts[role]), 1
    if have > sum(enough.values()):
        return max(ROLES, key=lambda role: counts[role] - enough[role]), -1
    return None


def _within(bounds: Bounds, number: float) -> int:
    return int(min(max(ceil(number - 1e-9), bounds.least), bounds.most))


class Scale:
    """Asks for a change that has been right for a while, with the same instances all the time."""

    def __init__(self, bounds: Mapping[Role, Bounds]) -> None:
        self._bounds = all_bounds(bounds)
        self._seen: tuple[object, ...] = ()
        self._since_s = 0.0

    def look(
        self, demand: Mapping[Role, float] | None, counts: Mapping[Role, int], now: float
    ) -> tuple[Role, int] | None:
        """Decide on the demand, None while that is not known or instances are about to change. With
        one request now and then it is known now and then, which ends no wait."""
        number_of = tuple(counts[role] for role in ROLES)
        if demand is None and self._seen[1:] == number_of:
            return None
        wanted = None if demand is None else missing(demand, counts, self._bounds)
        number = wanted and wanted[1]
        seen = (number, *number_of)
        if seen != self._seen:
            self._seen, self._since_s = seen, now
        after_s = START_AFTER_S if number == 1 else DRAIN_AFTER_S
        return wanted if now - self._since_s >= after_s else None
