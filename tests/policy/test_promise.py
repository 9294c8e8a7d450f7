"""Requests that would come late are refused when they come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tetri.policy.adaptive import NO_OBJECTIVE, Objective, PricedRoute
from vllm_tetri.policy.overload import Late, expected_late
from vllm_tetri.types import InstanceId


def late(
    ttft_s: float = 0.1,
    tpot_s: float = 0.01,
    *,
    answer_tokens: float = 100.0,
    promised: Objective = Objective(ttft_s=1.0, tpot_s=0.05),  # noqa: B008
    **facts: Any,
) -> Late | None:
    place = PricedRoute(InstanceId("p"), InstanceId("d"), ttft_s, tpot_s, 1.0, "test", **facts)
    return expected_late(place, promised, answer_tokens)


def test_what_keeps_the_promise_is_served() -> None:
    assert late() is None
    assert late(ttft_s=1.0, tpot_s=0.05) is None


def test_a_little_late_may_be_an_error_of_the_forecast() -> None:
    assert late(ttft_s=1.2) is None
    assert late(tpot_s=0.06) is None
    assert late(ttft_s=1.3) is not None
    assert late(tpot_s=0.065) is not None


def test_what_would_be_late_with_nobody_else_there_is_served() -> None:
    assert late(ttft_s=9, waits=False) is None
    assert late(tpot_s=9, shares=False) is None
    assert late(ttft_s=9, tpot_s=9, waits=False) is not None
    assert late(ttft_s=9, tpot_s=9, shares=False) is not None


def test_nobody_is_refused_by_a_guess() -> None:
    assert late(ttft_s=9, confidence=0.2) is None
    assert late(ttft_s=9, confidence=0.8) is not None


def test_without_a_promise_nothing_is_late() -> None:
    assert late(ttft_s=1e9, tpot_s=1e9, promised=NO_OBJECTIVE) is None
    assert late(ttft_s=1e9, promised=Objective(tpot_s=0.05)) is None
    assert late(tpot_s=1e9, promised=Objective(ttft_s=1.0)) is None


def test_it_may_come_again_when_the_work_before_it_is_done() -> None:
    found = late(ttft_s=4.5)
    assert found == Late("first token expected in 4.5 s, promised 1 s", 4)


def test_a_pace_recovers_when_half_an_answer_is_written() -> None:
    found = late(tpot_s=0.1, answer_tokens=200)
    assert found == Late("100 ms a token expected, promised 50 ms", 10)


def test_of_both_the_first_token_is_named() -> None:
    found = late(ttft_s=9, tpot_s=9)
    assert found is not None
    assert "first token" in found.reason


@pytest.mark.parametrize(("ttft_s", "wait_s"), [(1.26, 1), (2.5, 2), (1e6, 60)])
def test_clients_are_told_whole_seconds_between_one_and_a_minute(
    ttft_s: float, wait_s: int
) -> None:
    found = late(ttft_s=ttft_s)
    assert found is not None
    assert found.retry_after_s == wait_s


@given(
    st.floats(1e-6, 1e6), st.floats(1e-6, 1e3), st.floats(1e-3, 1e3), st.floats(1e-6, 10),
    st.floats(0, 1e6),
)  # fmt: skip
def test_who_is_refused_misses_something_and_can_come_again(
    ttft_s: float, tpot_s: float, promised_ttft_s: float, promised_tpot_s: float, tokens: float
) -> None:
    promised = Objective(promised_ttft_s, promised_tpot_s)
    found = late(ttft_s, tpot_s, answer_tokens=tokens, promised=promised)
    if found is None:
        assert ttft_s <= 1.3 * promised_ttft_s
        assert tpot_s <= 1.3 * promised_tpot_s
    else:
        assert ttft_s > promised_ttft_s or tpot_s > promised_tpot_s
        assert 1 <= found.retry_after_s <= 60
