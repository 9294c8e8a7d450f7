"""What `explain` says of a request adds up to what its client saw; traces say the same."""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.client import until
from tests.e2e.cluster import Cluster, get, post, running
from tests.e2e.prompts import STREAM, chat, completion
from vllm_tetri import cli

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NUM_REQUESTS, AT_ONCE = 200, 4
BODIES = [
    completion(400, max_tokens=40, **STREAM),
    completion(900, max_tokens=24),
    completion(30, max_tokens=60, **STREAM),
    chat(200, max_tokens=30, **STREAM),
    chat(200, max_tokens=30, n=2, temperature=0.9, seed=3),
    completion(300, max_tokens=1, **STREAM),
]
MODES = ["split", "whole", "adaptive"]


class Collector(ThreadingHTTPServer):
    """Receives spans as an OpenTelemetry collector does, over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[tuple[str, Span]] = []  # and the service that sent each
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def of(self, trace: str) -> dict[str, list[Span]]:
        """The spans of a trace by name."""
        found: dict[str, list[Span]] = {}
        for _, span in list(self.spans):
            if span.trace_id.hex() == trace:
                found.setdefault(span.name, []).append(span)
        return found


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = [each.value.string_value for each in resource.resource.attributes]
            for scope in resource.scope_spans:
                self.server.spans += [(" ".join(names), span) for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class Seen(NamedTuple):
    """What a client saw of a request, in seconds."""

    id: str
    ttft_s: float
    jct_s: float


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.shutdown()
    collector.server_close()


@pytest.fixture(scope="module")
def cluster(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[Cluster]:
    roles = ("--prefill", "1", "--decode", "1", "--otlp-traces-endpoint", collector.url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        made = Cluster(tiny_llama, tmp_path_factory.mktemp("explain"), roles=roles)
        with running(made) as cluster:
            yield cluster
            cluster.rest(3)
            cluster.audit()


async def see(session: aiohttp.ClientSession, url: str, body: Any, **headers: str) -> Seen:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    begin_s, first_s = time.monotonic(), 0.0
    async with session.post(url + path, json=body, headers=headers) as response:
        assert response.status == 200
        async for chunk in response.content.iter_any():
            first_s = first_s or (time.monotonic() if chunk else 0.0)
        took_s = time.monotonic() - begin_s
        return Seen(response.headers["x-request-id"], first_s - begin_s, took_s)


async def test_the_parts_add_up_to_what_clients_saw(cluster: Cluster) -> None:
    errors, routes = list[float](), set[str]()
    async with aiohttp.ClientSession() as session:
        for mode in MODES:
            post(f"{cluster.url}/tetri/v1/mode", {"mode": mode})
            count = NUM_REQUESTS // len(MODES) + 1
            bodies = [BODIES[index % len(BODIES)] for index in range(count)]
            for index in range(0, count, AT_ONCE):
                some = bodies[index : index + AT_ONCE]
                seen = await asyncio.gather(*(see(session, cluster.url, each) for each in some))
                for body, each in zip(some, seen, strict=True):
                    await asyncio.to_thread(complete, cluster, each.id)
                    found = get(f"{cluster.url}/tetri/v1/requests/{each.id}")
                    routes.add(found["route"])
                    assert found["outcome"] == "ok"
                    parts = found["parts"]
                    assert sum(part["s"] for part in parts) == pytest.approx(
                        found["jct_s"], rel=1e-3
                    )
                    first_s = sum(part["before_first_token_s"] for part in parts)
                    assert first_s == pytest.approx(found["ttft_s"], rel=1e-3)
                    assert "compute" in {part["what"] for part in parts}
                    errors.append(abs(found["jct_s"] - each.jct_s) / each.jct_s)
                    if body.get("stream"):
                        errors.append(abs(found["ttft_s"] - each.ttft_s) / each.ttft_s)
    assert routes == {"split", "whole"}
    assert statistics.median(errors) < 0.05
    assert statistics.quantiles(errors, n=20)[-1] < 0.25  # client and router share two cores


def complete(cluster: Cluster, request: str) -> None:
    """Wait until every instance has told of a request."""
    deadline = time.monotonic() + 10
    while True:
        found = get(f"{cluster.url}/tetri/v1/requests/{request}")
        told = {each["instance"] for each in found["instances"]}
        if {found["prefill"], found["decode"]} <= told:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


async def test_a_trace_has_the_spans_of_all_processes(
    cluster: Cluster, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    post(f"{cluster.url}/tetri/v1/mode", {"mode": "split"})
    async with aiohttp.ClientSession() as session:
        seen = await see(session, cluster.url, BODIES[0], traceparent=f"00-{TRACE}-{PARENT}-01")
        unsampled = f"00-{TRACE[::-1]}-{PARENT}-00"
        await see(session, cluster.url, BODIES[0], traceparent=unsampled)

    def of_vllm() -> list[Span]:
        return collector.of(TRACE).get("llm_request", [])

    await until(lambda: len(of_vllm()) == 2 and "request" in collector.of(TRACE), "all spans")
    spans = collector.of(TRACE)
    (root,) = spans["request"]
    assert root.parent_span_id.hex() == PARENT
    assert (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9 == pytest.approx(
        seen.jct_s, rel=0.25
    )
    (at_prefill,), (at_decode,) = spans["at prefill-0"], spans["at decode-0"]
    assert {at_prefill.parent_span_id, at_decode.parent_span_id} == {root.span_id}
    assert {each.parent_span_id for each in of_vllm()} == {at_prefill.span_id, at_decode.span_id}
    assert {"router", "queue", "compute", "output"} <= set(spans)
    assert not collector.of(TRACE[::-1])

    await asyncio.to_thread(complete, cluster, seen.id)
    url = ("--url", cluster.url)
    assert await asyncio.to_thread(cli.main, ["explain", seen.id, *url]) == 0
    told = capsys.readouterr().out
    for word in ("TTFT", "compute", "output"):
        assert word in told
    assert await asyncio.to_thread(cli.main, ["explain", "never-seen", *url]) == 1
    assert "never-seen" in capsys.readouterr().err
    assert await asyncio.to_thread(cli.main, ["explain", seen.id, "--json", *url]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == seen.id
