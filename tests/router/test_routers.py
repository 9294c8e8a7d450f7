"""Several routers over the same instances."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.router.fakes import FakeInstance, Watching, door, eventually, hang
from vllm_tetri import cli
from vllm_tetri.launch.machine import free_port, is_port_free
from vllm_tetri.messages import FlipRole, Placed
from vllm_tetri.policy.route import Route
from vllm_tetri.router.flips import FileLease
from vllm_tetri.router.request import parse_request
from vllm_tetri.router.scheduler import GlobalScheduler
from vllm_tetri.security import VARIABLE
from vllm_tetri.types import InstanceId, Role

D2 = InstanceId("d2")
ENDED = 'tetri_requests_total{outcome="ok"'
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ends_at_once", [False, True])
async def test_sigterm_lets_requests_end_and_a_second_one_does_not(ends_at_once: bool) -> None:
    control, one = f"tcp://127.0.0.1:{free_port()}", FakeInstance("b", Role.BOTH)
    one.chunk_gate.clear()

    async def is_refused() -> bool:
        try:
            async with client.get(url + "/health"):
                return False
        except aiohttp.ClientConnectionError:
            return True

    async with joined([one], control), aiohttp.ClientSession() as client:
        with router_process(control) as (router, url):
            await until_serving(client, url, 1)
            body = {"model": "tiny", "prompt": "hello", "stream": True}
            async with client.post(url + "/v1/completions", json=body) as response:
                assert await response.content.readline() == b'data: {"index": 0}\n'
                router.send_signal(signal.SIGTERM)
                async with asyncio.timeout(20):
                    while not await is_refused():
                        await asyncio.sleep(0.02)
                if ends_at_once:
                    router.send_signal(signal.SIGTERM)
                    assert await asyncio.to_thread(router.wait, 20) == -signal.SIGTERM
                else:
                    one.chunk_gate.set()
                    assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
                    assert await asyncio.to_thread(router.wait, 20) == 0


async def test_sigterm_lets_a_body_arrive_that_has_begun() -> None:
    control, one = f"tcp://127.0.0.1:{free_port()}", FakeInstance("b", Role.BOTH)
    body = json.dumps({"model": "tiny", "prompt": "hello"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
    head += b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with joined([one], control), aiohttp.ClientSession() as client:
        with router_process(control) as (router, url):
            await until_serving(client, url, 1)
            port = int(url.rpartition(":")[2])
            idle, other = await asyncio.open_connection("127.0.0.1", port)
            other.write(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")
            await idle.readuntil(b"\r\n\r\n")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            router.send_signal(signal.SIGTERM)
            await eventually(lambda: is_port_free(port))
            await idle.read()  # to its end: this client may go to another router
            other.close()
            writer.write(body)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()
            assert await asyncio.to_thread(router.wait, 20) == 0


async def test_sigterm_ends_requests_when_their_time_is_over() -> None:
    control, most_s = f"tcp://127.0.0.1:{free_port()}", 3.0
    one = FakeInstance("b", Role.BOTH)
    one.chunk_gate.clear()
    async with joined([one], control), aiohttp.ClientSession() as client:
        with router_process(control, "--shutdown-timeout", f"{most_s}") as (router, url):
            await until_serving(client, url, 1)
            endless = asyncio.create_task(ask(client, url, stream=True))
            await eventually(lambda: len(one.calls) == 1)
            router.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(router.wait, 20) == 0
            await asyncio.wait({endless})
            assert one.aborted == 1


@dataclass
class Side:
    scheduler: GlobalScheduler
    url: str
    watcher: Watching

    def sees(self, name: str) -> str:
        one = self.scheduler.monitor.view_of(InstanceId(name))
        return one.state if one is not None else "absent"

    def is_flipping(self, name: str) -> bool:
        one = self.scheduler.monitor.view_of(InstanceId(name))
        return one is None or one.flip is None or one.flip.is_under_way

    def role_of(self, name: str) -> Role:
        one = self.scheduler.monitor.view_of(InstanceId(name))
        assert one is not None
        return one.info.role


def instances() -> list[FakeInstance]:
    return [
        FakeInstance("p1", Role.PREFILL, decode="d1"),
        FakeInstance("d1", Role.DECODE),
        FakeInstance("d2", Role.DECODE),
    ]


@asynccontextmanager
async def joined(
    members: list[FakeInstance], *controls: str
) -> AsyncIterator[dict[str, FakeInstance]]:
    try:
        for each in members:
            await each.start(*controls)
        yield {each.id: each for each in members}
    finally:
        for each in members:
            await each.close()


@asynccontextmanager
async def side(**options: Any) -> AsyncIterator[Side]:
    watcher = Watching(Role.PREFILL)
    async with door(watcher=watcher, **options) as (scheduler, _, url):
        yield Side(scheduler, url, watcher)


@pytest.fixture
def lease(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return str(tmp_path / "lease")


async def test_only_the_one_with_the_lease_orders_and_all_follow(lease: str) -> None:
    async with side(lease=FileLease(lease)) as first, side(lease=FileLease(lease)) as second:
        await eventually(lambda: first.watcher.looks + second.watcher.looks > 0)
        holder, other = (first, second) if first.watcher.looks else (second, first)
        controls = (first.scheduler.monitor.address, second.scheduler.monitor.address)
        async with joined(instances(), *controls):
            await eventually(lambda: other.sees("d2") == "ready")
            await eventually(lambda: other.role_of("d2") is Role.PREFILL)
            await eventually(lambda: holder.role_of("d2") is Role.PREFILL)
            assert other.watcher.looks == 0
            assert "another router flips roles" in other.scheduler.flips.explanation
            # An operator may order by any of them.
            await eventually(lambda: not other.is_flipping("d2"))
            assert other.scheduler.flips.order(D2, FlipRole(0, Role.BOTH))[0]


async def test_the_lease_goes_on_when_its_holder_ends(lease: str) -> None:
    async with side(lease=FileLease(lease)) as first:
        await eventually(lambda: first.watcher.looks > 0)
        async with side(lease=FileLease(lease)) as second:
            await eventually(lambda: "another" in second.scheduler.flips.explanation)
            assert second.watcher.looks == 0
            await first.scheduler.flips.close()
            looks = first.watcher.looks
            await eventually(lambda: second.watcher.looks > 1)
            assert first.watcher.looks == looks


async def test_without_a_lease_no_watcher_flips_where_there_are_several_routers() -> None:
    async with side() as first, side() as second:
        both = (first, second)
        async with joined(instances(), *(each.scheduler.monitor.address for each in both)):
            await eventually(lambda: all(each.sees("d2") == "ready" for each in both))
            for each in both:
                await eventually(
                    lambda each=each: "no --flip-lease" in each.scheduler.flips.explanation
                )
                looks = each.watcher.looks
                await asyncio.sleep(0.6)  # two more looks would fit
                assert each.watcher.looks == looks
            assert first.role_of("d2") is Role.DECODE
            ordered = second.scheduler.flips.order(D2, FlipRole(0, Role.PREFILL))
            assert ordered[0]
            await eventually(lambda: first.role_of("d2") is Role.PREFILL)


@contextmanager
def router_process(control: str, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    words = f"router --port {port} --control {control} --flip off --mode split"
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_tetri.cli", *words.split(), *more],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def test_a_router_that_dies_takes_only_its_own_requests_with_it() -> None:
    """Prefill and decode; and the next one serves as soon as it is there."""
    control = f"tcp://127.0.0.1:{free_port()}"
    async with (
        door() as (scheduler, _, url),
        joined(instances(), scheduler.monitor.address, control) as made,
        aiohttp.ClientSession() as client,
    ):
        with router_process(control) as (process, other):
            await until_serving(client, other)
            made["d1"].chunk_gate.clear()
            mine = asyncio.create_task(ask(client, url, stream=True))
            in_decode = asyncio.create_task(ask(client, other, stream=True))
            await eventually(lambda: len(made["d1"].calls) == 2)
            made["p1"].handler = hang
            in_prefill = asyncio.create_task(ask(client, other))
            await eventually(lambda: len(made["p1"].calls) == 3)
            process.kill()
            await eventually(lambda: made["p1"].aborted == made["d1"].aborted == 1)
            for orphan in (in_decode, in_prefill):
                with pytest.raises(aiohttp.ClientError):
                    await asyncio.wait_for(orphan, 10.0)
        made["p1"].handler = None
        made["d1"].chunk_gate.set()
        status, body = await mine
        assert (status, body.count(b"data: ")) == (200, made["d1"].num_chunks + 1)
        with router_process(control) as (_, other):
            await until_serving(client, other)
            status, body = await ask(client, other)
            assert status == 200, body


async def test_a_router_counts_what_another_one_has_sent() -> None:
    async with side() as first, side() as second, aiohttp.ClientSession() as client:
        controls = (first.scheduler.monitor.address, second.scheduler.monitor.address)
        async with joined([FakeInstance(name, Role.BOTH) for name in ("b1", "b2")], *controls):
            for each, name in product((first, second), ("b1", "b2")):
                await eventually(lambda each=each, name=name: each.sees(name) == "ready")
            assert (await ask(client, first.url))[0] == 200
            told = second.scheduler.monitor.counters.received
            await eventually(lambda: told["Placed"] > 0)
            assert first.scheduler.monitor.counters.received["Placed"] == 0

            def chosen() -> InstanceId:
                route = second.scheduler.placer.place(
                    request, may_split=False, excluded=frozenset(), at_limit=frozenset(),
                    is_new=True,
                )  # fmt: skip
                assert isinstance(route, Route)
                return route.prefill

            request = parse_request("/v1/completions", b'{"model": "tiny", "prompt": "a"}', {})
            instance = chosen()
            second.scheduler.on_published(instance, Placed(instance, 100_000))
            assert chosen() != instance


async def test_routers_share_a_port_and_one_that_dies_leaves_it_to_the_others() -> None:
    controls, port = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)], free_port()
    shared, words = f"http://127.0.0.1:{port}", ("--shared-port", str(port))
    one_each = aiohttp.TCPConnector(force_close=True)  # the kernel spreads connections
    async with joined(instances(), *controls), aiohttp.ClientSession(connector=one_each) as client:
        with (
            router_process(controls[0], *words) as first,
            router_process(controls[1], *words) as last,
        ):
            sides = first, last
            for _, url in sides:
                await until_serving(client, url)
            # By chance all go to the same one in 1 of 2^31 cases.
            assert {status for status, _ in [await ask(client, shared) for _ in range(32)]} == {200}
            served = [await num_ended(client, url) for _, url in sides]
            assert min(served) > 0
            assert 30 <= sum(served) <= 32  # the last ones may not be counted yet
            with router_process(f"tcp://127.0.0.1:{free_port()}", *words) as (_, idle):
                await until_up(client, idle)  # but no instance knows of it
                assert {(await ask(client, shared))[0] for _ in range(16)} == {200}
            first[0].kill()
            await asyncio.to_thread(first[0].wait)
            assert {status for status, _ in [await ask(client, shared) for _ in range(8)]} == {200}
            assert await num_ended(client, last[1]) >= served[1] + 7


async def until_up(client: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                async with client.get(url + "/livez"):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)


async def num_ended(client: aiohttp.ClientSession, url: str) -> int:
    """Return how many requests a router has served."""
    async with client.get(url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(ENDED))


async def ask(
    client: aiohttp.ClientSession, url: str, *, stream: bool = False
) -> tuple[int, bytes]:
    body = {"model": "tiny", "prompt": "hello", "stream": stream}
    async with client.post(url + "/v1/completions", json=body) as response:
        return response.status, await response.read()


async def until_serving(client: aiohttp.ClientSession, url: str, count: int = 3) -> None:
    for _ in range(600):
        try:
            async with client.get(url + "/tetri/v1/instances") as response:
                rows = (await response.json())["instances"]
            if len(rows) == count and {row["state"] for row in rows} == {"ready"}:
                return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.05)
    raise AssertionError("the router does not serve")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--secret-file", "/no/such/secret"], "vllm-tetri secret"),
        (["--control", "tcp://0.0.0.0:0"], "needs a secret"),
        (["--flip-lease", "/no/such/folder/lease"], "--flip-lease"),
    ],
)
def test_an_unusable_secret_or_lease_is_refused_in_one_line(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert cli.main(["router", "--port", "0", "--control", "tcp://127.0.0.1:0", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
