"""The router's part of a move: which of two instances the client hears, and what ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.router.fakes import Cluster, FakeInstance, Handler, cluster, eventually, hang, metric
from tests.router.scripts import CHAT, PROMPT_IDS, Script, joined
from tests.router.writers import (
    COMPLETION,
    PATHS,
    STREAM_HEADERS,
    begin_stream,
    body_of,
    dies,
    expected,
    script_of,
    stream_of,
    two,
)
from vllm_tetri.handover import DecodeParams
from vllm_tetri.messages import Moved, Moving
from vllm_tetri.router import moves as moves_module
from vllm_tetri.types import Mode

BEFORE = 4  # events that the first instance writes before the output may move


class Stage:
    """Two instances: `a` has an output, which moves to `b` when the test says so."""

    def __init__(self, made: Cluster, goes_on: asyncio.Event, begins: asyncio.Event) -> None:
        self.made, self.goes_on, self.begins = made, goes_on, begins
        self.a, self.b = made["a"], made["b"]

    async def ordered(self, num_received: int = BEFORE) -> str:
        """The output is to move; returns the transfer's name."""
        await eventually(lambda: self.row().get("generated", -1) >= num_received and self.a.calls)
        request, num_orders = self.row()["id"], len(self.a.moves)
        assert (await self.made.order(f"requests/{request}/move", {"to": "b"}))[0] == 202
        await eventually(lambda: len(self.a.moves) > num_orders)
        order = self.a.moves[-1]
        assert (order.request, order.target) == (request, "b")
        return order.transfer

    def row(self) -> dict[str, Any]:
        rows = self.made.scheduler.table.plain(0.0)["requests"]
        return rows[0] if rows else {}

    def tell(self, fake: FakeInstance, message: Any) -> None:
        assert fake.agent is not None
        fake.agent.publish(message)

    async def moving(self, num_received: int = BEFORE) -> str:
        """The decode request is at `b`."""
        transfer = await self.ordered(num_received)
        request, num_calls = self.row()["id"], len(self.b.calls)
        self.tell(self.a, Moving(request, transfer, [9], "d1", PROMPT_IDS))
        await eventually(lambda: len(self.b.calls) > num_calls)
        params = self.b.leg()
        assert isinstance(params, DecodeParams)
        assert (params.transfer, params.is_early, params.kv_tokens) == (transfer, True, [9])
        return transfer

    async def count(self, outcome: str) -> float:
        name = f'tetri_moves_total{{outcome="{outcome}",reason="order"}}'
        return float(await metric(self.made, name))


