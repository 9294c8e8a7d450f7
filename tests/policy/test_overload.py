"""What a router does when requests come faster than they are served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import instance, view
from vllm_tetri.policy.adaptive import NO_OBJECTIVE, Objective, PricedRoute
from vllm_tetri.policy.cluster import ClusterTable
from vllm_tetri.policy.overload import (
    PATIENCE_S,
    RELAX_S,
    SHARE,
    Backlogs,
    Late,
    SoftLimit,
    expected_late,
    may_begin,
)
from vllm_tetri.policy.tables import TableMaker
from vllm_tetri.types import InstanceId, InstanceState, InstanceView, StepCoefficients

P, Q = InstanceId("p"), InstanceId("q")


def table(*views: InstanceView) -> ClusterTable:
    return TableMaker().make(view(*views), 0.0)


def prefill(name: str, tokens_per_s: float, **load: Any) -> InstanceView:
    """Make an instance that computes prompts only, at this speed."""
    cost = StepCoefficients(prompt_s=1 / tokens_per_s)
    return instance(name, "prefill", cost=cost, **load)


def test_the_wait_is_one_prompt_of_average_length() -> None:
    load = {"queued_prefill_tokens": 4000, "waiting": 3}
    assert Backlogs().retry_after_s(table(prefill("p", 100, **load)), [P]) == 10
    assert Backlogs().retry_after_s(table(prefill("p", 300, **load)), [P]) == 4  # rounded up


def test_the_first_one_with_room_counts_and_others_do_not() -> None:
    loaded = table(
        prefill("p", 100, queued_prefill_tokens=4000, waiting=3),
        prefill("q", 100, queued_prefill_tokens=2000, waiting=3),
        prefill("idle", 100),
    )
    assert Backlogs().retry_after_s(loaded, [P, Q]) == 5
    assert Backlogs().retry_after_s(loaded, [P]) == 10


def test_nothing_known_means_one_second() -> None:
    assert Backlogs().retry_after_s(table(), [P]) == 1
    loaded = table(instance("p", queued_prefill_tokens=10**9, waiting=3))
    assert Backlogs().retry_after_s(loaded, [P]) == 1
    assert Backlogs().retry_after_s(table(prefill("p", 1)), [P]) == 1


@given(st.integers(-5, 10**12), st.integers(-5, 10**6), st.floats(1e-6, 1e9))
def test_the_wait_is_always_between_one_second_and_a_minute(
    queued: int, waiting: int, tokens_per_s: float
) -> None:
    loaded = table(prefill("p", tokens_per_s, queued_prefill_tokens=queued, waiting=waiting))
    assert 1 <= Backlogs().retry_after_s(loaded, [P]) <= 60


MOST_S, SPEED = 2.0, 1000.0
STEP_S = 0.1


class Queue:
    """One instance that computes 1,000 tokens a second."""

    def __init__(self, most_s: float = MOST_S, *, is_known: bool = True) -> None:
        self.backlogs, self._is_known = Backlogs(most_s), is_known
        self.now = 0.0

    def is_full(self, wait_s: float, *, prompts: int = 20) -> bool:
        """What is said a tenth of a second later."""
        self.now += STEP_S
        load = {"queued_prefill_tokens": round(wait_s * SPEED), "waiting": prompts}
        seen = prefill("p", SPEED, **load) if self._is_known else instance("p", **load)
        self.backlogs.observe(table(seen), self.now)
        return self.backlogs.at_limit == {P}

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


def test_a_burst_after_a_pause_does_not_continue_the_one_before() -> None:
    queue = Queue()
    assert not queue.is_full(60.0)
    queue.now += 2 * PATIENCE_S  # no request, so nothing is observed
    assert not queue.is_full(1.0)
    assert not any(queue.stays(60.0, PATIENCE_S - 1))


def test_a_busy_instance_whose_queue_is_short_enough_is_never_full() -> None:
    assert not any(Queue().stays(1.9, 300))


def test_a_few_long_prompts_are_no_crowd() -> None:
    assert not any(Queue().stays(60.0, 300, prompts=7))


@pytest.mark.parametrize("queue", [Queue(most_s=0.0), Queue(is_known=False)])
def test_without_a_limit_or_a_known_speed_none_is_full(queue: Queue) -> None:
    assert not any(queue.stays(60.0, 300))


def test_one_that_misses_reports_has_its_queue_when_it_is_back() -> None:
    queue = Queue()
    assert any(queue.stays(60.0, PATIENCE_S + 1))
    silent = replace(prefill("p", SPEED), state=InstanceState.SILENT)
    queue.backlogs.observe(table(silent), queue.now)
    assert not queue.backlogs.at_limit
    assert queue.is_full(60.0)


def test_one_that_is_gone_is_forgotten() -> None:
    queue = Queue()
    assert any(queue.stays(60.0, PATIENCE_S + 1))
    queue.now += STEP_S
    queue.backlogs.observe(table(), queue.now)
    assert not queue.backlogs.at_limit
    assert not queue.is_full(60.0)


@pytest.mark.slow
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


# -- fair shares ----


class Room:
    """Requests of several parties, that begin where they may and end when told."""

    def __init__(self, limit: int, num_clients: int) -> None:
        self.limit = limit
        self.own = [0] * num_clients

    def begin(self, client: int) -> bool:
        may = may_begin(self.own[client], sum(self.own), self.limit, num_clients=len(self.own))
        self.own[client] += may
        return may

    def fill(self, client: int) -> int:
        while self.begin(client):
            pass
        return self.own[client]


def test_who_is_alone_may_have_everything() -> None:
    assert Room(100, 1).fill(0) == 100


def test_one_of_several_leaves_room_for_the_others() -> None:
    room = Room(100, 2)
    assert room.fill(0) == 80
    assert room.fill(1) == 16


def test_who_came_late_gets_as_much_as_the_first_in_the_end() -> None:
    room = Room(100, 2)
    room.fill(0)
    for _ in range(100):  # one request of the first ends; both want another, it ten times
        room.own[0] -= 1
        for client in (*[0] * 10, 1):
            room.begin(client)
    assert abs(room.own[0] - room.own[1]) <= 4
    assert sum(room.own) >= 85


@given(
    st.integers(1, 200),
    st.integers(1, 6),
    st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=300),
)
def test_the_limit_holds_and_nobody_is_kept_out_by_one_that_has_much(
    limit: int, num_clients: int, steps: list[tuple[bool, int]]
) -> None:
    room = Room(limit, num_clients)
    for is_begin, number in steps:
        client = number % num_clients
        before = sum(room.own)
        if not is_begin:
            room.own[client] = max(0, room.own[client] - 1)
        elif not room.begin(client):
            assert before >= (limit if num_clients == 1 else SHARE * limit / (SHARE + 1))
            if not room.own[client]:  # then nothing is free, and who took the last had little
                assert before == limit
        assert sum(room.own) <= limit


def test_an_instance_that_was_full_is_taken_at_its_word_for_a_while() -> None:
    squeeze = SoftLimit(10, at_s=100.0)
    assert squeeze.limit(1000, 100.0) == 10
    assert 10 < squeeze.limit(1000, 100.0 + RELAX_S / 2) < 20
    assert squeeze.limit(12, 100.0 + RELAX_S / 2) == 12
    assert not squeeze.is_over(100.0 + RELAX_S - 0.1)
    assert squeeze.is_over(100.0 + RELAX_S)


@pytest.mark.parametrize("taken", [0, -1])
def test_one_request_may_always_ask(taken: int) -> None:
    assert SoftLimit(taken, at_s=0.0).limit(1000, 0.0) == 1


# -- objectives that a request would miss ----


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


@pytest.mark.parametrize(
    ("facts", "is_late"),
    [
        ({"ttft_s": 1.0, "tpot_s": 0.05}, False),
        # A little late may be an error of the forecast.
        ({"ttft_s": 1.2, "tpot_s": 0.06}, False),
        ({"ttft_s": 1.3}, True),
        ({"tpot_s": 0.065}, True),
        # It would be late with no other request there.
        ({"ttft_s": 9, "waits": False}, False),
        ({"tpot_s": 9, "shares": False}, False),
        ({"ttft_s": 9, "tpot_s": 9, "waits": False}, True),
        ({"ttft_s": 9, "tpot_s": 9, "shares": False}, True),
        # It is in time itself, but its prompt makes others late.
        ({"others_tpot_s": 0.06}, False),
        ({"others_tpot_s": 0.065}, True),
        # A guess refuses none.
        ({"ttft_s": 9, "confidence": 0.2}, False),
        ({"ttft_s": 9, "confidence": 0.8}, True),
        # Without a promise nothing is late.
        ({"ttft_s": 1e9, "tpot_s": 1e9, "promised": NO_OBJECTIVE}, False),
        ({"ttft_s": 1e9, "promised": Objective(tpot_s=0.05)}, False),
        ({"tpot_s": 1e9, "promised": Objective(ttft_s=1.0)}, False),
    ],
)
def test_what_would_be_late_because_of_others_is_refused(
    facts: dict[str, Any], is_late: bool
) -> None:
    assert (late(**facts) is not None) == is_late


def test_it_may_come_again_when_the_work_before_it_is_done() -> None:
    first_token = Late("first token expected in 4.5 s, promised 1 s", 4)
    assert late(ttft_s=4.5) == late(ttft_s=4.5, tpot_s=9) == first_token
    pace = Late("100 ms a token expected, promised 50 ms", 10)
    assert late(tpot_s=0.1, answer_tokens=200) == pace  # half of it is written by then
    others = late(tpot_s=0.02, others_tpot_s=0.1)
    assert others is not None
    assert others.reason.startswith("100 ms a token of outputs that its prompt interrupts")


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
