"""Times worked out by hand, and what must hold for every simulation."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.sim.builders import (
    COST,
    HANDOVER_S,
    HANDOVER_TOKEN_S,
    decode_s,
    engine,
    max_itl_s,
    one,
    pair,
    spec,
)
from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.order import ORDERS
from vllm_tetri.sim.cluster import run, simulate
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, EngineKind, Stock, make_instances
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.sim.workload import draw

# -- one engine ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [EngineKind(), Stock(64)])
def test_a_request_alone_takes_what_its_steps_cost(kind: EngineKind) -> None:
    (served,) = simulate(one(kind=kind), [spec(0, 10, 3)])

    assert served.ttft_s == pytest.approx(1.1)
    assert served.jct_s == pytest.approx(1.1 + 1.11 + 1.111)
    assert max_itl_s(served) == pytest.approx(1.111)
    assert not served.is_split


@pytest.mark.parametrize("kind", [EngineKind(), Stock(64)])
def test_what_comes_before_the_engine_delays_everything(kind: EngineKind) -> None:
    (served,) = simulate(one(kind=kind, front_s=0.5), [spec(0, 10, 3)])

    assert served.begun_s == pytest.approx(0.5)
    assert served.ttft_s == pytest.approx(0.5 + 1.1)
    assert served.jct_s == pytest.approx(0.5 + 1.1 + 1.11 + 1.111)


@pytest.mark.parametrize("chunk_tokens", [16, 4])
def test_an_output_of_one_token_ends_with_its_prompt(chunk_tokens: int) -> None:
    (served,) = simulate(pair(chunk_tokens=chunk_tokens), [spec(0, 10, 1)])

    assert not served.is_split
    assert served.decode == served.prefill


@pytest.mark.parametrize("kind", [EngineKind(), Stock(64)])
def test_two_requests_share_decode_steps(kind: EngineKind) -> None:
    first, second = simulate(one(kind=kind), [spec(0, 10, 3), spec(1, 10, 2)])

    # A prompt alone; a decode with the other prompt; two decodes.
    assert first.ttft_s == pytest.approx(1.1)
    assert second.ttft_s == pytest.approx(1.1 + 1.21)
    assert first.jct_s == second.jct_s == pytest.approx(1.1 + 1.21 + 1.221)


@pytest.mark.parametrize("changes", [{"chunk_tokens": 4}, {"kind": Stock(4)}])
def test_a_long_prompt_is_computed_in_chunks(changes: dict[str, Any]) -> None:
    cost = replace(COST, context_s=1e-4)
    (served,) = simulate(one(cost=cost, **changes), [spec(0, 10, 1)])

    # A token has those before it as context: 1.5, 5.5 and 8.5 in the mean.
    assert served.ttft_s == pytest.approx((1.04 + 6e-4) + (1.04 + 22e-4) + (1.02 + 17e-4))


def test_chunks_are_on_top_of_decodes_here_and_share_a_budget_in_stock() -> None:
    specs = [spec(0, 2, 9), spec(1, 8, 1, arrival_s=0.5)]

    _, ours = simulate(one(chunk_tokens=4), specs)
    _, stock = simulate(one(kind=Stock(4)), specs)

    def mixed_s(prompt_tokens: int, decode_context: int) -> float:
        return COST.step_s(1, decode_context, prompt_tokens, 0)

    assert ours.ttft_s == pytest.approx(0.52 + mixed_s(4, 2) + mixed_s(4, 3))
    assert stock.ttft_s == pytest.approx(0.52 + mixed_s(3, 2) + mixed_s(3, 3) + mixed_s(2, 4))


@pytest.mark.parametrize(("budget", "is_one_step"), [(9, True), (8, False)])
def test_prompts_finish_in_one_step_if_the_budget_holds_them(
    budget: int, is_one_step: bool
) -> None:
    specs = [spec(0, 8, 9), spec(1, 4, 1, arrival_s=0.5), spec(2, 4, 1, arrival_s=0.5)]

    _, first, second = simulate(one(kind=Stock(budget)), specs)

    assert (first.ttft_s == second.ttft_s) is is_one_step


def test_prompts_keep_the_tbt_slo_of_decodes() -> None:
    specs = [spec(0, 4, 30), spec(1, 64, 2, arrival_s=0.5)]

    first, _ = simulate(one(tbt_slo_s=1.3, tile_tokens=1), specs)
    free, _ = simulate(one(), specs)

    assert max_itl_s(first) <= 1.3
    assert max_itl_s(free) > 1.6


def test_the_newest_request_is_preempted_when_blocks_run_out() -> None:
    specs = [spec(0, 30, 60), spec(1, 30, 60)]

    outcome = run(one(kind=Stock(64), kv_blocks=8), specs)

    first, second = outcome.served
    assert outcome.preemptions == 1
    assert (first.preemptions, second.preemptions) == (0, 1)
    # It waits for the other one's end, and its tokens are computed again.
    assert max_itl_s(second) > 10 * max_itl_s(first)


# -- two engines -------------------------------------------------------------------------


def test_a_split_request_pays_a_hand_over() -> None:
    (served,) = simulate(pair(), [spec(0, 10, 3)])

    hand_over_s = HANDOVER_S + 10 * HANDOVER_TOKEN_S
    assert (served.prefill, served.decode) == ("p", "d")
    assert served.ttft_s == pytest.approx(1.1)
    assert max_itl_s(served) == pytest.approx(hand_over_s + 1.11)
    assert served.jct_s == pytest.approx(1.1 + hand_over_s + 1.11 + 1.111)


def test_chunks_hide_all_of_the_transfer_but_the_last_chunk() -> None:
    (served,) = simulate(pair(chunk_tokens=4), [spec(0, 10, 2)])

    hand_over_s = HANDOVER_S + 2 * HANDOVER_TOKEN_S
    assert max_itl_s(served) == pytest.approx(hand_over_s + decode_s(10, 1))


def test_requests_wait_for_a_full_decode_instance() -> None:
    first, second = simulate(pair(decode=engine(kv_blocks=3)), [spec(0, 20, 20), spec(1, 20, 20)])

    end_s = 1.2 + HANDOVER_S + 20 * HANDOVER_TOKEN_S + decode_s(20, 19)
    assert first.jct_s == pytest.approx(end_s)
    assert second.ttft_s == pytest.approx(2.4)
    assert second.jct_s == pytest.approx(end_s + decode_s(20, 19))


def test_kv_stays_where_it_is_while_the_arena_is_full() -> None:
    decode = engine(kv_blocks=3, arena_tokens=20)
    specs = [spec(number, 20, 20) for number in range(4)]

    served = simulate(pair(decode=decode, chunk_tokens=20), specs)
    tight = simulate(pair(decode=decode, chunk_tokens=20, kv_blocks=3), specs)

    assert [each.ttft_s for each in served] == pytest.approx([1.2, 2.4, 3.6, 4.8])
    # One is decoded, one is in the arena, and the third has the prompt side's blocks.
    assert tight[3].ttft_s > served[0].jct_s


def test_instances_that_wait_for_room_at_each_other_compute_prompts_again() -> None:
    tight = EngineConfig(kv_blocks=140, chunk_tokens=128, arena_tokens=2500, kv_token_bytes=1000)
    config = ClusterConfig(make_instances(2, 2, 1, engine=tight), "adaptive", link=4e5)

    for seed in (4, 23, 1, 3):
        served = run(config, draw("mixed", 120, 3.0, seed=seed)).served
        assert len(served) == 120


# -- everything ----------------------------------------------------------------------------


def _settings() -> dict[str, ClusterConfig]:
    tight = EngineConfig(kv_blocks=140, chunk_tokens=128, arena_tokens=2500)
    linked = make_instances(2, 2, 1, engine=replace(tight, kv_token_bytes=1000))
    roofline = replace(tight, cost=profile("roofline:llama-3-8b:h100").cost, tbt_slo_s=0.03)
    settings = {
        "link": ClusterConfig(linked, "split", link=4e5),
        "link, not in chunks": ClusterConfig(linked, "adaptive", link=4e5, sends_chunks=False),
        "roofline": ClusterConfig(make_instances(1, 1, engine=roofline), "adaptive"),
        "split": ClusterConfig(make_instances(2, 2, 1, engine=tight), "split", seed=3),
        "whole": ClusterConfig(make_instances(1, 1, 2, engine=tight), "whole"),
        "greedy": ClusterConfig(
            make_instances(1, 1, engine=EngineConfig(kv_blocks=140, admission="greedy")), "split"
        ),
        "replicas": ClusterConfig(
            make_instances(both=2, engine=EngineConfig(kv_blocks=140, kind=Stock(128))),
            "least-in-flight",
        ),
    }
    for order in ORDERS:
        ordered = EngineConfig(kv_blocks=140, chunk_tokens=100, order=order, sched_batch=4)
        settings[order] = ClusterConfig(make_instances(2, 1, engine=ordered), "split")
        settings[f"{order} whole"] = ClusterConfig(make_instances(both=1, engine=ordered), "whole")
    return settings


@pytest.mark.parametrize("name", _settings())
@pytest.mark.parametrize(("kind", "count", "accuracy"), [("mixed", 120, 1.0), ("hphd", 40, 0.5)])
def test_every_request_is_served_token_by_token(
    name: str, kind: str, count: int, accuracy: float
) -> None:
    specs = draw(kind, count, 3.0, seed=5, accuracy=accuracy)

    outcome = run(_settings()[name], specs)

    assert [each.spec for each in outcome.served] == specs
    for each in outcome.served:
        gaps = np.concatenate(each.gap_parts)
        assert len(gaps) == each.spec.output_tokens - 1
        assert each.ttft_s > 0
        assert gaps.min() > 0
        assert each.ttft_s + gaps.sum() == pytest.approx(each.jct_s)
        assert max_itl_s(each) == gaps.max()
    assert all(0 <= part <= 1 for part in outcome.busy.values())


def test_requests_may_come_in_any_order() -> None:
    specs = draw("mixed", 60, 3.0, seed=1)
    shuffled = Random(0).sample(specs, k=len(specs))

    results = {each.spec.id: each.jct_s for each in simulate(_settings()["split"], shuffled)}

    assert results == {each.spec.id: each.jct_s for each in simulate(_settings()["split"], specs)}


# -- wrong settings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "no requests"),
        ([spec(0, 1600, 1)], "1601 tokens does not fit into the KV pool of both-0"),
    ],
)
def test_requests_that_cannot_be_served_are_an_error(specs: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(one(), specs)  # type: ignore[arg-type]


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no mode 'no'; there are split"):
        simulate(one("no"), [spec(0, 1, 1)])
