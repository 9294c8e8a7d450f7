"""Step times, and the token budget of steps with decodes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_tetri.engine.pacing import CPU_TILE_TOKENS, StepBudget, StepClock, work_of
from vllm_tetri.policy.step_cost import GUESS, StepFit
from vllm_tetri.types import StepCoefficients


class Learner:
    """Records what a clock teaches."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.read: list[tuple[Any, ...]] = []

    def learn(self, *step: Any) -> None:
        self.read.append(step[:-1])
        self.seconds.append(step[-1])

    def refresh(self) -> None: ...


def output(decodes: int = 1, new_tokens: int = 0, drafts: int = 0) -> Any:
    names = [f"d{place}" for place in range(decodes)]
    scheduled = dict.fromkeys(names, 1 + drafts)
    new = []
    if new_tokens:
        scheduled["new"] = new_tokens
        new.append(SimpleNamespace(req_id="new", num_computed_tokens=0))
    cached = SimpleNamespace(req_ids=names, num_computed_tokens=[100] * decodes)
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_cached_reqs=cached,
        scheduled_new_reqs=new,
        scheduled_spec_decode_tokens=dict.fromkeys(names, [7] * drafts) if drafts else {},
    )


def test_a_decode_with_drafts_is_no_prompt() -> None:
    assert work_of(output(4, 50, drafts=3), 0.0)[1:] == work_of(output(4, 50), 0.0)[1:]


@pytest.fixture
def learner() -> Learner:
    return Learner()


@pytest.fixture
def clock(learner: Learner) -> StepClock:
    return StepClock(learner)  # type: ignore[arg-type]


def test_time_between_steps_counts_while_requests_run(clock: StepClock, learner: Learner) -> None:
    clock.begin(output(), 10.0, was_running=False)
    clock.end(10.5)
    clock.begin(output(), 10.6, was_running=True)
    assert clock.end(11.0) == pytest.approx(0.5)
    assert learner.seconds == pytest.approx([0.5, 0.5])


def test_idle_time_does_not_count(clock: StepClock) -> None:
    clock.begin(output(), 10.0, was_running=False)
    clock.end(10.5)
    clock.begin(output(), 60.0, was_running=False)
    assert clock.end(60.25) == pytest.approx(0.25)


def test_a_pause_does_not_count(clock: StepClock) -> None:
    clock.begin(output(), 10.0, was_running=False)
    clock.interrupt()
    clock.end(10.5)  # scheduled before the pause
    clock.begin(output(), 70.0, was_running=True)
    assert clock.end(70.25) == pytest.approx(0.25)
    clock.begin(output(), 70.5, was_running=True)
    assert clock.end(70.75) == pytest.approx(0.5)


def test_a_step_that_is_scheduled_during_another_begins_at_its_end(clock: StepClock) -> None:
    clock.begin(output(), 1.0, was_running=False)
    clock.begin(output(), 1.1, was_running=True)
    assert clock.end(1.5) == pytest.approx(0.5)
    clock.begin(output(), 1.6, was_running=True)
    assert clock.end(1.9) == pytest.approx(0.4)
    assert clock.end(2.3) == pytest.approx(0.4)


def test_the_fit_learns_what_a_step_computed(clock: StepClock, learner: Learner) -> None:
    clock.begin(output(decodes=3, new_tokens=5), 0.0, was_running=False)
    clock.end(1.0)
    clock.begin(output(decodes=2), 2.0, was_running=False)
    clock.end(3.0)
    assert learner.read == [(3, 300, 5, 2.0), (2, 200, 0, 0.0)]


MOST, TILE = 2048, CPU_TILE_TOKENS
COST = StepCoefficients(0.013, 0.0006, 2.9e-6, 0.0006, 3.5e-7, 1.0)


@dataclass
class FakeRequest:
    num_computed_tokens: int
    is_prefill_chunk: bool = False


def budget(slo_s: float = 0.1, *, cost: StepCoefficients = COST, most: int = MOST) -> StepBudget:
    fit = StepFit()
    fit.cost = cost
    return StepBudget(fit, None, slo_s, most)


def decodes(count: int, context: int = 500) -> list[Any]:
    return [FakeRequest(context) for _ in range(count)]


def prompt_step(tokens: int, num_decodes: int, context: int) -> float:
    prompt = tokens - num_decodes
    return COST.step_s(num_decodes, num_decodes * 500, prompt, context + prompt / 2)


@pytest.mark.parametrize("num_decodes", [1, 4, 16, 64])
@pytest.mark.parametrize("context", [0, 3000])
def test_a_step_with_decodes_stays_within_the_slo(num_decodes: int, context: int) -> None:
    running = [*decodes(num_decodes), FakeRequest(context, True)]
    tokens = budget().tokens(running, num_decodes, 0)
    assert tokens % TILE == 0
    assert tokens - num_decodes >= TILE
    if tokens > num_decodes + 2 * TILE:
        assert prompt_step(tokens, num_decodes, context) <= 0.1
        assert prompt_step(tokens + TILE, num_decodes, context) > 0.1


def test_a_started_prompt_gets_fewer_tokens_the_longer_it_is() -> None:
    short, long = FakeRequest(0, True), FakeRequest(3000, True)
    tokens = [budget().tokens([*decodes(4), prompt], 4, 0) for prompt in (long, short)]
    assert tokens[0] < tokens[1]


def test_before_the_first_step_the_prior_counts() -> None:
    young, told = budget(cost=StepCoefficients()), budget(cost=GUESS)
    assert young.tokens(decodes(4), 4, 1) == told.tokens(decodes(4), 4, 1) < MOST


def run(target: StepBudget, scatter: float) -> int:
    """Take steps of 4 decodes that scatter about what is predicted."""
    for index in range(300):
        seconds = COST.step_s(4, 400, 0, 0) * (1 + (scatter if index % 2 else -scatter))
        target.learn(work_of(output(decodes=4), 0.0), seconds)
    return target.tokens(decodes(4), 4, 1)


def test_the_budget_is_smaller_when_steps_scatter() -> None:
    assert run(budget(), 0.2) < run(budget(), 0.0)


def test_an_slo_below_a_lone_decode_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm_tetri"):
        target = budget(0.01)
        tokens = [target.tokens(decodes(20), 20, 1) for _ in range(2)]
    (line,) = caplog.messages
    assert "0.01 " in line
    assert "0.0136" in line
    assert tokens == [48, 48]  # a tile of prompt at least


def test_drafts_take_no_tokens_from_prompts() -> None:
    plain, drafting = (budget().tokens(decodes(16), tokens, 1) for tokens in (16, 64))
    assert drafting == plain + 48


def test_decodes_beyond_vllm_s_own_budget_are_left_to_vllm() -> None:
    assert budget(most=64).tokens(decodes(100), 100, 1) == 64
