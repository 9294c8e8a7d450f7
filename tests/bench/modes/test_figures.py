"""What is made of cells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.modes.builders import BY_KEY, HEAD, LOAD, SLO, cell, request, results
from vllm_tetri.bench.arrivals import Slo
from vllm_tetri.bench.modes.cells import Raw
from vllm_tetri.bench.modes.figures import COMPARED, METRICS, Slos, best_other, figures, ratio, slos
from vllm_tetri.bench.modes.load import KNEE
from vllm_tetri.bench.modes.report import cells, markdown, ratios, sustained, verdicts


def test_figures_of_a_cell() -> None:
    mixed = replace(
        cell(), requests=[request(0.4, (0.04, 0.04)), request(1.0, (0.02, 0.1), at_s=1.0)]
    )
    found = figures(mixed, SLO)
    assert {metric.key for metric in METRICS} < set(found)
    assert found["ttft_mean_s"] == pytest.approx(0.7)
    assert found["jct_mean_s"] == pytest.approx((0.48 + 1.12) / 2)
    assert found["itl_p99_s"] == pytest.approx(0.0982)  # between 0.04 and 0.1
    assert found["goodput_loose"] == pytest.approx(2 / 4)
    assert found["goodput_strict"] == pytest.approx(1 / 4)
    assert (found["share_strict"], found["failed"]) == (0.5, 0)


def test_a_failed_request_is_in_time_for_nothing_and_has_no_times() -> None:
    found = figures(cell(failed=2), SLO)
    assert found["failed"] == 2
    assert found["share_loose"] == 0.5
    assert found["ttft_mean_s"] == pytest.approx(0.4)


def test_slos_are_multiples_of_a_lone_request_or_what_is_given() -> None:
    lone = {"ttft_s": 0.1, "tpot_s": 0.01}
    assert slos(lone, None, None) == Slos(Slo(1.0, 6 * 0.01), Slo(0.4, 0.025))
    assert slos(lone, [3.0, 0.2], None).loose == Slo(3.0, 0.2)


def test_the_largest_rate_that_holds_is_sustained() -> None:
    light, knee = cell(rate="light"), cell(gap_s=0.09)
    assert results(light, knee, cell(rate="past", gap_s=0.2)).sustained("lpld", "stock") == KNEE
    assert results(light, cell(ttft_s=2.1)).sustained("lpld", "stock") == "light"
    assert results(light, cell(failed=1)).sustained("lpld", "stock") == "light"
    assert results(cell(gap_s=0.2)).sustained("lpld", "stock") is None


def test_ratios_are_taken_repeat_by_repeat_and_against_the_best_of_the_others() -> None:
    found = results(
        *(cell("stock", 0.4, 0.04, repeat=each) for each in range(2)),
        *(cell("stock-128", 0.2, 0.08, repeat=each) for each in range(2)),
        cell("adaptive", 0.1, 0.04),
        cell("adaptive", 0.1, 0.02, repeat=1),
        *(cell("split", 0.01, 0.01, repeat=each) for each in range(2)),
    )
    ttft, itl = BY_KEY["ttft_mean_s"], BY_KEY["itl_p99_s"]
    assert best_other(found, LOAD, ttft) == "stock-128"  # split is ours
    assert best_other(found, LOAD, itl) == "stock"
    first = ratio(found, LOAD, "adaptive", "stock-128", ttft)
    assert first is not None
    assert first.value is not None
    assert (first.value.mean, first.value.half, first.won) == (0.5, 0.0, True)
    second = ratio(found, LOAD, "adaptive", "stock", itl)
    assert second is not None
    assert second.value is not None
    assert second.value.mean == pytest.approx(0.75)
    assert second.won is None  # 1.0 and 0.5


def test_more_goodput_is_better_and_more_time_is_worse() -> None:
    strong = [cell("stock", 0.4, 0.04, repeat=each) for each in range(2)]
    weak = [cell("adaptive", 0.6, 0.04, repeat=each) for each in range(2)]
    found = results(*strong, *weak)
    for key in ("ttft_mean_s", "goodput_strict"):
        lost = ratio(found, LOAD, "adaptive", "stock", BY_KEY[key])
        assert lost is not None
        assert lost.won is False
    none = ratio(found, LOAD, "stock", "adaptive", BY_KEY["goodput_strict"])
    assert none is not None
    assert none.value is None  # nothing to divide by


def test_one_repeat_proves_nothing() -> None:
    found = results(cell("stock"), cell("adaptive", 0.01))
    single = ratio(found, LOAD, "adaptive", "stock", BY_KEY["ttft_mean_s"])
    assert single is not None
    assert single.won is None
    assert "0 better, 0 worse, 1 open" in verdicts(found, "adaptive")


def test_the_report_shows_gains_and_losses() -> None:
    made = [
        each
        for repeat in range(2)
        for each in (
            cell("stock", 0.4, 0.04, repeat=repeat),
            cell("adaptive", 0.2, 0.08, repeat=repeat, failed=repeat),
        )
    ]
    found = results(*made)
    grid = ratios(found, "adaptive")
    (row,) = grid.rows
    assert len(row) == len(grid.heads) == 1 + 2 * len(COMPARED)
    assert row[:2] == ["lpld knee", "0.50 ±0.00 ✓"]
    assert row[2] == "0.50 ±0.00 ✓ (stock)"
    assert "2.00 ±0.00 ✗" in row
    (table,) = cells(found)
    assert [each[0] for each in table.rows] == ["stock", "adaptive"]
    assert table.title == "lpld knee, 2.80 requests/s"
    assert sustained(found).rows == [["lpld", "knee (2.80/s)", "none"]]  # one request failed

    raw = Raw(HEAD, {each.key: each for each in made})
    text = markdown(raw, found)
    assert "Not measured: stock-128, stock-256, replicas, nixl, split, adaptive-slo." in text
    assert "1 of 9 requests failed." in text
    assert "Not complete" not in text
    assert "More than 10 %" not in text

    busy = replace(made[0], foreign=0.4)
    text = markdown(Raw(HEAD, {**raw.cells, busy.key: busy}), found)
    assert "More than 10 % in: stock lpld knee 1." in text
