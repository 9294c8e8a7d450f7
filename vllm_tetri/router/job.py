"""The life of one request: legs, retries, and cancelling what nobody waits for.

This is the only place that retries, because only it knows whether the client
still waits and whether it has seen a byte.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import msgspec
from aiohttp import web

from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import FIELD, DecodeLeg, Prefilled, PrefillLeg, attempt_names, from_params
from vllm_tetri.policy.lifecycle import Event, Phase
from vllm_tetri.policy.route import Full, Route, Split
from vllm_tetri.router.answers import LegBusy, LegFailed, NoRoom, Refusal, mark_too_long
from vllm_tetri.router.call import Call
from vllm_tetri.router.table import Entry
from vllm_tetri.router.upstream import Upstream
from vllm_tetri.types import InstanceId, InstanceInfo, TransferId

MAX_RETRIES = 2  # after failures; busy instances are asked until none is left
# How long a full decode instance is asked again. Its arena holds the KV meanwhile
# (--tetri-hold-timeout).
DECODE_PATIENCE_S = 10.0
_FIRST_WAIT_S = 0.02
_LONGEST_WAIT_S = 0.5
_EVENT_STREAM = "text/event-stream"

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
    """

    route: Callable[[Call, bool, frozenset[InstanceId], frozenset[InstanceId]], Route | Full | None]
    info: Callable[[InstanceId], InstanceInfo | None]
    submitted: Callable[[InstanceId, int], None]
    prefilled: Callable[[InstanceId, int, float], None]
    busy: Callable[[InstanceId], None]
    no_room: Callable[[Full], NoRoom]
    cancel: Callable[[TransferId, InstanceId, frozenset[InstanceId]], None]


