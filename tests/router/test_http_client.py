"""HTTP to instances, against servers that write bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from tests.router.fakes import info_of
from tests.router.servers import OK, listening, request_of, says, serving
from vllm_tetri.router import http_client, response
from vllm_tetri.router.errors import ConnectionLost, Unreachable
from vllm_tetri.router.http_client import HttpClient
from vllm_tetri.router.liveness import is_reachable
from vllm_tetri.router.upstream import Upstream
from vllm_tetri.types import Role

SILENCE_S = 30.0


@asynccontextmanager
async def wires(silence_s: float = SILENCE_S) -> AsyncIterator[HttpClient]:
    found = HttpClient(silence_s)
    try:
        yield found
    finally:
        found.close()


async def whole(wires: HttpClient, url: str, method: str = "POST", body: bytes = b"{}") -> bytes:
    answer = await wires.send(url, method, "/path?a=b", body, {"X-One": "1"})
    try:
        return await answer.read()
    finally:
        answer.close()


async def test_a_request_as_it_is_written_and_an_answer_as_it_is_read() -> None:
    async with serving(says(OK)) as server, wires() as client:
        answer = await client.send(server.url, "POST", "/path?a=b", b"{}", {"X-One": "ä"})
        assert (answer.status, answer.content_type) == (200, "text/plain")
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert await answer.read() == b"ok"
        assert await answer.read_some() == b""
    name = server.url.removeprefix("http://")
    expected = (
        f"POST /path?a=b HTTP/1.1\r\nHost: {name}\r\nX-One: ä\r\nContent-Length: 2\r\n\r\n{{}}"
    )
    assert server.requests == [expected.encode()]


async def test_a_connection_that_something_on_the_way_forgets_is_lost() -> None:
    async with serving(says(OK)) as server, wires() as client:
        await whole(client, server.url)
        (connection,) = client.connections
        of = connection.transport.get_extra_info("socket").getsockopt
        assert of(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert of(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60


async def test_a_connection_serves_one_request_after_another() -> None:
    async with serving(says(OK)) as server, wires() as client:
        for _ in range(5):
            assert await whole(client, server.url) == b"ok"
        assert server.num_connections == 1
        await asyncio.gather(*(whole(client, server.url) for _ in range(3)))
        assert server.num_connections == 3


@pytest.mark.parametrize(
    ("sent", "num_connections"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 1),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", 2),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", 2),
        (b"HTTP/1.1 200 OK\r\n\r\nok", 2),  # it ends with its connection
    ],
)
async def test_a_connection_is_used_again_if_it_may_be(sent: bytes, num_connections: int) -> None:
    ends = b"Length" not in sent
    async with serving(says(sent, ends=ends)) as server, wires() as client:
        assert await whole(client, server.url) == b"ok"
        assert await whole(client, server.url) == b"ok"
        assert server.num_connections == num_connections


async def test_chunks_come_as_they_are_sent() -> None:
    go_on = asyncio.Event()

    async def serve(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await go_on.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

    async with serving(serve) as server, wires() as client:
        answer = await client.send(server.url, "GET", "/", b"", {})
        assert await answer.read_some() == b"one"
        go_on.set()
        assert await answer.read() == b"two"
        await whole(client, server.url)
        assert server.num_connections == 1


async def test_bytes_are_poured_as_they_come_until_no_more_are_wanted() -> None:
    go_on, taken = asyncio.Event(), list[bytes]()

    async def serve(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
        for letter in (b"a", b"b", b"c", b"de"):
            await go_on.wait()
            go_on.clear()
            writer.write(letter)

    def take(some: bytes) -> bool:
        taken.append(some)
        go_on.set()
        if some == b"de":
            raise ValueError("enough")
        return some != b"b"

    async with serving(serve) as server, wires() as client, asyncio.timeout(SILENCE_S):
        answer = await client.send(server.url, "POST", "/", b"", {})
        go_on.set()
        assert await answer.pour(take)
        assert taken == [b"a", b"b"]
        assert await answer.peek() == b"c"  # which was not taken
        go_on.set()
        with pytest.raises(ValueError, match="enough"):
            await answer.pour(take)
        assert taken == [b"a", b"b", b"c", b"de"]
        assert not await answer.pour(take)  # that was all


async def test_a_connection_that_was_closed_while_idle_is_exchanged() -> None:
    async def serve(request: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if server.num_connections == 1 and len(server.requests) == 2:
            writer.close()  # as if it had been closed when the request came
        else:
            writer.write(OK)

    async with serving(serve) as server, wires() as client:
        assert await whole(client, server.url) == b"ok"
        assert await whole(client, server.url) == b"ok"
        assert server.num_connections == 2


async def test_a_server_that_is_gone_with_a_reused_connection_had_the_request() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(OK)
        await request_of(reader)
        server.close()
        writer.transport.abort()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with wires() as client:
        assert await whole(client, url) == b"ok"
        with pytest.raises(ConnectionLost):  # and not Unreachable: it may have died of it
            await whole(client, url)


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\n"])
async def test_an_instance_that_had_the_request_does_not_get_it_again(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It worked on it, said nothing yet or little, and died, maybe of it."""
    monkeypatch.setattr(http_client, "_CLOSING_S", 30.0 if begun else 0.05)

    async def serve(request: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 2:
            writer.write(begun)
            await asyncio.sleep(0.2)
            writer.close()
        else:
            writer.write(OK)

    async with serving(serve) as server, wires() as client:
        assert await whole(client, server.url) == b"ok"
        with pytest.raises(ConnectionLost, match="connection closed"):
            await whole(client, server.url)
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "connection closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "connection closed"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not HTTP"),
    ],
)
async def test_no_answer_is_an_error(sent: bytes, reason: str) -> None:
    async with serving(says(sent, ends=True)) as server, wires() as client:
        with pytest.raises(ConnectionLost, match=reason):
            await whole(client, server.url)
        assert server.num_connections == 1


