"""One child of `up` and its process group."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from tests.eventually import eventually
from tests.launch.fakes import is_alive
from vllm_tetri.launch.machine import Placement
from vllm_tetri.launch.plan import ChildSpec
from vllm_tetri.launch.process import ChildProcess


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
    words = sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    said = asyncio.Queue[str]()
    spec = ChildSpec("child", words, Placement(), "/", port=1)
    child = await ChildProcess.start(spec, said.put_nowait)
    command = int(await said.get())
    assert is_alive(command)
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    eventually(lambda: not is_alive(command))
