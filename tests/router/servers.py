"""Servers that write bytes, for what speaks HTTP to instances."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Serve = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 2\r\n\r\nok"


async def request_of(reader: asyncio.StreamReader) -> bytes:
    """One request, or nothing when the client has gone."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    lines = head.lower().split(b"\r\n")
    sizes = [int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")]
    return head + await reader.readexactly(sizes[0] if sizes else 0)


class Server:
    """Answers each request with `serve`, and counts connections."""

    def __init__(self, serve: Serve) -> None:
        self.serve = serve
        self.url = ""
        self.num_connections = 0
        self.requests: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        while request := await request_of(reader):
            self.requests.append(request)
            await self.serve(request, reader, writer)
            if writer.is_closing():
                break


@asynccontextmanager
async def listening(talk: Talk) -> AsyncIterator[str]:
    """The URL of a server; at the end its connections are gone."""
    tasks = []

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        with suppress(ConnectionError):
            await talk(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(run, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        async with asyncio.timeout(10):
            await asyncio.gather(*filter(None, tasks))


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[Server]:
    found = Server(serve)
    async with listening(found) as found.url:
        yield found


def says(*parts: bytes, ends: bool = False) -> Serve:
    async def serve(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if ends:
            writer.close()

    return serve
