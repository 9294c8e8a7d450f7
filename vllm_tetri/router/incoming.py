"""Requests of clients as they come in: a head, and a body that is read within bounds."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Mapping
from typing import Protocol

from vllm_tetri.logs import LimitLog
from vllm_tetri.router.auth import Limits
from vllm_tetri.router.errors import Refusal
from vllm_tetri.router.response import wake

CONTINUE = "100-continue"
_ANY_HEADER = 32 + zlib.MAX_WBITS  # zlib's word for: gzip or zlib, as the first bytes say
_UNPACKED_BYTES = 1 << 16  # at a time: a packed body may be a thousand times as large
_NOT_AS_TOLD = "the body is not what its headers say"


class Client(Protocol):
    """The connection that a request comes by."""

    transport: asyncio.Transport | None  # None: the client has left
    writing_paused: bool

    async def drain(self) -> None: ...
    def want_body(self, request: ClientRequest) -> None: ...


class ClientRequest:
    """One request of a client, whose body may still be coming. Written by its connection, read by
    the task that serves it.

    Attributes:
        path: Decoded, without the query; `target` is both as they were sent.
        headers: By name in lower case; repeated ones joined as HTTP says.
        params: The variable parts of the path.
        client: The name of its API key.
        cors: Headers of the response, for pages of other origins.
        held_bytes: How much of its body is counted as held.
        is_old: It is of HTTP/1.0, which knows no chunks.
        keeps_alive: The connection may be used again.
        is_complete: All of the body has come.
        expects: What the client expects before it sends the body, in lower case.
        has_begun: The client has a part of a response.
        invites: The client waits for permission to send the body.
    """

    def __init__(
        self,
        connection: Client,
        method: str,
        path: str,
        target: str,
        headers: Mapping[str, str],
        *,
        is_old: bool,
        keeps_alive: bool,
    ) -> None:
        self.connection, self.method, self.path, self.target = connection, method, path, target
        self.headers, self.is_old, self.keeps_alive = headers, is_old, keeps_alive
        self.params: Mapping[str, str] = {}
        self.client, self.cors = "", dict[str, str]()
        self.held_bytes = self.num_unread = 0
        self.is_complete = self.has_begun = self._is_broken = False
        self.expects = headers.get("expect", "").lower() if not is_old else ""
        self.invites = self.expects == CONTINUE
        self._parts: list[bytes] = []
        self._waiter: asyncio.Future[bool] | None = None

    def feed(self, part: bytes) -> None:
        """Take a part of the body."""
        self._parts.append(part)
        self.num_unread += len(part)
        wake(self._waiter)

    def end(self, *, is_broken: bool = False) -> None:
        """Note that the body has ended, or that no more of it can be read."""
        self.is_complete, self._is_broken = not is_broken, is_broken
        wake(self._waiter)

    def take(self) -> bytes:
        """Return all bytes of the body that have come since the last call."""
        parts, self._parts, self.num_unread = self._parts, [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read_some(self) -> bytes:
        """Return the bytes since the last call, at least one; empty at the end. Raises `Refusal`
        400: there is no more that could be read."""
        while not (self._parts or self.is_complete):
            if self._is_broken:
                raise Refusal(400, _NOT_AS_TOLD)
            self._waiter = asyncio.get_running_loop().create_future()
            self.connection.want_body(self)
            await self._waiter
        return self.take()


class BodyReader:
    """Reads bodies, bounded each and together, and in time. Owner: the event loop. `held_bytes` is
    the size of the bodies of all requests that have not ended."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._limit_log = limits, LimitLog()
        self.held_bytes = 0

    def check_announced(self, request: ClientRequest) -> None:
        """Raise Refusal 413 or 503 if the announced length is too large, before the body is sent:
        the client may wait for permission."""
        length = int(request.headers.get("content-length", 0))
        self._check(length, self.held_bytes + length)

    async def read(self, request: ClientRequest) -> bytes:
        """Return the whole body, uncompressed. Raises `Refusal`: 408, 413 or 503, it is too slow,
        too large, or exceeds the bound for all; 400, it is not what the headers say."""
        if request.is_complete and "content-encoding" not in request.headers:  # as nearly always
            return self._hold(request, request.take(), 0)
        return await self._read_slowly(request)

    def release(self, request: ClientRequest) -> None:
        """Count the body of an ended request no more."""
        self.held_bytes -= request.held_bytes

    def hold(self, part_bytes: int, body_bytes: int) -> None:
        """Count a part of a body, which has so many bytes with it; raises `Refusal` 413 or 503."""
        self.held_bytes += part_bytes
        self._check(body_bytes, self.held_bytes)

    async def _read_slowly(self, request: ClientRequest) -> bytes:
        limits, begun_s = self._limits, asyncio.get_running_loop().time()
        encoding = request.headers.get("content-encoding", "").lower()
        body, packer = bytearray(), None
        try:
            async with asyncio.timeout(limits.body_s) as deadline:
                while part := await request.read_some():
                    if packer is None and encoding in ("gzip", "deflate"):
                        is_bare = encoding == "deflate" and part[0] & 15 != zlib.DEFLATED
                        packer = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else _ANY_HEADER)
                    for each in [part] if packer is None else _unpacked(packer, part):
                        body += self._hold(request, each, len(body))
                        if packer is not None:
                            await asyncio.sleep(0)  # a few bytes may be megabytes
                    more_s = len(body) / limits.least_bytes_per_s
                    deadline.reschedule(begun_s + limits.body_s + more_s)
        except TimeoutError as error:
            words = f"the body did not arrive in time: {len(body)} bytes of it did"
            raise Refusal(408, words) from error
        except zlib.error as error:
            raise Refusal(400, _NOT_AS_TOLD) from error
        if packer is not None and not packer.eof:
            raise Refusal(400, _NOT_AS_TOLD)
        return bytes(body)

    def _hold(self, request: ClientRequest, part: bytes, before: int) -> bytes:
        request.held_bytes = body_bytes = before + len(part)
        self.hold(len(part), body_bytes)
        return part

    def _check(self, body_bytes: int, bodies_bytes: int) -> None:
        if body_bytes > self._limits.body_bytes:
            raise Refusal(413, f"the body exceeds {self._limits.body_bytes} bytes")
        if bodies_bytes > self._limits.bodies_bytes:
            words = "the router holds as many bytes of requests as it may; "
            self._limit_log.record("the limit of bytes of all bodies", f"{words}new ones get 503")
            raise Refusal(503, f"{words}try again later")


def _unpacked(packer: zlib._Decompress, part: bytes) -> Iterator[bytes]:
    while part:
        yield packer.decompress(part, _UNPACKED_BYTES)
        if packer.unused_data:
            raise zlib.error("more follows its end")
        part = packer.unconsumed_tail
