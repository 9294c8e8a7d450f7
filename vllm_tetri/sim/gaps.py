"""All times between two tokens of all answers.

Requests that are decoded together share the time of a step, so the steps and how many took
part in each say everything, in a tenth of the memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.sim.job import Served


class Gaps:
    """Times between two tokens, in seconds, and how often each occurs; a single 0 where no
    answer has two tokens."""

    def __init__(self, served: Iterable[Served]) -> None:
        single: list[float] = []
        stretches: dict[int, tuple[array[float], list[int], list[int]]] = {}
        for each in served:
            single += each.gaps
            for durations, start, stop in each.stretches:
                found = stretches.get(id(durations))
                if found is None:
                    found = stretches[id(durations)] = (durations, [], [])
                found[1].append(start)
                found[2].append(stop)
        values, counts = [np.array(single)], [np.ones(len(single), np.int64)]
        for durations, starts, stops in stretches.values():
            num = len(durations) + 1
            changes = np.bincount(starts, minlength=num) - np.bincount(stops, minlength=num)
            taken = np.cumsum(changes)[:-1]
            values.append(np.array(durations)[taken > 0])
            counts.append(taken[taken > 0])
        seconds: NDArray[np.float64] = np.concatenate(values)
        numbers: NDArray[np.int64] = np.concatenate(counts)
        if not len(seconds):
            seconds, numbers = np.zeros(1), np.ones(1, np.int64)
        order = np.argsort(seconds, kind="stable")
        self._seconds, self._up_to = seconds[order], np.cumsum(numbers[order])

    def __len__(self) -> int:
        return int(self._up_to[-1])

    @property
    def max_s(self) -> float:
        return float(self._seconds[-1])

    def quantile(self, part: float) -> float:
        """As `numpy.quantile` of all of them, to the bit."""
        index = (len(self) - 1) * part
        before = int(index)
        low, high = self._at(before), self._at(min(before + 1, len(self) - 1))
        beyond = index - before
        if beyond >= 0.5:
            return high - (high - low) * (1 - beyond)
        return low + (high - low) * beyond

    def _at(self, index: int) -> float:
        return float(self._seconds[np.searchsorted(self._up_to, index, side="right")])
