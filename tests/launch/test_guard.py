"""The guard between `up` and an instance, when everything was stopped for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_tetri.launch.guard import guarded

ROOT = Path(__file__).parents[2]
COMMAND = "echo begun; trap 'exit 7' TERM; while :; do sleep 0.05; done"


IGNORES = "trap '' TERM; trap 'exit 5' INT; echo begun; while :; do sleep 0.05; done"


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
