"""HTTP/1.1 to instances: a request at a time per connection, and its answer as it comes.

Owner: the event loop; nothing here is for other threads. Between requests a connection
belongs to `Wires`; an `Answer` belongs to whoever sent the request, and closes it.
"""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

_IDLE_S = 3.0  # vLLM closes idle connections after 5 s
_CONNECT_S = 5.0
_CLOSING_S = 0.5  # so long the word may take that it was closed meanwhile
# Beyond it nothing more is read, so that a slow client slows its instance down.
_MOST_UNREAD_BYTES = 1 << 18
_MOST_HEAD_BYTES = 1 << 16
_MOST_ANSWER_BYTES = 1 << 29  # of an answer that is wanted whole, as embeddings
_UNASKED = "an answer that nobody asked for"
_KIND = re.compile(r"[\w.+-]+/[\w.+-]+")
_LENGTHS = frozenset({"content-length", "transfer-encoding"})
_NO_WAY = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})


class WireError(Exception):
    """No answer, or not all of it."""


class Unreachable(WireError):
    """There is no connection; nothing was sent."""


class Dropped(WireError):
    """The connection ended or fell silent, or what it carries is not HTTP."""


class Answer:
    """What an instance answers to one request. Close it.

    Attributes:
        status: Of HTTP.
        headers: By name in lower case; of equal names the last one.
        content_type: Media type without parameters, in lower case.
        is_movable: Whether another instance can say the rest; for the caller to set.
    """

    def __init__(self, wire: _Wire, status: int, headers: dict[str, str]) -> None:
        self._wire: _Wire | None = wire
        self._unread: list[bytes] = []
        self._num_unread = 0
        self._reader: asyncio.Future[None] | None = None
        self._error: WireError | None = None
        self._is_whole = False
        self.status = status
        self.headers = headers
        self.is_movable = False
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        self.content_type = kind if _KIND.fullmatch(kind) else "application/octet-stream"

    async def read_some(self) -> bytes:
        """What has come since the last call, at least a byte; empty at the end.

        Raises:
            Dropped: The rest will not come.
        """
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._is_whole:
                return b""
            assert self._reader is None, "two readers"
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        some = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
        self._unread.clear()
        self._num_unread = 0
        if self._wire is not None:
            self._wire.go_on()
        return some

    async def read(self) -> bytes:
        """All that has not been read.

        Raises:
            Dropped: Some of it will not come, or it is without end.
        """
        parts, size = [], 0
        while some := await self.read_some():
            parts.append(some)
            size += len(some)
            if size > _MOST_ANSWER_BYTES:
                self.close()
                raise Dropped(f"an answer of more than {_MOST_ANSWER_BYTES} bytes")
        return b"".join(parts)

    def close(self, why: str = "closed") -> None:
        """No more of it is wanted. Idempotent."""
        if self._wire is not None:
            self._wire.drop(Dropped(why))

    def is_quiet(self, since_s: float) -> bool:
        """Whether more is to come of which nothing came after a time of the event loop."""
        return self._wire is not None and self._wire.heard_s <= since_s

    # -- called by the wire -------------------------------------------------------

    def feed(self, some: bytes) -> bool:
        """Bytes came; whether more of them may come now."""
        self._unread.append(some)
        self._num_unread += len(some)
        self._wake()
        return self._num_unread <= _MOST_UNREAD_BYTES

    def end(self, error: WireError | None = None) -> None:
        """Nothing more comes."""
        self._wire, self._error, self._is_whole = None, error, error is None
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Wires:
    """Connections to all instances. Build it on a running event loop and close it there.

    Args:
        silence_s: Longest wait for an answer's next byte, in seconds.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._all: set[_Wire] = set()
        self._idle: dict[str, list[_Wire]] = {}
        self._is_closed = False

    async def send(
        self, url: str, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Answer:
        """Send a request to the server at `url` and wait for the head of its answer.

        A connection that the instance closed while it was idle is exchanged for a new one.

        Raises:
            Unreachable: No connection.
            Dropped: It ended before an answer came.
        """
        place = _place(url)
        message = _message(place, method, path, body, headers)
        has_body = method != "HEAD"
        if idle := self._idle.get(url):
            wire = idle.pop()
            try:
                return await wire.ask(message, has_body=has_body)
            except Dropped:
                if not wire.was_closed_idle:
                    raise
        wire = await self._connect(url, place)
        return await wire.ask(message, has_body=has_body)

    async def reaches(self, url: str, timeout_s: float) -> bool:
        """Whether the host of a server answers, if only that nobody listens there. A
        process that hangs has a host that does; one behind a network that is cut has not."""
        try:
            place = _place(url)
            async with asyncio.timeout(timeout_s):
                transport, _ = await self._loop.create_connection(
                    asyncio.Protocol, place.host, place.port
                )
        except TimeoutError:  # ETIMEDOUT is one
            return False
        except OSError as error:
            return error.errno not in _NO_WAY
        except (Unreachable, UnicodeError):
            return True  # no address
        transport.abort()
        return True

    def close(self) -> None:
        """Close every connection, for good. Idempotent."""
        self._is_closed = True
        for wire in list(self._all):
            wire.drop(Dropped("closed"))

    async def _connect(self, url: str, place: _Place) -> _Wire:
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, wire = await self._loop.create_connection(
                    lambda: _Wire(self, url, self._loop),
                    place.host,
                    place.port,
                    ssl=_tls() if place.is_secure else None,
                )
        except TimeoutError as error:
            raise Unreachable(f"no connection in {_CONNECT_S:g} s") from error
        except (OSError, UnicodeError) as error:
            raise Unreachable(f"cannot connect: {error}") from error
        return wire

    # -- called by wires ----------------------------------------------------------

    def made(self, wire: _Wire) -> None:
        """There is a connection."""
        self._all.add(wire)
        if self._is_closed:
            wire.drop(Dropped("closed"))

    def freed(self, wire: _Wire) -> None:
        """It may carry another request."""
        self._idle.setdefault(wire.url, []).append(wire)

    def lost(self, wire: _Wire) -> None:
        """It is gone."""
        self._all.discard(wire)
        idle = self._idle.get(wire.url)
        if idle is not None:
            with suppress(ValueError):
                idle.remove(wire)
            if not idle:  # instances come and go
                del self._idle[wire.url]


class _Wire(asyncio.Protocol):
    """One connection, and the parser's callbacks."""

    def __init__(self, owner: Wires, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._head: asyncio.Future[Answer] | None = None
        self._answer: Answer | None = None
        self._headers: dict[str, str] = {}
        self._has_body = True
        self._num_answers = 0
        self._num_bytes = 0  # since the request
        self.heard_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = False
        self.url = url
        self.was_closed_idle = False
        self._asked_s = 0.0

    async def ask(self, message: bytes, *, has_body: bool) -> Answer:
        """Send one request and wait for the head of its answer."""
        if self._transport is None:
            raise Dropped("closed")
        self._set_timer(None)
        self._has_body, self._num_bytes = has_body, 0
        self._asked_s = self._loop.time()
        head: asyncio.Future[Answer] = self._loop.create_future()
        self._head = head
        self._transport.write(message)
        try:
            return await head
        except asyncio.CancelledError:
            # When the answer came in the same moment the wire may be somebody else's by now.
            if head.done() and not head.cancelled() and head.exception() is None:
                head.result().close()
            else:
                self.drop(Dropped("not waited for"))
            raise

    def go_on(self) -> None:
        """Read again, if it had stopped."""
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self.heard_s = self._loop.time()
            self._transport.resume_reading()

    def drop(self, error: WireError) -> None:
        """Close, and say so to whoever waits. Idempotent."""
        self._set_timer(None)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
            self._owner.lost(self)
        head, self._head = self._head, None
        if head is not None and not head.done():
            head.set_exception(error)
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.end(error)

    # -- asyncio ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._owner.made(self)

    def data_received(self, data: bytes) -> None:
        self.heard_s = self._loop.time()
        self._num_bytes += len(data)
        if self._head is None and self._answer is None:
            self.drop(Dropped(_UNASKED))
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.drop(Dropped(f"no HTTP: {error}"))
        if self._head is not None and self._num_bytes > _MOST_HEAD_BYTES:
            self.drop(Dropped("a head without end"))

    def eof_received(self) -> None:
        if self._answer is not None and not _LENGTHS & self._answer.headers.keys():
            self._end_answer(is_reusable=False)  # its end is the connection's
        self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            is_reused = self._num_answers > 0 and self._head is not None
            # Later than that it had the request, and may have died of it.
            is_early = self._loop.time() - self._asked_s < _CLOSING_S
            self.was_closed_idle = is_reused and self._num_bytes == 0 and is_early
        self.drop(Dropped(str(error) if error else "connection closed"))

    # -- httptools ----------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._headers = {}
        if self._head is None:
            self.drop(Dropped(_UNASKED))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is None:  # else it is a trailer
            self._headers[name.decode("latin-1").lower()] = value.decode("utf-8", "surrogateescape")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        head = self._head
        if status < 200 or head is None:
            return  # 100: the real one follows
        self._head = None
        self._answer = Answer(self, status, self._headers)
        if head.done():
            self.drop(Dropped("not waited for"))
            return
        head.set_result(self._answer)
        if not self._has_body:
            self._end_answer(is_reusable=False)  # the parser waits for one
        else:
            self._set_timer(self._owner.silence_s)

    def on_body(self, body: bytes) -> None:
        if self._answer is None or self._answer.feed(body) or self._is_paused:
            return
        if self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._answer is not None:
            self._end_answer(is_reusable=self._parser.should_keep_alive())

    def _end_answer(self, *, is_reusable: bool) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None
        self._num_answers += 1
        answer.end()
        transport = self._transport
        # An answer may come before all of the request has left.
        if transport is None or not is_reusable or transport.get_write_buffer_size():
            self.drop(Dropped("closed"))
            return
        self.go_on()
        self._set_timer(_IDLE_S)
        self._owner.freed(self)

    # -- time ---------------------------------------------------------------------

    def _set_timer(self, limit_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if limit_s is not None:
            self.heard_s = self._loop.time()
            self._timer = self._loop.call_later(limit_s, self._look_at_time, limit_s)

    def _look_at_time(self, limit_s: float) -> None:
        rest_s = self.heard_s + limit_s - self._loop.time()
        if rest_s <= 0 and not self._is_paused:
            self.drop(Dropped(f"nothing for {limit_s:g} s"))
        else:
            self._timer = self._loop.call_later(max(rest_s, 0.1), self._look_at_time, limit_s)


class _Place(NamedTuple):
    host: str
    port: int
    name: str  # for the Host header
    prefix: str
    is_secure: bool


@lru_cache(maxsize=4096)
def _place(url: str) -> _Place:
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise Unreachable(f"{url!r} is no URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Unreachable(f"{url!r} is no URL of HTTP")
    name = parts.netloc.rpartition("@")[2]
    return _Place(parts.hostname, port, name, parts.path.rstrip("/"), parts.scheme == "https")


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _message(
    place: _Place, method: str, path: str, body: bytes, headers: Mapping[str, str]
) -> bytes:
    lines = [f"{method} {place.prefix}{path} HTTP/1.1", f"Host: {place.name}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body or method not in _WITHOUT_BODY:
        lines.append(f"Content-Length: {len(body)}")
    head = "\r\n".join(lines)
    if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1:
        raise ValueError("a header with a line break")
    return head.encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body
