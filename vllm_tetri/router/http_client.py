"""HTTP/1.1 client for instances: one request at a time per connection.

Owned by the event loop; not thread-safe. Between requests a connection belongs to
`HttpClient`; an `HttpResponse` belongs to the sender of the request, which closes it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from math import inf
from typing import cast
from urllib.parse import SplitResult

import httptools

from vllm_tetri.router._core import Flow
from vllm_tetri.router.errors import ConnectionLost, GivenUp, HttpError, Silent, Unreachable
from vllm_tetri.router.request import head_of, parts_of
from vllm_tetri.router.response import FlowRules, HttpResponse, Pump

_IDLE_S = 3.0  # vLLM closes idle connections after 5 s
_CLOSING_S = 0.5  # grace period for a FIN that crossed our request
_MAX_HEAD_BYTES = 2 << 20  # vLLM may describe every one of 8,192 embeddings in one header
# A connection that a NAT has forgotten is given up after 30 s, however busy its instance is.
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
_LENGTHS = frozenset({"content-length", "transfer-encoding"})
_tls_context = cache(ssl.create_default_context)


class HttpClient:
    """Connections to all instances. Build it on a running event loop and close it there.

    `silence_s` is the longest wait for the next byte of a response, in seconds in which the
    instance makes no progress either: `progress_s` says by label when it last did.
    """

    def __init__(self, silence_s: float, max_flows: float = inf) -> None:
        self.silence_s = silence_s
        self.progress_s: Mapping[str, float] = {}
        self._loop = asyncio.get_running_loop()
        self.pump = Pump(max_flows)
        self.connections: set[_Connection] = set()
        self.idle: defaultdict[str, list[_Connection]] = defaultdict(list)  # by URL

    async def send(
        self,
        url: str,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        label: str = "",
        may_migrate: Callable[[], bool] = bool,  # bool() is False
    ) -> HttpResponse:
        """Send a request to the server at `url` and wait for the head of its response.

        A connection that the instance closed while it was idle is replaced by a new one. `label`
        and `may_migrate` are for `fail_requests`. Raises `Unreachable`: there is no connection;
        `ConnectionLost`: the connection ended before a response came.
        """
        parts, port = parts_of(url)
        headers = {"Host": parts.netloc.rpartition("@")[2], **headers}
        if body or method != "GET":
            headers["Content-Length"] = str(len(body))
        message = (head_of(f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1", headers), body)
        lost: ConnectionLost | None = None
        if idle := self.idle.get(url):
            connection = idle.pop()
            try:
                return await connection.request(message, label, may_migrate)
            except ConnectionLost as error:
                if not connection.was_closed_idle:
                    raise
                lost = error
        connection = _Connection(self, url, self._loop)
        connection.label, connection.may_migrate = label, may_migrate
        try:
            await self._connect(connection, parts, port)
        except Unreachable as error:
            if lost is not None:  # a server that is gone may have had the request
                raise lost from error
            raise
        return await connection.request(message, label, may_migrate)

    def is_silent(self, label: str, since_s: float) -> bool:
        """Whether an instance of which nothing came since a time of the event loop is silent."""
        since_s = max(since_s, self.progress_s.get(label, 0.0))
        return self._loop.time() - since_s >= self.silence_s

    def fail_requests(
        self, label: str, why: str, *, quiet_s: float = 0.0, only_migratable: bool = False
    ) -> int:
        """Fail the requests with a label of which no byte came in the last `quiet_s` seconds; if
        wanted, only those that another instance can continue. Returns their number.

        Also needed when an instance ends in good order: its server waits for its connections.
        """
        since_s = self._loop.time() - quiet_s
        failed = [
            each
            for each in self.connections
            if each.label == label
            and each.is_quiet(since_s)
            and (not only_migratable or each.may_migrate())
        ]
        for each in failed:
            each.drop(GivenUp(why))
        return len(failed)

    def close(self) -> None:
        """Close every connection. Idempotent."""
        for connection in list(self.connections):
            connection.drop(ConnectionLost("closed"))
        self.pump.close()

    async def _connect(self, connection: _Connection, parts: SplitResult, port: int) -> None:
        self.connections.add(connection)
        try:
            # A server with thousands of requests may be slow to take one: the kernel tries for two
            # minutes (on Linux), unless the instance stops reporting.
            async with asyncio.timeout(None) as connection.deadline:
                await self._loop.create_connection(
                    lambda: cast(asyncio.Protocol, connection),
                    parts.hostname or "",
                    port,
                    ssl=_tls_context() if parts.scheme == "https" else None,
                )
        except TimeoutError as error:
            raise Unreachable(connection.why_dropped or f"cannot connect: {error}") from error
        except (OSError, UnicodeError) as error:
            raise Unreachable(f"cannot connect: {error}") from error
        except asyncio.CancelledError:  # uvloop then closes what it just made, and tells no one
            self.connections.discard(connection)
            raise
        finally:
            connection.deadline = None
            if connection.transport is None:
                self.connections.discard(connection)


class _Connection:
    """One connection: an `asyncio.Protocol`, and the callbacks of its parser."""

    def __init__(self, owner: HttpClient, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self._owner, self._loop, self.url = owner, loop, url
        self.label = ""
        self.may_migrate: Callable[[], bool] = bool  # no: bool() is False
        self.transport: asyncio.Transport | None = None
        self.deadline: asyncio.Timeout | None = None  # while the connection is made
        self.why_dropped = ""  # meanwhile
        self._parser = httptools.HttpResponseParser(self)
        self._head: asyncio.Future[HttpResponse] | None = None
        self._response: HttpResponse | None = None
        self._headers: dict[str, str] = {}
        self._num_responses = 0
        self._num_bytes = 0  # since the request
        self._parts: list[bytes] = []  # of the body, from one read
        self._is_between_chunks = False  # of the body, if all bytes of the last read belong to it
        self._flow: Flow | None = None  # reads instead of this
        self._sent_s = self._received_s = self._limit_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.was_closed_idle = False

    def is_quiet(self, since_s: float) -> bool:
        """Whether more is expected and nothing came since a time of the event loop; true also
        before the response."""
        is_silent = self._response is not None and self._last_s() <= since_s
        return is_silent or self._head is not None or self.deadline is not None

    def resume_reading(self) -> None:
        """Read on, and count silence from now on, if reading was paused until now."""
        if self.transport is not None and not self.transport.is_reading():
            self._received_s = self._loop.time()
            self.transport.resume_reading()

    def begin_flow(self, target: int, rules: FlowRules, stop: Callable[[], None]) -> Flow | None:
        """Let a flow read the rest of the body; None if a chunk of it has come in part, and with
        TLS, which it cannot read."""
        transport = self.transport
        if transport is None or not (self._is_between_chunks and transport.is_reading()):
            return None
        if (source := descriptor_of(transport)) is None:
            return None
        with suppress(RuntimeError):  # no descriptor is left: this goes on reading
            self._flow = self._owner.pump.begin(source, target, rules, stop)
            transport.pause_reading()
        return self._flow

    def end_flow(self) -> None:
        """Read again, first what the flow has left. Idempotent."""
        flow, self._flow = self._flow, None
        if flow is None:
            return
        rest, self._received_s = self._owner.pump.end(flow), max(flow.last_s, self._received_s)
        if self.transport is not None:
            self.transport.resume_reading()
            if rest:
                self.data_received(rest)

    def _last_s(self) -> float:
        return self._received_s if self._flow is None else max(self._flow.last_s, self._received_s)

    async def request(
        self, message: tuple[bytes, bytes], label: str, may_migrate: Callable[[], bool]
    ) -> HttpResponse:
        """Send one request and wait for the head of its response."""
        if self.transport is None:
            raise Unreachable("closed")
        self.label, self.may_migrate, self._num_bytes = label, may_migrate, 0
        self._sent_s = self._loop.time()
        self._set_limit(self._owner.silence_s)
        head: asyncio.Future[HttpResponse] = self._loop.create_future()
        self._head = head
        self.transport.writelines(message)
        try:
            return await head
        except asyncio.CancelledError:
            # If the response came at the same moment, the connection may be in use again.
            if head.done() and not head.cancelled() and head.exception() is None:
                head.result().close()
            else:
                self.drop(ConnectionLost("the request was cancelled"))
            raise

    def drop(self, error: HttpError) -> None:
        """Close the connection and fail its request. Idempotent."""
        self.end_flow()
        self._deliver()
        if self._timer is not None:
            self._timer.cancel()
        deadline, self.deadline = self.deadline, None
        if deadline is not None and not deadline.expired():
            self.why_dropped = str(error)
            deadline.reschedule(self._loop.time())
        self._owner.connections.discard(self)
        if self.transport is not None:
            self.transport.abort()
            self.transport = None
            if self in self._owner.idle[self.url]:
                self._owner.idle[self.url].remove(self)
            if not self._owner.idle[self.url]:  # instances come and go
                del self._owner.idle[self.url]
        head, self._head = self._head, None
        if head is not None and not head.done():
            head.set_exception(error)
        response, self._response = self._response, None
        if response is not None:
            response.end(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        own = transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            own.setsockopt(socket.IPPROTO_TCP, option, value)
        if self not in self._owner.connections:
            self.drop(ConnectionLost("closed"))

    def pause_writing(self) -> None:
        """Do nothing: a request is written at once."""

    def resume_writing(self) -> None:
        """Do nothing."""

    def data_received(self, data: bytes) -> None:
        self._received_s = self._loop.time()
        self._num_bytes += len(data)
        if self._head is None and self._response is None:
            self.drop(ConnectionLost("bytes came without a request"))
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.drop(ConnectionLost(f"the response is not HTTP: {error}"))
        # The parser tells of a chunk's size as soon as it has all of it.
        self._is_between_chunks = self._is_between_chunks and data.endswith(b"\r\n")
        self._deliver()
        if self._head is not None and self._num_bytes > _MAX_HEAD_BYTES:
            self.drop(ConnectionLost(f"the head of the response exceeds {_MAX_HEAD_BYTES} bytes"))

    def eof_received(self) -> None:
        if self._response is not None and _LENGTHS.isdisjoint(self._response.headers):
            self._end_response(is_reusable=False)  # the response ends with the connection
        self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.transport is not None:
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
        status, head = self._parser.get_status_code(), self._head
        if status < 200 or head is None or self.transport is None:
            return  # 100: the final one follows
        self._head = None
        self._response = HttpResponse(self, status, self._headers)
        if head.done():
            self.drop(ConnectionLost("the request was cancelled"))
        else:
            head.set_result(self._response)

    def on_chunk_header(self) -> None:
        self._is_between_chunks = False

    def on_chunk_complete(self) -> None:
        self._is_between_chunks = True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def _deliver(self) -> None:
        """Hand over the parts of the body that came in one read as one."""
        if parts := self._parts:
            self._parts = []
            is_wanted = self._response is None or self._response.feed(b"".join(parts))
            if not is_wanted and self.transport is not None:
                self.transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._response is not None:
            self._end_response(is_reusable=self._parser.should_keep_alive())

    def _end_response(self, *, is_reusable: bool) -> None:
        self._deliver()
        response, self._response = self._response, None
        assert response is not None
        self._num_responses += 1
        response.end()
        transport = self.transport
        # A response may come before the request was sent completely; one that is paused is
        # resumed by its reader.
        is_free = transport is not None and transport.is_reading()
        if transport is None or not (is_reusable and is_free) or transport.get_write_buffer_size():
            self.drop(ConnectionLost("closed"))
            return
        self.label, self.may_migrate = "", bool
        self._set_limit(_IDLE_S)
        self._owner.idle[self.url].append(self)

    def _set_limit(self, limit_s: float) -> None:
        """Bound the silence from now on. A timer that is due earlier looks at the bound then."""
        self._received_s, self._limit_s = self._loop.time(), limit_s
        if self._timer is not None and self._timer.when() > self._received_s + limit_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_later(limit_s, self._check_time)

    def _check_time(self) -> None:
        now = self._loop.time()
        if self._flow is None and self.transport is not None and not self.transport.is_reading():
            self._received_s = now
        since_s = max(self._last_s(), self._owner.progress_s.get(self.label, 0.0))
        rest_s = since_s + self._limit_s - now
        if rest_s <= 0:
            self.drop(Silent(f"no byte for {self._limit_s:g} s"))
        else:
            self._timer = self._loop.call_later(rest_s, self._check_time)


def descriptor_of(transport: asyncio.Transport) -> int | None:
    """Return the socket whose bytes are those of a transport; with TLS there is none."""
    if transport.is_closing() or transport.get_extra_info("sslcontext") is not None:
        return None
    number: int = transport.get_extra_info("socket").fileno()
    return number
