"""Engines that keep the pace of an imagined device, and the requests sent to them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

import pytest

from vllm_tetri.bench.fleet import in_time, kept
from vllm_tetri.bench.pace import Counts, CountsFile, Pace, Timeline
from vllm_tetri.bench.setting import write_json
from vllm_tetri.bench.workload import ANSWER, PROMPT, Ask, draw, pick, read
from vllm_tetri.errors import ConfigError

PACE = Pace("", base_s=0.010, token_s=0.001, context_s=0.0001)


def test_a_step_costs_more_with_tokens_and_with_context() -> None:
    assert PACE.step_s(4, 100) == pytest.approx(0.010 + 0.004 + 0.010)


def test_scale_shortens_everything_alike() -> None:
    fast = Pace("", scale=0.5, base_s=0.010, token_s=0.001, context_s=0.0001)
    assert fast.step_s(4, 100) == pytest.approx(PACE.step_s(4, 100) / 2)


def test_the_pace_travels_in_the_additional_config() -> None:
    assert Pace(**json.loads(json.dumps(PACE.plain()))["pace"]) == PACE


def test_steps_of_a_busy_engine_follow_each_other_without_a_gap() -> None:
    line = Timeline(PACE)
    first = line.begin(1.0, 10, 0)
    assert first == pytest.approx(1.020)
    line.end(1.023)  # woken late, and the host needs 2 ms between two steps
    assert line.begin(1.025, 10, 0) == pytest.approx(1.040)


def test_an_idle_engine_begins_anew() -> None:
    line = Timeline(PACE)
    line.begin(1.0, 10, 0)
    line.end(1.020)
    assert line.begin(2.0, 10, 0) == pytest.approx(2.020)


def test_a_step_that_took_too_long_is_late() -> None:
    line = Timeline(PACE)
    line.begin(1.0, 10, 0)
    assert line.end(1.050) == pytest.approx(0.030)
    line.begin(2.0, 10, 0)
    assert line.end(2.001) == 0.0


def test_counts_are_seen_by_another_holder_of_the_file(tmp_path: Path) -> None:
    with CountsFile(tmp_path / "counts") as engine, CountsFile(tmp_path / "counts") as bench:
        assert bench.read() == Counts()
        engine.add(requests=3, paced_s=0.5, late_s=0.2)
        engine.add(requests=1, paced_s=0.5, late_s=0.1)
        assert bench.read() == Counts(steps=2, requests=4, paced_s=1.0, late_s=0.2)
        bench.clear()
        assert engine.read() == Counts()


# -- requests ----------------------------------------------------------------------


def test_the_same_seed_gives_the_same_requests() -> None:
    assert draw(20, Random(1)) == draw(20, Random(1)) != draw(20, Random(2))


def test_drawn_lengths_are_within_their_bounds() -> None:
    asks = draw(2000, Random(0))
    answers = sorted(ask.output_tokens for ask in asks)
    assert PROMPT.least <= min(len(ask.prompt) for ask in asks)
    assert max(len(ask.prompt) for ask in asks) <= PROMPT.most
    assert answers[0] >= ANSWER.least
    assert answers[-1] == ANSWER.most
    assert answers[1000] == pytest.approx(ANSWER.median, rel=0.1)


def test_known_requests_are_used_once_as_far_as_they_go() -> None:
    known = [Ask(str(number), 5) for number in range(10)]
    assert sorted(ask.prompt for ask in pick(known, 10, Random(0))) == sorted(
        ask.prompt for ask in known
    )
    assert len(pick(known, 25, Random(0))) == 25


def test_a_file_gives_its_requests(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a b", "output_tokens": 7, "more": 1},
        {"prompt": "c" * 5000, "output_tokens": 7},
        {"prompt": "d", "output_tokens": 9000},
    ]
    path = tmp_path / "asks.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    assert read(path) == [Ask("a b", 7), Ask("d", ANSWER.most)]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"prompt": "a"}',
        '{"prompt": 3, "output_tokens": 5}',
        '{"prompt": "a", "output_tokens": 1}',
    ],
)
def test_a_wrong_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "asks.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 5}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read(path)


@pytest.mark.parametrize("content", ["", "\xff"])
def test_a_file_without_requests_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "asks.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="--prompts"):
        read(path)


# -- runs --------------------------------------------------------------------------


def test_the_first_run_in_time_is_taken() -> None:
    made = iter([0.5, 0.02, 0.01])
    assert in_time(made, lambda late: late) == 0.02
    assert next(made) == 0.01  # not asked for


def test_of_runs_that_were_all_late_the_least_late_is_taken() -> None:
    assert in_time(iter([0.5, 0.2, 0.3, 0.0]), lambda late: late) == 0.2


def test_results_are_added_to_those_of_the_same_conditions(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"conditions": {"seed": 1}, "systems": {"a": [1]}}))
    fresh = {"conditions": {"seed": 1}, "systems": {}}
    options = argparse.Namespace(add=True)
    assert kept(options, path, fresh)["systems"] == {"a": [1]}
    assert kept(argparse.Namespace(add=False), path, fresh) is fresh
    assert kept(options, tmp_path / "none.json", fresh) is fresh
    with pytest.raises(ConfigError, match="seed"):
        kept(options, path, {"conditions": {"seed": 2}})


@pytest.mark.parametrize("content", ["", '{"conditions": {', "[]", '{"seed": 1}', "\xff"])
def test_a_torn_or_foreign_result_is_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_bytes(content.encode("latin-1"))
    fresh = {"conditions": {"seed": 1}, "systems": {}}
    with pytest.raises(ConfigError, match=r"found\.json.*delete it") as caught:
        kept(argparse.Namespace(add=True), path, fresh)
    assert "\n" not in str(caught.value)


def test_a_result_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    write_json(path, {"seed": 1})
    (tmp_path / "same").hardlink_to(path)
    write_json(path, {"seed": 2})
    assert json.loads(path.read_text()) == {"seed": 2}
    assert json.loads((tmp_path / "same").read_text()) == {"seed": 1}  # not written over
    assert len(list(tmp_path.iterdir())) == 2
