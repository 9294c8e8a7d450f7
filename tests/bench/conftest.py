"""What tests of several benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_tetri import cli


@pytest.fixture
def refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str], str], None]:
    """Whether a benchmark ends with one line that names an option."""

    def check(words: list[str], option: str) -> None:
        monkeypatch.chdir(tmp_path)
        assert cli.main(["bench", *words]) == 2
        error = capsys.readouterr().err
        assert option in error
        assert error.count("\n") == 1

    return check
