"""A command and everything below it: killed, stopped, resumed, and gone at the end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from examples.benchmarks.faults import alive, send
from tests.eventually import eventually


def tree(root: psutil.Process) -> list[psutil.Process]:
    """A process and all its descendants now, the root first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [root, *root.children(recursive=True)]
    return []


class Tree:
    """A process and its descendants, as of the last look. Nothing waits but `gone`."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child
        self._root = psutil.Process(child.pid)
        self._seen: set[psutil.Process] = set()

    def look(self) -> list[psutil.Process]:
        """All of them now."""
        self._seen.update(tree(self._root))
        return alive(self._seen)

    def line(self) -> str:
        """The next line that the command prints."""
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def kill(self) -> None:
        """SIGKILL to all, as when their machine dies; the command is reaped."""
        send(self.look(), signal.SIGKILL)
        self.child.wait()

    def stop(self) -> None:
        """SIGSTOP to all, until none runs."""
        send(self.look(), signal.SIGSTOP)
        eventually(
            lambda: all(each.status() == psutil.STATUS_STOPPED for each in alive(self._seen))
        )

    def resume(self) -> None:
        """SIGCONT to all."""
        send(self.look(), signal.SIGCONT)

    def gone(self, within_s: float = 5.0) -> None:
        """Wait until none of them is left."""
        eventually(lambda: not alive(self._seen), within_s)


@contextmanager
def started(words: Sequence[str], **options: Any) -> Iterator[Tree]:
    """A Python program with its output as lines; nothing of it is left afterwards."""
    command = [sys.executable, *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    ) as child:
        found = Tree(child)
        try:
            yield found
        finally:
            found.resume()
            found.kill()
            found.gone()
