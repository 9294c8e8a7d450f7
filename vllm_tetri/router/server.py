"""The HTTP server for clients: connections bounded in number and in time, bodies in size.

aiohttp's server bounds a head in size but not in time, and bounds neither the number of
connections nor how much of a response may stay unread; its errors below HTTP are plain text.
This module subclasses its protocol, so pyproject.toml pins aiohttp below the next minor version.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.typedefs import Handler

from vllm_tetri.logs import LimitLog
from vllm_tetri.router.auth import Limits
from vllm_tetri.router.errors import Refusal
from vllm_tetri.router.request import CHAT, COMPLETIONS, response_of
from vllm_tetri.router.shared_port import SharedPort

_CHECK_S = 1.0  # accuracy of the deadlines of connections, at most
_HANDSHAKE_S = 10.0
_LINGER_S = 2.0  # how long a refused body is still read, so that the response arrives
_LOOK_AGAIN_S = 0.05
_BACKLOG = 1024
_TOO_MANY_HEADERS = "Too many headers received"  # aiohttp's words

# What a request knows: the name of its client, and how much of its body is held.
CLIENT = web.RequestKey("client", str)
# Of an application: what serves its most frequent routes, without a look at all of them.
DIRECT: web.AppKey[Handler | None] = web.AppKey("direct")
_HELD_BYTES = web.RequestKey("held_bytes", int)
_log = logging.getLogger(__name__)


class BodyReader:
    """Reads bodies, bounded each and together, and in time. Owner: the event loop. `held_bytes` is
    the size of the bodies of all requests that have not ended."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._limit_log = limits, LimitLog()
        self.held_bytes = 0

    def check_announced(self, request: web.Request) -> None:
        """Raise Refusal 413 or 503 if the announced length is too large, before the body is sent:
        the client may wait for permission."""
        length = request.content_length or 0
        self._check(length, self.held_bytes + length)

    async def read(self, request: web.Request) -> bytes:
        """Return the whole body, uncompressed. Raises `Refusal`: 408, 413 or 503, it is too slow,
        too large, or exceeds the bound for all; 400, it is not what the headers say."""
        try:
            if request.content.is_eof():  # as nearly always
                return self._hold(request, request.content.read_nowait(-1), 0)
            return await self._read_slowly(request)
        except web.RequestPayloadError as error:
            raise Refusal(400, "the body is not what its headers say") from error
        except RuntimeError as error:
            if request.transport is None:  # how aiohttp reports that the client has left
                raise ConnectionResetError from error
            raise

    def release(self, request: web.Request) -> None:
        """Count the body of an ended request no more."""
        self.held_bytes -= request.get(_HELD_BYTES, 0)

    def hold(self, part_bytes: int, body_bytes: int) -> None:
        """Count a part of a body, which has so many bytes with it; raises `Refusal` 413 or 503."""
        self.held_bytes += part_bytes
        self._check(body_bytes, self.held_bytes)

    async def _read_slowly(self, request: web.Request) -> bytes:
        limits, begun_s = self._limits, asyncio.get_running_loop().time()
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_s) as deadline:
                while part := await request.content.readany():
                    body += self._hold(request, part, len(body))
                    more_s = len(body) / limits.least_bytes_per_s
                    deadline.reschedule(begun_s + limits.body_s + more_s)
        except TimeoutError as error:
            words = f"the body did not arrive in time: {len(body)} bytes of it did"
            raise Refusal(408, words) from error
        return bytes(body)

    def _hold(self, request: web.Request, part: bytes, before: int) -> bytes:
        request[_HELD_BYTES] = body_bytes = before + len(part)
        self.hold(len(part), body_bytes)
        return part

    def _check(self, body_bytes: int, bodies_bytes: int) -> None:
        if body_bytes > self._limits.body_bytes:
            raise Refusal(413, f"the body exceeds {self._limits.body_bytes} bytes")
        if bodies_bytes > self._limits.bodies_bytes:
            words = "the router holds as many bytes of requests as it may; "
            self._limit_log.record("the limit of bytes of all bodies", f"{words}new ones get 503")
            raise Refusal(503, f"{words}try again later")


