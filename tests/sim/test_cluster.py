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
    ask,
    decode_s,
    one,
    pair,
    shape,
)
from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.admission import DecodePolicy
from vllm_tetri.policy.order import PrefillPolicy
from vllm_tetri.sim.cluster import run, simulate
from vllm_tetri.sim.engine.kinds import Engine, Stock, Tetri
from vllm_tetri.sim.setting import Place, Setting, Shape, places
from vllm_tetri.sim.workload import draw
from vllm_tetri.types import InstanceId, Role

# -- one engine ------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [Tetri(), Stock(64)])
def test_a_request_alone_takes_what_its_steps_cost(engine: Engine) -> None:
    (served,) = simulate(one(engine=engine), [ask(0, 10, 3)])

    assert served.ttft_s == pytest.approx(1.1)
    assert served.jct_s == pytest.approx(1.1 + 1.11 + 1.111)
    assert served.max_itl_s == pytest.approx(1.111)
    assert not served.is_split


@pytest.mark.parametrize("engine", [Tetri(), Stock(64)])
def test_what_comes_before_the_engine_delays_everything(engine: Engine) -> None:
    (served,) = simulate(one(engine=engine, front_s=0.5), [ask(0, 10, 3)])

    assert served.waited_s == pytest.approx(0.5)
    assert served.ttft_s == pytest.approx(0.5 + 1.1)
    assert served.jct_s == pytest.approx(0.5 + 1.1 + 1.11 + 1.111)


@pytest.mark.parametrize("chunk_tokens", [16, 4])
def test_an_answer_of_one_token_ends_with_its_prompt(chunk_tokens: int) -> None:
    (served,) = simulate(pair(chunk_tokens=chunk_tokens), [ask(0, 10, 1)])

    assert not served.is_split
    assert served.decode == served.prefill


def test_an_answer_of_one_token_takes_what_its_prompt_takes() -> None:
    (served,) = simulate(pair(), [ask(0, 10, 1)])

    assert served.jct_s == served.ttft_s == pytest.approx(1.1)
    assert served.max_itl_s == 0.0


@pytest.mark.parametrize("engine", [Tetri(), Stock(64)])
def test_two_requests_share_decode_steps(engine: Engine) -> None:
    first, second = simulate(one(engine=engine), [ask(0, 10, 3), ask(1, 10, 2)])

    # A prompt alone; a decode beside the other prompt; two decodes.
    assert first.ttft_s == pytest.approx(1.1)
    assert second.ttft_s == pytest.approx(1.1 + 1.21)
    assert first.jct_s == second.jct_s == pytest.approx(1.1 + 1.21 + 1.221)


@pytest.mark.parametrize("changes", [{"chunk_tokens": 4}, {"engine": Stock(4)}])
def test_a_long_prompt_is_computed_in_chunks(changes: dict[str, Any]) -> None:
    cost = replace(COST, context_s=1e-4)
    (served,) = simulate(one(cost=cost, **changes), [ask(0, 10, 1)])

    # A token has those before it as context: 1.5, 5.5 and 8.5 in the mean.
    assert served.ttft_s == pytest.approx((1.04 + 6e-4) + (1.04 + 22e-4) + (1.02 + 17e-4))


def test_chunks_are_on_top_of_decodes_here_and_share_a_budget_in_stock() -> None:
    asks = [ask(0, 2, 9), ask(1, 8, 1, arrival_s=0.5)]

    _, ours = simulate(one(chunk_tokens=4), asks)
    _, stock = simulate(one(engine=Stock(4)), asks)

    def beside(prompt_tokens: int, decode_context: int) -> float:
        return COST.step_s(1, decode_context, prompt_tokens, 0)

    assert ours.ttft_s == pytest.approx(0.52 + beside(4, 2) + beside(4, 3))
    assert stock.ttft_s == pytest.approx(0.52 + beside(3, 2) + beside(3, 3) + beside(2, 4))


@pytest.mark.parametrize(("budget", "is_one_step"), [(9, True), (8, False)])
def test_prompts_finish_in_one_step_if_the_budget_holds_them(
    budget: int, is_one_step: bool
) -> None:
    asks = [ask(0, 8, 9), ask(1, 4, 1, arrival_s=0.5), ask(2, 4, 1, arrival_s=0.5)]

    _, first, second = simulate(one(engine=Stock(budget)), asks)

    assert (first.ttft_s == second.ttft_s) is is_one_step


