"""Clients that share a router: what one has, another one can still get."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Any

import pytest
from aiohttp import web

from tests.router.fakes import Cluster, FakeInstance, cluster, eventually, full, held_back, let_go
from vllm_tetri.router.table import Entry, RequestTable, Shares
from vllm_tetri.types import InstanceId, Role

KEYS = ("greedy", "modest")


async def ask(made: Cluster, key: str) -> tuple[int, Any]:
    status, answer, _ = await made.ask(headers={"Authorization": f"Bearer {key}"})
    return status, answer


def in_flight(made: Cluster) -> int:
    return len(made.scheduler.table)


async def ask_often(made: Cluster, key: str, count: int) -> list[asyncio.Task[Any]]:
    """All of them are either refused or in flight."""
    before = in_flight(made)
    tasks = [asyncio.create_task(ask(made, key)) for _ in range(count)]
    await eventually(lambda: in_flight(made) - before + sum(task.done() for task in tasks) == count)
    return tasks


async def statuses(tasks: list[asyncio.Task[Any]]) -> list[int]:
    return sorted(status for status, _ in await asyncio.gather(*tasks))


async def test_a_greedy_key_leaves_room_for_a_modest_one() -> None:
    (one,) = held_back(FakeInstance("b", Role.BOTH))
    async with cluster(one, keys=KEYS, max_in_flight_each=50) as made:
        greedy = await ask_often(made, "greedy", 500)
        assert in_flight(made) == 40
        modest = await ask_often(made, "modest", 8)
        assert in_flight(made) == 48
        let_go(one)
        assert await statuses(modest) == [200] * 8
        assert await statuses(greedy) == [200] * 40 + [503] * 460
        assert in_flight(made) == 0
        assert (await ask(made, "greedy"))[0] == 200


async def test_without_keys_or_with_one_there_is_no_sharing() -> None:
    for keys in ((), ("greedy",)):
        (one,) = held_back(FakeInstance("b", Role.BOTH))
        async with cluster(one, keys=keys, max_in_flight_each=8) as made:
            tasks = await ask_often(made, "greedy", 20)
            assert in_flight(made) == 8
            let_go(one)
            assert await statuses(tasks) == [200] * 8 + [503] * 12


async def test_a_bound_that_only_an_instance_knows_is_shared_once_it_was_met() -> None:
    (one,) = held_back(FakeInstance("b", Role.BOTH))
    most, now = 10, 0

    async def full_at_ten(
        fake: FakeInstance, request: web.Request, body: Any
    ) -> web.StreamResponse:
        nonlocal now
        if now >= most:
            return await full()
        now += 1
        try:
            await fake.chunk_gate.wait()
            return await fake.answer(request, body)
        finally:
            now -= 1

    one.handler = full_at_ten
    async with cluster(one, keys=KEYS) as made:
        greedy = await ask_often(made, "greedy", 10)
        assert (await ask(made, "greedy"))[0] == 503  # now it is known
        num_calls = len(one.calls)
        refused = [await ask(made, "greedy") for _ in range(20)]
        assert [status for status, _ in refused] == [503] * 20
        assert len(one.calls) == num_calls  # and the instance has its peace
        assert (await ask(made, "modest"))[0] == 503  # it may ask, and is told itself
        assert len(one.calls) == num_calls + 1
        let_go(one)
        assert await statuses(greedy) == [200] * 10
        assert (await ask(made, "greedy"))[0] == 200


def entries(table: RequestTable, client: str, count: int, instance: str = "b") -> list[Entry]:
    found = []
    for _ in range(count):
        entry = table.enter("", now=0.0, client=client)
        entry.send_aggregated(InstanceId(instance), "test")
        found.append(entry)
    return found


def test_where_too_much_waits_an_equal_share_of_it_is_enough() -> None:
    table, there = RequestTable(), frozenset({InstanceId("b")})
    shares = Shares(table, limit_each=inf, num_clients=3)
    entries(table, "greedy", 10)
    assert shares.over_share("greedy", there) == there
    assert not shares.over_share("modest", there)
    entries(table, "modest", 4)
    assert shares.over_share("greedy", there) == there
    assert not shares.over_share("modest", there)
    assert not shares.over_share("third", there)
    entries(table, "modest", 6)
    assert shares.over_share("modest", there) == there
    assert not shares.over_share("greedy", frozenset())
    alone = Shares(table, limit_each=inf, num_clients=1)
    assert alone.over_share("", there) == there


def test_what_an_instance_said_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    table, now = RequestTable(), 1000.0
    monkeypatch.setattr("vllm_tetri.router.table.time.monotonic", lambda: now)
    shares = Shares(table, limit_each=inf, num_clients=2)
    entries(table, "greedy", 10)
    shares.record_at_limit(InstanceId("b"))
    assert shares.at_limit("greedy")
    now += 61
    assert not shares.at_limit("greedy")
