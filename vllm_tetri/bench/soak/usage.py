"""What a cluster takes of the machine, and whether that grows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, mode

import psutil

from vllm_tetri.bench.promise import Promise

_SHARED_MEMORY = Path("/dev/shm")
_OURS = "tetri-*"
# Threads and connections to instances that died are given up after a minute of silence.
_MORE_EACH = {"file descriptors": 4, "threads": 2}
_MORE_MEMORY = 0.2
_MORE_PROCESSES = 2
_LEAST_S = 600.0  # a shorter time says nothing about memory
_NOTHING = 1e-7  # MiB: less than a byte
_FEW = 3  # samples
_QUANTITIES = ("memory (MiB)", "file descriptors", "threads", "/dev/shm (MiB)")


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
    """A quantity at the first and the last sample, and a line through all of them.

    Attributes:
        per_minute: Slope of the line, by least squares.
        growth: What the line gains from the first sample to the last one.
    """

    name: str
    start: float
    end: float
    per_minute: float
    growth: float


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
    """Of samples at rest, with everybody there."""
    judged = _judged(samples)
    if not judged:
        return []
    series = (
        [each.rss_bytes / (1 << 20) for each in judged],
        [float(each.descriptors) for each in judged],
        [float(each.threads) for each in judged],
        [each.shared_bytes / (1 << 20) for each in judged],
    )
    minutes = [each.at_s / 60 for each in judged]
    named = zip(_QUANTITIES, series, strict=True)
    return [_trend(name, minutes, values) for name, values in named]


def _judged(samples: Sequence[Usage]) -> list[Usage]:
    """Those with as many processes as most have, without the one before the first fault
    where enough others are left: buffers and connections grow until then."""
    if not samples:
        return []
    usual = mode(each.processes for each in samples)
    return [each for each in _warm(samples) if each.processes == usual]


def _warm(samples: Sequence[Usage]) -> Sequence[Usage]:
    return samples[1:] if len(samples) > _FEW else samples


def _trend(name: str, minutes: Sequence[float], values: Sequence[float]) -> Trend:
    slope = linear_regression(minutes, values).slope if len(set(minutes)) > 1 else 0.0
    return Trend(name, values[0], values[-1], slope, slope * (minutes[-1] - minutes[0]))


def promises_of_usage(samples: Sequence[Usage]) -> list[Promise]:
    """Nothing grows from rest to rest."""
    return [_promise_of_processes(_warm(samples)), *_promises_of_the_rest(samples)]


def _promise_of_processes(warm: Sequence[Usage]) -> Promise:
    text = "processes: no growth"
    if len(warm) < 2:
        return Promise(text, None, "too few samples")
    counts = [float(each.processes) for each in warm]
    trend = _trend(text, [each.at_s / 60 for each in warm], counts)
    found = f"{trend.start:.0f} to {trend.end:.0f}, {trend.per_minute:+.2f} a minute"
    return Promise(text, trend.growth <= _MORE_PROCESSES, f"{found} ({len(warm)} samples)")


def _promises_of_the_rest(samples: Sequence[Usage]) -> list[Promise]:
    judged = _judged(samples)
    if len(judged) < 2:
        few = "too few samples with as many processes"
        return [Promise(f"{name}: no growth", None, few) for name in _QUANTITIES]
    processes, seconds = judged[0].processes, judged[-1].at_s - judged[0].at_s
    found = []
    for each in trends(samples):
        if each.name in _MORE_EACH:
            is_kept: bool | None = each.growth <= _MORE_EACH[each.name] * processes
        elif each.name.startswith("memory"):
            is_kept = each.growth <= _MORE_MEMORY * each.start if seconds >= _LEAST_S else None
        else:
            is_kept = each.growth <= _NOTHING
        shown = f"{each.start:,.0f} to {each.end:,.0f}, {each.per_minute:+.2f} a minute"
        found.append(
            Promise(f"{each.name}: no growth", is_kept, f"{shown} ({len(judged)} samples)")
        )
    return found
