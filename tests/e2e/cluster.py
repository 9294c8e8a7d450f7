"""Real processes for end-to-end tests: `vllm serve` as stock, and `vllm-tetri up`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from examples.benchmarks.cluster import metric
from examples.benchmarks.faults import send
from vllm_tetri.launch.machine import free_port

START_S = 240.0
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
MODEL = "tiny"
CHUNK = 64
ARENA_BYTES = 64 << 20
AUDITED = 15  # reports, in which whatever is left shows
SERVE = (
    "--served-model-name", MODEL, "--max-model-len", "2048", "--enforce-eager",
    "--dtype", "float32", "--kv-cache-memory-bytes", "134217728", "--max-num-seqs", "32",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    *os.environ.get("TETRI_TEST_SERVE", "").split(),  # of a GPU (`tests/gpu`)
)  # fmt: skip


# For processes that share cores: threads that wait must not spin.
PASSIVE = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Process:
    """A child process that writes to a log file and dies with its group."""

    def __init__(
        self, arguments: list[str], log: Path, *, within: tuple[str, ...] = (), **environment: str
    ) -> None:
        self.log = log
        with log.open("wb") as out:
            self.child = subprocess.Popen(
                [*within, sys.executable, "-m", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )

    def tree(self) -> list[psutil.Process]:
        root = psutil.Process(self.child.pid)
        return [root, *root.children(recursive=True)]

    def wait_for(self, is_ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not is_ready():
            if self.child.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{what} is not ready; its log ends with\n{self.log_end()}")
            time.sleep(0.1)

    def must_run(self, what: str) -> None:
        status = self.child.poll()
        if status is not None:
            log = self.log.read_text(errors="replace").partition("startup complete")[2]
            said = " | ".join(re.findall(r"(?:\w+Error: |[Ff]atal|\[shutdown).*", log)[:6])
            raise AssertionError(f"{what} ended with {status}: {said[:700]}\n{self.log_end()}")

    def log_end(self) -> str:
        """The last lines of the log, without what nanobind says of every process that ends."""
        lines = self.log.read_text(errors="replace").splitlines()
        told = [line for line in lines if "nanobind" not in line and " - leaked " not in line]
        return "\n".join(told[-60:])[-6000:]

    def stop(self) -> int:
        """Ctrl-C, and a kill when that is not enough."""
        self.child.send_signal(signal.SIGINT)
        try:
            return self.child.wait(40)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            return self.child.wait()


class Stock(Process):
    """One stock vLLM instance, without this package."""

    def __init__(self, model: Path, folder: Path, *, serve: tuple[str, ...] = ()) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(
            ["vllm.entrypoints.cli.main", "serve", str(model), "--port", str(self.port), *SERVE,
             "--distributed-executor-backend", UNIPROC, *serve],
            folder / "stock.log",
            VLLM_PLUGINS="any_runner,forked",  # none of ours
            VLLM_CPU_OMP_THREADS_BIND="nobind",  # else every worker wants a core of its own
        )  # fmt: skip

    def ready(self) -> None:
        self.wait_for(lambda: answers(f"{self.url}/health"), "stock vLLM")


class Cluster(Process):
    """`vllm-tetri up` with one prefill and one decode instance."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        roles: tuple[str, ...] = (),
        serve: tuple[str, ...] = (),
        arena_bytes: int | None = ARENA_BYTES,
        within: tuple[str, ...] = (),
    ) -> None:
        arena = [] if arena_bytes is None else ["--tetri-arena-bytes", str(arena_bytes)]
        self.ready_file = folder / "ready.json"
        self.logs = folder / "logs"
        super().__init__(
            ["vllm_tetri.cli", "up", str(model), *roles, "--port", "0", "--ready-file",
             str(self.ready_file), "--log-dir", str(self.logs), "--flip", "off",
             "--mode", "split", "--", *SERVE, *arena, "--tetri-chunk-size", str(CHUNK),
             "--tetri-transfer-timeout", "5", "--enable-logging-iteration-details", *serve],
            folder / "up.log",
            within=within,
        )  # fmt: skip

    def ready(self) -> None:
        self.wait_for(self.ready_file.exists, "the cluster")
        self.facts = json.loads(self.ready_file.read_text())
        self.url = self.facts["url"]

    def instances(self) -> dict[str, dict[str, Any]]:
        answer = get(f"{self.url}/tetri/v1/instances")
        return {entry["id"]: entry for entry in answer["instances"]}

    def state_of(self, name: str) -> str:
        return str(self.instances().get(name, {"state": "gone"})["state"])

    def are_ready(self, count: int) -> bool:
        """Whether there are that many instances, all of them ready."""
        states = [entry["state"] for entry in self.instances().values()]
        return states == ["ready"] * count

    def requests(self) -> list[dict[str, Any]]:
        """The rows of the router's table of requests."""
        found: list[dict[str, Any]] = get(f"{self.url}/tetri/v1/requests")["requests"]
        return found

    def phases(self) -> list[str]:
        return [row["phase"] for row in self.requests()]

    def resumed(self) -> float:
        """How many streams broke off and were continued by another instance."""
        return metric(self.url, "tetri_streams_broken_total", 'outcome="resumed"')

    def processes(self, name: str) -> list[psutil.Process]:
        """The processes of an instance, as they are now; its guard first."""
        words = ["--tetri-instance", name]
        for each in self.tree():
            line = each.cmdline()
            if any(line[at : at + 2] == words for at in range(len(line))):
                return [each, *each.children(recursive=True)]
        raise AssertionError(f"no process of {name}")

    def engine(self, name: str) -> psutil.Process:
        """The engine process of an instance."""
        return next(each for each in self.processes(name) if "EngineCore" in str(each.cmdline()))

    def audit(self) -> None:
        """Invariant: instances that were at rest for a while find nothing left themselves."""
        self.rest()
        seen = {name: entry["seq"] for name, entry in self.instances().items()}
        deadline = time.monotonic() + 10
        while any(self.instances()[name]["seq"] < seq + AUDITED for name, seq in seen.items()):
            assert time.monotonic() < deadline, "instances do not report"
            time.sleep(0.05)
        self.rest()

    def rest(self, within_s: float = 1.5) -> None:
        """Invariant: soon after the last request nothing is left anywhere.

        One second, plus what a report takes to get here.
        """
        deadline = time.monotonic() + within_s
        while True:
            busy = self._busy()
            if not busy:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"not at rest: {busy}")
            time.sleep(0.05)

    def _busy(self) -> dict[str, Any]:
        fields = ("running", "waiting", "held", "blocks_used", "arena_used_bytes")
        found: dict[str, Any] = {
            f"{name}.{field}": entry[field]
            for name, entry in self.instances().items()
            for field in fields
            if entry[field]
        }
        for name, entry in self.instances().items():
            if entry["leftovers"]:
                found[f"{name}.leftovers"] = entry["leftovers"]
        if in_flight := get(f"{self.url}/tetri/v1/requests")["in_flight"]:
            found["in_flight"] = in_flight
        return found


