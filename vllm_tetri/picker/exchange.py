"""One HTTP request of a gateway, as Envoy's external processing tells it, and which endpoint gets
it: the endpoint picker protocol of the Gateway API inference extension."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import unquote, urlsplit

from envoy_data_plane.envoy.config.core.v3 import HeaderValue, HeaderValueOption
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Struct

from vllm_tetri.handover import RANK_HEADER
from vllm_tetri.policy.cluster import InstanceRow
from vllm_tetri.policy.route import Event
from vllm_tetri.router.app import PROXIED
from vllm_tetri.router.auth import Limits
from vllm_tetri.router.errors import NoCapacity, Refusal, is_failure
from vllm_tetri.router.incoming import BodyReader
from vllm_tetri.router.request import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    ApiRequest,
    ProxyRules,
    parse_request,
)
from vllm_tetri.router.scheduler import GlobalScheduler
from vllm_tetri.router.table import Entry
from vllm_tetri.types import InstanceInfo

DESTINATION = "x-gateway-destination-endpoint"
SUBSET, SERVED = f"{DESTINATION}-subset", f"{DESTINATION}-served"
LOAD_BALANCER, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"  # namespaces of metadata
_RULES = {(method, path): rules for method, path, rules in PROXIED}
_OTHER = ProxyRules(generates=False, has_json=False)
_BUFFERED = ProcessingModeBodySendMode.BUFFERED
_DUPLEX = ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
_CHUNK_BYTES = 60_000  # a gateway's window of HTTP/2 may be 65,535 bytes

_log = logging.getLogger(__name__)


class Exchange:
    """One HTTP request: the messages about it, and the answers to them. From its placement on it is
    counted at its instance until `close`, which is due when the gateway ends its stream.

    `num_fallbacks` endpoints are named after the chosen one, for gateways that try several.
    """

    def __init__(
        self, scheduler: GlobalScheduler, num_fallbacks: int = 0, bodies: BodyReader | None = None
    ) -> None:
        self._scheduler, self._num_fallbacks = scheduler, num_fallbacks
        self._bodies = bodies or BodyReader(Limits())
        self._modes = ext_proc.ProtocolConfiguration()
        self._headers, self._body = dict[str, str](), bytearray()
        self._has_body = False  # which may be empty
        self._subset: list[str] | None = None  # endpoints that the gateway allows, if it says so
        self._entry: Entry | None = None
        self._is_placed, self._problem = False, ""
        self._outcome = "cancelled"  # as in `Metrics.requests`

    async def on(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        """Take the next message of the gateway, and return what to answer."""
        self._modes = message.protocol_config or self._modes
        try:
            if message.request_headers is not None:
                found = _metadata_in(message, SUBSET_HINT).get(SUBSET)
                self._subset = found if isinstance(found, list) else None
                return await self._on_head(message.request_headers)
            if message.request_body is not None:
                return await self._on_body(message.request_body)
            if message.request_trailers is not None:
                placed = [] if self._is_placed else await self._place(ends=False)
                return [*placed, ProcessingResponse(request_trailers=ext_proc.TrailersResponse())]
        except Refusal as refusal:
            self._let_go()
            return [self._refused(refusal)]
        if message.response_headers is not None:
            self._on_response(message)
            return [ProcessingResponse(response_headers=ext_proc.HeadersResponse())]
        if (body := message.response_body) is not None:
            same = ext_proc.BodyResponse()
            if self._modes.response_body_mode == _DUPLEX:
                same = _streamed(body.body, body.end_of_stream)
            return [ProcessingResponse(response_body=same)]
        return [ProcessingResponse(response_trailers=ext_proc.TrailersResponse())]

    def close(self) -> None:
        """Count the request no longer. Idempotent."""
        self._let_go()
        entry, self._entry = self._entry, None
        scheduler, outcome = self._scheduler, self._outcome
        if entry is not None:
            entry.on(Event.FINISH if outcome == "ok" else Event.FAIL)
            scheduler.table.leave(entry)
            scheduler.metrics.record_request("passed", outcome, entry)
            scheduler.history.record(entry, "passed", outcome, self._problem, time.monotonic())

    async def _on_head(self, head: ext_proc.HttpHeaders) -> list[ProcessingResponse]:
        self._headers, self._has_body = _headers_of(head), not head.end_of_stream
        if not self._has_body:
            return await self._place()
        if self._modes.request_body_mode == _BUFFERED:
            return [ProcessingResponse(request_headers=ext_proc.HeadersResponse())]
        if self._modes.request_body_mode == _DUPLEX:
            return []
        words = "the gateway's request_body_mode must be FULL_DUPLEX_STREAMED or BUFFERED"
        raise Refusal(500, words)

    async def _on_body(self, body: ext_proc.HttpBody) -> list[ProcessingResponse]:
        self._body += body.body
        self._bodies.hold(len(body.body), len(self._body))
        is_whole = body.end_of_stream or self._modes.request_body_mode == _BUFFERED
        return await self._place() if is_whole else []

    def _let_go(self) -> None:
        self._bodies.held_bytes -= len(self._body)
        self._body.clear()

    async def _place(self, *, ends: bool = True) -> list[ProcessingResponse]:
        """Choose endpoints for the request, which is complete and `ends` with its body, or with
        trailers. Raises `Refusal`."""
        self._is_placed, raw = True, bytes(self._body)
        self._let_go()
        request = await self._scheduler.admit(_request_of(self._headers, raw))
        if request.generates:
            now, name = time.monotonic(), request.request_id
            self._entry = self._scheduler.table.enter(name, now=now)
        info = self._choose(request)
        endpoints = ",".join((_endpoint_of(info), *self._fallbacks(request, info)))
        added = {DESTINATION: endpoints}
        if self._entry is not None:  # by this name, the instance reports which blocks it has of it
            added["x-request-id"] = self._entry.id
        if info.rank is not None:
            added[RANK_HEADER] = str(info.rank)
        metadata = Struct.from_dict({LOAD_BALANCER: {DESTINATION: endpoints}})
        common = ext_proc.CommonResponse(clear_route_cache=True)
        is_buffered = self._has_body and self._modes.request_body_mode == _BUFFERED
        if is_buffered and request.raw != raw:
            added["content-length"] = str(len(request.raw))
            common.body_mutation = ext_proc.BodyMutation(body=request.raw)
        common.header_mutation = _setting(added)
        if is_buffered:
            body = ext_proc.BodyResponse(response=common)
            return [ProcessingResponse(request_body=body, dynamic_metadata=metadata)]
        head = ext_proc.HeadersResponse(response=common)
        chunks = _chunks_of(request.raw, ends=ends) if self._has_body else ()
        return [ProcessingResponse(request_headers=head, dynamic_metadata=metadata), *chunks]

    def _choose(self, request: ApiRequest) -> InstanceInfo:
        """Return the instance that a request goes to, and count it there; raises `Refusal` if no
        endpoint may have it."""
        placer = self._scheduler.placer
        excluded = {row.id for row in self._rows() if not self._allows(row.view.info)}
        route = placer.place(
            request,
            may_split=False,
            excluded=frozenset(excluded),
            at_limit=frozenset(),
            is_new=True,
        )
        info = self._scheduler.info(route.prefill) if route is not None else None
        if route is None or info is None or not self._allows(info):
            among = "" if self._subset is None else " among those that the gateway allows"
            raise Refusal(503, f"no endpoint is ready{among}; try again")
        if self._entry is not None:
            self._entry.send_aggregated(info.id, route.reason)
            self._scheduler.record_sent(self._entry, request, route, info)
        _log.debug("request %s goes to %s: %s", request.request_id, info.id, route.reason)
        return info

    def _fallbacks(self, request: ApiRequest, chosen: InstanceInfo) -> list[str]:
        """Return the endpoints with the shortest queues beside the chosen one. A rank has none,
        since a header names it, nor has what one instance stores."""
        if request.is_stored or chosen.rank is not None:
            return []
        others = [
            (row.queued_tokens, row.num_requests, _endpoint_of(row.view.info))
            for row in self._rows()
            if row.id != chosen.id and row.view.info.rank is None and self._allows(row.view.info)
            if (request.model or chosen.models[0]) in row.view.info.names
        ]
        return [endpoint for _, _, endpoint in sorted(others)[: self._num_fallbacks]]

    def _rows(self) -> Iterator[InstanceRow]:
        yield from self._scheduler.placer.table(time.monotonic()).by_id.values()

    def _allows(self, info: InstanceInfo) -> bool:
        endpoint = _endpoint_of(info)
        return bool(endpoint) and (self._subset is None or endpoint in self._subset)

    def _on_response(self, message: ProcessingRequest) -> None:
        """The response of an instance begins, perhaps of another one than the first choice."""
        if self._entry is not None and message.response_headers is not None:
            served = _metadata_in(message, LOAD_BALANCER).get(SERVED)
            for row in self._rows():
                if served == _endpoint_of(row.view.info) and row.view.info.rank is None:
                    self._entry.send_aggregated(row.id)
            self._entry.begin_output()
            status = _headers_of(message.response_headers)[":status"]
            self._outcome = _outcome_of(int(status))

    def _refused(self, refusal: Refusal) -> ProcessingResponse:
        """Return the response that the gateway is to send instead of an instance's."""
        is_shed = isinstance(refusal, NoCapacity)
        self._outcome = "busy" if is_shed else _outcome_of(refusal.status)
        self._problem = str(refusal)
        self.close()
        if is_shed:  # the protocol has another status
            words, kind, wait_s = str(refusal), refusal.kind, refusal.retry_after_s
            refusal = Refusal(429, words, kind=kind, retry_after_s=wait_s)
        headers = {"content-type": "application/json", **refusal.headers()}
        response = ext_proc.ImmediateResponse(
            status=HttpStatus(code=StatusCode(refusal.status)),
            headers=_setting(headers),
            body=refusal.body(),
            details="refused_by_picker",
        )
        return ProcessingResponse(immediate_response=response)