def test_no_more_requests_than_tokens_are_in_a_stock_step() -> None:
    asks = [ask(number, 1, 20) for number in range(3)]

    *_, last = simulate(one(engine=Stock(2)), asks)

    assert last.ttft_s > simulate(one(engine=Stock(3)), asks)[2].ttft_s + 10


def test_short_prompts_pass_long_ones_of_their_batch() -> None:
    asks = [ask(0, 40, 1), ask(1, 60, 1, 0.1), ask(2, 5, 1, 0.2)]
    sjf = simulate(one(chunk_tokens=20, order=PrefillPolicy.SJF), asks)
    fcfs = simulate(one(chunk_tokens=20, order=PrefillPolicy.FCFS), asks)

    assert sjf[2].ttft_s < sjf[1].ttft_s
    assert fcfs[2].ttft_s > fcfs[1].ttft_s


def test_prompts_leave_decodes_their_pace() -> None:
    asks = [ask(0, 4, 30), ask(1, 64, 2, arrival_s=0.5)]

    first, _ = simulate(one(tbt_slo_s=1.3, least_tokens=1), asks)
    free, _ = simulate(one(), asks)

    assert first.max_itl_s <= 1.3
    assert free.max_itl_s > 1.6


def test_the_newest_loses_its_blocks_when_they_run_out() -> None:
    asks = [ask(0, 30, 60), ask(1, 30, 60)]

    outcome = run(one(engine=Stock(64), kv_blocks=8), asks)

    first, second = outcome.served
    assert outcome.preemptions == 1
    assert (first.preemptions, second.preemptions) == (0, 1)
    # It waits for the other one's end, and its tokens are computed again.
    assert second.max_itl_s > 10 * first.max_itl_s


# -- two engines -------------------------------------------------------------------------


def test_a_split_request_pays_a_hand_over() -> None:
    (served,) = simulate(pair(), [ask(0, 10, 3)])

    hand_over_s = HANDOVER_S + 10 * HANDOVER_TOKEN_S
    assert (served.prefill, served.decode) == ("p", "d")
    assert served.ttft_s == pytest.approx(1.1)
    assert served.max_itl_s == pytest.approx(hand_over_s + 1.11)
    assert served.jct_s == pytest.approx(1.1 + hand_over_s + 1.11 + 1.111)


def test_chunks_hide_all_of_the_transfer_but_the_last_chunk() -> None:
    (served,) = simulate(pair(chunk_tokens=4), [ask(0, 10, 2)])

    hand_over_s = HANDOVER_S + 2 * HANDOVER_TOKEN_S
    assert served.max_itl_s == pytest.approx(hand_over_s + decode_s(10, 1))


def test_a_decode_instance_that_is_full_lets_requests_wait() -> None:
    first, second = simulate(pair(decode=shape(kv_blocks=3)), [ask(0, 20, 20), ask(1, 20, 20)])

    end_s = 1.2 + HANDOVER_S + 20 * HANDOVER_TOKEN_S + decode_s(20, 19)
    assert first.jct_s == pytest.approx(end_s)
    assert second.ttft_s == pytest.approx(2.4)
    assert second.jct_s == pytest.approx(end_s + decode_s(20, 19))


def test_kv_stays_where_it_is_while_the_arena_is_full() -> None:
    decode = shape(kv_blocks=3, arena_tokens=20)
    asks = [ask(number, 20, 20) for number in range(4)]

    served = simulate(pair(decode=decode, chunk_tokens=20), asks)
    tight = simulate(pair(decode=decode, chunk_tokens=20, kv_blocks=3), asks)

    assert [each.ttft_s for each in served] == pytest.approx([1.2, 2.4, 3.6, 4.8])
    # One is decoded, one is in the arena, and the third has the prompt side's blocks.
    assert tight[3].ttft_s > served[0].jct_s


def test_handed_over_requests_are_not_held_up_by_prompts() -> None:
    asks = [ask(0, 10, 40), *(ask(number, 64, 2, 3.0 * number) for number in range(1, 8))]

    split = simulate(pair(), asks)[0]
    whole = simulate(one(), asks)[0]

    assert max(part.max() for part in split.gap_parts[1:]) < 1.4
    assert whole.max_itl_s > 1.6


