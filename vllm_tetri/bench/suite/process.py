"""One command of a suite as a child process, of which nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

_LOOK_S = 0.5
_GRACE_S = 30.0  # for a benchmark to end its engines after Ctrl-C


def carry_out(command: Sequence[str], log: Path, look: Callable[[float], None]) -> int:
    """Run it to its end; returns its exit status.

    The child is in a session of its own, so Ctrl-C reaches only this process, which passes
    it on once: the benchmark ends its engines itself. What is left of its tree then is ended
    by the guard, within seconds; also when this process dies.

    Args:
        log: Gets all that it prints.
        look: Called twice a second with the seconds since the start.
    """
    guard = [sys.executable, "-m", "vllm_tetri.launch.guard", "--parent", str(os.getpid())]
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*guard, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while True:
            try:
                return process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                look(time.monotonic() - started)
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C in a terminal would. After half a minute, or at a second one, the guard ends
    all that is left, and further ones change nothing."""
    try:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children():
                child.send_signal(signal.SIGINT)
        process.wait(_GRACE_S)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        pass
    finally:
        usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.terminate()
            process.wait()
        finally:
            signal.signal(signal.SIGINT, usual)


def last_line(log: Path) -> str:
    """The last thing that it said, for a line about its failure."""
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
