from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import instance, view
from vllm_tetri.policy.overload import PrefillSpeeds, retry_after_s
from vllm_tetri.types import InstanceId

P, Q = InstanceId("p"), InstanceId("q")


def speeds(**tokens_per_s: float) -> PrefillSpeeds:
    made = PrefillSpeeds()
    for name, speed in tokens_per_s.items():
        made.record_prompt(InstanceId(name), 1000, sent_s=0.0, now=1000 / speed)
    return made


def test_an_instance_that_was_never_measured_has_no_speed() -> None:
    assert PrefillSpeeds().tokens_per_s(P) is None


def test_neither_waiting_nor_idleness_makes_an_instance_slow() -> None:
    made = PrefillSpeeds()
    for index in range(1, 11):  # ten prompts at once, one after another
        made.record_prompt(P, 100, sent_s=0.0, now=float(index))
    assert made.tokens_per_s(P) == pytest.approx(100)
    made.record_prompt(P, 100, sent_s=1000.0, now=1001.0)
    assert made.tokens_per_s(P) == pytest.approx(100)


def test_the_speed_follows_what_happens_now() -> None:
    made = PrefillSpeeds()
    for index in range(1, 101):
        made.record_prompt(P, 100 if index < 50 else 500, sent_s=0.0, now=float(index))
    assert made.tokens_per_s(P) == pytest.approx(500, rel=0.02)


def test_prompts_that_end_together_are_all_counted() -> None:
    made = PrefillSpeeds()
    for _ in range(4):
        made.record_prompt(P, 100, sent_s=0.0, now=2.0)
    assert made.tokens_per_s(P) == pytest.approx(200, rel=0.2)


def test_many_instances_that_come_and_go_are_forgotten() -> None:
    made = PrefillSpeeds()
    for index in range(5000):
        made.record_prompt(InstanceId(str(index)), 100, sent_s=0.0, now=1.0)
    assert made.tokens_per_s(InstanceId("0")) is None
    assert made.tokens_per_s(InstanceId("4999")) == 100


def test_the_wait_is_one_prompt_of_average_length() -> None:
    loaded = view(instance("p", "prefill", queued_prefill_tokens=4000, waiting=3))
    assert retry_after_s(loaded, [P], speeds(p=100)) == 10
    assert retry_after_s(loaded, [P], speeds(p=300)) == 4  # rounded up


def test_the_first_one_with_room_counts_and_others_do_not() -> None:
    loaded = view(
        instance("p", "prefill", queued_prefill_tokens=4000, waiting=3),
        instance("q", "prefill", queued_prefill_tokens=2000, waiting=3),
        instance("idle", "prefill"),
    )
    assert retry_after_s(loaded, [P, Q], speeds(p=100, q=100, idle=100)) == 5
    assert retry_after_s(loaded, [P], speeds(p=100, q=100, idle=100)) == 10


def test_nothing_known_means_one_second() -> None:
    assert retry_after_s(view(), [P], PrefillSpeeds()) == 1
    loaded = view(instance("p", queued_prefill_tokens=10**9, waiting=3))
    assert retry_after_s(loaded, [P], PrefillSpeeds()) == 1
    assert retry_after_s(view(instance("p")), [P], speeds(p=1)) == 1


@given(
    st.integers(-5, 10**12),
    st.integers(-5, 10**6),
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e6), st.floats(0, 1e6))),
)
def test_the_wait_is_always_between_one_second_and_a_minute(
    queued: int, waiting: int, answered: list[tuple[int, float, float]]
) -> None:
    made = PrefillSpeeds()
    for num_tokens, sent_s, now in answered:
        made.record_prompt(P, num_tokens, sent_s=sent_s, now=now)
    loaded = view(instance("p", queued_prefill_tokens=queued, waiting=waiting))
    assert 1 <= retry_after_s(loaded, [P], made) <= 60
