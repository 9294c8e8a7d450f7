"""The client of a soak against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import pytest

from tests.router.servers import Server, serving
from vllm_tetri.bench.soak import load
from vllm_tetri.bench.soak.answers import Answer, Failed, difference
from vllm_tetri.bench.soak.client import Client
from vllm_tetri.bench.soak.crowd import Crowd
from vllm_tetri.bench.soak.load import CHAT, COMPLETIONS, Request
from vllm_tetri.bench.soak.tally import Asked, End


def test_requests_have_every_shape_that_fits_the_window() -> None:
    found = load.requests("m", 2048, Random(0))
    assert {each.path for each in found} == {CHAT, COMPLETIONS}
    assert len(found) == 20
    assert len(load.requests("m", 256, Random(0))) == 10  # of prompts of up to 150 tokens
    assert found[0].streamed().body == {**found[0].body, "stream": True}
    assert found == load.requests("m", 2048, Random(0))


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
GOOD = Answer("ab", [1, 2])
STREAM = [
    b'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\n',
    b'data: {"choices": [{"text": "b", "token_ids": [2]}]}\n\n',
    b"data: [DONE]\n\n",
]
ASK = Request(COMPLETIONS, {"model": "m", "prompt": [1]})


def message(status: str, body: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 " + status.encode(), b"Content-Type: application/json", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


def whole(text: str, token_ids: list[int]) -> bytes:
    return message(
        "200 OK", json.dumps({"choices": [{"text": text, "token_ids": token_ids}]}).encode()
    )


ERROR = b'{"error": {"message": "it broke", "code": 502}}'
FULL = message("503 Service Unavailable", ERROR, b"Retry-After: 1")
BREAKS = b""


@asynccontextmanager
async def serving_bytes(*answers: bytes) -> AsyncIterator[Server]:
    """A server that gives these answers in turn, the last one again and again, and closes
    each connection."""
    left = list(answers)

    async def serve(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        await writer.drain()
        writer.close()

    async with serving(serve) as server:
        yield server


@asynccontextmanager
async def answering(*answers: bytes, **options: Any) -> AsyncIterator[tuple[Client, Server]]:
    """A client of one such server."""
    async with serving_bytes(*answers) as server:
        client = Client({"router": server.url}, **options)
        try:
            yield client, server
        finally:
            await client.close()


@asynccontextmanager
async def between(*routers: bytes, **options: Any) -> AsyncIterator[tuple[Client, list[Server]]]:
    """A client of several that always give the same answer."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving_bytes(each)) for each in routers]
        urls = {f"router-{index}": server.url for index, server in enumerate(servers)}
        client = Client(urls, **options)
        stack.push_async_callback(client.close)
        yield client, servers


