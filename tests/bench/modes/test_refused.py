"""Cells in which every request was refused: they have no times."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench.modes.builders import BY_KEY, HEAD, LOAD, SLO, cell, refused, results
from vllm_tetri.bench.modes.cells import Raw, Request
from vllm_tetri.bench.modes.client import Reply
from vllm_tetri.bench.modes.figures import best_other, figures, ratio
from vllm_tetri.bench.modes.picture import draw
from vllm_tetri.bench.modes.report import cells, markdown, ratios, show, sustained, verdicts
from vllm_tetri.bench.modes.run import _require_any, _took_s
from vllm_tetri.bench.modes.systems import SYSTEMS
from vllm_tetri.bench.report.load import load
from vllm_tetri.errors import UnsupportedError

TIMES = ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "itl_p99_s", "jct_mean_s", "jct_p99_s")
SHUT = "adaptive-slo"


def test_it_has_no_times_and_nothing_in_time() -> None:
    found = figures(cell(answered=0, failed=3), SLO)
    assert not set(TIMES) & set(found)
    assert (found["failed"], found["goodput_loose"], found["share_strict"]) == (3, 0.0, 0.0)


def test_answers_of_a_single_event_have_no_gaps() -> None:
    at_once = replace(cell(), requests=[Request(0.0, 10, 5, Reply(0.4, 0.4, []))])
    assert set(figures(cell(), SLO)) - set(figures(at_once, SLO)) == {"itl_p99_s"}


def test_means_and_ratios_are_of_the_repeats_that_have_times() -> None:
    found = results(
        *(cell("stock", repeat=each) for each in range(2)),
        cell(SHUT, ttft_s=0.2),
        cell(SHUT, repeat=1, answered=0, failed=2),
    )
    ttft, goodput = BY_KEY["ttft_mean_s"], BY_KEY["goodput_strict"]
    mean = found.mean(LOAD, SHUT, ttft.key)
    assert mean is not None
    assert mean.mean == pytest.approx(0.2)
    of_time = ratio(found, LOAD, SHUT, "stock", ttft)
    assert of_time is not None
    assert of_time.value is not None
    assert of_time.value.mean == pytest.approx(0.5)
    of_goodput = ratio(found, LOAD, SHUT, "stock", goodput)
    assert of_goodput is not None
    assert of_goodput.value is not None
    assert of_goodput.value.mean == pytest.approx(0.5)  # all and nothing in turn


def test_who_answered_nothing_is_the_best_in_no_time() -> None:
    found = results(cell("stock"), cell("replicas", answered=0, failed=2))
    assert best_other(found, LOAD, BY_KEY["ttft_mean_s"]) == "stock"
    none = results(cell("stock", answered=0, failed=2), cell("adaptive"))
    assert best_other(none, LOAD, BY_KEY["ttft_mean_s"]) is None
    assert ratio(none, LOAD, "adaptive", "stock", BY_KEY["ttft_mean_s"]) is None


@pytest.mark.parametrize("others", [True, False], ids=["beside others", "alone"])
def test_reports_and_pictures_show_it(others: bool, tmp_path: Path) -> None:
    made = [cell(SHUT, answered=0, failed=2, repeat=each) for each in range(2)]
    if others:
        made += [cell(name, repeat=each) for name in ("stock", "adaptive") for each in range(2)]
    found = results(*made)
    raw = Raw(HEAD, {each.key: each for each in made})

    assert "4 of" in markdown(raw, found)
    (table,) = cells(found)
    (row,) = (each for each in table.rows if each[0] == SHUT)
    assert row[1:6] == ["–"] * 5
    assert row[table.heads.index("failed")] == "2.0 ±0.0"
    assert ratios(found, SHUT).rows[0][1] == "–"
    assert "TTFT mean: 0 better, 0 worse, 0 open" in verdicts(found, SHUT)
    assert sustained(found).rows[0][-1] == "none"
    show(Console(file=io.StringIO()), raw, found)
    for name in draw(found, tmp_path):
        assert (tmp_path / name).stat().st_size > 1000


def test_the_report_of_a_suite_takes_it(tmp_path: Path) -> None:
    folder = tmp_path / "modes"
    folder.mkdir()
    (folder / "modes.json").write_text(json.dumps(HEAD))
    lines = [
        json.dumps({"cell": asdict(each)})
        for each in (cell("stock"), cell(SHUT, answered=0, failed=2))
    ]
    (folder / "cells.jsonl").write_text("\n".join(lines) + "\n")
    loaded = load(tmp_path)
    assert loaded.problems == {}
    found = {each.metric: each for each in loaded.values.all if each.system == SHUT}
    assert not set(TIMES) & set(found)
    assert found["failed"].samples == {0: 2}
    assert found["goodput_strict"].samples == {0: 0.0}


def test_only_a_system_that_is_told_to_may_refuse_everything() -> None:
    everything = [refused(429), refused()]
    _require_any(everything, SYSTEMS[SHUT], "all")
    with pytest.raises(UnsupportedError, match="every request failed"):
        _require_any(everything, SYSTEMS["adaptive"], "all")
    broken = [*everything, Request(0.0, 10, 5, Reply(error="nothing came for 180 s"))]
    with pytest.raises(UnsupportedError, match="every request failed"):
        _require_any(broken, SYSTEMS[SHUT], "all")
    _require_any([*broken, *cell().requests], SYSTEMS["adaptive"], "one is fine")


def test_it_lasted_until_the_last_request_was_due() -> None:
    last = Request(7.0, 10, 5, Reply(error="HTTP/1.1 429"))
    assert _took_s([refused(), last]) == 7.0
    assert _took_s([*cell().requests, last]) == pytest.approx(0.56)
