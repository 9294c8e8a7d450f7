"""Trees of processes: whose they are, and signals to all of one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Mapping, Sequence

import psutil

_GUARD = "vllm_tetri.launch.guard"
_INSTANCE = "--tetri-instance"
_PORT = "--port"
_ROUTER = ["-m", "vllm_tetri.cli", "router"]
_PREDICTOR = ["-m", "vllm_tetri.cli", "predictor", "serve"]
_PREDICTOR_OF = "'s predictor"
# What vLLM calls its processes.
_ENGINE, _WORKER = "::EngineCore", "::Worker"


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


def members(
    root: psutil.Process, routers: Mapping[int, str] | None = None
) -> dict[str, list[psutil.Process]]:
    """Instances, routers and predictors below `vllm-tetri up`, by name: all processes of
    each but for the guard above it, which tells `up` how it ended. A predictor is among
    its instance's, too.

    Args:
        routers: Names of routers by port.
    """
    found: dict[str, list[psutil.Process]] = {}
    for each in tree(root):
        with contextlib.suppress(psutil.Error):
            name = name_of(each.cmdline(), routers or {})
            if name:
                found[name] = each.children(recursive=True)
    for name, processes in list(found.items()):
        for each in processes:
            if _words(each)[1 : 1 + len(_PREDICTOR)] == _PREDICTOR:
                found[predictor_of(name)] = [each]
    return found


def is_predictor(name: str) -> bool:
    """Whether a member of this name is one."""
    return name.endswith(_PREDICTOR_OF)


def predictor_of(instance: str) -> str:
    """Name of an instance's predictor."""
    return instance + _PREDICTOR_OF


def name_of(words: Sequence[str], routers: Mapping[int, str]) -> str:
    """Whose guard a command line belongs to; empty if it is none of an instance or of a
    router.

    Args:
        routers: Names by port, which is all that tells their command lines apart.
    """
    if _GUARD not in words or "--" not in words:
        return ""
    command = words[words.index("--") + 1 :]
    if _INSTANCE in command[:-1]:
        return command[command.index(_INSTANCE) + 1]
    if list(command[1 : 1 + len(_ROUTER)]) == _ROUTER and _PORT in command[:-1]:
        return routers.get(int(command[command.index(_PORT) + 1]), "")
    return ""


def engine_of(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The one process that computes: the engine's, or the first of its workers where it
    has any."""
    named = {each: " ".join(_words(each)) for each in processes}
    for what in (_WORKER, _ENGINE):
        found = [each for each, words in named.items() if what in words]
        if found:
            return [min(found, key=lambda each: named[each])]
    return []


def is_running(process: psutil.Process) -> bool:
    """Whether it is there and not stopped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() not in (
            psutil.STATUS_ZOMBIE,
            psutil.STATUS_STOPPED,
        )
    return False


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that run, are stopped or sleep; not those that only wait to be reaped."""
    found = []
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []
