"""The client's end of a streamed answer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web

from vllm_tetri.router.answers import Refusal

EVENT_STREAM = "text/event-stream"


class EventStream(web.StreamResponse):
    """An answer that knows whether what was written of it is whole events."""

    is_whole = True

    def write(self, data: bytes | bytearray | memoryview[int]) -> Coroutine[Any, Any, None]:
        self.is_whole = bytes(data[-2:]) == b"\n\n"
        return super().write(data)

    async def break_off(self, refusal: Refusal) -> None:
        """End it with an error event. The connection is none the worse for it, and is not
        closed: the client's next request may be on its way."""
        if not self.is_whole:
            await self.write(b"\n\n")  # else the error were a part of what broke off
        await self.write(refusal.event())
        await self.write_eof()


class Outlet:
    """Bytes to one client. Nothing is sent until `begin`, which can be called again.

    Args:
        request: The client's request.
        headers: Headers of the answer, asked for when it begins.
    """

    def __init__(self, request: web.Request, headers: Callable[[], dict[str, str]]) -> None:
        self._request = request
        self._headers = headers
        self._response: EventStream | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the client has a status and maybe bytes already."""
        return self._response is not None

    async def begin(
        self, status: int = 200, content_type: str = f"{EVENT_STREAM}; charset=utf-8"
    ) -> EventStream:
        """Send the head of the answer, unless that was done."""
        if self._response is None:
            self._response = EventStream(status=status, headers=self._headers())
            self._response.headers["Content-Type"] = content_type
            self._response.headers["Cache-Control"] = "no-cache"
            await self._response.prepare(self._request)
        return self._response

    async def break_off(self, refusal: Refusal) -> web.StreamResponse:
        """End a stream that has begun with an error event."""
        response = await self.begin()
        await response.break_off(refusal)
        return response
