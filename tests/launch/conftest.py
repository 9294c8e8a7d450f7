"""Fixtures of the tests of `up`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.fakes import FakeUp, is_alive


@pytest.fixture
def fake_up(tmp_path: Path) -> Iterator[FakeUp]:
    up = FakeUp(tmp_path)
    yield up
    if up.process is not None:
        if up.process.poll() is None:
            up.process.send_signal(signal.SIGKILL)
        up.process.communicate()
    for pid in up.pids():
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
