"""`vllm-tetri bench dispatch`: what it makes of a run, and one real run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from vllm_tetri import cli
from vllm_tetri.bench.dispatch import Share, run_of
from vllm_tetri.bench.dispatch_report import decode_s, draw, slowest, spread, token_excess
from vllm_tetri.bench.workload import Answered

ANSWERED = [
    Answered("decode-0", 300, first_s=0.5, done_s=4.5),
    Answered("decode-0", 128, first_s=0.75, done_s=1.5),
    Answered("decode-1", 129, first_s=1.0, done_s=2.0),
]
RUN = run_of(ANSWERED, ["decode-0", "decode-1", "decode-2"], scale=0.5, late_s=0.01, preemptions=3)


def test_each_instance_has_its_heavy_and_light_decodes() -> None:
    assert RUN.shares == [
        Share(heavy=1, light=1, tokens=428, done_s=8.0),
        Share(heavy=1, light=0, tokens=129, done_s=3.0),
        Share(heavy=0, light=0, tokens=0, done_s=0.0),
    ]


def test_decoding_lasts_from_the_first_first_token_to_the_last_last_one() -> None:
    assert RUN.decode_s == pytest.approx(8.0)
    assert RUN.late_s == pytest.approx(0.02)


def test_the_slowest_instance_is_the_one_that_was_done_last() -> None:
    run = asdict(RUN)
    assert slowest(run)["tokens"] == 428
    assert decode_s(run) == pytest.approx(8.0)
    assert spread(run, "light") == pytest.approx(0.4714, abs=1e-4)
    assert token_excess(run) == pytest.approx(428 / (557 / 3) - 1)


def test_the_picture_is_drawn_and_says_how_time_was_made(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    policies = {"power-of-two": [asdict(RUN)] * 2, "random": [asdict(RUN)] * 2}
    results = {"instances": {"2": policies, "4": policies}, "conditions": {"requests": 1}}
    draw(results, tmp_path / "dispatch.svg")
    assert "keep the pace" in (tmp_path / "dispatch.svg").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["--requests", "1"],
        ["--instances", "2,0"],
        ["--prefill", "0"],
        ["--repeats", "0"],
        ["--policies", "best"],
        ["--scale", "0"],
    ],
)
def test_wrong_values_are_refused_before_an_instance_starts(
    words: list[str], refuses: Callable[[list[str], str], None]
) -> None:
    refuses(["dispatch", "model", *words], words[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_run(tiny_llama: Path, tmp_path: Path) -> None:
    words = ["--requests", "6", "--repeats", "1", "--instances", "2", "--prefill", "1"]
    words += ["--policies", "power-of-two,random", "--scale", "0.2", "--output", str(tmp_path)]
    assert cli.main(["bench", "dispatch", str(tiny_llama), *words]) == 0
    found = json.loads((tmp_path / "dispatch.json").read_text())
    for runs in found["instances"]["2"].values():
        assert sum(share["heavy"] + share["light"] for share in runs[0]["shares"]) == 12
    assert (tmp_path / "dispatch.svg").stat().st_size
