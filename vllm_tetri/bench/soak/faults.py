"""What is done to a cluster: which fault comes next, and to whom."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from vllm_tetri.bench.soak.processes import ROUTER

READY = "ready"


class Kind(StrEnum):
    """A fault. Killed are all processes of a victim, as when its machine dies; stopped
    ones go on after a while, as after a machine's pause."""

    KILL_PREFILL = "kill-prefill"
    KILL_DECODE = "kill-decode"
    KILL_ROUTER = "kill-router"
    STOP_PREFILL = "stop-prefill"
    STOP_DECODE = "stop-decode"
    STOP_ROUTER = "stop-router"

    @property
    def is_deadly(self) -> bool:
        """Whether the victim has to be started again."""
        return self.value.startswith("kill")

    @property
    def role(self) -> str:
        """What the victim is: a role, or the router."""
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

    def look(self, states: Mapping[str, tuple[str, str]], now: float) -> None:
        """Note whether the victim is of use.

        Args:
            states: As for `victims`.
        """
        if self.whole_s is not None:
            return
        is_router = self.victim == ROUTER
        is_ready = bool(states) if is_router else states.get(self.victim, ("", ""))[1] == READY
        # Without a router nobody can say what instances are.
        if not is_ready and (states or is_router):
            self.was_gone = True
        elif is_ready and self.was_gone:
            self.whole_s = now


def victims(kind: Kind, states: Mapping[str, tuple[str, str]]) -> list[str]:
    """Who may be hit: an instance whose role another ready one has, or the router.

    Args:
        states: Role and state of every instance, as the router has them; empty when it
            does not answer, and then nobody may be hit.
    """
    if kind.role == ROUTER:
        return [ROUTER] if states else []
    ready = sorted(name for name, found in states.items() if found == (kind.role, READY))
    return ready if len(ready) > 1 else []


class Deck:
    """Kinds in an order that a seed decides, every kind as often as any other.

    Args:
        kinds: Which there are.
    """

    def __init__(self, kinds: Collection[Kind], rng: Random) -> None:
        self._kinds = sorted(kinds)
        self._rng = rng
        self._left: list[Kind] = []

    def draw(self, states: Mapping[str, tuple[str, str]]) -> tuple[Kind, str] | None:
        """The next fault that is possible now, and its victim; None if none is."""
        while True:
            for kind in self._left:
                found = victims(kind, states)
                if found:
                    self._left.remove(kind)
                    return kind, self._rng.choice(found)
            if len(self._left) >= len(self._kinds):
                return None
            self._left += self._rng.sample(self._kinds, len(self._kinds))