class Connection(web.RequestHandler):
    """One client, one request at a time. Owner: the event loop.

    `admitted` holds all connections that are open and not one too many.
    """

    def __init__(
        self, server: web.Server, limits: Limits, admitted: set[Connection], limit_log: LimitLog
    ) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=cast(logging.Logger, None),
            keepalive_timeout=limits.idle_s,
            lingering_time=_LINGER_S,
            max_line_size=limits.url_bytes,
            max_field_size=limits.header_bytes,
            max_headers=limits.headers,
        )
        self._limits, self._admitted, self._limit_log = limits, admitted, limit_log
        self._stream: asyncio.Transport | None = None
        self.body: StreamReader | None = None  # of the request that is served
        self._head_since_s: float | None = None
        self._unread_since_s: float | None = None  # since when sent bytes are unread
        self._unread_bytes = 0  # how many were at that time

    def set_serving(self, body: StreamReader | None) -> None:
        """Record that the head of a request is complete; None: that it has its response."""
        self.body, self._head_since_s = body, None

    @property
    def is_idle(self) -> bool:
        """Whether no request has come that has no response."""
        return self.body is None and self._waiter is not None and not self._waiter.done()

    @property
    def is_receiving(self) -> bool:
        """Whether a part of a request's body is still to come."""
        return self.body is not None and not self.body.is_eof()

    def check_time(self, now: float) -> None:
        """End the connection if its client is too slow."""
        stream, limits = self._stream, self._limits
        if stream is None:
            return
        if stream.is_closing() and self._unread_since_s is None:
            self._mark_unread(stream, now)
        if self._unread_since_s is not None:
            read_bytes = self._unread_bytes - stream.get_write_buffer_size()
            if read_bytes >= limits.stalled_s * limits.least_bytes_per_s:
                self._mark_unread(stream, now)  # slow, but it is read
        if self._unread_since_s is not None and now - self._unread_since_s > limits.stalled_s:
            stream.abort()
        elif now - (self._head_since_s or now) > limits.head_s and not self._messages:
            self.refuse(Refusal(408, "the head of the request did not arrive in time"))

    def _mark_unread(self, stream: asyncio.Transport, now: float) -> None:
        self._unread_since_s, self._unread_bytes = now, stream.get_write_buffer_size()

    def refuse(self, refusal: Refusal) -> None:
        """Send an error outside of any request, and close."""
        if self._stream is not None and not self._stream.is_closing():
            self._stream.write(response_of(refusal))
            self._stream.close()
        self._head_since_s = None
        self.force_close()

    # -- asyncio ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stream = cast(asyncio.Transport, transport)
        if len(self._admitted) < self._limits.connections:
            self._admitted.add(self)
            super().connection_made(transport)
        else:
            words = f"{len(self._admitted)} are open; further ones get 503"
            self._limit_log.record("the limit of client connections (--max-connections)", words)
            self.refuse(Refusal(503, "too many connections; try again later"))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stream = None
        self._admitted.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if data and self.body is None and self._head_since_s is None:
            self._head_since_s = self._loop.time()
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stream is not None:
            self._mark_unread(self._stream, self._loop.time())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since_s = None

    async def _drain_helper(self) -> None:
        if self._drain_waiter is not None and self._drain_waiter.cancelled():
            self._drain_waiter = None  # by a move; aiohttp would wait for it once more
        await super()._drain_helper()

    # -- aiohttp ------------------------------------------------------------------

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Make the response to bytes that are not HTTP."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun")
        if status >= 500:
            _log.error("a request failed below HTTP; this is a bug of the router", exc_info=exc)
        self._head_since_s = None
        response = self._refusal_of(status, exc, message or "").response()
        response.force_close()
        return response

    def _refusal_of(self, status: int, error: BaseException | None, message: str) -> Refusal:
        if status >= 500:
            return Refusal(status, "the router failed; see its log")
        if isinstance(error, LineTooLong):
            if error.args[1] == self._limits.url_bytes:
                return Refusal(414, f"the URL exceeds {self._limits.url_bytes} bytes")
            return Refusal(431, f"a header exceeds {self._limits.header_bytes} bytes")
        if message == _TOO_MANY_HEADERS:
            return Refusal(431, f"there are more than {self._limits.headers} headers")
        return Refusal(400, f"not HTTP/1.1: {message.partition(chr(10))[0][:200]}")

    def log_exception(self, *args: Any, **kw: Any) -> None:
        # Failures of the router are logged where they happen. This is about bytes that clients
        # sent, which could fill a disk.
        _log.debug(*args, **kw)


