"""The guard between `up` and an instance, when everything was stopped for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from vllm_tetri.launch.guard import guarded

ROOT = Path(__file__).parents[2]
COMMAND = "echo begun; trap 'exit 7' TERM; while :; do sleep 0.05; done"


def test_a_guard_that_was_stopped_does_not_end_its_command() -> None:
    with subprocess.Popen(
        guarded(["/bin/sh", "-c", COMMAND]),
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as guard:
        try:
            assert guard.stdout is not None
            assert guard.stdout.readline() == b"begun\n"
            guard.send_signal(signal.SIGSTOP)
            time.sleep(1.3)  # longer than it waits between two looks
            guard.send_signal(signal.SIGCONT)
            with pytest.raises(subprocess.TimeoutExpired):
                guard.wait(0.7)
            guard.terminate()
            assert guard.wait(10) == 7
        finally:
            guard.kill()
