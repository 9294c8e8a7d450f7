"""Models with several groups of KV cache and with MLA: equal to stock, also when instances are
killed or change role while they serve. Falcon-H1, which has states, passes too, in two minutes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from examples.benchmarks.faults import send
from tests.e2e.client import (
    Answer,
    ask,
    ask_all,
    assert_same,
    flip,
    load,
    stock_answers,
    struck,
    until,
)
from tests.e2e.cluster import Cluster, running
from tests.e2e.prompts import STREAM, completion
from tests.eventually import eventually
from tests.models.families import FAMILIES, Family

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

SEEDED = {"temperature": 0.9, "seed": 11}
# About the edges of chunks, blocks and windows.
ASKED = [
    completion(n, max_tokens=12, **(SEEDED if n < 64 else {}), **(STREAM if n % 2 else {}))
    for n in (3, 63, 64, 65, 127, 128, 129, 257, 513, 1025)
]
LONG = [completion(200 + 61 * at, max_tokens=200, **STREAM) for at in range(4)]
PROMPTS = [completion(1400 + at, max_tokens=6) for at in range(4)]


@pytest.fixture(
    scope="module", params=["Gemma-3-text", pytest.param("DeepSeek-V2", marks=pytest.mark.long)]
)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def expected(family: Family, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    folder = tmp_path_factory.mktemp("stock")
    return stock_answers(family.make(), folder, [*ASKED, *LONG, *PROMPTS], family.serve)


@pytest.fixture(scope="module")
def started(
    family: Family, tmp_path_factory: pytest.TempPathFactory, expected: list[Answer]
) -> Iterator[Cluster]:
    folder, roles = tmp_path_factory.mktemp("groups"), ("--prefill", "1", "--decode", "2")
    with running(Cluster(family.make(), folder, roles=roles, serve=family.serve)) as cluster:
        yield cluster
        eventually(lambda: cluster.are_ready(3), 120, "all are ready again")
        cluster.audit()


@pytest.fixture
async def cluster(started: Cluster) -> Cluster:
    await until(lambda: started.are_ready(3), "all are ready", 120)
    await asyncio.to_thread(started.rest, 5.0)
    return started


async def test_equal_alone_and_together(cluster: Cluster, expected: list[Answer]) -> None:
    alone = [await ask(cluster.url, body) for body in ASKED[::3]]
    assert_same(alone, expected[: len(ASKED) : 3])
    assert_same(await ask_all(cluster.url, ASKED), expected[: len(ASKED)])
    rows = cluster.instances()
    assert rows["prefill-0"]["kv_bytes_sent"] > 0
    assert [each["kv_loads_failed"] for each in rows.values()] == [0, 0, 0]


async def test_a_role_changes_under_load(cluster: Cluster, expected: list[Answer]) -> None:
    async with load(cluster.url, ASKED, expected[: len(ASKED)], 4) as clients:
        await flip(cluster, "decode-1", "prefill")
        await until(lambda: cluster.instances()["decode-1"]["kv_bytes_sent"] > 0, "it sends KV")
        await flip(cluster, "decode-1", "decode")
        await clients.until_served("decode-1")
    assert (clients.wrong, clients.failed) == ([], [])


async def test_a_decode_instance_is_killed_while_it_streams(
    cluster: Cluster, expected: list[Answer]
) -> None:
    before = cluster.resumed()

    def kill(seen: list[Answer]) -> None:
        send(cluster.processes(seen[0].decode), signal.SIGKILL)

    found = await struck(cluster.url, LONG, kill)
    assert_same(found, expected[len(ASKED) :][: len(LONG)])
    assert cluster.resumed() > before
    await until(lambda: not cluster.are_ready(3), "its end is noticed")


@pytest.mark.long
async def test_the_prefill_instance_is_killed_while_it_computes_prompts(
    cluster: Cluster, expected: list[Answer]
) -> None:
    asking = asyncio.gather(*(ask(cluster.url, body) for body in PROMPTS))

    def is_prefilling() -> bool:
        phases = [each["phase"] for each in cluster.requests()]
        return "prefilling" in phases and cluster.instances()["prefill-0"]["running"] > 0

    await until(is_prefilling, "a prompt is being computed")
    send(cluster.processes("prefill-0"), signal.SIGKILL)
    assert_same(list(await asking), expected[-len(PROMPTS) :])
    await until(lambda: not cluster.are_ready(3), "its end is noticed")
