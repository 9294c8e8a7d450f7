"""The port for clients: how many connections there are, and how patient it is with each.

aiohttp's server bounds a head in size but not in time, and connections neither in number
nor in what they leave unread. Its errors below HTTP are text.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from vllm_tetri.router.answers import Refusal
from vllm_tetri.router.limits import Limits

_LOOK_S = 1.0  # how exact the deadlines of connections are, at most
_HANDSHAKE_S = 10.0
_LINGER_S = 2.0  # a body that nobody wants is read on for so long, for the answer to arrive
_BACKLOG = 1024
_TOO_MANY_HEADERS = "Too many headers received"  # aiohttp's words

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_log = logging.getLogger(__name__)


class Connection(web.RequestHandler):
    """One client, one request at a time. Owner: the event loop."""

    __slots__ = (
        "_head_since_s", "_is_serving", "_left_bytes", "_left_since_s", "_listener", "_wire"
    )  # fmt: skip

    def __init__(self, listener: Listener, server: web.Server, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._listener = listener
        self._wire: asyncio.Transport | None = None
        self._is_serving = False
        self._head_since_s: float | None = None
        self._left_since_s: float | None = None  # what was sent is not read
        self._left_bytes = 0  # of it then

    def begin(self) -> None:
        """The head of a request is there."""
        self._is_serving, self._head_since_s = True, None

    def end(self) -> None:
        """That request has its answer."""
        self._is_serving = False

    def look_at_time(self, now: float, limits: Limits) -> None:
        """End it if its client is too slow."""
        wire = self._wire
        if wire is None:
            return
        if wire.is_closing() and self._left_since_s is None:
            self._leave(wire, now)
        if self._left_since_s is not None:
            read_bytes = self._left_bytes - wire.get_write_buffer_size()
            if read_bytes >= limits.stalled_s * limits.least_bytes_per_s:
                self._leave(wire, now)  # it takes long, but it is read
        if self._left_since_s is not None and now - self._left_since_s > limits.stalled_s:
            wire.abort()
        elif self._head_since_s is not None and now - self._head_since_s > limits.head_s:
            self.refuse(Refusal(408, "the head of the request did not come in time"))

    def refuse(self, refusal: Refusal) -> None:
        """Say why, outside of any request, and close."""
        if self._wire is not None and not self._wire.is_closing():
            self._wire.write(_raw(refusal))
            self._wire.close()
        self._head_since_s = None
        self.force_close()

    # -- asyncio ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        if self._listener.admit(self):
            super().connection_made(transport)
        else:
            self.refuse(Refusal(503, "too many connections; try again later"))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._wire = None
        self._listener.lost(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if data and not self._is_serving and self._head_since_s is None:
            self._head_since_s = self._loop.time()
        super().data_received(data)

    def _leave(self, wire: asyncio.Transport, now: float) -> None:
        self._left_since_s, self._left_bytes = now, wire.get_write_buffer_size()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._wire is not None:
            self._leave(self._wire, self._loop.time())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._left_since_s = None

    # -- aiohttp ------------------------------------------------------------------

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no HTTP."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        if status >= 500:
            _log.error("a request failed", exc_info=exc)
        self._head_since_s = None
        answer = self._listener.refusal_of(status, exc, message or "").response()
        answer.force_close()
        return answer

    def log_exception(self, *args: Any, **kw: Any) -> None:
        # What fails in the router is logged there; this is about bytes of clients, who
        # could fill a disk with it.
        _log.debug(*args, **kw)


class Listener:
    """Binds the port and owns its connections. Build it on a running event loop.

    Args:
        app: What answers.
        stop_s: How long requests may go on when it is closed, in seconds.
    """

    def __init__(self, app: web.Application, limits: Limits, *, stop_s: float) -> None:
        self._limits = limits
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=stop_s
        )
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._handle: Handler | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_connections(self) -> int:
        """Those that were admitted and are not gone."""
        return len(self._connections)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; valid once open."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def open(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Start the application and listen.

        Raises:
            OSError: The port cannot be bound.
            ConfigError: The application cannot start.
        """
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        self._handle, server.request_handler = server.request_handler, self._serve
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._connect,
                host,
                port,
                ssl=tls,
                backlog=_BACKLOG,
                ssl_handshake_timeout=None if tls is None else _HANDSHAKE_S,
            )
        except BaseException:
            await self.close()
            raise
        self._look()

    async def close(self) -> None:
        """Take no more, let requests end, close everything. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._runner.cleanup()

    # -- called by connections ----------------------------------------------------

    def admit(self, connection: Connection) -> bool:
        """Whether there is room for it; then it is counted until it is lost."""
        if len(self._connections) >= self._limits.connections:
            return False
        self._connections.add(connection)
        return True

    def lost(self, connection: Connection) -> None:
        """It is gone. Idempotent."""
        self._connections.discard(connection)

    def refusal_of(self, status: int, error: BaseException | None, message: str) -> Refusal:
        """What to say of bytes that the parser did not take."""
        if status >= 500:
            return Refusal(status, "the router failed")
        if isinstance(error, LineTooLong):
            if error.args[1] == self._limits.url_bytes:
                return Refusal(414, f"the URL exceeds {self._limits.url_bytes} bytes")
            return Refusal(431, f"a header exceeds {self._limits.header_bytes} bytes")
        if message == _TOO_MANY_HEADERS:
            return Refusal(431, f"there are more than {self._limits.headers} headers")
        return Refusal(400, f"this is no HTTP/1.1: {message.partition(chr(10))[0][:200]}")

    def _connect(self) -> Connection:
        server, limits = self._runner.server, self._limits
        assert server is not None
        return Connection(
            self,
            server,
            access_log=None,
            keepalive_timeout=limits.idle_s,
            lingering_time=_LINGER_S,
            max_line_size=limits.url_bytes,
            max_field_size=limits.header_bytes,
            max_headers=limits.headers,
        )

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Around the application: its connection knows, and what it raises is OpenAI-shaped."""
        connection, handle = request.protocol, self._handle
        assert isinstance(connection, Connection)
        assert handle is not None
        connection.begin()
        try:
            answer = await handle(request)
        except web.HTTPException as error:  # of an expectation, before any middleware
            answer = Refusal(error.status, error.reason).response()
        finally:
            connection.end()
        if not request.content.is_eof():
            answer.force_close()  # some of its body is still to come
        return answer

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._connections):
            connection.look_at_time(now, self._limits)
        period_s = min(_LOOK_S, self._limits.head_s / 4, self._limits.stalled_s / 4)
        self._timer = loop.call_later(period_s, self._look)


def _raw(refusal: Refusal) -> bytes:
    """The same as bytes, where there is no request to answer."""
    phrase = HTTPStatus(refusal.status).phrase
    body, lines = refusal.body(), [f"HTTP/1.1 {refusal.status} {phrase}"]
    lines += [f"{name}: {value}" for name, value in refusal.headers().items()]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body
