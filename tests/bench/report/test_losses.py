"""Where disaggregation loses."""

from __future__ import annotations

import pytest

from tests.bench.report.builders import measured, simulated
from vllm_tetri.bench.report.losses import beside, losses
from vllm_tetri.bench.report.tables import chunked_table, tally
from vllm_tetri.bench.report.values import Source, Values


def test_what_is_worse_than_the_best_other_is_listed() -> None:
    found = [
        measured("split", "ttft_mean_s", 2.0, 2.1), measured("stock", "ttft_mean_s", 1.0, 1.05),
        measured("replicas", "ttft_mean_s", 1.9, 1.9),
        measured("split", "jct_mean_s", 1.0, 1.0), measured("stock", "jct_mean_s", 2.0, 2.0),
        measured("adaptive", "goodput_strict", 1.0, 2.0),
        measured("stock", "goodput_strict", 1.9, 2.0),
        measured("split", "goodput_strict", 3.0), measured("adaptive", "flips", 5.0),
        measured("stock", "flips", 1.0), measured("split", "total_s", 5.0),
    ]  # fmt: skip
    lost = losses(found)
    assert [(e.mine.system, e.mine.metric, e.best.system) for e in lost] == [
        ("split", "ttft_mean_s", "stock"),
        ("adaptive", "goodput_strict", "stock"),
    ]
    assert [each.is_certain for each in lost] == [True, False]
    assert lost[0].times is not None
    assert lost[0].times.mean == pytest.approx(2.0)
    # Four comparisons: nothing else measured what split's total is, and flips are no merit.
    assert len(beside(found)) == 4
    assert tally(beside(found))[0] == (
        "split, measured: worse than the best of the others in 1 of 3 comparisons, 1 of them "
        "with 95 % certainty"
    )


def test_what_was_asked_otherwise_is_not_compared() -> None:
    found = [
        measured("split", "ttft_mean_s", 2.0),
        measured("stock", "ttft_mean_s", 1.0, group="lpld light"),
        *simulated(
            {"experiment": "e1", "group": "lpld knee", "system": "vllm-2023",
             "metric": "ttft_mean_s", "values": [1.0]}
        ),
    ]  # fmt: skip
    assert beside(found) == []


def test_equal_systems_lose_nothing_and_one_run_is_not_certain() -> None:
    equal = [measured("split", "jct_mean_s", 1.0), measured("stock", "jct_mean_s", 1.0)]
    assert losses(equal) == []
    once = [measured("split", "jct_mean_s", 1.1), measured("stock", "jct_mean_s", 1.0)]
    assert [each.is_certain for each in losses(once)] == [None]


def test_nothing_in_time_at_all_is_a_loss() -> None:
    none = [measured("split", "goodput_strict", 0.0), measured("stock", "goodput_strict", 1.0)]
    assert [each.mine.system for each in losses(none)] == ["split"]
    both = [measured("split", "goodput_strict", 0.0), measured("stock", "goodput_strict", 0.0)]
    assert losses(both) == []


def test_chunked_rivals_are_judged_alone() -> None:
    values = Values([
        measured("split", "ttft_mean_s", 2.0, 2.0), measured("stock", "ttft_mean_s", 0.5, 0.5),
        measured("stock-256", "ttft_mean_s", 1.0, 1.0),
    ])  # fmt: skip
    table = chunked_table(values, Source.MEASURED)
    assert table is not None
    assert table.rows == [["lpld knee", "split", "2.00 ±0.00 (stock-256) ✗"]]
    assert chunked_table(values, Source.SIMULATED) is None
