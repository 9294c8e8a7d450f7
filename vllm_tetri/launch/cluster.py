"""A cluster on one machine, from the first child's start to the last one's end."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp

from vllm_tetri.errors import INTERRUPTED
from vllm_tetri.launch.display import Display
from vllm_tetri.launch.keeper import Keeper, LaunchError
from vllm_tetri.launch.plan import Plan, with_sharing
from vllm_tetri.launch.sharing import best_sharing
from vllm_tetri.policy.placement import Machine
from vllm_tetri.router.door_options import KEY_VARIABLE
from vllm_tetri.transport.leftovers import sweep_segments

FAILED = 1
JOIN_TIMEOUT_S = 60.0
_JOIN_PERIOD_S = 0.1
_REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=5)


class Cluster:
    """The keepers of one plan, and the signals that end them."""

    def __init__(self, options: argparse.Namespace, plan: Plan, machine: Machine) -> None:
        self._options = options
        self._plan = plan
        self._machine = machine
        self._display = Display([spec.name for spec in plan.specs], verbose=options.verbose)
        self._keepers: list[Keeper] = []
        self._stop = asyncio.Event()
        self._forced = False

    async def run(self) -> int:
        """Start everything and keep it up until a signal; the status to end with."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        try:
            await self._settle_sharing()
            if self._stop.is_set():
                self._display.stopping()
                self._display.say("stopped")
                return INTERRUPTED if self._forced else 0
            return await self._keep()
        finally:
            self._display.close()

    async def _settle_sharing(self) -> None:
        """Decide how instances share cores, where that is open, or be told to stop."""
        if not self._plan.is_sharing_open:
            return
        roles = [spec.role for spec in self._plan.specs if spec.role is not None]
        measuring = asyncio.create_task(
            best_sharing(roles, self._machine, self._plan.dtype, self._display.say)
        )
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((measuring, stopping), return_when=asyncio.FIRST_COMPLETED)
        if measuring.done():
            self._plan = with_sharing(self._plan, self._machine, measuring.result())
        for task in (measuring, stopping):
            task.cancel()
        await asyncio.gather(measuring, stopping, return_exceptions=True)

    async def _keep(self) -> int:
        async with aiohttp.ClientSession() as session:
            self._keepers = [
                Keeper(
                    spec,
                    self._display,
                    session,
                    start_timeout_s=self._options.start_timeout,
                    log_dir=self._options.log_dir,
                    was_asked_to_leave=self._has_departed,
                )
                for spec in self._plan.specs
            ]
            return await self._watch()

    async def _watch(self) -> int:
        keeping = [asyncio.create_task(keeper.run()) for keeper in self._keepers]
        announcing = asyncio.create_task(self._announce())
        stopping = asyncio.create_task(self._stop.wait())
        status = 0
        try:
            waiting: set[asyncio.Task[Any]] = {announcing, stopping, *keeping}
            while not stopping.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        except LaunchError as error:
            self._display.close()
            self._display.say(f"vllm-tetri: {error}")
            status = FAILED
        finally:
            await self._end([announcing, stopping, *keeping])
        return INTERRUPTED if self._forced else status

    @property
    def _routers(self) -> list[Keeper]:
        return [keeper for keeper in self._keepers if keeper.spec.role is None]

    @property
    def _instances(self) -> list[Keeper]:
        return [keeper for keeper in self._keepers if keeper.spec.role is not None]

    async def _has_departed(self, name: str) -> bool:
        """Whether any router has been told that an instance leaves on request."""
        answers = [await _get_json(router, "/tetri/v1/instances") for router in self._routers]
        return any(name in (answer or {}).get("departed", ()) for answer in answers)

    async def _announce(self) -> None:
        for keeper in self._keepers:
            await keeper.ready.wait()
        deadline = asyncio.get_running_loop().time() + JOIN_TIMEOUT_S
        for router in self._routers:
            await self._until_joined(router, deadline)
        router, *more = self._routers
        url = router.url
        model = await _first_model(router) or self._options.model
        if self._options.ready_file is not None:
            self._write_ready_file(model)
        also = "".join(f"  and at {each.url}/v1\n" for each in more)
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
        self._display.ready(
            f"ready in {self._display.elapsed_s:.1f} s: {url}/v1\n"
            f"{also}"
            f"  curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
            f"{self._needed_by_clients()}"
            f"    -d '{body}'\n"
            "Ctrl-C stops everything"
        )

    def _needed_by_clients(self) -> str:
        spec, lines = self._routers[0].spec, ""
        if spec.key:
            lines += f'    -H "authorization: Bearer ${KEY_VARIABLE}" \\\n'
        if spec.certificate is not None:
            lines += f"    --cacert {self._options.ssl_certfile} \\\n"
        return lines

    async def _until_joined(self, router: Keeper, deadline: float) -> None:
        """Wait until a router counts every instance as ready."""
        wanted = {keeper.spec.name for keeper in self._instances if not keeper.has_left}
        states: dict[str, str] = {}
        loop = asyncio.get_running_loop()
        while loop.time() < deadline:
            answer = await _get_json(router, "/tetri/v1/instances")
            states = {row["id"]: row["state"] for row in (answer or {}).get("instances", ())}
            if all(states.get(name) == "ready" for name in wanted):
                return
            if "refused" in states.values():
                break
            await asyncio.sleep(_JOIN_PERIOD_S)
        missing = ", ".join(
            f"{name} is {states.get(name, 'unknown')}"
            for name in sorted(wanted)
            if states.get(name) != "ready"
        )
        raise LaunchError(f"{router.spec.name} cannot use every instance: {missing}")

    def _write_ready_file(self, model: str) -> None:
        content = {
            "url": self._routers[0].url,
            "model": model,
            "control": self._plan.control,
            "secret_file": self._options.secret_file,
            "pid": os.getpid(),
            "routers": [_facts(keeper) for keeper in self._routers],
            "instances": [_facts(keeper) for keeper in self._instances],
        }
        path: Path = self._options.ready_file
        partial = path.with_name(path.name + ".partial")
        try:
            partial.write_text(json.dumps(content) + "\n")
            partial.replace(path)
        except OSError as error:
            raise LaunchError(f"--ready-file {path}: {error}") from error

    async def _end(self, tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._display.stopping()
        if not self._forced:
            self._display.say("stopping ...")
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers))
        if self._options.ready_file is not None:
            self._options.ready_file.unlink(missing_ok=True)
        sweep_segments()
        self._display.say("stopped")

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._forced = True
            for keeper in self._keepers:
                keeper.kill()
        self._stop.set()


def _facts(keeper: Keeper) -> dict[str, Any]:
    return {"id": keeper.spec.name, "url": keeper.url, "pid": keeper.pid}


async def _get_json(router: Keeper, path: str) -> dict[str, Any] | None:
    try:
        async with router.get(path, _REQUEST_TIMEOUT) as answer:
            content = await answer.json() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    return content if isinstance(content, dict) else None


async def _first_model(router: Keeper) -> str | None:
    answer = await _get_json(router, "/v1/models")
    models = (answer or {}).get("data") or [{}]
    name = models[0].get("id")
    return name if isinstance(name, str) else None
