"""The proxy breaks what it is told to, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.faults.proxy import Kind, Proxy, Trouble

DEADLINE_S = 10.0


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1024):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def echoing() -> AsyncIterator[Proxy]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    with Proxy(*server.sockets[0].getsockname()[:2]) as proxy:
        yield proxy
    server.close()


async def say(proxy: Proxy, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(data)
    await writer.drain()
    return reader, writer


async def heard(reader: asyncio.StreamReader, count: int) -> bytes:
    async with asyncio.timeout(DEADLINE_S):
        return await reader.readexactly(count)


async def test_without_trouble_everything_passes_and_ends() -> None:
    async with echoing() as proxy:
        reader, writer = await say(proxy, b"hello")
        assert await heard(reader, 5) == b"hello"
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        assert proxy.num_connections == 1


@pytest.mark.parametrize("up", [True, False])
async def test_a_byte_is_changed_and_only_that(up: bool) -> None:
    async with echoing() as proxy:
        proxy.make(Trouble(Kind.CORRUPT, after_bytes=2, up=up))
        reader, writer = await say(proxy, b"abcd")
        assert await heard(reader, 4) == b"ab" + bytes([ord("c") ^ 0xFF]) + b"d"
        writer.write(b"efgh")
        assert await heard(reader, 4) == b"efgh"
        writer.close()


async def test_a_cut_resets_behind_so_many_bytes() -> None:
    async with echoing() as proxy:
        proxy.make(Trouble(Kind.CUT, after_bytes=3, up=False))
        reader, writer = await say(proxy, b"abcd")
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(4)
        writer.close()


async def test_an_end_looks_like_one() -> None:
    async with echoing() as proxy:
        proxy.make(Trouble(Kind.END, after_bytes=3, up=False))
        reader, writer = await say(proxy, b"abcd")
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b"abc"
        writer.close()


async def test_what_stalls_goes_on_when_the_trouble_is_over() -> None:
    async with echoing() as proxy:
        proxy.make(Trouble(Kind.STALL, after_bytes=2))
        reader, writer = await say(proxy, b"abcd")
        assert await heard(reader, 2) == b"ab"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.readexactly(1)
        proxy.clear()
        assert await heard(reader, 2) == b"cd"
        writer.close()


async def test_a_half_open_connection_says_nothing() -> None:
    async with echoing() as proxy:
        proxy.make(Trouble(Kind.HALF_OPEN, after_bytes=0))
        reader, writer = await say(proxy, b"abcd")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await reader.read(1)
        writer.close()


async def test_only_the_connection_that_is_meant_is_hit() -> None:
    async with echoing() as proxy:
        first = await say(proxy, b"x")
        assert await heard(first[0], 1) == b"x"
        proxy.make(Trouble(Kind.CORRUPT, connection=2))
        others = [await say(proxy, b"a")]
        assert await heard(others[0][0], 1) == b"a"
        others.append(await say(proxy, b"b"))
        assert await heard(others[1][0], 1) == bytes([ord("b") ^ 0xFF])
        for _, writer in (first, *others):
            writer.close()


async def test_a_delay_keeps_everything() -> None:
    async with echoing() as proxy:
        proxy.make(Trouble(Kind.DELAY, delay_s=0.05))
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        reader, writer = await say(proxy, b"abcd")
        assert await heard(reader, 4) == b"abcd"
        assert loop.time() - start_s >= 0.05
        writer.close()


async def test_a_server_that_is_gone_is_a_connection_that_ends() -> None:
    with Proxy("127.0.0.1", 1) as proxy:
        reader, writer = await say(proxy, b"x")
        async with asyncio.timeout(DEADLINE_S):
            with suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
