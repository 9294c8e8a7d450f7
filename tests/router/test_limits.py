"""Bounds of the port for clients. Each is exceeded by one, and by one only."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import zlib
from typing import Any

import pytest
from aiohttp import web

from tests.router.fakes import Cluster, FakeInstance, both, cluster, eventually, held_back
from tests.router.raw import CLOSED, Answer, connected, exchange, post, read_answer
from vllm_tetri.router import request
from vllm_tetri.router.auth import Limits
from vllm_tetri.router.connection import Connection

GOOD = b'{"model":"tiny","prompt":"hello"}'
QUICK = Limits(head_s=0.2, body_s=0.2, stalled_s=0.2, idle_s=0.3)


async def works(made: Cluster) -> None:
    """Serves the next request, and keeps nothing of what came before."""
    assert (await made.ask())[0] == 200
    assert await made.table() == []


async def test_a_body_of_exactly_the_limit_passes_and_one_byte_more_does_not() -> None:
    async with cluster(both(), limits=Limits(body_bytes=len(GOOD))) as made:
        assert (await exchange(made, post(GOOD))).status == 200
        answer = await exchange(made, post(GOOD + b" "))
        assert (answer.status, answer.error["code"]) == (413, 413)


async def test_a_chunked_body_is_counted_as_it_comes() -> None:
    head = post(b"").partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
    async with cluster(both(), limits=Limits(body_bytes=1000)) as made:
        async with connected(made) as (reader, writer):
            writer.write(head + b"64\r\n" + b" " * 100 + b"\r\n")
            for _ in range(10):
                writer.write(b"64\r\n" + b" " * 100 + b"\r\n")
            assert (await read_answer(reader)).status == 413
        await works(made)


async def test_a_packed_body_is_counted_unpacked() -> None:
    async with cluster(both(), limits=Limits(body_bytes=1 << 20)) as made:
        small = post(gzip.compress(GOOD), more="Content-Encoding: gzip\r\n")
        assert (await exchange(made, small)).status == 200
        bomb = post(gzip.compress(b" " * (64 << 20)), more="Content-Encoding: gzip\r\n")
        assert len(bomb) < 1 << 20
        assert (await exchange(made, bomb)).status == 413
        await works(made)


async def test_a_body_that_is_packed_without_a_header_is_unpacked() -> None:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    packed = packer.compress(GOOD) + packer.flush()
    async with cluster(both()) as made:
        for body in (packed, zlib.compress(GOOD)):
            answer = await exchange(made, post(body, more="Content-Encoding: deflate\r\n"))
            assert answer.status == 200


UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"


async def test_an_upgrade_is_declined_and_its_body_is_no_request() -> None:
    """As Java's client asks for one with each request."""
    inner = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    chunked = post(b"", more=UPGRADE).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunked += b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD)
    async with cluster(both()) as made:
        for data in (post(GOOD, more=UPGRADE), chunked):
            assert (await exchange(made, data)).status == 200
            assert made["b"].calls[-1].body["prompt"] == "hello"
        ends = UPGRADE.replace("Upgrade, HTTP2", "close, Upgrade, HTTP2")
        async with connected(made) as (reader, writer):
            writer.write(post(inner, more=ends))
            assert (await read_answer(reader)).status == 400
            assert await reader.read() == b""
        answer = await exchange(
            made, b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab"
        )
        assert answer.status == 405
        await works(made)


async def test_trailers_are_bounded() -> None:
    head = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    endless = head + b"2\r\n{}\r\n0\r\nX: " + b"a" * 400_000
    limits = Limits(headers=10, body_s=60.0)
    async with cluster(both(), limits=limits) as made:
        assert (await exchange(made, endless)).status == 400
        await works(made)
    async with (
        cluster(both(), limits=limits, keys=("k",)) as made,
        connected(made) as (reader, writer),
    ):
        writer.write(endless)
        assert (await read_answer(reader)).status == 401
        assert await reader.read() == b""  # no second response


