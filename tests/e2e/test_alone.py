"""A cluster whose KV cannot be handed over serves what stock vLLM serves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.e2e.client import ask
from tests.e2e.cluster import Cluster, Stock, get, side_by_side
from tests.e2e.prompts import completion
from tests.tiny_vision import tiny_vision

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

WHY = "its media have no names without caches of them and of prefixes"
SERVE = ("--mm-processor-cache-gb", "0", "--no-enable-prefix-caching")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stock, Cluster]]:
    folder, model = tmp_path_factory.mktemp("alone"), tiny_vision()
    stock = Stock(model, folder, serve=SERVE)
    with side_by_side(stock, Cluster(model, folder, serve=SERVE)) as pair:
        yield pair
        pair[1].audit()


async def test_every_instance_answers_as_stock_does(both: tuple[Stock, Cluster]) -> None:
    stock, cluster = both
    asked = [completion(tokens) for tokens in (5, 64, 200, 300, 500, 700)]
    replies = await asyncio.gather(*(ask(cluster.url, body) for body in asked))
    for body, reply in zip(asked, replies, strict=True):
        assert reply.status == 200
        assert reply.same_as(await ask(stock.url, body))
    loads = cluster.instances().values()
    assert all(load["decodes_done"] > 0 for load in loads)
    assert all(load["prefills_done"] == 0 == load["arena_total_bytes"] for load in loads)


def test_who_is_alone_is_told(both: tuple[Stock, Cluster]) -> None:
    _, cluster = both
    told = get(f"{cluster.url}/tetri/v1/instances")["apart"]
    assert sorted(told) == [
        f"{name} exchanges no KV, since {WHY}" for name in sorted(cluster.instances())
    ]
    for name in cluster.instances():
        log = (cluster.logs / f"{name}.log").read_text()
        assert log.count("serves every request alone") == 1
    router = (cluster.logs / "router.log").read_text()
    assert router.count("served aggregated") == len(told)
