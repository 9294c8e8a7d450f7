"""Ten times more than a cluster can take: nothing grows, and nothing is left."""

from __future__ import annotations

import asyncio
from collections import Counter

import aiohttp
import pytest

from tests.router.fakes import Cluster, cluster, eventually, held_back, let_go, pair
from vllm_tetri.router.auth import Limits
from vllm_tetri.types import Mode

KEYS = ("greedy", "modest")
MOST = 40
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")


class Sizes:
    """What the router holds, at its largest."""

    def __init__(self, made: Cluster) -> None:
        self._made = made
        self.in_flight = self.connections = self.upstream = 0

    def look(self) -> None:
        made = self._made
        self.in_flight = max(self.in_flight, len(made.scheduler.table))
        self.connections = max(self.connections, len(made.listener.connections))
        self.upstream = max(self.upstream, len(made.scheduler.upstream.http.connections))


async def ask(made: Cluster, client: aiohttp.ClientSession, number: int) -> tuple[str, int]:
    key = KEYS[number % 11 == 0]
    is_chat = number % 3 == 1
    body = {"model": "tiny", "prompt": "x", "messages": [], "stream": number % 2 == 0 or is_chat}
    headers = {"Authorization": f"Bearer {key}"}
    url = made.url + PATHS[number % 3]
    async with client.post(url, json=body, headers=headers) as response:
        answer = await response.read()
        if response.status != 200:
            assert response.status in (429, 503), answer
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["message"]
        return key, response.status


@pytest.mark.parametrize("mode", list(Mode))
async def test_by_default_every_request_waits_for_its_response(mode: Mode) -> None:
    """As with stock vLLM: neither number, nor tokens, nor time in the queue lead to a refusal."""
    instances = held_back(*pair())
    async with cluster(*instances, keys=KEYS, mode=mode) as made:
        for name in ("p", "d"):
            await made.report(name, queued_prefill_tokens=10**9, waiting=10**6)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            tasks = [asyncio.create_task(ask(made, client, n)) for n in range(200)]
            await eventually(lambda: len(made.scheduler.table) == 200)
            let_go(*instances)
            assert {status for _, status in await asyncio.gather(*tasks)} == {200}


async def test_ten_times_too_much_is_refused_at_once_and_leaves_nothing() -> None:
    instances = held_back(*pair())
    limits = Limits(connections=10 * MOST + 10)
    async with cluster(*instances, keys=KEYS, limits=limits, max_in_flight_each=MOST // 2) as made:
        before = len(asyncio.all_tasks())
        sizes = Sizes(made)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client:
            tasks = [asyncio.create_task(ask(made, client, n)) for n in range(10 * MOST)]

            def is_settled() -> bool:
                sizes.look()
                num_over = sum(task.done() for task in tasks)
                return num_over + len(made.scheduler.table) == len(tasks)

            await eventually(is_settled)
            # Early: refused clients have their response, while nothing has moved on.
            assert sum(task.done() for task in tasks) >= 9 * MOST
            let_go(*instances)
            await eventually(lambda: (sizes.look(), all(task.done() for task in tasks))[1])
            found = Counter([task.result() for task in tasks])
        assert sizes.in_flight <= MOST
        assert sizes.connections <= limits.connections
        assert sizes.upstream <= 2 * MOST + 2  # a leg each, the first and the second, and probes
        num_served = sum(count for (_, status), count in found.items() if status == 200)
        assert found["greedy", 200] >= MOST // 2
        assert found["modest", 200] >= 1
        assert num_served <= MOST

        await eventually(lambda: len(made.listener.connections) == 0)
        await eventually(lambda: len(asyncio.all_tasks()) <= before)
        assert len(made.scheduler.table) == 0
        for name in ("p", "d"):
            assert made.scheduler.table.clients_at(made[name].id).total() == 0
        for key in KEYS:
            assert (await made.ask(headers={"Authorization": f"Bearer {key}"}))[0] == 200
