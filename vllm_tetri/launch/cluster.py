"""A cluster: every child is kept running from the first start to the end."""

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
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import aiohttp

from vllm_tetri.errors import INTERRUPTED, ConfigError, TetriError
from vllm_tetri.launch.display import Display
from vllm_tetri.launch.plan import ChildSpec, LaunchPlan, change_for
from vllm_tetri.launch.process import ChildProcess
from vllm_tetri.router.auth import KEY_VARIABLE, fingerprint_of
from vllm_tetri.transport.segments import abandoned_segments
from vllm_tetri.types import Role, server_name

if TYPE_CHECKING:
    from vllm_tetri.launch.nodes import RayChild, RayNodes

    Child: TypeAlias = ChildProcess | RayChild
    Nodes: TypeAlias = type[ChildProcess] | RayNodes

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
_SCALE_PERIOD_S = 1.0
_SCALE_AGAIN_S = 60.0  # after an instance could not be started
_INSTANCES = "/tetri/v1/instances"


class LaunchError(TetriError):
    """A cluster could not be brought up."""


class KeptCluster:
    """The keepers of one plan, and the signals that end them. `nodes` is where instances start;
    routers start here."""

    def __init__(self, options: argparse.Namespace, plan: LaunchPlan, nodes: Nodes) -> None:
        self.options = options
        names = [spec.name for spec in plan.instances + plan.spares + plan.routers]
        self.display = Display(names, verbose=options.verbose, log_dir=options.log_dir)
        self._plan, self._nodes = plan, nodes
        self._work: set[asyncio.Task[None]] = set()
        self._instances: list[Keeper] = []
        self._routers: list[Keeper] = []
        self._stop = asyncio.Event()
        self._is_forced = False
        self._drain_s = 0.0  # time for requests in flight, once that is asked for

    async def run(self) -> int:
        """Start everything and keep it up until a signal; the status to end with."""
        loop = asyncio.get_running_loop()
        is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM, *(() if is_nohup else (signal.SIGHUP,))):
            loop.add_signal_handler(number, self._on_signal, number)
        async with aiohttp.ClientSession() as session:
            plan, nodes = self._plan, self._nodes
            self._instances = [Keeper(each, self, session, nodes) for each in plan.instances]
            self._routers = [Keeper(each, self, session, ChildProcess) for each in plan.routers]
            return await self._watch(session)

    async def was_drained(self, name: str) -> bool:
        """Whether any router has been told to drain all of an instance."""
        lists = [await router.get_json(_INSTANCES) for router in self._routers]
        return any(
            name in map(server_name, each.get("departed", ()))
            and name not in {server_name(row["id"]) for row in each["instances"]}
            for each in lists
        )

    @property
    def _keepers(self) -> list[Keeper]:
        return self._instances + self._routers

    @property
    def _here(self) -> set[str]:
        return {keeper.spec.name for keeper in self._instances if not keeper.has_left}

    async def _watch(self, session: aiohttp.ClientSession) -> int:
        status = 0
        try:
            async with asyncio.TaskGroup() as group:
                for keeper in self._keepers:
                    self._begin(group, keeper.run())
                self._begin(group, self._scale(group, session))
                await self._stop.wait()
                for task in list(self._work):
                    task.cancel()
        except* (LaunchError, OSError) as errors:
            self.display.show_from(logging.CRITICAL)
            self.display.say(str(errors.exceptions[0]), logging.ERROR)
            status = FAILED
        finally:
            await self._end()
        return INTERRUPTED if self._is_forced else status

    def _begin(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        task = group.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _scale(self, group: asyncio.TaskGroup, session: aiohttp.ClientSession) -> None:
        """When all is ready, start and drain instances, one by one, as a router's watcher asks."""
        await self._announce()
        asked: dict[str, Any] = {}
        while self._plan.spares:
            await asyncio.sleep(_SCALE_PERIOD_S)
            # The first response may be older than the newest instance.
            before, asked = asked, await self._asked()
            if not asked or not before:
                continue
            if name := asked["drained"]:
                self.display.event(name, f"drains: {asked['reason']}", logging.INFO)
                await self._routers[0].drain(name)
                continue
            here, role = self._here, Role(asked["role"])
            specs = self._plan.instances + self._plan.spares
            free = {each.name: each for each in specs if each.name not in here}
            if name := next(
                (each for each in free if each.startswith(role)), min(free, default="")
            ):
                self._instances = [each for each in self._instances if each.spec.name != name]
                keeper = Keeper(free[name].with_role(role), self, session, self._nodes)
                self._instances.append(keeper)
                self.display.event(name, f"starts: {asked['reason']}", logging.INFO)
                self._begin(group, self._run_spare(keeper))

    async def _asked(self) -> dict[str, Any]:
        """What a router asks for while all that was asked for is done; empty if nothing."""
        awaited = {each.spec.name for each in self._instances if each.is_awaited}
        for router in self._routers:
            content = await router.get_json(_INSTANCES)
            if change := change_for(self._here, awaited, content):
                return change
        return {}

    async def _run_spare(self, keeper: Keeper) -> None:
        """Keep an instance that the cluster can do without, if it cannot be started."""
        try:
            await keeper.run()
        except (LaunchError, OSError) as error:
            self.display.say(f"{error}; not tried again for {_SCALE_AGAIN_S:g} s", logging.WARNING)
            if keeper.child is not None:
                await keeper.child.stop()
            await asyncio.sleep(_SCALE_AGAIN_S)
            keeper.has_left = True

    async def _announce(self) -> None:
        """Say that all is ready, as soon as every router can use every instance."""
        for router in self._routers:
            await self._until_joined(router)
        first, at = self._routers[0], [f"{each.url}/v1" for each in self._routers]
        models = (await first.get_json("/v1/models")).get("data") or [{}]
        model = models[0].get("id") or self.options.model
        if self.options.ready_file is not None:
            self._write_ready_file(self.options.ready_file, model)
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
        if port := self.options.shared_port:
            at.append(f"{first.url.rpartition(':')[0]}:{port}/v1, where any of them answers")
        lines = [f"ready in {self.display.elapsed_s:.1f} s: " + "\n  and at ".join(at)]
        trusting = "-k " if first.spec.certificate else ""  # it has another name
        lines.append(f"  curl {trusting}{first.url}/v1/chat/completions \\")
        if first.spec.key:
            lines.append(f'    -H "authorization: Bearer ${KEY_VARIABLE}" \\')
        lines += [f"    -H 'content-type: application/json' -d '{body}'"]
        self.display.show_from(logging.WARNING)
        self.display.say("\n".join([*lines, "Ctrl-C stops everything"]))

    async def _until_joined(self, router: Keeper) -> None:
        """Wait for a router to use every instance; restarting one begins the time for it again."""
        states, loop, deadline = dict[str, str](), asyncio.get_running_loop(), 0.0
        while not deadline or loop.time() < deadline:
            if not (deadline and all(each.ready.is_set() for each in self._keepers)):
                await asyncio.gather(*(each.ready.wait() for each in self._keepers))
                deadline = loop.time() + JOIN_TIMEOUT_S
            rows = (await router.get_json(_INSTANCES)).get("instances", ())
            states = {}  # ranks of a data-parallel server are ready together
            for row in sorted(rows, key=lambda row: bool(row["state"] == "ready")):
                states.setdefault(server_name(row["id"]), row["state"])
            if all(states.get(name) == "ready" for name in self._here):
                return
            await asyncio.sleep(_JOIN_PERIOD_S)
        found = ((name, states.get(name, "unknown")) for name in sorted(self._here))
        missing = [f"{name} is {state}" for name, state in found if state != "ready"]
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
        abandoned_segments(remove=True)
        self.display.end("stopped")

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
        self, spec: ChildSpec, cluster: KeptCluster, session: aiohttp.ClientSession, nodes: Nodes
    ) -> None:
        self.spec = spec
        self.ready = asyncio.Event()  # set while the child responds, and when it was drained
        self.has_left = False  # it ended because an operator drained it, and is not restarted
        self._cluster = cluster
        self._display = cluster.display
        self._session = session
        self._nodes = nodes
        self._was_ready = False
        self.child: Child | None = None
        self._tail = deque[str](maxlen=_TAIL_SHOWN)
        self._fingerprint: bytes | None = None  # of the certificate that the child has read

    @property
    def url(self) -> str:
        """Where the child's HTTP server is now."""
        at = self.child or self.spec
        host = f"[{at.host}]" if ":" in at.host else at.host
        scheme = "http" if self.spec.certificate is None else "https"
        return f"{scheme}://{host}:{at.port}"

    @property
    def is_awaited(self) -> bool:
        """Whether it is there, or starts for the first time."""
        return not self.has_left and (self.ready.is_set() or not self._was_ready)

    def facts(self) -> dict[str, Any]:
        """Facts for the ready file; the process id is the guard's, which leads the group."""
        pid = self.child.pid if self.child else None
        return {"id": self.spec.name, "url": self.url, "pid": pid}

    async def get_json(self, path: str) -> dict[str, Any]:
        """A JSON object from the child's HTTP server; empty when it does not respond so."""
        try:
            async with self._ask("GET", path, _REQUEST_TIMEOUT_S) as response:
                content = await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            content = None
        return content if isinstance(content, dict) else {}

    async def drain(self, instance: str) -> None:
        """Tell a router to drain an instance; it may refuse, and be asked again."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._ask("POST", f"{_INSTANCES}/{instance}/drain", _REQUEST_TIMEOUT_S):
                pass

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

    def _ask(
        self, method: str, path: str, timeout_s: float
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        more: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=timeout_s)}
        if self.spec.key:
            more["headers"] = {"Authorization": f"Bearer {self.spec.key}"}
        if self._fingerprint is not None:
            # The certificate's name is not that of this machine's loopback interface.
            more["ssl"] = aiohttp.Fingerprint(self._fingerprint)
        return self._session.request(method, self.url + path, **more)

    async def _start_and_watch(self) -> float | None:
        """One life of the child; returns when it was ready, None if never."""
        self._display.phase(self.spec.name, "starting")
        if self.spec.certificate is not None:  # it may have been renewed
            with contextlib.suppress(ConfigError):  # the child says so
                self._fingerprint = fingerprint_of(self.spec.certificate)
        try:
            self._tail.clear()
            child = self.child = await self._nodes.start(self.spec, self._on_line)
        except (TetriError, OSError, RuntimeError) as error:  # no room, process, thread, port
            if not self._was_ready:
                raise LaunchError(f"{self.spec.name}: {error}") from error
            self._display.event(self.spec.name, str(error))
            return None
        death = asyncio.create_task(child.wait())
        readiness = asyncio.create_task(self._until_ready())
        ready_at: float | None = None
        try:
            timeout_s = self._cluster.options.start_timeout
            await asyncio.wait((death, readiness), timeout=timeout_s, return_when="FIRST_COMPLETED")
            if readiness.done() and not death.done():
                ready_at = time.monotonic()
                self._was_ready = True
                self.ready.set()
                self._display.phase(self.spec.name, "ready")
            elif not death.done():
                if not self._was_ready:
                    why = f"was not ready in {timeout_s:g} s (--start-timeout)"
                    raise LaunchError(self._describe(why))
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

    def _on_line(self, line: str) -> None:
        self._tail.append(line)
        self._display.line(self.spec.name, line)

    async def _until_ready(self) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._ask("GET", self.spec.ready_path, _PROBE_TIMEOUT_S) as response:
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
        shown = "\n".join(f"  | {line}" for line in self._tail) or "  | (it printed nothing)"
        log_file = self._display.log_file(self.spec.name)
        where = f"\nits whole output is in {log_file}" if log_file else ""
        return f"{self.spec.name} {problem}; its last lines were:\n{shown}{where}"
