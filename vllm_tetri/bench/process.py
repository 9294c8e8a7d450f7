"""An engine in a process of its own, asked for one measurement at a time.

Two kinds of engine can so take turns on the same core: the one that is not
asked sleeps on its pipe. A guard ends the process with whoever started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_tetri.bench.engine import ONLY_CORES
from vllm_tetri.errors import UnsupportedError

_GRACE_S = 10.0
_TAIL_LINES = 15


class EngineProcess:
    """One engine. Used by one thread; `close` it.

    Args:
        options: What `vllm serve` would get behind its name, the model first.
        cores: Logical CPUs it is pinned to.
        log: File for everything the engine prints.
        spare_cores: What it may put helpers on.
    """

    def __init__(
        self,
        options: Sequence[str],
        cores: Sequence[int],
        log: Path,
        *,
        spare_cores: Sequence[int] = (),
    ) -> None:
        self._log = log
        self._nowhere = Nowhere()
        words = [*options]
        if "--role" in words:
            words += ["--tetri-control", self._nowhere.address]
        only = f"{ONLY_CORES}{','.join(map(str, cores))}"
        engine = [sys.executable, "-m", "vllm_tetri.bench.engine", only]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*guard([*cores, *spare_cores]), *engine, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, **engine_environment(len(cores))},
            )

    def ready(self) -> dict[str, Any]:
        """Wait until it has started; returns what it says about itself.

        Raises:
            UnsupportedError: It did not start.
        """
        return self._answer()

    def ask(self, **question: Any) -> dict[str, Any]:
        """One measurement; see `vllm_tetri.bench.engine` for the questions.

        Raises:
            UnsupportedError: It died; the message ends with the last lines of its log.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then the answer says why
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise failed("the engine ended", self._log)
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        """End it, in whatever state it is. May be called again."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # an engine without a question ends with its input
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        self._process.stdout.close()
        self._nowhere.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.terminate()
        self.close()


class Nowhere:
    """A control address at which nobody listens, so that a cluster on this machine
    does not see the instance as one of its own."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._socket.close()


def failed(what: str, log: Path) -> UnsupportedError:
    """The error about a child, with the last lines of its log."""
    tail = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return UnsupportedError("\n".join([f"{what}; its log ends with", *tail]))


def guard(cores: Sequence[int]) -> list[str]:
    """What to put before a command: it is pinned, and ends with this process."""
    own = str(os.getpid())
    pinned = ",".join(map(str, cores))
    words = [sys.executable, "-m", "vllm_tetri.launch.guard", "--parent", own]
    return [*words, "--grace", str(_GRACE_S), "--cores", pinned, "--"]


def engine_environment(threads: int) -> dict[str, str]:
    """Variables for an engine with so many threads, the same for every system."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