class Job:
    """One request on its way. Used once, by one task."""

    def __init__(
        self, *, call: Call, entry: Entry, request: web.Request, upstream: Upstream, hooks: Hooks
    ) -> None:
        self._call = call
        self._entry = entry
        self._request = request
        self._upstream = upstream
        self._hooks = hooks
        self._prefill = InstanceId("")
        self._excluded: set[InstanceId] = set()
        self._full: set[InstanceId] = set()
        self._sent_s = 0.0
        self._headers = {
            **call.headers,
            "Content-Type": "application/json",
            "X-Request-Id": entry.id,
        }
        self.route_kind = "none"

    async def run(self) -> web.StreamResponse:
        """Serve the request.

        Raises:
            Refusal: Nobody could; no byte has gone to the client.
        """
        is_splittable = self._call.is_splittable
        failure: LegFailed | None = None
        try:
            while len(self._excluded) <= MAX_RETRIES:
                try:
                    answer = await self._attempt(is_splittable)
                except LegBusy as busy:
                    self._note_busy(busy)
                    self._full.add(busy.instance)
                except LegFailed as error:
                    _log.warning("request %s: %s", self._entry.id, error)
                    failure = error
                    self._excluded.add(error.instance)
                    if error.is_final:
                        break
                else:
                    if answer is not None:
                        return answer
                    is_splittable = False
                is_splittable = is_splittable and self._entry.phase is Phase.PREFILLING
                self._drop_transfer()
        except _NobodyLeft:
            pass
        finally:
            self._drop_transfer()
        if failure is None:
            raise Refusal(503, "no instance can serve this request now; try again")
        raise Refusal(failure.status, f"{failure} (tried {len(self._excluded)})")

    async def _attempt(self, is_splittable: bool) -> web.StreamResponse | None:
        route = self._hooks.route(
            self._call, is_splittable, frozenset(self._excluded), frozenset(self._full)
        )
        if isinstance(route, Full):
            raise self._hooks.no_room(route)
        instance = None if route is None else self._hooks.info(_target(route))
        if route is None or instance is None:
            raise _NobodyLeft
        if isinstance(route, Split):
            self.route_kind = "split"
            return await self._split(instance)
        is_first = self.route_kind in ("none", "whole") and not self._excluded
        self.route_kind = "whole" if is_first else "fallback"
        return await self._whole(instance)

    async def _whole(self, instance: InstanceInfo) -> web.StreamResponse:
        self._entry.on(Event.WHOLE_SENT)
        self._entry.prefill = self._entry.decode = instance.id
        self._submitted(instance)
        return await self._answer(instance, self._call.raw)

    async def _split(self, instance: InstanceInfo) -> web.StreamResponse | None:
        entry = self._entry
        self._prefill = instance.id
        entry.transfer = TransferId(uuid.uuid4().hex)
        entry.dispatched.clear()
        entry.on(Event.PREFILL_SENT)
        entry.prefill, entry.decode = instance.id, ""
        self._submitted(instance)
        leg = PrefillLeg(entry.transfer, entry.id)
        try:
            response = await self._post(instance, self._call.prefill_body(leg))
        except LegBusy:
            entry.transfer = None  # nobody heard of it
            raise
        try:
            body = await self._upstream.body(instance, response)
        finally:
            response.close()
        if response.status != 200:
            return self._plain(response.status, response.content_type, body)
        prefilled = _read_prefilled(body, entry.transfer)
        if prefilled is None or not prefilled.decode:
            why = prefilled.reason if prefilled else "the prefill answer names no transfer"
            _log.info("request %s: computed again by one instance: %s", entry.id, why)
            self._drop_transfer()
            return None
        return await self._decode(prefilled)

    async def _decode(self, prefilled: Prefilled) -> web.StreamResponse:
        entry = self._entry
        entry.on(Event.PREFILLED)
        entry.decode = prefilled.decode
        entry.dispatched.add(prefilled.decode)
        entry.prompt_tokens = prefilled.num_tokens
        self._hooks.prefilled(self._prefill, prefilled.num_tokens, self._sent_s)
        instance = self._hooks.info(prefilled.decode)
        if instance is None:
            raise LegFailed(prefilled.decode, "holds the KV but is not in use", status=503)
        leg = DecodeLeg(prefilled.transfer, prefilled.digest)
        answer = await self._answer_when_free(instance, self._call.decode_body(leg))
        if answer.status == 200 and not entry.is_over:
            entry.transfer = None  # the decode instance consumed it
        return answer

    async def _post(self, instance: InstanceInfo, body: bytes) -> aiohttp.ClientResponse:
        return await self._upstream.post(instance, self._call.path, body, self._headers)

    async def _answer_when_free(self, instance: InstanceInfo, body: bytes) -> web.StreamResponse:
        """Leg 2. An instance that is full still holds the KV, so it is asked again."""
        wait_s = _FIRST_WAIT_S
        give_up_s = time.monotonic() + DECODE_PATIENCE_S
        while True:
            try:
                return await self._answer(instance, body)
            except LegBusy as busy:
                if time.monotonic() + wait_s > give_up_s:
                    raise
                self._note_busy(busy)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _answer(self, instance: InstanceInfo, body: bytes) -> web.StreamResponse:
        response = await self._post(instance, body)
        try:
            if response.content_type == _EVENT_STREAM:
                return await self._relay(instance, response)
            answer = await self._upstream.body(instance, response)
            self._begin()
            return self._plain(response.status, response.content_type, answer)
        finally:
            response.close()  # goes back to the pool if it was read to its end

    async def _relay(
        self, instance: InstanceInfo, response: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        entry = self._entry
        chunk = await self._upstream.first_chunk(instance, response)
        if entry.phase is Phase.SERVING and response.status == 200:
            self._hooks.prefilled(instance.id, self._call.approx_tokens, self._sent_s)
        self._begin()
        answer = web.StreamResponse(status=response.status, headers=self._answer_headers())
        answer.headers["Content-Type"] = response.headers["Content-Type"]
        answer.headers["Cache-Control"] = "no-cache"
        await answer.prepare(self._request)
        read, write = response.content.readany, answer.write
        while chunk:
            entry.generated += chunk.count(b"\n\n")
            await write(chunk)
            try:
                chunk = await read()
            except aiohttp.ClientError as error:
                _log.warning("request %s: %s broke off: %r", entry.id, instance.id, error)
                text = f"instance {instance.id} broke off in the middle of the answer"
                await write(Refusal(502, text).event())
                entry.on(Event.FAIL)
                answer.force_close()
                break
        await answer.write_eof()
        return answer

    def _submitted(self, instance: InstanceInfo) -> None:
        # It also counts when the instance turns out to be full: until its next report
        # others then look less loaded.
        self._sent_s = time.monotonic()
        self._hooks.submitted(instance.id, self._call.approx_tokens)

    def _note_busy(self, busy: LegBusy) -> None:
        _log.debug("request %s: %s", self._entry.id, busy)
        self._hooks.busy(busy.instance)

    def _begin(self) -> None:
        self._entry.on(Event.ANSWERING)
        self._entry.first_byte_s = time.monotonic()

    def _plain(self, status: int, content_type: str, body: bytes) -> web.Response:
        status, body = mark_too_long(status, body)
        return web.Response(
            body=body, status=status, content_type=content_type, headers=self._answer_headers()
        )

    def _answer_headers(self) -> dict[str, str]:
        return {
            "x-request-id": self._entry.id,
            "x-tetri-prefill": self._entry.prefill,
            "x-tetri-decode": self._entry.decode,
        }

    def _drop_transfer(self) -> None:
        entry = self._entry
        if entry.transfer is not None:
            self._hooks.cancel(entry.transfer, self._prefill, frozenset(entry.dispatched))
            entry.transfer = None


class _NobodyLeft(Exception):
    """No instance is in use that has not failed this request already."""


def _target(route: Route) -> InstanceId:
    return route.prefill if isinstance(route, Split) else route.instance


def _read_prefilled(body: bytes, transfer: TransferId) -> Prefilled | None:
    try:
        answer = msgspec.json.decode(body)
        leg = from_params(answer.get(FIELD)) if isinstance(answer, dict) else None
    except (msgspec.DecodeError, ProtocolError, TypeError) as error:
        _log.warning("a prefill answer cannot be read: %s", error)
        return None
    if isinstance(leg, Prefilled) and leg.transfer in attempt_names(transfer):
        return leg
    return None
