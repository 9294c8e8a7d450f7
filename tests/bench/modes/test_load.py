"""What systems are asked, and in which order."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest

from tests.bench.modes.builders import CAPACITIES, LOAD, cell
from vllm_tetri.bench.modes import load as modes_load
from vllm_tetri.bench.modes.load import CLASSES, KNEE, PLAIN, RATES
from vllm_tetri.bench.modes.run import Block, blocks, schedule_of
from vllm_tetri.bench.modes.systems import DEFAULT, SYSTEMS, Site, serve_options


def test_a_schedule_depends_on_class_rate_and_repeat_only() -> None:
    first = schedule_of(LOAD, 0, 20, CAPACITIES, 7)
    assert first == schedule_of(LOAD, 0, 20, CAPACITIES, 7)
    others = [(LOAD, 1, 7), (("lpld", "past"), 0, 7), (("hpld", KNEE), 0, 7), (LOAD, 0, 8)]
    for load, repeat, seed in others:
        assert schedule_of(load, repeat, 20, CAPACITIES, seed)[0] != first[0]
        assert schedule_of(load, repeat, 20, CAPACITIES, seed)[1] != first[1]


@pytest.mark.parametrize("name", PLAIN)
def test_lengths_fill_the_ranges_of_their_class(name: str) -> None:
    found = [each.length for each in modes_load.at_once(name, 4000, Random(0))]
    (least, most), (shortest, longest) = PLAIN[name]
    prompts = sorted(each.prompt_tokens for each in found)
    answers = sorted(each.output_tokens for each in found)
    assert least <= prompts[0] < prompts[-1] <= most
    assert shortest == answers[0] < answers[-1] == longest
    assert prompts[2000] == pytest.approx(math.sqrt(least * most), rel=0.1)
    assert answers[2000] == pytest.approx((shortest + longest) / 2, rel=0.1)


def test_mixed_has_all_four_alike() -> None:
    found = [each.length for each in modes_load.at_once("mixed", 4000, Random(0))]
    for is_heavy in (False, True):
        for is_long in (False, True):
            count = sum(
                (each.prompt_tokens >= 512) == is_heavy and (each.output_tokens > 128) == is_long
                for each in found
            )
            assert count == pytest.approx(1000, rel=0.1)


def test_requests_come_at_a_part_of_the_capacity() -> None:
    for rate, part in RATES.items():
        found = modes_load.schedule(("hpld", rate), 4000, CAPACITIES, Random(1))
        assert 4000 / found[-1].at_s == pytest.approx(part * 2.0, rel=0.1)
        assert modes_load.rate_per_s(("hpld", rate), CAPACITIES) == pytest.approx(part * 2.0)


def test_a_swing_goes_from_one_class_to_the_other_and_back() -> None:
    found = modes_load.schedule(("swing", KNEE), 3000, CAPACITIES, Random(1))
    for phase, name in enumerate(("lphd", "hpld", "lphd")):
        own = [each for each in found if each.phase == phase]
        prompts, answers = PLAIN[name]
        assert len(own) == 1000
        assert all(prompts[0] <= each.length.prompt_tokens <= prompts[1] for each in own)
        assert all(answers[0] <= each.length.output_tokens <= answers[1] for each in own)
        assert 999 / (own[-1].at_s - own[0].at_s) == pytest.approx(0.7 * CAPACITIES[name], rel=0.1)
    assert 3000 / found[-1].at_s == pytest.approx(
        modes_load.rate_per_s(("swing", KNEE), CAPACITIES), rel=0.1
    )


def test_a_swing_has_one_rate_and_needs_the_capacities_of_its_parts() -> None:
    assert modes_load.loads(CLASSES, list(RATES)).count(("swing", KNEE)) == 1
    assert len(modes_load.loads(CLASSES, list(RATES))) == 5 * 3 + 1
    assert modes_load.measured(["swing", "mixed"]) == ["lphd", "hpld", "mixed"]


def test_all_systems_share_the_same_memory_and_batch() -> None:
    site = Site("/models/m", ["--dtype", "float32"], (0, 1), None, Path())
    for system in SYSTEMS.values():
        words = serve_options(system, site)
        sizes = [
            int(words[words.index(option) + 1]) * system.engines
            for option in ("--kv-cache-memory-bytes", "--max-num-seqs")
        ]
        assert sizes == [1 << 30, 128]
        assert words[-2:] == ["--dtype", "float32"]
    assert set(DEFAULT) == set(SYSTEMS) - {"whole"}


def test_blocks_leave_out_what_is_done_and_keep_their_order() -> None:
    loads = modes_load.loads(["lpld", "hpld"], list(RATES))
    whole = blocks(["stock", "split"], loads, 2, 0, {})
    assert sorted((each.repeat, each.system) for each in whole) == [
        (0, "split"), (0, "stock"), (1, "split"), (1, "stock"),
    ]  # fmt: skip
    assert all(set(each.loads) == set(loads) for each in whole)
    first = whole[0]
    done = {(first.system, *load, 0): cell() for load in first.loads[:2]}
    left = blocks(["stock", "split"], loads, 2, 0, done)
    assert left == [Block(first.system, 0, first.loads[2:]), *whole[1:]]
    done = {(first.system, *load, 0): cell() for load in first.loads}
    assert blocks(["stock", "split"], loads, 2, 0, done) == whole[1:]
