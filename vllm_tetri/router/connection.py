"""A client's connection: it parses requests, has them served one by one, and is bounded in time.

uvloop moves the bytes and llhttp (`httptools`) parses them, as in uvicorn, which serves vLLM.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol, cast
from urllib.parse import unquote

import httptools

from vllm_tetri.logs import LimitLog
from vllm_tetri.router.auth import Limits
from vllm_tetri.router.errors import Refusal
from vllm_tetri.router.incoming import ClientRequest
from vllm_tetri.router.replies import Reply, Response, StreamedResponse, refused
from vllm_tetri.router.request import head_of
from vllm_tetri.router.response import wake

_LINGER_S = 2.0  # how long a refused body is still read, so that the response arrives
_MAX_UNREAD_BYTES = 1 << 17  # of a body, before reading pauses
_MAX_WAITING = 256  # requests that a client sends ahead; from an eighth on reading pauses
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Application(Protocol):
    """What serves requests. It raises `ConnectionResetError` if the client has left."""

    async def serve(self, request: ClientRequest) -> Reply: ...


class Connection:
    """One client, whose requests are served one after another: an `asyncio.Protocol`, of which
    compiled classes cannot be subclasses. Owner: the event loop.

    `admitted` holds all connections that are open and not one too many.
    """

    __deletable__ = ("_parser",)  # for mypyc

    def __init__(
        self, app: Application, limits: Limits, admitted: set[Connection], limit_log: LimitLog
    ) -> None:
        self._app, self._limits, self._admitted = app, limits, admitted
        self._limit_log, self._loop = limit_log, asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.writing_paused = False
        self._drained: asyncio.Future[bool] | None = None  # of the task that serves
        self._parser = httptools.HttpRequestParser(self)
        # Of the head that is parsed.
        self._target, self._headers, self._num_headers = b"", dict[str, str](), 0
        self._is_in_head, self._head_bytes = False, 0
        self._problem: Refusal | None = None  # ends the connection once all before it is served
        self._incoming: ClientRequest | None = None  # whose body is still coming
        self._serving: ClientRequest | None = None
        self._waiting: deque[ClientRequest] = deque()  # behind the one that is served
        self.task: asyncio.Task[None] | None = None  # that serves
        self._is_last = False  # no further request is served
        self._is_lingering = False
        self._idle_since_s = self._loop.time()
        self._head_since_s: float | None = None
        self._unread_since_s: float | None = None  # since when sent bytes are unread
        self._unread_bytes = 0  # how many were at that time

    @property
    def is_idle(self) -> bool:
        """Whether no request has come that has no response."""
        return self._serving is None

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for the client to read."""
        return self.transport is not None and self.transport.get_write_buffer_size() > 0

    def close_when_idle(self) -> None:
        """Close now, or after the response to the request that is served."""
        self._is_last = True
        if self.is_idle and self.transport is not None:
            self.transport.close()

    def check_time(self, now: float) -> None:
        """End the connection if its client is too slow."""
        stream, limits = self.transport, self._limits
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
        elif self._serving is not None or stream.is_closing():
            return
        elif self._head_since_s is None:
            if now - self._idle_since_s > limits.idle_s:
                stream.close()
        elif now - self._head_since_s > limits.head_s and not self._waiting:
            self._refuse(Refusal(408, "the head of the request did not arrive in time"))

    def _mark_unread(self, stream: asyncio.Transport, now: float) -> None:
        self._unread_since_s, self._unread_bytes = now, stream.get_write_buffer_size()

    def _refuse(self, refusal: Refusal) -> None:
        """Send an error outside of any request, and close."""
        self._is_last = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.writelines(refused(refusal).render(None, closes=True))
            self.transport.close()

    async def drain(self) -> None:
        """Wait until the client has read most of what was sent. Raises `ConnectionResetError`."""
        while self.writing_paused and self.transport is not None:
            self._drained = self._loop.create_future()
            await self._drained
        if self.transport is None:
            raise ConnectionResetError

    def want_body(self, request: ClientRequest) -> None:
        """Let the rest of a body come."""
        if request.invites and self.transport is not None:
            request.invites = False
            self.transport.write(_CONTINUE)
        self._set_reading()

    # -- asyncio ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        if len(self._admitted) < self._limits.connections:
            self._admitted.add(self)
        else:
            words = f"{len(self._admitted)} are open; further ones get 503"
            self._limit_log.record("the limit of client connections (--max-connections)", words)
            self._refuse(Refusal(503, "too many connections; try again later"))

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._admitted.discard(self)
        self._waiting.clear()
        self._incoming = None
        del self._parser  # it holds methods of this: only the garbage collector would free the two
        wake(self._drained)
        if self.task is not None:
            self.task.cancel()

    def eof_received(self) -> None:
        """Let the transport close: the client has left."""

    def pause_writing(self) -> None:
        self.writing_paused = True
        if self.transport is not None:
            self._mark_unread(self.transport, self._loop.time())

    def resume_writing(self) -> None:
        self.writing_paused, self._unread_since_s = False, None
        wake(self._drained)
        if self._waiting:
            self._serve_next()
            self._set_reading()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf():
            return
        if self._serving is None and self._head_since_s is None:
            self._head_since_s = self._loop.time()
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._break_body()
            words = str(error).partition("\n")[0][:200]
            self._find_fault(400, f"not HTTP/1.1: {words}")
        if self._is_in_head or self._incoming is not None:  # trailers are parts of a head, too
            self._head_bytes, limits = self._head_bytes + len(data), self._limits
            most = limits.url_bytes + limits.headers * limits.header_bytes
            if self._head_bytes > most:
                self._break_body()
                self._find_fault(431, f"the head of the request exceeds {most} bytes")
        if self._serving is None:
            self._tell_fault()
        elif self._waiting or self._incoming is not None:
            self._set_reading()

    def _break_body(self) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.end(is_broken=True)
            self._is_last = True

    def _is_deaf(self) -> bool:
        return self._problem is not None or (self._is_last and self._incoming is None)

    def _find_fault(self, status: int, words: str) -> None:
        if self._problem is None:
            self._problem = Refusal(status, words)

    def _tell_fault(self) -> None:
        if self._problem is not None and not self._is_lingering:  # else it has a response
            self._refuse(self._problem)

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:  # which is declined
                if self._problem is not None:
                    return
                data = self._without_upgrade() + data[upgrade.args[0] :]

    def _without_upgrade(self) -> bytes:
        """Render the head once more: the parser took it for the whole message, body or not."""
        method, version = self._parser.get_method().decode(), self._parser.get_http_version()
        kept = {name: each for name, each in self._headers.items() if name != "upgrade"}
        return head_of(f"{method} {self._target.decode('latin-1')} HTTP/{version}", kept)

    def _set_reading(self) -> None:
        """Read on, unless enough is there that no handler has taken."""
        transport, incoming = self.transport, self._incoming
        if transport is None or transport.is_closing():
            return
        is_full = incoming is not None and incoming.num_unread > _MAX_UNREAD_BYTES
        if (is_full or len(self._waiting) > _MAX_WAITING // 8) and not self._is_lingering:
            transport.pause_reading()
        elif not transport.is_reading():
            transport.resume_reading()

    # -- httptools ----------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._target, self._headers, self._num_headers = b"", {}, 0
        self._is_in_head, self._head_bytes = True, 0

    def on_url(self, part: bytes) -> None:
        self._target += part
        if len(self._target) > self._limits.url_bytes:
            self._find_fault(414, f"the URL exceeds {self._limits.url_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:  # a trailer
            return
        limits, headers = self._limits, self._headers
        self._num_headers += 1
        if len(name) > limits.header_bytes or len(value) > limits.header_bytes:
            self._find_fault(431, f"a header exceeds {limits.header_bytes} bytes")
        elif self._num_headers > limits.headers:
            self._find_fault(431, f"there are more than {limits.headers} headers")
        key, text = name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_since_s, self._head_bytes = False, None, 0
        if self._parser.should_upgrade() and self._parser.get_method() == b"CONNECT":
            self._find_fault(405, "CONNECT: this is no proxy")
        if self._is_deaf() or self._parser.should_upgrade():
            return  # in the latter case the head comes once more, without that
        if len(self._waiting) >= _MAX_WAITING:
            self._find_fault(400, f"more than {_MAX_WAITING} requests were sent ahead")
            return
        parser, target = self._parser, self._target.decode("utf-8", "surrogateescape")
        is_old = parser.get_http_version() != "1.1"
        if not target.startswith("/"):  # a whole URL, as for a proxy
            target = "/" + target.partition("://")[2].partition("/")[2]
        path = target.partition("?")[0]
        if "host" not in self._headers and not is_old:
            self._find_fault(400, "not HTTP/1.1: the header Host is missing")
            return
        self._incoming = request = ClientRequest(
            self,
            parser.get_method().decode(),
            unquote(path) if "%" in path else path,
            target,
            self._headers,
            is_old=is_old,
            keeps_alive=parser.should_keep_alive(),
        )
        self._waiting.append(request)
        self._serve_next()

    def on_body(self, part: bytes) -> None:
        self._head_bytes = 0
        if self._incoming is not None and not self._is_lingering:
            self._incoming.feed(part)

    def on_message_complete(self) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.end()
        if self._is_lingering and self.transport is not None:
            self.transport.close()

    # -- requests -----------------------------------------------------------------

    def _serve_next(self) -> None:
        """Serve a request if one waits, nothing is served, and the client reads."""
        if self._waiting and self._serving is None and not self.writing_paused:
            self._serving = request = self._waiting.popleft()
            self.task = self._loop.create_task(self._serve(request))

    async def _serve(self, request: ClientRequest) -> None:
        is_served = False
        try:
            reply = await self._app.serve(request)
            if isinstance(reply, StreamedResponse):
                reply.end()
                is_served = True
            elif not request.has_begun:
                self._respond(request, reply)
                is_served = True
            await self.drain()
        except ConnectionResetError:
            pass
        finally:
            self._end_serving(request, is_served=is_served)

    def _respond(self, request: ClientRequest, response: Response) -> None:
        if self.transport is None:
            raise ConnectionResetError
        self._is_last = self._is_last or not (request.keeps_alive and request.is_complete)
        self.transport.writelines(response.render(request, closes=self._is_last))

    def _end_serving(self, request: ClientRequest, *, is_served: bool) -> None:
        self._serving = self.task = None
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if not is_served:  # the client must not take what it has for all
            transport.abort()
        elif not request.is_complete:
            self._is_last = self._is_lingering = True
            self._loop.call_later(_LINGER_S, transport.close)
            self._set_reading()
        elif self._is_last or not request.keeps_alive:
            transport.close()
        elif self._waiting:
            self._serve_next()
            self._set_reading()
        else:
            self._tell_fault()
            self._idle_since_s = now = self._loop.time()
            self._head_since_s = now if self._is_in_head else None
