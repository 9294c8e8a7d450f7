"""The process of the client, as the benchmark sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO

from vllm_tetri.bench.overload import client
from vllm_tetri.bench.overload.turn import End, Played, Reply, Turn
from vllm_tetri.bench.process import failed

# What is measured goes before the one who measures.
_NICE = 5
_GRACE_S = 5.0


class Talker:
    """Owner of one client process. Used by one event loop; `close` it.

    Args:
        log: File for what it complains about.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        guard = [sys.executable, "-m", "vllm_tetri.launch.guard", "--parent", str(os.getpid())]
        guard += ["--nice", str(_NICE), "--grace", str(_GRACE_S), "--"]
        with log.open("wb") as file:
            self._child = subprocess.Popen(
                [*guard, sys.executable, "-m", client.__name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # Ctrl-C is for the benchmark, which then ends this
            )

    async def play(self, turn: Turn) -> Played:
        """Have one turn played.

        Raises:
            UnsupportedError: The client died; with the last lines of its log.
        """
        line = await asyncio.to_thread(self._ask, json.dumps(asdict(turn)).encode() + b"\n")
        if not line:
            raise failed("the client ended", self._log)
        return played_of(line)

    def close(self) -> None:
        """End it, whatever it does. Idempotent."""
        if self._child.poll() is None:
            self._child.terminate()
        self._child.wait()
        with contextlib.suppress(BrokenPipeError):  # what it has not read
            _pipe(self._child.stdin).close()
        _pipe(self._child.stdout).close()

    def _ask(self, line: bytes) -> bytes:
        try:
            _pipe(self._child.stdin).write(line)
            _pipe(self._child.stdin).flush()
        except BrokenPipeError:
            return b""
        return _pipe(self._child.stdout).readline()


def played_of(line: bytes) -> Played:
    """A turn as its line of JSON says it."""
    found = json.loads(line)
    replies = [Reply(**{**each, "end": End(each["end"])}) for each in found["replies"]]
    return Played(**{**found, "replies": replies})


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