@pytest.mark.parametrize("rest", [b"", b"5\r\nab"])
async def test_an_answer_that_breaks_off_is_an_error_behind_what_came(rest: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n"
    async with serving(says(head + rest, ends=True)) as server, wires() as client:
        answer = await client.send(server.url, "POST", "/", b"", {})
        came = await answer.read_some()
        assert came.startswith(b"one")
        with pytest.raises(ConnectionLost, match="connection closed"):
            await answer.read()


async def test_an_answer_that_falls_silent_is_an_error() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab"
    async with serving(says(head)) as server, wires(silence_s=0.2) as client:
        answer = await client.send(server.url, "POST", "/", b"", {})
        assert await answer.read_some() == b"ab"
        with pytest.raises(ConnectionLost, match=r"no byte for 0\.2 s"):
            await answer.read_some()


async def test_a_refused_connection_is_an_error() -> None:
    async with serving(says(OK)) as server:
        url = server.url
    async with wires() as client:
        with pytest.raises(Unreachable, match="cannot connect"):
            await whole(client, url)


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "http://host:port", "host", "http://[", "http://\u2100x"]
)
async def test_what_is_no_url_cannot_be_reached(url: str) -> None:
    async with wires() as client:
        with pytest.raises(Unreachable, match=r"not an? (HTTP )?URL"):
            await whole(client, url)


@pytest.mark.parametrize("headers", [{"X": "1\r\nY: 2"}, {"X\n": "1"}])
async def test_headers_cannot_smuggle_lines(headers: dict[str, str]) -> None:
    async with serving(says(OK)) as server, wires() as client:
        with pytest.raises(ValueError, match="line break"):
            await client.send(server.url, "GET", "/", b"", headers)
        assert not server.requests


