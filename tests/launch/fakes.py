"""A running `up` with fake children, and ways to look at it."""

from __future__ import annotations

import json
import os
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
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(FAKE_UP),
                "some/model",
                "--port=0",
                f"--ready-file={self.ready_file}",
                *arguments,
            ],
            env={
                **os.environ,
                "FAKE_DIR": str(self.folder),
                "TETRI_CACHE": str(self.folder / "cache"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self.process

    def ready(self) -> dict[str, Any]:
        process = self.process
        assert process is not None

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
        found = [
            start["pid"]
            for path in self.folder.glob("*.starts")
            for start in self.starts(path.stem)
        ]
        found += [int(path.read_text()) for path in self.folder.glob("*.below")]
        return found

    def nothing_left(self) -> None:
        pids = self.pids()
        assert pids
        until(lambda: not any(map(is_alive, pids)), "every process is gone")

    def end(self) -> tuple[int, str]:
        assert self.process is not None
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, output
