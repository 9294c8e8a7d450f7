from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import instance, view
from vllm_tetri.policy.overload import PATIENCE_S, PersistentQueues, PrefillSpeeds
from vllm_tetri.types import InstanceId

P = InstanceId("p")
MOST_S, SPEED = 2.0, 1000.0
STEP_S = 0.1


class Queue:
    """One instance that computes 1,000 tokens a second."""

    def __init__(self, most_s: float = MOST_S) -> None:
        self.queues = PersistentQueues(most_s)
        self.speeds = PrefillSpeeds()
        self.speeds.record_prompt(P, 1000, sent_s=0.0, now=1000 / SPEED)
        self.now = 0.0

    def is_full(self, wait_s: float, *, prompts: int = 20) -> bool:
        """What is said a tenth of a second later."""
        self.now += STEP_S
        tokens = round(wait_s * SPEED)
        seen = view(instance("p", "prefill", queued_prefill_tokens=tokens, waiting=prompts))
        if not self.queues.is_fresh(self.now):
            self.queues.observe(seen, self.speeds, self.now)
        return self.queues.at_limit == {P}

    def stays(self, wait_s: float, seconds: float, *, prompts: int = 20) -> list[bool]:
        steps = round(seconds / STEP_S)
        return [self.is_full(wait_s, prompts=prompts) for _ in range(steps)]


def test_a_burst_is_taken_up_whatever_its_size() -> None:
    queue = Queue()
    assert not any(queue.stays(60.0, PATIENCE_S - 1))
    assert not any(queue.stays(0.0, 1))
    assert not any(queue.stays(60.0, PATIENCE_S - 1))


def test_a_queue_that_stays_gets_no_more_until_it_was_short_once() -> None:
    queue = Queue()
    assert any(queue.stays(60.0, PATIENCE_S + 1))
    assert all(queue.stays(2.1, 60))
    assert not any(queue.stays(1.9, 1))  # room for some
    assert all(queue.stays(2.1, 1))  # and it is as long as it may be again
    assert not any(queue.stays(0.4, 0.1))
    assert not any(queue.stays(60.0, PATIENCE_S - 1))  # the next burst


def test_a_busy_instance_whose_queue_is_short_enough_is_never_full() -> None:
    assert not any(Queue().stays(1.9, 300))


def test_a_few_long_prompts_are_no_crowd() -> None:
    assert not any(Queue().stays(60.0, 300, prompts=7))


def test_zero_lets_queues_be() -> None:
    assert not any(Queue(most_s=0.0).stays(60.0, 300))


def test_an_instance_whose_speed_is_not_known_is_not_full() -> None:
    queue = Queue()
    queue.speeds = PrefillSpeeds()
    assert not any(queue.stays(60.0, 300))


def test_one_that_is_gone_is_forgotten() -> None:
    queue = Queue()
    assert any(queue.stays(60.0, PATIENCE_S + 1))
    queue.now += STEP_S
    queue.queues.observe(view(), queue.speeds, queue.now)
    assert not queue.queues.at_limit
    assert not queue.is_full(60.0)


@given(st.floats(1.5, 20.0))
def test_a_crowd_leaves_a_queue_of_the_wait_that_is_allowed(times: float) -> None:
    queue, wait_s = Queue(), 0.0
    ends: list[float] = []
    for step in range(6000):
        if not queue.is_full(wait_s):
            wait_s += times * STEP_S
        wait_s = max(0.0, wait_s - STEP_S)
        if step >= 5000:
            ends.append(wait_s)
    assert min(ends) >= MOST_S - STEP_S
    assert max(ends) <= MOST_S + times * STEP_S
