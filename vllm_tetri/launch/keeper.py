"""Keep one child running: start, watch until ready, restart with back-off."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from vllm_tetri.errors import ConfigError, TetriError
from vllm_tetri.launch.child import Child
from vllm_tetri.launch.display import Display
from vllm_tetri.launch.machine import free_port
from vllm_tetri.policy.placement import Placement
from vllm_tetri.router.door_options import fingerprint_of
from vllm_tetri.types import Role

FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0
HEALTHY_S = 60.0
MAX_FAILED_STARTS = 3
USAGE_STATUS = 2
_PROBE_PERIOD_S = 0.2
_PROBE_TIMEOUT_S = 2.0
_TAIL_SHOWN = 15


class LaunchError(TetriError):
    """A cluster could not be brought up."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What to run.

    Attributes:
        name: Name in the cluster and before its log lines.
        role: None for the router.
        command: Command line for the HTTP port it is to listen on.
        host: Address that its HTTP server binds.
        port: Its fixed port; 0 for a free one, chosen anew at every start.
        ready_path: Answers 200 as soon as the child is of use.
        environment: Variables that only this child gets; secrets among them.
        key: What its HTTP server asks for, if it does.
        certificate: File of its certificate, if it speaks https.
    """

    name: str
    role: Role | None
    command: Callable[[int], list[str]]
    placement: Placement
    ready_path: str
    host: str = "127.0.0.1"
    port: int = 0
    environment: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    key: str = field(default="", repr=False)
    certificate: str | None = None


def backoff_s(deaths: int) -> float:
    """How long to wait before the start that follows the ``deaths``-th death in a row."""
    return float(min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(deaths - 1, 10)))


class Keeper:
    """Owns one child at a time. Used by one event loop.

    Attributes:
        ready: Set while the child answers, and when it has left.
        has_left: It ended because the router had asked it to leave, and is not kept.
        restarts: Starts after the first.
    """

    def __init__(
        self,
        spec: Spec,
        display: Display,
        session: aiohttp.ClientSession,
        *,
        start_timeout_s: float,
        log_dir: Path | None = None,
        was_asked_to_leave: Callable[[str], Awaitable[bool]],
    ) -> None:
        self.spec = spec
        self.ready = asyncio.Event()
        self.has_left = False
        self.restarts = 0
        self.port = spec.port
        self._was_ready = False
        self._display = display
        self._session = session
        self._start_timeout_s = start_timeout_s
        self._was_asked_to_leave = was_asked_to_leave
        self._log_file = log_dir / f"{spec.name}.log" if log_dir else None
        self._child: Child | None = None
        self._fingerprint: bytes | None = None  # of the certificate that the child has read

    @property
    def url(self) -> str:
        """Where its HTTP server is now."""
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        scheme = "http" if self.spec.certificate is None else "https"
        return f"{scheme}://{host}:{self.port}"

    def get(
        self, path: str, timeout: aiohttp.ClientTimeout
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Ask its HTTP server, with what that needs."""
        more: dict[str, Any] = {}
        if self.spec.key:
            more["headers"] = {"Authorization": f"Bearer {self.spec.key}"}
        if self._fingerprint is not None:
            # Its name is another one than that of this machine's loopback interface.
            more["ssl"] = aiohttp.Fingerprint(self._fingerprint)
        return self._session.get(self.url + path, timeout=timeout, **more)

    @property
    def pid(self) -> int | None:
        """Process id of the guard, which leads the process group."""
        return self._child.pid if self._child else None

    async def run(self) -> None:
        """Keep it running until cancelled, or until it has left in good order.

        Raises:
            LaunchError: It ended repeatedly, or took too long, before it was ready once.
        """
        deaths = 0
        while True:
            ready_at = await self._start_and_watch()
            if self.has_left:
                return
            if ready_at is not None and time.monotonic() - ready_at >= HEALTHY_S:
                deaths = 0
            deaths += 1
            if not self._was_ready and deaths >= MAX_FAILED_STARTS:
                raise LaunchError(self._obituary(f"ended {deaths} times before it was ready"))
            delay_s = backoff_s(deaths)
            self._display.phase(self.spec.name, f"restart in {delay_s:.0f} s")
            await asyncio.sleep(delay_s)
            self.restarts += 1

    async def stop(self) -> None:
        """End the child in good order. Idempotent."""
        self.ready.clear()
        if self._child is not None:
            await self._child.stop()

    def kill(self) -> None:
        """End the child at once. Idempotent."""
        if self._child is not None:
            self._child.kill()

    async def _start_and_watch(self) -> float | None:
        """One life of the child; returns when it was ready, None if never."""
        self.port = self.spec.port or free_port(self.spec.host)
        self._display.phase(self.spec.name, "starting")
        if self.spec.certificate is not None:  # it may have been renewed
            with contextlib.suppress(ConfigError):  # the child says so
                self._fingerprint = fingerprint_of(self.spec.certificate)
        child = self._child = await Child.start(
            self.spec.command(self.port),
            self.spec.placement,
            lambda line: self._display.line(self.spec.name, line),
            self._log_file,
            environment=self.spec.environment,
        )
        death = asyncio.create_task(child.wait())
        readiness = asyncio.create_task(self._until_ready())
        try:
            await asyncio.wait(
                (death, readiness),
                timeout=self._start_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            ready_at = self._on_started(child, readiness, death)
            status = await death
        finally:
            self.ready.clear()
            for task in (readiness, death):
                task.cancel()
            await asyncio.gather(readiness, death, return_exceptions=True)
        # vLLM also ends with status 0 when its engine died, so the router has to say.
        self.has_left = status == 0 and await self._was_asked_to_leave(self.spec.name)
        if self.has_left:
            self.ready.set()
            self._display.phase(self.spec.name, "left")
        else:
            self._report_death(status)
        return ready_at

    def _on_started(
        self, child: Child, readiness: asyncio.Task[None], death: asyncio.Task[int]
    ) -> float | None:
        if readiness.done() and not death.done():
            self.ready.set()
            self._was_ready = True
            self._display.phase(self.spec.name, "ready")
            return time.monotonic()
        if not death.done():
            if not self._was_ready:
                raise LaunchError(
                    self._obituary(f"was not ready after {self._start_timeout_s:.0f} s")
                )
            child.kill()
        return None

    async def _until_ready(self) -> None:
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self.get(self.spec.ready_path, timeout) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(_PROBE_PERIOD_S)

    def _report_death(self, status: int) -> None:
        how = f"exit status {status}"
        if status > 128 or status < 0:
            number = -status if status < 0 else status - 128
            how = f"signal {number}" + (", out of memory?" if number == 9 else "")
        if status == USAGE_STATUS and not self._was_ready:
            raise LaunchError(self._obituary("refused its options"))
        self._display.note(self.spec.name, f"ended ({how})")

    def _obituary(self, what: str) -> str:
        tail = list(self._child.tail)[-_TAIL_SHOWN:] if self._child else []
        shown = "\n".join(f"  | {line}" for line in tail) or "  | (it printed nothing)"
        where = f"\nits whole output is in {self._log_file}" if self._log_file else ""
        return f"{self.spec.name} {what}; the last it said:\n{shown}{where}"