def nobody() -> str:
    """The URL of a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize(
    ("request_", "answer", "end"),
    [
        (ASK, whole("ab", [1, 2]), End.GOOD),
        (ASK.streamed(), HEAD + b"".join(STREAM), End.GOOD),
        (ASK, whole("ab", [1, 3]), End.WRONG),
        (ASK, whole("ax", [1, 2]), End.WRONG),
        (ASK.streamed(), HEAD + STREAM[0] + STREAM[2], End.WRONG),
        (ASK.streamed(), HEAD + b"".join(STREAM[:2]), End.LOST),
        (ASK.streamed(), HEAD + STREAM[0] + b"data: " + ERROR + b"\n\n", End.ERROR),
        (ASK, message("502 Bad Gateway", ERROR), End.ERROR),
        (ASK, message("500 Internal Server Error", b"oops"), End.LOST),
        (ASK, whole("ab", [1, 2])[:-5], End.LOST),
        (ASK, BREAKS, End.LOST),
        (ASK, message("200 OK", b"{}"), End.LOST),
        (ASK, b"no HTTP at all\r\n\r\n", End.LOST),
    ],
)
async def test_every_end_has_a_name(request_: Request, answer: bytes, end: End) -> None:
    async with answering(answer, patience_s=0.0) as (client, _):
        found = await client.ask(request_, GOOD)
        assert found.end is end, found.words
        assert bool(found.words) == (end is not End.GOOD)
        assert found.router == "router"


async def test_a_client_comes_again_when_it_is_told_to() -> None:
    async with answering(FULL, FULL, whole("ab", [1, 2])) as (client, server):
        found = await client.ask(ASK, GOOD)
        assert (found.end, found.again, len(server.requests)) == (End.GOOD, 2, 3)


async def test_a_client_does_not_come_again_for_ever() -> None:
    async with answering(FULL, patience_s=0.0) as (client, _):
        found = await client.ask(ASK, GOOD)
        assert (found.end, "it broke" in found.words) == (End.ERROR, True)


async def test_nobody_to_ask_is_a_reason_to_come_again() -> None:
    client = Client({"router": nobody()}, patience_s=0.5)
    found = await client.ask(ASK, GOOD)
    assert (found.end, found.again > 0, found.broke) == (End.LOST, True, ())
    assert await client.get("router", "/tetri/v1/instances") is None
    with pytest.raises(Failed, match="nobody listens"):
        await client.answer(ASK)
    await client.close()


async def test_routers_are_asked_in_turn() -> None:
    async with between(whole("ab", [1, 2]), whole("ab", [1, 2])) as (client, servers):
        found = [await client.ask(ASK, GOOD) for _ in range(4)]
        assert [each.router for each in found] == ["router-0", "router-1"] * 2
        assert [len(server.requests) for server in servers] == [2, 2]


@pytest.mark.parametrize(("refusal", "broke"), [(FULL, ()), (BREAKS, ("router-0",))])
async def test_what_one_router_does_not_take_goes_to_the_next_at_once(
    refusal: bytes, broke: tuple[str, ...]
) -> None:
    async with between(refusal, whole("ab", [1, 2])) as (client, _):
        found = await client.ask(ASK, GOOD)
        assert (found.end, found.router, found.again) == (End.GOOD, "router-1", 1)
        assert found.broke == broke


async def test_a_router_that_nobody_listens_at_is_passed_over() -> None:
    async with serving_bytes(whole("ab", [1, 2])) as server:
        client = Client({"router-0": nobody(), "router-1": server.url})
        found = await client.ask(ASK, GOOD)
        assert (found.end, found.router, found.again, found.broke) == (
            End.GOOD, "router-1", 1, (),
        )  # fmt: skip
        await client.close()


async def test_a_stream_that_has_begun_is_not_asked_for_again() -> None:
    async with between(HEAD + STREAM[0], HEAD + b"".join(STREAM)) as (client, servers):
        found = await client.ask(ASK.streamed(), GOOD)
        assert (found.end, found.router, found.again) == (End.LOST, "router-0", 0)
        assert not servers[1].requests


async def test_every_try_has_a_name_of_its_own() -> None:
    async with between(FULL, whole("ab", [1, 2])) as (client, servers):
        found = await client.ask(ASK, GOOD)
        first, last = (server.requests[0].lower() for server in servers)
        assert f"x-request-id: {found.id}\r\n".encode() in last
        assert found.id.encode() not in first


async def test_a_client_may_leave_and_an_answer_may_be_too_late() -> None:
    async def hang(_: bytes, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client has gone

    async with serving(hang) as server:
        client = Client({"router": server.url}, limit_s=0.1)
        assert (await client.ask(ASK, GOOD, leaves_after_s=0.01)).end is End.LEFT
        late = await client.ask(ASK, GOOD)
        assert (late.end, "no answer within 0.1 s" in late.words) == (End.LOST, True)
        await client.close()


async def test_silence_of_a_stream_is_measured() -> None:
    async def serve(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + STREAM[0])
        await asyncio.sleep(1.0)  # longer than a busy machine holds a test up
        writer.write(b"".join(STREAM[1:]))
        await writer.drain()
        writer.close()

    async with serving(serve) as server:
        client = Client({"router": server.url})
        found = await client.ask(ASK.streamed(), GOOD)
        assert found.end is End.GOOD
        assert found.gap_s >= 1.0
        assert len(found.heard_s) == len(STREAM)
        assert found.heard_s[1] - found.heard_s[0] == found.gap_s
        await client.close()


async def test_a_crowd_asks_pauses_and_goes_on() -> None:
    seen: list[Asked] = []

    async def more(number: int) -> None:
        async with asyncio.timeout(10.0):
            while len(seen) < number:
                await asyncio.sleep(0.002)

    async with (
        answering(whole("ab", [1, 2])) as (client, server),
        Crowd(client, [(ASK, GOOD)], Random(0), 3, seen.append) as crowd,
    ):
        await more(5)
        await crowd.pause()
        paused, asked = len(seen), server.num_connections
        async with asyncio.timeout(10.0):
            await client.ask(ASK, GOOD)  # somebody else's, for which there is time enough
        assert (len(seen), server.num_connections) == (paused, asked + 1)
        crowd.go_on()
        await more(paused + 5)
    assert End.GOOD in {each.end for each in seen}


def test_a_difference_has_a_place() -> None:
    assert difference(Answer("", [1, 2, 4]), Answer("", [1, 2, 3, 4])) == (
        "3 tokens instead of 4, equal up to token 2"
    )