async def test_so_many_requests_may_be_sent_ahead() -> None:
    (one,) = held_back(both())
    async with cluster(one) as made, connected(made) as (reader, writer):
        writer.write(post(GOOD))
        await eventually(lambda: one.calls)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" * 300)
        await asyncio.sleep(0)
        one.chunk_gate.set()
        statuses = [(await read_answer(reader)).status for _ in range(258)]
        assert statuses == [200] * 257 + [400]
        assert await reader.read() == b""


async def test_a_client_that_leaves_ends_its_request_though_another_one_waits_behind() -> None:
    (one,) = held_back(both())
    async with cluster(one) as made, connected(made) as (_, writer):
        writer.write(post(GOOD) * 2)
        await eventually(lambda: one.calls)
        writer.transport.abort()
        await eventually(lambda: not len(made.scheduler.table))


async def test_nothing_of_a_connection_is_left_to_the_garbage_collector() -> None:
    async with cluster(both(), limits=Limits(body_bytes=10)) as made:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                assert (await exchange(made, post(GOOD)[:-1])).status == 413
            await made.client.close()
            await eventually(lambda: not made.listener.connections)
            await eventually(lambda: not any(type(each) is Connection for each in gc.get_objects()))
        finally:
            gc.enable()


@pytest.mark.parametrize(
    "data",
    [
        post(gzip.compress(GOOD) + b"x", more="Content-Encoding: gzip\r\n"),
        post(gzip.compress(GOOD) * 2, more="Content-Encoding: gzip\r\n"),
        post(b"no gzip", more="Content-Encoding: gzip\r\n"),
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_a_body_that_is_not_what_its_headers_say_is_400(data: bytes) -> None:
    async with cluster(both()) as made:
        answer = await exchange(made, data)
        assert (answer.status, answer.error["type"]) == (400, "BadRequestError")
        await works(made)


async def test_all_bodies_together_are_bounded() -> None:
    (one,) = held_back(both())
    body = GOOD.ljust(600)
    async with cluster(one, limits=Limits(body_bytes=1000, bodies_bytes=1000)) as made:
        async with connected(made) as (reader, writer):
            writer.write(post(body))
            await eventually(lambda: one.calls)
            answer = await exchange(made, post(body))
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            chunked = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            answer = await exchange(made, chunked + b"258\r\n" + body + b"\r\n0\r\n\r\n")
            assert answer.status == 503
            one.chunk_gate.set()
            assert (await read_answer(reader)).status == 200
        assert (await exchange(made, post(body))).status == 200
        await works(made)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 95), 404),
        (b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 100), 414),
        (b"GET /v1/models?%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 100), 414),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: %b\r\n\r\n" % (b"a" * 120), 200),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: %b\r\n\r\n" % (b"a" * 121), 431),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n%b: x\r\n\r\n" % (b"a" * 121), 431),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n%b\r\n" % (b"X: y\r\n" * 9), 200),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n%b\r\n" % (b"X: y\r\n" * 10), 431),
        (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01 this is TLS\r\n\r\n", 400),
        (b"BREW /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ],
)
async def test_heads_are_bounded(head: bytes, status: int) -> None:
    limits = Limits(url_bytes=100, headers=10, header_bytes=120)
    async with cluster(both(), limits=limits) as made:
        answer = await exchange(made, head)
        assert answer.status == status
        if status >= 400:
            assert answer.error["type"] in ("BadRequestError", "NotFoundError")
        await works(made)


@pytest.mark.parametrize("is_second", [False, True])
async def test_a_head_that_does_not_come_in_time_is_408(is_second: bool) -> None:
    limits = Limits(head_s=0.2)
    async with cluster(both(), limits=limits) as made, connected(made) as (reader, writer):
        if is_second:
            writer.write(post(GOOD))
            assert (await read_answer(reader)).status == 200
        writer.write(b"POST /v1/completions HTTP/1.1\r\n")
        for _ in range(5):  # a byte now and then does not help
            await asyncio.sleep(0.02)
            writer.write(b"x")
        answer = await read_answer(reader)
        assert (answer.status, answer.error["code"]) == (408, 408)
        assert await reader.read() == b""
        await works(made)


async def test_a_request_that_waits_behind_a_response_is_not_late() -> None:
    (one,) = held_back(both())
    limits = Limits(head_s=0.1)
    async with cluster(one, limits=limits) as made, connected(made) as (reader, writer):
        writer.write(post(GOOD))
        await eventually(lambda: one.calls)
        (connection,) = made.listener.connections
        connection.pause_writing()  # as if its client did not read
        one.chunk_gate.set()
        await eventually(lambda: not len(made.scheduler.table))
        writer.write(post(GOOD))
        await asyncio.sleep(3 * limits.head_s)
        connection.resume_writing()
        for _ in range(2):
            assert (await read_answer(reader)).status == 200


async def test_a_body_that_does_not_come_in_time_is_408() -> None:
    async with cluster(both(), limits=QUICK) as made:
        async with connected(made) as (reader, writer):
            writer.write(post(GOOD)[:-1])
            answer = await read_answer(reader)
            assert (answer.status, answer.headers["connection"]) == (408, "close")
            assert answer.error["message"].endswith(f"{len(GOOD) - 1} bytes of it did")
        await works(made)


async def test_a_large_body_has_more_time() -> None:
    limits = Limits(body_s=0.3, least_bytes_per_s=10_000)
    async with cluster(both(), limits=limits) as made, connected(made) as (reader, writer):
        whole = post(GOOD.ljust(10_000))
        for start in range(0, len(whole), 2000):  # 10,000 bytes in half a second
            writer.write(whole[start : start + 2000])
            await asyncio.sleep(0.1)
        assert (await read_answer(reader)).status == 200


async def test_an_idle_connection_is_closed() -> None:
    async with cluster(both(), limits=QUICK) as made:
        async with connected(made) as (reader, writer):
            assert await read_answer(reader) == CLOSED  # nothing was ever asked
        async with connected(made) as (reader, writer):
            writer.write(post(GOOD))
            assert (await read_answer(reader)).status == 200
            assert await read_answer(reader) == CLOSED


async def test_a_client_that_does_not_read_is_disconnected_and_its_request_ends() -> None:
    one, has_ended = both(), asyncio.Event()

    async def pour(_: FakeInstance, request: web.Request, __: Any) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        try:
            while True:
                await answer.write(b"data: {}\n\n" * 10_000)
        finally:
            has_ended.set()

    one.handler = pour
    async with cluster(one, limits=QUICK) as made, connected(made) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post(b'{"model":"tiny","prompt":"x","stream":true}'))
        await eventually(lambda: one.calls)
        await eventually(has_ended.is_set)
        await eventually(lambda: not len(made.scheduler.table))


