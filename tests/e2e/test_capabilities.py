"""One pass over what a cluster can do beyond a plain hand-over, in the order of this file.

It is run last, as it exchanges the roles of the cluster that all modules share and leaves one
instance of it. `make test-all` has a module, with clusters of its own, for most of these subjects.
"""

from __future__ import annotations

import asyncio
import signal

import psutil
import pytest

from examples.benchmarks.faults import send
from tests.e2e.client import ask, ask_all, until
from tests.e2e.cluster import Cluster, Stock, get, post
from tests.e2e.prompts import STREAM, completion
from tests.eventually import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BODIES = [
    completion(num_tokens, max_tokens=max_tokens, **options)
    for num_tokens, max_tokens, options in (
        (5, 30, {}),
        (65, 8, STREAM),
        (200, 40, {"temperature": 0.8, "seed": 3}),
        (700, 12, STREAM),
    )
]


async def test_both_routers_give_the_tokens_of_one_instance(cluster: Cluster, stock: Stock) -> None:
    expected = await ask_all(stock.url, BODIES)
    for router in cluster.facts["routers"]:
        for output, reference in zip(await ask_all(router["url"], BODIES), expected, strict=True):
            assert output.same_as(reference)
            assert output.headers["x-tetri-prefill"] == "prefill-0"
            assert output.decode == "decode-0"


@pytest.mark.slow
async def test_what_a_dead_router_asked_for_is_freed_and_the_next_one_serves(
    cluster: Cluster,
) -> None:
    url = cluster.facts["routers"][1]["url"]
    expected = await ask(cluster.url, completion(300))
    streams = [completion(100 + index, max_tokens=1500, stream=True) for index in range(3)]
    prompts = [completion(1500 - index, max_tokens=500) for index in range(6)]
    for index, body in enumerate(prompts):
        body["prompt"] = [index + 10, *body["prompt"][1:]]
    orphans = [asyncio.create_task(ask(url, body)) for body in streams]
    await until(lambda: phases(url).count("decoding") >= 3, "outputs are generated")
    orphans += [asyncio.create_task(ask(url, body)) for body in prompts]
    await until(lambda: "prefilling" in phases(url), "prompts are computed")
    mine = asyncio.create_task(ask(cluster.url, completion(300)))
    send([router_at(cluster, url)], signal.SIGKILL)
    await asyncio.wait(orphans, timeout=20.0)
    assert all(orphan.exception() is not None for orphan in orphans)
    assert (await mine).same_as(expected)
    await asyncio.to_thread(cluster.rest, 20.0)

    def serves() -> bool:
        try:
            rows = get(f"{url}/tetri/v1/instances")["instances"]
        except OSError:
            return False
        return [row["state"] for row in rows] == ["ready", "ready"]

    await until(serves, "the router that was started again")
    assert (await ask(url, completion(300))).same_as(expected)


def phases(url: str) -> list[str]:
    return [row["phase"] for row in get(f"{url}/tetri/v1/requests")["requests"]]


def router_at(cluster: Cluster, url: str) -> psutil.Process:
    port = url.rpartition(":")[2]
    found = [each for each in cluster.tree() if {"router", port} <= set(each.cmdline())]
    return found[-1]  # below its guard


async def test_roles_are_exchanged_while_requests_run(cluster: Cluster, stock: Stock) -> None:
    expected = await ask_all(stock.url, BODIES)
    requests = asyncio.create_task(ask_all(cluster.url, BODIES * 4))
    for name, role in (("prefill-0", "decode"), ("decode-0", "prefill")):
        url = f"{cluster.url}/tetri/v1/instances/{name}/flip"
        await asyncio.to_thread(post, url, {"role": role, "now": True, "force": True})
        await until(
            lambda name=name, role=role: cluster.instances()[name]["role"] == role,
            f"{name} is {role}",
        )
    for output, reference in zip(await requests, expected * 4, strict=True):
        assert output.same_as(reference)
    swapped = await ask(cluster.url, BODIES[0])
    assert swapped.same_as(expected[0])
    assert swapped.headers["x-tetri-prefill"] == "decode-0"
    assert swapped.decode == "prefill-0"


async def test_an_instance_is_drained_and_the_other_one_serves(
    cluster: Cluster, stock: Stock
) -> None:
    expected = await ask(stock.url, BODIES[0])
    post(f"{cluster.url}/tetri/v1/instances/prefill-0/drain", {"force": True})
    eventually(lambda: cluster.state_of("prefill-0") == "gone", 120, "the instance has left")
    assert (await ask(cluster.url, BODIES[0])).same_as(expected)
