"""What steps and hand-overs cost, learnt from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import times
from vllm_tetri.policy.step_cost import GUESS, HandoverFit, StepFit
from vllm_tetri.types import StepCoefficients

# Slower than the prior, and not in its proportions.
ENGINE = StepCoefficients(
    base_s=0.02, request_s=0.002, token_s=4e-6, prompt_s=0.0005, context_s=6e-7
)
CHUNK = 256
Step = tuple[int, int, int, float]  # decodes, their context, prompt tokens, tokens before each


def teach(fit: StepFit, steps: Iterable[Step], engine: StepCoefficients, noise: float = 0) -> None:
    rng = Random(1)
    for step in steps:
        fit.learn(*step, engine.step_s(*step) * (1 + noise * rng.uniform(-1, 1)))
        fit.refresh()


def learnt(steps: Iterable[Step], engine: StepCoefficients = ENGINE, noise: float = 0) -> StepFit:
    fit = StepFit()
    teach(fit, steps, engine, noise)
    return fit


def decodes(count: int, seed: int = 2) -> list[Step]:
    """Of batches and contexts of all sizes."""
    rng = Random(seed)
    sizes = [rng.randrange(1, 41) for _ in range(count)]
    return [(size, size * rng.randrange(20, 1500), 0, 0.0) for size in sizes]


def prompts(count: int, num_decodes: int = 0, seed: int = 3) -> list[Step]:
    """Chunks of prompts, some behind long contexts."""
    rng = Random(seed)
    return [
        (num_decodes, num_decodes * 300, rng.randrange(16, CHUNK + 1), float(rng.randrange(2000)))
        for _ in range(count)
    ]


def test_nothing_is_known_before_the_first_step() -> None:
    fit = StepFit()
    assert fit.refresh() == fit.cost == StepCoefficients()


def test_the_first_step_is_known_at_once() -> None:
    fit = StepFit()
    fit.learn(0, 0, CHUNK, CHUNK / 2, 0.2)
    assert fit.cost.step_s(0, 0, CHUNK, CHUNK / 2) < 0.2 / 0.9


def test_steps_of_all_sizes_tell_every_coefficient_through_noise() -> None:
    steps = [*decodes(400), *prompts(400), *prompts(100, num_decodes=8)]
    Random(4).shuffle(steps)
    cost = learnt(steps, noise=0.1).cost
    assert astuple(cost)[:5] == pytest.approx(astuple(ENGINE)[:5], rel=0.2)


def test_what_was_done_is_counted() -> None:
    fit = learnt([(3, 30, 0, 0.0), (2, 20, 50, 1.0), (0, 0, 7, 1.0)])
    assert (fit.output_tokens_done, fit.prompt_tokens_done) == (5, 57)


@pytest.mark.parametrize(
    "step", [(1, 50, 0, 0.0), (8, 3000, 0, 0.0), (64, 64 * 1024, 0, 0.0), (0, 0, CHUNK, 128.0)]
)
def test_steps_of_one_size_tell_their_own_time(step: Step) -> None:
    cost = learnt([step] * 50).cost
    assert cost.step_s(*step) == pytest.approx(ENGINE.step_s(*step), rel=0.02)


def test_what_steps_do_not_tell_is_in_usual_proportions() -> None:
    cost = learnt([(1, 50, 0, 0.0)] * 50, times(GUESS, 10)).cost
    assert cost.prompt_s == pytest.approx(10 * GUESS.prompt_s, rel=0.1)
    assert cost.context_s == pytest.approx(10 * GUESS.context_s, rel=0.1)


def test_a_slope_outlives_thousands_of_steps_that_tell_none() -> None:
    known = learnt(decodes(400))
    request_s = known.cost.request_s
    teach(known, [(30, 30 * 400, 0, 0.0)] * 3000, ENGINE)
    assert request_s == pytest.approx(ENGINE.request_s, rel=0.05)
    assert known.cost.request_s == pytest.approx(ENGINE.request_s, rel=0.25)
    assert known.cost.step_s(30, 30 * 400, 0, 0) == pytest.approx(
        ENGINE.step_s(30, 30 * 400, 0, 0), rel=0.01
    )


def test_a_gpu_whose_decodes_all_read_long_contexts_keeps_its_base() -> None:
    """A 70B model on four H100s: what context costs is a hundred times its part on a CPU core."""
    engine = StepCoefficients(
        base_s=0.0176, request_s=2e-5, token_s=7e-8, prompt_s=6e-5, context_s=2e-9
    )
    rng = Random(4)
    sizes = [max(1, round(rng.gauss(64, 16))) for _ in range(3000)]
    steps = [(size, round(size * 2000 * rng.uniform(0.9, 1.1)), 0, 0.0) for size in sizes]
    cost = learnt(steps, engine, noise=0.02).cost
    for step in ((1, 2000, 0, 0.0), (128, 128 * 2000, 0, 0.0)):
        assert cost.step_s(*step) == pytest.approx(engine.step_s(*step), rel=0.2)


def test_hours_of_decodes_do_not_change_what_a_prompt_costs() -> None:
    fit = learnt([*decodes(200), *prompts(200)])
    before_s = fit.cost.prompt_s
    teach(fit, decodes(5000, seed=5), ENGINE)
    assert fit.cost.prompt_s == pytest.approx(before_s, rel=0.02)
    assert fit.cost.prompt_s == pytest.approx(ENGINE.prompt_s, rel=0.1)


@pytest.mark.parametrize("factor", [0.02, 0.1, 3.0, 50.0])
def test_an_engine_that_is_many_times_slower_or_quicker_from_now_on_is_believed(
    factor: float,
) -> None:
    fit = learnt(prompts(100))
    slower = times(ENGINE, factor)
    teach(fit, prompts(200, seed=6), slower)
    expected_s = slower.step_s(0, 0, CHUNK, 0)
    assert fit.cost.step_s(0, 0, CHUNK, 0) == pytest.approx(expected_s, rel=0.1)


@pytest.mark.parametrize("factor", [1000.0, 0.001])
def test_one_step_far_off_says_little(factor: float) -> None:
    fit = learnt(decodes(200))
    step = (20, 20 * 400, 0, 0.0)
    before_s = fit.cost.step_s(*step)
    fit.learn(*step, ENGINE.step_s(*step) * factor)
    fit.refresh()
    assert fit.cost.step_s(*step) == pytest.approx(before_s, rel=0.1)


@pytest.mark.parametrize("factor", [10.0, 50.0])
def test_the_step_at_which_a_change_of_speed_is_believed_counts_as_others(factor: float) -> None:
    fit, changed = learnt(decodes(200)), times(ENGINE, factor)
    others = decodes(100, seed=9)
    teach(fit, others[:7], changed)
    teach(fit, others[7:8], times(changed, 3))
    teach(fit, others[8:], changed)
    step = (20, 20 * 400, 0, 0.0)
    assert fit.cost.step_s(*step) == pytest.approx(changed.step_s(*step), rel=0.1)


@pytest.mark.parametrize("step", [(0, 0, 0, 0.0, 1.0), (4, 40, 0, 0.0, 0.0), (4, 40, 0, 0.0, -1.0)])
def test_steps_that_computed_nothing_or_took_no_time_teach_nothing(
    step: tuple[int, int, int, float, float],
) -> None:
    fit = StepFit()
    fit.learn(*step)
    assert fit.refresh() == StepCoefficients()


def test_confidence_grows_with_steps() -> None:
    found = [learnt(decodes(count), noise=0.02).cost.confidence for count in (1, 10, 100, 1000)]
    assert found == sorted(found)
    assert 0 < found[0] < 0.1
    assert 0.85 < found[-1] < 1


def test_confidence_falls_while_the_engine_is_not_as_it_was_and_comes_back() -> None:
    fit = learnt(decodes(500))
    before = fit.cost.confidence
    slower = times(ENGINE, 3)
    lowest = before
    for step in decodes(3000, seed=7):
        teach(fit, [step], slower)
        lowest = min(lowest, fit.cost.confidence)
    assert lowest < before - 0.2
    assert fit.cost.confidence > before - 0.05


def test_an_engine_that_cannot_be_foretold_is_never_known() -> None:
    fit, rng = StepFit(), Random(8)
    for step in decodes(1000):
        fit.learn(*step, ENGINE.step_s(*step) * rng.choice([0.3, 3.0]))
        fit.refresh()
    assert fit.cost.confidence < 0.6


@given(
    st.lists(
        st.tuples(
            st.integers(0, 500),
            st.integers(0, 500_000),
            st.integers(0, 20_000),
            st.floats(0, 100_000),
            st.floats(1e-6, 1e3),
        ),
        max_size=60,
    )
)
def test_whatever_steps_take_no_coefficient_is_negative(
    steps: list[tuple[int, int, int, float, float]],
) -> None:
    fit = StepFit()
    for step in steps:
        fit.learn(*step)
        cost = fit.refresh()
        assert all(0 <= each < float("inf") for each in astuple(cost))
        assert 0 <= cost.confidence < 1


# -- hand-overs ----


BASE_S, TOKEN_S = 0.02, 5e-5


def handed_over(lengths: list[int], *, noise: float = 0.0, seed: int = 1) -> HandoverFit:
    fit, rng = HandoverFit(), Random(seed)
    for tokens in lengths:
        fit.learn(tokens, (BASE_S + tokens * TOKEN_S) * (1 + noise * rng.uniform(-1, 1)))
    return fit


def expected_s(fit: HandoverFit, tokens: int) -> float:
    return fit.base_s + tokens * fit.token_s


def own_part_s() -> float:
    """What a request needs to go on elsewhere, transfers aside."""
    fit = HandoverFit()
    for _ in range(2000):
        fit.learn(100, 0.0)
    return fit.base_s


def test_lengths_tell_base_and_slope_through_noise() -> None:
    fit = handed_over([50 + 37 * n % 4000 for n in range(600)], noise=0.1)
    assert fit.token_s == pytest.approx(TOKEN_S, rel=0.1)
    assert fit.base_s - own_part_s() == pytest.approx(BASE_S, rel=0.2)


def test_a_request_needs_time_to_go_on_elsewhere_even_if_its_kv_needs_none() -> None:
    fit = handed_over([])
    for _ in range(500):
        fit.learn(300, 0.0)
    assert expected_s(fit, 300) == pytest.approx(own_part_s(), rel=0.01)
    assert own_part_s() > 0.001


def test_the_newest_hand_overs_count_most() -> None:
    fit = handed_over([100, 2000] * 200)
    for _ in range(150):
        fit.learn(100, 0.5)
        fit.learn(2000, 0.5)
    assert expected_s(fit, 100) == pytest.approx(0.5, rel=0.05)


def test_one_hand_over_is_no_verdict() -> None:
    fit = handed_over([100, 2000] * 200)
    before_s = expected_s(fit, 500)
    fit.learn(500, 10 * before_s)
    assert expected_s(fit, 500) < 1.5 * before_s


@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(0, 60)), max_size=80))
def test_it_is_never_less_than_what_a_request_needs_to_go_on(seen: list[tuple[int, float]]) -> None:
    fit = HandoverFit()
    for tokens, seconds in seen:
        fit.learn(tokens, seconds)
        assert fit.token_s >= 0
        assert fit.base_s > 0.005
        assert expected_s(fit, 100_000) < 100_000


def test_layers_leave_one_by_one_where_the_last_chunk_takes_long_to_send() -> None:
    fit = handed_over([100, 500, 2000] * 30)
    longest = max(tokens for tokens in range(100_000) if not fit.pays_by_layer(tokens))
    assert 0 < longest < 100_000
    assert fit.pays_by_layer(longest + 1)
    slower = HandoverFit()
    for tokens in (100, 500, 2000) * 30:
        slower.learn(tokens, 0.01 + 1e-4 * tokens)
    assert slower.pays_by_layer(longest)