async def test_a_slow_reader_gets_the_whole_response() -> None:
    one, body = both(), b'"%b"' % (b"x" * 40_000_000)  # more than sockets take
    limits = Limits(stalled_s=1.0)

    async def long(*_: Any) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    one.handler = long
    async with cluster(one, limits=limits) as made, connected(made) as (reader, writer):
        writer.write(post(GOOD, path="/v1/embeddings"))
        begun_s, size = asyncio.get_running_loop().time(), 0
        while size < len(body) and (some := await reader.read(1_000_000)):
            size += len(some)
            await asyncio.sleep(0.02)
        assert size >= len(body)
        assert asyncio.get_running_loop().time() - begun_s > 2 * limits.stalled_s


async def test_an_open_path_does_not_wait_for_a_body() -> None:
    head = b"GET /version HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n"
    limits = Limits(body_bytes=1000, bodies_bytes=1000)
    async with cluster(both(), limits=limits, keys=("k",)) as made:
        answer = await exchange(made, head + b"{")  # the rest never comes
        assert answer.status in (200, 404)


async def test_a_connection_above_the_limit_gets_503() -> None:
    async with cluster(both(), limits=Limits(connections=2)) as made:
        async with connected(made), connected(made):
            await eventually(lambda: len(made.listener.connections) == 2)
            async with connected(made) as (reader, _):
                answer = await read_answer(reader)
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert "too many connections" in answer.error["message"]
        await eventually(lambda: len(made.listener.connections) == 0)
        await works(made)


