"""Sections of papers, simulated. Times are worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from examples.benchmarks.rivals.adrenaline import Attended, attended, divided, slower
from examples.benchmarks.rivals.engines import Unchunked, UnchunkedInstance
from examples.benchmarks.rivals.modes import MooncakeMode
from examples.benchmarks.rivals.pipelines import Group
from examples.benchmarks.rivals.rejection import RejectingMode, Rule
from examples.benchmarks.rivals.studies import STUDIES, Refusing, cell, swing
from examples.benchmarks.rivals.tgi import Tgi
from tests.sim.builders import (
    COST,
    ENGINE,
    HANDOVER_S,
    decode_s,
    engine,
    one,
    pair,
    prompt_s,
    spec,
    steps,
)
from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.sim.cluster import ENGINES, Outcome, run, simulate
from vllm_tetri.sim.config import ClusterConfig, InstanceConfig, make_instances
from vllm_tetri.sim.request import SimRequest
from vllm_tetri.sim.workload import RequestSpec
from vllm_tetri.types import InstanceId, Role

Drawn = list[tuple[int, int, float]]
REQUESTS = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 30), st.floats(0, 30)), min_size=1, max_size=10
)
FEW = settings(max_examples=30)


def drawn_specs(drawn: Drawn) -> list[RequestSpec]:
    return [spec(number, *each) for number, each in enumerate(drawn)]


# -- Mooncake, section 7 -------------------------------------------------------------------

# A decode beside n others of 10 tokens takes 1 + 0.11 (n + 1) s: with this promise, and the quarter
# by which forecasts may be off, the third one is refused.
PACE_S = 1.27 / 1.25


def refusing(rule: Rule, specs: list[RequestSpec], tpot_s: float = PACE_S) -> Outcome:
    known = engine(cost=replace(COST, confidence=1.0), chunk_tokens=10, order="fcfs")
    cluster = (
        InstanceConfig(InstanceId("p"), Role.PREFILL, known),
        InstanceConfig(InstanceId("d"), Role.DECODE, replace(known, chunk_tokens=1)),
    )
    mode = partial(RejectingMode, rule=rule, objective=Objective(inf, tpot_s))
    return run(ClusterConfig(cluster, mode, handover_base_s=HANDOVER_S), specs)


def refused(outcome: Outcome) -> list[tuple[int, int]]:
    """Requests, and the tokens that were computed of them."""
    return [(each.spec.id, each.computed_tokens) for each in outcome.refused]


def test_mooncake_refuses_a_computed_prompt_if_too_many_decode_by_then() -> None:
    specs = [spec(0, 10, 40), spec(1, 10, 40, 2.0), spec(2, 10, 40, 4.0)]
    outcome = refusing(Rule.LATER, specs)
    assert refused(outcome) == [(2, 10)]
    assert [each.ttft_s for each in outcome.served] == pytest.approx([prompt_s(10)] * 2)


def test_mooncake_forgets_prompts_that_wait_unless_it_forecasts() -> None:
    """The third arrives while nothing is decoded, and is computed when two are."""
    specs = [spec(number, 10, 40, 0.1 * number) for number in range(3)]
    assert refused(refusing(Rule.NOW, specs)) == [(2, 10)]
    for rule in (Rule.FORECAST, Rule.OUTLIVED):
        assert refused(refusing(rule, specs)) == [(2, 0)]


def test_a_forecast_of_mooncake_lets_outputs_end_that_take_the_usual_time() -> None:
    """Two are decoded for 11 s when the fifth arrives, as long as both before them were; they are
    longer, so both forecasts are wrong about them, and the second check finds out."""
    first = [spec(0, 10, 10), spec(1, 10, 10, 2.0)]
    later = [spec(2, 10, 60, 40.0), spec(3, 10, 60, 42.0), spec(4, 10, 9, 60.0)]
    assert refused(refusing(Rule.NOW, [*first, *later])) == [(4, 0)]
    assert refused(refusing(Rule.FORECAST, [*first, *later])) == [(4, 10)]
    assert refused(refusing(Rule.OUTLIVED, [*first, *later])) == [(4, 0)]


@FEW
@given(REQUESTS, st.sampled_from(Rule), st.floats(1.2, 3))
def test_what_mooncake_refuses_leaves_nothing_behind(
    drawn: Drawn, rule: Rule, tpot_s: float
) -> None:
    """Every request is served or refused, once; blocks and queues are checked by the simulator."""
    specs = drawn_specs(drawn)
    outcome = refusing(rule, specs, tpot_s)
    done = [each.spec.id for each in (*outcome.served, *outcome.refused)]
    assert sorted(done) == [each.id for each in specs]
    assert {each.computed_tokens for each in outcome.refused} <= {
        0,
        *(each.prompt_tokens for each in specs),
    }
    if rule is Rule.LATER:
        assert all(each.computed_tokens for each in outcome.refused)


# -- Adrenaline ----------------------------------------------------------------------------


def test_attention_ends_on_both_sides_at_once() -> None:
    # 1000 tokens of 1 ms: 400 here take 0.4 s, and 600 there 0.1 + 4 * 0.6 * 0.05 + 0.6 / 3.
    kind = Attended(executors=3.0, remote_tokens=10_000, sync_s=0.08, request_s=0.05)
    assert divided(kind, 4, 1000, 0.001, 10_000) == pytest.approx((0.4, 0.4))


def test_attention_stays_where_messages_cost_more_and_goes_where_memory_is_short() -> None:
    kind = Attended(executors=1.0, remote_tokens=400, sync_s=2.0)
    assert divided(kind, 4, 1000, 0.001, 1000) == (1.0, 0.0)
    assert divided(kind, 4, 1000, 0.001, 700) == pytest.approx((0.7, 2.3))


def test_a_step_of_adrenaline_saves_attention_and_its_prefill_device_is_slower() -> None:
    plain = pair().instances
    config = replace(
        pair(), instances=attended(plain, 0.001, 0.0, part=0.2, bandwidth_part=0.5, memory_part=0.5)
    )
    (served,) = simulate(config, [spec(0, 60, 3)])
    assert served.ttft_s == pytest.approx(prompt_s(60) / 0.8)
    # A third of 60 and 61 tokens goes, less one for the millisecond of messages.
    saved_s = sum((tokens - 1) * 0.001 / 3 for tokens in (60, 61))
    handover_s = HANDOVER_S + 60 * 0.002
    assert served.jct_s - served.ttft_s == pytest.approx(handover_s + decode_s(60, 2) - saved_s)
    assert [each.engine.kv_blocks for each in config.instances] == [50, 150]


@given(
    st.floats(0.1, 8), st.integers(0, 4000), st.floats(0, 0.1), st.floats(0, 0.01),
    st.integers(1, 64), st.integers(1, 4000),
)  # fmt: skip
def test_attention_is_never_slower_than_here_nor_quicker_than_on_both(
    executors: float, remote: int, sync_s: float, request_s: float, num: int, context: int
) -> None:
    kind = Attended(executors, remote, sync_s, request_s)
    longest = max(divided(kind, num, context, 0.001, context))
    assert context * 0.001 / (1 + executors) <= longest * (1 + 1e-9)
    assert longest <= context * 0.001 * (1 + 1e-9)
    assert slower(COST, 0.5).step_s(0, 0, 10, 0) == 2 * COST.step_s(0, 0, 10, 0)


@pytest.mark.parametrize("changes", [{"part": 1.0}, {"memory_part": 0.0}])
def test_executors_need_both_roles_and_parts(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        attended(pair().instances, 0.0, 0.0, **changes)
    with pytest.raises(ConfigError, match="prefill and decode"):
        attended(pair().instances[1:], 0.0, 0.0)


# -- Text Generation Inference -------------------------------------------------------------


def tgi(**changes: Any) -> ClusterConfig:
    kind = Tgi(**{"longest_output": 64, **changes})
    return one("least-in-flight", kind=kind, kv_blocks=400)


@pytest.mark.parametrize(
    ("ratio", "waited", "decodes_before"), [(0.5, 20, 1), (1.0, 20, 19), (1.0, 5, 4), (0.0, 20, 1)]
)
def test_prompts_of_tgi_enter_by_the_ratio_or_after_some_steps(
    ratio: float, waited: int, decodes_before: int
) -> None:
    """Two decode; one waits since their first step."""
    specs = [spec(0, 10, 40), spec(1, 10, 40), spec(2, 10, 40, 1.2)]
    found = steps(tgi(waiting_served_ratio=ratio, max_waiting_tokens=waited), specs)
    entered = [number for number, each in enumerate(found) if (2, 10) in each.prompts]
    # Prompts 0 and 1, and before that prompt 0 alone: requests at one time come one by one.
    assert [len(each.prompts) for each in found[:2]] == [1, 1]
    assert entered == [1 + 1 + decodes_before]


def test_prompts_of_tgi_hold_memory_for_their_longest_output() -> None:
    specs = [spec(number, 16, 3, 0.1 * number) for number in range(5)]
    found = steps(one("least-in-flight", kind=Tgi(longest_output=64), kv_blocks=10), specs)
    assert max(len(each.decodes) for each in found) == 2


@FEW
@given(REQUESTS, st.floats(0, 2), st.integers(1, 12))
def test_no_step_of_tgi_lets_in_less_than_the_ratio_before_its_time(
    drawn: Drawn, ratio: float, waited: int
) -> None:
    specs = drawn_specs(drawn)
    found = steps(tgi(waiting_served_ratio=ratio, max_waiting_tokens=waited), specs)
    since, left = 1, {each.id: each.output_tokens for each in specs}
    entered: set[int] = set()
    for each in found:
        assert not (each.prompts and each.decodes)
        alive = sum(left[number] > 0 for number in entered)
        if each.prompts:
            assert since >= waited or len(each.prompts) >= int(alive * ratio)
        since = 1 if each.prompts else since + 1
        new = {number for number, _ in each.prompts}
        assert not new & entered  # none is preempted
        entered |= new
        for number in (*new, *each.decodes):
            left[number] -= 1
    assert not any(left.values())


# -- Splitwise, section IV-B ---------------------------------------------------------------


def aged(ageing_s: float, most: int = 2) -> ClusterConfig:
    kind = Unchunked(most_preemptions=most, ageing_s=ageing_s)
    changes: dict[str, Any] = {"order": "fcfs", "admission": "greedy", "chunk_tokens": 64}
    return one("least-in-flight", kind=kind, kv_blocks=12, **changes)


def test_a_prompt_of_splitwise_preempts_no_decode_that_has_aged() -> None:
    """Decodes are 48 s old when the first prompt comes."""
    specs = [spec(0, 30, 60), spec(1, 30, 60, 0.1), spec(2, 50, 2, 50.0)]
    for ageing_s, expected in ((60.0, [0, 1]), (40.0, [0, 0])):
        served = simulate(aged(ageing_s), specs)
        assert [each.preemptions for each in served[:2]] == expected
        assert (served[2].ttft_s < 8) == (ageing_s == 60.0)


@pytest.mark.parametrize(("ageing_s", "expected"), [(1e9, [0, 1, 1]), (inf, [0, 2, 0])])
def test_of_splitwises_decodes_the_youngest_is_preempted_not_the_one_that_came_back(
    ageing_s: float, expected: list[int]
) -> None:
    """The third takes the blocks of the second, which comes back when the first has ended."""
    specs = [spec(0, 30, 60), spec(1, 30, 60, 0.1), spec(2, 50, 60, 50.0), spec(3, 50, 2, 85.0)]
    served = simulate(aged(ageing_s), specs)
    assert [each.preemptions for each in served[:3]] == expected


@FEW
@given(REQUESTS, st.floats(0, 40), st.integers(0, 3))
def test_splitwise_preempts_for_prompts_within_both_bounds(
    drawn: Drawn, ageing_s: float, most: int
) -> None:
    losers: list[SimRequest] = []

    class Watched(UnchunkedInstance):
        def _make_room(self, now: float) -> None:
            before = {each: each.preemptions for each in self.batch}
            super()._make_room(now)
            for each, number in before.items():
                if each.preemptions > number:
                    assert each.preemptions == number + 1 <= most
                    assert now - each.first_token_s < ageing_s
                    losers.append(each)

    config = aged(ageing_s, most)
    engine_ = replace(config.instances[0].engine, kv_blocks=25, chunk_tokens=400)
    place = replace(config.instances[0], engine=engine_)
    with patch.dict(ENGINES, {Unchunked: Watched}):
        served = simulate(replace(config, instances=(place,)), drawn_specs(drawn))
    assert len(served) == len(drawn)
    event(f"preempted {min(2, len(losers))}")


# -- Mooncake, section 5.1 -----------------------------------------------------------------


def grouped(nodes: int, pass_token_s: float = 0.0, **changes: Any) -> ClusterConfig:
    group = replace(ENGINE, kind=Group(nodes, pass_token_s), order="fcfs", admission="greedy")
    return ClusterConfig(
        (
            InstanceConfig(InstanceId("p"), Role.PREFILL, replace(group, **changes)),
            InstanceConfig(InstanceId("d"), Role.DECODE, engine(chunk_tokens=1, kv_blocks=1000)),
        ),
        MooncakeMode,
    )


def test_chunks_of_a_long_prompt_follow_each_other_on_the_nodes_of_a_group() -> None:
    chunk_s = prompt_s(64)
    for nodes in (1, 2, 4):
        (served,) = simulate(grouped(nodes), [spec(0, 4 * 64, 3)])
        assert served.ttft_s == pytest.approx(3 * chunk_s / nodes + chunk_s)
    # The link is slower than two nodes: half of the chunks' KV comes in between two of them.
    (served,) = simulate(grouped(2, 0.04), [spec(0, 4 * 64, 3)])
    assert served.ttft_s == pytest.approx(4 * 64 * 0.02 + chunk_s - 64 * 0.02)


@FEW
@given(REQUESTS, st.integers(1, 8), st.floats(0, 0.02))
def test_a_group_is_no_quicker_than_its_nodes_and_its_link(
    drawn: Drawn, nodes: int, pass_token_s: float
) -> None:
    outcome = run(grouped(nodes, pass_token_s), drawn_specs(drawn))
    assert outcome.busy["p"] <= 1 + 1e-9
    for each in outcome.served:
        if each.prefill == "p":
            between_s = prompt_s(64) / nodes, 64 * pass_token_s * (nodes - 1) / nodes
            num = each.spec.prompt_tokens // 64
            assert each.ttft_s >= num * max(between_s) - 1e-9


# -- the studies -------------------------------------------------------------------------------


def test_what_swings_is_counted_every_half_second() -> None:
    """Three of four requests begin in the time that counts: 1.1 s to a first token, 2.2 s more."""
    specs = [spec(number, 10, 3, 100.0 * number) for number in range(5)]
    found = swing(run(one("least-in-flight"), specs), specs)
    assert found["waiting_mean"] == pytest.approx(3 * 3 / 600)
    assert found["decoded_mean"] == pytest.approx(3 * 4 / 600)
    part = 12 / 600
    assert found["decoded_cv"] == pytest.approx((part * (1 - part)) ** 0.5 / part)


@pytest.mark.parametrize("name", STUDIES)
def test_the_cells_of_a_study_have_names_of_their_own(name: str) -> None:
    cells = [*STUDIES[name](0, None)]
    names = [json.dumps(each[0], sort_keys=True) for each in cells]
    assert len(set(names)) == len(names) >= 7


def test_ours_refuses_in_a_study_what_would_be_late() -> None:
    known = engine(cost=replace(COST, confidence=1.0))
    config = ClusterConfig(
        make_instances(both=2, engine=known), partial(Refusing, objective=Objective(5.0, inf))
    )
    specs = [spec(number, 60, 5, 0.4 * number) for number in range(20)]
    found = cell(config, specs, Objective(5.0, inf))
    assert 5 < found["refused"] < 18
    assert found["refused_late"] == found["wasted"] == 0
