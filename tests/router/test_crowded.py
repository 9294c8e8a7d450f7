"""The bound on requests that one instance has at a time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from tests.router.fakes import Cluster, FakeInstance, cluster, eventually
from vllm_tetri.policy import standing
from vllm_tetri.router.table import RequestTable
from vllm_tetri.types import Mode, Role


def held_back(*instances: FakeInstance) -> tuple[FakeInstance, ...]:
    """Their answers wait for `let_go`."""

    async def wait(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        await fake.chunk_gate.wait()
        return await fake.answer(request, body)

    for each in instances:
        each.handler = wait
        each.chunk_gate.clear()
    return instances


def let_go(*instances: FakeInstance) -> None:
    for each in instances:
        each.chunk_gate.set()


async def begin(made: Cluster, count: int, **body: Any) -> list[asyncio.Task[Any]]:
    """Requests that have reached an instance each."""
    calls = sum(len(each.calls) for each in made.instances.values())
    tasks = [asyncio.create_task(made.ask(**body)) for _ in range(count)]
    await eventually(
        lambda: sum(len(each.calls) for each in made.instances.values()) == calls + count
    )
    return tasks


async def refused(made: Cluster, who: str, path: str = "/v1/completions", **body: Any) -> None:
    status, answer, headers = await made.ask(path, **body)
    assert (status, answer["error"]["code"]) == (503, "queue_full")
    assert f"all {who} are full" in answer["error"]["message"]
    assert 1 <= int(headers["Retry-After"]) <= 60


async def test_a_full_instance_leads_to_the_next_and_all_full_to_503() -> None:
    p1, p2 = held_back(*(FakeInstance(f"p{n}", Role.PREFILL, decode="d") for n in (1, 2)))
    p2.load = p2.load.__class__(queued_prefill_tokens=1000)
    decode = FakeInstance("d", Role.DECODE)
    async with cluster(p1, p2, decode, max_in_flight_each=2) as made:
        tasks = await begin(made, 2)
        assert (len(p1.calls), len(p2.calls)) == (2, 0)
        tasks += await begin(made, 2)
        assert (len(p1.calls), len(p2.calls)) == (2, 2)
        await refused(made, "prefill instances (2)")
        rows = {row["id"]: row for row in (await made.get("/tetri/v1/instances"))["instances"]}
        assert {name: row["in_flight"] for name, row in rows.items()} == {"p1": 2, "p2": 2, "d": 0}

        let_go(p1, p2)
        assert [status for status, *_ in await asyncio.gather(*tasks)] == [200] * 4
        assert (await made.ask())[0] == 200


async def test_decode_instances_are_bounded_too() -> None:
    prefill, decode = FakeInstance("p", Role.PREFILL, decode="d"), FakeInstance("d", Role.DECODE)
    held_back(decode)
    async with cluster(prefill, decode, max_in_flight_each=1) as made:
        asking = asyncio.create_task(made.ask())
        await eventually(lambda: decode.calls)
        await refused(made, "decode instances (1)")
        assert len(prefill.calls) == 1
        let_go(decode)
        assert (await asking)[0] == 200


async def test_whole_requests_are_bounded_on_every_route() -> None:
    (both,) = held_back(FakeInstance("b", Role.BOTH))
    async with cluster(both, max_in_flight_each=1) as made:
        (asking,) = await begin(made, 1, best_of=2)
        await refused(made, "instances that could serve it whole (1)", best_of=2)
        await refused(made, "instances that could serve it whole (1)", path="/v1/embeddings")
        await refused(made, "instances that may keep the answer (1)", path="/v1/responses")
        let_go(both)
        assert (await asking)[0] == 200
        status, _, _ = await made.ask("/v1/embeddings")
        assert status == 200


def test_a_request_counts_where_it_is_worked_on() -> None:
    from vllm_tetri.policy.lifecycle import Event

    table = RequestTable()
    entry = table.enter("r", now=0.0, sla="")
    entry.on(Event.PREFILL_SENT)
    entry.prefill = "p"
    assert table.workers() == {"p": 1}
    entry.decode = "d"
    entry.dispatched.update({"d", "x"})  # x refused it, or will get the next try
    assert table.workers() == {"p": 1}
    assert [table.num_reaching(name) for name in ("p", "d", "x", "y")] == [1, 1, 1, 0]
    entry.on(Event.PREFILLED)
    assert table.workers() == {"d": 1}
    entry.on(Event.ANSWERING)
    assert [table.num_reaching(name) for name in ("p", "d", "x")] == [0, 1, 0]
    table.leave(entry)
    assert not table.workers()


# -- queues that stand -----------------------------------------------------------------------


async def queued(made: Cluster, name: str, tokens: int) -> None:
    """An instance reports so many prompt tokens, of many prompts."""
    load = made[name].load
    made[name].load = replace(load, queued_prefill_tokens=tokens, waiting=20 if tokens else 0)
    view = made.scheduler.monitor.view_of
    await eventually(
        lambda: (one := view(made[name].id)) and one.load.queued_prefill_tokens == tokens
    )


@pytest.mark.parametrize("mode", list(Mode))
async def test_where_prompts_wait_for_long_on_end_nobody_new_is_let_in(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "PATIENCE_S", 0.2)
    pair = FakeInstance("p", Role.PREFILL, decode="d"), FakeInstance("d", Role.DECODE)
    async with cluster(*pair, mode=mode) as made:
        for name in ("p", "d"):
            made.scheduler._speeds.answered(made[name].id, 1000, sent_s=0.0, now=1.0)
            await queued(made, name, 9000)
        (status, _, _), since_s = await made.ask(), time.monotonic()
        assert status == 200  # it may be a burst
        while (found := await made.ask())[0] == 200:
            assert time.monotonic() - since_s < 10
        status, answer, headers = found
        assert (status, answer["error"]["code"]) == (503, "queue_full")
        assert 5 <= int(headers["Retry-After"]) <= 60  # the queue, as fast as it was so far
        for path in ("/v1/embeddings", "/v1/responses"):
            assert (await made.ask(path))[0] == 503
        scheduler, now = made.scheduler, time.monotonic()
        assert scheduler.crowded("", now, is_new=True)
        assert not scheduler.crowded("", now, is_new=False)  # as of a request that came before
        for name in ("p", "d"):
            await queued(made, name, 0)
        await eventually(lambda: not made.scheduler._full(time.monotonic()))
        assert (await made.ask())[0] == 200
