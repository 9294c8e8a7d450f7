"""Senders in processes of their own, to be killed and stopped."""

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


@contextmanager
def child(
    endpoint: str, link: str, key: bytes = b"", *, within: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    command = [*within, sys.executable, str(CHILD), endpoint, link, key.hex()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "sending\n"
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # returns when it has stopped
