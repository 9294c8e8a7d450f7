import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_tetri import cli
from vllm_tetri.bench.paper import answers as paper_answers
from vllm_tetri.bench.paper import classes as paper_classes
from vllm_tetri.bench.paper import command as paper
from vllm_tetri.bench.paper import prompts as paper_prompts
from vllm_tetri.bench.paper import rates as paper_rates
from vllm_tetri.bench.paper.case import FULL, QUICK, Case, Size
from vllm_tetri.bench.report.values import METRICS
from vllm_tetri.errors import INTERRUPTED, ConfigError

SMALL = Size({"e1": 24, "e2": 48, "e5": 24, "e6": 8, "e12": 60}, 1)


def case_of(cases: list[Case], group: str, system: str) -> Case:
    return next(each for each in cases if (each.group, each.system) == (group, system))


def options(folder: Path, **given: object) -> argparse.Namespace:
    known = {"quick": True, "only": None, "seeds": 1, "output": folder}
    return argparse.Namespace(**(known | given))


@pytest.fixture(scope="module")
def everything() -> list[Case]:
    return list(paper.cases(SMALL))


def test_every_case_is_there_once(everything: list[Case]) -> None:
    names = [(each.experiment, each.group, each.system) for each in everything]
    assert len(set(names)) == len(names)
    assert {name for name, _, _ in names} == {"e1", "e2", "e5", "e6", "e11", "e12", "e13"}


@pytest.mark.parametrize(
    ("group", "system"),
    [("mixed, roce", "tetri"), ("lpld, nvlink, one by one", "vllm-2023"), ("mixed", "sarathi")],
)
def test_a_seed_says_all_there_is_to_know(everything: list[Case], group: str, system: str) -> None:
    case = case_of(everything, group, system)
    first = case.play(1)
    assert first == case.play(1)
    assert first != case.play(2)
    assert set(first) <= set(METRICS)


def test_systems_of_a_group_get_the_same_requests() -> None:
    cases = list(paper_prompts.cases(SMALL))
    first, second = (
        case_of(cases, "full queue", name).play(3)["total_s"] for name in ("fcfs", "sjf 128")
    )
    assert first == pytest.approx(second)  # the same tokens, in whatever order


def test_a_batch_of_whole_prompts_is_long_and_chunks_are_not() -> None:
    cases = list(paper_prompts.cases(SMALL))
    batch = case_of(cases, "full queue", "vllm-2023").play(0)
    chunks = case_of(cases, "full queue", "fcfs").play(0)
    assert chunks["prefill_s"] < batch["prefill_s"] / 3
    assert batch["waiting_s"] + batch["prefill_s"] == pytest.approx(batch["ttft_mean_s"])


def test_shortest_first_waits_least_and_longest_first_most() -> None:
    cases = list(paper_prompts.cases(SMALL))
    waits = [
        case_of(cases, "full queue", name).play(0)["waiting_s"]
        for name in ("sjf 128", "fcfs", "ljf 128")
    ]
    assert waits == sorted(waits)


def test_a_slower_link_delays_the_second_token() -> None:
    cases = list(paper_classes.cases(SMALL))
    slow, fast = (
        case_of(cases, f"hphd, {link}", "tetri").play(0)["jct_mean_s"]
        for link in ("roce", "nvlink")
    )
    assert slow > fast


def test_imbalance_gathers_heavy_answers() -> None:
    cases = [each for each in paper_answers.cases(SMALL) if each.experiment == "e6"]
    found = {
        name: case_of(cases, "4 decode instances", name).play(0)
        for name in ("power-of-two", "imbalance")
    }
    assert found["imbalance"]["spread_heavy"] > found["power-of-two"]["spread_heavy"]
    assert found["imbalance"]["decode_s"] > found["power-of-two"]["decode_s"]


def test_stall_free_chunks_sustain_more() -> None:
    cases = list(paper_rates.cases(replace(SMALL, requests=SMALL.requests | {"e12": 100})))
    chunked, whole = (
        case_of(cases, "mixed", name).play(0)["sustained_per_s"]
        for name in ("sarathi", "vllm-2023")
    )
    assert chunked > whole > 0


def test_results_are_written_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper, "QUICK", SMALL)
    assert paper.run(options(tmp_path / "new", only="e2,e6")) == 0
    found = json.loads((tmp_path / "new/paper.json").read_text())
    assert found["conditions"]["simulated"] is True
    assert {row["experiment"] for row in found["rows"]} == {"e2", "e6"}
    assert all(len(row["values"]) == 1 for row in found["rows"])
    printed = capsys.readouterr().out
    assert "simulated" in printed
    assert "an estimate" in printed


@pytest.mark.parametrize(
    ("given", "words"),
    [({"only": "e7"}, "--only e7: there are e1, e11"), ({"seeds": 0}, "--seeds")],
)
def test_bad_options_are_one_line(tmp_path: Path, given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        paper.run(options(tmp_path, **given))


def test_an_interruption_leaves_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(paper, "_measure", stop)
    words = ["bench", "paper", "--quick", "--output", str(tmp_path)]
    assert cli.main(words) == INTERRUPTED
    assert not (tmp_path / "paper.json").exists()


def test_the_quick_variant_is_smaller() -> None:
    assert QUICK.seeds < FULL.seeds
    assert all(QUICK.requests[name] < FULL.requests[name] for name in QUICK.requests)
