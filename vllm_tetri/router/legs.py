"""The legs of one request on their way: sent, asked again when busy, passed on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from vllm_tetri.policy.lifecycle import Event, Phase
from vllm_tetri.policy.route import Full, Route
from vllm_tetri.router.answers import LegBusy, LegFailed, NoRoom, Refusal, mark_too_long
from vllm_tetri.router.call import Call
from vllm_tetri.router.early import Opened, leave
from vllm_tetri.router.first_token import FirstToken
from vllm_tetri.router.outlet import EVENT_STREAM, Outlet
from vllm_tetri.router.splice import Splice, SpliceMismatch, SpliceRefused
from vllm_tetri.router.table import Entry
from vllm_tetri.router.upstream import Upstream
from vllm_tetri.router.wire import Answer, WireError
from vllm_tetri.types import InstanceId, InstanceInfo, TransferId

# How long a full decode instance is asked again. Its arena holds the KV meanwhile
# (--tetri-hold-timeout).
DECODE_PATIENCE_S = 10.0
_FIRST_WAIT_S = 0.02
_LONGEST_WAIT_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a job needs from the global scheduler.

    Attributes:
        route: Picks instances for (call, splittable, failed ones, full ones).
        info: What an instance said of itself, if it is in use.
        submitted: Told when prompt tokens go to an instance.
        prefilled: Told how many were computed that were sent at a monotonic time.
        busy: Told when an instance had no room.
        no_room: The answer when all of these are full.
        cancel: Tells (prefill, decodes or all of them) to drop a transfer.
        fell_back: Told why work of one leg is done again.
        first_token: Told how a first token from prefill reached the client.
    """

    route: Callable[[Call, bool, frozenset[InstanceId], frozenset[InstanceId]], Route | Full | None]
    info: Callable[[InstanceId], InstanceInfo | None]
    submitted: Callable[[InstanceId, int], None]
    prefilled: Callable[[InstanceId, int, float], None]
    busy: Callable[[InstanceId], None]
    no_room: Callable[[Full], NoRoom]
    cancel: Callable[[TransferId, InstanceId, frozenset[InstanceId]], None]
    fell_back: Callable[[str], None]
    first_token: Callable[[str], None]


class Legs:
    """Sends legs of one request to instances and their answers to its client.

    Attributes:
        outlet: The client's end.
        shown: The token that the client got before leg 2 answered, if any.
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
        self._created = 0
        self._is_unsent = False
        self._sent_s = 0.0
        self.outlet = Outlet(request, self._answer_headers)
        self.shown: FirstToken | None = None

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

    def show(self, first: FirstToken) -> None:
        """Let the client have the first token; it is sent along with the next leg."""
        self.shown, self._is_unsent = first, True
        self._created = int(time.time())

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
                return await self._relay(instance, response)
            answer = await self._upstream.body(instance, response)
            if self.outlet.has_begun:
                words = answer[:200].decode(errors="replace")
                raise LegFailed(instance.id, f"HTTP {response.status} {words}")
            self.begin()
            return self.plain(response.status, response.content_type, answer)
        finally:
            response.close()  # its connection serves others if it was read to its end

    def begin(self) -> None:
        """The answer's bytes are there."""
        self._entry.on(Event.ANSWERING)
        if self._entry.first_byte_s is None:
            self._entry.first_byte_s = time.monotonic()

    def plain(self, status: int, content_type: str, body: bytes) -> web.Response:
        """An answer that is not streamed."""
        status, body = mark_too_long(status, body)
        return web.Response(
            body=body, status=status, content_type=content_type, headers=self._answer_headers()
        )

    async def stream(self, events: bytes) -> web.StreamResponse:
        """An answer of which all events are known."""
        self.begin()
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
        return await self._upstream.post(instance, self._call.path, body, self._headers)

    async def _head_of(self, posting: Awaitable[Answer]) -> Answer:
        if not self._is_unsent:
            return await arrived(posting)
        # The leg goes first, but the token does not wait for its answer.
        self._is_unsent = False
        showing = asyncio.create_task(self._show())
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

    async def _show(self) -> None:
        assert self.shown is not None
        await asyncio.sleep(0)
        self._entry.first_byte_s = time.monotonic()
        self._entry.generated = 1
        response = await self.outlet.begin()
        counts_each = self._call.wants_usage_each
        await response.write(self.shown.opening(self._created, counts_each=counts_each))

    async def _relay(self, instance: InstanceInfo, response: Answer) -> web.StreamResponse:
        if self.shown is not None:
            return await self._relay_behind(instance, response, Splice(self.shown, self._created))
        chunk = await self._upstream.first_chunk(instance, response)
        if self._entry.phase is Phase.SERVING and response.status == 200:
            self.computed(instance.id, self._call.approx_tokens)
        self.begin()
        answer = await self.outlet.begin(response.status, response.headers["content-type"])
        read, write = response.read_some, answer.write
        while chunk:
            self._entry.generated += chunk.count(b"\n\n")
            await write(chunk)
            try:
                chunk = await read()
            except WireError as error:
                return await self._broke_off(instance, error)
        await answer.write_eof()
        return answer

    async def _relay_behind(
        self, instance: InstanceInfo, response: Answer, splice: Splice
    ) -> web.StreamResponse:
        answer = await self.outlet.begin()
        chunk = await self._upstream.first_chunk(instance, response)
        has_begun = False
        try:
            while True:
                events = splice.feed(chunk) if chunk else splice.finish()
                if events:
                    if not has_begun:
                        has_begun = True
                        self.begin()
                    self._entry.generated += events.count(b"\n\n")
                    await answer.write(events)
                if not chunk:
                    break
                try:
                    chunk = await response.read_some()
                except WireError as error:
                    if not has_begun:
                        raise LegFailed(instance.id, f"connection lost: {error}") from error
                    return await self._broke_off(instance, error)
        except SpliceRefused as error:
            raise LegFailed(instance.id, str(error)) from error
        except SpliceMismatch as error:
            self._hooks.first_token("mismatch")
            raise Refusal(
                502, f"instance {instance.id} answered something else: {error}"
            ) from error
        await answer.write_eof()
        return answer

    async def _broke_off(self, instance: InstanceInfo, error: Exception) -> web.StreamResponse:
        _log.warning("request %s: %s broke off: %r", self._entry.id, instance.id, error)
        self._entry.on(Event.FAIL)
        text = f"instance {instance.id} broke off in the middle of the answer"
        return await self.outlet.break_off(Refusal(502, text))

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
