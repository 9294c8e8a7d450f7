"""Prefixes are fetched from other instances, and the answers stay those of one stock instance."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from examples.smollm2 import prepare
from tests.e2e.client import Answer, ask, until
from tests.e2e.cluster import Cluster, Stock, side_by_side
from tests.e2e.prompts import chat, completion, text_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

SERVE = ("--kv-cache-memory-bytes", str(1 << 30), "--tetri-chunk-size", "256")
ROLES = ("--prefill", "2", "--decode", "1")
SHORT: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stock, Cluster]]:
    model, folder = prepare("float32"), tmp_path_factory.mktemp("fetch")
    stock = Stock(model, folder, serve=SERVE[:2])
    cluster = Cluster(model, folder, roles=ROLES, serve=SERVE, arena_bytes=1 << 29)
    with side_by_side(stock, cluster) as pair:
        yield pair


def fetched(cluster: Cluster) -> int:
    return sum(each["fetched_tokens"] for each in cluster.instances().values())


async def first_turn(url: str, seed: int, max_tokens: int) -> tuple[list[dict[str, str]], Answer]:
    """A conversation so far, and the answer that it ends with."""
    text = f"{seed}: {text_prompt(700 + seed)}"
    body = chat(1, **SHORT | {"max_tokens": max_tokens})
    messages = [{"role": "user", "content": text}]
    answer = await ask(url, {**body, "messages": messages})
    return [*messages, {"role": "assistant", "content": answer.text}], answer


def second_turn(messages: list[dict[str, str]]) -> dict[str, Any]:
    question = {"role": "user", "content": "What did I say?"}
    return {**chat(1, **SHORT), "messages": [*messages, question], "stream": True}


@asynccontextmanager
async def busy(cluster: Cluster, name: str, seed: int) -> AsyncIterator[asyncio.Task[Answer]]:
    """An instance computes a long prompt, of a completion that ends with it."""
    for length in count(1900 + 10 * seed):
        task = asyncio.create_task(ask(cluster.url, completion(length, **SHORT)))
        places: list[str] = []
        while not places:
            rows = await asyncio.to_thread(cluster.requests)
            places = [row["prefill"] for row in rows if row["prefill"]]
        if places == [name]:
            yield task
            return
        await task


async def test_a_busy_holder_is_relieved_and_what_decode_wrote_comes_back(
    both: tuple[Stock, Cluster],
) -> None:
    stock, cluster = both
    for seed in range(4):  # another program may take so much time that a fetch does not pay
        before = fetched(cluster)
        messages, first = await first_turn(cluster.url, seed, 100)
        await asyncio.sleep(0.5)  # caches are reported
        async with busy(cluster, first.headers["x-tetri-prefill"], seed) as other:
            second = await ask(cluster.url, second_turn(messages))
            await other
        theirs, expected = await first_turn(stock.url, seed, 100)
        assert messages == theirs
        assert second.token_ids == (await ask(stock.url, second_turn(theirs))).token_ids
        assert first.token_ids == expected.token_ids
        if fetched(cluster) > before:
            break
    else:
        raise AssertionError("nothing was fetched")
    cluster.audit()


async def test_a_holder_that_is_killed_during_a_fetch_fails_no_request(
    both: tuple[Stock, Cluster],
) -> None:
    stock, cluster = both
    messages, first = await first_turn(cluster.url, 9, 1)  # so only the first instance holds it
    await asyncio.sleep(0.5)
    holder = first.headers["x-tetri-prefill"]
    async with busy(cluster, holder, 9) as other:
        engine = await asyncio.to_thread(cluster.engine, holder)
        engine.send_signal(signal.SIGSTOP)
        second = asyncio.create_task(ask(cluster.url, second_turn(messages)))
        await until(lambda: len(cluster.requests()) == 2, "both are under way")
        engine.send_signal(signal.SIGKILL)
        answers = [await second, await other]
    assert [each.error for each in answers] == [None, None]
    assert answers[0].token_ids == (await ask(stock.url, second_turn(messages))).token_ids
    assert answers[1].is_complete
    await until(lambda: cluster.are_ready(3), "all are ready again", 240)
    cluster.audit()
