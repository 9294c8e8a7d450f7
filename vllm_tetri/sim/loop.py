"""Virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf

Call = Callable[[float], None]


class Loop:
    """Calls what is due, in order of time and, at the same time, as it was asked for."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Call]] = []
        self._asked = 0
        self._next_s = inf  # of the calls that `run` was given

    def __len__(self) -> int:
        """Calls that are asked for; of those that `run` was given only the next one."""
        return len(self._due) + (self._next_s < inf)

    def at(self, time_s: float, call: Call) -> None:
        """Call `call(time_s)` then."""
        self._asked += 1
        heappush(self._due, (time_s, self._asked, call))

    def run(self, given: Iterable[tuple[float, Call]] = ()) -> None:
        """Until nothing is due any more.

        Args:
            given: Calls that are known before, in order of time; they go before all others
                of the same time. They are taken one by one: a million would make all others
                slower.
        """
        due, coming = self._due, iter(given)
        self._next_s, call = next(coming, _NEVER)
        while True:
            while due and due[0][0] < self._next_s:
                time_s, _, due_call = heappop(due)
                due_call(time_s)
            if self._next_s == inf:
                return
            time_s, due_call = self._next_s, call
            self._next_s, call = next(coming, _NEVER)
            due_call(time_s)


def _never(_: float) -> None:
    """Nothing is called at the end of time."""


_NEVER: tuple[float, Call] = (inf, _never)
