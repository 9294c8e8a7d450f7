"""What the picker answers to a gateway, message by message, and over gRPC."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ProcessingModeBodySendMode as SendMode,
)
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from envoy_data_plane.google.protobuf import Struct
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.certificates import AUTHORITY, CERTIFICATE, CERTIFICATE_KEY
from tests.faults.proxy import Kind, Proxy, Trouble
from tests.router.fakes import (
    Cluster,
    FakeInstance,
    both,
    cluster,
    eventually,
    ranks,
    until_reported,
)
from vllm_tetri.picker import service
from vllm_tetri.picker.command import add_arguments
from vllm_tetri.picker.exchange import DESTINATION, SERVED, SUBSET, Exchange
from vllm_tetri.picker.service import (
    LIVENESS,
    PROCESSOR,
    READINESS,
    credentials_of,
    listen,
    server_for,
)
from vllm_tetri.router.auth import Limits
from vllm_tetri.router.incoming import BodyReader
from vllm_tetri.types import Mode, Role

ALL = [SendMode.FULL_DUPLEX_STREAMED, SendMode.BUFFERED]
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello"}


@asynccontextmanager
async def instances(*names: str, **options: Any) -> AsyncIterator[Cluster]:
    async with cluster(*map(both, names), mode=Mode.WHOLE, **options) as made:
        yield made


def metadata(namespace: str, **fields: Any) -> Metadata:
    return Metadata(filter_metadata={namespace: Struct.from_dict(fields)})


def head_of(
    path: str = "/v1/completions",
    mode: SendMode = SendMode.FULL_DUPLEX_STREAMED,
    *,
    method: str = "POST",
    context: Metadata | None = None,
    **headers: str,
) -> ProcessingRequest:
    fields = {":method": method, ":path": path, **headers}
    values = [HeaderValue(key=key, raw_value=value.encode()) for key, value in fields.items()]
    head = HttpHeaders(headers=HeaderMap(headers=values), end_of_stream=method == "GET")
    modes = ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode)
    return ProcessingRequest(request_headers=head, metadata_context=context, protocol_config=modes)


def body_of(raw: bytes, *, ends: bool = True) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=raw, end_of_stream=ends))


def response_of(status: str = "200", context: Metadata | None = None) -> ProcessingRequest:
    values = [HeaderValue(key=":status", raw_value=status.encode())]
    head = HttpHeaders(headers=HeaderMap(headers=values))
    return ProcessingRequest(response_headers=head, metadata_context=context)


class Seen:
    """What a gateway makes of answers."""

    def __init__(self, answers: list[ProcessingResponse]) -> None:
        self.headers: dict[str, str] = {}
        self.body, self.metadata = b"", dict[str, Any]()
        self.is_whole = False  # the last part of the body said so
        self.refusal = next((each.immediate_response for each in answers), None)
        for answer in answers:
            if answer.dynamic_metadata is not None:
                self.metadata = answer.dynamic_metadata.to_dict()
            for part in (answer.request_headers, answer.request_body, answer.response_body):
                if part is None or (common := part.response) is None:
                    continue
                if common.header_mutation is not None:
                    for each in common.header_mutation.set_headers:
                        self.headers[each.header.key] = each.header.raw_value.decode()
                if (mutation := common.body_mutation) is not None:
                    streamed = mutation.streamed_response
                    self.body += streamed.body if streamed else mutation.body
                    self.is_whole = streamed.end_of_stream if streamed else True

    @property
    def endpoints(self) -> list[str]:
        assert self.refusal is None, self.refusal.body
        named = self.headers[DESTINATION]
        assert self.metadata == {"envoy.lb": {DESTINATION: named}}
        return named.split(",")

    @property
    def error(self) -> tuple[int, str]:
        assert self.refusal is not None
        error = json.loads(self.refusal.body)["error"]
        assert error["code"] == self.refusal.status.code
        return error["code"], error["message"]


async def ask(exchange: Exchange, body: Any = None, mode: SendMode = ALL[0], **more: Any) -> Seen:
    raw = json.dumps(BODY if body is None else body).encode()
    answers = await exchange.on(head_of(mode=mode, **more))
    return Seen([*answers, *await exchange.on(body_of(raw))])


def endpoint(instance: FakeInstance) -> str:
    return instance.url.removeprefix("http://")


def in_flight(made: Cluster) -> dict[str, int]:
    return dict(made.scheduler.table.workers)


@pytest.mark.parametrize("mode", ALL, ids=lambda mode: mode.name)
async def test_a_request_is_counted_where_it_goes_until_its_end(mode: SendMode) -> None:
    async with instances("a") as made:
        exchange = Exchange(made.scheduler)
        seen = await ask(exchange, mode=mode, **{"x-request-id": "mine"})
        assert seen.endpoints == [endpoint(made["a"])]
        assert seen.headers["x-request-id"] == "mine"
        assert in_flight(made) == {"a": 1}
        await exchange.on(response_of())
        assert in_flight(made) == {"a": 1}
        exchange.close()
        exchange.close()
        assert in_flight(made) == {}
        assert 'outcome="ok",route="passed"} 1.0' in await made.metrics()


async def test_bodies_that_do_not_end_hold_so_much_together() -> None:
    bodies, part = BodyReader(Limits(bodies_bytes=100)), body_of(b"x" * 40, ends=False)
    async with instances("a") as made:
        exchanges = [Exchange(made.scheduler, bodies=bodies) for _ in range(3)]
        found = []
        for each in exchanges:
            await each.on(head_of())
            found.append(Seen(await each.on(part)))
        assert [each.refusal is None for each in found] == [True, True, False]
        assert found[-1].error[0] == 503
        assert bodies.held_bytes == 80
        for each in exchanges:
            each.close()
        assert bodies.held_bytes == 0


async def test_what_is_no_fault_of_the_client_is_an_error() -> None:
    async with instances("a") as made:
        for status in ("400", "501", "503"):
            await ask(exchange := Exchange(made.scheduler))
            await exchange.on(response_of(status))
            exchange.close()
        none = metadata("envoy.lb.subset_hint", **{SUBSET: []})
        assert (await ask(Exchange(made.scheduler), context=none)).error[0] == 503
        found = await made.metrics()
        for outcome in ("rejected", "error"):
            assert f'outcome="{outcome}",route="passed"}} 2.0' in found


@pytest.mark.parametrize("size", [10, 200_000])
async def test_a_streamed_body_is_passed_on_whole(size: int) -> None:
    async with instances("a") as made:
        exchange, raw = (
            Exchange(made.scheduler),
            json.dumps({**BODY, "prompt": "x" * size}).encode(),
        )
        assert await exchange.on(head_of()) == []
        assert await exchange.on(body_of(raw[:50], ends=False)) == []
        seen = Seen(await exchange.on(body_of(raw[50:])))
        assert seen.body == raw
        assert seen.is_whole


async def test_trailers_may_end_a_body() -> None:
    async with instances("a") as made:
        exchange, raw = Exchange(made.scheduler), json.dumps(BODY).encode()
        await exchange.on(head_of())
        await exchange.on(body_of(raw, ends=False))
        answers = await exchange.on(ProcessingRequest(request_trailers=HttpTrailers()))
        seen = Seen(answers)
        assert (seen.endpoints, seen.body, seen.is_whole) == ([endpoint(made["a"])], raw, False)
        assert answers[-1].request_trailers is not None


@pytest.mark.parametrize("mode", ALL, ids=lambda mode: mode.name)
async def test_a_body_may_be_empty(mode: SendMode) -> None:
    async with instances("a") as made:
        exchange = Exchange(made.scheduler)
        first = await exchange.on(head_of("/v1/responses/resp_1/cancel", mode))
        answers = await exchange.on(body_of(b""))
        assert Seen(answers).endpoints == [endpoint(made["a"])]
        assert answers[-1].request_body is not None
        assert sum(each.request_headers is not None for each in [*first, *answers]) == 1


@pytest.mark.parametrize("mode", ALL, ids=lambda mode: mode.name)
async def test_a_client_cannot_order_transfers(mode: SendMode) -> None:
    async with instances("a") as made:
        body = {**BODY, "kv_transfer_params": {"tetri": {"kind": "fetch"}}}
        for path in ("/v1/completions", "/v1/%63ompletions"):
            seen = await ask(Exchange(made.scheduler), body, mode, path=path)
            assert json.loads(seen.body) == BODY
        assert in_flight(made) == {"a": 2}


async def test_requests_spread_before_any_report() -> None:
    async with instances("a", "b") as made:
        for each in made.instances.values():
            await made.report(each.id, blocks_total=10_000)
        for _ in range(20):
            await ask(Exchange(made.scheduler), {**BODY, "prompt": "x" * 4000})
        assert in_flight(made) == {"a": 10, "b": 10}


async def test_only_endpoints_that_the_gateway_allows_are_named() -> None:
    async with instances("a", "b") as made:
        for name in "ab":
            allowed = metadata("envoy.lb.subset_hint", **{SUBSET: [endpoint(made[name])]})
            for _ in range(3):
                seen = await ask(Exchange(made.scheduler), context=allowed)
                assert seen.endpoints == [endpoint(made[name])]
        for others in ([], ["127.0.0.1:1"]):
            none = metadata("envoy.lb.subset_hint", **{SUBSET: others})
            code, words = (await ask(Exchange(made.scheduler), context=none)).error
            assert code == 503
            assert "among those that the gateway allows" in words


async def test_fallbacks_follow_and_the_one_that_served_is_counted() -> None:
    async with instances("a", "b", "c") as made:
        exchange = Exchange(made.scheduler, num_fallbacks=1)
        first, second = (await ask(exchange)).endpoints
        by_endpoint = {endpoint(each): name for name, each in made.instances.items()}
        assert in_flight(made) == {by_endpoint[first]: 1}
        await exchange.on(response_of(context=metadata("envoy.lb", **{SERVED: second})))
        assert in_flight(made) == {by_endpoint[second]: 1}


async def test_a_rank_is_named_in_a_header() -> None:
    async with cluster(*ranks(Role.BOTH, Role.BOTH), mode=Mode.WHOLE) as made:
        named = [await ask(Exchange(made.scheduler, num_fallbacks=1)) for _ in range(2)]
        assert {each.headers["X-data-parallel-rank"] for each in named} == {"0", "1"}
        assert {len(each.endpoints) for each in named} == {1}


async def test_what_cannot_be_placed_has_one_clear_error() -> None:
    async with instances() as made:
        assert (await ask(Exchange(made.scheduler))).error[0] == 503
    async with instances("a", max_in_flight_each=1) as made:
        code, words = (await ask(Exchange(made.scheduler), {**BODY, "model": "other"})).error
        assert code == 404
        assert "the model 'other' does not exist; there is: tiny" in words
        exchange = Exchange(made.scheduler)
        assert (
            Seen([*await exchange.on(head_of()), *await exchange.on(body_of(b"{"))]).error[0] == 400
        )
        await ask(held := Exchange(made.scheduler))
        refused = await ask(Exchange(made.scheduler))
        assert refused.error[0] == 429
        assert "at their limits" in refused.error[1]
        assert in_flight(made) == {"a": 1}
        held.close()
        assert (await ask(Exchange(made.scheduler))).refusal is None


async def test_a_gateway_that_sends_no_body_is_told_what_to_configure() -> None:
    async with instances("a") as made:
        seen = Seen(await Exchange(made.scheduler).on(head_of(mode=SendMode.NONE)))
        assert seen.error[0] == 500
        assert "request_body_mode" in seen.error[1]


async def test_an_instance_without_an_address_is_not_named() -> None:
    async with instances("a") as made:
        made["a"].url = made["a"].url.replace("127.0.0.1", "localhost")
        await asyncio.to_thread(made["a"].agent.close)
        made["a"].pid += 1
        made["a"].join(made.control)
        await eventually(lambda: made.scheduler.info(made["a"].id) is not None)
        await until_reported(made)
        assert (await ask(Exchange(made.scheduler))).error[0] == 503


async def test_a_url_without_a_port_has_that_of_http() -> None:
    async with instances() as made:
        info = replace(both("a").info(), url="http://127.0.0.1")
        members = made.scheduler.monitor.members
        members.join(b"a", info, time.monotonic())
        members.mark_ready(info)
        assert (await ask(Exchange(made.scheduler))).endpoints == ["127.0.0.1:80"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("GET", "/v1/responses/resp_1"), ("GET", "/anything?x=1")],
)
async def test_other_routes_go_to_an_instance_and_are_not_counted(method: str, path: str) -> None:
    async with instances("a") as made:
        seen = Seen(await Exchange(made.scheduler).on(head_of(path, method=method)))
        assert seen.endpoints == [endpoint(made["a"])]
        assert in_flight(made).get("a", 0) == ("responses" in path)


@asynccontextmanager
async def serving(made: Cluster) -> AsyncIterator[grpc.aio.Channel]:
    server = server_for(made.scheduler, 0)
    port = listen(server, "127.0.0.1", 0, None)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def test_what_a_gateway_cuts_is_not_counted() -> None:
    async with instances("a") as made, serving(made) as channel:
        process = channel.stream_stream(
            f"/{PROCESSOR}/Process", bytes, ProcessingResponse.FromString
        )
        calls = [process() for _ in range(150)]  # more than HTTP/2 allows at least
        for call in calls:
            await call.write(head_of())
            await call.write(body_of(json.dumps(BODY).encode()))
            await call.write(response_of())
        await eventually(lambda: in_flight(made) == {"a": 150})
        await calls[0].done_writing()  # ends its stream in good order
        await eventually(lambda: in_flight(made) == {"a": 149})
        calls[1].cancel()
        await eventually(lambda: in_flight(made) == {"a": 148})
        await channel.close()
        await eventually(lambda: in_flight(made) == {})


async def test_a_gateway_whose_host_vanishes_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_PING_MS", 300)
    async with instances("a") as made:
        server = server_for(made.scheduler, 0)
        with Proxy("127.0.0.1", listen(server, "127.0.0.1", 0, None)) as network:
            await server.start()
            async with grpc.aio.insecure_channel(network.endpoint) as channel:
                call = channel.stream_stream(f"/{PROCESSOR}/Process", bytes)()
                await call.write(head_of())
                await call.write(body_of(json.dumps(BODY).encode()))
                await eventually(lambda: in_flight(made) == {"a": 1})
                await asyncio.sleep(1)
                assert in_flight(made) == {"a": 1}  # it says nothing, and answers pings
                network.make(Trouble(Kind.STALL))
                await eventually(lambda: in_flight(made) == {})
        await server.stop(None)


async def test_health_follows_the_instances() -> None:
    async with instances() as made, serving(made) as channel:
        states, stub = HealthCheckResponse, HealthStub(channel)

        async def statuses(*services: str) -> set[int]:
            requests = [HealthCheckRequest(service=service) for service in services]
            return {(await stub.Check(request)).status for request in requests}

        assert await statuses(LIVENESS) == {states.SERVING}
        assert await statuses("", READINESS, PROCESSOR) == {states.NOT_SERVING}
        await made.add(both("a"))
        assert await statuses("", READINESS, PROCESSOR) == {states.SERVING}
        with pytest.raises(grpc.aio.AioRpcError, match="no service 'other'"):
            await statuses("other")


async def test_tls_needs_the_certificate_of_a_gateway() -> None:
    names = ("--ssl-certfile", CERTIFICATE, "--ssl-keyfile", CERTIFICATE_KEY)
    words = [*names, "--ssl-ca-certs", AUTHORITY, "--ssl-cert-reqs", ssl.CERT_REQUIRED.value]
    add_arguments(parser := argparse.ArgumentParser())
    credentials = credentials_of(parser.parse_args(list(map(str, words))))
    own = (CERTIFICATE_KEY.read_bytes(), CERTIFICATE.read_bytes())
    async with instances("a") as made:
        server = server_for(made.scheduler, 0)
        port = listen(server, "127.0.0.1", 0, credentials)
        await server.start()
        try:
            for key, certificate in (own, (None, None)):
                trust = grpc.ssl_channel_credentials(AUTHORITY.read_bytes(), key, certificate)
                async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trust) as channel:
                    asking = HealthStub(channel).Check(HealthCheckRequest())
                    if key:
                        assert (await asking).status == HealthCheckResponse.SERVING
                    else:
                        with pytest.raises(grpc.aio.AioRpcError):
                            await asking
        finally:
            await server.stop(None)


def command(*options: str) -> subprocess.Popen[str]:
    words = ["-m", "vllm_tetri.cli", "picker", "--http-port", "0", "--control", "tcp://127.0.0.1:0"]
    return subprocess.Popen(
        [sys.executable, *words, *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_in_good_order(number: signal.Signals) -> None:
    with command("--port", "0") as process:
        assert process.stderr is not None
        assert "gateways: 127.0.0.1:" in process.stderr.readline()
        process.send_signal(number)
        assert process.wait(30) == 0


def test_a_port_that_is_taken_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with command("--port", str(port)) as process:
            _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert error.startswith("vllm-tetri: ")
    assert str(port) in error
    assert error.count("\n") == 1
