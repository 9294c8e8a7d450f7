"""How many alike instances are spared outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import COST, alone, serving, view
from vllm_tetri.policy.cluster import InstanceRow
from vllm_tetri.policy.spare import UsualLoad, expected_s, number_to_spare
from vllm_tetri.policy.tables import TableMaker
from vllm_tetri.types import InstanceView, Role, StepCoefficients

# An 8B model on an H100 by estimate: a prompt token costs a hundredth of a step's base.
GPU = StepCoefficients(0.006, 2e-5, 4e-8, 5e-5, 1e-9, confidence=1.0)
LOAD = UsualLoad(decodes=20, prompt_share=0.1, used_part=0.2, prompt_tokens=100, output_tokens=50)
COUNT = 4


def row(cost: StepCoefficients = GPU) -> InstanceRow:
    """Make one of alike instances."""
    return InstanceRow(serving("a", handover_s=0.004), cost, key=0, share=0.0, now=0.0)


def busy(name: str, role: str = "both", **options: Any) -> InstanceView:
    """One that serves prompts of 100 tokens, outputs of 50."""
    load = {
        "decodes": 20,
        "context_tokens": 125,
        "usual_tokens": 50,
        "cost": GPU,
        "handover_s": 0.004,
    }
    return serving(name, role, **{**load, **options})


def spared(views: list[list[InstanceView]], period_s: float = 0.1) -> list[frozenset[str]]:
    """Read views one after the other; each tells of one more period of prompts."""
    maker, found = TableMaker(), list[frozenset[str]]()
    for number, each in enumerate(views):
        done = round(0.1 * number * period_s / GPU.prompt_s)
        shown = [
            replace(one, seq=number, load=replace(one.load, prompt_tokens_done=done))
            for one in each
        ]
        table = maker.make(view(*shown), number * period_s, spares=True)
        prefills = {name for name, row in table.by_id.items() if row.role is Role.PREFILL}
        found.append(frozenset(prefills))
    return found


def test_prompts_are_computed_apart_where_steps_of_outputs_are_long_against_them() -> None:
    assert number_to_spare(row(), LOAD, COUNT, 0) == 2
    many = LOAD._replace(decodes=30, prompt_share=0.02, prompt_tokens=100, output_tokens=400)
    assert number_to_spare(row(), many, COUNT, 0) == 1, "outputs are most of the work"


def test_what_prompts_get_beside_outputs_does_not_matter_where_they_are_alone() -> None:
    both = [serving("a", chunk_tokens=512, next_chunk_tokens=each) for each in (0, 32)]
    rows = [InstanceRow(each, GPU, key=0, share=0.0, now=0.0) for each in both]
    long = LOAD._replace(prompt_tokens=2000)
    first, second = (expected_s(each, long, COUNT) for each in rows)
    assert first == second
    assert rows[1].chunk_tokens == 32  # is as it was


def test_an_early_first_token_is_not_worth_outputs_that_take_much_longer() -> None:
    many = LOAD._replace(decodes=100, prompt_share=0.02, output_tokens=400)
    heavy = replace(GPU, request_s=4e-4)
    times = expected_s(row(heavy), many, COUNT)
    assert times[1][0] < 0.7 * times[0][0]
    assert times[1][0] * times[1][1] < 0.9 * times[0][0] * times[0][1], "better by the product"
    assert times[1][1] > 1.1 * times[0][1]
    assert number_to_spare(row(heavy), many, COUNT, 0) == 0


def test_nothing_is_spared_where_it_costs_more() -> None:
    assert number_to_spare(row(COST), LOAD._replace(decodes=2), COUNT, 0) == 0
    assert number_to_spare(row(), LOAD._replace(used_part=0.7), COUNT, 0) == 0, "no room for KV"
    assert number_to_spare(row(), LOAD._replace(used_part=0.7), COUNT, 2) == 0


def test_the_number_of_now_may_break_a_bound_by_a_little() -> None:
    at_bound = LOAD._replace(prompt_share=0.0248)  # outputs take a little over 5 % longer
    assert number_to_spare(row(), at_bound, COUNT, 2) == 2
    assert number_to_spare(row(), at_bound, COUNT, 1) == 1


@given(st.floats(0.01, 0.6), st.floats(0.99, 1.01), st.integers(0, COUNT - 1))
def test_equal_numbers_do_not_take_turns(share: float, factor: float, spared: int) -> None:
    here, there = (LOAD._replace(prompt_share=each) for each in (share, share * factor))
    first = number_to_spare(row(), here, COUNT, spared)
    second = number_to_spare(row(), there, COUNT, first)
    assert number_to_spare(row(), here, COUNT, second) == second


@given(
    st.builds(
        UsualLoad,
        decodes=st.floats(0.01, 500),
        prompt_share=st.floats(0, 0.9),
        used_part=st.floats(0, 1),
        prompt_tokens=st.floats(1, 100_000),
        output_tokens=st.floats(1, 100_000),
    ),
    st.sampled_from([GPU, COST]) | st.builds(StepCoefficients, *[st.floats(0, 10)] * 5),
    st.integers(2, 64),
    st.data(),
)
def test_one_instance_at_least_writes_outputs_and_first_tokens_are_no_later(
    load: UsualLoad, cost: StepCoefficients, count: int, data: st.DataObject
) -> None:
    now_spared = data.draw(st.integers(0, count - 1))
    chosen = number_to_spare(row(cost), load, count, now_spared)
    assert 0 <= chosen < count
    expected = expected_s(row(cost), load, count)
    (none_s, all_s), (ttft_s, whole_s) = expected[0], expected[chosen]
    more = 1 + 0.02 * (chosen == now_spared > 0)
    assert 0 < ttft_s <= more * none_s
    assert ttft_s <= whole_s <= more * 1.05 * all_s * (1 + 1e-9)
    assert chosen == 0 or load.used_part * count / (count - chosen) <= more * 0.8


def test_it_takes_a_while_and_the_same_ones_are_spared_by_all_who_look() -> None:
    found = spared([[busy(name) for name in order] for order in ["abcd", "dcba"] * 200])
    assert set(found[:20]) == {frozenset()}, "two seconds"
    assert set(found[300:]) == {frozenset("ab")}


def test_all_take_outputs_again_when_there_are_no_prompts_to_keep_apart() -> None:
    quiet = [busy(name, decodes=1, usual_tokens=2000, context_tokens=1010) for name in "abcd"]
    found = spared([[busy(name) for name in "abcd"]] * 300 + [quiet] * 300)
    assert found[299] == {"a", "b"}
    assert found[-1] == frozenset()


@pytest.mark.parametrize(
    "others",
    [
        [],
        [busy("b", device="x"), busy("c", device="x")],
        [busy("b", "prefill"), busy("c", "decode")],
        [alone("b", "both"), alone("c", "both")],
        [busy("b", layout="b"), busy("c", layout="c")],
    ],
    ids=["alone", "one device", "roles", "no KV leaves", "other models"],
)
def test_only_alike_ones_for_everything_with_devices_of_their_own(
    others: list[InstanceView],
) -> None:
    found = spared([[busy("a"), *others]] * 60)
    of_roles = {one.info.id for one in others if one.info.role is Role.PREFILL}
    assert set(found) == {frozenset(of_roles)}


def test_the_rest_of_a_kind_goes_on_when_spared_ones_leave() -> None:
    found = spared([[busy(name) for name in names] for names in ["abcde"] * 300 + ["bcde"] * 300])
    assert found[299] == {"a", "b", "c"}
    assert found[-1]
    assert found[-1] < {*"bcde"}
    assert spared([[busy("a"), busy("b")]] * 60 + [[busy("b")]] * 3)[-1] == frozenset()
