"""`vllm-tetri bench budget`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.tiny_model import tiny_model
from vllm_tetri import cli
from vllm_tetri.bench import budget
from vllm_tetri.bench.serving import Answered, write_prompts


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    budget.add_arguments(parser)
    return parser.parse_args(["model", *words])


def test_figures_count_every_gap_between_tokens() -> None:
    answered = Answered(
        ttft_s=[0.5, 1.5],
        itl_s=[[0.1, 0.3], [0.1, 0.1]],
        prompt_tokens=[5, 5],
        output_tokens=[3, 3],
        took_s=2.0,
    )
    found = budget.figures(answered, 0.15)
    assert set(found) == set(budget.FIGURES)
    assert found["ttft_mean_s"] == pytest.approx(1.0)
    assert found["over_slo"] == pytest.approx(0.25)
    assert found["jct_mean_s"] == pytest.approx((0.9 + 1.7) / 2)
    assert found["output_tokens_per_s"] == pytest.approx(3.0)


def test_systems_differ_in_nothing_but_the_budget() -> None:
    found = budget.systems_of(parsed(["--budgets", "256,128", "--policies", "fcfs,sjf"]))
    assert list(found) == ["stock default", "stock 256", "stock 128", "ours fcfs", "ours sjf"]
    assert found["stock default"] == []
    assert found["stock 128"] == ["--max-num-batched-tokens", "128"]
    assert found["ours sjf"][:4] == ["--role", "both", "--tetri-tbt-slo", "0.15"]


def test_prompts_have_the_lengths_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, 200, (8, 64), (2, 5), Random(0))
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    words = [len(entry["prompt"].split()) for entry in entries]
    assert len(entries) == 200
    assert (min(words) >= 8, max(words) <= 64) == (True, True)
    assert {entry["output_tokens"] for entry in entries} == {2, 3, 4, 5}


@pytest.mark.parametrize(
    "words",
    [
        ["--slo", "0"],
        ["--rates", "1,0"],
        ["--prompt", "10"],
        ["--answer", "64,32"],
        ["--budgets", "32"],
        ["--policies", "sjf,random"],
    ],
)
def test_wrong_values_are_refused_before_an_engine_starts(
    words: list[str], refuses: Callable[[list[str], str], None]
) -> None:
    refuses(["budget", "model", *words], words[0])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETRI_CACHE", str(tmp_path / "cache"))
    words = [str(tiny_model()), "--budgets", "64", "--requests", "6", "--rates", "4"]
    words += ["--answer", "4,8", "--prompt", "16,200", "--output", str(tmp_path / "out")]
    assert cli.main(["bench", "budget", *words]) == 0

    found = json.loads((tmp_path / "out" / "budget.json").read_text())
    assert {run["system"] for run in found["runs"]} == {"stock default", "stock 64", "ours sjf"}
    assert all(len(run["answered"]["ttft_s"]) == 6 for run in found["runs"])
    assert all(run["figures"]["itl_p99_s"] > 0 for run in found["runs"])
    assert (tmp_path / "out" / "budget.svg").stat().st_size > 1000
