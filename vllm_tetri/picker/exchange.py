"""One HTTP request of a gateway, as Envoy's external processing tells it, and which endpoint gets
it: the endpoint picker protocol of the Gateway API inference extension."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from envoy_data_plane.envoy.config.core.v3 import HeaderValue, HeaderValueOption, Metadata
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpBody,
    HttpHeaders,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Struct

from vllm_tetri.handover import RANK_HEADER
from vllm_tetri.policy.cluster import InstanceRow
from vllm_tetri.policy.route import Event, Route, Split
from vllm_tetri.router.app import PROXIED
from vllm_tetri.router.errors import NoCapacity, Refusal
from vllm_tetri.router.request import CHAT, COMPLETIONS, ApiRequest, ProxyRules, parse_request
from vllm_tetri.router.scheduler import GlobalScheduler
from vllm_tetri.router.table import Entry
from vllm_tetri.types import InstanceInfo

DESTINATION = "x-gateway-destination-endpoint"
SUBSET, SERVED = f"{DESTINATION}-subset", f"{DESTINATION}-served"
LOAD_BALANCER, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"  # namespaces of metadata
_RULES = {(method, path): rules for method, path, rules in PROXIED}
_OTHER = ProxyRules(generates=False, has_json=False)
_RESPONSES = "/v1/responses"
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
        self, scheduler: GlobalScheduler, *, max_body_bytes: int, num_fallbacks: int = 0
    ) -> None:
        self._scheduler, self._num_fallbacks = scheduler, num_fallbacks
        self._body, self._max_body_bytes = bytearray(), max_body_bytes
        self._modes = ProtocolConfiguration()
        self._subset: list[str] | None = None  # endpoints that the gateway allows, if it says so
        self._headers: dict[str, str] = {}
        self._entry: Entry | None = None
        self._route, self._outcome = "none", "cancelled"  # as in `Metrics.requests`

    async def on(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        """Take the next message of the gateway, and return what to answer."""
        self._modes = message.protocol_config or self._modes
        try:
            if message.request_headers is not None:
                self._subset = _subset_in(message.metadata_context)
                return await self._on_head(message.request_headers)
            if message.request_body is not None:
                return await self._on_body(message.request_body)
            if message.request_trailers is not None:
                is_placed = self._entry is not None or self._modes.request_body_mode != _DUPLEX
                trailers = ProcessingResponse(request_trailers=TrailersResponse())
                return [*(() if is_placed else await self._place(ends=False)), trailers]
        except Refusal as refusal:
            return [self._refused(refusal)]
        if message.response_headers is not None:
            self._on_response(message.response_headers, message.metadata_context)
            return [ProcessingResponse(response_headers=HeadersResponse())]
        if (body := message.response_body) is not None:
            is_echoed = self._modes.response_body_mode == _DUPLEX
            same = _streamed(body.body, body.end_of_stream) if is_echoed else BodyResponse()
            return [ProcessingResponse(response_body=same)]
        return [ProcessingResponse(response_trailers=TrailersResponse())]

    def close(self) -> None:
        """Count the request no longer. Idempotent."""
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.on(Event.FINISH if self._outcome == "ok" else Event.FAIL)
            self._scheduler.table.leave(entry)
            self._scheduler.metrics.record_request(self._route, self._outcome, entry)

    async def _on_head(self, head: HttpHeaders) -> list[ProcessingResponse]:
        self._headers = _headers_of(head)
        if head.end_of_stream:
            return await self._place()
        if self._modes.request_body_mode == _BUFFERED:
            return [ProcessingResponse(request_headers=HeadersResponse())]
        if self._modes.request_body_mode == _DUPLEX:
            return []
        words = "the gateway's request_body_mode must be FULL_DUPLEX_STREAMED or BUFFERED"
        raise Refusal(500, words)

    async def _on_body(self, body: HttpBody) -> list[ProcessingResponse]:
        self._body += body.body
        if len(self._body) > self._max_body_bytes:
            raise Refusal(413, f"the body exceeds {self._max_body_bytes} bytes")
        return await self._place() if body.end_of_stream else []

    async def _place(self, *, ends: bool = True) -> list[ProcessingResponse]:
        """Choose endpoints for the request, which is complete and `ends` with its body, or with
        trailers. Raises `Refusal`."""
        path, raw = self._headers[":path"], bytes(self._body)
        self._body.clear()
        method, name = self._headers[":method"], self._headers.get("x-request-id", "")
        rules = _rules_of(method, path.partition("?")[0])
        request = parse_request(path, raw, {"X-Request-Id": name}, method=method, rules=rules)
        request = await self._scheduler.admit(request)
        route, info = self._choose(request)
        endpoints = ",".join((_endpoint_of(info), *self._fallbacks(request, info)))
        added = {DESTINATION: endpoints, "x-request-id": self._enter(request, route, info)}
        if info.rank is not None:
            added[RANK_HEADER] = str(info.rank)
        metadata = Struct.from_dict({LOAD_BALANCER: {DESTINATION: endpoints}})
        common = CommonResponse(header_mutation=_setting(added), clear_route_cache=True)
        if raw and self._modes.request_body_mode == _BUFFERED:
            if request.raw != raw:
                common.body_mutation = BodyMutation(body=request.raw)
            body = BodyResponse(response=common)
            return [ProcessingResponse(request_body=body, dynamic_metadata=metadata)]
        head = HeadersResponse(response=common)
        chunks = _chunks_of(request.raw, ends=ends) if raw else ()
        return [ProcessingResponse(request_headers=head, dynamic_metadata=metadata), *chunks]

    def _choose(self, request: ApiRequest) -> tuple[Route, InstanceInfo]:
        """Return where a request goes; raises `Refusal` if no endpoint may have it."""
        excluded = {row.id for row in self._rows() if not self._allows(row.view.info)}
        while True:
            route = self._scheduler.placer.place(
                request,
                may_split=False,
                excluded=frozenset(excluded),
                at_limit=frozenset(),
                is_new=True,
            )
            if route is None:
                among = "" if self._subset is None else " among those that the gateway allows"
                raise Refusal(503, f"no endpoint is ready{among}; try again")
            name = route.prefill if isinstance(route, Split) else route.instance
            info = self._scheduler.info(name)
            if info is not None and self._allows(info):
                return route, info
            excluded.add(name)  # it has left since the snapshot was taken

    def _fallbacks(self, request: ApiRequest, chosen: InstanceInfo) -> list[str]:
        """Return the endpoints with the shortest queues beside the chosen one. A rank has none,
        since a header names it, nor has what one instance stores."""
        if request.is_stored or chosen.rank is not None:
            return []
        names = {request.model} if request.model else {*chosen.models}
        others = [
            (row.queued_tokens, row.num_requests, _endpoint_of(row.view.info))
            for row in self._rows()
            if row.id != chosen.id and row.view.info.rank is None and self._allows(row.view.info)
            if not names.isdisjoint(row.view.info.names)
        ]
        return [endpoint for _, _, endpoint in sorted(others)[: self._num_fallbacks]]

    def _rows(self) -> Iterator[InstanceRow]:
        yield from self._scheduler.placer.table(time.monotonic()).by_id.values()

    def _allows(self, info: InstanceInfo) -> bool:
        endpoint = _endpoint_of(info)
        return bool(endpoint) and (self._subset is None or endpoint in self._subset)

    def _enter(self, request: ApiRequest, route: Route, info: InstanceInfo) -> str:
        """Count a request at its instance; returns its name."""
        scheduler, now = self._scheduler, time.monotonic()
        self._entry = entry = scheduler.table.enter(
            request.request_id, now=now, is_counted=request.generates
        )
        entry.prompt_tokens = request.approx_tokens
        entry.send_aggregated(info.id, route.reason)
        self._route = "whole" if request.rules is None else "passed"
        scheduler.metrics.cached_tokens.inc(scheduler.placer.record_sent(entry.id, request, route))
        _log.debug("request %s goes to %s: %s", entry.id, info.id, route.reason)
        return entry.id

    def _on_response(self, head: HttpHeaders, metadata: Metadata | None) -> None:
        """The response of an instance begins, perhaps of another one than the first choice."""
        if self._entry is None:
            return
        served = _struct_in(metadata, LOAD_BALANCER).get(SERVED)
        for row in self._rows():
            if served == _endpoint_of(row.view.info) and row.view.info.rank is None:
                self._entry.send_aggregated(row.id)
        self._entry.begin_output()
        self._outcome = "ok" if _headers_of(head)[":status"] < "400" else "rejected"

    def _refused(self, refusal: Refusal) -> ProcessingResponse:
        """Return the response that the gateway is to send instead of an instance's."""
        if isinstance(refusal, NoCapacity):  # the protocol's status for load that is shed
            words, kind, wait_s = str(refusal), refusal.kind, refusal.retry_after_s
            refusal = Refusal(429, words, kind=kind, retry_after_s=wait_s)
        headers = {"content-type": "application/json", **refusal.headers()}
        return ProcessingResponse(
            immediate_response=ImmediateResponse(
                status=HttpStatus(code=StatusCode(refusal.status)),
                headers=_setting(headers),
                body=refusal.body(),
                details="refused_by_picker",
            )
        )


