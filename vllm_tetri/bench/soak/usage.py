"""What a cluster takes of the machine, and whether that grows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression

import psutil

from vllm_tetri.bench.soak.tally import Promise

_SHARED_MEMORY = Path("/dev/shm")
_OURS = "tetri-*"
# Threads and connections to instances that died are given up after a minute of silence.
_MORE_EACH = {"file descriptors": 4, "threads": 2}
_MORE_MEMORY = 0.2
_LEAST_S = 600.0  # a shorter time says nothing about memory


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all processes of a cluster at a monotonic time."""

    at_s: float
    processes: int
    rss_bytes: int
    descriptors: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Trend:
    """A quantity at the start and at the end, and its slope by least squares."""

    name: str
    start: float
    end: float
    per_minute: float


def usage_of(processes: Iterable[psutil.Process], now: float) -> Usage:
    """What they take together; shared memory by its files, which only clusters of this
    package have."""
    count = rss_bytes = descriptors = threads = 0
    for each in processes:
        with contextlib.suppress(psutil.Error), each.oneshot():
            own_bytes, own_descriptors = each.memory_info().rss, each.num_fds()
            threads += each.num_threads()
            rss_bytes += own_bytes
            descriptors += own_descriptors
            count += 1
    return Usage(now, count, rss_bytes, descriptors, threads, shared_bytes())


def shared_bytes() -> int:
    """Of all arenas that there are in shared memory."""
    total = 0
    for path in _SHARED_MEMORY.glob(_OURS):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def trends(samples: Sequence[Usage]) -> list[Trend]:
    """Of samples at which as many processes ran as at first, since those that are being
    started have not grown yet."""
    if not samples:
        return []
    whole = [each for each in samples if each.processes == samples[0].processes]
    series = {
        "memory (MiB)": [each.rss_bytes / (1 << 20) for each in whole],
        "file descriptors": [float(each.descriptors) for each in whole],
        "threads": [float(each.threads) for each in whole],
        "/dev/shm (MiB)": [each.shared_bytes / (1 << 20) for each in whole],
    }
    minutes = [each.at_s / 60 for each in whole]
    return [
        Trend(name, values[0], values[-1], _slope(minutes, values))
        for name, values in series.items()
    ]


def _slope(at: Sequence[float], values: Sequence[float]) -> float:
    return linear_regression(at, values).slope if len(set(at)) > 1 else 0.0


def promises_of_usage(samples: Sequence[Usage]) -> list[Promise]:
    """Nothing grows: at rest there is as much at the end as at the start."""
    if len(samples) < 2:
        return []
    processes, seconds = samples[0].processes, samples[-1].at_s - samples[0].at_s
    found = []
    for each in trends(samples):
        more = each.end - each.start
        if each.name in _MORE_EACH:
            is_kept: bool | None = more <= _MORE_EACH[each.name] * processes
        elif each.name.startswith("memory"):
            is_kept = more <= _MORE_MEMORY * each.start if seconds >= _LEAST_S else None
        else:
            is_kept = more <= 0
        shown = f"{each.start:,.0f} to {each.end:,.0f}, {each.per_minute:+.1f} a minute"
        found.append(Promise(f"{each.name}: no growth", is_kept, shown))
    return found
