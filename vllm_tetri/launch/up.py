"""`vllm-tetri up`: a whole cluster on one machine, from start to clean end."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp

from vllm_tetri.errors import ConfigError
from vllm_tetri.launch.display import Display
from vllm_tetri.launch.keeper import Keeper, LaunchError
from vllm_tetri.launch.machine import inspect, require_vllm
from vllm_tetri.launch.plan import Plan, make_plan
from vllm_tetri.policy.placement import Sharing
from vllm_tetri.policy.watcher import WatchPolicy
from vllm_tetri.transport.leftovers import sweep_segments

FAILED = 1
INTERRUPTED = 130
JOIN_TIMEOUT_S = 60.0
_JOIN_PERIOD_S = 0.1
_REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `up`."""
    parser.add_argument("model", help="model name or folder, as for vllm serve")
    parser.add_argument("--prefill", type=_count, default=None, metavar="N", help=_TEXT["prefill"])
    parser.add_argument("--decode", type=_count, default=None, metavar="M", help=_TEXT["decode"])
    parser.add_argument("--both", type=_count, default=0, metavar="K", help=_TEXT["both"])
    parser.add_argument("--host", default="127.0.0.1", help=_TEXT["host"])
    parser.add_argument("--port", type=_port, default=8000, help=_TEXT["port"])
    parser.add_argument(
        "--placement", choices=[way.value for way in Sharing], default="auto", help=_TEXT["place"]
    )
    parser.add_argument("--max-in-flight", type=_count, metavar="N", help=_TEXT["in_flight"])
    parser.add_argument(
        "--flip", choices=[policy.value for policy in WatchPolicy], help=_TEXT["flip"]
    )
    parser.add_argument("--flip-after", type=float, metavar="SECONDS", help=_TEXT["flip_after"])
    parser.add_argument("--arena-bytes", type=_bytes, metavar="BYTES", help=_TEXT["arena"])
    parser.add_argument("--predictor", metavar="FOLDER", help=_TEXT["predictor"])
    parser.add_argument("--kv-bytes", type=_bytes, metavar="BYTES", help=_TEXT["kv"])
    parser.add_argument(
        "--start-timeout", type=float, default=900.0, metavar="SECONDS", help=_TEXT["start"]
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help=_TEXT["log"])
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help=_TEXT["ready"])
    parser.add_argument("--verbose", action="store_true", help=_TEXT["verbose"])


_TEXT = {
    "prefill": "prefill instances; default: 1, or 0 with --both",
    "decode": "decode instances; default: 1, or 0 with --both",
    "both": "instances that do both; default: 0",
    "host": "address of the router's HTTP server; default: 127.0.0.1",
    "port": "port of the router's HTTP server, 0 for any free one; default: 8000",
    "place": "CPU hosts: cores of its own for every instance (split), or all cores for all with "
    "prefill at a low priority (shared); default: auto",
    "in_flight": "most requests that the router gives one instance at a time; default: 1024",
    "flip": "when the router lets an instance change role: when prompts and answers are out of "
    "balance, when it had little (threshold) or nothing (idle) to do, or when told to; default: "
    "balance",
    "flip_after": "how long it must have had little or nothing to do; default: 60",
    "arena": "receive arena of every instance; suffixes K, M, G; default: that of vllm serve",
    "predictor": "length predictor beside every instance that computes prompts: a folder that "
    "predictor train wrote, or oracle; default: none",
    "kv": "KV cache of every instance; suffixes K, M, G; default: vLLM's own on GPUs, at most 1G "
    "on a CPU host",
    "start": "longest time until an instance is ready; default: 900",
    "log": "write everything that NAME prints to DIR/NAME.log",
    "ready": "write what runs to FILE as JSON when all is ready; removed at the end",
    "verbose": "show every line of every instance",
}


