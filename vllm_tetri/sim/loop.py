"""Virtual time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Call = Callable[[float], object]


class Loop:
    """Calls what is due, in order of time; calls due at one time run in the order in which
    they were scheduled."""

    def __init__(self) -> None:
        self.due: list[tuple[float, int, Call]] = []
        self._num_scheduled = 0

    def at(self, time_s: float, call: Call) -> None:
        """Schedule `call(time_s)`."""
        self._num_scheduled += 1
        heappush(self.due, (time_s, self._num_scheduled, call))

    def run(self) -> None:
        """Return when nothing is due any more."""
        while self.due:
            time_s, _, call = heappop(self.due)
            call(time_s)
