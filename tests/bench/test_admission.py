"""`vllm-tetri bench admission`: its systems, what it makes of their runs, one real run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_tetri import cli
from vllm_tetri.bench.admission import System
from vllm_tetri.bench.admission_report import against, draw, mean_jct_s, preemptions
from vllm_tetri.policy.admission import DecodePolicy


def one(jct_s: list[float], count: int) -> dict[str, Any]:
    return {
        "jct_s": jct_s,
        "total_s": max(jct_s),
        "batch": 2.0,
        "late_s": 0.0,
        "counters": {"preemptions": count},
    }


def test_a_system_is_a_policy_and_a_source_of_predictions() -> None:
    system = System(DecodePolicy.RESERVE_DYNAMIC, "oracle", 0.749)
    prefill, decode = system.members(4096)
    assert system.name == "reserve-dynamic, oracle 74.9%"
    assert prefill.options == ("--tetri-predictor", "oracle", "--tetri-predictor-accuracy", "0.749")
    assert decode.options[:2] == ("--tetri-decode-policy", "reserve-dynamic")
    assert decode.options[2:] == ("--num-gpu-blocks-override", "129")


def test_systems_are_compared_repeat_by_repeat() -> None:
    greedy = [one([1.0, 3.0], 10), one([10.0, 30.0], 20)]
    ours = [one([0.5, 1.5], 1), one([5.0, 15.0], 2)]
    assert against(ours, greedy, mean_jct_s).mean == pytest.approx(-0.5)
    assert against(ours, greedy, preemptions).mean == pytest.approx(-0.9)
    assert against(ours, greedy, preemptions).half == pytest.approx(0.0)


def test_the_picture_is_drawn_and_says_how_time_was_made(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    systems = {"greedy": [one([1.0], 0)], "reserve-dynamic, oracle 100.0%": [one([0.9], 0)]}
    conditions = {"requests": 1, "kv_tokens": 4096}
    draw({"systems": systems, "conditions": conditions}, tmp_path / "admission.svg")
    assert "keep the pace" in (tmp_path / "admission.svg").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["--requests", "1"],
        ["--kv-tokens", "100"],
        ["--scale", "0"],
        ["--repeats", "0"],
        ["--prompts", "nowhere.jsonl"],
    ],
)
def test_wrong_values_are_refused_before_an_instance_starts(
    words: list[str], refuses: Callable[[list[str], str], None]
) -> None:
    refuses(["admission", "model", *words], words[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_run(tiny_llama: Path, tmp_path: Path) -> None:
    words = ["--requests", "24", "--repeats", "1", "--accuracies", "1", "--scale", "0.1"]
    words += ["--kv-tokens", "4096", "--output", str(tmp_path)]
    assert cli.main(["bench", "admission", str(tiny_llama), *words]) == 0
    found = json.loads((tmp_path / "admission.json").read_text())
    assert len(found["systems"]) == len(DecodePolicy)
    assert all(len(runs[0]["jct_s"]) == 24 for runs in found["systems"].values())
    assert (tmp_path / "admission.svg").stat().st_size