# -- everything ----------------------------------------------------------------------------


def _settings() -> dict[str, Setting]:
    tight = Shape(kv_blocks=140, chunk_tokens=128, arena_tokens=2500)
    settings = {
        "split": Setting(places(2, 2, 1, shape=tight), "split", seed=3),
        "whole": Setting(places(1, 1, 2, shape=tight), "whole"),
        "greedy": Setting(
            places(1, 1, shape=Shape(kv_blocks=140, admission=DecodePolicy.GREEDY)), "split"
        ),
        "replicas": Setting(
            places(both=2, shape=Shape(kv_blocks=140, engine=Stock(128))), "least-in-flight"
        ),
        "turns": Setting(
            places(both=3, shape=Shape(kv_blocks=140, engine=Stock(2048))), "round-robin"
        ),
    }
    for order in PrefillPolicy:
        ordered = Shape(kv_blocks=140, chunk_tokens=100, order=order, sched_batch=4)
        settings[order] = Setting(places(2, 1, shape=ordered), "split")
        settings[f"{order} whole"] = Setting(places(both=1, shape=ordered), "whole")
    return settings


@pytest.mark.parametrize("name", _settings())
@pytest.mark.parametrize(("kind", "accuracy"), [("mixed", 1.0), ("hphd", 0.5)])
def test_every_request_is_served_token_by_token(name: str, kind: str, accuracy: float) -> None:
    asks = draw(kind, 120, 3.0, seed=5, accuracy=accuracy)

    outcome = run(_settings()[name], asks)

    assert [each.ask for each in outcome.served] == asks
    for each in outcome.served:
        gaps = np.concatenate(each.gap_parts)
        assert len(gaps) == each.ask.output_tokens - 1
        assert each.ttft_s > 0
        assert gaps.min() > 0
        assert each.ttft_s + gaps.sum() == pytest.approx(each.jct_s)
        assert each.max_itl_s == gaps.max()
    assert all(0 <= part <= 1 for part in outcome.busy.values())


@pytest.mark.parametrize("name", ["split", "whole", "replicas"])
def test_the_same_seed_gives_the_same_to_the_bit(name: str) -> None:
    first, second = (simulate(_settings()[name], draw("mixed", 100, 3.0, seed=1)) for _ in range(2))

    assert first == second
    for one_, other in zip(first, second, strict=True):
        assert all(map(np.array_equal, one_.gap_parts, other.gap_parts))


def test_requests_may_come_in_any_order() -> None:
    asks = draw("mixed", 60, 3.0, seed=1)
    shuffled = Random(0).sample(asks, k=len(asks))

    results = {each.ask.id: each.jct_s for each in simulate(_settings()["split"], shuffled)}

    assert results == {each.ask.id: each.jct_s for each in simulate(_settings()["split"], asks)}


# -- wrong settings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asks", "message"),
    [
        ([], "no requests"),
        ([ask(0, 1, 1), ask(0, 1, 1)], "same id"),
        ([ask(0, 1600, 1)], "1601 tokens does not fit into the KV pool of both-0"),
    ],
)
def test_requests_that_cannot_be_served_are_an_error(asks: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(one(), asks)  # type: ignore[arg-type]


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no mode 'no'; there are split"):
        simulate(one("no"), [ask(0, 1, 1)])


def test_settings_that_make_no_sense_are_errors() -> None:
    both = places(both=1)
    with pytest.raises(ConfigError, match="at least one instance"):
        Setting(())
    with pytest.raises(ConfigError, match="same name"):
        Setting((*both, *both))
    with pytest.raises(ConfigError, match="report period"):
        Setting(both, report_period_s=0)
    with pytest.raises(ConfigError, match="-1 prefill instances"):
        places(-1)
    with pytest.raises(ConfigError, match="does both"):
        Place(InstanceId("x"), Role.PREFILL, Shape(engine=Stock(1)))
    with pytest.raises(ConfigError, match="budget tokens: 0"):
        Stock(0)
    with pytest.raises(ConfigError, match="chunk tokens: 0"):
        Shape(chunk_tokens=0)
    with pytest.raises(ConfigError, match="TBT"):
        Shape(tbt_slo_s=0)
