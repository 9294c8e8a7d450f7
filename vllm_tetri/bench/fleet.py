"""A router and paced instances; either is exchanged while the others run."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, TypeVar

from vllm_tetri.bench import setting, workload
from vllm_tetri.bench.pace import EXECUTOR, Counts, CountsFile, Pace
from vllm_tetri.bench.process import engine_environment, failed, guard
from vllm_tetri.errors import ConfigError, UnsupportedError
from vllm_tetri.launch.machine import free_port, vllm_version
from vllm_tetri.types import FlipStage

WINDOW_TOKENS = 4096  # longest prompt and answer together
KEEP_ROLES = ("--flip", "off")  # of the router that a fleet starts with
_BLOCK_TOKENS = 32  # the least of vLLM on CPUs, so that a small pool has many blocks
# Small, as the models are: several of these share a machine.
_SERVE = (
    *("--enforce-eager", "--dtype", "float32", "--block-size", str(_BLOCK_TOKENS)),
    *("--max-model-len", str(WINDOW_TOKENS), "--max-num-seqs", "256"),
    "--no-enable-prefix-caching",
    *("--kv-cache-memory-bytes", "128M", "--tetri-arena-bytes", "128M"),
    # Tokens are not shown one by one: that would cost more than computing them.
    *("--stream-interval", "1000000", "--distributed-executor-backend", EXECUTOR),
)
_MOST_LATE_PART = 0.1
_TRIES = 3
_START_S = 400.0
_REST_S = 30.0
_POLL_S = 0.1
_REPORT_PERIOD_S = 0.1  # the paper's, scaled as everything else
_NOT_AT_REST = ("running", "waiting", "held", "blocks_used", "arena_used_bytes")
_READY = "ready"
_ROUTER = "router"

R = TypeVar("R")


def add_arguments(parser: argparse.ArgumentParser, *, scale: float) -> None:
    """Options of a benchmark that sends all its requests at once."""
    add_common(parser, scale=scale)
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSONL with prompt and output_tokens, as for vllm bench serve; default: "
        + workload.BUILT_IN,
    )


def add_common(parser: argparse.ArgumentParser, *, scale: float) -> None:
    """Options of every benchmark of a fleet."""
    parser.add_argument(
        "--scale",
        type=float,
        default=scale,
        metavar="F",
        help="factor for how long steps take, below 1 to be done sooner; shown times are those "
        f"without it ({scale:g})",
    )
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep what the output folder holds already from a run under the same conditions",
    )


def conditions(options: argparse.Namespace, **own: Any) -> dict[str, Any]:
    """What results depend on where all requests are sent at once."""
    lengths = options.prompts.name if options.prompts else workload.BUILT_IN
    return common(options, requests=options.requests, lengths=lengths, **own)


def common(options: argparse.Namespace, **own: Any) -> dict[str, Any]:
    """What a run's results depend on, with what only this benchmark has."""
    return {
        "model": setting.model_name(options),
        "device": setting.device(),
        "vllm": vllm_version(),
        "cores": len(setting.cores(options)),
        "pace": Pace("").text(),
        "kv_tokens": options.kv_tokens,
        "repeats": options.repeats,
        "options": options.tail,
        "seed": options.seed,
        **own,
    }


