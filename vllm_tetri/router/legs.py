"""The legs of one request on their way: sent, asked again when busy, passed on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from vllm_tetri.policy.lifecycle import Phase
from vllm_tetri.router.answers import GIVEN_UP, LegBusy, LegFailed, mark_too_long
from vllm_tetri.router.call import Call
from vllm_tetri.router.early import Opened, leave
from vllm_tetri.router.hooks import Hooks
from vllm_tetri.router.outlet import EVENT_STREAM, Outlet
from vllm_tetri.router.relay import Relay
from vllm_tetri.router.table import Entry
from vllm_tetri.router.upstream import Upstream
from vllm_tetri.router.wire import Answer
from vllm_tetri.types import InstanceId, InstanceInfo

# How long a full decode instance is asked again. Its arena holds the KV meanwhile
# (--tetri-hold-timeout).
DECODE_PATIENCE_S = 10.0
_FIRST_WAIT_S = 0.02
_LONGEST_WAIT_S = 0.5

_log = logging.getLogger(__name__)


class Legs:
    """Sends legs of one request to instances and their answers to its client.

    Attributes:
        outlet: The client's end.
        relay: Streams on their way there.
        asked: Instances that got a leg, as they were then.
    """

    def __init__(
        self, *, call: Call, entry: Entry, request: web.Request, upstream: Upstream, hooks: Hooks
    ) -> None:
        self._call = call
        self._entry = entry
        self._upstream = upstream
        self._hooks = hooks
        self._headers = {
            **call.headers,
            "Content-Type": "application/json",
            "X-Request-Id": entry.id,
        }
        self._sent_s = 0.0
        self.asked: dict[InstanceId, InstanceInfo] = {}
        self.outlet = Outlet(request, self._answer_headers)
        self.relay = Relay(
            call=call,
            entry=entry,
            outlet=self.outlet,
            upstream=upstream,
            hooks=hooks,
            computed=self._computed_whole,
        )

    def submit(self, instance: InstanceInfo) -> None:
        """Note that the prompt goes to an instance now."""
        # It also counts when the instance turns out to be full: until its next report
        # others then look less loaded.
        self._sent_s = time.monotonic()
        self._hooks.submitted(instance.id, self._call.approx_tokens)

    def computed(self, instance: InstanceId, num_tokens: int) -> None:
        """Note that an instance has computed what was submitted last."""
        self._hooks.prefilled(instance, num_tokens, self._sent_s)

    async def prefill(self, instance: InstanceInfo, body: bytes) -> tuple[int, str, bytes]:
        """Leg 1: its status, content type and answer."""
        response = await self.post(instance, body)
        try:
            answer = await self._upstream.body(instance, response)
        finally:
            response.close()
        return response.status, response.content_type, answer

    async def answer_when_free(
        self, instance: InstanceInfo, body: Callable[[], bytes], opened: Opened | None
    ) -> web.StreamResponse:
        """Leg 2, which may have been opened before. An instance that is full still holds
        the KV, so it is asked again."""
        wait_s = _FIRST_WAIT_S
        give_up_s = time.monotonic() + DECODE_PATIENCE_S
        posting: Awaitable[Answer] = opened or self.post(instance, body())
        while True:
            try:
                return await self.answer(instance, posting)
            except LegBusy as busy:
                if time.monotonic() + wait_s > give_up_s:
                    raise
                self.note_busy(busy)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            posting = self.post(instance, body())

    async def answer(
        self, instance: InstanceInfo, posting: Awaitable[Answer]
    ) -> web.StreamResponse:
        """Pass on what an instance answers to a leg that is or was sent to it."""
        response = await self._head_of(posting)
        try:
            if response.content_type == EVENT_STREAM:
                return await self.relay.pass_on(instance, response)
            answer = await self._upstream.body(instance, response)
            if self.outlet.has_begun:
                words = answer[:200].decode(errors="replace")
                raise LegFailed(instance.id, f"HTTP {response.status} {words}")
            if GIVEN_UP in answer:
                raise LegFailed(instance.id, "gave the request up")
            self.relay.begin()
            return self.plain(response.status, response.content_type, answer)
        finally:
            response.close()  # its connection serves others if it was read to its end

    def plain(self, status: int, content_type: str, body: bytes) -> web.Response:
        """An answer that is not streamed."""
        status, body = mark_too_long(status, body)
        return web.Response(
            body=body, status=status, content_type=content_type, headers=self._answer_headers()
        )

    async def stream(self, events: bytes) -> web.StreamResponse:
        """An answer of which all events are known."""
        self.relay.begin()
        response = await self.outlet.begin()
        self._entry.generated += 1
        await response.write(events)
        await response.write_eof()
        return response

    def note_busy(self, busy: LegBusy) -> None:
        """An instance has no room."""
        _log.debug("request %s: %s", self._entry.id, busy)
        self._hooks.busy(busy.instance)

    async def post(self, instance: InstanceInfo, body: bytes) -> Answer:
        """Send a leg and wait for the head of its answer."""
        self.asked[instance.id] = instance
        path, headers = self._call.path, self._headers
        return await self._upstream.post(instance, path, body, headers, self._is_movable)

    def _is_movable(self) -> bool:
        """Whether the client has something that another instance can go on behind."""
        return self.relay.has_shown

    async def _head_of(self, posting: Awaitable[Answer]) -> Answer:
        if not self.relay.is_unsent:
            return await arrived(posting)
        # The leg goes first, but the token does not wait for its answer.
        showing = asyncio.create_task(self.relay.send_first())
        response = None
        try:
            response = await arrived(posting)
        finally:
            try:
                await showing
            except BaseException:
                if response is not None:
                    response.close()
                raise
        return response

    def _computed_whole(self, instance: InstanceInfo) -> None:
        if self._entry.phase is Phase.SERVING:
            self.computed(instance.id, self._call.approx_tokens)

    def _answer_headers(self) -> dict[str, str]:
        return {
            "x-request-id": self._entry.id,
            "x-tetri-prefill": self._entry.prefill,
            "x-tetri-decode": self._entry.decode,
        }


async def arrived(posting: Awaitable[Answer]) -> Answer:
    """What a leg answers; it is left when the caller stops waiting."""
    try:
        return await posting
    except asyncio.CancelledError:
        if isinstance(posting, asyncio.Task):
            leave(posting)  # it may have got its answer in this moment
        raise
