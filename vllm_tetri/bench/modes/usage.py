"""Who uses the cores: this process and what it started, or others."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Used:
    """CPU time in seconds: of this process and its descendants, of everybody, and in all."""

    own_s: float
    busy_s: float
    all_s: float

    def since(self, before: Used) -> Used:
        """What came on top of that."""
        return Used(
            self.own_s - before.own_s, self.busy_s - before.busy_s, self.all_s - before.all_s
        )


def used(cores: Sequence[int]) -> Used:
    """Until now, on these cores."""
    times = psutil.cpu_times(percpu=True)
    all_s = sum(sum(times[core][:8]) for core in cores)  # what follows is counted twice
    idle_s = sum(times[core].idle + times[core].iowait for core in cores)
    here = psutil.Process()
    own_s = 0.0
    for process in (here, *here.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            own = process.cpu_times()
            own_s += own.user + own.system
    return Used(own_s, all_s - idle_s, all_s)
