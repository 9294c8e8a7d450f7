"""What is done to a cluster: which fault comes next, and to whom."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random

READY = "ready"
AWAY = "away"
ROUTER, PREDICTOR, ENGINE = "router", "predictor", "engine"

States = Mapping[str, tuple[str, str]]
"""Role and state by name: of routers always, of their instances when one answers, and of
predictors when somebody has looked."""


class Kind(StrEnum):
    """A fault. Killed are all processes of a victim, as when its machine dies; stopped
    ones go on after a while, as after a machine's pause. Of an engine only the process
    that computes is killed: its API server lives, and has to notice."""

    KILL_PREFILL = "kill-prefill"
    KILL_DECODE = "kill-decode"
    KILL_ROUTER = "kill-router"
    KILL_PREDICTOR = "kill-predictor"
    KILL_ENGINE = "kill-engine"
    STOP_PREFILL = "stop-prefill"
    STOP_DECODE = "stop-decode"
    STOP_ROUTER = "stop-router"
    STOP_PREDICTOR = "stop-predictor"

    @property
    def is_deadly(self) -> bool:
        """Whether the victim has to be started again."""
        return self.value.startswith("kill")

    @property
    def role(self) -> str:
        """What the victim is: a role, a router, a predictor, or any instance's engine."""
        return self.value.partition("-")[2]


@dataclass(slots=True)
class Fault:
    """One that happened; times are monotonic seconds.

    Attributes:
        at_s: When it began.
        was_gone: Whether the cluster has noticed.
        whole_s: When the victim was of use again; None if that was not seen.
    """

    kind: Kind
    victim: str
    at_s: float
    was_gone: bool = False
    whole_s: float | None = None

    def look(self, states: States, now: float) -> None:
        """Note whether the victim is of use."""
        if self.whole_s is not None:
            return
        found = states.get(self.victim)
        if found is None and not _ready(states, ROUTER):
            return  # without a router nobody can say what instances are
        if found is None or found[1] != READY:
            self.was_gone = True
        elif self.was_gone:
            self.whole_s = now


def victims(kind: Kind, states: States) -> list[str]:
    """Who may be hit: whoever has another ready one beside it. A predictor has none, since
    its instance does without."""
    if kind.role == ENGINE:
        roles = {role for role, _ in states.values()} - {ROUTER, PREDICTOR}
        spared = [found for found in (_ready(states, role) for role in roles) if len(found) > 1]
        return sorted(name for found in spared for name in found)
    ready = _ready(states, kind.role)
    return ready if len(ready) > 1 or kind.role == PREDICTOR else []


def _ready(states: States, role: str) -> list[str]:
    return sorted(name for name, found in states.items() if found == (role, READY))


class Deck:
    """Kinds in an order that a seed decides, every kind as often as any other.

    Args:
        kinds: Which there are.
        number: Of faults in all.
    """

    def __init__(self, kinds: Collection[Kind], number: int, rng: Random) -> None:
        self._kinds = sorted(kinds)
        self._rng = rng
        self._undealt = number
        self._left: list[Kind] = []

    @property
    def is_empty(self) -> bool:
        """Whether all of them were drawn."""
        return not self._left and not self._undealt

    def draw(self, states: States) -> tuple[Kind, str] | None:
        """The next fault that is possible now, and its victim; None if none is."""
        while True:
            for kind in self._left:
                found = victims(kind, states)
                if found:
                    self._left.remove(kind)
                    return kind, self._rng.choice(found)
            if not self._undealt or len(self._left) >= len(self._kinds):
                return None
            number = min(len(self._kinds), self._undealt)
            self._undealt -= number
            self._left += self._rng.sample(self._kinds, number)

    def put_back(self, kind: Kind) -> None:
        """It did not happen."""
        self._left.append(kind)
