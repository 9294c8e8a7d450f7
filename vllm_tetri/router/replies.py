"""Responses to clients: whole ones, and those that are written piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec

from vllm_tetri.router.errors import Refusal
from vllm_tetri.router.http_client import descriptor_of
from vllm_tetri.router.incoming import ClientRequest
from vllm_tetri.router.request import date_at, head_of

_JSON = "application/json"
_PHRASES = {each.value: each.phrase for each in HTTPStatus}
_WITHOUT_BODY = (204, 304)


@dataclass(slots=True)
class Response:
    """A whole response; names of headers are in lower case."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def render(self, request: ClientRequest | None, *, closes: bool) -> tuple[bytes, bytes]:
        """Return its head and body as they are sent; `closes`: the connection ends with it."""
        headers = _common(request, closes=closes) | self.headers
        if self.status not in _WITHOUT_BODY:
            headers["content-length"] = str(len(self.body))
        head = head_of(f"HTTP/1.1 {self.status} {_PHRASES.get(self.status, '')}", headers)
        return head, b"" if request is not None and request.method == "HEAD" else self.body


def refused(refusal: Refusal, headers: Mapping[str, str] | None = None) -> Response:
    """Build the response that says why a request is refused."""
    named = {**(headers or {}), **refusal.headers(), "content-type": _JSON}
    return Response(refusal.body(), refusal.status, named)


def json_response(value: Any, status: int = 200) -> Response:
    """Build a response of JSON."""
    return Response(msgspec.json.encode(value), status, {"content-type": _JSON})


class StreamedResponse:
    """A response that is written piece by piece without waiting, its head with the first piece."""

    def __init__(self, request: ClientRequest, status: int, headers: Mapping[str, str]) -> None:
        self.status, self._request, self._client = status, request, request.connection
        self._is_chunked, self._is_over = not request.is_old, False
        if request.is_old:
            request.keeps_alive = False  # the response ends with the connection
        sent = {**_common(request, closes=not request.keeps_alive), **headers}
        if self._is_chunked:
            sent["transfer-encoding"] = "chunked"
        self._head = head_of(f"HTTP/1.1 {status} {_PHRASES.get(status, '')}", sent)

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
            piece, self._head, self._request.has_begun = self._head + piece, b"", True
        transport.write(piece)
        self._is_over = is_last

    def end(self) -> None:
        """End the response. Idempotent."""
        if not self._is_over:
            self.send(b"", is_last=True)

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


Reply = Response | StreamedResponse


def _common(request: ClientRequest | None, *, closes: bool) -> dict[str, str]:
    """Return the headers of every response; proxied ones have names in lower case, too."""
    headers = dict(request.cors) if request is not None and request.cors else {}
    headers["date"] = date_at(int(asyncio.get_running_loop().time()))
    if closes:
        headers["connection"] = "close"
    elif request is not None and request.is_old:
        headers["connection"] = "keep-alive"
    return headers
