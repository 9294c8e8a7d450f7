"""Requests that engines died with are not given to a third one.

An engine that dies takes all its requests down; which of them it was, nobody can tell. One
that was there again when another engine died is not tried a third time, nor accepted when
it comes again, until some time has passed. One that was answered in between is innocent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from math import ceil

from vllm_tetri.router.answers import Refusal
from vllm_tetri.router.call import Call
from vllm_tetri.router.fault_metrics import FaultMetrics
from vllm_tetri.types import InstanceId, InstanceInfo

MOST_CRASHES = 2
EXPIRY_S = 300.0
# Of requests that are remembered; the oldest is forgotten first.
MOST_CASES = 4096
# A process cannot die twice, but in a container the next one may have the same number.
_RESTART_S = 10.0

_Process = tuple[InstanceId, int]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Case:
    """What is known of one request. Times are monotonic seconds."""

    until_s: float
    crashes: list[tuple[_Process, float]] = field(default_factory=list)
    verdicts: dict[_Process, asyncio.Future[bool]] = field(default_factory=dict)

    @property
    def is_closed(self) -> bool:
        return len(self.crashes) >= MOST_CRASHES


class Quarantine:
    """By a digest of path and body. Owner: the event loop; `close` it.

    Args:
        has_crashed: Finds out whether an instance that failed a request died, or answers,
            or left in good order.
        faults: Counts.
    """

    def __init__(
        self, has_crashed: Callable[[InstanceInfo], Awaitable[bool]], faults: FaultMetrics
    ) -> None:
        self._has_crashed = has_crashed
        self._faults = faults
        self._cases: OrderedDict[bytes, _Case] = OrderedDict()
        self._verdicts: dict[_Process, asyncio.Task[bool]] = {}

    def __len__(self) -> int:
        return len(self._cases)

    def check(self, call: Call) -> None:
        """Let a request in.

        Raises:
            Refusal: 500, engines died with it.
        """
        if not self._cases:
            return
        case = self._case_of(call)
        if case is not None and case.is_closed:
            self._faults.refused()
            raise self.refusal(call)

    def accuse(self, call: Call, instance: InstanceInfo) -> None:
        """An instance failed a request that it may have begun with: find out why."""
        case, process = self._case_of(call), (instance.id, instance.pid)
        now = time.monotonic()
        if case is None:
            case = self._cases[_digest_of(call)] = _Case(now + EXPIRY_S)
            while len(self._cases) > MOST_CASES:
                self._cases.popitem(last=False)
        if process not in case.verdicts:
            case.verdicts[process] = verdict = self._verdict_on(instance)
            verdict.add_done_callback(partial(self._note, call, case, process))

    def acquit(self, call: Call) -> None:
        """A request was answered to its end, so it kills no engine."""
        if self._cases:
            self._cases.pop(_digest_of(call), None)

    async def holds(self, call: Call) -> bool:
        """Whether a request must not be tried again, as soon as that is known."""
        case = self._case_of(call)
        if case is None:
            return False
        if case.verdicts and len(case.verdicts) + len(case.crashes) >= MOST_CRASHES:
            await asyncio.wait(list(case.verdicts.values()))
            await asyncio.sleep(0)  # what is to be done when they are done
        return case.is_closed

    def refusal(self, call: Call) -> Refusal:
        """What its client is told."""
        case = self._case_of(call)
        left_s = ceil(case.until_s - time.monotonic()) if case is not None else 0
        return Refusal(
            500,
            f"{MOST_CRASHES} engines died while they had this request, so it is not tried again "
            f"for {left_s} s; if it did not do that, send it again then, else change it",
            code="quarantined",
        )

    async def close(self) -> None:
        """Find out nothing more. Idempotent."""
        tasks = list(self._verdicts.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _case_of(self, call: Call) -> _Case | None:
        digest = _digest_of(call)
        case = self._cases.get(digest)
        if case is not None and time.monotonic() >= case.until_s:
            del self._cases[digest]
            return None
        return case

    def _verdict_on(self, instance: InstanceInfo) -> asyncio.Task[bool]:
        """One for all requests that it had."""
        process = (instance.id, instance.pid)
        task = self._verdicts.get(process)
        if task is None:
            task = self._verdicts[process] = asyncio.ensure_future(self._find_out(instance))
            task.add_done_callback(lambda _: self._verdicts.pop(process, None))
        return task

    async def _find_out(self, instance: InstanceInfo) -> bool:
        has_crashed = await self._has_crashed(instance)
        if has_crashed:
            _log.error("%s (process %d) died or hangs", instance.id, instance.pid)
        return has_crashed

    def _note(self, call: Call, case: _Case, process: _Process, done: asyncio.Future[bool]) -> None:
        case.verdicts.pop(process, None)
        digest, now = _digest_of(call), time.monotonic()
        if done.cancelled() or done.exception() is not None or not done.result():
            if not case.crashes and not case.verdicts and self._cases.get(digest) is case:
                del self._cases[digest]
            return
        self._faults.crashed()
        if any(each == process and now - at_s < _RESTART_S for each, at_s in case.crashes):
            return  # another request with the same body was there as well
        case.crashes.append((process, now))
        case.until_s = now + EXPIRY_S
        if len(case.crashes) == MOST_CRASHES:
            self._faults.quarantined()
            names = ", ".join(sorted(name for (name, _), _ in case.crashes))
            _log.error("a request is in quarantine (%s): died with it: %s", digest.hex(), names)


def _digest_of(call: Call) -> bytes:
    return blake2b(call.raw, digest_size=16, key=call.path.encode()).digest()
