"""Options of a soak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Refuses = Callable[[list[str], str], None]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--minutes", "0"], "--minutes 0"),
        (["--faults", "kill-cat"], "--faults kill-cat"),
        (["--rest-every", "0"], "--rest-every 0"),
        (["--prefill", "1"], "--prefill 1"),
        (["--routers", "1"], "--routers 1: kill-router needs another router"),
        (["--clients", "0"], "--clients 0"),
        (["--faults", "kill-predictor"], "give --predictor FOLDER"),
        (["--faults", "stop-predictor", "--predictor", "oracle"], "give --predictor FOLDER"),
        (["--faults", "kill-engine", "--prefill", "1", "--decode", "1"], "--decode 2"),
    ],
)
def test_wrong_options_are_refused_at_once(refuses: Refuses, words: list[str], option: str) -> None:
    refuses(["soak", "model", *words], option)


@pytest.mark.parametrize(
    "words",
    [
        ["--prefill", "1", "--faults", "kill-decode"],
        ["--routers", "1", "--faults", "kill-prefill"],
        ["--decode", "1", "--faults", "kill-engine"],
        ["--predictor", "artefact"],
    ],
)
def test_one_is_enough_where_none_is_hit(
    refuses: Refuses, tmp_path: Path, words: list[str]
) -> None:
    """Nothing but the folder is wrong, which is looked at last."""
    blocked = tmp_path / "file"
    blocked.touch()
    refuses(["soak", "model", *words, "--output", str(blocked / "x")], "--output")
