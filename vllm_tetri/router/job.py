"""The life of one request: legs, retries, and cancelling what nobody waits for.

This is the only place that retries, because only it knows whether the client
still waits and what it has seen.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress
from dataclasses import replace
from functools import partial

from aiohttp import web

from vllm_tetri.handover import DecodeLeg, PrefillLeg, prefix_of
from vllm_tetri.policy.lifecycle import Event, Phase
from vllm_tetri.policy.route import Full, Route, Split
from vllm_tetri.router.answers import LegBusy, LegFailed, NoRoom, Refusal
from vllm_tetri.router.call import CHAT, Call
from vllm_tetri.router.early import EarlyLeg
from vllm_tetri.router.first_token import FirstToken, read_first_token
from vllm_tetri.router.hooks import Hooks
from vllm_tetri.router.legs import Legs
from vllm_tetri.router.record import Unprovable
from vllm_tetri.router.resume import goes_on_for_sure, is_parsed, may_go_on, resume_body
from vllm_tetri.router.table import Entry
from vllm_tetri.router.tries import Tries
from vllm_tetri.router.upstream import Upstream
from vllm_tetri.types import InstanceId, InstanceInfo, TransferId

NO_TRANSFER = TransferId("")
# How often a stream that broke looks for an instance that can go on.
_LOOK_AGAIN_S = 0.25

_log = logging.getLogger(__name__)


class Job:
    """One request on its way. Used once, by one task."""

    def __init__(
        self, *, call: Call, entry: Entry, request: web.Request, upstream: Upstream, hooks: Hooks
    ) -> None:
        self._call = call
        self._entry = entry
        self._hooks = hooks
        self._legs = Legs(call=call, entry=entry, request=request, upstream=upstream, hooks=hooks)
        self._prefill = InstanceId("")
        self._early: EarlyLeg | None = None
        self._tries = Tries(call, entry, hooks)
        self._full: set[InstanceId] = set()
        self._split_first: FirstToken | None = None
        self._writer: InstanceInfo | None = None  # of what the client gets
        self.route_kind = "none"

    async def run(self) -> web.StreamResponse:
        """Serve the request.

        Raises:
            Refusal: Nobody could; no byte has gone to the client.
        """
        try:
            return await self._serve()
        except Refusal as refusal:
            if not self._legs.outlet.has_begun:
                raise
            _log.warning("request %s: %s", self._entry.id, refusal)
            self._entry.on(Event.FAIL)
            return await self._legs.outlet.break_off(refusal)
        finally:
            self._drop_transfer()

    async def _serve(self) -> web.StreamResponse:
        is_splittable = self._call.is_splittable
        try:
            while True:
                try:
                    answer = await self._attempt(is_splittable)
                except LegBusy as busy:
                    self._legs.note_busy(busy)
                    self._full.add(busy.instance)
                except LegFailed as error:
                    await self._note(error)
                else:
                    if answer is not None:
                        return answer
                    is_splittable = False
                is_splittable = is_splittable and self._entry.phase is Phase.PREFILLING
                self._drop_transfer()
        except _NobodyLeft:
            raise self._tries.refusal(has_shown=self._legs.relay.has_shown) from None

    async def _note(self, error: LegFailed) -> None:
        """An instance failed; raises `Refusal` when that is enough."""
        relay, asked = self._legs.relay, self._legs.asked.get(error.instance)
        if relay.has_shown:
            relay.note_break(error)
        await self._tries.note(error, asked, has_shown=relay.has_shown)

    async def _attempt(self, is_splittable: bool) -> web.StreamResponse | None:
        if self._legs.relay.has_shown:
            return await self._resume()
        route, instance = self._route(is_splittable)
        self._entry.reason = route.reason
        if isinstance(route, Split):
            self.route_kind = "split"
            return await self._split(instance, anywhere=route.anywhere)
        is_first = self.route_kind in ("none", "whole") and not self._tries.num_failures
        self.route_kind = "whole" if is_first else "fallback"
        self._entry.prefill = instance.id
        return await self._whole(instance, self._call.whole_body(instance))

    def _route(
        self, is_splittable: bool, excluded: frozenset[InstanceId] | None = None
    ) -> tuple[Route, InstanceInfo]:
        excluded = self._tries.excluded if excluded is None else excluded
        gone: set[InstanceId] = set()  # what chose may not have heard of it yet
        while True:
            is_new = self.route_kind == "none"
            route = self._hooks.route(
                self._call, is_splittable, excluded | gone, frozenset(self._full), is_new
            )
            if isinstance(route, Full):
                raise self._hooks.no_room(route)
            if route is None:
                raise _NobodyLeft
            instance = self._hooks.info(_target(route))
            if instance is not None and self._fits(instance):
                return route, instance
            gone.add(_target(route))

    def _fits(self, instance: InstanceInfo) -> bool:
        if not self._legs.relay.has_shown:
            return True
        anywhere = self._hooks.resumes_anywhere
        return may_go_on(self._call, instance, self._writer, anywhere=anywhere)

    async def _resume(self) -> web.StreamResponse:
        """The client has got something: another instance goes on behind it."""
        relay = self._legs.relay
        try:
            shown = relay.shown()
        except Unprovable as error:
            raise relay.broke_off(str(error)) from error
        if shown.is_over:
            return await relay.end()
        self._hooks.fell_back("decode_failed")
        instance = await self._wait_for_place()
        self.route_kind = "fallback"
        body = resume_body(self._call, shown, self._split_first, relay.prompt_token_ids, instance)
        return await self._whole(instance, body)

    async def _wait_for_place(self) -> InstanceInfo:
        """The client waits already, so this waits for an instance, too: for another one, and
        where there is none for the same, if it is back."""
        while True:
            for excluded in (self._tries.excluded, self._tries.just_excluded):
                with suppress(_NobodyLeft, NoRoom):
                    return self._route(False, excluded)[1]
            if self._tries.are_over:
                raise _NobodyLeft
            await asyncio.sleep(_LOOK_AGAIN_S)
            self._full.clear()

    async def _whole(self, instance: InstanceInfo, body: bytes) -> web.StreamResponse:
        self._entry.on(Event.WHOLE_SENT)
        self._entry.decode = instance.id
        self._writer = instance
        self._legs.submit(instance)
        return await self._legs.answer(instance, self._legs.post(instance, body))

    async def _split(self, instance: InstanceInfo, *, anywhere: bool) -> web.StreamResponse | None:
        entry = self._entry
        self._prefill = instance.id
        entry.transfer = TransferId(prefix_of(entry.router) + uuid.uuid4().hex)
        entry.dispatched.clear()
        entry.on(Event.PREFILL_SENT)
        entry.prefill, entry.decode = instance.id, ""
        self._legs.submit(instance)
        self._early = early = EarlyLeg(self._call, self._hooks.info, self._legs.post)
        entry.on_opening = early.open
        leg = PrefillLeg(entry.transfer, entry.id, anywhere=anywhere)
        try:
            status, kind, body = await self._legs.prefill(instance, self._call.prefill_body(leg))
        except LegBusy:
            entry.transfer = None  # nobody heard of it
            raise
        finally:
            entry.on_opening = None
        if status != 200 and self._call.is_streamed:
            # What vLLM's engine refuses is an event of a stream that began with 200:
            # the same instance says it as it says it to its own clients.
            self._drop_transfer()
            return await self._whole(instance, self._call.whole_body(instance))
        if status != 200:
            return self._legs.plain(status, kind, body)
        first = read_first_token(body, entry.transfer, is_chat=self._call.path == CHAT)
        if first is None:
            self._again("no_transfer")
            return None
        first = replace(first, prefilled=early.with_prompt(first.prefilled))
        self._split_first = first
        entry.prompt_tokens = first.prefilled.num_tokens
        self._legs.computed(instance.id, first.prefilled.num_tokens)
        if first.is_last:
            return await self._finish(first, instance)
        if first.prefilled.decode:
            return await self._decode(first)
        _log.info("request %s: %s", entry.id, first.prefilled.reason)
        self._drop_transfer()
        if self._call.has_choices or first.prefilled.given is None:
            self._again("no_decode_instance")
            return None
        self._hooks.fell_back("no_decode_instance")
        return await self._go_on(first)

    def _again(self, reason: str) -> None:
        """One instance is to compute everything anew; the client has seen nothing."""
        _log.info("request %s: computed again by one instance: %s", self._entry.id, reason)
        self._hooks.fell_back(reason)
        self._drop_transfer()

    async def _finish(self, first: FirstToken, instance: InstanceInfo) -> web.StreamResponse | None:
        """The first token is the last, so leg 1 answered everything."""
        if self._call.has_choices:
            self._again("choices_that_end_at_once")
            return None
        is_text = self._call.is_text and first.text is not None
        if self._call.is_streamed and (not is_text or is_parsed(self._call, instance)):
            self._again("structured_and_ends_at_once")
            return None
        if first.prefilled.is_final and first.prefilled.num_chunks <= 1:
            self._entry.transfer = None  # it was never opened
        self._drop_transfer()
        self._entry.decode = instance.id
        self._hooks.first_token("last")
        if self._call.is_streamed:
            events = first.whole_stream(
                wants_usage=self._call.wants_usage, counts_each=self._call.wants_usage_each
            )
            return await self._legs.stream(events)
        self._legs.relay.begin()
        return self._legs.plain(200, "application/json", first.whole())

    async def _decode(self, first: FirstToken) -> web.StreamResponse:
        """Leg 2, where the KV is."""
        entry, prefilled = self._entry, first.prefilled
        entry.on(Event.PREFILLED)
        entry.decode = prefilled.decode
        entry.dispatched.add(prefilled.decode)
        instance = self._hooks.info(prefilled.decode)
        if instance is None:
            raise LegFailed(prefilled.decode, "holds the KV but is not in use", status=503)
        given = None if self._call.has_choices else prefilled.given
        leg = DecodeLeg(prefilled.transfer, prefilled.digest, given, prefilled.predicted)
        body = partial(self._call.decode_body, leg, prefilled.prompt_token_ids, instance)
        self._writer = instance
        self._show(first, instance)
        opened = self._early.take(prefilled) if self._early is not None else None
        answer = await self._legs.answer_when_free(instance, body, opened)
        if answer.status == 200 and not entry.is_over:
            entry.transfer = None  # the decode instance consumed it
        return answer

    async def _go_on(self, first: FirstToken) -> web.StreamResponse:
        """Leg 2 without KV: an instance computes the prompt and goes on behind the token."""
        _, instance = self._route(False)
        self.route_kind = "fallback"
        prefilled = first.prefilled
        leg = DecodeLeg(NO_TRANSFER, prefilled.digest, prefilled.given, prefilled.predicted)
        self._show(first, instance)
        body = self._call.decode_body(leg, prefilled.prompt_token_ids, instance)
        return await self._whole(instance, body)

    def _show(self, first: FirstToken, instance: InstanceInfo) -> None:
        """Let the client have the token now if `instance` surely goes on behind it."""
        call, given = self._call, first.prefilled.given
        if call.has_choices or given is None:
            return
        if first.is_whole_text and goes_on_for_sure(call, given, instance):
            self._hooks.first_token("early")
            self._legs.relay.show(first)
        else:
            self._hooks.first_token("with_second")

    def _drop_transfer(self) -> None:
        entry = self._entry
        if self._early is not None:
            self._early.close()
            self._early = None
        if entry.transfer is not None:
            self._hooks.cancel(entry.transfer, self._prefill, frozenset(entry.dispatched))
            entry.transfer = None


class _NobodyLeft(Exception):
    """No instance is in use that has not failed this request already."""


def _target(route: Route) -> InstanceId:
    return route.prefill if isinstance(route, Split) else route.instance
