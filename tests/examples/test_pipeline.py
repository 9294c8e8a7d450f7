"""Steps that pass stages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from examples.benchmarks.paper.cases import conversations
from examples.benchmarks.pipeline import (
    PHASE_LAYOUTS,
    PHASE_SLOS,
    PHASES,
    SYSTEMS,
    Stages,
    at_once,
    cluster,
    goodput,
    main,
)
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.config import Stock
from vllm_tetri.sim.cost.hardware import MODELS


def stages(num: int, send_s: float = 0.0) -> Stages:
    return Stages(0.0, 0.0, 0.0, 0.0, 0.0, free_s=[0.0] * num, send_s=send_s)


def test_a_step_waits_at_each_stage_for_the_one_before_it() -> None:
    two = stages(2, send_s=0.01)

    assert two.passed(0.0, 2.0, 0) == 4.0
    # It begins at 2 s, reaches the second stage at 3 s + 50 tokens, and waits there until 4 s.
    assert two.passed(0.0, 1.0, 50) == 5.0
    assert two.bubbles == pytest.approx(1 - 6 / 10)
    # 1 s, 0.5 s on its way, 1 s; nothing was on its way between 5 and 9 s.
    assert two.passed(9.0, 1.0, 50) == 11.5
    assert two.bubbles == pytest.approx(1 - 8 / 15)


@pytest.mark.parametrize("num", [1, 2, 4])
def test_unequal_steps_take_longer_by_their_longest(num: int) -> None:
    rng = Random(num)
    unequal = [rng.uniform(0.1, 3.0) for _ in range(20)]
    equal = [sum(unequal) / 20] * 20

    ends = []
    for steps in (unequal, equal):
        passed = stages(num)
        ends.append([passed.passed(0.0, each, 1) for each in steps][-1])
        assert ends[-1] == pytest.approx(sum(steps) + (num - 1) * max(steps))
        assert passed.bubbles == pytest.approx(1 - sum(steps) / ends[-1])
    assert ends[1] <= ends[0] + 1e-9


def test_one_stage_is_an_instance_as_ever() -> None:
    specs = conversations(20, 0.5, 1, 1.0)
    config, _ = cluster("sarathi", 8, 1, 0)
    (place,) = config.instances
    usual = replace(
        config, instances=(replace(place, engine=replace(place.engine, kind=Stock(512))),)
    )
    staged = simulate(config, specs)

    assert [each.jct_s for each in staged] == pytest.approx(
        [each.jct_s for each in simulate(usual, specs)]
    )


@pytest.mark.parametrize("num", [2, 4])
def test_a_step_takes_through_all_stages_what_it_takes_without(num: int) -> None:
    fast = 1e18  # the link between stages
    (_, whole), (_, staged) = (
        cluster("vllm", 4, each, 0, MODELS["opt-13b"], fast) for each in (1, num)
    )
    for work in ((1, 500, 0, 0.0), (64, 40_000, 0, 0.0), (0, 0, 512, 256.0)):
        assert num * staged.step_s(*work) == pytest.approx(whole.step_s(*work), rel=0.01)


def test_equal_steps_leave_the_fewest_bubbles() -> None:
    bubbles = {each: at_once(each, 4, 2, 0, 64)["bubbles"] for each in SYSTEMS}

    assert bubbles["sarathi"] < bubbles["vllm-2023"] / 2
    assert bubbles["sarathi"] < bubbles["orca"] / 2


def test_the_script_writes_a_line_per_system_and_layout(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"

    assert main(["--requests", "12", "--seeds", "1", "--output", str(file)]) == 0

    rows = [json.loads(line) for line in file.read_text().splitlines()]
    whole, phases = rows[: 2 * len(SYSTEMS)], rows[2 * len(SYSTEMS) :]
    assert all(row["capacity_per_s"] > 0 for row in whole)
    assert len(phases) == len(PHASE_SLOS) * len(PHASES) * len(PHASE_LAYOUTS)


def test_stages_suit_neither_phase_of_a_model_that_fits_on_one_device() -> None:
    def goodputs(phase: str) -> list[float]:
        slo = PHASE_SLOS["strict"]
        return [goodput(phase, slo, *layout, 60) for layout in ((4, 1), (2, 2), (1, 4))]

    for phase in PHASES:
        tensor, both, stages = goodputs(phase)
        assert tensor > both > stages >= 0
