"""Rows, table and picture of `bench predictor` from made-up runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vllm_tetri.bench import predictor_report as report
from vllm_tetri.bench.predictor_report import AGAIN, ALONE, PARALLEL, QUEUE, SEQUENTIAL, SPREAD


def run(*ttft_s: float, total_s: float = 1.0, missed: int = 0) -> dict[str, Any]:
    return {"ttft_s": list(ttft_s), "total_s": total_s, "missed": missed, "tokens": 100}


RUNS = {
    ALONE: [run(0.1, 0.2), run(0.1, 0.2)],
    AGAIN: [run(0.1, 0.2), run(0.1, 0.2)],
    PARALLEL: [run(0.11, 0.2, total_s=1.25, missed=1), run(0.11, 0.2, total_s=1.25, missed=0)],
    SEQUENTIAL: [run(0.2, 0.4), run(0.2, 0.4)],
}
ANSWERED = [{"took_s": [0.01, 0.03], "total_s": 0.1}]
RESULTS = {
    "conditions": {
        "model": "m", "device": "cpu", "engine_cores": [1], "chunk": 256, "requests": 2,
        "repeats": 2, "load": 0.5, "lengths": "some", "seed": 0,
        "engine": {"vllm": "0", "dtype": "float32"},
        "predictor": {"base": "b", "window": 512, "buckets": 4},
    },
    "places": {
        "own": {
            "runs": {QUEUE: RUNS, SPREAD: RUNS},
            "predictor_alone": {QUEUE: ANSWERED, SPREAD: ANSWERED},
        },
    },
}  # fmt: skip


def row(name: str) -> report.Row:
    (found,) = [each for each in report.rows(RESULTS) if (each.name, each.kind) == (name, QUEUE)]
    return found


def test_rows_compare_the_same_prompts() -> None:
    parallel = row(PARALLEL)
    assert parallel.ttft.mean == pytest.approx(155)
    assert parallel.more_ttft.mean == pytest.approx(100 / 30)
    assert parallel.more_throughput.mean == pytest.approx(-20)
    assert parallel.unaffected.mean == pytest.approx(50)
    assert parallel.missed == pytest.approx(25)


def test_equal_runs_show_no_difference() -> None:
    again = row(AGAIN)
    assert again.more_ttft.mean == again.more_throughput.mean == 0
    assert again.unaffected.mean == 100
    assert again.missed is None


def test_table_and_picture(tmp_path: Path) -> None:
    console = Console(width=200, record=True)
    report.show(console, RESULTS)
    text = console.export_text()
    assert SEQUENTIAL in text
    assert "predictor alone, own core" in text
    report.draw(RESULTS, tmp_path / "predictor.svg")
    assert (tmp_path / "predictor.svg").stat().st_size > 1000
