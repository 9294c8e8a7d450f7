"""The bound on requests that one instance has at a time."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from tests.router.fakes import (
    FakeInstance,
    begin,
    cluster,
    eventually,
    held_back,
    let_go,
    pair,
    refused,
)
from vllm_tetri import logs
from vllm_tetri.messages import Dispatched
from vllm_tetri.policy import overload
from vllm_tetri.router.table import RequestTable
from vllm_tetri.types import InstanceId, InstanceLoad, Mode, RequestId, Role, StepCoefficients


async def test_a_full_instance_leads_to_the_next_and_all_full_to_503() -> None:
    p1, p2 = held_back(*(FakeInstance(f"p{n}", Role.PREFILL, decode="d") for n in (1, 2)))
    p2.load = InstanceLoad(queued_prefill_tokens=1000)
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


async def test_a_limit_is_logged_when_it_takes_effect_and_when_it_has_none(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "QUIET_S", 0.3)
    caplog.set_level(logging.INFO, "vllm_tetri")

    def said() -> list[str]:
        return [each.message for each in caplog.records if "--max-in-flight" in each.message]

    (both,) = held_back(FakeInstance("b", Role.BOTH))
    async with cluster(both, max_in_flight_each=1) as made:
        (asking,) = await begin(made, 1)
        assert said() == []
        for _ in range(5):
            assert (await made.ask())[0] == 503
        assert len(said()) == 1
        assert "b cannot take more; new requests go elsewhere or get 503" in said()[0]
        await eventually(lambda: len(said()) == 2)
        assert "affected 5 requests" in said()[1]
        assert (await made.ask())[0] == 503
        assert len(said()) == 3
        let_go(both)
        assert (await asking)[0] == 200


async def test_decode_instances_are_bounded_too() -> None:
    prefill, decode = pair()
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
        await refused(made, "instances that could serve it alone (1)", best_of=2)
        await refused(made, "instances that could serve it alone (1)", path="/v1/embeddings")
        await refused(made, "instances that may store the output (1)", path="/v1/responses")
        let_go(both)
        assert (await asking)[0] == 200
        status, _, _ = await made.ask("/v1/embeddings")
        assert status == 200


async def test_a_request_counts_where_it_is_worked_on() -> None:
    table, (p, d, x, y) = RequestTable("r"), map(InstanceId, "pdxy")
    entry = table.enter("1", now=0.0)
    transfer, _ = entry.send_prefill(p, "test")
    assert table.workers == {p: 1}
    for decode in (x, d):  # x refused it
        table.on_dispatched(Dispatched(RequestId("1"), transfer, decode))
    assert table.workers == {p: 1}
    assert [table.num_reaching(name) for name in (p, d, x, y)] == [1, 1, 1, 0]
    entry.hand_over(d)
    assert table.workers == {d: 1}
    entry.begin_output()
    assert [table.num_reaching(name) for name in (p, d, x)] == [0, 1, 0]
    table.leave(entry)
    assert not table.workers


# -- queues that stand -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode))
async def test_new_prompts_are_refused_at_a_persistent_queue(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overload, "PATIENCE_S", 0.2)
    async with cluster(*pair(), mode=mode, max_queue_delay_s=2.0) as made:
        for name in ("p", "d"):
            # Whatever is sent before the next report, it has blocks.
            room = {"blocks_total": 1 << 20, "cost": StepCoefficients(prompt_s=0.001)}
            await made.report(name, queued_prefill_tokens=9000, waiting=20, **room)
        (status, _, _), since_s = await made.ask(), time.monotonic()
        assert status == 200  # it may be a burst
        while (found := await made.ask())[0] == 200:
            assert time.monotonic() - since_s < 10
        status, _, headers = found
        assert (status, headers["x-tetri-error"]) == (503, "queue_full")
        assert 2 <= int(headers["Retry-After"]) <= 60  # 9 s of prompts
        for path in ("/v1/embeddings", "/v1/responses"):
            assert (await made.ask(path))[0] == 503
        for name in ("p", "d"):
            await made.report(name, queued_prefill_tokens=0, waiting=0)
        while (await made.ask())[0] != 200:
            assert time.monotonic() - since_s < 20
