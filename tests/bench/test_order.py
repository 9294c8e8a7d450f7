"""`vllm-tetri bench order`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from vllm_tetri import cli
from vllm_tetri.bench.order import poisson, turn_of
from vllm_tetri.bench.order_report import against, over_repeats


def step(tokens: int, unfinished_tokens: int) -> dict[str, float]:
    return {"tokens": tokens, "unfinished_tokens": unfinished_tokens, "took_s": 0.1}


def test_waiting_is_ttft_without_the_steps_that_computed_it() -> None:
    turn = turn_of(
        {
            "ttft_s": [0.5, 1.0],
            "computing_s": [0.5, 0.25],
            "total_s": 1.0,
            "budget_tokens": 64,
            "steps": [],
        }
    )
    assert turn.waiting_s == [0.0, 0.75]


def test_only_steps_with_enough_to_do_count_as_not_full() -> None:
    answer: dict[str, Any] = {"ttft_s": [], "computing_s": [], "total_s": 1, "budget_tokens": 64}
    steps = [step(64, 200), step(60, 136), step(64, 76), step(12, 12)]
    assert turn_of({**answer, "steps": steps}).full_part == pytest.approx(2 / 3)
    assert turn_of({**answer, "steps": steps}).steps == 4
    assert turn_of({**answer, "steps": [step(12, 12)]}).full_part is None


def test_systems_are_compared_repeat_by_repeat() -> None:
    fcfs = [{"ttft_s": [1.0, 3.0]}, {"ttft_s": [10.0, 30.0]}]
    sjf = [{"ttft_s": [0.5, 1.5]}, {"ttft_s": [5.0, 15.0]}]
    change = against(sjf, fcfs, "ttft_s", None)
    assert change.mean == pytest.approx(-0.5)
    assert change.half == pytest.approx(0.0)
    assert over_repeats(fcfs, "ttft_s", 1.0).mean == pytest.approx(16.5)


def test_arrivals_come_in_order_at_the_rate() -> None:
    times = poisson(4000, 10.0, Random(0))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400, rel=0.1)


@pytest.mark.parametrize(
    "words",
    [
        ["--requests", "1"],
        ["--repeats", "0"],
        ["--batches", "16,0"],
        ["--chunk", "-1"],
        ["--scale", "0"],
        ["--rate", "0"],
        ["--parts", "queue,all"],
        ["--lengths", "nowhere.csv"],
    ],
)
def test_wrong_values_are_refused_before_an_engine_starts(
    words: list[str], refuses: Callable[[list[str], str], None]
) -> None:
    refuses(["order", *words], words[0])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_small_run_measures_every_part(tmp_path: Path) -> None:
    words = ["--requests", "12", "--repeats", "1", "--batches", "4", "--scale", "0.2"]
    assert cli.main(["bench", "order", "--output", str(tmp_path), *words]) == 0

    found = json.loads((tmp_path / "order.json").read_text())
    queue = found["queue"]["systems"]
    assert {"fcfs", "sjf 4", "ljf 4", "srtf 4"} < set(queue)
    assert all(len(turns[0]["ttft_s"]) == 12 for turns in queue.values())
    assert all(turns[0]["full_part"] in (1.0, None) for turns in queue.values())
    assert queue["sjf 4"][0]["full_part"] == 1.0
    assert "sjf 4 padded" in found["arrivals"]["systems"]
    assert all(steps["schedule_s"] for steps in found["overhead"].values())
    assert (tmp_path / "order.svg").stat().st_size > 1000
