"""How many prompt tokens a step computes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tetri.policy.step_tokens import (
    KNEE_PART,
    StepSizes,
    bounded_tokens,
    equal_part,
    knee_tokens,
    slack_tokens,
)
from vllm_tetri.types import StepCoefficients

costs = st.builds(
    StepCoefficients,
    st.floats(1e-4, 0.1), st.floats(1e-6, 1e-3), st.floats(0, 1e-5),
    st.floats(1e-6, 2e-3), st.floats(0, 1e-6),
)  # fmt: skip
counts = st.integers(1, 1000)
contexts = st.integers(0, 100_000)
CALM_S = 0.2
CPU = StepCoefficients(0.0095, 0.00038, 1.7e-6, 0.00031, 2e-7)
GPU = StepCoefficients(0.008, 2e-5, 4e-8, 2.5e-5, 3e-9)


def prompt_s(cost: StepCoefficients, tokens: int, context: int) -> float:
    return tokens * (cost.prompt_s + (context + tokens / 2) * cost.context_s)


@given(costs, st.floats(0, 10), contexts)
def test_what_fits_is_the_most_that_fits(
    cost: StepCoefficients, left_s: float, context: int
) -> None:
    tokens = bounded_tokens(cost, left_s, context)
    assert prompt_s(cost, tokens, context) <= left_s * (1 + 1e-6) + 1e-9
    assert prompt_s(cost, tokens + 1, context) >= left_s * (1 - 1e-6)


@given(costs, counts, contexts, counts, contexts)
def test_a_pause_is_worth_it(
    cost: StepCoefficients, num_decodes: int, decode_context: int, num_prompts: int, context: int
) -> None:
    """Its bounds, for any step: the prompts take at least as long as the rest of it, and at most
    √(F·(F + W·τ/D)): a pause cannot grow but with the prompts that wait for each output."""
    tokens = slack_tokens(
        cost, calm_s=CALM_S, num_decodes=num_decodes, decode_context=decode_context,
        num_prompts=num_prompts, prompt_context=context,
    )  # fmt: skip
    fixed_s = cost.step_s(num_decodes, decode_context, 0, 0)
    spent_s = prompt_s(cost, tokens, context)
    assert prompt_s(cost, tokens + 1, context) >= fixed_s * (1 - 1e-6)
    longest_s = (fixed_s * (fixed_s + num_prompts * CALM_S / num_decodes)) ** 0.5
    assert spent_s <= longest_s * (1 + 1e-6)


@given(costs, counts, contexts, counts, contexts)
def test_more_prompts_never_get_less(
    cost: StepCoefficients, num_decodes: int, decode_context: int, num_prompts: int, context: int
) -> None:
    tokens, more_tokens = (
        slack_tokens(
            cost, calm_s=CALM_S, num_decodes=num_decodes, decode_context=decode_context,
            num_prompts=prompts, prompt_context=context,
        )
        for prompts in (num_prompts, num_prompts + 1)
    )  # fmt: skip
    assert tokens <= more_tokens


@pytest.mark.parametrize("cost", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("num_decodes", [1, 8, 64])
@pytest.mark.parametrize("num_prompts", [1, 4, 32])
def test_no_other_chunk_costs_less_of_waiting_and_pauses(
    cost: StepCoefficients, num_decodes: int, num_prompts: int
) -> None:
    """The burden is what W prompts wait for the chunks' own costs, and what pauses cost."""
    fixed_s, queued_tokens = cost.step_s(num_decodes, num_decodes * 500, 0, 0), 100_000

    def burden_s(tokens: float) -> float:
        chunks, step_s = queued_tokens / tokens, fixed_s + tokens * cost.prompt_s
        return num_prompts * chunks * fixed_s + num_decodes * chunks * step_s**2 / CALM_S

    flat = StepCoefficients(cost.base_s, cost.request_s, cost.token_s, cost.prompt_s)
    tokens = slack_tokens(
        flat, calm_s=CALM_S, num_decodes=num_decodes, decode_context=num_decodes * 500,
        num_prompts=num_prompts, prompt_context=0,
    )  # fmt: skip
    others = [tokens * factor for factor in (0.5, 0.8, 0.9, 1.1, 1.25, 2)]
    assert burden_s(tokens) < min(map(burden_s, others))


