"""Streams whose events the C++ core passes on, of which clients see nothing."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from aiohttp import web

from tests.certificates import CERTIFICATE, CERTIFICATE_KEY, trusting
from tests.router.fakes import Cluster, FakeInstance, Handler, both, cluster, eventually, hang
from tests.router.raw import connected, post, read_answer
from tests.router.scripts import CHAT, Script, joined
from tests.router.writers import (
    COMPLETION,
    PATHS,
    begin_stream,
    body_of,
    die,
    script_of,
    stream_of,
    two,
)
from vllm_tetri.handover import DecodeParams
from vllm_tetri.router import _core
from vllm_tetri.router._core import Flow, FlowState
from vllm_tetri.types import Mode

TEXTS = tuple(f" word{index} é日" for index in range(60))
BEFORE = 4  # events that come one by one, so that those after them flow
STREAM = b'{"model":"tiny","prompt":"x","stream":true}'


@pytest.fixture
def flows(monkeypatch: pytest.MonkeyPatch) -> list[Flow]:
    """All flows that begin."""
    found = list[Flow]()

    class Noting(_core.Pump):
        def begin(self, *args: Any, **more: Any) -> Flow:
            flow = super().begin(*args, **more)
            found.append(flow)
            return flow

    monkeypatch.setattr(_core, "Pump", Noting)
    return found


async def begin_slowly(request: web.Request, events: list[bytes]) -> web.StreamResponse:
    """Send a few events, one at a time."""
    response = await begin_stream(request)
    for event in events:
        await response.write(event)
        await asyncio.sleep(0.01)
    return response


def slowly(dies_after: int | None = None, gate: asyncio.Event | None = None) -> Handler:
    """Write one event at a time; it dies or waits in the middle, if wanted."""

    async def handle(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        events = script_of(request, body, texts=TEXTS).events()
        response = await begin_stream(request, events[0])
        for index, event in enumerate(events[1:], 1):
            await asyncio.sleep(0.001)
            if gate is not None and index == len(TEXTS) // 2:
                await gate.wait()
            if index == dies_after:
                die(fake, request)
                await hang()
            await response.write(event)
        return response

    return handle


@asynccontextmanager
async def one(handler: Handler, **options: Any) -> AsyncIterator[Cluster]:
    instance = both()
    instance.handler = handler
    async with cluster(instance, mode=Mode.WHOLE, **options) as made:
        yield made


def whole(path: str, headers: Any, **options: Any) -> bytes:
    script = Script(TEXTS, is_chat=path == CHAT, id=headers["x-request-id"], **options)
    return b"".join(script.events())


def prior_of(fake: FakeInstance) -> list[int]:
    """The output that a request brought along."""
    params = fake.leg()
    assert isinstance(params, DecodeParams)
    assert params.prior_output is not None
    return params.prior_output.token_ids


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{}, {"return_token_ids": True}, {"logprobs": 1}])
async def test_a_stream_flows_and_is_that_of_the_instance(
    path: str, options: dict[str, Any], flows: list[Flow]
) -> None:
    seen = {"has_token_ids": "return_token_ids" in options, "has_logprobs": "logprobs" in options}
    more = {"logprobs": True} if path == CHAT and "logprobs" in options else options
    async with one(slowly()) as made:
        for _ in range(2):  # the connection to the instance is used again
            raw, headers = await stream_of(made, path, **more)
            assert raw == whole(path, headers, **seen)
        ended = made.scheduler.history.since(0.0)
    assert [each.state for each in flows] == [FlowState.ENDED] * 2
    assert all(each.num_events > 10 for each in flows)
    assert [each.generated for each in ended] == [raw.count(b"\n\n")] * 2


@pytest.mark.parametrize("path", PATHS)
async def test_an_output_whose_instance_dies_goes_on_behind_what_flowed(
    path: str, flows: list[Flow]
) -> None:
    spare = slowly()

    async def goes_on(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        return await spare(fake, request, body)

    async with cluster(*two(slowly(dies_after=40), goes_on), mode=Mode.WHOLE) as made:
        raw, headers = await stream_of(made, path)
        assert joined(raw) == joined(whole(path, headers))
        assert flows[0].num_events > 10
        assert prior_of(made["b"]) == Script(TEXTS).token_ids[: 40 - (path == CHAT)]


async def test_events_are_the_same_however_they_are_cut(flows: list[Flow]) -> None:
    dice = Random(0)

    async def cut(_: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        events = script_of(request, body, texts=TEXTS).events()
        response = await begin_slowly(request, events[:BEFORE])
        raw = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in events[BEFORE:])
        transport = request.transport
        assert transport is not None
        while raw:
            size = dice.choice([1, 2, 5, 100, 1000])
            transport.write(raw[:size])
            raw = raw[size:]
            await asyncio.sleep(dice.choice([0, 0, 0.002]))
        return response

    async with one(cut) as made:
        for _ in range(10):
            raw, headers = await stream_of(made, COMPLETION)
            assert raw == whole(COMPLETION, headers)
    assert any(each.num_events > 0 for each in flows)


async def test_what_flows_is_counted_while_it_does(flows: list[Flow]) -> None:
    gate = asyncio.Event()
    async with one(slowly(gate=gate)) as made:
        asking = asyncio.create_task(stream_of(made, COMPLETION))
        await eventually(lambda: flows and flows[0].num_events > 10)
        await asyncio.sleep(0.1)
        (row,) = await made.table()
        assert row["generated"] == len(TEXTS) // 2
        gate.set()
        raw, headers = await asking
        assert raw == whole(COMPLETION, headers)


async def test_a_stream_that_flows_no_more_is_given_up(flows: list[Flow]) -> None:
    gate = asyncio.Event()
    async with one(slowly(gate=gate), first_byte_s=0.3) as made:
        raw, _ = await stream_of(made, COMPLETION)
        assert b"no byte for 0.3 s" in raw
        assert flows[0].num_events > 10
        await eventually(lambda: made["b"].aborted)


async def test_a_client_that_leaves_ends_its_flow(flows: list[Flow]) -> None:
    gate = asyncio.Event()
    async with one(slowly(gate=gate)) as made:
        async with connected(made) as (_, writer):
            writer.write(post(STREAM))
            await eventually(lambda: flows and flows[0].num_events > 10)
        await eventually(lambda: made["b"].aborted and not len(made.scheduler.table))
        # FULL where an event was written after the client had left.
        assert flows[0].state in (FlowState.ENDED, FlowState.FULL)


async def test_a_slow_client_gets_everything(flows: list[Flow]) -> None:
    texts = tuple(f"{index} " + 5_000 * "x" for index in range(3_000))
    script = replace(Script(texts), id="slow")

    async def pour(_: FakeInstance, request: web.Request, __: Any) -> web.StreamResponse:
        events = script.events()
        response = await begin_slowly(request, events[:BEFORE])
        for event in events[BEFORE:]:
            await response.write(event)
        return response

    async with one(pour) as made, connected(made) as (reader, writer):
        writer.write(post(STREAM))
        await eventually(lambda: flows)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await eventually(lambda: any(each.state is FlowState.FULL for each in flows))
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await read_answer(reader)
    assert answer.body == b"".join(script.events())


async def test_an_output_goes_on_elsewhere_while_it_flows(flows: list[Flow]) -> None:
    gate = asyncio.Event()

    async with cluster(
        *two(slowly(gate=gate), slowly()), mode=Mode.WHOLE, silent_after_s=0.3
    ) as made:
        asking = asyncio.create_task(stream_of(made, COMPLETION))
        await eventually(lambda: flows and flows[0].num_events > 10)
        made["a"].is_healthy = False
        made["a"].speaks.clear()  # it hangs
        raw, headers = await asking
        assert joined(raw) == joined(whole(COMPLETION, headers))
        gate.set()
        made["a"].speaks.set()


async def test_with_tls_nothing_flows(flows: list[Flow]) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATE, CERTIFICATE_KEY)
    async with one(slowly(), tls=tls) as made:
        body = body_of(COMPLETION, stream=True)
        async with made.client.post(made.url + COMPLETION, json=body, ssl=trusting()) as response:
            assert await response.read() == whole(COMPLETION, response.headers)
    assert flows == []


async def test_so_many_streams_flow_and_others_pass(flows: list[Flow]) -> None:
    gate, half = asyncio.Event(), len(TEXTS) // 2
    async with one(slowly(gate=gate), max_flows=1) as made:
        asking = [asyncio.create_task(stream_of(made, COMPLETION)) for _ in range(2)]
        await eventually(lambda: flows and flows[0].num_events > 10)
        while [row["generated"] for row in await made.table()] != [half, half]:
            await asyncio.sleep(0.01)
        assert len(flows) == 1
        gate.set()
        for raw, headers in await asyncio.gather(*asking):
            assert raw == whole(COMPLETION, headers)
        flows.clear()
        await stream_of(made, COMPLETION)  # there is room again
        assert len(flows) == 1


async def test_a_long_output_is_kept_in_parts(flows: list[Flow]) -> None:
    texts = tuple(f"{index} " + 2_000 * "x" for index in range(100))

    async def handle(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        given = script_of(request, body, texts=texts)
        events = given.events() if fake.id == "a" else given.events(80)
        response = await begin_stream(request, events[0])
        for event in events[1:80] if fake.id == "a" else events[1:]:
            await asyncio.sleep(0.002)
            await response.write(event)
        if fake.id == "a":
            die(fake, request)
            await hang()
        return response

    async with cluster(*two(handle, handle), mode=Mode.WHOLE) as made:
        raw, _ = await stream_of(made, COMPLETION)
        assert prior_of(made["b"]) == Script(texts).token_ids[:80]
    texts_got = [json.loads(each[6:])["choices"][0]["text"] for each in raw.split(b"\n\n")[:-2]]
    assert "".join(texts_got) == "".join(texts)
    assert flows[0].num_events > 30
