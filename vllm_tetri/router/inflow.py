"""Bodies of requests on their way in: bounded in size, together and each, and in time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from vllm_tetri.router.answers import Refusal
from vllm_tetri.router.limits import Limits


@dataclass(slots=True)
class Visit:
    """One request while it is in the router: who asks, and how much of its body is held."""

    party: str
    held_bytes: int = 0


VISIT = web.RequestKey("visit", Visit)


class Inflow:
    """Reads bodies. Owner: the event loop.

    Attributes:
        held_bytes: Of all requests that have not ended.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.held_bytes = 0

    def expect(self, request: web.Request) -> None:
        """Look at what a request says of its body: the client may wait for a word.

        Raises:
            Refusal: 413 or 503, the body should not be sent.
        """
        length = request.content_length or 0
        if length > self._limits.body_bytes:
            raise self._too_large()
        if self.held_bytes + length > self._limits.bodies_bytes:
            raise self._too_many()

    async def read(self, request: web.Request) -> bytes:
        """The whole body, unpacked.

        Raises:
            Refusal: 408, 413 or 503, it is too slow, too large, or one too many; 400, it
                is not what the headers say.
        """
        visit, content = request[VISIT], request.content
        try:
            if content.is_eof():  # as nearly always
                return self._hold(visit, content.read_nowait(-1))
            return await self._read_slowly(visit, content)
        except web.RequestPayloadError as error:
            raise Refusal(400, "the body is not what its headers say") from error
        except RuntimeError as error:
            if request.transport is None:  # how aiohttp says that the client has left
                raise ConnectionResetError from error
            raise

    def let_go(self, visit: Visit) -> None:
        """The request has ended. Idempotent."""
        self.held_bytes -= visit.held_bytes
        visit.held_bytes = 0

    async def _read_slowly(self, visit: Visit, content: aiohttp.StreamReader) -> bytes:
        loop, limits = asyncio.get_running_loop(), self._limits
        begun_s = loop.time()
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_s) as deadline:
                while part := await content.readany():
                    body += self._hold(visit, part)
                    more_s = len(body) / limits.least_bytes_per_s
                    deadline.reschedule(begun_s + limits.body_s + more_s)
        except TimeoutError as error:
            raise Refusal(
                408, f"the body did not come in time: {len(body)} bytes of it did"
            ) from error
        return bytes(body)

    def _hold(self, visit: Visit, part: bytes) -> bytes:
        visit.held_bytes += len(part)
        self.held_bytes += len(part)
        if visit.held_bytes > self._limits.body_bytes:
            raise self._too_large()
        if self.held_bytes > self._limits.bodies_bytes:
            raise self._too_many()
        return part

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body exceeds {self._limits.body_bytes} bytes")

    def _too_many(self) -> Refusal:
        return Refusal(503, "the router holds as many bytes as it may; try again later")
