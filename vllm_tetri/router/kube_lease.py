"""A lease among routers of several hosts: an object of Kubernetes."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable

from vllm_tetri.policy.leadership import Candidate, Step
from vllm_tetri.router.kube_api import ApiError, LeaseApi, Outrun, Place

DURATION_S = 15.0
_TIMEOUT_SHARE = 1 / 6  # of the duration: a renewal that hangs leaves time for another one
_RETRY_SHARE = 1 / 10  # of the duration
_END_S = 3.0

_log = logging.getLogger(__name__)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class KubeLease:
    """A `Lease` in the sense of vllm_tetri/router/lease.py, by policy/leadership.

    A task asks the API server; it runs while the lease is asked for, and a watcher that rests
    for a duration lets another one have it. Owner: the event loop.

    Args:
        place: The object.
        duration_s: How long others wait for a holder that says nothing.
        clock: Counts seconds; by default also those that this machine sleeps.
        sleep: Waits for so many of them.
    """

    def __init__(
        self,
        place: Place,
        *,
        duration_s: float = DURATION_S,
        clock: Callable[[], float] = _now,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._what = f"lease {place.namespace}/{place.name}"
        self._clock = clock
        self._sleep = sleep
        self._candidate = Candidate(f"{socket.gethostname()}_{secrets.token_hex(8)}", duration_s)
        self._api = LeaseApi(place, timeout_s=_TIMEOUT_SHARE * duration_s)
        self._retry_s = _RETRY_SHARE * duration_s
        self._task: asyncio.Task[None] | None = None
        self._pause: asyncio.Future[None] | None = None
        self._is_ending = False
        self._is_closed = False
        self._asked = clock()
        self._problem = ""
        self._said: set[int] = set()
        self._told: int | None = None

    @property
    def why_not(self) -> str:
        """Why `hold` says None."""
        record = self._candidate.record
        if self._problem:
            return f"nobody watches here: {self._what}: {self._problem}"
        if record is None or record.holder in ("", self._candidate.name):
            return f"nobody watches here yet: {self._what} is about to be taken"
        return f"another router watches: {record.holder} holds {self._what}"

    @property
    def is_running(self) -> bool:
        """Whether its task is there."""
        return self._task is not None

    def hold(self) -> int | None:
        self._asked = self._clock()
        if self._is_ending:
            return None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return self._candidate.epoch(self._asked)

    def close(self) -> None:
        self._is_closed = self._is_ending = True
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        if self._task is None:
            return
        _, late = await asyncio.wait({self._task}, timeout=_END_S)
        for task in late:  # what it cannot give back runs out by itself
            task.cancel()
            await asyncio.wait({task})

    async def _turn(self) -> float:
        """Do what is to be done now; seconds until the next one."""
        candidate, api, sent = self._candidate, self._api, self._clock()
        try:
            match candidate.step(sent):
                case Step.LOOK:
                    candidate.learns(await api.read(), self._clock())
                case Step.MAKE:
                    candidate.wins(await api.make(candidate), sent, self._clock())
                case Step.TAKE:
                    candidate.wins(await api.take(candidate), sent, self._clock())
                case Step.RENEW:
                    candidate.wins(await api.renew(candidate), sent, self._clock())
        except ApiError as error:
            candidate.doubts()
            if not isinstance(error, Outrun):
                self._note(error)
            return self._retry_s
        pause_s = candidate.pause_s(self._clock())
        if pause_s > 0:  # else it has read the lease and is about to write it
            self._note(None)
        return pause_s

    async def _run(self) -> None:
        while not self._is_ending:
            try:
                pause_s = await self._turn()
            except Exception:
                self._candidate.doubts()
                _log.exception("%s: failed; it goes on", self._what)
                pause_s = self._retry_s
            self._tell()
            if self._clock() - self._asked > self._candidate.duration_s:
                self._is_ending = True  # the watcher rests
            if not self._is_ending:
                self._pause = asyncio.ensure_future(self._sleep(pause_s))
                await asyncio.wait({self._pause})
        self._candidate.resigns()
        self._tell()
        try:
            await self._give_back()
        except Exception as error:
            self._candidate.doubts()
            _log.info("%s: not given back, so it runs out by itself: %s", self._what, error)
        self._task = None
        self._is_ending = self._is_closed

    async def _give_back(self) -> None:
        """At most two requests, each with its deadline."""
        candidate = self._candidate
        if candidate.step(self._clock()) is Step.LOOK:
            candidate.learns(await self._api.read(), self._clock())
        if candidate.may_give_back(self._clock()):
            candidate.learns(await self._api.give_back(candidate), self._clock())

    def _note(self, error: ApiError | None) -> None:
        """Say each kind of problem once, and when all is well again."""
        if error is None and self._said:
            _log.info("--flip-lease: %s: all is well again", self._what)
            self._said.clear()
        elif error is not None and error.status not in self._said:
            _log.warning("--flip-lease: %s: %s", self._what, error)
            self._said.add(error.status)
        self._problem = str(error or "")

    def _tell(self) -> None:
        epoch = self._candidate.epoch(self._clock())
        if epoch != self._told:
            words = "this router decides no more" if epoch is None else "this router decides"
            _log.info("%s: %s (epoch %s)", self._what, words, epoch or self._told)
        self._told = epoch
