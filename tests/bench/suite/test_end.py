"""What is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import psutil
import pytest

from tests.bench.suite.stage import Stage, run
from vllm_tetri import cli
from vllm_tetri.bench.suite.process import _end


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Stubborn:
    """A child that does not end until Ctrl-C was pressed three times."""

    pid = 1 << 30  # nobody's
    is_told = False

    def wait(self, timeout: float | None = None) -> int:
        if not self.is_told:
            raise KeyboardInterrupt  # the second
        os.kill(os.getpid(), signal.SIGINT)
        return 0

    def terminate(self) -> None:
        self.is_told = True


def test_a_third_interrupt_changes_nothing() -> None:
    child = Stubborn()
    before = signal.getsignal(signal.SIGINT)
    try:
        _end(cast("subprocess.Popen[bytes]", child))
    except KeyboardInterrupt:
        pytest.fail("it left the child to itself")
    assert child.is_told
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda each: each.name)
def test_nothing_outlives_the_suite(stage: Stage, number: signal.Signals) -> None:
    stage.behave(saturation="hang")
    program = (
        "import sys; from vllm_tetri import cli; "
        "from vllm_tetri.bench.suite import command as suite; "
        f"suite.PROGRAM = (sys.executable, {str(stage.program)!r}); "
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    words = ["bench", "suite", "a-model", "--quick", "--only", "e8,e10", "--output", "out"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        cwd=stage.folder,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)},
        start_new_session=True,
    )
    try:
        pid_file = stage.folder / "pid"
        until(lambda: pid_file.exists() and pid_file.read_text() != "")
        pid = int(pid_file.read_text())
        process.send_signal(number)
        shown, _ = process.communicate(timeout=60)
        until(lambda: not psutil.pid_exists(pid))
    finally:
        process.kill()
        process.wait()
    assert stage.record()["jobs"]["saturation"]["status"] == "interrupted"
    assert stage.names() == ["transfer", "saturation"]
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "goes on" in shown
        assert (stage.folder / "ended").read_text() == "in good order"
    stage.behave()
    assert run() == 0
    assert stage.names() == ["saturation", "handover"]
