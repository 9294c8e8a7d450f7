"""What `vllm-tetri bench router` compares: processes, and where they run."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from vllm_tetri.bench import setting
from vllm_tetri.bench.process import failed, guard
from vllm_tetri.bench.router import client as router_client
from vllm_tetri.bench.router import stub as router_stub
from vllm_tetri.bench.router.report import DIRECT, OURS, RIVAL, SPLIT, WHOLE
from vllm_tetri.errors import UnsupportedError
from vllm_tetri.launch.machine import free_port

PAIR_HEADERS = f"x-tetri-prefill: {router_stub.PREFILL}\r\nx-tetri-decode: {router_stub.DECODE}"
_START_S = 60.0
_POLL_S = 0.1
_PATIENCE_S = 10  # instances that flood a router report late
_LIMIT = 4096  # requests at a time, so that no router refuses any


@dataclass(frozen=True, slots=True)
class System:
    """What is measured: asked where, and whose CPU time counts."""

    shape: str
    name: str
    url: str
    decode_url: str = ""
    pids: list[int] = field(default_factory=list)
    headers: str = ""  # part of every answer's head


@dataclass(frozen=True, slots=True)
class Places:
    """Logical CPUs of each process."""

    router: tuple[int, ...]
    stubs: tuple[int, ...]
    client: tuple[int, ...]


def places(options: argparse.Namespace) -> Places:
    """The last core is the router's; what there is besides is shared by the others."""
    *others, router = setting.cores(options)
    others = others or [router]
    return Places((router,), tuple(others[-1:]), tuple(others[:1]))


@contextmanager
def systems(options: argparse.Namespace, at: Places) -> Iterator[list[System]]:
    """Everything that is compared, running until the end.

    Raises:
        UnsupportedError: Something did not start; the message ends with its log.
    """
    with ExitStack() as stack:
        yield _start(options, at, stack)


def _start(options: argparse.Namespace, at: Places, stack: ExitStack) -> list[System]:
    controls = [f"tcp://127.0.0.1:{free_port()}" for _ in (WHOLE, SPLIT)]
    stubs = stack.enter_context(_stubs(options, at.stubs, controls))
    found = [
        System(WHOLE, DIRECT, stubs[router_stub.WHOLE]),
        System(SPLIT, DIRECT, stubs[router_stub.PREFILL], stubs[router_stub.DECODE]),
    ]
    for shape, name, words in _commands(options.rival, stubs, controls):
        log = options.output / f"{name}-{shape}.log"
        headers = PAIR_HEADERS if (shape, name) == (SPLIT, OURS) else ""
        url, pids = stack.enter_context(_router(words, at.router, log, headers))
        found.append(System(shape, name, url, pids=pids, headers=headers))
    return found


def _commands(
    rival: str | None, stubs: dict[str, str], controls: Sequence[str]
) -> Iterator[tuple[str, str, list[str]]]:
    """Shape, name and command line of every router."""
    for shape, control in zip((WHOLE, SPLIT), controls, strict=True):
        words = [sys.executable, "-m", "vllm_tetri.cli", "router", "--control", control]
        words += ["--max-in-flight", str(_LIMIT), "--silent-after", str(_PATIENCE_S)]
        yield shape, OURS, words
    if rival is None:
        return
    whole = ["--worker-urls", stubs[router_stub.WHOLE]]
    pair = ["--prefill", stubs[router_stub.PREFILL], "--decode", stubs[router_stub.DECODE]]
    for shape, workers in ((WHOLE, whole), (SPLIT, ["--vllm-pd-disaggregation", *pair])):
        words = [rival, *workers, "--policy", "round_robin", "--log-level", "error"]
        words += ["--max-concurrent-requests", str(_LIMIT)]
        yield shape, RIVAL, [*words, "--prometheus-port", str(free_port())]


def client(options: argparse.Namespace, at: Places) -> Talker:
    """Who plays the turns."""
    words = [sys.executable, "-m", router_client.__name__]
    return Talker(words, at.client, options.output / "client.log")


@contextmanager
def _stubs(
    options: argparse.Namespace, cores: Sequence[int], controls: Sequence[str]
) -> Iterator[dict[str, str]]:
    """The instances' URLs by name."""
    words = [sys.executable, "-m", router_stub.__name__, "--prompt", str(options.prompt)]
    words += ["--whole-control", controls[0], "--split-control", controls[1]]
    with Talker(words, cores, options.output / "stubs.log") as stubs:
        yield stubs.answer()


@contextmanager
def _router(
    words: Sequence[str], cores: Sequence[int], log: Path, headers: str
) -> Iterator[tuple[str, list[int]]]:
    """URL and processes of a router that serves with these headers."""
    port = free_port()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*guard(cores), *words, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
        while not _serves(url, headers):
            if process.poll() is not None or time.monotonic() > deadline:
                raise failed(f"{words[0]} did not start", log)
            time.sleep(_POLL_S)
        yield url, [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
    finally:
        process.terminate()
        process.wait()


def _serves(url: str, headers: str) -> bool:
    body = {"model": router_stub.MODEL, "prompt": "x", "max_tokens": 4, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_START_S) as answer:
            lines = "\r\n".join(f"{name}: {value}" for name, value in answer.getheaders())
            return b"[DONE]" in answer.read() and headers in lines
    except (OSError, urllib.error.URLError):
        return False


class Talker:
    """A child that answers lines of JSON with lines of JSON, and ends with its input."""

    def __init__(self, words: Sequence[str], cores: Sequence[int], log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*guard(cores), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def __enter__(self) -> Talker:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes its input
            self._process.terminate()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """One line for one line.

        Raises:
            UnsupportedError: It died, or says that it could not.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then the answer says why
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        answer = self.answer()
        if "error" in answer:
            raise UnsupportedError(f"{question['url']}: {answer['error']}")
        return answer

    def answer(self) -> dict[str, Any]:
        """Its next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise failed("a process of the benchmark ended", self._log)
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer
