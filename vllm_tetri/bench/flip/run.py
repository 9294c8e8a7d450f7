"""What one run of `vllm-tetri bench flip` was: figures, flips, and roles over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event, Thread
from types import TracebackType
from typing import Any

from vllm_tetri.bench import arrivals
from vllm_tetri.bench.arrivals import Answered, Figures, Kind, Slo
from vllm_tetri.types import FlipStage, InstanceState, Role

_WATCH_S = 0.5

Rows = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Flipped:
    """A flip that was seen. Its drain is work and so in the device's seconds; its commit
    is messages, in real ones.

    Attributes:
        at_s: When it was ordered, to within half a second.
    """

    instance: str
    source: str
    target: str
    stage: str
    at_s: float
    drain_s: float
    commit_s: float
    reason: str
    problem: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """One entry per look at the cluster.

    Attributes:
        prefill: Instances of that role that do not drain.
        decode: The same.
        prompts: Requests that wait for their first token.
        answers: Requests that have it, and are not done.
    """

    at_s: list[float]
    prefill: list[int]
    decode: list[int]
    prompts: list[int]
    answers: list[int]


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of one repeat, in seconds of the imagined device.

    Attributes:
        kinds: What each phase has.
        phases: Requests that came in each; None where there were none.
        makespan_s: Until the last token of all.
        busy_s: Of all instances, what their steps should have taken.
        late_s: The furthest that a step of any instance was behind its pace.
        flips: By the counters of the instances.
        flipped: Those that were seen.
        scale: Of the pace it was run at.
    """

    instances: int
    kinds: list[str]
    overall: Figures
    phases: list[Figures | None]
    makespan_s: float
    busy_s: float
    late_s: float
    flips: int
    flipped: list[Flipped]
    timeline: Timeline
    scale: float


@dataclass(frozen=True, slots=True)
class Look:
    """What the router said of its instances, and when: real seconds since the start."""

    at_s: float
    rows: Rows


class Watch:
    """Looks at the cluster twice a second, in a thread of its own, until it is left.

    Args:
        read: Rows of all instances, empty where there was no answer; it is called in the
            thread, so it uses nothing that another changes.
    """

    def __init__(self, read: Callable[[], Rows], started: float) -> None:
        self.looks: list[Look] = []
        self._read = read
        self._started = started
        self._left = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while True:
            if rows := self._read():
                self.looks.append(Look(time.monotonic() - self._started, rows))
            if self._left.wait(_WATCH_S):
                return

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()
        self._thread.join()


def run_of(
    answered: Sequence[Answered],
    kinds: Sequence[Kind],
    slo: Slo,
    *,
    looks: Sequence[Look],
    before: Rows,
    after: Rows,
    busy_s: float,
    late_s: float,
    scale: float,
) -> Run:
    """The figures of a run.

    Args:
        looks: While it ran.
        before: Rows of all instances.
        after: The same when nothing was left to do.
        busy_s: In real seconds, as `late_s`.
    """
    by_phase = [
        [each for each in answered if each.arrival.phase == phase] for phase in range(len(kinds))
    ]
    makespan_s = max(each.arrival.at_s + each.done_s for each in answered)
    last = Look(max([makespan_s * scale, *(look.at_s for look in looks)]), after)
    return Run(
        instances=len(before),
        kinds=[kind.value for kind in kinds],
        overall=arrivals.figures(answered, slo),
        phases=[arrivals.figures(own, slo) if own else None for own in by_phase],
        makespan_s=makespan_s,
        busy_s=busy_s / scale,
        late_s=late_s / scale,
        flips=sum(after[name]["flips"] - before[name]["flips"] for name in before),
        flipped=flipped([*looks, last], before, scale),
        timeline=timeline(looks, answered, scale),
        scale=scale,
    )


def flipped(looks: Sequence[Look], before: Rows, scale: float) -> list[Flipped]:
    """Flips that were not there before, each as it was last seen."""
    old = {name: (row.get("flip") or {"epoch": -1})["epoch"] for name, row in before.items()}
    found: dict[tuple[str, int], Flipped] = {}
    for look in looks:
        for name, row in look.rows.items():
            flip = row.get("flip")
            if not flip or flip["epoch"] <= old.get(name, -1):
                continue
            drained_s = 0.0 if flip["stage"] == FlipStage.DRAINING else flip["drain_s"]
            key = name, flip["epoch"]
            seen = found.get(key)
            found[key] = Flipped(
                instance=name,
                source=flip["source"],
                target=flip["target"],
                stage=flip["stage"],
                at_s=seen.at_s if seen else (look.at_s - flip["age_s"] - drained_s) / scale,
                drain_s=flip["drain_s"] / scale,
                commit_s=flip["commit_s"],
                reason=flip["reason"],
                problem=flip["problem"],
            )
    return list(found.values())


def timeline(looks: Sequence[Look], answered: Sequence[Answered], scale: float) -> Timeline:
    """Roles as they were seen, and requests as their clients saw them."""
    at_s = [look.at_s / scale for look in looks]
    spans = [
        (each.arrival.at_s, each.arrival.at_s + each.first_s, each.arrival.at_s + each.done_s)
        for each in answered
    ]
    return Timeline(
        at_s=at_s,
        prefill=[_with_role(look.rows, Role.PREFILL) for look in looks],
        decode=[_with_role(look.rows, Role.DECODE) for look in looks],
        prompts=[sum(due <= now < first for due, first, _ in spans) for now in at_s],
        answers=[sum(first <= now < done for _, first, done in spans) for now in at_s],
    )


def _with_role(rows: Rows, role: Role) -> int:
    return sum(
        row["role"] == role and row["state"] != InstanceState.FLIPPING for row in rows.values()
    )
