"""One HTTP/1.1 connection of the client of `vllm-tetri bench router`.

As little as tells when the pieces of an answer come: what the client costs is the same
for every system, but it also hides what the systems cost.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import urlsplit

_OPEN_AT_ONCE = 32  # fewer than any server's queue of new connections
_HEAD_END = b"\r\n\r\n"
_PIECE = b"data: {"
_ERROR = b'data: {"error"'
_STREAM_END = b"0\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection with one request at a time.

    Args:
        headers: What the head of every answer must have in it.

    Attributes:
        num_pieces: Events with something in them, over all answers.
        num_reads: How often bytes came.
        piece_s: When the first two pieces of this answer came.
        end_s: When it ended, or as many pieces had come as were waited for.
        is_over: Whether nothing more comes.
    """

    def __init__(self, headers: str) -> None:
        self._headers = headers.encode()
        self.num_pieces = 0
        self.num_reads = 0
        self.piece_s: list[float] = []
        self.end_s = 0.0
        self.is_over = True
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._stop_after = 0
        self._head: bytes | None = b""
        self._missing = -1  # bytes of an answer with a length
        self._tail = b""

    async def ask(self, request: bytes, pieces: int = 0) -> None:
        """Send a request; wait for its end, or until so many pieces have come.

        Raises:
            ConnectionError: No answer, or an error.
        """
        assert self._transport is not None
        self.piece_s, self._head, self._missing, self._tail = [], b"", -1, b""
        self._stop_after, self.is_over = pieces, False
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._waiter

    def close(self) -> None:
        """Leave, whatever is on its way."""
        self._waiter = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"connection lost: {error}")

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.num_reads += 1
        if self._head is not None:
            self._head += data
            head, end, data = self._head.partition(_HEAD_END)
            if not end:
                return
            self._head = None
            if not head.startswith(b"HTTP/1.1 200") or self._headers not in head:
                self._fail(repr((head + data)[:500]))
                return
            length = _LENGTH.search(head)
            self._missing = int(length[1]) if length else -1
        if self._missing >= 0:
            self._missing -= len(data)
            if self._missing == 0:
                self._end(now, is_over=True)
            return
        self._count(self._tail + data, now)

    def _count(self, text: bytes, now: float) -> None:
        if _ERROR in text:
            self._fail(repr(text[:500]))
            return
        found = text.count(_PIECE)
        self.num_pieces += found
        self._tail = text[1 - len(_PIECE) :]
        if len(self.piece_s) < 2:
            self.piece_s += [now] * min(found, 2 - len(self.piece_s))
        is_over = text.endswith(_STREAM_END)
        if is_over or 0 < self._stop_after <= len(self.piece_s):
            self._end(now, is_over=is_over)

    def _end(self, now: float, *, is_over: bool) -> None:
        self.end_s, self.is_over = now, is_over
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, reason: str) -> None:
        self.is_over = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionError(reason))


@asynccontextmanager
async def connections(url: str, count: int, headers: str) -> AsyncIterator[list[Connection]]:
    """So many to one server, closed in the end, whatever is on its way."""
    loop = asyncio.get_running_loop()
    host, port = urlsplit(url).netloc.split(":")
    made: list[Connection] = []
    try:
        while len(made) < count:
            batch = min(_OPEN_AT_ONCE, count - len(made))
            opening = (
                loop.create_connection(lambda: Connection(headers), host, int(port))
                for _ in range(batch)
            )
            made += [connection for _, connection in await asyncio.gather(*opening)]
        yield made
    finally:
        for each in made:
            each.close()