def _request_of(headers: Mapping[str, str], raw: bytes) -> ApiRequest:
    """Parse a request; raises `Refusal`."""
    method, target = headers[":method"], headers[":path"]
    path, rules = unquote(target.partition("?")[0]), None  # as instances read it
    if path.startswith(RESPONSES + "/"):
        rules = _RULES["POST", RESPONSES]
    elif method != "POST" or path not in (CHAT, COMPLETIONS):
        rules = _RULES.get((method, path), _OTHER)
    given = {"x-request-id": headers.get("x-request-id", "")}
    return parse_request(path, raw, given, method=method, rules=rules)


def _outcome_of(status: int) -> str:
    """Return how a request ended that got this status, as in `Metrics.requests`."""
    return "ok" if status < 400 else "error" if is_failure(status) else "rejected"


def _endpoint_of(info: InstanceInfo) -> str:
    """Return where an instance listens, as the protocol writes it; empty if its URL has a host name
    instead of an address."""
    url = urlsplit(info.url)
    try:
        address = ip_address(url.hostname or "")
    except ValueError:
        return ""
    port = url.port or 80
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _headers_of(head: ext_proc.HttpHeaders) -> dict[str, str]:
    headers = head.headers.headers if head.headers is not None else []
    return {each.key: each.raw_value.decode("latin-1") or each.value for each in headers}


def _metadata_in(message: ProcessingRequest, namespace: str) -> Mapping[str, Any]:
    context = message.metadata_context
    found = context.filter_metadata.get(namespace) if context is not None else None
    return found.to_dict() if found is not None else {}


def _setting(headers: Mapping[str, str]) -> ext_proc.HeaderMutation:
    pairs = [HeaderValue(key=name, raw_value=each.encode()) for name, each in headers.items()]
    return ext_proc.HeaderMutation(set_headers=[HeaderValueOption(header=each) for each in pairs])


def _streamed(body: bytes, is_last: bool) -> ext_proc.BodyResponse:
    part = ext_proc.StreamedBodyResponse(body=body, end_of_stream=is_last)
    mutation = ext_proc.BodyMutation(streamed_response=part)
    return ext_proc.BodyResponse(response=ext_proc.CommonResponse(body_mutation=mutation))


def _chunks_of(body: bytes, *, ends: bool) -> Iterator[ProcessingResponse]:
    for end in range(_CHUNK_BYTES, max(len(body), ends) + _CHUNK_BYTES, _CHUNK_BYTES):
        chunk = _streamed(body[end - _CHUNK_BYTES : end], ends and end >= len(body))
        yield ProcessingResponse(request_body=chunk)