@dataclass(slots=True)
class Listener:
    """The address of its own port, and the admitted connections of all ports that are still open.
    At the end, requests may go on for `stop_s` seconds."""

    address: tuple[str, int]
    connections: set[Connection]
    stop_s: float = 0.5


@asynccontextmanager
async def listening(
    app: web.Application,
    limits: Limits,
    address: tuple[str, int],
    tls: ssl.SSLContext | None = None,
    shared: SharedPort | None = None,
) -> AsyncIterator[Listener]:
    """Start the application and listen. Raises `OSError`: a port cannot be bound; `ConfigError`:
    the application cannot start."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    connections, limit_log = set[Connection](), LimitLog()
    await runner.setup()
    try:
        server = runner.server
        assert server is not None
        server.request_handler = partial(_serve, server.request_handler, app.get(DIRECT))
        loop = asyncio.get_running_loop()
        listen = partial(
            loop.create_server,
            lambda: Connection(server, limits, connections, limit_log),
            backlog=_BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=_HANDSHAKE_S if tls else None,
        )
        port = await listen(*address)
        tasks = [loop.create_task(_watch(connections, limits))]
        listener = Listener(port.sockets[0].getsockname()[:2], connections)
        try:
            if shared is not None:
                tasks.append(loop.create_task(shared.serve(shared.bind(address[0]), listen)))
            yield listener
        finally:
            for task in tasks:
                task.cancel()
            port.close()
            await asyncio.sleep(0)  # requests that were accepted begin
            until_s = loop.time() + listener.stop_s
            due = {each.body for each in connections if each.is_receiving}
            while due and loop.time() < until_s:  # aiohttp drops bodies that have begun
                for each in [*connections]:  # others end now, or after their response
                    if each.is_idle:
                        each.force_close()
                    elif not each.is_receiving:
                        each.close()
                await asyncio.sleep(_LOOK_AGAIN_S)
                due &= {each.body for each in connections if each.is_receiving}
            server.pre_shutdown()
            await app.shutdown()
            left_s = max(_LOOK_AGAIN_S, until_s - loop.time())  # 0 means no limit
            await server.shutdown(left_s / 2)  # it waits so long twice
    finally:
        await runner.cleanup()


async def _watch(connections: set[Connection], limits: Limits) -> None:
    while True:
        now = asyncio.get_running_loop().time()
        for connection in list(connections):
            connection.check_time(now)
        await asyncio.sleep(min(_CHECK_S, limits.head_s / 4, limits.stalled_s / 4))


async def _serve(
    handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    direct: Handler | None,
    request: web.Request,
) -> web.StreamResponse:
    """Call the application, and give its errors the shape of OpenAI's."""
    connection = request.protocol
    assert isinstance(connection, Connection)
    connection.set_serving(request.content)
    is_frequent = request.method == "POST" and request.raw_path in (CHAT, COMPLETIONS)
    has_more = "Expect" in request.headers or "Origin" in request.headers
    try:
        if direct is not None and is_frequent and not has_more:
            response = await direct(request)
        else:
            response = await handle(request)
    except web.HTTPException as error:  # of an Expect header, before any middleware
        response = Refusal(error.status, error.reason).response()
    finally:
        connection.set_serving(None)
    if not request.content.is_eof():
        response.force_close()  # some of its body is still to come
    return response
