"""How long KV takes to its decode instance, learnt from hand-overs."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tetri.policy.step_cost import HandoverFit

BASE_S, TOKEN_S = 0.02, 5e-5


def learnt(lengths: list[int], *, noise: float = 0.0, seed: int = 1) -> HandoverFit:
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
    fit = learnt([50 + 37 * n % 4000 for n in range(600)], noise=0.1)
    assert fit.token_s == pytest.approx(TOKEN_S, rel=0.1)
    assert fit.base_s - own_part_s() == pytest.approx(BASE_S, rel=0.2)


def test_a_request_needs_time_to_go_on_elsewhere_even_if_its_kv_needs_none() -> None:
    fit = learnt([])
    for _ in range(500):
        fit.learn(300, 0.0)
    assert expected_s(fit, 300) == pytest.approx(own_part_s(), rel=0.01)
    assert own_part_s() > 0.001


def test_hand_overs_of_one_length_tell_their_own_time() -> None:
    fit = learnt([1000] * 300)
    assert expected_s(fit, 1000) == pytest.approx(BASE_S + 1000 * TOKEN_S + own_part_s(), rel=0.05)


def test_the_newest_count_most() -> None:
    fit = learnt([100, 2000] * 200)
    for _ in range(150):
        fit.learn(100, 0.5)
        fit.learn(2000, 0.5)
    assert expected_s(fit, 100) == pytest.approx(0.5, rel=0.05)


def test_one_hand_over_is_no_verdict() -> None:
    fit = learnt([100, 2000] * 200)
    before_s = expected_s(fit, 500)
    fit.learn(500, 10 * before_s)
    assert expected_s(fit, 500) < 1.5 * before_s


def test_long_prompts_that_are_quicker_make_no_negative_slope() -> None:
    fit = HandoverFit()
    for _ in range(200):
        fit.learn(100, 0.1)
        fit.learn(3000, 0.01)
    assert fit.token_s == 0
    assert 0.01 < fit.base_s < 0.1


@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(0, 60)), max_size=80))
def test_it_is_never_less_than_what_a_request_needs_to_go_on(
    seen: list[tuple[int, float]],
) -> None:
    fit = HandoverFit()
    for tokens, seconds in seen:
        fit.learn(tokens, seconds)
        assert fit.token_s >= 0
        assert fit.base_s > 0.005
        assert expected_s(fit, 100_000) < 100_000