def kept(options: argparse.Namespace, path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """Where results go: new ones, or with `--add` those of an earlier run.

    Raises:
        ConfigError: The earlier run was made under other conditions, or the file is torn or
            of something else.
    """
    if not options.add or not path.exists():
        return fresh
    found = _earlier(path, fresh)
    for name, value in fresh["conditions"].items():
        if found["conditions"].get(name) != value:
            raise ConfigError(
                f"--add: {path} was made with {name} {found['conditions'].get(name)}, not {value}"
            )
    return found


def _earlier(path: Path, fresh: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--add: {path} cannot be read ({error}); delete it") from error
    parts = [name for name, part in fresh.items() if isinstance(part, dict)]
    if not isinstance(found, dict) or not all(isinstance(found.get(each), dict) for each in parts):
        raise ConfigError(f"--add: {path} holds no results of this command; delete it")
    return found


@dataclass(frozen=True, slots=True)
class Member:
    """An instance of the fleet: a name in the cluster, and options for `vllm serve`."""

    name: str
    role: str
    options: tuple[str, ...] = ()


def in_time(runs: Iterable[R], late_part: Callable[[R], float]) -> R:
    """The first run that the machine was quick enough for, of a few tries the least late.

    Args:
        runs: Tries, each made when it is asked for.
        late_part: How far a run was behind its pace, as part of its length.
    """
    tried: list[R] = []
    for run in islice(runs, _TRIES):
        tried.append(run)
        if late_part(run) <= _MOST_LATE_PART:
            break
    return min(tried, key=late_part)


def pool(kv_tokens: int) -> tuple[str, str]:
    """Options for a KV pool that holds so many tokens; one block is vLLM's null block."""
    return "--num-gpu-blocks-override", str(kv_tokens // _BLOCK_TOKENS + 1)


class Fleet:
    """Owner of its processes, used by one thread; nothing outlives it.

    Args:
        model: Folder or name; its own speed does not matter as long as a step of it
            is quicker than the pace.
        serve: Options of `vllm serve` for all instances, stronger than the fleet's own.
        scale: Of the pace.
        cores: Logical CPUs for all.
        folder: For logs.
    """

    def __init__(
        self,
        model: str,
        serve: Sequence[str],
        *,
        scale: float,
        cores: Sequence[int],
        folder: Path,
    ) -> None:
        self._scale = scale
        self._cores = cores
        self._folder = folder
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._counts: dict[str, CountsFile] = {}
        self._stack = ExitStack()
        self._cache = self._stack.enter_context(TemporaryDirectory(prefix="tetri-bench-"))
        self._control = f"tcp://127.0.0.1:{free_port()}"
        self._model = model
        self.served_name = Path(model).name
        self._serve = [
            *(model, "--served-model-name", self.served_name, *_SERVE),
            *("--tetri-control", self._control),
            *("--tetri-report-period", str(_REPORT_PERIOD_S * scale), *serve),
        ]
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._start_router(KEEP_ROLES)

    # -- router ----------------------------------------------------------------------

    def restart_router(self, options: Sequence[str]) -> None:
        """Exchange the router for one with these options; instances join it by themselves,
        in the roles that they have.

        Raises:
            UnsupportedError: It did not start, or an instance does not join it.
        """
        self._children[_ROUTER].terminate()
        self._children[_ROUTER].wait()
        self._start_router(options)
        self._wait_until_ready([name for name in self._children if name != _ROUTER])

    def flip(self, name: str, role: str, *, now: bool = False) -> dict[str, Any]:
        """Give an instance another role, and wait until it has it and knows that all do.
        Returns what the router knows of it then.

        Raises:
            UnsupportedError: The router refuses, or the instance keeps its role.
        """
        epoch = self._order_flip(name, role, now)
        deadline = time.monotonic() + 2 * _REST_S
        while True:
            row = self.instances().get(name, {})
            is_known = bool((row.get("flip") or {}).get("commit_s"))
            if row.get("role") == role and row.get("state") == _READY and is_known:
                return row
            flip = row.get("flip") or {"epoch": -1, "stage": ""}
            if flip["epoch"] >= epoch and flip["stage"] == FlipStage.ROLLED_BACK:
                raise UnsupportedError(f"{name} stays {row['role']}: {flip['problem']}")
            if time.monotonic() > deadline:
                raise UnsupportedError(f"{name} does not get the role {role}: {row}")
            time.sleep(_POLL_S)

    def _order_flip(self, name: str, role: str, now: bool) -> int:
        """Returns the order's epoch; 0 where it has that role."""
        order = urllib.request.Request(
            f"{self.url}/tetri/v1/instances/{name}/flip",
            data=json.dumps({"role": role, "deadline_s": _REST_S, "now": now}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(order, timeout=10) as answer:
                return int(json.load(answer).get("epoch", 0))
        except urllib.error.HTTPError as error:
            words = error.read().decode(errors="replace")[:300]
            raise UnsupportedError(f"{name} does not flip: HTTP {error.code}: {words}") from error

    def _start_router(self, options: Sequence[str]) -> None:
        words = ["-m", "vllm_tetri.cli", "router", "--port", str(self._port)]
        # Several instances start at once on few cores: none is silent so soon.
        words += ["--control", self._control, "--silent-after", "10"]
        words += ["--max-standing-wait", "0"]  # what is measured waits however long it takes
        self._spawn(_ROUTER, [*words, *options])

    # -- members ---------------------------------------------------------------------

    def start(self, members: Sequence[Member]) -> None:
        """Start them together, and wait until the router uses them.

        Raises:
            UnsupportedError: One did not start; the message ends with its log's last lines.
        """
        for member in members:
            path = self._folder / f"{member.name}.counts"
            path.unlink(missing_ok=True)
            self._counts[member.name] = self._stack.enter_context(CountsFile(path))
            pace = Pace(counts=str(path.resolve()), scale=self._scale)
            words = ["-m", "vllm.entrypoints.cli.main", "serve", *self._serve]
            words += ["--role", member.role, "--tetri-instance", member.name]
            words += ["--port", str(free_port()), "--additional-config", json.dumps(pace.plain())]
            self._spawn(member.name, [*words, *member.options])
        self._wait_until_ready([member.name for member in members])

    def stop(self, names: Sequence[str]) -> None:
        """End them in good order, and wait until the router has forgotten them."""
        for name in names:
            self._children[name].terminate()
        for name in names:
            self._children.pop(name).wait()
        deadline = time.monotonic() + _REST_S
        while any(self.instances().get(name, {}).get("state") == _READY for name in names):
            if time.monotonic() > deadline:
                raise UnsupportedError(f"the router still uses {', '.join(names)}")
            time.sleep(_POLL_S)

    def instances(self) -> dict[str, dict[str, Any]]:
        """What the router knows of each."""
        try:
            with urllib.request.urlopen(f"{self.url}/tetri/v1/instances", timeout=10) as answer:
                return {each["id"]: each for each in json.load(answer)["instances"]}
        except (OSError, urllib.error.URLError):
            return {}  # the router is starting

    def at_rest(self) -> dict[str, dict[str, Any]]:
        """The same as soon as nothing is left of any request.

        Raises:
            UnsupportedError: Something stays.
        """
        deadline = time.monotonic() + _REST_S
        time.sleep(2 * _REPORT_PERIOD_S)
        while True:
            found = {
                name: each for name, each in self.instances().items() if name in self._children
            }
            busy = {
                f"{name}.{field}": each[field]
                for name, each in found.items()
                for field in _NOT_AT_REST
                if each[field]
            }
            if found and not busy:
                return found
            if time.monotonic() > deadline:
                raise UnsupportedError(f"not at rest: {busy}")
            time.sleep(_POLL_S)

    def clear_counts(self) -> None:
        """Count anew; at rest."""
        for counts in self._counts.values():
            counts.clear()

    def counts(self) -> Mapping[str, Counts]:
        """Of every member that was ever started."""
        return {name: counts.read() for name, counts in self._counts.items()}

    # -- processes --------------------------------------------------------------------

    def _spawn(self, name: str, words: Sequence[str]) -> None:
        environment = {**os.environ, **engine_environment(1), "OMP_WAIT_POLICY": "PASSIVE"}
        # What instances learn about answers is forgotten with the fleet.
        environment["TETRI_CACHE"] = str(self._cache)
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
        with self._log(name).open("wb") as file:
            self._children[name] = subprocess.Popen(
                [*guard(self._cores), sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _wait_until_ready(self, names: Sequence[str]) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            found = self.instances()
            if all(found.get(name, {}).get("state") == _READY for name in names):
                return
            for name, child in self._children.items():
                if child.poll() is not None or time.monotonic() > deadline:
                    raise failed(f"{name} did not start", self._log(name))
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End everything, in whatever state it is."""
        for child in self._children.values():
            child.terminate()
        for child in self._children.values():
            child.wait()
        self._stack.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
