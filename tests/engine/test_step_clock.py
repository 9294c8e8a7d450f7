from types import SimpleNamespace
from typing import Any

import pytest

from vllm_tetri.engine.step_clock import StepClock


class Noted:
    """What is learnt."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.read: list[tuple[Any, ...]] = []

    def learn(self, *step: Any) -> None:
        self.read.append(step[:-1])
        self.seconds.append(step[-1])

    def refresh(self) -> None: ...


def output(decodes: int = 1, new_tokens: int = 0) -> Any:
    names = [f"d{place}" for place in range(decodes)]
    scheduled = dict.fromkeys(names, 1)
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
    )


@pytest.fixture
def noted() -> Noted:
    return Noted()


@pytest.fixture
def clock(noted: Noted) -> StepClock:
    return StepClock(noted)  # type: ignore[arg-type]


def test_time_between_steps_counts_while_requests_run(clock: StepClock, noted: Noted) -> None:
    clock.begin(output(), 10.0, goes_on=False)
    clock.end(10.5)
    clock.begin(output(), 10.6, goes_on=True)
    assert clock.end(11.0) == pytest.approx(0.5)
    assert noted.seconds == pytest.approx([0.5, 0.5])


def test_idle_time_does_not(clock: StepClock) -> None:
    clock.begin(output(), 10.0, goes_on=False)
    clock.end(10.5)
    clock.begin(output(), 60.0, goes_on=False)
    assert clock.end(60.25) == pytest.approx(0.25)


def test_a_pause_does_not(clock: StepClock) -> None:
    clock.begin(output(), 10.0, goes_on=False)
    clock.interrupt()
    clock.end(10.5)  # scheduled before the pause
    clock.begin(output(), 70.0, goes_on=True)
    assert clock.end(70.25) == pytest.approx(0.25)
    clock.begin(output(), 70.5, goes_on=True)
    assert clock.end(70.75) == pytest.approx(0.5)


def test_a_step_that_is_scheduled_during_another_begins_at_its_end(clock: StepClock) -> None:
    clock.begin(output(), 1.0, goes_on=False)
    clock.begin(output(), 1.1, goes_on=True)
    assert clock.end(1.5) == pytest.approx(0.5)
    clock.begin(output(), 1.6, goes_on=True)
    assert clock.end(1.9) == pytest.approx(0.4)
    assert clock.end(2.3) == pytest.approx(0.4)


def test_what_a_step_computes(clock: StepClock, noted: Noted) -> None:
    clock.begin(output(decodes=3, new_tokens=5), 0.0, goes_on=False)
    clock.end(1.0)
    clock.begin(output(decodes=2), 2.0, goes_on=False)
    clock.end(3.0, learns=False)
    assert noted.read == [(3, 300, 5, 2.0)]