@given(st.integers(1, 2000), st.integers(0, 20_000))
def test_no_other_number_of_equal_chunks_costs_less(chunk_tokens: int, prompt_tokens: int) -> None:
    part = equal_part(chunk_tokens, prompt_tokens, 20_000)
    if prompt_tokens <= chunk_tokens:
        assert part == chunk_tokens
        return
    ratio, parts = prompt_tokens / chunk_tokens, -(-prompt_tokens // part)
    assert part <= min(prompt_tokens, 2**0.5 * chunk_tokens + 1)
    assert parts * part - prompt_tokens < parts, "none is shorter by more than a token each"

    def burden(count: int) -> float:
        return count + ratio * ratio / count

    wanted = min(range(1, int(ratio) + 3), key=burden)
    assert -(-prompt_tokens // wanted) == part


def test_a_prompt_that_is_little_longer_than_a_chunk_is_computed_in_one_step() -> None:
    sizes = StepSizes(None, None, most_tokens=2048, tile_tokens=16)
    asked = {"num_decodes": 16, "decode_tokens": 16, "decode_context": 99, "num_prompts": 1}
    usual = sizes.beside(CPU, **asked, prompt_context=0) - 16
    tokens = [
        sizes.beside(CPU, **asked, prompt_context=0, first_tokens=prompt) - 16
        for prompt in (usual * 5 // 4, usual * 2)
    ]
    assert usual * 5 // 4 <= tokens[0]
    assert tokens[1] < usual * 2


def test_no_part_is_longer_than_what_a_step_may_have() -> None:
    sizes = StepSizes(None, None, most_tokens=512, tile_tokens=16)
    asked = {"num_decodes": 1, "decode_tokens": 1, "decode_context": 99, "num_prompts": 500}
    assert sizes.beside(CPU, **asked, prompt_context=0) == 512
    assert sizes.beside(CPU, **asked, prompt_context=0, first_tokens=600) == 304


@pytest.mark.parametrize(("cost", "low", "high"), [(CPU, 240, 290), (GPU, 2300, 2900)])
def test_alone_a_chunk_saturates_the_device(cost: StepCoefficients, low: int, high: int) -> None:
    tokens = knee_tokens(cost)
    assert low <= tokens <= high
    speed = tokens / (cost.base_s + prompt_s(cost, tokens, 0))
    assert speed * cost.prompt_s <= KNEE_PART


@given(costs, counts, contexts, counts, contexts, st.none() | st.floats(1e-4, 1.0))
def test_sized_steps_are_whole_tiles_with_room_for_a_prompt(
    cost: StepCoefficients,
    num_decodes: int,
    decode_context: int,
    num_prompts: int,
    context: int,
    slo_s: float | None,
) -> None:
    sizes = StepSizes(None, slo_s, most_tokens=2048, tile_tokens=128)
    tokens = sizes.beside(
        cost, num_decodes=num_decodes, decode_tokens=num_decodes, decode_context=decode_context,
        num_prompts=num_prompts, prompt_context=context,
    )  # fmt: skip
    assert num_decodes + 128 <= tokens <= 2048
    assert tokens % 128 == 0
    if slo_s is not None and tokens > num_decodes + 2 * 128:
        left_s = slo_s - cost.step_s(num_decodes, decode_context, 0, 0)
        assert prompt_s(cost, tokens - num_decodes, context) <= left_s * (1 + 1e-6)
    assert 128 <= sizes.alone(cost) <= 2048


def test_a_given_chunk_is_taken_in_every_step() -> None:
    sizes = StepSizes(300, None, most_tokens=2048, tile_tokens=128)
    tokens = sizes.beside(
        CPU, num_decodes=4, decode_tokens=4, decode_context=99, num_prompts=1, prompt_context=0
    )
    assert (sizes.alone(CPU), tokens) == (300, 304)
    for decodes in (0, 4):
        asked = {"num_decodes": decodes, "decode_context": 99, "num_prompts": 7}
        assert sizes.next_chunk(CPU, **asked) == 300
    asked = {"num_decodes": 2000, "decode_context": 99, "num_prompts": 7}
    assert sizes.next_chunk(CPU, **asked) == 48, "vLLM's budget is never exceeded"


@given(costs, counts, contexts, st.integers(0, 100))
def test_one_more_prompt_gets_no_less_than_the_present_ones_and_fits(
    cost: StepCoefficients, num_decodes: int, decode_context: int, num_prompts: int
) -> None:
    sizes = StepSizes(None, None, most_tokens=2048, tile_tokens=16)
    asked = {"num_decodes": num_decodes, "decode_context": decode_context}
    chunk_tokens = sizes.next_chunk(cost, **asked, num_prompts=num_prompts)
    now = sizes.beside(
        cost, **asked, decode_tokens=num_decodes, num_prompts=num_prompts, prompt_context=0
    )
    assert min(now, 2048) <= num_decodes + chunk_tokens <= max(2048, num_decodes + 1)
    assert sizes.next_chunk(cost, num_decodes=0, decode_context=0, num_prompts=9) == sizes.alone(
        cost
    )