def by_hand(folder: Path, name: str, role: str, model: Path, control: str, *serve: str) -> Process:
    """One instance, which joins a cluster."""
    return Process(
        ["vllm.entrypoints.cli.main", "serve", str(model), *SERVE, "--role", role,
         "--port", str(free_port()), "--distributed-executor-backend", UNIPROC,
         "--tetri-instance", name, "--tetri-control", control,
         "--tetri-arena-bytes", str(ARENA_BYTES), "--tetri-chunk-size", str(CHUNK), *serve],
        folder / f"{name}.log",
        VLLM_SERVER_DEV_MODE="1",
        **PASSIVE,
    )  # fmt: skip


class ByHand(Cluster):
    """A router, and instances that are started one by one."""

    command: tuple[str, ...] = ("router", "--flip", "off", "--mode", "split")

    def __init__(self, folder: Path, *options: str, port_option: str = "--port") -> None:
        self.folder, self.parts = folder, dict[str, Process]()
        self.control, port = f"tcp://127.0.0.1:{free_port()}", free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = [*self.command, port_option, str(port), "--control", self.control, *options]
        self.arguments = ["vllm_tetri.cli", *words]
        Process.__init__(self, self.arguments, folder / f"{words[0]}.log")

    def ready(self) -> None:
        self.wait_for(lambda: answers(f"{self.url}/tetri/v1/instances"), "the router")

    def start(self, name: str, role: str, model: Path, *serve: str) -> None:
        self.parts[name] = by_hand(self.folder, name, role, model, self.control, *serve)

    def kill(self, name: str) -> None:
        """SIGKILL to an instance or the router, and to what they have started."""
        part = self.parts.get(name, self)
        send(part.tree(), signal.SIGKILL)
        part.child.wait()

    def restart(self) -> None:
        """Start the router again."""
        Process.__init__(self, self.arguments, self.log)

    def wait(self, *names: str) -> None:
        for name in names:
            self.parts[name].wait_for(lambda name=name: self.state_of(name) == "ready", name)

    def stop(self) -> int:
        for part in self.parts.values():
            part.stop()
        return super().stop()


@contextmanager
def running(servers: Any) -> Iterator[Any]:
    """Stock or a cluster, ready; gone afterwards."""
    try:
        servers.ready()
        yield servers
    finally:
        servers.stop()


@contextmanager
def side_by_side(stock: Stock, cluster: Cluster) -> Iterator[tuple[Stock, Cluster]]:
    """Both ready; both gone afterwards."""
    try:
        stock.ready()
        cluster.ready()
        yield stock, cluster
    finally:
        cluster.stop()
        stock.stop()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def post(url: str, body: Any = None) -> Any:
    """The response of an order to a router; None if it is no JSON, as those of vLLM may be."""
    order = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(order, timeout=60) as response, suppress(ValueError):
        return json.load(response)


def answers(url: str) -> bool:
    with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=5):
        return True
    return False
