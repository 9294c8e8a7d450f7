"""HTTP/1.1 client for instances: one request at a time per connection.

Owned by the event loop; not thread-safe. Between requests a connection belongs to
`HttpClient`; an `HttpResponse` belongs to the sender of the request, which closes it.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, lru_cache
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools

_IDLE_S = 3.0  # vLLM closes idle connections after 5 s
_CONNECT_S = 5.0
_CLOSING_S = 0.5  # grace period for a FIN that crossed our request
# Reading pauses above this, so that a slow client slows its instance down.
_MAX_UNREAD_BYTES = 1 << 18
_MAX_HEAD_BYTES = 1 << 16
_MAX_BODY_BYTES = 1 << 29  # of a response that is read whole, as embeddings
_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+")
_LENGTHS = frozenset({"content-length", "transfer-encoding"})
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})
_tls_context = cache(ssl.create_default_context)


class HttpError(Exception):
    """There is no response, or only a part of it."""


class Unreachable(HttpError):
    """No connection could be made; nothing was sent."""


class ConnectionLost(HttpError):
    """The connection ended, timed out, or carried something else than HTTP."""


class HttpResponse:
    """An instance's response to one request; to be closed.

    Names of headers and the media type are in lower case; of repeated headers the last counts.
    `is_migratable` is set by the owner: another instance can continue the response.
    """

    def __init__(self, connection: _Connection, status: int, headers: dict[str, str]) -> None:
        self._connection: _Connection | None = connection
        self._unread: list[bytes] = []
        self._num_unread = 0
        self._reader: asyncio.Future[None] | None = None
        self._error: HttpError | None = None
        self._is_complete = False
        self.status, self.headers = status, headers
        self.is_migratable = False
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        self.content_type = kind if _MEDIA_TYPE.fullmatch(kind) else "application/octet-stream"

    async def read_some(self) -> bytes:
        """Return the bytes since the last call, at least one; empty at the end. Raises
        `ConnectionLost` if the rest will not come."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._is_complete:
                return b""
            assert self._reader is None, "two readers of one response"
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        some = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
        self._unread, self._num_unread = [], 0
        if self._connection is not None:
            self._connection.resume()
        return some

    async def read(self) -> bytes:
        """Return all unread bytes; raises `ConnectionLost` if some will not come, or there are
        too many."""
        body = bytearray()
        while some := await self.read_some():
            body += some
            if len(body) > _MAX_BODY_BYTES:
                self.close()
                raise ConnectionLost(f"the response has more than {_MAX_BODY_BYTES} bytes")
        return bytes(body)

    def close(self, why: str = "closed") -> None:
        """Give up the rest of the response. Idempotent."""
        if self._connection is not None:
            self._connection.drop(ConnectionLost(why))

    def is_quiet(self, since_s: float) -> bool:
        """Whether more is expected and nothing came since a time of the event loop."""
        return self._connection is not None and self._connection.received_s <= since_s

    def feed(self, some: bytes) -> bool:
        """Take bytes; returns whether more may come now."""
        self._unread.append(some)
        self._num_unread += len(some)
        self._wake()
        return self._num_unread <= _MAX_UNREAD_BYTES

    def end(self, error: HttpError | None = None) -> None:
        """Mark the end of the response, or the error that ended it."""
        self._connection, self._error, self._is_complete = None, error, error is None
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class HttpClient:
    """Connections to all instances. Build it on a running event loop and close it there.

    `silence_s` is the longest wait for the next byte of a response, in seconds.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._all: set[_Connection] = set()
        self._idle: dict[str, list[_Connection]] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._all)

    async def send(
        self, url: str, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> HttpResponse:
        """Send a request to the server at `url` and wait for the head of its response.

        A connection that the instance closed while it was idle is replaced by a new one.

        Raises:
            Unreachable: There is no connection.
            ConnectionLost: The connection ended before a response came.
        """
        parts, port = _parts_of(url)
        message = _message(parts, method, path, body, headers)
        if idle := self._idle.get(url):
            connection = idle.pop()
            try:
                return await connection.request(message, has_body=method != "HEAD")
            except ConnectionLost:
                if not connection.was_closed_idle:
                    raise
        connection = await self._connect(url, parts, port)
        return await connection.request(message, has_body=method != "HEAD")

    def close(self) -> None:
        """Close every connection, for good. Idempotent."""
        self._is_closed = True
        for connection in list(self._all):
            connection.drop(ConnectionLost("closed"))

    async def _connect(self, url: str, parts: SplitResult, port: int) -> _Connection:
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self, url, self._loop),
                    parts.hostname or "",
                    port,
                    ssl=_tls_context() if parts.scheme == "https" else None,
                )
        except TimeoutError as error:
            raise Unreachable(f"no connection in {_CONNECT_S:g} s") from error
        except (OSError, UnicodeError) as error:
            raise Unreachable(f"cannot connect: {error}") from error
        return connection

    def made(self, connection: _Connection) -> None:
        """Register a new connection."""
        self._all.add(connection)
        if self._is_closed:
            connection.drop(ConnectionLost("closed"))

    def freed(self, connection: _Connection) -> None:
        """Keep a connection for the next request."""
        self._idle.setdefault(connection.url, []).append(connection)

    def lost(self, connection: _Connection) -> None:
        """Forget a closed connection."""
        self._all.discard(connection)
        idle = self._idle.get(connection.url)
        if idle is not None:
            with suppress(ValueError):
                idle.remove(connection)
            if not idle:  # instances come and go
                del self._idle[connection.url]


class _Connection(asyncio.Protocol):
    """One connection, and the callbacks of its parser."""

    def __init__(self, owner: HttpClient, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self._owner, self._loop, self.url = owner, loop, url
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._head: asyncio.Future[HttpResponse] | None = None
        self._response: HttpResponse | None = None
        self._headers: dict[str, str] = {}
        self._has_body = True
        self._num_responses = 0
        self._num_bytes = 0  # since the request
        self.received_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = False
        self.was_closed_idle = False
        self._sent_s = 0.0

    async def request(self, message: bytes, *, has_body: bool) -> HttpResponse:
        """Send one request and wait for the head of its response."""
        if self._transport is None:
            raise ConnectionLost("closed")
        self._set_timer(None)
        self._has_body, self._num_bytes = has_body, 0
        self._sent_s = self._loop.time()
        head: asyncio.Future[HttpResponse] = self._loop.create_future()
        self._head = head
        self._transport.write(message)
        try:
            return await head
        except asyncio.CancelledError:
            # If the response came at the same moment, the connection may be in use again.
            if head.done() and not head.cancelled() and head.exception() is None:
                head.result().close()
            else:
                self.drop(ConnectionLost("the request was cancelled"))
            raise

    def resume(self) -> None:
        """Resume reading, if it was paused."""
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self.received_s = self._loop.time()
            self._transport.resume_reading()

    def drop(self, error: HttpError) -> None:
        """Close the connection and fail its request. Idempotent."""
        self._set_timer(None)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
            self._owner.lost(self)
        head, self._head = self._head, None
        if head is not None and not head.done():
            head.set_exception(error)
        response, self._response = self._response, None
        if response is not None:
            response.end(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._owner.made(self)

    def data_received(self, data: bytes) -> None:
        self.received_s = self._loop.time()
        self._num_bytes += len(data)
        if self._head is None and self._response is None:
            self.drop(ConnectionLost("bytes came without a request"))
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.drop(ConnectionLost(f"the response is not HTTP: {error}"))
        if self._head is not None and self._num_bytes > _MAX_HEAD_BYTES:
            self.drop(ConnectionLost(f"the head of the response exceeds {_MAX_HEAD_BYTES} bytes"))

    def eof_received(self) -> None:
        if self._response is not None and not _LENGTHS & self._response.headers.keys():
            self._end_response(is_reusable=False)  # the response ends with the connection
        self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            is_reused = self._num_responses > 0 and self._head is not None
            # After the grace period it had the request, and may have crashed with it.
            is_early = self._loop.time() - self._sent_s < _CLOSING_S
            self.was_closed_idle = is_reused and self._num_bytes == 0 and is_early
        self.drop(ConnectionLost(str(error) if error else "connection closed"))

    def on_message_begin(self) -> None:
        self._headers = {}
        if self._head is None:
            self.drop(ConnectionLost("bytes came without a request"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response is None:  # else this is a trailer
            self._headers[name.decode("latin-1").lower()] = value.decode("utf-8", "surrogateescape")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        head = self._head
        if status < 200 or head is None:
            return  # 100: the final one follows
        self._head = None
        self._response = HttpResponse(self, status, self._headers)
        if head.done():
            self.drop(ConnectionLost("the request was cancelled"))
            return
        head.set_result(self._response)
        if not self._has_body:
            self._end_response(is_reusable=False)  # the parser waits for a body
        else:
            self._set_timer(self._owner.silence_s)

    def on_body(self, body: bytes) -> None:
        if self._response is None or self._response.feed(body) or self._is_paused:
            return
        if self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._response is not None:
            self._end_response(is_reusable=self._parser.should_keep_alive())

    def _end_response(self, *, is_reusable: bool) -> None:
        response, self._response = self._response, None
        assert response is not None
        self._num_responses += 1
        response.end()
        transport = self._transport
        # A response may come before the request was sent completely.
        if transport is None or not is_reusable or transport.get_write_buffer_size():
            self.drop(ConnectionLost("closed"))
            return
        self.resume()
        self._set_timer(_IDLE_S)
        self._owner.freed(self)

    def _set_timer(self, limit_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if limit_s is not None:
            self.received_s = self._loop.time()
            self._timer = self._loop.call_later(limit_s, self._check_time, limit_s)

    def _check_time(self, limit_s: float) -> None:
        rest_s = self.received_s + limit_s - self._loop.time()
        if rest_s <= 0 and not self._is_paused:
            self.drop(ConnectionLost(f"no byte for {limit_s:g} s"))
        else:
            self._timer = self._loop.call_later(max(rest_s, 0.1), self._check_time, limit_s)


@lru_cache(maxsize=4096)
def _parts_of(url: str) -> tuple[SplitResult, int]:
    """Return the parts of a URL, and its port."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise Unreachable(f"{url!r} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Unreachable(f"{url!r} is not an HTTP URL")
    return parts, port


def _message(
    url: SplitResult, method: str, path: str, body: bytes, headers: Mapping[str, str]
) -> bytes:
    lines = [
        f"{method} {url.path.rstrip('/')}{path} HTTP/1.1",
        f"Host: {url.netloc.rpartition('@')[2]}",
    ]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body or method not in _WITHOUT_BODY:
        lines.append(f"Content-Length: {len(body)}")
    head = "\r\n".join(lines)
    if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1:
        raise ValueError("a header contains a line break")
    return head.encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body
