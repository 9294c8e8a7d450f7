"""One child process under its guard, and the lines it prints."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from vllm_tetri.errors import TetriError
from vllm_tetri.launch.guard import GRACE_S, guarded
from vllm_tetri.launch.machine import free_port
from vllm_tetri.launch.plan import ChildSpec

GUARD_MARGIN_S = 4.0
_MAX_LINE_BYTES = 1 << 16
_LOOK_S = 1.0
_PYTHON = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}


class StartError(TetriError):
    """There is no place for a child now."""


class ChildProcess:
    """A running command. Used by the event loop that started it.

    `stop` (orderly) and `kill` (at once) end the whole process tree and may be
    called in any state, any number of times.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        address: tuple[str, int],
        on_line: Callable[[str], None],
    ) -> None:
        self.host, self.port = address  # of its HTTP server
        self._process = process
        self.pid = process.pid  # the guard's, which is also the process group's
        self._on_line = on_line
        self._is_gone = False  # its process id may be another process's
        self._pump = asyncio.create_task(self._read_lines())

    @classmethod
    async def start(cls, spec: ChildSpec, on_line: Callable[[str], None]) -> ChildProcess:
        """Start a child in a session of its own; `on_line` gets its output.

        Neither the guard nor any Python below it imports from the current directory: in a
        clone of this project that would be the source tree, without the built extension.

        Must run in the thread that lives as long as the process, because the
        kernel tells the guard when that *thread* ends.
        """
        placement, port = spec.placement, spec.port or free_port(spec.host)
        process = await asyncio.create_subprocess_exec(
            *guarded(spec.command(port), placement.cores, placement.nice),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **_PYTHON, **dict(placement.environment + spec.environment)},
            start_new_session=True,
        )
        return cls(process, (spec.host, port), on_line)

    async def wait(self) -> int:
        """Exit status, after the last line was delivered."""
        exited = asyncio.ensure_future(self._process.wait())
        try:  # it waits for the end of the output, too, which what is left may hold open
            while (status := self._process.returncode) is None:
                await asyncio.wait({exited}, timeout=_LOOK_S)
        finally:
            exited.cancel()
        self.kill()  # a killed guard may have left something
        await asyncio.wait({self._pump}, timeout=1.0)
        self._pump.cancel()
        return status

    async def stop(self, drain_s: float = 0.0) -> None:
        """Ask the tree to end, after its work if that takes at most `drain_s`, and kill what is
        left after the grace period."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM if drain_s else signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), drain_s + GRACE_S + GUARD_MARGIN_S)
        self.kill()
        await self.wait()

    def kill(self) -> None:
        """End the tree at once: the guard leads the group, and the kernel kills its command."""
        if self._is_gone:
            return
        self._is_gone = self._process.returncode is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _read_lines(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        rest = b""
        while data := await stream.read(_MAX_LINE_BYTES):
            # A bar that redraws itself is one line per state.
            *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            self._deliver(lines)
        self._deliver([rest])

    def _deliver(self, lines: list[bytes]) -> None:
        for line in lines:
            if text := line.decode(errors="replace").rstrip():
                self._on_line(text)
