"""A client that leaves takes everything with it (invariant 3)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.e2e.client import ask, until
from tests.e2e.cluster import Cluster, Stock
from tests.e2e.prompts import chat, completion

pytestmark = pytest.mark.e2e


async def leave_when(
    cluster: Cluster, bodies: list[dict[str, Any]], is_time: Callable[[], bool]
) -> None:
    """Send all, drop every connection once the moment has come."""
    tasks = [asyncio.create_task(ask(cluster.url, body)) for body in bodies]
    await until(is_time, "the moment came", 60)
    assert not all(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_mid_prefill(cluster: Cluster, stream: bool) -> None:
    bodies = [completion(1500 - i, stream=stream) for i in range(8)]
    for body in bodies:
        body["prompt"] = [len(body["prompt"]) % 900 + 10, *body["prompt"][1:]]
    await leave_when(cluster, bodies, lambda: "prefilling" in cluster.phases())
    cluster.rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_mid_decode(cluster: Cluster, stream: bool) -> None:
    bodies = [completion(200 + i, stream=stream, max_tokens=1800) for i in range(4)]
    bodies.append(chat(50, stream=stream, max_tokens=1800, ignore_eos=True))
    await leave_when(cluster, bodies, lambda: cluster.instances()["decode-0"]["running"] >= 3)
    cluster.rest()


async def test_at_random_moments(cluster: Cluster, stock: Stock) -> None:
    """Wherever the cut falls, nothing stays and the next answer is right."""
    for delay_ms in range(0, 300, 25):
        bodies = [completion(400 + delay_ms, stream=delay_ms % 2 == 0, max_tokens=50)]
        with suppress(TimeoutError):  # a fast machine may be done before
            async with asyncio.timeout(delay_ms / 1000):
                await ask(cluster.url, bodies[0])
    cluster.rest()
    body = completion(333)
    assert (await ask(cluster.url, body)).same_as(await ask(stock.url, body))
