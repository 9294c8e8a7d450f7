"""Try both ways of sharing a CPU host's cores, with processes that compute like instances.

For each way there are two: one computes prompts, one decodes, placed as `place` would
place them. All four start at once and sleep while they have nothing to do. Rounds of
the two ways alternate and medians over rounds count, so that a moment in which the
machine does something else does not decide. If others keep the cores busy, the trial
says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import psutil

from vllm_tetri.errors import TetriError
from vllm_tetri.launch.child import Child
from vllm_tetri.policy.placement import Machine, Measured, Placement, Sharing, extremes, place
from vllm_tetri.types import Role

WAYS = (Sharing.SPLIT, Sharing.SHARED)
WORK = (sys.executable, "-m", "vllm_tetri.launch.trial_work")
PROMPTS, STEPS = "prompts", "steps"
ROUNDS = 3
ALONE_S = 0.1
BESIDE_S = 0.3
# Tokens of a unit of prompt work over the layers of a step; only ratios count.
PROMPT_TOKENS = 32
_LEAD_S = 0.02
_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What both ways did, and how much of the cores' time others took meanwhile, 0 to 1."""

    split: Measured
    shared: Measured
    others_part: float


class TrialError(TetriError):
    """The ways could not be compared."""


def trial_placements(
    roles: Sequence[Role], machine: Machine
) -> dict[Sharing, tuple[Placement, Placement]]:
    """For each way, where prompts are computed and where the decode steps are."""
    pair = extremes(roles)
    found = {}
    for way in WAYS:
        prompts, steps = place(pair, machine, way)
        found[way] = (prompts, steps)
    return found


async def measure(roles: Sequence[Role], machine: Machine, dtype: str) -> Trial:
    """Measure both ways; takes five to six seconds. Leaves no process, also when cancelled.

    Args:
        roles: What is to be started; a pair of them is tried.
        machine: At least two cores.
        dtype: Name of a torch dtype.

    Raises:
        TrialError: A process ended, or it took too long.
    """
    workers: list[_Worker] = []
    try:
        async with asyncio.timeout(_LIMIT_S):
            pairs = {}
            for way, (prompts, steps) in trial_placements(roles, machine).items():
                workers.append(await _Worker.start(PROMPTS, dtype, prompts))
                workers.append(await _Worker.start(STEPS, dtype, steps))
                pairs[way] = _Pair(*workers[-2:])
            for worker in workers:
                await worker.answer()
            others = _Others(machine.cores, workers)
            for _ in range(ROUNDS):
                for pair in pairs.values():
                    await pair.round()
            split, shared = (pairs[way].measured() for way in WAYS)
            return Trial(split, shared, others.part())
    except TimeoutError as error:
        raise TrialError(f"not done within {_LIMIT_S:.0f} s") from error
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers))


class _Worker:
    """One process and its answers.

    Attributes:
        cpu_s: What it had taken of the CPU when it last answered.
    """

    def __init__(self, child: Child, lines: asyncio.Queue[str]) -> None:
        self.cpu_s = 0.0
        self._child = child
        self._lines = lines
        self._death = asyncio.create_task(child.wait())

    @classmethod
    async def start(cls, kind: str, dtype: str, placement: Placement) -> _Worker:
        lines: asyncio.Queue[str] = asyncio.Queue()
        child = await Child.start(
            [*WORK, kind, dtype], placement, lines.put_nowait, takes_input=True
        )
        return cls(child, lines)

    def order(self, start: float, seconds: float) -> None:
        self._child.tell(json.dumps({"start": start, "seconds": seconds}))

    async def answer(self) -> list[float]:
        """The seconds of each unit of work; lines of libraries are passed over."""
        while True:
            line = asyncio.create_task(self._lines.get())
            try:
                await asyncio.wait((line, self._death), return_when=asyncio.FIRST_COMPLETED)
                if not line.done():
                    last = self._child.tail[-1] if self._child.tail else "it printed nothing"
                    raise TrialError(last)
            finally:
                line.cancel()
            with contextlib.suppress(ValueError, TypeError, KeyError):
                found = json.loads(line.result())
                self.cpu_s = float(found["cpu_s"])
                return [float(seconds) for seconds in found["took"]]

    async def stop(self) -> None:
        await self._child.stop()
        await self._death


class _Others:
    """What of some cores' time goes to anybody but the workers, from now on."""

    def __init__(self, cores: Sequence[int], workers: Sequence[_Worker]) -> None:
        self._cores = cores
        self._workers = workers
        self._start = self._now()

    def part(self) -> float:
        """From 0 to 1."""
        elapsed_s, others_s = (
            now - then for now, then in zip(self._now(), self._start, strict=True)
        )
        return max(0.0, min(1.0, others_s / (elapsed_s * len(self._cores))))

    def _now(self) -> tuple[float, float]:
        """The time, and CPU seconds of others."""
        rows = psutil.cpu_times(percpu=True)
        busy_s = 0.0
        for row in (rows[core] for core in self._cores if core < len(rows)):
            busy_s += row.user + row.nice + row.system + row.irq + row.softirq + row.steal
        return time.monotonic(), busy_s - sum(worker.cpu_s for worker in self._workers)


class _Pair:
    """The two processes of one way, and what they took, one entry per round."""

    def __init__(self, prompts: _Worker, steps: _Worker) -> None:
        self._prompts = prompts
        self._steps = steps
        self._figures: list[Measured] = []

    async def round(self) -> None:
        prompts = await _together(ALONE_S, self._prompts)
        steps = await _together(ALONE_S, self._steps)
        beside = await _together(BESIDE_S, self._prompts, self._steps)
        self._figures.append(
            Measured(
                prompt_alone_tokens_per_s=_tokens_per_s(prompts[0]),
                prompt_beside_tokens_per_s=_tokens_per_s(beside[0]),
                step_alone_p50_s=median(steps[0]),
                step_alone_p99_s=_p99(steps[0]),
                step_beside_p50_s=median(beside[1]),
                step_beside_p99_s=_p99(beside[1]),
            )
        )

    def measured(self) -> Measured:
        """The median round, figure by figure."""
        names = Measured.__slots__
        return Measured(*(median(getattr(one, name) for one in self._figures) for name in names))


async def _together(seconds: float, *workers: _Worker) -> list[list[float]]:
    start = time.monotonic() + _LEAD_S
    for worker in workers:
        worker.order(start, seconds)
    return [await worker.answer() for worker in workers]


def _tokens_per_s(took: Sequence[float]) -> float:
    return PROMPT_TOKENS * len(took) / sum(took)


def _p99(took: Sequence[float]) -> float:
    return sorted(took)[min(len(took) - 1, int(0.99 * len(took)))]
