"""Long outputs are copied to a second instance, which goes on after a death and computes a tail."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks.cluster import metric
from examples.benchmarks.faults import send
from tests.e2e.client import until
from tests.e2e.cluster import Cluster, Stock, running
from tests.e2e.compare import difference, merged, replies_to
from tests.e2e.prompts import STREAM, chat, completion

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OWN = {"roles": ("--prefill", "1", "--decode", "2", "--mirror", "32", "--moves", "off")}
REST_S, IS_AUDITED = 6, True
TOKENS, PROMPT = 700, 500
BODIES = [
    completion(900, max_tokens=TOKENS, **STREAM),
    completion(800, max_tokens=TOKENS, temperature=0.9, seed=5, **STREAM),
    chat(300, max_tokens=TOKENS, ignore_eos=True, **STREAM),
]


async def replies(url: str) -> list[Any]:
    return list(map(merged, await replies_to(url, BODIES)))


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with running(Stock(tiny_llama, tmp_path_factory.mktemp("stock"))) as stock:
        return asyncio.run(replies(stock.url))


def rows(cluster: Cluster) -> list[Any]:
    """The requests of which there is a copy, with the longest first."""
    found = [row for row in cluster.requests() if row["mirror"]]
    return sorted(found, key=lambda row: -row["mirror"]["num_tokens"])


async def test_what_follows_a_copy_is_computed_again(own: Cluster, expected: list[Any]) -> None:
    asking = asyncio.create_task(replies(own.url))
    await until(lambda: rows(own), "one has a copy")
    longest = rows(own)[0]
    dead, second = longest["decode"], longest["mirror"]
    assert second["instance"] != dead
    assert second["num_tokens"] > longest["prompt_tokens"] > PROMPT / 2, longest
    tail = longest["prompt_tokens"] + longest["generated"] - second["num_tokens"]
    before = own.instances()[second["instance"]]["prompt_tokens_done"]
    send(own.processes(dead), signal.SIGKILL)
    for mine, theirs in zip(await asking, expected, strict=True):
        assert not difference(mine, theirs)
    assert metric(own.url, "tetri_mirrors_total", 'outcome="used"') > 0
    computed = own.instances()[second["instance"]]["prompt_tokens_done"] - before
    assert computed < tail + PROMPT / 2  # else all of it is
    await until(lambda: own.are_ready(3), "all are ready again", 60)


async def test_an_output_does_not_need_its_copy(own: Cluster, expected: list[Any]) -> None:
    asking = asyncio.create_task(replies(own.url))
    await until(lambda: rows(own), "one has a copy")
    longest = rows(own)[0]
    second = longest["mirror"]["instance"]
    others = {row["id"] for row in own.requests() if row["decode"] != second}
    send(own.processes(second), signal.SIGKILL)
    await until(lambda: own.state_of(second) != "ready", "it is gone")
    assert longest["id"] in others
    for mine, theirs in zip(await asking, expected, strict=True):
        assert not difference(mine, theirs)
    await until(lambda: own.are_ready(3), "all are ready again", 60)
