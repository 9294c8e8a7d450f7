"""Results of `vllm-tetri bench modes` as values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.report.builders import cells
from vllm_tetri.bench.report.claims import claims
from vllm_tetri.bench.report.load import load
from vllm_tetri.bench.report.tables import perf_table
from vllm_tetri.bench.report.values import Source


def test_modes_are_values_of_several_experiments(tmp_path: Path) -> None:
    cells(tmp_path, cut='{"cell": ')
    found = load(tmp_path)
    assert found.problems == {}
    assert (tmp_path / "modes" / "cells.jsonl").read_text().endswith('{"cell": ')  # as it was
    get = found.values.get
    ttft = get("e1", Source.MEASURED, "lpld knee", "split", "ttft_mean_s")
    assert ttft is not None
    assert ttft.samples == {0: pytest.approx(0.2), 1: pytest.approx(0.2)}
    used = get("e1", Source.MEASURED, "lpld knee", "stock", "resource_s")
    assert used is not None
    assert used.found.mean == pytest.approx(0.5 * 2.0 * 2)
    # A larger rate was not asked, so nobody knows the largest.
    assert get("e11", Source.MEASURED, "lpld", "split", "sustained_per_s") is None
    table = perf_table(found.values, Source.MEASURED)
    assert table is not None
    assert [row[:2] for row in table.rows] == [["lpld knee", "split"]]


def test_times_of_those_who_were_not_refused_are_no_results(tmp_path: Path) -> None:
    cells(tmp_path, refused=("split", 1))
    values = load(tmp_path).values
    found = {each.metric: each for each in values.all if each.system == "split"}
    for metric in ("ttft_mean_s", "jct_p99_s", "itl_p99_s", "resource_s"):
        assert list(found[metric].samples) == [0]
    assert found["failed"].samples == {0: 0, 1: 1}
    assert found["goodput_strict"].samples == {0: 1.0, 1: 0.5}
    assert found["share_strict"].samples == {0: 1.0, 1: 0.5}


def test_claims_of_modes_say_what_they_are_of(tmp_path: Path) -> None:
    paces = {"stock": (0.1, 70_000), **dict.fromkeys(("stock-128", "stock-256"), (0.2, 10_000))}
    rates = {"light": 1.4, "knee": 2.8, "past": 4.4}
    cells(tmp_path, paces={**paces, "split": (0.2, 10_000)}, name="mixed", rates=rates)
    values = load(tmp_path).values
    (chunked,) = claims("e13", values)
    assert [each.ask.label.partition(",")[0] for each in chunked.ours] == [
        "split to stock-128", "split to stock-256",
    ]  # fmt: skip
    assert all("not a highest rate" in each.ask.label for each in chunked.ours)
    # Stock stalls at every rate: there is no ratio to what it sustains.
    assert [each.ours for each in claims("e11", values)] == [[]]
    best = values.get("e11", Source.MEASURED, "mixed", "stock-256", "sustained_per_s")
    assert best is not None
    assert best.found.mean == pytest.approx(4.4)

    calm = {**paces, "stock": (0.1, 10_000), "split": (0.2, 10_000)}
    cells(tmp_path, name="mixed", paces=calm, rates=rates)
    (capacity,) = claims("e11", load(tmp_path).values)
    assert [each.found.mean for each in capacity.ours] == [1.0, 1.0]
    cells(tmp_path, name="mixed", paces=calm)
    values = load(tmp_path).values
    assert [each.ours for each in claims("e11", values)] == [[]]  # of one rate of three
    (goodput,) = claims("e12", values)[0].ours
    assert "not a highest rate" in goodput.ask.label
