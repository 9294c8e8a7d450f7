"""The client's end of a request: responses and streams of instances become one response."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import suppress

from vllm_tetri.router._core import FlowState
from vllm_tetri.router.errors import (
    ABORTED,
    NOT_OFFERED,
    HttpError,
    InstanceAtLimit,
    InstanceFailed,
    Refusal,
    is_at_limit,
)
from vllm_tetri.router.first_token import FirstToken
from vllm_tetri.router.incoming import ClientRequest
from vllm_tetri.router.replies import Reply, Response, StreamedResponse
from vllm_tetri.router.request import CHAT, LOAD_HEADER, NOT_RETURNED, ApiRequest, headers_without
from vllm_tetri.router.response import FlowRules, HttpResponse
from vllm_tetri.router.resume import (
    ContinuationFailed,
    ContinuationMismatch,
    NotResumable,
    StreamRecord,
)
from vllm_tetri.router.retry import Scheduler
from vllm_tetri.router.table import Entry
from vllm_tetri.types import InstanceId, InstanceInfo

EVENT_STREAM = "text/event-stream"
# Statuses of proxied responses after which another instance is tried. 501 is final: the model
# cannot do it.
_SERVER_ERRORS = frozenset({500, 502, 503, 504})
# An engine says so when it ends in order, never when it crashes.
_ABORTED = "its engine aborted the request"

_READS_BEFORE_FLOW = 2  # a response that comes at once is over by then
_READS_BEFORE_NEXT = 8  # after one that could not begin
_END_S = 1.0  # that an instance has for the end of its response, after the last event

_log = logging.getLogger(__name__)


class NotStored(Exception):
    """A stored output is not at this instance; it may be at one that kept outputs before."""

    def __init__(self, instance: InstanceId) -> None:
        super().__init__("the output is not stored here")
        self.instance = instance


class Output:
    """What one client receives, from whichever instances write it. Owned by the request's task.

    `fallback` is the response to a proxied request if no other instance has a better one.
    """

    def __init__(
        self, request: ApiRequest, entry: Entry, http: ClientRequest, scheduler: Scheduler
    ) -> None:
        self._request, self._entry, self._http = request, entry, http
        self._upstream, self._placer = scheduler.upstream, scheduler.placer
        self._metrics, self._poison = scheduler.metrics, scheduler.poison
        self._response: StreamedResponse | None = None
        self._is_whole = True  # what was sent ends with a whole event
        self.is_complete = False  # the client was sent the end of its stream
        self._is_resumed = True  # the client has got something of the instance that writes now
        self._record: StreamRecord | None = None
        self._reads_before_flow = 0  # of the instance that writes now; negative: it cannot begin
        self._broken: tuple[InstanceFailed, float] | None = None  # and when that was noticed
        self._moved_s: float | None = None  # when the last event of before a move came
        # Events with the token of a prefill instance, which the client gets before the decode
        # instance responds, until they are sent.
        self._unsent = b""
        self.fallback: Response | None = None
        self.is_unproved = False  # the instance may not know the first token, which the client has

    @property
    def has_begun(self) -> bool:
        """Whether the client has a status and maybe bytes."""
        return self._response is not None

    def may_migrate(self) -> bool:
        """Whether the client has a stream that another instance may be able to continue."""
        return self._record is not None and self._record.is_plain

    @property
    def is_recorded(self) -> bool:
        """Whether it is known what the client has received."""
        record = self._record
        return record is not None and (record.is_plain or not self._request.wants_logprobs)

    def respond(self, response: HttpResponse, body: bytes) -> Response:
        """Build a response that is not streamed, with the head of an instance's."""
        load, headers = response.headers.get(LOAD_HEADER), self._headers()
        headers["content-type"] = response.content_type
        if load is not None:
            headers[LOAD_HEADER] = load
        return Response(body, response.status, headers)

    async def receive(self, instance: InstanceInfo, sending: Awaitable[HttpResponse]) -> Reply:
        """Pass on what an instance responds; `sending` sends the request to it. Raises
        `InstanceFailed`: the instance failed, or its response broke off; `InstanceAtLimit`: the
        instance is at its limit; `NotStored`: the wanted output is not stored there; `Refusal`: its
        response cannot be passed on."""
        response = await self._head_of(sending)
        is_proxied = self._request.rules is not None
        try:
            is_stream = response.content_type == EVENT_STREAM
            if is_stream and (response.status == 200 or not is_proxied):
                return await self._relay(instance, response)
            body = await self._upstream.body(instance, response)
        finally:
            response.close()  # if it was read to its end, its connection is used again
        if is_proxied:
            return self._judge_proxied(instance, response, body)
        if self.has_begun:
            words = body[:200].decode(errors="replace")
            raise InstanceFailed(instance.id, f"HTTP {response.status} {words}")
        if ABORTED in body:
            raise InstanceFailed(instance.id, _ABORTED, is_suspect=False)
        self._entry.begin_output()
        if response.status == 200:
            self._entry.take_transfer()  # it has consumed the KV, if any
        return self.respond(response, body)

    async def _head_of(self, sending: Awaitable[HttpResponse]) -> HttpResponse:
        if self._unsent:  # after the decode request, but not after its response
            asyncio.get_running_loop().call_soon(self._send_first)
        try:
            return await sending
        finally:
            self._send_first()

    def _send_first(self) -> None:
        events, self._unsent = self._unsent, b""
        if events:
            self._entry.record_events(1)
            with suppress(ConnectionResetError):  # it will be noticed
                self._begin().send(events)

    def _judge_proxied(
        self, instance: InstanceInfo, response: HttpResponse, body: bytes
    ) -> Response:
        """Pass on the response to a proxied request, unless another instance may do better."""
        request, status = self._request, response.status
        if is_at_limit(status, body):
            raise InstanceAtLimit(instance.id)
        if status == 404 and body == NOT_OFFERED:
            path = request.path.partition("?")[0]
            message = f"{request.method} {path}: no instance offers this route for its model"
            raise Refusal(404, message)
        headers = headers_without(NOT_RETURNED, response.headers) | self._headers()
        passed = Response(body, status, headers)
        if request.asks_for_stored and status == 404:
            self.fallback = passed if self.fallback is None else self.fallback
            raise NotStored(instance.id)
        if status in _SERVER_ERRORS and request.is_stored:
            self._poison.record_failure(request, instance)
        elif status in _SERVER_ERRORS:
            self.fallback = passed
            raise InstanceFailed(instance.id, f"HTTP {status}", status=status)
        self._entry.begin_output()
        return passed

    def break_off(self, refusal: Refusal) -> Reply:
        """End the stream with an error event. The connection stays open: the client's next
        request may be on its way."""
        # An error must not become a part of an event that broke off.
        return self.finish(refusal.event() if self._is_whole else b"\n\n" + refusal.event())

    def finish(self, events: bytes) -> Reply:
        """Send the last events of a stream."""
        stream = self._begin()
        stream.send(events, is_last=True)
        self.is_complete = True
        return stream

    def show(self, first: FirstToken) -> None:
        """Let the client have the first token; it is sent along with the next request."""
        created, counts_each = int(time.time()), self._request.wants_usage_each
        self._unsent = first.opening(created, counts_each=counts_each)
        self._entry.has_output = True
        self._record = self._new_record()
        self._record.begin_with(first, created)

    def num_received(self) -> int:
        """Return how many tokens the client has received."""
        assert self._record is not None
        self._keep_flowed()
        self._record.settle()
        return len(self._record.token_ids)

    def knows_tokens(self) -> bool:
        """Whether it is known of which tokens prompt and output are."""
        record = self._record
        with suppress(NotResumable):
            if record is not None and record.is_plain:
                self._keep_flowed()
                record.settle()
                return bool(record.prompt_token_ids)
        return False

    def token_ids(self) -> list[int]:
        """Return those of prompt and output as the client has it, if they are known."""
        assert self._record is not None
        return [*self._record.prompt_token_ids, *self._record.token_ids]

    def is_continued_by(self, data: bytes) -> bool:
        """Whether the first bytes of another stream begin with all that the client has received,
        and go on. Raises `ContinuationMismatch` or `ContinuationFailed` if they never will."""
        assert self._record is not None
        self._keep_flowed()
        record = self._record.copy()
        record.begin_continuation()
        record.feed(data)
        return record.is_caught_up

    def received(self) -> StreamRecord:
        """Return all that the client has received, decoded; raises `Refusal` 502 if no other
        instance can continue it."""
        try:
            if self._record is None or not (self._record.is_plain or self._moved_s):
                raise NotResumable("only one choice of plain text can be continued")
            self._record.settle()
        except NotResumable as error:
            self._metrics.streams_broken.labels("unprovable").inc()
            name = self._broken[0].instance if self._broken is not None else "?"
            message = f"instance {name} broke off in the middle of the response; {error}"
            raise Refusal(502, message) from error
        return self._record

    def record_move(self) -> None:
        """Another instance writes from here on, which the stream has waited for."""
        self._moved_s = self._entry.event_s if self.has_begun else None

    def record_break(self, error: InstanceFailed) -> None:
        """The stream broke, or the request that was to continue it failed."""
        record, entry = self._record, self._entry
        if record is not None and not (record.is_complete or entry.generated):  # nothing was told
            self._response = self._record = entry.first_byte_s = None
            entry.has_output = False
        if entry.has_output and self._broken is None:
            self._broken = error, time.monotonic()

    async def _relay(self, instance: InstanceInfo, response: HttpResponse) -> Reply:
        """Relay the stream of an instance, without what the client has received."""
        try:
            is_resumed = not self._entry.has_output
            if not is_resumed:
                self.received().begin_continuation()
            chunk = await self._upstream.first_chunk(instance, response)
            if is_resumed:
                self._record = self._begin_with(instance, response)
            self._is_resumed, record = is_resumed, self._record
            self._reads_before_flow = _READS_BEFORE_FLOW
            stream = self._begin(response)
            goes_on = bool(chunk)
            self._pass_on(chunk)
            while goes_on:
                if record is not None and record.error:
                    if record.is_aborted:
                        raise InstanceFailed(instance.id, _ABORTED, is_suspect=False)
                    if not await self._upstream.is_alive(instance):
                        raise InstanceFailed(instance.id, "its engine crashed")
                    stream.send(record.take_error())  # of the request: the client's
                if self._http.connection.writing_paused:
                    await self._http.connection.drain()
                if self._reads_before_flow == 0:
                    await self._let_flow(response)
                if self.is_complete:  # the rest frees the connection for another request
                    await response.pour_rest(self._pass_on, _END_S)
                    break
                goes_on = await response.pour(self._pass_on)
            if record is not None and not record.is_complete:
                raise InstanceFailed(instance.id, "its stream ended too early")
            stream.end()
            return stream
        except (HttpError, ContinuationFailed) as error:
            lost = "connection lost: " if isinstance(error, HttpError) else ""
            is_suspect = self._record is None or not self._record.is_aborted
            raise InstanceFailed(instance.id, f"{lost}{error}", is_suspect=is_suspect) from error
        except ContinuationMismatch as error:
            if self.is_unproved:  # what it was to begin with was lost: another instance is told
                self.is_unproved, words = False, f"the first token did not reach it: {error}"
                raise InstanceFailed(instance.id, words, is_suspect=False) from error
            metrics, is_first = self._metrics, self._broken is None
            broken = metrics.streams_broken.labels("mismatch")
            (metrics.first_tokens["mismatch"] if is_first else broken).inc()
            message = f"instance {instance.id} does not continue the output: {error}"
            raise Refusal(502, message) from error

    def _pass_on(self, chunk: bytes) -> bool:
        """Write what the client gets of some bytes of an instance. Returns False if it reads too
        slowly, or an error is left in the record: the request's task sees to these."""
        record, stream = self._record, self._response
        assert stream is not None
        events = chunk if record is None else record.feed(chunk)
        if events:
            if stream.status == 200:
                self._entry.take_transfer()  # it has consumed the KV, if any
            if not self._is_resumed:
                self._is_resumed = True
                self._entry.begin_output()
                self._record_resumed()
            self._entry.record_events(events.count(b"\n\n"))
            self._is_whole = events.endswith(b"\n\n")
            is_last = record is not None and record.is_complete
            stream.send(events, is_last=is_last)
            self.is_complete = is_last
        self._reads_before_flow -= 1
        is_full, may_flow = self._http.connection.writing_paused, self._reads_before_flow == 0
        return not (is_full or may_flow or self.is_complete or (record and record.error))

    async def _let_flow(self, response: HttpResponse) -> None:
        """Let the C++ core pass events on for as long as nothing else is to be done with them."""
        self._reads_before_flow = _READS_BEFORE_NEXT
        await asyncio.sleep(0)  # transports write at the end of a turn of the loop
        stream, record = self._response, self._record
        if stream is None or not self._is_resumed or (target := stream.target()) is None:
            return
        if (rules := FlowRules() if record is None else record.flow_rules()) is None:
            return
        if (flow := response.begin_flow(target, rules)) is None:
            return
        self._entry.count_flow(flow)
        try:
            await response.flows()
        finally:
            self._keep_flowed()
            self._entry.count_flow(None)
            if unsent := flow.take_unsent():
                stream.write_unsent(unsent)
        # What follows the end of one is the end, or strange.
        self._reads_before_flow = -1 if flow.state is FlowState.ENDED else _READS_BEFORE_FLOW

    def _keep_flowed(self) -> None:
        if self._entry.flow is not None and self._record is not None:
            self._record.keep(self._entry.flow.take_kept())

    def _begin_with(self, instance: InstanceInfo, response: HttpResponse) -> StreamRecord | None:
        """Begin the output with the stream of an instance; None if it cannot be resumed."""
        entry, request, is_good = self._entry, self._request, response.status == 200
        entry.begin_output()
        is_plain = request.is_recorded(instance)
        is_recorded = is_good and request.is_streamed and request.is_splittable
        return self._new_record(is_plain=is_plain) if is_recorded else None

    def end(self) -> Reply:
        """Send the end of an output that is over but for its last events."""
        assert self._record is not None
        num_tokens = self._entry.prompt_tokens or len(self._record.prompt_token_ids)
        ending = self._record.ending(num_tokens, wants_usage=self._request.wants_usage)
        self._record_resumed()
        return self.finish(ending)

    def _record_resumed(self) -> None:
        if self._moved_s is not None:
            self._metrics.move_seconds.labels("gap").observe(time.monotonic() - self._moved_s)
        broken, self._broken, self._moved_s = self._broken, None, None
        if broken is not None:
            gap_s = time.monotonic() - broken[1]
            _log.info("request %s resumed after %.3f s", self._entry.id, gap_s)
            self._metrics.streams_broken.labels("resumed").inc()
            self._metrics.resume_gap.observe(gap_s)
            mirror = self._entry.mirror
            if mirror is not None and mirror.instance == self._entry.worker:
                self._metrics.mirrors.labels("used").inc()

    def _new_record(self, *, is_plain: bool = True) -> StreamRecord:
        is_chat, hides_ids = self._request.path == CHAT, is_plain and not self._request.shows_ids
        return StreamRecord(is_chat=is_chat, hides_ids=hides_ids, is_plain=is_plain)

    def _begin(self, response: HttpResponse | None = None) -> StreamedResponse:
        """Send the head of the response, unless that was done; as an instance's, if given."""
        if self._response is None:
            status, headers = 200, self._headers()
            content_type = f"{EVENT_STREAM}; charset=utf-8"
            if response is not None:
                status, content_type = response.status, response.headers["content-type"]
                if self._request.rules is not None:
                    headers = headers_without(NOT_RETURNED, response.headers) | headers
            headers |= {"content-type": content_type, "cache-control": "no-cache"}
            self._response = StreamedResponse(self._http, status, headers)
            self._entry.has_output = True
        return self._response

    def _headers(self) -> dict[str, str]:
        return {
            "x-request-id": self._entry.id,
            "x-tetri-prefill": self._entry.prefill,
            "x-tetri-decode": self._entry.decode,
        }
