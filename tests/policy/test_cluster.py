"""What requests cost where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import COST, Known, instance, known, serving, view
from vllm_tetri.policy.adaptive import decode_harm_s, hand_over_s, prefill_harm_s, tpot_s, ttft_s
from vllm_tetri.policy.cluster import InstanceRow, Need
from vllm_tetri.policy.step_cost import GUESS, context_sum
from vllm_tetri.types import InstanceId, InstanceView, StepCoefficients

NOW = 100.0
PERIOD_S = 0.1
NEED = Need(600, 80)


def site(name: str = "a", *others: InstanceView, **load: Any) -> InstanceRow:
    return known(serving(name, **load), *others).by_id[InstanceId(name)]


# -- who is there ---------------------------------------------------------------------


def test_only_ready_instances_are_sites_under_every_name_of_their_model() -> None:
    two = serving("b", "decode")
    two = replace(two, info=replace(two.info, models=("tiny", "alias")))
    sites = known(serving("a"), two, *(serving(s, state=s) for s in ("silent", "draining")))
    assert {name: [s.id for s in some] for name, some in sites.by_model.items()} == {
        "tiny": ["a", "b"],
        "alias": ["b"],
    }
    assert set(sites.by_id) == {"a", "b"}


def test_keys_are_equal_where_kv_may_travel() -> None:
    by_id = known(serving("a"), serving("b", layout="x"), serving("c")).by_id
    keys = {name: by_id[InstanceId(name)].key for name in "abc"}
    assert keys["a"] == keys["c"] != keys["b"]


def test_one_without_steps_is_priced_like_another_of_its_identity_or_guessed() -> None:
    new, foreign = (serving(name, cost=StepCoefficients()) for name in ("new", "foreign"))
    foreign = replace(foreign, info=replace(foreign.info, identity={"layout": "other"}))
    by_id = known(new, serving("old"), foreign).by_id
    assert by_id[InstanceId("new")].cost == COST
    assert by_id[InstanceId("foreign")].cost == GUESS
    assert GUESS.confidence == 0


def test_room_is_what_is_neither_used_nor_reserved() -> None:
    roomy = instance("a", blocks_total=100, blocks_used=30, reserved_blocks=20)
    assert known(roomy).by_id[InstanceId("a")].free_tokens == 50 * roomy.info.block_size


# -- prompts --------------------------------------------------------------------------


def test_a_first_token_waits_for_the_queue_and_is_computed_in_chunks() -> None:
    alone_s = 600 * (COST.prompt_s + 300 * COST.context_s)
    assert ttft_s(site(), 600) == pytest.approx(alone_s + 2 * COST.base_s)
    # What else waits there, such as decodes for their KV, tells nothing of prompts.
    queued = site(queued_tokens=1000, queued_context=context_sum(1000, 3000), waiting=9)
    queue_s = 1000 * (COST.prompt_s + 2500 * COST.context_s)
    assert ttft_s(queued, 600) == pytest.approx(queue_s + alone_s + 4 * COST.base_s)


@given(queued=st.integers(0, 100_000), cached=st.integers(0, 5_000))
def test_what_is_cached_never_makes_a_first_token_later(queued: int, cached: int) -> None:
    one = site(queued_tokens=queued)
    assert ttft_s(one, 6_000, cached) <= ttft_s(one, 6_000)


def test_chunks_share_their_steps_with_the_decodes_there() -> None:
    decode_s = COST.request_s + 300 * COST.token_s
    # Two chunks, and what is left of the step that runs.
    extra_s = 2.5 * (COST.base_s + 10 * decode_s) - 2 * COST.base_s
    assert ttft_s(site(decodes=10), 600) - ttft_s(site(), 600) == pytest.approx(extra_s)


def test_a_first_token_takes_the_chunks_that_one_more_prompt_would_get_now() -> None:
    """Not those of steps without decodes."""
    decode_s = COST.request_s + 300 * COST.token_s
    few = ttft_s(site(decodes=10, next_chunk_tokens=100), 600)
    assert few - ttft_s(site(decodes=10), 600) == pytest.approx(4 * (COST.base_s + 10 * decode_s))


def test_a_prompt_harms_nobody_where_nobody_decodes() -> None:
    assert prefill_harm_s(site(queued_tokens=5000), 10_000) == 0


def test_all_who_decode_wait_for_a_prompt_unless_they_end_before() -> None:
    long = {"left_tokens": 1000}
    one, ten = site(decodes=1, **long), site(decodes=10, **long)
    assert prefill_harm_s(ten, 600) == pytest.approx(10 * prefill_harm_s(one, 600))
    assert prefill_harm_s(one, 600) == pytest.approx(600 * one.token_s(600))
    ending = site(decodes=10, left_tokens=5)  # 20 chunks
    assert prefill_harm_s(ending, 10_240) == pytest.approx(
        5 / 20 * 10 * 10_240 * one.token_s(10_240)
    )


# -- answers --------------------------------------------------------------------------


def test_a_token_takes_a_step_with_all_who_decode() -> None:
    own_s = COST.request_s + 640 * COST.token_s
    assert tpot_s(site(), 640) == pytest.approx(COST.base_s + own_s)
    others_s = 9 * (COST.request_s + 300 * COST.token_s)
    assert tpot_s(site(decodes=9), 640) == pytest.approx(COST.base_s + others_s + own_s)


def test_one_more_answer_harms_others_as_long_as_both_last() -> None:
    own_s = COST.request_s + 640 * COST.token_s
    assert decode_harm_s(site(), NEED) == 0
    assert decode_harm_s(site(decodes=7, left_tokens=30), NEED) == pytest.approx(7 * 30 * own_s)
    assert decode_harm_s(site(decodes=7, left_tokens=300), NEED) == pytest.approx(7 * 80 * own_s)


def test_after_a_prompt_only_its_last_chunk_is_still_to_travel() -> None:
    each = site(handover_s=0.01, handover_token_s=1e-4)
    assert hand_over_s(each, 100) == pytest.approx(0.02)
    assert hand_over_s(each, 512) == hand_over_s(each, 50_000) == pytest.approx(0.0612)


def shares(prompt_tokens: list[int], *, seqs: list[int] | None = None) -> list[float]:
    """Of an instance whose reports, one a period, say that it has computed so many."""
    sites, found = Known(), []
    for index, done in enumerate(prompt_tokens):
        seq = index if seqs is None else seqs[index]
        busy = serving("a", cost=TENTH_MS, seq=seq, prompt_tokens_done=done)
        sites.renew(view(busy), NOW + index * PERIOD_S)
        found.append(sites.by_id[InstanceId("a")].prompt_share)
    return found


TENTH_MS = replace(COST, prompt_s=1e-4)  # so a period has 1000 tokens


def test_the_part_of_its_time_that_prompts_take_follows_from_its_reports() -> None:
    found = shares([500 * n for n in range(40)] + [19_500] * 20)
    assert found[0] == 0  # of one report nothing follows
    assert found[1:40] == pytest.approx([0.5] * 39)
    assert found[40:] == sorted(found[40:], reverse=True)
    assert 0 < found[-1] < 0.25


def test_prompts_beside_an_answer_stretch_its_steps() -> None:
    alone = site(decodes=3, cost=TENTH_MS)
    sites = Known()
    for seq in range(2):
        busy = serving("a", decodes=3, cost=TENTH_MS, seq=seq, prompt_tokens_done=seq * 500)
        sites.renew(view(busy), NOW + seq * PERIOD_S)
    beside = sites.by_id[InstanceId("a")]
    assert tpot_s(beside, 640) == pytest.approx(2 * tpot_s(alone, 640))
    assert decode_harm_s(beside, NEED) == pytest.approx(2 * decode_harm_s(alone, NEED))


def test_an_instance_that_computes_nothing_but_prompts_still_has_a_price() -> None:
    assert shares([100_000 * n for n in range(60)])[-1] == 0.9


def test_the_same_report_seen_again_says_nothing_new() -> None:
    found = shares([0, 300, 300, 300, 300], seqs=[1, 2, 2, 2, 2])
    assert found[1:] == pytest.approx([0.3] * 4)


def test_an_instance_that_began_anew_is_measured_anew() -> None:
    done = [900 * n for n in range(10)]
    assert shares([*done, 10], seqs=[*range(10), 1])[-1] == 0
    assert shares([*done, 10])[-1] == 0


# -- sites that share a device --------------------------------------------------------


def test_instances_on_a_device_slow_each_other_down() -> None:
    busy = serving("b", device="x", decodes=6)
    alone, beside = site("a", device="x"), site("a", busy, device="x")
    assert (alone.others, alone.busy_others) == (0, 0)
    assert site("a", serving("b", device="x", queued_tokens=1), device="x").busy_others == 1
    assert (beside.others, beside.busy_others) == (6, 1)
    assert ttft_s(beside, 600) == pytest.approx(2 * ttft_s(alone, 600))
    assert tpot_s(beside, 600) == pytest.approx(2 * tpot_s(alone, 600))
    assert prefill_harm_s(beside, 600) == pytest.approx(6 * 600 * alone.token_s(600))
    # A step of its own for what would have shared theirs.
    own_s = COST.base_s + COST.request_s + 640 * COST.token_s
    assert decode_harm_s(beside, NEED) == pytest.approx(6 * 80 * own_s)


@pytest.mark.parametrize(("one", "other"), [("x", "y"), ("", "")])
def test_instances_with_devices_of_their_own_do_not(one: str, other: str) -> None:
    beside = site("a", serving("b", device=other, decodes=6), device=one)
    assert (beside.others, beside.busy_others) == (0, 0)


def test_what_is_sent_to_one_is_seen_by_the_others_on_its_device_at_once() -> None:
    sites = known(serving("a", device="x"), serving("b", device="x"), serving("c"))
    sites.send(InstanceId("a"), InstanceId("a"), NEED, NOW)
    b, c = (sites.by_id[InstanceId(name)] for name in "bc")
    assert (b.others, b.busy_others) == (1, 1)
    assert (c.others, c.busy_others) == (0, 0)
