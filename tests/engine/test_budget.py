"""The token budget of a step, from what decodes are running."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engine.costs import COST
from vllm_tetri.engine.budget import StepBudget

MOST = 2048


@dataclass
class FakeRequest:
    num_computed_tokens: int
    is_prefill_chunk: bool = False


def budget(slo_s: float = 0.1, **options: Any) -> StepBudget:
    return StepBudget(COST, slo_s, MOST, 16, **options)


def decodes(count: int, context: int = 500) -> list[Any]:
    return [FakeRequest(context) for _ in range(count)]


def test_a_step_with_decodes_stays_within_the_slo() -> None:
    for count in (1, 4, 16, 64):
        tokens = budget().tokens(decodes(count), 0.0)
        prefill = tokens - count
        assert tokens % 16 == 0
        assert prefill >= 16
        if prefill > 32:
            assert COST.step_s(count, count * 500, prefill) <= 0.1
            assert COST.step_s(count, count * 500, prefill + 16) > 0.1


def test_a_started_prompt_gets_fewer_tokens_the_longer_it_is() -> None:
    short, long = FakeRequest(0, True), FakeRequest(3000, True)
    assert budget().tokens([*decodes(4), long], 0.0) < budget().tokens([*decodes(4), short], 0.0)


def test_without_decodes_the_device_is_saturated_without_long_steps() -> None:
    tokens = budget().tokens([FakeRequest(100, True)], 0.0)
    assert tokens / COST.prefill_s(tokens) >= 0.97 * MOST / COST.prefill_s(MOST)
    assert tokens < 512


def run(target: StepBudget, steps: int, slowness: float, *, scatter: float = 0.0) -> int:
    """Steps of 4 decodes and a prompt that take `slowness` times what is predicted."""
    now, running, tokens = 0.0, decodes(4), 0
    for index in range(steps):
        tokens = target.tokens(running, now)
        target.scheduled(tokens)
        factor = slowness * (1 + (scatter if index % 2 else -scatter))
        now += factor * COST.step_s(4, 2000, tokens - 4)
    return tokens


def test_it_learns_that_the_machine_is_slower() -> None:
    tokens = run(budget(), 300, 1.5)
    assert 0.85 * 0.1 < 1.5 * COST.step_s(4, 2000, tokens - 4) <= 0.1


def test_it_aims_lower_when_steps_scatter() -> None:
    tokens = run(budget(), 300, 1.0, scatter=0.2)
    assert 1.2 * COST.step_s(4, 2000, tokens - 4) <= 0.1


def test_it_learns_nothing_from_idle_times() -> None:
    target = budget()
    target.tokens([], 0.0)
    target.scheduled(0)
    target.tokens([FakeRequest(0, True)], 60.0)
    target.scheduled(100)
    target.tokens(decodes(1), 120.0)
    assert target.drift.mean == 1.0


def test_with_asynchronous_scheduling_a_time_belongs_to_the_step_before() -> None:
    target = budget(lag_steps=1)
    now, long_s, short_s = 0.0, COST.step_s(4, 2000, 60), COST.decode_s(4, 2000)
    # vLLM schedules a step when the last but one is done.
    for index in range(100):
        target.tokens(decodes(4), now)
        target.scheduled(64 if index % 2 else 4)
        now += short_s if index % 2 else long_s
    assert target.drift.mean == pytest.approx(1.0, abs=0.01)
    assert target.drift.deviation < 0.01


def test_an_slo_below_a_lone_decode_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm_tetri"):
        target = budget(0.01)
        tokens = [target.tokens(decodes(20), now) for now in (0.0, 1.0)]
    (line,) = caplog.messages
    assert "0.01 " in line
    assert "0.0136" in line
    assert tokens == [48, 48]  # a tile of prompt at least


def test_decodes_beyond_vllm_s_own_budget_are_left_to_vllm() -> None:
    assert StepBudget(COST, 0.1, 64, 16).tokens(decodes(100), 0.0) == 64
