"""Requests that one instance answers whole, on every route that is not split.

What the client sent goes on unchanged, but for hand-over parameters, which only the
router may set; what the instance says comes back unchanged, its errors included. An
instance that is full or in trouble is no obstacle while the client has seen nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from vllm_tetri.handover import FIELD
from vllm_tetri.policy.lifecycle import Event
from vllm_tetri.policy.route import Full, choose_keeper, choose_route
from vllm_tetri.router.answers import NO_JSON, LegBusy, LegFailed, NoRoom, Refusal, is_busy
from vllm_tetri.router.call import Call, parse_call
from vllm_tetri.router.inflow import VISIT, Inflow
from vllm_tetri.router.outlet import EventStream
from vllm_tetri.router.scheduler import GlobalScheduler
from vllm_tetri.router.table import Entry
from vllm_tetri.router.wire import Answer, WireError
from vllm_tetri.types import InstanceId, InstanceInfo, RequestId

MAX_RETRIES = 2
ROUTE = "passed"  # how `tetri_requests_total` calls these requests
_EVENT_STREAM = "text/event-stream"
_TROUBLE = frozenset({500, 502, 503, 504})  # 501 is an answer: the model cannot do it
_NOT_OFFERED = {"detail": "Not Found"}  # vLLM has no such route, or not for its model
# About a connection or the encoding of a body, not about the request.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-length",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_FORWARDED = _HOP_BY_HOP | {"host", "expect", "content-encoding", "x-request-id"}
_NOT_RETURNED = _HOP_BY_HOP | {"date", "server", "x-request-id"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Manner:
    """How a route is passed on.

    Attributes:
        generates: It keeps an engine busy, so it counts as a request in flight.
        is_kept: Its answers may be stored, so one instance gets all such requests.
        has_json: A body, if there is one, is a JSON object.
        has_body: It may have one; else nothing of it is read.
    """

    generates: bool = True
    is_kept: bool = False
    has_json: bool = True
    has_body: bool = True


@dataclass(slots=True)
class _Attempts:
    """A request, and which instances it has met."""

    request: web.Request
    manner: Manner
    call: Call
    entry: Entry
    body: bytes
    excluded: set[InstanceId] = field(default_factory=set)
    full: set[InstanceId] = field(default_factory=set)
    models_asked: set[str] = field(default_factory=set)
    failure: LegFailed | None = None
    last_answer: web.Response | None = None


class Passthrough:
    """Serves routes by handing the whole request to one instance."""

    def __init__(self, scheduler: GlobalScheduler, inflow: Inflow) -> None:
        self._scheduler = scheduler
        self._inflow = inflow
        self._in_flight: Counter[InstanceId] = Counter()

    async def serve(self, request: web.Request, manner: Manner) -> web.StreamResponse:
        """Answer a request.

        Raises:
            Refusal: It was not even begun.
        """
        job = await self._begin(request, manner)
        outcome = "error"
        try:
            answer = await self._first_answer(job)
            if not job.entry.is_over:
                outcome = "ok" if answer.status < 400 else "rejected"
            return answer
        except Refusal as refusal:
            if isinstance(refusal, NoRoom):
                outcome = "busy"
            elif refusal.status < 500:
                outcome = "rejected"
            return refusal.response({"x-request-id": job.entry.id})
        except (asyncio.CancelledError, ConnectionResetError):
            outcome = "cancelled"
            raise
        finally:
            self._end(job, outcome)

    async def _begin(self, request: web.Request, manner: Manner) -> _Attempts:
        party = request[VISIT].party
        self._scheduler.shares.check_room(party)  # before the body comes, and when it is there
        raw = await self._inflow.read(request) if manner.has_body else b""
        self._scheduler.shares.check_room(party)
        table, now = self._scheduler.table, time.monotonic()
        is_json = manner.has_json and bool(raw)
        call = parse_call(request.path, raw if is_json else b"{}", request.headers, party=party)
        if manner.generates:
            entry = table.enter(call.request_id, now=now, sla=call.sla, party=party)
        else:
            entry = Entry(RequestId(call.request_id or uuid.uuid4().hex), now, call.sla)
        body = _without_handover(call) if is_json else raw
        return _Attempts(request, manner, call, entry, body)

    def _end(self, job: _Attempts, outcome: str) -> None:
        if not job.manner.generates:
            return
        entry = job.entry
        self._scheduler.table.leave(entry)
        is_streamed = entry.generated > 0 and entry.first_byte_s is not None
        self._scheduler.metrics.ended(
            ROUTE,
            outcome,
            ttft_s=(entry.first_byte_s or 0.0) - entry.arrival_s if is_streamed else None,
            total_s=time.monotonic() - entry.arrival_s,
        )

    async def _first_answer(self, job: _Attempts) -> web.StreamResponse:
        while len(job.excluded) <= MAX_RETRIES and (instance := self._choose(job)) is not None:
            job.entry.on(Event.WHOLE_SENT)
            job.entry.prefill = job.entry.decode = instance.id
            self._in_flight[instance.id] += 1
            try:
                answer = await self._ask(job, instance)
            except LegBusy:
                self._scheduler.note_busy(instance.id)
                job.full.add(instance.id)
                continue
            except LegFailed as error:
                _log.warning("request %s: %s", job.entry.id, error)
                job.failure = error
                job.excluded.add(instance.id)
                if error.is_final:
                    break
                continue
            finally:
                self._in_flight[instance.id] -= 1
                if not self._in_flight[instance.id]:
                    del self._in_flight[instance.id]  # names come and go
            if answer is not None:
                return answer
            if job.manner.is_kept:
                job.models_asked.update(instance.models)
            else:
                job.excluded.add(instance.id)
        if job.last_answer is not None:
            return job.last_answer
        if job.failure is not None:
            raise Refusal(job.failure.status, f"{job.failure} (tried {len(job.excluded)})")
        raise Refusal(503, "no instance is ready; try again")

    def _choose(self, job: _Attempts) -> InstanceInfo | None:
        by_id = {each.info.id: each.info for each in self._scheduler.monitor.view().instances}
        found = (self._choose_for(model, job) for model in self._models(job))
        return next((by_id[each] for each in found if each is not None), None)

    def _models(self, job: _Attempts) -> Iterator[str]:
        """The one it asks for. Of an unknown one an instance complains best itself."""
        names = self._scheduler.models()
        if job.call.model in names:
            yield job.call.model
        else:
            yield from sorted({info.models[0] for info in names.values()} - job.models_asked)

    def _choose_for(self, model: str, job: _Attempts) -> InstanceId | None:
        view = self._scheduler.monitor.view()
        crowded: frozenset[InstanceId] = frozenset()
        if job.manner.generates:
            is_new = not (job.excluded or job.full)
            crowded = self._scheduler.crowded(job.call.party, time.monotonic(), is_new=is_new)
        if job.manner.is_kept:
            keeper = choose_keeper(view, model=model, excluded=job.excluded)
            if keeper in job.full or keeper in crowded:
                assert keeper is not None
                full = Full((keeper,), "instances that may keep the answer")
                raise self._scheduler.no_room(full)
            return keeper
        route = choose_route(
            view,
            model=model,
            splittable=False,
            own_tokens=self._in_flight,
            excluded=job.excluded,
            full=job.full,
            crowded=crowded,
        )
        if isinstance(route, Full):
            raise self._scheduler.no_room(route)
        return getattr(route, "instance", None)

    async def _ask(self, job: _Attempts, instance: InstanceInfo) -> web.StreamResponse | None:
        """Its answer; None when another instance should be asked."""
        request, upstream = job.request, self._scheduler.upstream
        headers = _kept(request.headers, _NOT_FORWARDED) | {"X-Request-Id": job.entry.id}
        response = await upstream.send(
            instance, request.method, request.rel_url.raw_path_qs, job.body, headers
        )
        try:
            if response.content_type == _EVENT_STREAM and response.status == 200:
                return await self._relay(job, instance, response)
            body = await upstream.body(instance, response)
        finally:
            response.close()  # its connection serves others if it was read to its end
        if is_busy(response.status, body):
            raise LegBusy(instance.id)
        if _is_not_offered(response.status, body):
            raise Refusal(
                404,
                f"{request.method} {request.path}: the instances of this cluster do not offer "
                "this route for the model that they serve",
            )
        answer = web.Response(
            status=response.status,
            headers=_answer_headers(job.entry, response),
            body=body,
        )
        if _may_another_do_better(job, response.status):
            job.last_answer = answer
            return None
        job.entry.first_byte_s = time.monotonic()
        return answer

    async def _relay(
        self, job: _Attempts, instance: InstanceInfo, response: Answer
    ) -> web.StreamResponse:
        entry = job.entry
        chunk = await self._scheduler.upstream.first_chunk(instance, response)
        entry.on(Event.ANSWERING)
        entry.first_byte_s = time.monotonic()
        answer = EventStream(headers=_answer_headers(entry, response))
        await answer.prepare(job.request)
        while chunk:
            entry.generated += chunk.count(b"\n\n")
            await answer.write(chunk)
            try:
                chunk = await response.read_some()
            except WireError as error:
                _log.warning("request %s: %s broke off: %r", entry.id, instance.id, error)
                entry.on(Event.FAIL)
                text = f"instance {instance.id} broke off in the middle of the answer"
                await answer.break_off(Refusal(502, text))
                return answer
        await answer.write_eof()
        return answer


def _may_another_do_better(job: _Attempts, status: int) -> bool:
    if job.manner.is_kept:
        # Without a model to go by, each model's keeper is asked for a stored answer.
        return status == 404 and not job.call.model
    return status in _TROUBLE


def _without_handover(call: Call) -> bytes:
    """The body without what only the router may say to an instance."""
    sampling: Any = call.body.get("sampling_params")
    extra = sampling.get("extra_args") if isinstance(sampling, dict) else None
    if not isinstance(extra, dict) or FIELD not in extra:
        return call.raw
    del extra[FIELD]
    return msgspec.json.encode(call.body)


def _is_not_offered(status: int, body: bytes) -> bool:
    try:
        return status == 404 and bool(msgspec.json.decode(body) == _NOT_OFFERED)
    except NO_JSON:
        return False


def _kept(headers: Mapping[str, str], dropped: frozenset[str]) -> dict[str, str]:
    named = headers.get("connection", "").lower().replace(" ", "").split(",")
    gone = dropped.union(named)
    return {name: value for name, value in headers.items() if name.lower() not in gone}


def _answer_headers(entry: Entry, response: Answer) -> dict[str, str]:
    return _kept(response.headers, _NOT_RETURNED) | {
        "x-request-id": entry.id,
        "x-tetri-prefill": entry.prefill,
        "x-tetri-decode": entry.decode,
    }
