"""The laboratory's HTTP client: times count from when a request was due, and nothing is hidden."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from examples.benchmarks.client import Request, Target, client, play, send
from examples.benchmarks.figures import figures, share_in_time
from tests.certificates import CERTIFICATE, CERTIFICATE_KEY

Write = Callable[[bytes], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx-tetri-decode: decode-0\r\n\r\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def event(text: str, *, usage: int = 0) -> bytes:
    content: dict[str, object] = {"choices": [{"text": text, "token_ids": [len(text)]}]}
    if usage:
        content = {"choices": [], "usage": {"completion_tokens": usage}}
    return chunk(f"data: {json.dumps(content)}\n\n".encode())


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


@asynccontextmanager
async def serving(
    respond: Callable[[Write], Awaitable[None]], tls: ssl.SSLContext | None = None
) -> AsyncIterator[Target]:
    tasks: list[asyncio.Task[None]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        try:
            await exchange(reader, writer)
        finally:
            writer.close()

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)

        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        await respond(write)

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    async with server:
        port = server.sockets[0].getsockname()[1]
        scheme = "http" if tls is None else "https"
        yield Target(f"{scheme}://127.0.0.1:{port}", "model", keep_outputs=True)
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def request(output_tokens: int, at_s: float = 0.0, *, stream: bool = True) -> Request:
    return Request(at_s, [10, 11], output_tokens, stream)


async def test_a_late_first_token_and_gaps_are_measured() -> None:
    async def respond(write: Write) -> None:
        await asyncio.sleep(0.1)
        await write(HEAD + event("a"))
        await asyncio.sleep(0.05)
        await write(event("b") + event("", usage=2) + END)

    async with serving(respond) as target:
        (reply,) = await play(target, [request(2)])
    assert reply.error == ""
    assert (reply.text, reply.token_ids, reply.num_tokens) == ("ab", [1, 1], 2)
    assert reply.ttft_s >= 0.1
    assert reply.jct_s > reply.ttft_s
    assert len(reply.gaps_us) == 1
    assert reply.headers["x-tetri-decode"] == "decode-0"


async def test_requests_are_sent_when_due_whatever_the_others_do() -> None:
    order: list[float] = []
    both_came = asyncio.Event()

    async def respond(write: Write) -> None:
        order.append(asyncio.get_running_loop().time())
        if len(order) == 2:
            both_came.set()
        async with asyncio.timeout(10):
            await both_came.wait()
        await write(HEAD + event("a") + event("", usage=1) + END)

    async with serving(respond) as target:
        replies = await play(target, [request(1), request(1, 0.1)])
    assert [each.error for each in replies] == ["", ""]
    assert order[1] - order[0] > 0.05


async def test_a_request_is_due_when_so_many_tokens_of_another_one_have_come() -> None:
    turns = iter(range(2))

    async def respond(write: Write) -> None:
        is_first = next(turns) == 0
        await write(HEAD + event("a"))
        await asyncio.sleep(0.2 if is_first else 0.0)
        await write(event("b"))
        await asyncio.sleep(0.1 if is_first else 0.0)
        await write(event("", usage=2) + END)

    late = Request(0.05, [10, 11], 2, after=(1, 2))
    async with serving(respond) as target:
        second, first = await play(target, [late, request(2)])
    assert [first.error, second.error] == ["", ""]
    assert first.due_s == 0.0
    came_s = first.ttft_s + 1e-6 * first.gaps_us[0]
    assert second.due_s == pytest.approx(came_s + 0.05, abs=1e-3)
    assert second.ttft_s < first.jct_s  # counts from then


async def test_a_request_does_not_wait_for_tokens_that_will_not_come() -> None:
    async def respond(write: Write) -> None:
        await write(HEAD + event("a") + event("", usage=1) + END)

    async with serving(respond) as target:
        _, second = await play(target, [request(1), Request(0.0, [10], 1, after=(0, 9))])
    assert second.error == ""


async def test_an_event_split_over_reads_is_counted_once() -> None:
    data = HEAD + event("a") + event("b") + event("", usage=2) + END

    async def respond(write: Write) -> None:
        for start in range(0, len(data), 7):
            await write(data[start : start + 7])
            await asyncio.sleep(0)

    async with serving(respond) as target:
        reply = await send(target, request(2))
    assert reply.error == ""
    assert len(reply.gaps_us) == 1


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (HEAD + event("a"), "connection lost"),
        (HEAD + event("a") + event("", usage=1) + END, "1 of 2 tokens came"),
        (HEAD + chunk(b'\ndata: {"error": {"message": "full"}}\n\n') + END, '"message": "full"'),
        (b"", "connection lost"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\nno", "HTTP 500 no"),
    ],
    ids=["broken", "short", "error event", "no response", "status"],
)
async def test_what_is_not_complete_has_an_error(raw: bytes, error: str) -> None:
    async with serving(lambda write: write(raw)) as target:
        reply = await send(target, request(2))
    assert error in reply.error
    assert reply.is_clear_error is ("message" in error)


async def test_a_refusal_is_told_from_other_errors() -> None:
    body = b'{"error": {"message": "queue is full", "code": "queue_full"}}'
    head = b"HTTP/1.1 503 Busy\r\nRetry-After: 2\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with serving(lambda write: write(head + body)) as target:
        reply = await send(target, request(2))
    assert reply.is_refused
    assert reply.is_clear_error
    assert reply.headers["retry-after"] == "2"


async def test_a_server_that_stays_quiet_is_given_up() -> None:
    async with serving(lambda write: asyncio.sleep(5)) as target:
        quiet = Target(target.url, "model", quiet_s=0.3)
        (reply,) = await play(quiet, [request(1)])
    assert "nothing was received" in reply.error


async def test_a_response_that_is_not_streamed_is_read_too() -> None:
    body = json.dumps(
        {"choices": [{"message": {"content": "hi"}}], "usage": {"completion_tokens": 2}}
    ).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with serving(lambda write: write(head + body)) as target:
        reply = await send(target, Request(0.0, "hello", 2, False))
    assert (reply.error, reply.text, reply.num_tokens) == ("", "hi", 2)


@pytest.mark.parametrize("is_https", [False, True])
async def test_a_client_in_a_process_of_its_own_plays_a_schedule(is_https: bool) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if is_https else None
    if tls is not None:
        tls.load_cert_chain(CERTIFICATE, CERTIFICATE_KEY)

    async def respond(write: Write) -> None:
        await write(HEAD + event("a") + event("", usage=1) + END)

    async with serving(respond, tls) as target:
        with client({0}) as asked:
            replies = await asyncio.to_thread(asked.play, target, [request(1), request(1)])
    found = figures(replies)
    assert (found["completed"], found["failed"]) == (2, 0)
    assert share_in_time(replies, 60.0, 60.0) == 1.0
    assert share_in_time(replies, 0.0, 60.0) == 0.0
