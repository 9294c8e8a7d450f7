"""Prefixes are fetched from other instances, and the answers stay those of one stock instance."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from examples.smollm2 import prepare
from tests.e2e.client import Answer, ask, until
from tests.e2e.cluster import MODEL, Cluster, Stock, post, side_by_side
from tests.e2e.prompts import text_prompt
from vllm_tetri.types import Mode

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

SERVE = ("--kv-cache-memory-bytes", str(1 << 29), "--tetri-chunk-size", "256")
ROLES = ("--prefill", "2", "--decode", "1")
CLIENTS = 4


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stock, Cluster]]:
    model, folder = prepare("float32"), tmp_path_factory.mktemp("fetch")
    stock = Stock(model, folder, serve=SERVE[:2])
    cluster = Cluster(model, folder, roles=ROLES, serve=SERVE, arena_bytes=1 << 29)
    with side_by_side(stock, cluster) as pair:
        yield pair
        pair[1].audit()


def turns(seed: int, shared: str) -> list[list[dict[str, str]]]:
    """What a user says in each turn; conversations of one system prompt."""
    system = {"role": "system", "content": shared}
    questions = [text_prompt(10 + seed + 30 * turn) for turn in range(3)]
    return [[system], *([{"role": "user", "content": each}] for each in questions)]


async def converse(url: str, seed: int, shared: str) -> list[Answer]:
    messages: list[dict[str, str]] = []
    found = []
    first, *others = turns(seed, shared)
    messages += first
    for each in others:
        messages += each
        body: dict[str, Any] = {
            "model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "stream": True,
        }  # fmt: skip
        found.append(await ask(url, body))
        messages.append({"role": "assistant", "content": found[-1].text})
    return found


async def hold(cluster: Cluster, shared: str) -> list[list[Answer]]:
    """One conversation, whose system prompt then lies somewhere, and others at once."""
    first = await converse(cluster.url, 0, shared)
    await asyncio.sleep(0.3)  # its caches are reported
    others = (converse(cluster.url, seed, shared) for seed in range(1, CLIENTS + 1))
    return [first, *await asyncio.gather(*others)]


async def assert_as_stock(stock: Stock, ours: list[list[Answer]], shared: str) -> None:
    for seed, answers in enumerate(ours):
        theirs = await converse(stock.url, seed, shared)
        for mine, other in zip(answers, theirs, strict=True):
            assert (mine.error, mine.token_ids) == (None, other.token_ids)


def total(cluster: Cluster, field: str) -> int:
    return sum(each[field] for each in cluster.instances().values())


@pytest.mark.parametrize("mode", [Mode.SPLIT, Mode.ADAPTIVE])
async def test_what_another_instance_holds_is_fetched(
    both: tuple[Stock, Cluster], mode: Mode
) -> None:
    stock, cluster = both
    post(f"{cluster.url}/tetri/v1/mode", {"mode": mode})
    before, shared = total(cluster, "fetched_tokens"), f"{mode}: {text_prompt(450)}"
    ours = await hold(cluster, shared)
    await assert_as_stock(stock, ours, shared)
    await until(lambda: total(cluster, "fetched_tokens") > before, "something was fetched", 5)
    print(cluster.instances())
