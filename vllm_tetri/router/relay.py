"""The road of a request: place, prefill, decode (sent early), stream, resume.

Only this module retries: it knows whether the client waits, and what it has received.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from vllm_tetri.handover import USAGE_HEADER, DecodeParams, Fetch
from vllm_tetri.messages import Dispatched
from vllm_tetri.policy.route import Event, Phase, Route
from vllm_tetri.router.errors import InstanceAtLimit, InstanceFailed, NoCapacity, Refusal
from vllm_tetri.router.fetching import Fetching
from vllm_tetri.router.first_token import FirstToken, read_first_token
from vllm_tetri.router.incoming import ClientRequest
from vllm_tetri.router.moves import Mover
from vllm_tetri.router.replies import Reply
from vllm_tetri.router.request import CHAT, ApiRequest
from vllm_tetri.router.response import HttpResponse, close_result
from vllm_tetri.router.resume import may_resume, resume_body, surely_continues
from vllm_tetri.router.retry import Attempts, Scheduler
from vllm_tetri.router.stream import NotStored, Output
from vllm_tetri.router.table import Entry
from vllm_tetri.types import InstanceId, InstanceInfo, TransferId

# How long a decode instance at its limit is asked again. Its arena holds the KV meanwhile
# (--tetri-hold-timeout).
DECODE_PATIENCE_S = 10.0
_FIRST_WAIT_S = 0.02
_LONGEST_WAIT_S = 0.5
_PLACE_AGAIN_S = 0.25  # between attempts to find an instance that can resume a stream

_log = logging.getLogger(__name__)


class Relay:
    """Serves one request. Used once, by one task. `route` says how the request was served, for
    metrics: none, split, whole, fallback, passed."""

    __deletable__ = ("_mover",)  # for mypyc

    def __init__(
        self, request: ApiRequest, entry: Entry, http: ClientRequest, scheduler: Scheduler
    ) -> None:
        self._request, self._entry = request, entry
        self._scheduler, self._metrics = scheduler, scheduler.metrics
        self._headers = {**request.headers, "x-request-id": entry.id}
        self.output = Output(request, entry, http, scheduler)
        self._attempts = Attempts(request, entry, scheduler)
        self._at_limit: set[InstanceId] = set()
        self._not_stored: set[InstanceId] = set()  # where what it asks for is not
        self._early: asyncio.Task[HttpResponse | None] | None = None
        self._fetching: Fetching | None = None
        self._first: FirstToken | None = None  # from prefill
        self._mover = Mover(request, entry, self.output, scheduler, self._send)
        self._writer: InstanceInfo | None = None  # of what the client receives
        self.route = "none" if request.rules is None else "passed"

    async def serve(self) -> Reply:
        """Serve the request; raises `Refusal` if no instance could and the client has no byte."""
        self._mover.begin()
        try:
            return await self._try_until_served()
        except Refusal as refusal:
            if not self.output.has_begun:
                # What one instance has not stored, one that is full may have.
                is_full = self._not_stored and isinstance(refusal, NoCapacity)
                if self.output.fallback is None or is_full:
                    raise
                return self.output.fallback
            _log.warning("request %s: %s", self._entry.id, refusal)
            self._entry.on(Event.FAIL)
            return self.output.break_off(refusal)
        finally:
            self._mover.close()
            del self._mover  # it holds `self._send`: only the garbage collector would free the two
            self._drop_transfer()

    async def _try_until_served(self) -> Reply:
        may_split = self._request.is_splittable
        while True:
            try:
                return await self._attempt(may_split)
            except asyncio.CancelledError:
                if not self._mover.was_interrupted():
                    raise
            except InstanceAtLimit as error:
                self._scheduler.record_at_limit(error.instance)
                self._at_limit.add(error.instance)
                if self._entry.has_output:
                    self._attempts.begin()
            except InstanceFailed as error:
                if await self._mover.rescue():
                    continue
                await self._refuse_bad_media(error)
                self.output.record_break(error)
                await self._attempts.record_failure(error)
            except _Recompute as error:
                _log.info("request %s: one instance computes it again: %s", self._entry.id, error)
                self._metrics.fallbacks.labels(str(error)).inc()
                may_split = False
            except _NoInstance:
                raise self._attempts.refusal() from None
            except NotStored as error:
                self._not_stored.add(error.instance)
            may_split = may_split and self._entry.phase is Phase.PREFILLING
            self._drop_transfer()

    async def _refuse_bad_media(self, error: InstanceFailed) -> None:
        """Raise vLLM's own error if media cannot be had: it says so with status 500. An instance
        that reads them after another one could has failed itself."""
        instance = self._scheduler.info(error.instance)
        if self._first is not None or instance is None:
            return
        has_said_so = self._request.has_media and bool(error.internal)
        if has_said_so and await self._scheduler.upstream.is_alive(instance):
            raise Refusal(500, error.internal) from error

    async def _attempt(self, may_split: bool) -> Reply:
        self.output.is_unproved = False
        if (successor := self._mover.take()) is not None:
            self._writer, response = successor
            return await self.output.receive(self._writer, response)
        if self._entry.has_output:
            return await self._resume()
        route, instance = self._place(may_split, self._attempts.excluded())
        if route.is_split:
            self.route = "split"
            return await self._prefill(instance, route)
        if self._request.rules is None:
            is_first = self.route in ("none", "whole") and not self._attempts.num_failures
            self.route = "whole" if is_first else "fallback"
        return await self._aggregated(instance, route.reason)

    def _place(
        self, may_split: bool, excluded: frozenset[InstanceId]
    ) -> tuple[Route, InstanceInfo]:
        is_fresh, anywhere = not self._entry.has_output, self._scheduler.resumes_anywhere
        gone: set[InstanceId] = set()  # the snapshot may be older than what `info` knows
        while True:
            route = self._scheduler.placer.place(
                self._request,
                may_split=may_split,
                excluded=excluded | gone | self._not_stored,
                at_limit=frozenset(self._at_limit),
                is_new=self._entry.phase is Phase.ARRIVED,
            )
            if route is None:
                raise _NoInstance
            instance = self._scheduler.info(route.prefill)
            if instance is not None and (
                is_fresh or may_resume(self._request, instance, self._writer, anywhere=anywhere)
            ):
                self._scheduler.record_sent(self._entry, self._request, route, instance)
                return route, instance
            gone.add(route.prefill)

    # Prefill.
    async def _prefill(self, instance: InstanceInfo, route: Route) -> Reply:
        request, entry = self._request, self._entry
        transfer, last_chunk = entry.send_prefill(instance.id, route.reason)
        if request.may_decode_early:
            self._early = asyncio.create_task(self._decode_early(last_chunk))
        fetch, placer = self._begin_fetch(instance), self._scheduler.placer
        params = placer.prefill_params(transfer, entry.id, route, request, fetch)
        try:
            response = await self._send(instance, request.prefill_body(params))
        except InstanceAtLimit:
            entry.take_transfer()  # no instance knows it
            raise
        body = await self._scheduler.upstream.body(instance, response)
        if 400 <= response.status < 500:
            entry.take_transfer()  # vLLM refused the request: no instance knows it
        if response.status != 200 and request.is_streamed:
            # vLLM reports an error of the engine as an event of a stream of status 200: the
            # same instance sends it as it does to its own clients.
            self._drop_transfer()
            return await self._aggregated(instance, route.reason)
        if response.status != 200:
            return self.output.respond(response, body)
        first = read_first_token(body, transfer, is_chat=request.path == CHAT)
        if first is None:
            raise _Recompute("no_transfer")
        last = last_chunk.result() if last_chunk.done() else None
        self._first = first = first.with_prompt(last.ending if last else None)
        prefilled = first.prefilled
        entry.prompt_tokens, entry.last_chunk = prefilled.num_tokens, None
        if first.is_last:
            return await self._end_at_prefill(first, instance, response)
        if prefilled.decode:
            return await self._decode(first, last)
        _log.info("request %s: no hand-over: %s", entry.id, prefilled.reason)
        if request.has_choices or prefilled.prior_output is None:
            raise _Recompute("no_decode_instance")
        self._metrics.fallbacks.labels("no_decode_instance").inc()
        self._drop_transfer()
        return await self._continue_there(first, instance)

    async def _end_at_prefill(
        self, first: FirstToken, instance: InstanceInfo, response: HttpResponse
    ) -> Reply:
        """The first token is the last, so the prefill response is the output."""
        request = self._request
        if request.has_choices:
            raise _Recompute("choices_that_end_at_once")
        is_text = request.is_text and first.text is not None
        if request.is_streamed and (not is_text or request.is_parsed_by(instance)):
            raise _Recompute("structured_and_ends_at_once")
        if not (self._entry.dispatched or first.prefilled.decode):
            self._entry.take_transfer()  # it was never opened
        self._drop_transfer()
        self._entry.decode = self._entry.prefill
        self._metrics.first_tokens["last"].inc()
        self._entry.begin_output()
        if request.is_streamed:
            self._entry.record_events(1)
            events = first.complete_stream(
                wants_usage=request.wants_usage, counts_each=request.wants_usage_each
            )
            return self.output.finish(events)
        return self.output.respond(response, first.complete_response())

    # Decode, which is sent early: HTTP, parsing and the way into the decode engine take
    # milliseconds that the last chunk of the prompt hides.
    async def _decode_early(self, last_chunk: asyncio.Future[Dispatched]) -> HttpResponse | None:
        message = await last_chunk
        ending, instance = message.ending, self._scheduler.info(message.decode)
        if ending is None or instance is None:
            return None
        params = DecodeParams(
            ending.transfer,
            ending.digest,
            predicted=message.predicted,
            is_early=True,
            cached_tokens=ending.cached_tokens,
            held_tokens=ending.held_tokens,
            prefill=self._entry.prefill,
        )
        body = self._request.decode_body(params, ending.prompt_token_ids, instance)
        return await self._send(instance, body)

    async def _decode(self, first: FirstToken, last: Dispatched | None) -> Reply:
        """Send the decode request to where the KV is, unless it was sent early."""
        entry, prefilled = self._entry, first.prefilled
        entry.hand_over(prefilled.decode)
        instance = self._scheduler.info(prefilled.decode)
        if instance is None:
            why = "has the KV but is not in use"
            raise InstanceFailed(prefilled.decode, why, status=503, is_suspect=False)
        prior = None if self._request.has_choices else prefilled.prior_output
        params = DecodeParams(
            prefilled.transfer,
            prefilled.digest,
            prior,
            prefilled.predicted,
            cached_tokens=prefilled.cached_tokens,
            held_tokens=prefilled.held_tokens,
            prefill=entry.prefill,
        )
        self._writer = instance
        self._show_first(first, instance)
        sent_early = (last.ending.transfer, last.decode) if last and last.ending else None
        if sent_early != (prefilled.transfer, prefilled.decode):
            self._drop_early()

        wait_s, give_up_s = _FIRST_WAIT_S, time.monotonic() + DECODE_PATIENCE_S
        while True:
            try:
                sending = self._send_decode(params, prefilled.prompt_token_ids, instance)
                return await self.output.receive(instance, sending)
            except InstanceAtLimit as error:  # it has the KV nevertheless, so it is asked again
                if time.monotonic() + wait_s > give_up_s:
                    raise
                self._scheduler.record_at_limit(error.instance)
            self._drop_early()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _send_decode(
        self, params: DecodeParams, prompt_token_ids: list[int], instance: InstanceInfo
    ) -> HttpResponse:
        response = await self._early if self._early is not None else None
        self._early = None  # not before: if this is cancelled, its response has an owner
        self.output.is_unproved = response is not None  # it was opened without the first token
        if response is not None:
            return response
        body = self._request.decode_body(params, prompt_token_ids, instance)
        return await self._send(instance, body)

    def _show_first(self, first: FirstToken, instance: InstanceInfo) -> None:
        request, prior = self._request, first.prefilled.prior_output
        if request.has_choices or prior is None:
            return
        is_early = first.text is not None and surely_continues(request, prior, instance)
        self._metrics.first_tokens["early" if is_early else "with_second"].inc()
        if is_early:
            self.output.show(first)

    # Resume.
    async def _resume(self) -> Reply:
        """Another instance continues what the client has received."""
        received = self.output.received()
        if received.is_over:
            return self.output.end()
        if self._first is None and self._request.has_links:
            raise Refusal(502, "the stream broke off; its media may be others when read again")
        self._metrics.fallbacks.labels("decode_failed").inc()
        instance = await self._wait_for_instance()
        self.route = "fallback"
        body = resume_body(self._request, received, self._first, instance)
        return await self._aggregated(instance, None, body)

    async def _wait_for_instance(self) -> InstanceInfo:
        """Wait for an instance that can continue: another one, else the same if it is back."""
        while True:
            for excluded in self._attempts.for_resuming():
                with suppress(_NoInstance, NoCapacity):
                    return self._place(False, excluded)[1]
            if self._attempts.are_over:
                raise _NoInstance
            await asyncio.sleep(_PLACE_AGAIN_S)
            self._at_limit.clear()

    async def _continue_there(self, first: FirstToken, instance: InstanceInfo) -> Reply:
        """Without a hand-over the prefill instance continues: its prefix cache has the prompt."""
        self.route = "fallback"
        prefilled, prior = first.prefilled, first.prefilled.prior_output
        params = DecodeParams(
            TransferId(""), prefilled.digest, prior, prefilled.predicted,
            cached_tokens=prefilled.cached_tokens,
        )  # fmt: skip
        self._show_first(first, instance)
        body = self._request.decode_body(params, prefilled.prompt_token_ids, instance)
        return await self._aggregated(instance, None, body)

    async def _aggregated(
        self, instance: InstanceInfo, reason: str | None, body: bytes | None = None
    ) -> Reply:
        """Send the request to one instance, which does both phases; without a reason if it
        continues an output, without a body the client's."""
        self._entry.send_aggregated(instance.id, reason)
        self._writer = instance
        if body is None:
            body = self._request.aggregated_body(instance, self._begin_fetch(instance))
        return await self.output.receive(instance, self._send(instance, body))

    def _begin_fetch(self, instance: InstanceInfo) -> Fetch | None:
        if not self._request.may_fetch:
            return None
        self._fetching = self._scheduler.fetches.begin(self._entry, instance, self._request)
        return self._fetching.fetch if self._fetching is not None else None

    async def _send(self, instance: InstanceInfo, body: bytes) -> HttpResponse:
        self._attempts.sent_to[instance.id] = instance
        send, request = self._scheduler.upstream.send, self._request
        headers, trace = self._headers, self._entry.trace
        if trace is not None:
            headers = trace.headers_to(instance.id, headers)
        response = await send(instance, request, body, headers, self.output.may_migrate)
        if response.status == 404 and await self._lacks_adapter(instance):
            response.close()
            words = f"the adapter {request.model!r} is not loaded there"
            raise InstanceFailed(instance.id, words, status=404, is_suspect=False)
        if USAGE_HEADER in response.headers:
            request.wants_usage = request.wants_usage_each = True
        return response

    async def _lacks_adapter(self, instance: InstanceInfo) -> bool:
        """Whether others have the adapter that a request names, and an instance has not."""
        scheduler, model = self._scheduler, self._request.model
        if model in instance.models or model not in scheduler.placer.models():
            return False
        return not await scheduler.adapters.has(instance, model)

    def _drop_early(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            early.cancel()
            early.add_done_callback(close_result)

    def _drop_transfer(self) -> None:
        self._drop_early()
        fetching, self._fetching = self._fetching, None
        if fetching is not None:
            fetching.end()
        self._scheduler.cancel_transfer(self._entry)


class _Recompute(Exception):
    """One instance must compute the request from the start; the client has received nothing."""


class _NoInstance(Exception):
    """No instance is in use that has not failed this request already."""
