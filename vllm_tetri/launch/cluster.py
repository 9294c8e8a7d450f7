"""A cluster on one machine: every child is kept running from the first start to the end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from vllm_tetri.errors import INTERRUPTED, ConfigError, TetriError
from vllm_tetri.launch.display import Display
from vllm_tetri.launch.machine import free_port
from vllm_tetri.launch.plan import ChildSpec, LaunchPlan
from vllm_tetri.launch.process import ChildProcess
from vllm_tetri.router.auth import KEY_VARIABLE, fingerprint_of
from vllm_tetri.transport.segments import sweep_segments
from vllm_tetri.types import server_name

FAILED = 1
JOIN_TIMEOUT_S = 60.0
FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0
HEALTHY_S = 60.0
MAX_FAILED_STARTS = 3
USAGE_STATUS = 2
_JOIN_PERIOD_S = 0.1
_PROBE_PERIOD_S = 0.2
_PROBE_TIMEOUT_S = 2.0
_REQUEST_TIMEOUT_S = 5.0
_TAIL_SHOWN = 15


class LaunchError(TetriError):
    """A cluster could not be brought up."""


class LocalCluster:
    """The keepers of one plan, and the signals that end them."""

    def __init__(self, options: argparse.Namespace, plan: LaunchPlan) -> None:
        self.options = options
        names = [spec.name for spec in plan.instances + plan.routers]
        self.display = Display(names, verbose=options.verbose)
        self._plan = plan
        self._instances: list[Keeper] = []
        self._routers: list[Keeper] = []
        self._stop = asyncio.Event()
        self._is_forced = False
        self._drain_s = 0.0  # time for requests in flight, once that is asked for

    async def run(self) -> int:
        """Start everything and keep it up until a signal; the status to end with."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        async with aiohttp.ClientSession() as session:
            self._instances = [Keeper(each, self, session) for each in self._plan.instances]
            self._routers = [Keeper(each, self, session) for each in self._plan.routers]
            return await self._watch()

    async def was_drained(self, name: str) -> bool:
        """Whether any router has been told to drain an instance."""
        lists = [await router.get_json("/tetri/v1/instances") for router in self._routers]
        return any(name in map(server_name, each.get("departed", ())) for each in lists)

    @property
    def _keepers(self) -> list[Keeper]:
        return self._instances + self._routers

    async def _watch(self) -> int:
        status = 0
        try:
            async with asyncio.TaskGroup() as group:
                work = [group.create_task(keeper.run()) for keeper in self._keepers]
                work.append(group.create_task(self._announce()))
                await self._stop.wait()
                for task in work:
                    task.cancel()
        except* (LaunchError, OSError) as errors:
            self.display.show_from(logging.CRITICAL)
            self.display.say(str(errors.exceptions[0]), logging.ERROR)
            status = FAILED
        finally:
            await self._end()
        return INTERRUPTED if self._is_forced else status

    async def _announce(self) -> None:
        """Say that all is ready, as soon as every router can use every instance."""
        for keeper in self._keepers:
            await keeper.ready.wait()
        deadline = asyncio.get_running_loop().time() + JOIN_TIMEOUT_S
        for router in self._routers:
            await self._until_joined(router, deadline)
        first, *more = self._routers
        models = (await first.get_json("/v1/models")).get("data") or [{}]
        model = models[0].get("id") or self.options.model
        if self.options.ready_file is not None:
            self._write_ready_file(self.options.ready_file, model)
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
        lines = [f"ready in {self.display.elapsed_s:.1f} s: {first.url}/v1"]
        lines += [f"  and at {each.url}/v1" for each in more]
        lines.append(f"  curl {first.url}/v1/chat/completions \\")
        if first.spec.key:
            lines.append(f'    -H "authorization: Bearer ${KEY_VARIABLE}" \\')
        if first.spec.certificate is not None:
            lines.append(f"    --cacert {first.spec.certificate} \\")
        lines += [f"    -H 'content-type: application/json' -d '{body}'"]
        self.display.show_from(logging.WARNING)
        self.display.say("\n".join([*lines, "Ctrl-C stops everything"]))

    async def _until_joined(self, router: Keeper, deadline: float) -> None:
        """Wait until a router counts every instance as ready."""
        wanted = {keeper.spec.name for keeper in self._instances if not keeper.has_left}
        states: dict[str, str] = {}
        loop = asyncio.get_running_loop()
        while loop.time() < deadline and "refused" not in states.values():
            rows = (await router.get_json("/tetri/v1/instances")).get("instances", ())
            # Ranks of a data-parallel server are ready together.
            states = {}
            for row in rows:
                name = server_name(row["id"])
                if states.get(name, "ready") == "ready":
                    states[name] = row["state"]
            if all(states.get(name) == "ready" for name in wanted):
                return
            await asyncio.sleep(_JOIN_PERIOD_S)
        found = {name: states.get(name, "unknown") for name in sorted(wanted)}
        missing = [f"{name} is {state}" for name, state in found.items() if state != "ready"]
        raise LaunchError(f"{router.spec.name} cannot use every instance: {', '.join(missing)}")

    def _write_ready_file(self, path: Path, model: str) -> None:
        content = {
            "url": self._routers[0].url,
            "model": model,
            "control": self._plan.control,
            "secret_file": self.options.secret_file,
            "pid": os.getpid(),
            "routers": [keeper.facts() for keeper in self._routers],
            "instances": [keeper.facts() for keeper in self._instances],
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                file.write(json.dumps(content) + "\n")
            Path(file.name).replace(path)  # readers never see a part of it
        except OSError as error:
            raise LaunchError(f"--ready-file {path}: {error}") from error

    async def _end(self) -> None:
        self.display.show_from(logging.CRITICAL + 1)  # vLLM logs many errors when it is ended
        if self._drain_s and not self._is_forced:
            self.display.say(f"requests in flight have {self._drain_s:g} s to end ...")
            children = [keeper.child for keeper in self._routers if keeper.child]
            await asyncio.gather(*(child.stop(self._drain_s) for child in children))
        if not self._is_forced:
            self.display.say("stopping ...")
        await asyncio.gather(*(keeper.child.stop() for keeper in self._keepers if keeper.child))
        if self.options.ready_file is not None:
            self.options.ready_file.unlink(missing_ok=True)
        sweep_segments()
        self.display.say("stopped")

    def _on_signal(self, number: signal.Signals) -> None:
        if number is signal.SIGTERM and not self._stop.is_set():
            self._drain_s = self.options.shutdown_timeout
        elif self._stop.is_set():
            self._is_forced = True
            for keeper in self._keepers:
                if keeper.child is not None:
                    keeper.child.kill()
        self._stop.set()


class Keeper:
    """Owns one child at a time and restarts it with back-off. Used by one event loop."""

    def __init__(
        self, spec: ChildSpec, cluster: LocalCluster, session: aiohttp.ClientSession
    ) -> None:
        self.spec = spec
        self.ready = asyncio.Event()  # set while the child responds, and when it was drained
        self.has_left = False  # it ended because an operator drained it, and is not restarted
        self._cluster = cluster
        self._display = cluster.display
        self._session = session
        self._port = spec.port
        log_dir: Path | None = cluster.options.log_dir
        self._log_file = log_dir / f"{spec.name}.log" if log_dir else None
        self._was_ready = False
        self.child: ChildProcess | None = None
        self._fingerprint: bytes | None = None  # of the certificate that the child has read

    @property
    def url(self) -> str:
        """Where the child's HTTP server is now."""
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        scheme = "http" if self.spec.certificate is None else "https"
        return f"{scheme}://{host}:{self._port}"

    def facts(self) -> dict[str, Any]:
        """Facts for the ready file; the process id is the guard's, which leads the group."""
        pid = self.child.pid if self.child else None
        return {"id": self.spec.name, "url": self.url, "pid": pid}

    async def get_json(self, path: str) -> dict[str, Any]:
        """A JSON object from the child's HTTP server; empty when it does not respond so."""
        try:
            async with self._get(path, _REQUEST_TIMEOUT_S) as response:
                content = await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            content = None
        return content if isinstance(content, dict) else {}

    async def run(self) -> None:
        """Keep the child running until cancelled, or until it was drained; LaunchError if it ended
        repeatedly, or took too long, before it was ready once."""
        deaths = 0
        while True:
            ready_at = await self._start_and_watch()
            if self.has_left:
                return
            if ready_at is not None and time.monotonic() - ready_at >= HEALTHY_S:
                deaths = 0
            deaths += 1
            if not self._was_ready and deaths >= MAX_FAILED_STARTS:
                raise LaunchError(self._describe(f"ended {deaths} times before it was ready"))
            delay_s = min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(deaths - 1, 10))
            self._display.phase(self.spec.name, f"restart in {delay_s:.0f} s")
            await asyncio.sleep(delay_s)

    def _get(
        self, path: str, timeout_s: float
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        more: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=timeout_s)}
        if self.spec.key:
            more["headers"] = {"Authorization": f"Bearer {self.spec.key}"}
        if self._fingerprint is not None:
            # The certificate's name is not that of this machine's loopback interface.
            more["ssl"] = aiohttp.Fingerprint(self._fingerprint)
        return self._session.get(self.url + path, **more)

    async def _start_and_watch(self) -> float | None:
        """One life of the child; returns when it was ready, None if never."""
        self._port = self.spec.port or free_port(self.spec.host)
        self._display.phase(self.spec.name, "starting")
        if self.spec.certificate is not None:  # it may have been renewed
            with contextlib.suppress(ConfigError):  # the child says so
                self._fingerprint = fingerprint_of(self.spec.certificate)
        child = self.child = await ChildProcess.start(
            self.spec, self._port, partial(self._display.line, self.spec.name), self._log_file
        )
        death = asyncio.create_task(child.wait())
        readiness = asyncio.create_task(self._until_ready())
        ready_at: float | None = None
        try:
            timeout_s, first = self._cluster.options.start_timeout, asyncio.FIRST_COMPLETED
            await asyncio.wait((death, readiness), timeout=timeout_s, return_when=first)
            if readiness.done() and not death.done():
                ready_at = time.monotonic()
                self._was_ready = True
                self.ready.set()
                self._display.phase(self.spec.name, "ready")
            elif not death.done():
                if not self._was_ready:
                    raise LaunchError(self._describe(f"was not ready after {timeout_s:.0f} s"))
                child.kill()
            status = await death
        finally:
            self.ready.clear()
            for task in (readiness, death):
                task.cancel()
            await asyncio.gather(readiness, death, return_exceptions=True)
        # vLLM also ends with status 0 when its engine died, so the router has to say.
        self.has_left = status == 0 and await self._cluster.was_drained(self.spec.name)
        if self.has_left:
            self.ready.set()
            self._display.phase(self.spec.name, "drained")
        else:
            self._report_death(status)
        return ready_at

    async def _until_ready(self) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._get(self.spec.ready_path, _PROBE_TIMEOUT_S) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_PROBE_PERIOD_S)

    def _report_death(self, status: int) -> None:
        if status == USAGE_STATUS and not self._was_ready:
            raise LaunchError(self._describe("refused its options"))
        number = -status if status < 0 else status - 128
        how = f"signal {number}" if number > 0 else f"exit status {status}"
        more = ", out of memory?" if number == signal.SIGKILL else ""
        self._display.event(self.spec.name, f"ended ({how}{more})")

    def _describe(self, problem: str) -> str:
        tail = list(self.child.tail)[-_TAIL_SHOWN:] if self.child else []
        shown = "\n".join(f"  | {line}" for line in tail) or "  | (it printed nothing)"
        where = f"\nits whole output is in {self._log_file}" if self._log_file else ""
        return f"{self.spec.name} {problem}; its last lines were:\n{shown}{where}"
