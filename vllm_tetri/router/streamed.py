"""Responses that are written piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import HttpVersion11, web

from vllm_tetri.router.http_client import descriptor_of
from vllm_tetri.router.request import date_at, head_of

CORS = web.RequestKey("cors", dict[str, str])  # headers for pages of other origins, of a request


async def permit_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers for pages of other origins; proxied responses have them."""
    for name, value in request.get(CORS, {}).items():
        response.headers.setdefault(name, value)


class StreamedResponse(web.StreamResponse):
    """A response written piece by piece to the transport itself, without waiting: aiohttp's writer
    takes a task and a system call more. The head goes out with the first piece."""

    def __init__(self, request: web.Request, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(status=status)
        self._client, version = request.protocol, request.version
        self._is_chunked, self._is_over = version >= HttpVersion11, False
        self._keeps_alive = self._is_chunked and request.keep_alive
        permitted = request.get(CORS, {}) if "Origin" in request.headers else {}
        date = date_at(int(asyncio.get_running_loop().time()))
        sent = {**permitted, **headers, "Date": date}  # names of instances are in lower case
        if self._is_chunked:
            sent["Transfer-Encoding"] = "chunked"
        if not self._keeps_alive:
            sent["Connection"] = "close"
        first = f"HTTP/{version.major}.{version.minor} {status} {self.reason}"
        self._head = head_of(first, sent)

    @property
    def keep_alive(self) -> bool:
        """Return whether the connection may be used again."""
        return self._keeps_alive and super().keep_alive is None

    def send(self, piece: bytes, *, is_last: bool = False) -> None:
        """Write a piece of the body, unless it is over. Raises `ConnectionResetError`: the client
        has left."""
        transport = self._client.transport
        if transport is None:
            raise ConnectionResetError
        if self._is_over:
            return
        if piece and self._is_chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        if is_last and self._is_chunked:
            piece += b"0\r\n\r\n"
        if self._head:
            piece, self._head = self._head + piece, b""
        transport.write(piece)
        self._is_over = is_last

    def target(self) -> int | None:
        """Return the socket that pieces may be written to until the next `send`; None while some
        are unwritten, where they are not chunks, and with TLS."""
        transport = self._client.transport
        is_able = self._is_chunked and not (self._head or self._is_over)
        if transport is None or not is_able or transport.get_write_buffer_size():
            return None
        return descriptor_of(transport)

    def write_unsent(self, unsent: bytes) -> None:
        """Write what could not be written to `target`. Raises `ConnectionResetError`."""
        if self._client.transport is None:
            raise ConnectionResetError
        self._client.transport.write(unsent)

    async def prepare(self, request: web.BaseRequest) -> None:
        """Do nothing; aiohttp calls this when the request was served."""

    async def write_eof(self, data: bytes = b"") -> None:
        """End the response. Idempotent."""
        if not self._is_over:
            self.send(data, is_last=True)
