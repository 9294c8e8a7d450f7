"""What the hand-over benchmark makes of its times, and one small real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_tetri import cli
from vllm_tetri.bench.handover_report import CHUNKED, OURS, STOCK, Stream, draw, rows

# First token, second token, then one every 10 ms.
LATE = [0.100, 0.125, 0.135, 0.145, 0.155]
STEADY = [0.090, 0.100, 0.110, 0.120, 0.130]


def content() -> dict[str, Any]:
    systems = {STOCK: [STEADY, STEADY], CHUNKED: [STEADY, STEADY], OURS: [LATE, LATE]}
    return {"lengths": {"500": systems}, "full": {"idle": [0.1], "full": [0.1]}}


def test_a_late_second_token_is_the_cost_of_the_handover() -> None:
    (row,) = rows(content())
    assert row.handover.mean == pytest.approx(15.0)  # 25 ms where a step takes 10
    assert row.stock_second.mean == pytest.approx(0.0, abs=1e-9)
    assert row.over_stock.mean == pytest.approx(10.0)
    assert row.itl == pytest.approx(10.0)


def test_the_step_is_the_median_of_later_ones() -> None:
    assert Stream((0.0, 1.0, 1.1, 1.2, 9.0)).itl_s == pytest.approx(0.1)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(content(), tmp_path / "handover.svg")
    assert "second token" in (tmp_path / "handover.svg").read_text()


@pytest.mark.slow
def test_a_small_run(tiny_llama: Path, tmp_path: Path) -> None:
    options = ["--prompts", "40", "--requests", "2", "--chunk", "64", "--output", str(tmp_path)]
    engine = ["--", "--max-model-len", "2048", "--dtype", "float32"]
    assert cli.main(["bench", "handover", str(tiny_llama), *options, *engine]) == 0
    found = json.loads((tmp_path / "handover.json").read_text())
    assert all(len(streams) == 2 for streams in found["lengths"]["40"].values())
    assert (tmp_path / "handover.svg").stat().st_size