def run(options: argparse.Namespace) -> int:
    """Bring the cluster up and keep it up until a signal asks to stop.

    Returns:
        0 after one Ctrl-C or SIGTERM, 130 after a second one, 1 when the cluster
        cannot be brought up.
    """
    require_vllm()
    default = 0 if options.both else 1
    options.prefill = default if options.prefill is None else options.prefill
    options.decode = default if options.decode is None else options.decode
    plan = make_plan(options, inspect())
    if options.log_dir is not None:
        try:
            options.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log-dir {options.log_dir}: {error}") from error
    return asyncio.run(_Cluster(options, plan).run())


class _Cluster:
    """The keepers of one plan, and the signals that end them."""

    def __init__(self, options: argparse.Namespace, plan: Plan) -> None:
        self._options = options
        self._plan = plan
        self._display = Display([spec.name for spec in plan.specs], verbose=options.verbose)
        self._keepers: list[Keeper] = []
        self._stop = asyncio.Event()
        self._forced = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        async with aiohttp.ClientSession() as session:
            self._keepers = [
                Keeper(
                    spec,
                    self._display,
                    session,
                    start_timeout_s=self._options.start_timeout,
                    log_dir=self._options.log_dir,
                    was_asked_to_leave=lambda name: self._has_departed(session, name),
                )
                for spec in self._plan.specs
            ]
            try:
                return await self._watch(session)
            finally:
                self._display.close()

    async def _watch(self, session: aiohttp.ClientSession) -> int:
        keeping = [asyncio.create_task(keeper.run()) for keeper in self._keepers]
        announcing = asyncio.create_task(self._announce(session))
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

    async def _has_departed(self, session: aiohttp.ClientSession, name: str) -> bool:
        answer = await _get_json(session, self._keepers[-1].url + "/tetri/v1/instances")
        return name in (answer or {}).get("departed", ())

    async def _announce(self, session: aiohttp.ClientSession) -> None:
        for keeper in self._keepers:
            await keeper.ready.wait()
        await self._until_joined(session)
        url = self._keepers[-1].url
        model = await _first_model(session, url) or self._options.model
        if self._options.ready_file is not None:
            self._write_ready_file(url, model)
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
        self._display.ready(
            f"ready in {self._display.elapsed_s:.1f} s: {url}/v1\n"
            f"  curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
            f"    -d '{body}'\n"
            "Ctrl-C stops everything"
        )

    async def _until_joined(self, session: aiohttp.ClientSession) -> None:
        """Wait until the router counts every instance as ready."""
        wanted = {keeper.spec.name for keeper in self._keepers[:-1] if not keeper.has_left}
        states: dict[str, str] = {}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + JOIN_TIMEOUT_S
        while loop.time() < deadline:
            answer = await _get_json(session, self._keepers[-1].url + "/tetri/v1/instances")
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
        raise LaunchError(f"the router cannot use every instance: {missing}")

    def _write_ready_file(self, url: str, model: str) -> None:
        content = {
            "url": url,
            "model": model,
            "control": self._plan.control,
            "pid": os.getpid(),
            "instances": [
                {"id": keeper.spec.name, "url": keeper.url, "pid": keeper.pid}
                for keeper in self._keepers[:-1]
            ],
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


async def _get_json(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    try:
        async with session.get(url, timeout=_REQUEST_TIMEOUT) as answer:
            content = await answer.json() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    return content if isinstance(content, dict) else None


async def _first_model(session: aiohttp.ClientSession, url: str) -> str | None:
    answer = await _get_json(session, url + "/v1/models")
    models = (answer or {}).get("data") or [{}]
    name = models[0].get("id")
    return name if isinstance(name, str) else None


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of instances")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return int(text)


def _bytes(text: str) -> int:
    plain = text.strip().lower().removesuffix("b").removesuffix("i")
    factor = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(plain[-1:], 1)
    digits = plain if factor == 1 else plain[:-1]
    if not digits.isdigit() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 256M")
    return int(digits) * factor