@asynccontextmanager
async def stage(options: Mapping[str, Any] = {}, **differs: Any) -> AsyncIterator[Stage]:
    """`a` stops after some events until it `goes_on`; what `b` writes, differently if wanted, waits
    until it `begins`."""
    goes_on, begins = asyncio.Event(), asyncio.Event()

    async def first(_: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        script = script_of(request, body)
        if not body.get("stream"):
            await goes_on.wait()
            return web.json_response(script.whole())
        events = script.events()
        response = await begin_stream(request)
        for index, event in enumerate(events):
            if index == BEFORE:
                await goes_on.wait()
            await response.write(event)
        return response

    def second(**changes: Any) -> Handler:
        async def handle(_: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
            script = script_of(request, body, created=1_800_000_000, **changes)
            response = web.StreamResponse(headers=STREAM_HEADERS)
            if body.get("stream"):
                await response.prepare(request)
            await begins.wait()
            if not body.get("stream"):
                return web.json_response(script.whole())
            for event in script.events(BEFORE):  # all tokens so far in one
                await response.write(event)
            return response

        return handle

    async with cluster(*two(first, second(**differs)), mode=Mode.WHOLE, **options) as made:
        yield Stage(made, goes_on, begins)


def breaks_off(goes_on: asyncio.Event) -> Handler:
    """An instance that dies in the middle of an output."""

    async def handle(fake: FakeInstance, request: web.Request, body: Any) -> Any:
        await begin_stream(request, *script_of(request, body).events()[:BEFORE])
        await goes_on.wait()
        return await dies(fake, request, body)

    return handle


def is_whole(raw: bytes, headers: Any, path: str) -> None:
    """It is the stream of one instance, but for where it was cut into events."""
    created = int(raw.split(b'"created":')[1].split(b",")[0])
    whole = b"".join(Script.events(expected(headers, path)))
    assert joined(raw.replace(b'"created":%d' % created, b'"created":1700000000')) == joined(whole)


@pytest.mark.parametrize("path", PATHS)
async def test_the_client_hears_the_other_instance_once_it_goes_on(path: str) -> None:
    async with stage() as both:
        asking = asyncio.create_task(stream_of(both.made, path))
        await both.moving()
        assert not both.a.aborted
        both.begins.set()
        is_whole(*await asking, path)
        await eventually(lambda: both.a.aborted == 1)
        assert await both.count("moved") == 1
        (ended,) = both.made.scheduler.history.since(0)
        assert ended.reason.endswith("; moved to b (order)")
        assert both.a.cancelled == both.b.cancelled == []


async def test_a_client_that_does_not_read_is_waited_for_before_and_after_a_move() -> None:
    async with stage() as both:
        is_full = asyncio.Event()

        async def first(_: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
            events = script_of(request, body).events()
            response = await begin_stream(request, events[0])
            await is_full.wait()
            await response.write(events[1])
            return await hang()

        both.a.handler = first
        asking = asyncio.create_task(stream_of(both.made, COMPLETION))
        await eventually(lambda: both.row().get("generated") == 1)
        (connection,) = both.made.listener.connections
        connection.pause_writing()
        is_full.set()
        await both.moving(2)
        both.begins.set()
        await eventually(lambda: both.row()["generated"] > 2)
        connection.resume_writing()
        is_whole(*await asking, COMPLETION)


async def test_a_whole_response_comes_from_where_the_output_went() -> None:
    async with stage() as both:
        asking = asyncio.create_task(both.made.ask(**body_of(COMPLETION)))
        transfer = await both.moving(0)
        both.tell(both.b, Moved(transfer))
        await eventually(lambda: both.a.aborted == 1)
        both.begins.set()
        status, answer, headers = await asking
        assert (status, headers["x-tetri-decode"]) == (200, "b")
        assert answer["choices"][0]["text"] == "".join(expected(headers, COMPLETION).texts)


async def test_a_whole_response_stays_if_the_other_instance_refuses_its_request() -> None:
    """Options of its server are no part of what makes two instances alike."""
    async with stage() as both:
        both.b.handler = refuses
        asking = asyncio.create_task(both.made.ask(**body_of(COMPLETION)))
        transfer = await both.moving(0)
        await eventually(lambda: both.a.cancelled == [transfer])
        both.goes_on.set()
        status, _, headers = await asking
        assert (status, headers["x-tetri-decode"]) == (200, "a")
        assert await both.count("failed") == 1


async def refuses(*_: object) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no"}}, status=400)


async def test_the_output_stays_if_the_other_instance_writes_something_else() -> None:
    async with stage(texts=("Ab", " other", "", "é", "", "", "", "")) as both:
        asking = asyncio.create_task(stream_of(both.made, CHAT))
        transfer = await both.moving()
        both.begins.set()
        await eventually(lambda: both.a.cancelled == both.b.cancelled == [transfer])
        both.goes_on.set()
        is_whole(*await asking, CHAT)
        assert await both.count("failed") == 1


async def test_the_output_stays_if_the_other_instance_dies() -> None:
    async with stage() as both:
        both.b.handler = dies
        asking = asyncio.create_task(stream_of(both.made, COMPLETION))
        transfer = await both.moving()
        await eventually(lambda: both.a.cancelled == [transfer])
        both.goes_on.set()
        is_whole(*await asking, COMPLETION)


async def test_the_output_goes_on_if_the_instance_dies_that_had_it() -> None:
    async with stage() as both:
        both.a.handler = breaks_off(both.goes_on)
        asking = asyncio.create_task(stream_of(both.made, COMPLETION))
        await both.moving()
        both.goes_on.set()  # it dies while the other one has all
        await eventually(lambda: not both.a.is_healthy)
        both.begins.set()
        is_whole(*await asking, COMPLETION)
        assert len(both.b.calls) == 1  # nothing was sent again


async def test_a_move_ends_with_the_instance_that_has_not_begun_it() -> None:
    async with stage() as both:
        both.a.handler = breaks_off(both.goes_on)
        asking = asyncio.create_task(stream_of(both.made, COMPLETION))
        transfer = await both.ordered()
        request = both.row()["id"]
        both.goes_on.set()
        await eventually(lambda: both.b.calls and both.a.cancelled == [transfer])
        both.tell(both.a, Moving(request, transfer, [9], "d1", PROMPT_IDS))  # too late
        both.begins.set()
        is_whole(*await asking, COMPLETION)
        assert await both.count("failed") == len(both.b.calls) == 1


async def test_the_output_stays_if_the_other_instance_is_to_leave() -> None:
    async with stage() as both:
        asking = asyncio.create_task(stream_of(both.made, COMPLETION))
        transfer = await both.moving()
        assert (await both.made.order("instances/b/drain", {}))[0] == 202
        await eventually(lambda: both.a.cancelled == both.b.cancelled == [transfer])
        both.goes_on.set()
        is_whole(*await asking, COMPLETION)


async def test_an_instance_that_refuses_keeps_the_output() -> None:
    async with stage() as both:
        asking = asyncio.create_task(stream_of(both.made, COMPLETION))
        transfer = await both.ordered()
        both.tell(both.a, Moving(both.row()["id"], transfer, problem="it is about to end"))
        await eventually(lambda: both.a.cancelled == [transfer])
        both.goes_on.set()
        is_whole(*await asking, COMPLETION)
        assert await both.count("refused") == 1
        assert both.b.calls == []


async def test_a_move_of_which_nothing_is_heard_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moves_module, "_PATIENCE_S", 0.05)
    async with stage() as both:
        asking = asyncio.create_task(stream_of(both.made, COMPLETION))
        transfer = await both.ordered()
        await eventually(lambda: both.a.cancelled == both.b.cancelled == [transfer])
        both.goes_on.set()
        is_whole(*await asking, COMPLETION)
        assert await both.count("late") == 1


async def test_a_client_that_leaves_ends_both() -> None:
    async with stage() as both:
        asking = asyncio.create_task(stream_of(both.made, COMPLETION))
        transfer = await both.moving()
        asking.cancel()
        await eventually(lambda: both.a.aborted == both.b.aborted == 1)
        await eventually(lambda: both.a.cancelled == both.b.cancelled == [transfer])
        assert len(both.made.scheduler.table) == 0


async def test_an_output_that_ends_meanwhile_was_never_moved() -> None:
    async with stage() as both:
        asking = asyncio.create_task(stream_of(both.made, COMPLETION))
        transfer = await both.moving()
        both.goes_on.set()
        is_whole(*await asking, COMPLETION)
        await eventually(lambda: both.b.aborted == 1)
        assert both.a.cancelled == both.b.cancelled == [transfer]
        assert await both.count("ended") == 1


@pytest.mark.parametrize("reason", ["drain", "flip"])
async def test_an_instance_that_leaves_is_told_to_move_its_outputs(reason: str) -> None:
    async with stage() as both:
        asking = asyncio.create_task(stream_of(both.made, COMPLETION, max_tokens=1000))
        await eventually(lambda: both.row().get("generated", 0) >= BEFORE)
        load = {"running": 1, "light": 1.0, "remaining_tokens": 1000, "step_s": 0.05}
        await both.made.report("a", **load)
        both.a.unfinished = "1 unfinished request"
        path, body = {"drain": ("drain", {}), "flip": ("flip", {"role": "prefill"})}[reason]
        assert (await both.made.order(f"instances/a/{path}", body))[0] == 202
        await eventually(lambda: both.a.moves)
        assert both.a.moves[-1].target == "b"
        both.goes_on.set()
        await asking
        both.a.unfinished = ""


@pytest.mark.parametrize(
    ("path", "body"), [("drain", {}), ("flip", {"role": "prefill", "force": True})]
)
async def test_nothing_waits_for_a_period_when_an_instance_leaves(
    monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    monkeypatch.setattr(moves_module, "_LOOK_S", 60.0)
    async with stage({"period_s": 60.0, "silent_after_s": 600.0}) as both:
        options = {"max_tokens": 1000, "ignore_eos": True}
        asking = asyncio.create_task(stream_of(both.made, COMPLETION, **options))
        await eventually(lambda: both.row().get("generated", 0) >= BEFORE)
        await both.made.report("a", step_s=0.05)
        both.a.unfinished = "1 unfinished request"
        assert (await both.made.order(f"instances/a/{path}", body))[0] == 202
        await eventually(lambda: both.a.moves)
        transfer = both.a.moves[-1].transfer
        both.tell(both.a, Moving(both.row()["id"], transfer, [9], "d1", PROMPT_IDS))
        both.begins.set()
        await asking
        both.a.unfinished = ""
        done = {"drain": ("a", "absent"), "flip": ("a", "ready")}[path]
        await eventually(lambda: (done[0], both.made.state("a")) == done)


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 400), ({"to": ""}, 400), ({"to": "b", "more": 1}, 400), ({"to": "z"}, 404),
     ({"to": "a"}, 409)],
)  # fmt: skip
async def test_an_order_that_makes_no_sense_is_refused(body: Any, status: int) -> None:
    async with stage() as both:
        asking = asyncio.create_task(stream_of(both.made, COMPLETION))
        await eventually(lambda: both.row().get("generated", 0) >= BEFORE)
        assert (await both.made.order(f"requests/{both.row()['id']}/move", body))[0] == status
        both.goes_on.set()
        is_whole(*await asking, COMPLETION)
        assert both.a.moves == []


