from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import COST, alone, serving, view
from vllm_tetri.policy.cluster import ClusterTable
from vllm_tetri.policy.moves import (
    MOST_LEAVING,
    MOST_MOVES,
    MOST_ON_WAY,
    REST_S,
    MoveOrder,
    RunningOutput,
    Source,
    choose_moves,
    why_leave,
)
from vllm_tetri.policy.tables import TableMaker
from vllm_tetri.types import InstanceView, RequestId


def table_of(*instances: InstanceView) -> ClusterTable:
    return TableMaker().make(view(*instances), 0.0)


def output(
    name: str,
    *,
    context: float = 300,
    left: float = 1000,
    num_moves: int = 0,
    here_s: float = REST_S,
) -> RunningOutput:
    return RunningOutput(RequestId(name), context, left, num_moves, here_s)


def chosen(
    one: InstanceView, outputs: list[RunningOutput], *others: InstanceView, num_on_way: int = 0
) -> list[MoveOrder]:
    table = table_of(one, *others)
    reason = why_leave(table).get(one.info.id)
    sources = [Source(one, reason, outputs, num_on_way)] if reason else []
    return choose_moves(sources, table, any_role=False)


def busy(name: str, decodes: int, **options: Any) -> InstanceView:
    return serving(name, "decode", decodes=decodes, step_s=0.02, **options)


@pytest.mark.parametrize("state", ["draining", "flipping"])
def test_an_instance_that_leaves_sends_its_outputs_to_the_fastest(state: str) -> None:
    leaving, slow, fast = busy("a", 3, state=state), busy("b", 9), busy("c", 1)
    found = chosen(leaving, [output("x"), output("y")], slow, fast)
    assert [(each.request, each.target) for each in found] == [("x", "c"), ("y", "c")]
    assert {each.reason for each in found} == {{"draining": "drain", "flipping": "flip"}[state]}


def test_sources_that_leave_at_once_share_their_target() -> None:
    """One instance has just started beside 19 that are full."""
    full, fresh = [busy(f"f{index}", 20) for index in range(19)], busy("new", 2)
    table = table_of(*full, fresh)
    assert len(why_leave(table)) == 19
    sources = [
        Source(each, "balance", [output(f"{each.info.id} {index}") for index in range(20)])
        for each in full
    ]
    orders = choose_moves(sources, table, any_role=False)
    assert 1 < len(orders) < 20
    assert {each.target for each in orders} == {"new"}
    coming = [(each.target, output(each.request)) for each in orders]
    assert choose_moves(sources, table, coming=coming, any_role=False) == []


def test_outputs_of_an_adapter_go_where_it_is() -> None:
    leaving, fast, able = (
        busy("a", 3, state="draining"), busy("b", 1), busy("c", 9),
    )  # fmt: skip
    able = replace(able, info=replace(able.info, models=("tiny", "lora")))
    found = chosen(leaving, [output("x")._replace(model="lora")], fast, able)
    assert [each.target for each in found] == ["c"]


def test_what_ends_sooner_than_it_moves_stays() -> None:
    leaving, other = busy("a", 3, state="draining", handover_s=0.5), busy("b", 1)
    found = chosen(leaving, [output("short", left=20), output("long", left=200)], other)
    assert [each.request for each in found] == ["long"]


def test_outputs_spread_over_the_others_as_they_are_sent() -> None:
    leaving, others = busy("a", 8, state="draining"), [busy("b", 2), busy("c", 2)]
    found = chosen(leaving, [output(str(each)) for each in range(8)], *others)
    targets = [each.target for each in found]
    assert (targets.count("b"), targets.count("c")) == (4, 4)  # type: ignore[comparison-overlap]


def test_only_so_many_are_on_their_way_at_once() -> None:
    leaving, other = busy("a", 40, state="draining"), busy("b", 1)
    outputs = [output(str(each)) for each in range(40)]
    assert len(chosen(leaving, outputs, other)) == MOST_LEAVING
    assert len(chosen(leaving, outputs, other, num_on_way=MOST_LEAVING - 1)) == 1


@pytest.mark.parametrize(
    "other",
    [
        busy("b", 1, state="draining"),
        busy("b", 1, layout="another"),
        busy("b", 1, blocks_total=3),
        serving("b", "prefill", step_s=0.02),
        alone("b", "decode"),
    ],
)
def test_outputs_stay_that_no_other_instance_can_take(other: InstanceView) -> None:
    assert chosen(busy("a", 3, state="draining"), [output("x")], other) == []


def test_an_instance_that_exchanges_no_kv_keeps_its_outputs() -> None:
    one = alone("a", "decode", state="draining")
    assert why_leave(table_of(one, busy("b", 1))) == {}


def test_an_output_moves_where_it_is_much_faster() -> None:
    full, empty = busy("a", 60), busy("b", 0)
    found = chosen(full, [output("x"), output("y", left=2000)], empty)
    assert found[0] == MoveOrder(RequestId("y"), full.info.id, empty.info.id, "balance")
    assert len(found) <= MOST_ON_WAY


def test_an_output_stays_whose_kv_would_displace_more_than_it_is_faster() -> None:
    full, other = busy("a", 60), busy("b", 20)
    assert chosen(full, [output("x", context=300)], other)
    assert chosen(full, [output("x", context=30_000)], other) == []


def test_an_output_stays_if_prompts_take_the_time_of_the_other_instance() -> None:
    tables = TableMaker()

    def order(prompt_tokens_done: int, seq: int) -> list[MoveOrder]:
        full = busy("a", 60, seq=seq)
        other = busy("b", 0, prompt_tokens_done=prompt_tokens_done, seq=seq)
        table = tables.make(view(full, other), float(seq))
        sources = [Source(full, "balance", [output("x")])]
        return choose_moves(sources, table, any_role=False)

    assert order(0, 1)
    assert order(round(0.9 / COST.prompt_s), 2) == []  # nine tenths of a second


@pytest.mark.parametrize(
    "stays",
    [output("x", num_moves=MOST_MOVES), output("x", here_s=REST_S / 2), output("x", left=3)],
)
def test_an_output_that_moved_often_or_lately_or_ends_soon_stays(stays: RunningOutput) -> None:
    assert chosen(busy("a", 60), [stays], busy("b", 0)) == []


def test_nothing_moves_between_instances_of_one_device() -> None:
    both = busy("a", 60, device="gpu"), busy("b", 0, device="gpu")
    assert chosen(both[0], [output("x")], both[1]) == []


def test_an_instance_without_free_blocks_sends_its_longest_output() -> None:
    full = busy("a", 10, blocks_total=500, blocks_used=495)
    found = chosen(full, [output("x"), output("y", left=2000)], busy("b", 9))
    assert found[0] == MoveOrder(RequestId("y"), full.info.id, busy("b", 9).info.id, "memory")


@given(
    counts=st.tuples(st.integers(0, 80), st.integers(0, 80)),
    left=st.floats(1, 10_000),
    context=st.floats(1, 10_000),
)
def test_what_moved_for_balance_would_not_move_back(
    counts: tuple[int, int], left: float, context: float
) -> None:
    """After any move the other instance is still the faster one, so moves come to an end."""
    here, there = counts
    for _ in range(200):
        names = [output(str(each), left=left, context=context) for each in range(here)]
        found = chosen(busy("a", here), names, busy("b", there))
        if not found:
            break
        here, there = here - len(found), there + len(found)
        back = [output(str(each), left=left, context=context) for each in range(there)]
        assert chosen(busy("b", there), back, busy("a", here)) == []
    else:
        raise AssertionError("moves do not end")
