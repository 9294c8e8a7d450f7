"""One child of `up` and its process group."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from vllm_tetri.launch.machine import Placement
from vllm_tetri.launch.plan import ChildSpec
from vllm_tetri.launch.process import ChildProcess


async def test_a_group_is_killed_once_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be that of another group by then."""
    killed = list[int]()
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(group))
    spec = ChildSpec("child", (sys.executable, "-c", "print('done')"), Placement(), "/")
    lines = list[str]()
    child = await ChildProcess.start(spec, 1, lines.append, None)
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
    words = sys.executable, "-c", "import time; print('runs', flush=True); time.sleep(600)"
    child = await ChildProcess.start(
        ChildSpec("child", words, Placement(), "/"), 1, lambda _: None, None
    )
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
