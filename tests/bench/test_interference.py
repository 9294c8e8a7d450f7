"""`vllm-tetri bench interference`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from vllm_tetri import cli
from vllm_tetri.bench.interference import Case, cases, latency_s, place_of


def test_every_kind_meets_every_kind_and_nobody() -> None:
    found = cases([1, 3])
    assert found[:2] == [Case("light", "nobody", 0), Case("heavy", "nobody", 0)]
    assert len(found) == len(set(found)) == 2 + 2 * 2 * 2
    assert Case("light", "heavy", 3) in found


def test_latencies_of_one_case_only() -> None:
    case = {"system": "a", "watched": "light", "others": "heavy", "count": 3}
    points = [
        {**case, "ttft_s": 1.0},
        {**case, "ttft_s": 2.0, "system": "b"},
        {**case, "ttft_s": 3.0, "count": 1},
        {**case, "ttft_s": 4.0},
    ]
    assert latency_s({"points": points}, "a", Case("light", "heavy", 3)) == [1.0, 4.0]


def test_places_are_spread_over_the_repeats() -> None:
    rng = Random(0)
    for _ in range(50):
        places = [place_of(repeat, 3, 8, rng) for repeat in range(3)]
        assert [place // 3 for place in places] == [0, 1, 2]


@pytest.mark.parametrize("words", [["--counts", "0"], ["--light", "0"], ["--batches", "-1"]])
def test_wrong_values_are_refused_before_an_engine_starts(
    words: list[str], refuses: Callable[[list[str], str], None]
) -> None:
    refuses(["interference", *words], words[0])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_run(tmp_path: Path) -> None:
    words = ["--counts", "2", "--batches", "4", "--repeats", "1", "--output", str(tmp_path)]
    assert cli.main(["bench", "interference", *words]) == 0

    found = json.loads((tmp_path / "interference.json").read_text())
    assert len(found["points"]) == len(cases([2])) * len(found["systems"])
    assert all(point["ttft_s"] > 0 for point in found["points"])
    assert (tmp_path / "interference.svg").stat().st_size > 1000
