"""A running `up` with fake children, and ways to look at it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.eventually import eventually

FAKE_UP = Path(__file__).with_name("fake_up.py")
DEADLINE_S = 30.0


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until the condition holds; its value."""
    return eventually(condition, DEADLINE_S, what)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class FakeUp:
    """One `up` process; `folder` is also where the fake children leave notes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ready_file = folder / "ready.json"
        self.process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(FAKE_UP), "some/model", "--port=0"]
        command += [f"--ready-file={self.ready_file}", *arguments]
        environment = {"FAKE_DIR": str(self.folder), "TETRI_CACHE": str(self.folder / "cache")}
        self.process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return self.process

    def ready(self, *arguments: str) -> dict[str, Any]:
        """Start unless it runs; the content of the ready file."""
        process = self.process or self.start(*arguments)

        def look() -> Any:
            if process.poll() is not None:
                pytest.fail(f"up ended early:\n{process.communicate()[0]}")
            return self.ready_file.exists()

        until(look, "up is ready")
        content = json.loads(self.ready_file.read_text())
        assert isinstance(content, dict)
        return content

    def starts(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self) -> list[int]:
        """Every process that was ever started below `up`."""
        starts = [self.starts(path.stem) for path in self.folder.glob("*.starts")]
        below = [int(path.read_text()) for path in self.folder.glob("*.below")]
        return [start["pid"] for each in starts for start in each] + below

    def nothing_left(self) -> None:
        pids = self.pids()
        assert pids
        until(lambda: not any(map(is_alive, pids)), "every process is gone")

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Status and output, after a signal if one is given."""
        assert self.process is not None
        if number is not None:
            self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, output

    def interrupt(self) -> str:
        """End it with Ctrl-C, which leaves nothing; the output."""
        status, output = self.end(signal.SIGINT)
        assert status == 0, output
        self.nothing_left()
        return output
