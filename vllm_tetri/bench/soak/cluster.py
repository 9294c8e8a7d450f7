"""`vllm-tetri up` as a child, and who is in it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from vllm_tetri.bench.process import failed
from vllm_tetri.bench.soak import processes
from vllm_tetri.transport.leftovers import abandoned_segments

START_S = 900.0
# `up` gives its children ten seconds, and those of them who do not end are killed.
_STOP_S = 30.0
_POLL_S = 0.1


class Cluster:
    """Owner of `up` and of all that it starts; nothing outlives it, however it ends.

    Args:
        words: Options of `up` behind the model, with `--` and those of `vllm serve`.
        folder: For logs.
    """

    def __init__(self, model: str, words: Sequence[str], folder: Path) -> None:
        self._abandoned = set(abandoned_segments())  # by others
        self._ready = folder / "ready.json"
        self._ready.unlink(missing_ok=True)
        self._log = folder / "up.log"
        guard = [sys.executable, "-m", "vllm_tetri.launch.guard", "--parent", str(os.getpid())]
        up = [sys.executable, "-m", "vllm_tetri.cli", "up", model, "--port", "0"]
        up += ["--ready-file", str(self._ready), "--log-dir", str(folder), *words]
        with self._log.open("wb") as file:
            self._child = subprocess.Popen(
                [*guard, "--grace", str(_STOP_S), "--", *up],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the soak, which then ends this
            )
        self._root = psutil.Process(self._child.pid)
        self._seen: set[psutil.Process] = set()
        self._routers: dict[int, str] = {}

    async def ready(self) -> dict[str, Any]:
        """Wait until it serves; what it says of itself.

        Raises:
            UnsupportedError: It did not start; with the last lines of its log.
        """
        deadline = time.monotonic() + START_S
        while not self._ready.exists():
            if self._child.poll() is not None or time.monotonic() > deadline:
                raise failed("the cluster did not start", self._log)
            await asyncio.sleep(_POLL_S)
        facts = json.loads(self._ready.read_text())
        assert isinstance(facts, dict)
        ports = [urlsplit(each["url"]).port for each in facts["routers"]]
        self._routers = {
            port: each["id"] for port, each in zip(ports, facts["routers"], strict=True) if port
        }
        return facts

    def members(self) -> dict[str, list[psutil.Process]]:
        """Processes of every instance, router and predictor, by name."""
        found = processes.members(self._root, self._routers)
        self._seen.update(each for tree in found.values() for each in tree)
        return found

    def processes(self) -> list[psutil.Process]:
        """All of them, with those that keep them."""
        return processes.tree(self._root)

    def is_running(self) -> bool:
        """Whether `up` has not ended."""
        return self._child.poll() is None

    def close(self) -> list[str]:
        """End everything; what is left all the same, in words. Idempotent."""
        if self._child.poll() is None:
            self.members()
            # One that is stopped could not end.
            processes.send(self._seen, signal.SIGCONT)
            self._child.terminate()
            try:
                self._child.wait(2 * _STOP_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        arenas = sorted(set(abandoned_segments()) - self._abandoned)
        left = [f"process {each.pid}" for each in processes.alive(self._seen)]
        return left + [f"arena {path}" for path in arenas]
