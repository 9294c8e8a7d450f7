"""The proxy breaks what it is told to, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.faults.proxy import Kind, Proxy, Trouble

DEADLINE_S = 10.0


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError, asyncio.CancelledError):
        while data := await reader.read(1024):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def echoing() -> AsyncIterator[Proxy]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    with Proxy(*server.sockets[0].getsockname()[:2]) as proxy:
        yield proxy
    server.close()


@asynccontextmanager
async def sent(
    proxy: Proxy, data: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(data)
    async with asyncio.timeout(DEADLINE_S):
        yield reader, writer
    writer.close()


@pytest.mark.parametrize(
    ("trouble", "echoed"),
    [
        (None, b"abcd"),
        (Trouble(Kind.DELAY, delay_s=0.05), b"abcd"),
        (Trouble(Kind.CORRUPT, after_bytes=2, up=True), b"ab" + bytes([ord("c") ^ 0xFF]) + b"d"),
        (Trouble(Kind.CORRUPT, after_bytes=2, up=False), b"ab" + bytes([ord("c") ^ 0xFF]) + b"d"),
        (Trouble(Kind.CORRUPT, connection=1), b"abcd"),  # another one
    ],
)
async def test_a_connection_that_goes_on_has_this_trouble_only(
    trouble: Trouble | None, echoed: bytes
) -> None:
    async with echoing() as proxy:
        if trouble is not None:
            proxy.make(trouble)
        async with sent(proxy, b"abcd") as (reader, writer):
            assert await reader.readexactly(4) == echoed
            writer.write(b"efgh")
            assert await reader.readexactly(4) == b"efgh"
        assert proxy.num_connections == 1


async def test_a_cut_is_a_reset_and_an_end_is_the_end_of_a_file() -> None:
    async with echoing() as proxy:
        proxy.make(Trouble(Kind.CUT, after_bytes=3, up=False))
        async with sent(proxy, b"abcd") as (reader, _):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(4)
        proxy.make(Trouble(Kind.END, after_bytes=3, up=False))
        async with sent(proxy, b"abcd") as (reader, _):
            assert await reader.read() == b"abc"


async def test_what_stalls_goes_on_when_the_trouble_is_over() -> None:
    async with echoing() as proxy:
        proxy.make(Trouble(Kind.STALL, after_bytes=2))
        async with sent(proxy, b"abcd") as (reader, _):
            assert await reader.readexactly(2) == b"ab"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await reader.readexactly(1)
            proxy.clear()
            assert await reader.readexactly(2) == b"cd"


async def test_a_half_open_connection_is_silent() -> None:
    async with echoing() as proxy:
        proxy.make(Trouble(Kind.HALF_OPEN, after_bytes=0))
        async with sent(proxy, b"abcd") as (reader, _):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await reader.read(1)
