"""What tells the engines of other systems apart. Times are worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sim.builders import COST, ask, decode_s, one, pair, shape
from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.admission import DecodePolicy
from vllm_tetri.policy.order import PrefillPolicy
from vllm_tetri.sim.cluster import run, simulate
from vllm_tetri.sim.engine.kinds import Engine, Orca, PromptsFirst, Static, Stock, Unchunked
from vllm_tetri.sim.log import Decision, Step
from vllm_tetri.sim.setting import Setting, Shape, places
from vllm_tetri.sim.workload import Ask

WINDOW = 64
WHOLE: dict[str, Any] = {
    "engine": Unchunked(),
    "order": PrefillPolicy.FCFS,
    "admission": DecodePolicy.GREEDY,
}


def alone(**changes: Any) -> Setting:
    """A single instance, and nobody who decides."""
    return one("round-robin", **changes)


def steps(setting: Setting, asks: list[Ask]) -> list[Step]:
    told: list[Decision] = []
    run(setting, asks, log=told.append)
    return [each for each in told if isinstance(each, Step)]


@pytest.mark.parametrize(
    "engine", [Static(WINDOW), Orca(WINDOW), PromptsFirst(), Unchunked(), Stock(64)]
)
def test_a_request_alone_is_the_same_everywhere(engine: Engine) -> None:
    (served,) = simulate(alone(engine=engine), [ask(0, 10, 3)])

    assert served.ttft_s == pytest.approx(1.1)
    assert served.jct_s == pytest.approx(1.1 + decode_s(10, 2))


# -- static batching -----------------------------------------------------------------------


def test_a_late_request_waits_for_the_whole_batch() -> None:
    asks = [ask(0, 10, 5), ask(1, 10, 2, arrival_s=0.5)]

    first, late = simulate(alone(engine=Static(WINDOW)), asks)

    assert first.jct_s == pytest.approx(1.1 + decode_s(10, 4))
    assert late.ttft_s == pytest.approx(first.jct_s - 0.5 + 1.1)


def test_a_static_batch_is_padded_and_keeps_those_that_have_ended() -> None:
    asks = [ask(0, 10, 1), ask(1, 10, 2, 0.1), ask(2, 30, 5, 0.2), ask(3, 10, 1, 0.3)]

    outcome = run(alone(engine=Static(WINDOW), max_requests=2), asks)

    _, short, longest, later = outcome.served
    prompts_s = 1 + 2 * 30 * COST.prompt_s
    answers_s = sum(COST.step_s(2, 2 * (30 + step), 0, 0) for step in range(4))
    assert short.ttft_s == pytest.approx(1.1 + prompts_s - 0.1)
    assert longest.jct_s == pytest.approx(1.1 + prompts_s + answers_s - 0.2)
    assert later.ttft_s == pytest.approx(1.1 + prompts_s + answers_s + 1.1 - 0.3)


def test_blocks_of_those_that_have_ended_come_back_with_their_batch() -> None:
    asks = [ask(0, 10, 1), *(ask(number, 10, 3 * number, 0.1 * number) for number in range(1, 9))]

    # Four at a time have memory; that nobody keeps any is asserted at the end of every run.
    found = steps(alone(engine=Static(WINDOW), kv_blocks=16), asks)

    begun = [len(each.prompts) for each in found if each.prompts]
    assert begun == [1, 4, 4]


# -- ORCA -------------------------------------------------------------------------------------


def test_reservations_bound_the_batch() -> None:
    asks = [ask(number, 10, 20, 0.1 * number) for number in range(3)]

    orca = simulate(alone(engine=Orca(WINDOW), kv_blocks=8), asks)
    paged = simulate(alone(engine=Stock(64), kv_blocks=8), asks)

    end_s = min(each.ask.arrival_s + each.jct_s for each in orca[:2])
    assert orca[2].ask.arrival_s + orca[2].ttft_s > end_s
    assert paged[2].ttft_s < 4


def test_a_long_prompt_stalls_decodes_for_its_whole_length() -> None:
    asks = [ask(0, 10, 20), ask(1, 400, 2, arrival_s=5.0)]

    stalled, _ = simulate(alone(engine=Orca(512)), asks)
    calm, _ = simulate(alone(engine=Stock(64)), asks)

    assert stalled.max_itl_s == pytest.approx(COST.step_s(1, 14, 400, 0))
    assert calm.max_itl_s < 2


def test_a_whole_prompt_joins_the_decodes_of_a_step() -> None:
    asks = [ask(0, 10, 9), ask(1, 100, 2, arrival_s=0.5)]

    found = steps(alone(engine=Orca(128)), asks)

    assert [(each.prompts, each.decodes) for each in found[:3]] == [
        (((0, 10),), ()),
        (((1, 100),), (0,)),
        ((), (0, 1)),
    ]


# -- vLLM of 2023 -----------------------------------------------------------------------------


def test_decodes_wait_while_prompts_are_computed() -> None:
    first, second = simulate(alone(engine=PromptsFirst()), [ask(0, 10, 3), ask(1, 10, 2, 0.5)])

    both_s, last_s = COST.step_s(2, 20, 0, 0), COST.step_s(1, 11, 0, 0)
    assert second.ttft_s == pytest.approx(1.1 + 1.1 - 0.5)
    assert second.jct_s == pytest.approx(1.1 + 1.1 + both_s - 0.5)
    assert first.max_itl_s == pytest.approx(1.1 + both_s)
    assert first.jct_s == pytest.approx(1.1 + 1.1 + both_s + last_s)


def test_no_step_mixes_prompts_and_decodes() -> None:
    asks = [ask(number, 20 + number, 8, 1.5 * number) for number in range(12)]

    found = steps(alone(engine=PromptsFirst()), asks)

    assert not any(each.prompts and each.decodes for each in found)
    assert any(each.prompts and each.decodes for each in steps(alone(engine=Orca(WINDOW)), asks))


@pytest.mark.parametrize(
    ("engine", "sizes"),
    [
        (PromptsFirst(), [1, 16, 4]),
        (PromptsFirst(most_prompts=9), [1, 9, 9, 2]),
        (PromptsFirst(most_tokens=120), [1, 12, 8]),
        (PromptsFirst(most_tokens=5), [1] * 21),
    ],
)
def test_a_step_holds_so_many_prompts_and_tokens(engine: Engine, sizes: list[int]) -> None:
    asks = [ask(0, 10, 1), *(ask(number, 10, 1, 0.5) for number in range(1, 21))]

    found = steps(alone(engine=engine), asks)

    assert [len(each.prompts) for each in found] == sizes


def test_who_loses_its_blocks_between_prompts_has_all_its_gaps() -> None:
    asks = [ask(0, 30, 60), ask(1, 30, 60), ask(2, 5, 40, 20.0), ask(3, 5, 9, 30.0)]

    outcome = run(alone(engine=PromptsFirst(), kv_blocks=8), asks)

    assert outcome.preemptions > 0
    for each in outcome.served:
        gaps = [gap for part in each.gap_parts for gap in part]
        assert len(gaps) == each.ask.output_tokens - 1
        assert each.ttft_s + sum(gaps) == pytest.approx(each.jct_s)


# -- whole prompts with hand-over -------------------------------------------------------------


def test_prompts_share_a_step_only_as_far_as_they_fit_whole() -> None:
    asks = [ask(0, 10, 1), ask(1, 12, 1, 0.1), ask(2, 8, 1, 0.2), ask(3, 50, 1, 0.3)]

    found = steps(pair(chunk_tokens=20, **WHOLE), [*asks, ask(4, 5, 1, 0.4)])

    assert [each.prompts for each in found] == [
        ((0, 10),),
        ((1, 12), (2, 8)),
        ((3, 50),),
        ((4, 5),),
    ]


def test_a_prompt_takes_the_place_of_the_newest_decode_but_not_for_ever() -> None:
    asks = [ask(0, 30, 60), ask(1, 30, 60, 0.1)]
    asks += [ask(2 + number, 50, 2, 50 + 6.0 * number) for number in range(4)]

    ours = run(alone(kv_blocks=12, chunk_tokens=64, **WHOLE), asks)
    stock = run(alone(engine=Stock(64), kv_blocks=12), asks)

    oldest, newest, *later = ours.served
    assert later[0].ttft_s < 5 < stock.served[2].ttft_s
    assert (oldest.preemptions, newest.preemptions) == (0, 2)
    assert [each.ttft_s > 8 for each in later] == [False, False, True, True]


# -- values -----------------------------------------------------------------------------------


def test_engines_that_make_no_sense_are_errors() -> None:
    with pytest.raises(ConfigError, match="most prompts: 0 must be at least 1"):
        PromptsFirst(most_prompts=0)
    with pytest.raises(ConfigError, match="window tokens: -1"):
        Orca(-1)
    with pytest.raises(ConfigError, match="window of 2048 tokens does not fit into a KV pool of 8"):
        Shape(engine=Static(), kv_blocks=8)
    with pytest.raises(ConfigError, match="does both, not prefill"):
        places(prefill=1, shape=shape(engine=Orca(WINDOW)))


def test_a_request_longer_than_the_window_is_an_error() -> None:
    with pytest.raises(ConfigError, match="65 tokens is longer than the window of both-0: 64"):
        simulate(alone(engine=Orca(WINDOW)), [ask(0, 60, 5)])