async def test_who_does_not_wait_any_more_closes_the_connection() -> None:
    closed = asyncio.Event()

    async def serve(_: bytes, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        try:
            assert await reader.read() == b""
        finally:
            closed.set()

    async with serving(serve) as server, wires() as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await whole(client, server.url)
        await asyncio.wait_for(closed.wait(), 10)


async def test_closing_an_answer_wakes_who_reads_it() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    async with serving(says(head)) as server, wires() as client:
        answer = await client.send(server.url, "POST", "/", b"", {})
        reading = asyncio.create_task(answer.read())
        await asyncio.sleep(0)
        answer.close()
        with pytest.raises(ConnectionLost, match="closed"):
            await reading
        answer.close()


async def test_nothing_is_read_for_a_reader_who_does_not_read() -> None:
    size = 64 << 20
    written = 0

    async def serve(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(64):
            writer.write(bytes(1 << 20))
            await writer.drain()
            written += 1 << 20

    async with serving(serve) as server, wires(silence_s=0.3) as client:
        answer = await client.send(server.url, "POST", "/", b"", {})
        before = -1
        while before != written:  # until the server is held up
            before = written
            await asyncio.sleep(0.5)
        assert written < size // 2
        assert len(await answer.read()) == size


async def test_an_idle_connection_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_IDLE_S", 0.05)
    gone = asyncio.Event()

    async def serve(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        try:
            await reader.read()
        finally:
            gone.set()

    async with serving(serve) as server, wires() as client:
        assert await whole(client, server.url) == b"ok"
        await asyncio.wait_for(gone.wait(), 10)


@pytest.mark.parametrize("steps", range(6))
async def test_cancelling_a_request_whose_response_comes_affects_no_other(steps: int) -> None:
    """Between the response and its sender's next step the connection may have been reused."""
    has_come = asyncio.Event()

    async def serve(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await writer.drain()
        has_come.set()

    async with serving(serve) as server, wires() as client:
        first = asyncio.create_task(client.send(server.url, "POST", "/", b"", {}))
        await has_come.wait()
        for _ in range(steps):
            await asyncio.sleep(0)
        second = asyncio.create_task(whole(client, server.url))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == b"ok"


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n", b"more"])
async def test_bytes_after_a_response_reach_no_other_request(more: bytes) -> None:
    async def serve(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + (more if len(server.requests) == 1 else b""))

    async with serving(serve) as server, wires() as client:
        assert await whole(client, server.url) == b"ok"
        assert await whole(client, server.url) == b"ok"
        assert server.num_connections == 2


async def test_a_head_without_end_is_an_error() -> None:
    async def serve(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nX: ")
        while True:
            writer.write(b"x" * 10_000)
            await writer.drain()

    async with serving(serve) as server, wires() as client:
        with pytest.raises(ConnectionLost, match="exceeds 2097152 bytes"):
            await whole(client, server.url)


async def test_a_connection_that_still_carries_a_request_is_not_used_again() -> None:
    """An instance may refuse before it has read all."""
    hold = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await writer.drain()
        await hold.wait()

    num_connections = 0
    async with listening(talk) as url, wires() as client:
        assert await whole(client, url, body=bytes(32 << 20)) == b"ok"
        assert await whole(client, url) == b"ok"
        assert num_connections == 2
        hold.set()


async def test_trailers_change_no_header() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n"
    tail = b"Trailer: Content-Type\r\n\r\n2\r\nok\r\n0\r\nContent-Type: text/html\r\n\r\n"
    async with serving(says(head + tail)) as server, wires() as client:
        answer = await client.send(server.url, "GET", "/", b"", {})
        assert await answer.read() == b"ok"
        assert answer.headers["content-type"] == "text/plain"


@pytest.mark.parametrize("kind", [b"", b"Content-Type: text/html charset=utf-8\r\n"])
async def test_a_content_type_that_is_none_is_of_bytes(kind: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\n" + kind + b"Content-Length: 0\r\n\r\n"
    async with serving(says(head)) as server, wires() as client:
        answer = await client.send(server.url, "GET", "/", b"", {})
        assert answer.content_type == "application/octet-stream"


async def test_a_health_check_keeps_nothing_of_an_answer_without_end() -> None:
    gone = asyncio.Event()

    async def serve(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n1")
        with suppress(ConnectionError):
            await reader.read()
        gone.set()

    upstream = Upstream(SILENCE_S)
    async with serving(serve) as server:
        assert await upstream.is_healthy(server.url, 10.0)
        await asyncio.wait_for(gone.wait(), 10)
    assert not await upstream.is_healthy(server.url, 10.0)
    assert not await upstream.is_healthy("http://[", 10.0)
    upstream.close()


async def test_a_whole_answer_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response, "_MAX_BODY_BYTES", 1000)
    long = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b"
    async with serving(says(long % (1000, b"x" * 1000))) as server, wires() as client:
        assert len(await whole(client, server.url)) == 1000
        server.serve = says(long % (5000, b"x" * 1001))
        with pytest.raises(ConnectionLost, match="more than 1000 bytes"):
            await whole(client, server.url)
        assert len(client.connections) == 0


async def test_closing_ends_connections_that_are_being_made() -> None:
    async with serving(says(OK)) as server, wires() as client:
        sending = asyncio.create_task(whole(client, server.url))
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(Unreachable, match="closed"):
            await sending
        assert len(client.connections) == 0
        await asyncio.sleep(0.05)  # the server closes what it has accepted


async def test_a_connection_that_nobody_wants_when_it_is_made_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(says(OK)) as server, wires() as client:
        sending = asyncio.create_task(whole(client, server.url))
        await asyncio.sleep(0)

        class Cancelling(dict[int, int]):
            """Options of a socket, which are read when its connection is made."""

            def items(self) -> Any:
                sending.cancel()
                return super().items()

        monkeypatch.setattr(http_client, "_KEEP_ALIVE", Cancelling())
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert len(client.connections) == 0


@pytest.mark.parametrize(("num_comments", "rest"), [(1, b'data: {"choi'), (2, b"")])
async def test_comments_before_a_stream_take_nothing_of_it_along(
    num_comments: int, rest: bytes
) -> None:
    body = num_comments * b": keep-alive\n\n" + rest
    sent = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    upstream = Upstream(SILENCE_S)
    async with serving(says(sent)) as server:
        answer = await upstream.http.send(server.url, "POST", "/", b"{}", {})
        assert await upstream.first_chunk(info_of("b", Role.BOTH), answer) == rest
    upstream.close()


async def test_a_host_that_answers_is_told_from_one_that_does_not() -> None:
    with socket.socket() as full, ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        assert await is_reachable(url, 5.0)  # nothing listens, and its host says so
        full.listen(0)
        assert await is_reachable(url, 5.0)  # its process does not accept, as if it hung
        # From here on Linux drops what would connect, as a cut network does.
        for _ in range(8):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        assert not await is_reachable(url, 0.2)
        assert await is_reachable("http://[::1", 0.2)  # no address is no cut network
        async with wires() as client:
            sending = asyncio.create_task(client.send(url, "GET", "/", b"", {}, label="it"))
            await asyncio.sleep(0.1)
            assert client.fail_requests("it", "it has left") == 1
            with pytest.raises(Unreachable, match="it has left"):
                await asyncio.wait_for(sending, 1.0)  # and not when connecting ends
            assert len(client.connections) == 0
