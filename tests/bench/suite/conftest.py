"""What tests of a suite share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench.suite.stage import Stage
from vllm_tetri.bench.suite import command as suite


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite, "PROGRAM", (sys.executable, str(made.program)))
    return made
