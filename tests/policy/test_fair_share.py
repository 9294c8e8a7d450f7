from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tetri.policy.overload import RELAX_S, SoftLimit, matters_from, may_begin


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


def test_when_the_others_are_gone_it_may_have_its_part_again() -> None:
    room = Room(100, 2)
    room.fill(0)
    room.fill(1)
    room.own[1] = 0
    assert room.fill(0) == 80


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
            assert before >= matters_from(limit, num_clients=num_clients)
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
