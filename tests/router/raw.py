"""A client that writes bytes, and reads one answer."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tests.router.fakes import Cluster

DEADLINE_S = 10.0
ERROR_FIELDS = {"message", "type", "param", "code"}


@dataclass(frozen=True)
class Answer:
    """Status 0: the connection was closed without one."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        answer = json.loads(self.body)
        assert set(answer) == {"error"}
        assert set(answer["error"]) == ERROR_FIELDS
        assert answer["error"]["message"]
        assert self.headers["content-type"].startswith("application/json")
        error: dict[str, Any] = answer["error"]
        return error


CLOSED = Answer(0, {}, b"")


def post(body: bytes, *, path: str = "/v1/completions", more: str = "") -> bytes:
    more += "Content-Type: application/json\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    return head.encode("utf-8", "surrogateescape") + body


async def read_answer(reader: asyncio.StreamReader, *, has_body: bool = True) -> Answer:
    """The next one, which must come in time."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.rstrip().split("\r\n")
                version, status = first.split(" ")[:2]
                assert version.startswith("HTTP/"), head
                if status != "100":
                    break
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                return CLOSED
            raise
        except ConnectionError:
            return CLOSED
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if not has_body:
            return Answer(int(status), headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Answer(int(status), headers, await _chunks(reader))
        if "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            body = await reader.read()
        return Answer(int(status), headers, body)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    found = b""
    while size := int(await reader.readline(), 16):
        found += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readline()
    return found


@asynccontextmanager
async def connected(
    made: Cluster, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*made.listener.address, ssl=tls)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def exchange(made: Cluster, data: bytes, *, has_body: bool = True) -> Answer:
    """Send bytes on a connection of their own; the answer to the first request in them."""
    async with connected(made) as (reader, writer):
        writer.write(data)
        return await read_answer(reader, has_body=has_body)
