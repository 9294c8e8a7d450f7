"""The papers' experiments in the simulator."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from examples.benchmarks.paper import opt13b
from examples.benchmarks.paper.__main__ import main
from examples.benchmarks.paper.cases import Case, cases
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.types import StepCoefficients

SMALL = {"e1": 24, "e2": 48, "e5": 24, "e6": 8, "e12": 60}


@pytest.fixture(scope="module")
def every_case() -> dict[tuple[str, str, str], Case]:
    return {(each.experiment, each.group, each.system): each for each in cases(SMALL)}


def test_every_case_is_there_once(every_case: dict[tuple[str, str, str], Case]) -> None:
    assert len(every_case) == len(list(cases(SMALL)))
    assert {key[0] for key in every_case} == {"e1", "e2", "e5", "e6", "e11", "e12", "e13"}


@pytest.mark.parametrize(
    "key",
    [
        ("e1", "mixed, roce", "tetri"),
        ("e1", "mixed, roce", "tetri-paper"),
        ("e1", "lpld, nvlink, one by one", "vllm-2023"),
        ("e5", "all at once", "reserve-static, oracle 74.9%, lower end"),
        ("e6", "2 decode instances", "imbalance"),
        ("e11", "mixed", "sarathi"),
        pytest.param(("e13", "mixed", "splitwise"), marks=pytest.mark.slow),
    ],
)
def test_a_seed_determines_the_figures(
    key: tuple[str, str, str], every_case: dict[tuple[str, str, str], Case]
) -> None:
    play = every_case[key].play
    first = play(1)
    assert first == play(1)
    assert any(first != play(seed) for seed in (2, 3, 4))  # a rate may be found twice


def test_shortest_first_waits_least_and_longest_first_most(
    every_case: dict[tuple[str, str, str], Case],
) -> None:
    orders = ("sjf 128", "fcfs", "ljf 128")
    found = [every_case["e2", "full queue", name].play(0) for name in orders]
    assert [each["waiting_s"] for each in found] == sorted(each["waiting_s"] for each in found)
    assert len({round(each["total_s"], 9) for each in found}) == 1  # the same tokens


def test_the_script_writes_raw_results_a_table_and_a_picture(tmp_path: Path) -> None:
    words = ["--quick", "--only", "e2,e5", "--seeds", "1", "--output", str(tmp_path)]
    assert main(words) == 0
    found = json.loads((tmp_path / "paper.json").read_text())
    assert found["simulated"]
    assert {row["experiment"] for row in found["rows"]} == {"e2", "e5"}
    table = (tmp_path / "paper.md").read_text()
    assert "| e2 | full queue | sjf 128 | ttft_mean_s |" in table
    assert not (tmp_path / "paper.svg").exists()  # of e1 only


# -- the paper's device ----------------------------------------------------------------------


def test_the_papers_profile_is_what_the_fit_finds_and_near_the_statements() -> None:
    known = profile(opt13b.PROFILE).cost
    fitted = [each for each in opt13b.STATEMENTS if each.is_fitted]
    assert isinstance(known, StepCoefficients)
    assert astuple(known) == pytest.approx(astuple(opt13b.fit()), rel=0.005)
    assert len(fitted) >= 7
    assert max(abs(each.deviation(known)) for each in fitted) < 0.15


def test_no_near_proportions_are_closer_to_the_statements() -> None:
    def error(cost: StepCoefficients) -> float:
        fitted = [each for each in opt13b.STATEMENTS if each.is_fitted]
        return sum(opt13b.residual(each, cost) ** 2 for each in fitted)

    best = opt13b.fit()
    for name in ("request_s", "token_s", "prompt_s"):
        for factor in (0.95, 1.05):
            other = replace(best, **{name: getattr(best, name) * factor})
            assert error(other) > error(best)


@pytest.mark.parametrize(("name", "head"), [(opt13b.PROFILE, "stated"), ("smollm2-1core", "ms")])
def test_a_profile_is_printed_with_the_statements_of_the_paper(
    name: str, head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert opt13b.main([name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{name}: ")
    assert any(head in line for line in lines)
    assert ("| 2.2.2, fig. 4b |" in "\n".join(lines)) == (name == opt13b.PROFILE)
