"""Streams of instances on their way to one client, who sees a single one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from vllm_tetri.policy.lifecycle import Event
from vllm_tetri.router.answers import LegFailed, Refusal
from vllm_tetri.router.call import CHAT, Call
from vllm_tetri.router.first_token import FirstToken
from vllm_tetri.router.hooks import Hooks
from vllm_tetri.router.outlet import Outlet
from vllm_tetri.router.record import Record, Unprovable
from vllm_tetri.router.shown import Shown
from vllm_tetri.router.splice import Splice, SpliceMismatch, SpliceRefused
from vllm_tetri.router.table import Entry
from vllm_tetri.router.upstream import Upstream
from vllm_tetri.router.wire import Answer, WireError
from vllm_tetri.types import InstanceInfo

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Break:
    """A stream that broke off. `at_s` is the monotonic time at which that was noticed."""

    instance: str
    at_s: float


class Relay:
    """What goes to one client, and what it has got. Owner: the request's task.

    Args:
        call: What the client asked for.
        entry: The request in the table.
        outlet: The client's end.
        upstream: Connections to the instances.
        hooks: Is told what happens.
        computed: Told that an instance has computed the prompt of a stream.

    Attributes:
        first: The token that the client got, or gets, before leg 2 answers, if any.
        is_unsent: Whether that is still to be sent, along with the next leg.
    """

    def __init__(
        self,
        *,
        call: Call,
        entry: Entry,
        outlet: Outlet,
        upstream: Upstream,
        hooks: Hooks,
        computed: Callable[[InstanceInfo], None],
    ) -> None:
        self._call = call
        self._entry = entry
        self._outlet = outlet
        self._upstream = upstream
        self._hooks = hooks
        self._computed = computed
        self._created = 0
        self._record: Record | None = None
        self._break: _Break | None = None
        self.first: FirstToken | None = None
        self.is_unsent = False

    @property
    def has_shown(self) -> bool:
        """Whether the client has got something, or is about to."""
        return self.first is not None or self._outlet.has_begun

    def show(self, first: FirstToken) -> None:
        """Let the client have the first token; it is sent along with the next leg."""
        self.first, self.is_unsent = first, True
        self._created = int(time.time())
        self._record = self._new_record()
        self._record.show(first, self._created)

    async def send_first(self) -> None:
        """Send the token that is to be shown."""
        assert self.first is not None
        self.is_unsent = False
        await asyncio.sleep(0)  # the leg goes first
        self._entry.first_byte_s = time.monotonic()
        self._entry.generated = 1
        response = await self._outlet.begin()
        counts_each = self._call.wants_usage_each
        await response.write(self.first.opening(self._created, counts_each=counts_each))

    def shown(self) -> Shown:
        """All that the client has got.

        Raises:
            Unprovable: Another instance could not go on behind it for sure.
        """
        if self._record is None:
            raise Unprovable("only one choice of plain text is")
        return self._record.shown()

    @property
    def prompt_token_ids(self) -> list[int]:
        """Of the prompt, as far as the instances told them; read `shown` first."""
        return self._record.prompt_token_ids if self._record is not None else []

    def note_break(self, error: LegFailed) -> None:
        """The stream broke off, or the leg that was to go on behind it did."""
        if self._break is None:
            self._break = _Break(error.instance, time.monotonic())

    def broke_off(self, why: str) -> Refusal:
        """What the client is told of a stream that does not go on."""
        self._hooks.faults.broke("unprovable")
        where = self._break.instance if self._break is not None else "?"
        return Refusal(502, f"instance {where} broke off in the middle of the answer; {why}")

    def begin(self) -> None:
        """The answer's bytes are there."""
        self._entry.on(Event.ANSWERING)
        if self._entry.first_byte_s is None:
            self._entry.first_byte_s = time.monotonic()

    async def pass_on(self, instance: InstanceInfo, response: Answer) -> web.StreamResponse:
        """Relay one stream; behind what the client has got, if that is something.

        Raises:
            LegFailed: It broke off, or did not begin.
            LegBusy: The instance has no room.
            Refusal: It does not go on behind what the client has got.
        """
        if not self.has_shown:
            return await self._pass_all(instance, response)
        try:
            return await self._pass_behind(instance, response, Splice(self.shown()))
        except Unprovable as error:
            raise self.broke_off(str(error)) from error
        except SpliceRefused as error:
            raise LegFailed(instance.id, str(error)) from error
        except SpliceMismatch as error:
            if self._break is None:
                self._hooks.first_token("mismatch")
            else:
                self._hooks.faults.broke("mismatch")
            raise Refusal(
                502, f"instance {instance.id} answered something else: {error}"
            ) from error

    async def end(self) -> web.StreamResponse:
        """Write the rest of an answer that is over but for formalities."""
        assert self._record is not None
        answer = await self._outlet.begin()
        num_tokens = self._entry.prompt_tokens or len(self._record.prompt_token_ids)
        wants_usage = self._call.wants_usage
        await answer.write(self._record.ending(num_tokens, wants_usage=wants_usage))
        await answer.write_eof()
        self._note_resumed()
        return answer

    async def _pass_all(self, instance: InstanceInfo, response: Answer) -> web.StreamResponse:
        chunk = await self._upstream.first_chunk(instance, response)
        is_good = response.status == 200
        if is_good:
            self._computed(instance)
        self.begin()
        is_recorded = is_good and self._call.is_recorded(instance)
        record = self._record = self._new_record() if is_recorded else None
        response.is_movable = is_recorded
        answer = await self._outlet.begin(response.status, response.headers["content-type"])
        read, write = response.read_some, answer.write
        try:
            while chunk:
                events = chunk if record is None else record.feed(chunk)
                if events:
                    self._entry.generated += events.count(b"\n\n")
                    await write(events)
                if record is not None and record.trouble:
                    await self._judge(instance, record, answer)
                chunk = await read()
        except WireError as error:
            raise LegFailed(instance.id, f"connection lost: {error}") from error
        return await self._finish(instance, record, answer)

    async def _pass_behind(
        self, instance: InstanceInfo, response: Answer, splice: Splice
    ) -> web.StreamResponse:
        record = self._record
        assert record is not None  # or nobody would know what was shown
        response.is_movable = True
        record.begin_leg()
        answer = await self._outlet.begin()
        chunk = await self._upstream.first_chunk(instance, response)
        has_begun = False
        try:
            while True:
                events = record.feed(splice.feed(chunk) if chunk else splice.finish())
                if events:
                    if not has_begun:
                        has_begun = True
                        self.begin()
                        self._note_resumed()
                    self._entry.generated += events.count(b"\n\n")
                    await answer.write(events)
                if record.trouble:
                    await self._judge(instance, record, answer)
                if not chunk:
                    return await self._finish(instance, record, answer)
                chunk = await response.read_some()
        except WireError as error:
            raise LegFailed(instance.id, f"connection lost: {error}") from error

    async def _finish(
        self, instance: InstanceInfo, record: Record | None, answer: web.StreamResponse
    ) -> web.StreamResponse:
        if record is not None and not record.is_whole:
            raise LegFailed(instance.id, "its stream ended too early")
        await answer.write_eof()
        return answer

    async def _judge(
        self, instance: InstanceInfo, record: Record, answer: web.StreamResponse
    ) -> None:
        """An error in the stream: the request's, or that of an engine that died."""
        if record.is_given_up:
            raise LegFailed(instance.id, "gave the request up")
        if not await self._upstream.is_alive(instance):
            raise LegFailed(instance.id, "its engine died")
        trouble, record.trouble = record.trouble, b""
        record.is_whole = True
        await answer.write(trouble)

    def _note_resumed(self) -> None:
        broken, self._break = self._break, None
        if broken is not None:
            gap_s = time.monotonic() - broken.at_s
            _log.info("request %s goes on after %.3f s", self._entry.id, gap_s)
            self._hooks.faults.resumed(gap_s)

    def _new_record(self) -> Record:
        return Record(is_chat=self._call.path == CHAT, hides_ids=not self._call.shows_ids)
