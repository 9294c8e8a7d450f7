"""Speeds learnt from steps."""

from __future__ import annotations

from random import Random

import pytest

from vllm_tetri.policy.speeds import StepSpeeds

BASE_S, REQUEST_S, TOKEN_S = 0.013, 0.0006, 0.0007


def learnt(steps: list[tuple[int, int]], *, noise: float = 0.0) -> StepSpeeds:
    speeds, rng = StepSpeeds(), Random(1)
    for num_decodes, prompt_tokens in steps:
        seconds = BASE_S + num_decodes * REQUEST_S + prompt_tokens * TOKEN_S
        speeds.learn(num_decodes, prompt_tokens, seconds * (1 + noise * rng.uniform(-1, 1)))
    return speeds


def test_nothing_is_known_before_the_first_step() -> None:
    speeds = StepSpeeds()
    assert speeds.prefill_tokens_per_s == speeds.decode_base_s == speeds.decode_request_s == 0


def test_steps_of_decodes_tell_base_and_slope() -> None:
    speeds = learnt([(n % 40 + 1, 0) for n in range(400)], noise=0.1)
    assert speeds.decode_base_s == pytest.approx(BASE_S, rel=0.15)
    assert speeds.decode_request_s == pytest.approx(REQUEST_S, rel=0.15)
    assert speeds.answer_tokens_done == sum(n % 40 + 1 for n in range(400))


def test_steps_of_one_size_tell_their_time_and_no_slope() -> None:
    speeds = learnt([(8, 0)] * 50)
    assert speeds.decode_base_s == pytest.approx(BASE_S + 8 * REQUEST_S)
    assert speeds.decode_request_s == 0


def test_a_slope_outlives_steps_that_tell_none() -> None:
    speeds = learnt([(n % 40 + 1, 0) for n in range(400)] + [(30, 0)] * 2000)
    assert speeds.decode_request_s == pytest.approx(REQUEST_S, rel=0.01)
    assert speeds.decode_base_s == pytest.approx(BASE_S, rel=0.01)


def test_prompts_are_timed_less_the_decodes_beside_them() -> None:
    alone = learnt([(0, 256)] * 20)
    assert alone.prefill_tokens_per_s == pytest.approx(256 / (BASE_S + 256 * TOKEN_S))
    assert alone.prompt_tokens_done == 20 * 256
    beside = learnt([(n % 40 + 1, 0) for n in range(400)] + [(20, 256)] * 20)
    assert beside.prefill_tokens_per_s == pytest.approx(alone.prefill_tokens_per_s, rel=0.01)


def test_new_steps_count_most() -> None:
    speeds = learnt([(0, 256)] * 100)
    for _ in range(100):
        speeds.learn(0, 256, 1.0)
    assert speeds.prefill_tokens_per_s == pytest.approx(256, rel=0.05)