async def ask(made: Cluster, body: bytes, path: str = "/v1/completions") -> Answer:
    return await exchange(made, post(body, path=path))


ORDERS = {
    "mode": ("mode", [b"", b'{"mode": "half"}', b"{}", b'{"mode": "split", "now": true}']),
    "instances/b/flip": (
        "order to flip",
        [b'{"role": "king"}', b'{"role": "decode", "now": "yes"}', b'{"role": "decode", "when": 1}',
         b'{"role": "decode", "deadline_s": -1}'],
    ),
    "instances/b/drain": (
        "order to drain",
        [b'{"force": "yes"}', b'{"deadline_s": -1}', b'{"deadline_s": "soon"}', b'{"deadline": 1}'],
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", ORDERS)
async def test_a_wrong_order_is_refused_and_changes_nothing(path: str) -> None:
    what, bodies = ORDERS[path]
    async with cluster(both()) as made:
        for body in (b"\xbd", b'{"\xbd": 1}', b"[" * 5000, b"{", b"5", b"[]", *bodies):
            answer = await ask(made, body, f"/tetri/v1/{path}")
            assert (answer.status, answer.error["type"]) == (400, "BadRequestError")
            assert f"the body is not a valid {what}" in answer.error["message"]
        assert made.state("b") == "ready"
        assert await made.get("/tetri/v1/mode") == {"mode": "split"}


async def test_the_depth_of_a_body_is_bounded() -> None:
    def nested(depth: int) -> bytes:
        return b'{"model":"tiny","prompt":"x","a":' + b"[" * depth + b"]" * depth + b"}"

    async with cluster(both()) as made:
        assert (await ask(made, nested(request.MAX_DEPTH - 1))).status == 200
        for depth in (request.MAX_DEPTH, 500, 900, 1000, 100_000):
            answer = await ask(made, nested(depth))
            assert (answer.status, answer.error["param"]) == (400, None)
        wide = b'{"model":"tiny","prompt":"x","a":[%b1]}' % (b"[]," * 10_000)
        assert (await ask(made, wide.replace(b"[[]", b"[1,[]"))).status == 200


async def test_the_values_of_a_body_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "MAX_VALUES", 100)
    async with cluster(both()) as made:
        for count, status in ((90, 200), (200, 413)):
            prompt = json.dumps({"model": "tiny", "prompt": [5] * count}).encode()
            assert (await ask(made, prompt)).status == status


@pytest.mark.parametrize(
    ("path", "name", "entry"),
    [
        ("/v1/chat/completions", "messages", {"role": "user", "content": "x"}),
        ("/v1/completions", "prompt", "x"),
        ("/v1/embeddings", "input", [1, 2]),
    ],
)
async def test_the_entries_of_a_list_are_bounded(
    monkeypatch: pytest.MonkeyPatch, path: str, name: str, entry: Any
) -> None:
    monkeypatch.setattr(request, "MAX_ENTRIES", 20)
    async with cluster(both()) as made:
        body = json.dumps({"model": "tiny", name: [entry] * 20}).encode()
        assert (await ask(made, body, path)).status == 200
        body = json.dumps({"model": "tiny", name: [entry] * 21}).encode()
        answer = await ask(made, body, path)
        assert (answer.status, answer.error["param"]) == (400, name)
        ids = json.dumps({"model": "tiny", "prompt": [1] * 21}).encode()
        assert (await ask(made, ids)).status == 200