def _rules_of(method: str, path: str) -> ProxyRules | None:
    """Return how a route is served; None for the two that are understood."""
    if method == "POST" and path in (CHAT, COMPLETIONS):
        return None
    if path.startswith(_RESPONSES + "/"):
        return _RULES["POST", _RESPONSES]
    return _RULES.get((method, path), _OTHER)


def _endpoint_of(info: InstanceInfo) -> str:
    """Return where an instance listens, as the protocol writes it; empty if its URL has a host name
    instead of an address."""
    url = urlsplit(info.url)
    host = url.hostname or ""
    try:
        ip_address(host)
    except ValueError:
        return ""
    return f"[{host}]:{url.port}" if ":" in host else f"{host}:{url.port}"


def _headers_of(head: HttpHeaders) -> dict[str, str]:
    headers = head.headers.headers if head.headers is not None else []
    return {each.key: each.raw_value.decode("latin-1") or each.value for each in headers}


def _struct_in(metadata: Metadata | None, namespace: str) -> Mapping[str, object]:
    found = metadata.filter_metadata.get(namespace) if metadata is not None else None
    fields: Mapping[str, object] = found.to_dict() if found is not None else {}
    return fields


def _subset_in(metadata: Metadata | None) -> list[str] | None:
    found = _struct_in(metadata, SUBSET_HINT).get(SUBSET)
    return found if isinstance(found, list) else None


def _setting(headers: Mapping[str, str]) -> HeaderMutation:
    return HeaderMutation(
        set_headers=[
            HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode()))
            for name, value in headers.items()
        ]
    )


def _streamed(body: bytes, is_last: bool) -> BodyResponse:
    mutation = BodyMutation(
        streamed_response=StreamedBodyResponse(body=body, end_of_stream=is_last)
    )
    return BodyResponse(response=CommonResponse(body_mutation=mutation))


def _chunks_of(body: bytes, *, ends: bool) -> Iterator[ProcessingResponse]:
    for start in range(0, len(body), _CHUNK_BYTES):
        is_last = ends and start + _CHUNK_BYTES >= len(body)
        chunk = _streamed(body[start : start + _CHUNK_BYTES], is_last)
        yield ProcessingResponse(request_body=chunk)
