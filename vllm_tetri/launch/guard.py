"""Run one command so that no process of it outlives the process that started it.

It stays as a small process between `up` and an instance, because the kernel's "kill me when my
parent dies" reaches one process only, while an instance is a tree of processes.

- The guard asks the kernel for SIGINT when its parent dies, however it dies, and looks at its
  parent once a second in case that request was lost.
- It is a subreaper: a process of the tree whose own parent died becomes a child of the guard, so
  the whole tree can always be found.
- The first SIGTERM is passed on to the command, which takes its own time to finish its work.
- Every other signal passes on SIGINT, which ends the command soon; processes that are left after
  the grace period are killed.
- Should the guard itself be killed, the kernel kills the command.

It ends with the command's exit status, or 128 + signal number.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence

import psutil

from vllm_tetri.transport.segments import abandoned_segments

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
# CPython's sigtimedwait returns an empty siginfo when its time is over on waking from SIGSTOP.
_TO_END = _SIGNALS - {signal.SIGCHLD}
_LOOK_S = 1.0
_TIDY_S = 1.0
GRACE_S = 10.0


def guarded(words: Sequence[str], cores: Sequence[int] = (), nice: int = 0) -> list[str]:
    """The command line of a command below a guard whose parent is this process."""
    guard = [sys.executable, "-P", "-m", "vllm_tetri.launch.guard"]
    return [*guard, str(os.getpid()), str(nice), ",".join(map(str, cores)), *words]


def main(arguments: list[str]) -> int:
    """Run the command; the module says what is promised."""
    parent, nice, cores, *command = arguments  # as `guarded` writes them
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
    _prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    if os.getppid() != int(parent):
        return 1
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.nice(int(nice))
    return _Tree(_spawn(command), int(parent)).run()


class _Tree:
    """The command and everything below it. Used by the guard's only thread."""

    def __init__(self, command: int, parent: int) -> None:
        self._command = command
        self._parent = parent
        self._status: int | None = None

    def run(self) -> int:
        passes_on = True
        while self._status is None:
            received = signal.sigtimedwait(_SIGNALS, _LOOK_S)
            self._reap()
            number = 0 if received is None else received.si_signo
            if number == signal.SIGTERM and passes_on:
                passes_on = False
                self._signal_command(signal.SIGTERM)
            elif number in _TO_END or os.getppid() != self._parent:
                self._end_command()
                break
        self._end_rest()
        if self._status is None or self._status < 0:
            abandoned_segments(remove=True)
        status = -signal.SIGKILL if self._status is None else self._status
        return status if status >= 0 else 128 - status

    def _signal_command(self, number: signal.Signals) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._command, number)

    def _end_command(self) -> None:
        self._signal_command(signal.SIGINT)
        deadline = time.monotonic() + GRACE_S
        while self._status is None and time.monotonic() < deadline:
            signal.sigtimedwait({signal.SIGCHLD}, 0.1)
            self._reap()

    def _end_rest(self) -> None:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            if self._status is None and kind is signal.SIGTERM:
                continue  # its grace is over
            deadline = time.monotonic() + _TIDY_S
            for process in _descendants():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(kind)
            while _descendants() and time.monotonic() < deadline:
                signal.sigtimedwait({signal.SIGCHLD}, 0.05)
                self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._command:
                self._status = os.waitstatus_to_exitcode(status)


def _descendants() -> list[psutil.Process]:
    """Every live process below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                found.append(process)
    return found


def _spawn(command: list[str]) -> int:
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == guard:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
