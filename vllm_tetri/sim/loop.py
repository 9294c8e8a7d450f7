"""Virtual time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Call = Callable[[float], None]


class Loop:
    """Calls what is due, in order of time and, at the same time, as it was asked for."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Call]] = []
        self._asked = 0

    def __len__(self) -> int:
        """Calls that are asked for."""
        return len(self._due)

    def at(self, time_s: float, call: Call) -> None:
        """Call `call(time_s)` then."""
        self._asked += 1
        heappush(self._due, (time_s, self._asked, call))

    def run(self) -> None:
        """Until nothing is due any more."""
        due = self._due
        while due:
            time_s, _, call = heappop(due)
            call(time_s)
