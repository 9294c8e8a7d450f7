"""One child of `up` with its process group, and the guard between them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.eventually import eventually
from tests.launch.fakes import is_alive
from vllm_tetri.launch.guard import guarded
from vllm_tetri.launch.machine import Placement
from vllm_tetri.launch.plan import ChildSpec
from vllm_tetri.launch.process import ChildProcess

ROOT = Path(__file__).parents[2]
COMMAND = "echo begun; trap 'exit 7' TERM; while :; do sleep 0.05; done"
IGNORES = "trap '' TERM; trap 'exit 5' INT; echo begun; while :; do sleep 0.05; done"


async def test_a_group_is_killed_once_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be that of another group by then."""
    killed = list[int]()
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(group))
    spec = ChildSpec("child", (sys.executable, "-c", "print('done')"), Placement(), "/", port=1)
    lines = list[str]()
    child = await ChildProcess.start(spec, lines.append)
    child.kill()
    assert killed == [child.pid]
    assert await child.wait() == 0
    assert killed == 2 * [child.pid]  # what a killed guard would leave
    await child.stop()
    child.kill()
    assert await child.wait() == 0
    assert killed == 2 * [child.pid]
    assert lines == ["done"]


async def test_what_a_killed_guard_leaves_ends() -> None:
    # It dies with its guard, and what it has started keeps their output open.
    code = "import os, subprocess, time; below = subprocess.Popen(['sleep', '600'])\n"
    code += "print(os.getpid(), below.pid, flush=True); time.sleep(600)"
    words = sys.executable, "-c", code
    said = asyncio.Queue[str]()
    spec = ChildSpec("child", words, Placement(), "/", port=1)
    child = await ChildProcess.start(spec, said.put_nowait)
    left = [int(each) for each in (await said.get()).split()]
    assert all(map(is_alive, left))
    os.kill(child.pid, signal.SIGKILL)
    assert await asyncio.wait_for(child.wait(), 10.0) == -signal.SIGKILL
    eventually(lambda: not any(map(is_alive, left)))


@contextmanager
def guarding(command: str, *before: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [*before, *guarded(["/bin/sh", "-c", command])],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as guard:
        try:
            assert guard.stdout is not None
            assert guard.stdout.readline() == b"begun\n"
            yield guard
        finally:
            guard.kill()


def test_a_command_takes_its_time_after_sigterm_until_the_second_signal() -> None:
    # Background jobs of a shell ignore SIGINT.
    with guarding(IGNORES, "/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh") as guard:
        guard.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            guard.wait(0.7)
        guard.terminate()
        assert guard.wait(10) == 5


def test_a_guard_that_was_stopped_does_not_end_its_command() -> None:
    with guarding(COMMAND) as guard:
        guard.send_signal(signal.SIGSTOP)
        time.sleep(1.3)  # longer than it waits between two looks
        guard.send_signal(signal.SIGCONT)
        with pytest.raises(subprocess.TimeoutExpired):
            guard.wait(0.7)
        guard.terminate()
        assert guard.wait(10) == 7
