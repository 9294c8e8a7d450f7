"""Runs side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from tests.bench.flip.builders import results
from vllm_tetri.bench.flip import report as flip_report


def test_systems_are_compared_with_the_best_split_repeat_by_repeat() -> None:
    swing = results()["loads"]["swing"]
    assert flip_report.best_fixed(swing) == "2P1D"
    assert flip_report.best_fixed({"idle": swing["idle"]}) is None
    ratio = flip_report.paired(
        swing["balance"],
        swing["2P1D"],
        lambda run, other: flip_report.jct_s(run) / flip_report.jct_s(other),
    )
    assert ratio.mean == pytest.approx(1.5)
    assert flip_report.of_kind(swing["2P1D"][0], "conversation", "jct_s") == pytest.approx(4.0)
    assert flip_report.of_kind(swing["2P1D"][0], "neither", "jct_s") is None


def test_tables_show_every_system_and_its_flips() -> None:
    console = Console(width=150)
    with console.capture() as shown:
        flip_report.show(console, results())
    text = shown.get()
    assert "to 2P1D" in text
    assert "50 ±635 %" in text
    assert "balance, swing" in text


@pytest.mark.parametrize("loads", [["swing", "code"], ["code"]])
def test_the_picture_shows_loads_and_one_swing(loads: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = results()
    found["loads"] = {load: found["loads"][load] for load in loads}
    flip_report.draw(found, tmp_path / "flip.svg")
    text = (tmp_path / "flip.svg").read_text()
    assert "keep the pace" in text
    assert "2P1D, fixed" in text
    assert ("balance: instances by role" in text) == ("swing" in loads)
