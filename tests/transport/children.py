"""Senders and receivers in processes of their own, to be killed and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("sending_child.py")


RECEIVER = (
    "import sys; from vllm_tetri.transport.native import Receiver;"
    "r = Receiver(arena_bytes=1 << 20, identity={identity});"
    "print(r.endpoint, flush=True); sys.stdin.read()"
)


@contextmanager
def child(
    endpoint: str, link: str, key: bytes = b"", *, within: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A sender in the middle of a transfer."""
    command = [*within, sys.executable, str(CHILD), endpoint, link, key.hex()]
    with _running(command) as (process, line):
        assert line == "sending"
        yield process


@contextmanager
def receiving(identity: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A receiver, and its endpoint."""
    with _running([sys.executable, "-c", RECEIVER.format(identity=identity)]) as found:
        yield found


@contextmanager
def _running(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # returns when it has stopped
