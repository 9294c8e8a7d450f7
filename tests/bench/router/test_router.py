"""What the router benchmark makes of its turns, and one small real run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_tetri import cli
from vllm_tetri.bench.router.report import (
    DIRECT,
    FLOOD,
    LOOPS,
    OURS,
    PACED,
    SPLIT,
    TIMED,
    WHOLE,
    added,
    draw,
    rates,
)

DIRECT_S = [0.001, 0.002, 0.003]


def point(kind: str, system: str, repeat: int = 0, **found: Any) -> dict[str, Any]:
    empty = {"first_s": [], "second_s": [], "events": 0, "reads": 0, "took_s": 1.0, "cpu_s": 0.0}
    turn = {"kind": kind, "shape": WHOLE, "system": system, "streams": 1, "repeat": repeat}
    return {**turn, **empty, **found}


def timed() -> list[dict[str, Any]]:
    """The router takes 0.5 ms more in one repeat and 0.7 ms in the other, whatever else does."""
    points = []
    for repeat, (base_s, more_s) in enumerate([(0.0, 0.0005), (0.01, 0.0007)]):
        direct_s = [each + base_s for each in DIRECT_S]
        through_s = [each + more_s for each in direct_s]
        points.append(point(TIMED, OURS, repeat, first_s=through_s, second_s=through_s))
        points.append(point(TIMED, DIRECT, repeat, first_s=direct_s, second_s=direct_s))
    return points


def content(*points: dict[str, Any]) -> dict[str, Any]:
    return {"conditions": {}, "points": list(points)}


def test_turns_of_the_same_repeat_are_compared() -> None:
    (row,) = added(content(*timed()))
    assert (row.system, row.token) == (OURS, "first")
    assert row.p50.mean == pytest.approx(0.6)
    assert row.p50.half == pytest.approx(12.706 * 0.1)  # of two differences, 0.2 apart
    assert row.p99.mean == pytest.approx(0.6)
    assert row.direct == pytest.approx(7.0)  # of medians of 2 and 12


def test_a_pair_has_a_second_token_of_its_own() -> None:
    points = [{**each, "shape": SPLIT} for each in timed()]
    assert [row.token for row in added(content(*points))] == ["first", "second"]


def test_events_are_counted_by_time_and_by_cpu_time() -> None:
    flows = [
        point(PACED, OURS, 0, events=1000, reads=1000, took_s=2.0, cpu_s=0.5),
        point(PACED, OURS, 1, events=1000, reads=500, took_s=2.0, cpu_s=0.5),
    ]
    (row,) = rates(content(*flows))
    assert row.per_s.mean == pytest.approx(500)
    assert row.per_cpu_s is not None
    assert row.per_cpu_s.mean == pytest.approx(2000)
    assert row.per_read == pytest.approx(2000 / 1500)


def test_nobody_asked_directly_has_a_router_that_computes() -> None:
    (row,) = rates(content(point(FLOOD, DIRECT, events=10, reads=10)))
    assert row.per_cpu_s is None


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    flow = point(PACED, OURS, events=10, reads=10, cpu_s=0.1)
    draw(content(*timed(), flow), tmp_path / "router.svg")
    assert "events per CPU second" in (tmp_path / "router.svg").read_text()


@pytest.mark.parametrize(
    "words", [["--streams", "0"], ["--requests", "1"], ["--prompt", "0"], ["--repeats", "0"]]
)
def test_a_wrong_number_is_refused(
    refuses: Callable[[list[str], str], None], words: list[str]
) -> None:
    refuses(["router", *words], words[0])


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    words = ["--streams", "1,4", "--requests", "3", "--repeats", "1", "--prompt", "20"]
    assert cli.main(["bench", "router", *words, "--output", str(tmp_path)]) == 0
    points = json.loads((tmp_path / "router.json").read_text())["points"]
    for each in points:
        if each["kind"] == TIMED:
            assert len(each["first_s"]) == len(each["second_s"]) == 3
            assert all(a <= b for a, b in zip(each["first_s"], each["second_s"], strict=True))
        else:
            assert each["events"] > 0
    kinds = {(each["kind"], each["shape"], each["system"]) for each in points}
    pairs = {(shape, system) for shape in (WHOLE, SPLIT) for system in (DIRECT, OURS)}
    assert kinds == {(kind, *pair) for kind in (TIMED, PACED, FLOOD, LOOPS) for pair in pairs} - {
        (LOOPS, SPLIT, DIRECT)
    }
    assert (tmp_path / "router.svg").stat().st_size
