"""Trees of processes: whose they are, and signals to all of one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Sequence

import psutil

_GUARD = "vllm_tetri.launch.guard"
_INSTANCE = "--tetri-instance"
ROUTER = "router"


def tree(root: psutil.Process) -> list[psutil.Process]:
    """A process and everything below it that is there now, the root first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [root, *root.children(recursive=True)]
    return []


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """A signal to all of them; those that are gone are left out."""
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)


def members(root: psutil.Process) -> dict[str, list[psutil.Process]]:
    """Instances and the router below `vllm-tetri up`, by name: all processes of each but
    for the guard above it, which tells `up` how it ended."""
    found = {}
    for each in tree(root):
        with contextlib.suppress(psutil.Error):
            name = name_of(each.cmdline())
            if name:
                found[name] = each.children(recursive=True)
    return found


def name_of(words: Sequence[str]) -> str:
    """Whose guard a command line belongs to; empty if it is none of an instance or of a
    router."""
    if _GUARD not in words or "--" not in words:
        return ""
    command = words[words.index("--") + 1 :]
    if _INSTANCE in command[:-1]:
        return command[command.index(_INSTANCE) + 1]
    return ROUTER if list(command[1:4]) == ["-m", "vllm_tetri.cli", "router"] else ""


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that run, are stopped or sleep; not those that only wait to be reaped."""
    found = []
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found