async def test_an_output_whose_instance_hangs_in_its_move_goes_on_at_once() -> None:
    """The instance that would take it computes it, and does not wait for KV that never comes."""
    async with stage() as both:
        asking = asyncio.create_task(stream_of(both.made, COMPLETION))
        transfer = await both.moving()
        both.a.speaks.clear()
        await eventually(lambda: transfer in both.b.lost)
        both.begins.set()
        is_whole(*await asking, COMPLETION)


async def test_a_response_that_is_not_streamed_survives_a_move_whose_source_hangs() -> None:
    """The target gives the output up; the request goes there once more."""

    async def gives_up(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        if len(fake.calls) == 1:
            await eventually(lambda: fake.lost)
            aborted = script_of(request, body).whole()
            aborted["choices"][0]["finish_reason"] = "abort"
            text = json.dumps(aborted, separators=(",", ":"))
            return web.Response(text=text, content_type="application/json")
        return web.json_response(script_of(request, body).whole())

    async with stage() as both:
        both.b.handler = gives_up
        asking = asyncio.create_task(both.made.ask(COMPLETION, **body_of(COMPLETION)))
        await both.moving(0)
        both.a.speaks.clear()
        status, answer, headers = await asking
        assert (status, headers["x-tetri-decode"]) == (200, "b")
        assert answer["choices"][0]["finish_reason"] != "abort"
