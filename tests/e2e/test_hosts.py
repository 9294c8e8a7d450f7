"""The network between hosts is cut and mended, with real engines on network namespaces.

A router, a prefill and two decode instances, each on an address of its own; the cut drops
packets silently (`tests/faults/hosts.py`), so that nobody is told. Run it as root, with -s
for what clients saw.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hosted import (
    TRANSFER_TIMEOUT_S,
    Clients,
    Hosted,
    Seen,
    ask,
    busy,
    eventually,
    hosted,
)
from tests.e2e.prompts import completion
from tests.faults.hosts import Hosts, hosts, why_not
from vllm_tetri import cli

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

STREAM = {"stream": True}
BODIES: list[dict[str, Any]] = [
    *[completion(40 + 90 * index, max_tokens=300, **STREAM) for index in range(4)],
    *[completion(50 + 130 * index, max_tokens=60 + 30 * index) for index in range(4)],
]
CUT_S = 8.0
# At the latest, silence is noticed after three times --silent-after (1 s).
NOTICED_S = 3.0
# To compute prompt and tokens so far, beside five other requests on two shared cores.
WORK_S = 8.0
FREED_S = 20.0


@pytest.fixture(scope="module")
def net() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with hosts("router", "prefill-0", "decode-0", "decode-1", "here") as made:
        yield made


@pytest.fixture(scope="module")
def _started(
    net: Hosts, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Hosted, list[Seen]]]:
    folder = tmp_path_factory.mktemp("hosts")
    secret = folder / "secret"
    assert cli.main(["secret", str(secret)]) == 0
    with hosted(Hosted(tiny_llama, folder, net, secret)) as cluster:
        yield cluster, asyncio.run(_well(cluster))
        cluster.audit()


async def _well(cluster: Hosted) -> list[Seen]:
    """What a cluster answers of which nothing is cut."""
    found = [await ask(cluster.url, index, body) for index, body in enumerate(BODIES)]
    assert all(seen.is_whole and not seen.error for seen in found), found
    return found


@pytest.fixture
def cluster(net: Hosts, _started: tuple[Hosted, list[Seen]]) -> Iterator[Hosted]:
    """Whole and at rest, before and after."""
    _started[0].rest(FREED_S)
    try:
        yield _started[0]
    finally:
        net.mend()


@pytest.fixture
def expected(_started: tuple[Hosted, list[Seen]]) -> list[Seen]:
    return _started[1]


def report(what: str, clients: Clients, since_s: float, until_s: float) -> None:
    hit = [seen for seen in clients.since(since_s) if seen.begin_s <= until_s]
    pauses = sorted((seen.pause_s for seen in hit), reverse=True)
    failed = [seen for seen in hit if seen.error]
    longest = " ".join(f"{pause:.1f}" for pause in pauses[:6])
    print(f"\n{what}: {len(hit)} requests, longest waits {longest} s; {len(failed)} errors")
    for words, num in Counter((each.status, each.error) for each in failed).items():
        print("   ", num, "times", *words)


async def cut_for(
    net: Hosts,
    cluster: Hosted,
    clients: Clients,
    cut: Callable[[], None],
    *,
    seconds: float = CUT_S,
) -> tuple[float, float]:
    """Cut in the middle of streams, mend, and wait until all are ready; begin and end."""
    await eventually(
        lambda: {seen.decode for seen in clients.all} >= {"decode-0", "decode-1"},
        "both decode instances are in use",
        60,
    )
    cut()
    begin_s = time.monotonic()
    await asyncio.sleep(seconds)
    net.mend()
    end_s = time.monotonic()
    for name in cluster.parts:
        took_s = await eventually(partial(cluster.is_ready, name), f"{name} is back", 30)
        print(f"\n{name} is ready {took_s:.1f} s later", end="")
    took_s = await eventually(
        lambda: all(clients.has_served(name, end_s) for name in ("decode-0", "decode-1")),
        "both decode instances serve again",
        40,
    )
    print(f"\nboth serve {time.monotonic() - end_s:.1f} s after the cut was mended", end="")
    return begin_s, end_s


async def freed(cluster: Hosted) -> None:
    begin_s = time.monotonic()
    await asyncio.to_thread(cluster.rest, FREED_S)
    print(f"at rest {time.monotonic() - begin_s:.1f} s after the last answer")


async def test_a_decode_host_is_cut_off(net: Hosts, cluster: Hosted, expected: list[Seen]) -> None:
    async with busy(cluster.url, BODIES, expected) as clients:
        begin_s, end_s = await cut_for(net, cluster, clients, lambda: net.isolate("decode-0"))
    report("decode host cut off", clients, begin_s, end_s)
    assert not clients.wrong
    assert not [seen for seen in clients.all if seen.error]
    assert max(seen.pause_s for seen in clients.all) < NOTICED_S + TRANSFER_TIMEOUT_S + WORK_S
    await freed(cluster)


async def test_two_instances_are_parted(net: Hosts, cluster: Hosted, expected: list[Seen]) -> None:
    """The router reaches both."""

    def part() -> None:
        net.part("prefill-0", "decode-0")

    async with busy(cluster.url, BODIES, expected) as clients:
        begin_s, end_s = await cut_for(net, cluster, clients, part, seconds=20)
    report("prefill and decode host parted", clients, begin_s, end_s)
    assert not clients.wrong
    assert not [seen for seen in clients.all if seen.error]
    assert max(seen.pause_s for seen in clients.all) < TRANSFER_TIMEOUT_S + WORK_S
    hit = [seen for seen in clients.since(begin_s) if seen.begin_s <= end_s]
    late = [seen for seen in hit if seen.pause_s > TRANSFER_TIMEOUT_S - 1]
    assert len(late) <= len(hit) / 2, "the instance that cannot be reached is avoided"
    await freed(cluster)


@pytest.mark.parametrize("way", ["to the router", "from the router"])
async def test_one_direction_is_lost(
    net: Hosts, cluster: Hosted, expected: list[Seen], way: str
) -> None:
    """Connections are half open: one end believes in them, the other hears nothing."""

    def cut() -> None:
        ends = ("decode-0", "router") if way == "to the router" else ("router", "decode-0")
        net.cut(*ends)

    async with busy(cluster.url, BODIES, expected) as clients:
        begin_s, end_s = await cut_for(net, cluster, clients, cut, seconds=12)
    report(f"half open, {way} lost", clients, begin_s, end_s)
    assert not clients.wrong
    assert not [seen for seen in clients.all if seen.error]
    assert max(seen.pause_s for seen in clients.all) < NOTICED_S + TRANSFER_TIMEOUT_S + WORK_S
    await freed(cluster)


async def test_the_router_is_cut_from_all(
    net: Hosts, cluster: Hosted, expected: list[Seen]
) -> None:
    """Its clients are on its side of the cut."""

    def cut() -> None:
        for name in cluster.parts:
            net.part("router", name)

    async with busy(cluster.url, BODIES, expected) as clients:
        begin_s, end_s = await cut_for(net, cluster, clients, cut)
    report("router cut off", clients, begin_s, end_s)
    assert not clients.wrong
    failed = [seen for seen in clients.all if seen.error]
    assert all(clients.is_prefix(seen) for seen in failed)
    assert all(seen.status in (200, 502, 503, 504) for seen in failed), failed
    assert not [seen for seen in failed if seen.begin_s > end_s + 5]
    assert max(seen.end_s for seen in clients.all if seen.begin_s < end_s) < end_s + WORK_S + 12
    await freed(cluster)
