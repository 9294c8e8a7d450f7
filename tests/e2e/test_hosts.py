"""The network between hosts is cut and mended, with real engines on network namespaces.

A router, a prefill and two decode instances, each on an address of its own; the cut drops
packets silently (`tests/faults/hosts.py`), so that neither end is told. Run it as root, with -s
for what clients saw.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Answer, Load, ask, load, until
from tests.e2e.cluster import ARENA_BYTES, CHUNK, PASSIVE, SERVE, UNIPROC, ByHand, Process, running
from tests.e2e.prompts import completion
from tests.faults.hosts import Hosts, hosts, require_hosts
from vllm_tetri import cli

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(400)]

STREAM = {"stream": True}
BODIES: list[dict[str, Any]] = [
    *[completion(40 + 90 * index, max_tokens=300, **STREAM) for index in range(4)],
    *[completion(50 + 130 * index, max_tokens=60 + 30 * index) for index in range(4)],
]
CLIENTS = 6
# At the latest, silence is noticed after three times --silent-after (1 s).
NOTICED_S = 3.0
# To compute prompt and tokens so far, beside five other requests on two shared cores.
WORK_S = 8.0
FREED_S = 20.0
# Shorter than the defaults (30 s, 60 s), so that tests take seconds.
TRANSFER_TIMEOUT_S, HOLD_TIMEOUT_S = 5, 10
CONTROL_PORT, KV_PORT, HTTP_PORT = 18555, 18600, 8000
INSTANCES = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


class Hosted(ByHand):
    """A router and three instances, each on a host of its own; `parts` are their processes."""

    def __init__(self, model: Path, folder: Path, hosts: Hosts, secret: Path) -> None:
        address = hosts.addresses["router"]
        self.url = f"http://{address}:{HTTP_PORT}"
        control = f"tcp://{address}:{CONTROL_PORT}"
        Process.__init__(
            self,
            ["vllm_tetri.cli", "router", "--host", address, "--port", str(HTTP_PORT),
             "--control", control, "--secret-file", str(secret), "--flip", "off",
             "--mode", "split"],
            folder / "router.log",
            within=hosts.within("router"),
        )  # fmt: skip
        self.parts = {
            name: _instance(name, role, model, folder, hosts, secret, control)
            for name, role in INSTANCES.items()
        }

    def ready(self) -> None:
        super().ready()
        self.wait(*self.parts)


def _instance(
    name: str, role: str, model: Path, folder: Path, hosts: Hosts, secret: Path, control: str
) -> Process:
    address = hosts.addresses[name]
    return Process(
        ["vllm.entrypoints.cli.main", "serve", str(model), *SERVE, "--role", role,
         "--distributed-executor-backend", UNIPROC, "--host", address, "--port", str(HTTP_PORT),
         "--tetri-instance", name, "--tetri-kv-port", str(KV_PORT), "--tetri-control", control,
         "--tetri-secret-file", str(secret),
         "--tetri-link", "tcp",  # they share memory, which no cut of the network touches
         "--tetri-arena-bytes", str(ARENA_BYTES), "--tetri-chunk-size", str(CHUNK),
         "--tetri-transfer-timeout", str(TRANSFER_TIMEOUT_S),
         "--tetri-hold-timeout", str(HOLD_TIMEOUT_S)],
        folder / f"{name}.log",
        within=hosts.within(name),
        VLLM_HOST_IP=address,
        **PASSIVE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def net() -> Iterator[Hosts]:
    require_hosts()
    with hosts("router", "prefill-0", "decode-0", "decode-1", "here") as made:
        yield made


@pytest.fixture(scope="module")
def _started(
    net: Hosts, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Hosted, list[Answer]]]:
    folder = tmp_path_factory.mktemp("hosts")
    secret = folder / "secret"
    assert cli.main(["secret", str(secret)]) == 0
    with running(Hosted(tiny_llama, folder, net, secret)) as cluster:
        yield cluster, asyncio.run(_well(cluster))
        cluster.audit()


async def _well(cluster: Hosted) -> list[Answer]:
    """What a cluster answers of which nothing is cut."""
    found = [await ask(cluster.url, body) for body in BODIES]
    assert all(answer.is_complete for answer in found), found
    return found


@pytest.fixture
def cluster(net: Hosts, _started: tuple[Hosted, list[Answer]]) -> Iterator[Hosted]:
    """Whole and at rest, before and after."""
    _started[0].rest(FREED_S)
    try:
        yield _started[0]
    finally:
        net.mend()


@pytest.fixture
def expected(_started: tuple[Hosted, list[Answer]]) -> list[Answer]:
    return _started[1]


async def cut_for(
    net: Hosts, cluster: Hosted, expected: list[Answer], cut: Callable[[], None], seconds: float
) -> tuple[Load, float, float]:
    """Cut in the middle of streams, mend, wait until all serve; the load, begin and end."""
    async with load(cluster.url, BODIES, expected, CLIENTS) as clients:
        decodes = ("decode-0", "decode-1")
        await until(lambda: {answer.decode for answer in clients.all} >= {*decodes}, "both decode")
        cut()
        begin_s = time.monotonic()
        await asyncio.sleep(seconds)
        net.mend()
        end_s = time.monotonic()
        for name in cluster.parts:
            await until(lambda name=name: cluster.state_of(name) == "ready", f"{name} is back", 30)
        for name in decodes:
            await until(partial(clients.has_served, name, end_s), f"{name} serves again", 40)
    assert not clients.wrong
    pauses = sorted((answer.pause_s for answer in clients.all), reverse=True)
    print(f"\n{len(clients.all)} requests, {len(clients.failed)} errors, waits {pauses[:6]}")
    await asyncio.to_thread(cluster.rest, FREED_S)
    return clients, begin_s, end_s


CUTS: dict[str, tuple[Callable[[Hosts], None], float]] = {
    "decode host": (lambda net: net.isolate("decode-0"), 8.0),
    # Connections are half open: one end believes in them, the other hears nothing.
    "to the router": (lambda net: net.cut("decode-0", "router"), 12.0),
    "from the router": (lambda net: net.cut("router", "decode-0"), 12.0),
}


@pytest.mark.parametrize("name", CUTS)
async def test_a_decode_host_is_cut_off(
    net: Hosts, cluster: Hosted, expected: list[Answer], name: str
) -> None:
    cut, seconds = CUTS[name]
    clients, _, _ = await cut_for(net, cluster, expected, lambda: cut(net), seconds)
    assert not clients.failed
    longest_s = max(answer.pause_s for answer in clients.all)
    assert longest_s < NOTICED_S + TRANSFER_TIMEOUT_S + WORK_S


async def test_two_instances_are_parted(
    net: Hosts, cluster: Hosted, expected: list[Answer]
) -> None:
    """The router reaches both."""
    clients, begin_s, end_s = await cut_for(
        net, cluster, expected, lambda: net.part("prefill-0", "decode-0"), 20.0
    )
    assert not clients.failed
    assert max(answer.pause_s for answer in clients.all) < TRANSFER_TIMEOUT_S + WORK_S
    hit = [a for a in clients.all if a.end_s >= begin_s and a.begin_s <= end_s]
    late = [answer for answer in hit if answer.pause_s > TRANSFER_TIMEOUT_S - 1]
    assert len(late) <= len(hit) / 2, "the instance that cannot be reached is avoided"


async def test_the_router_is_cut_from_all(
    net: Hosts, cluster: Hosted, expected: list[Answer]
) -> None:
    """Its clients are on its side of the cut."""

    def cut() -> None:
        for name in cluster.parts:
            net.part("router", name)

    clients, _, end_s = await cut_for(net, cluster, expected, cut, 8.0)
    assert {answer.status for answer in clients.failed} <= {200, 502, 503, 504}
    assert not [answer for answer in clients.failed if answer.begin_s > end_s + 5]
    last_s = max(answer.end_s for answer in clients.all if answer.begin_s < end_s)
    assert last_s < end_s + WORK_S + 12
