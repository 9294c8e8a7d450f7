"""Invariant 1: greedy output through the cluster equals one stock instance."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.client import Answer, ask, ask_all, until
from tests.e2e.cluster import Cluster, Stock, metrics
from tests.e2e.prompts import LENGTHS, STREAM, chat, completion
from vllm_tetri.router.merged import read_families

pytestmark = pytest.mark.e2e

CHATS = (1, 40, 120, 400)
COUNTED = (  # vLLM's counters
    "prompt_tokens", "prompt_tokens_by_source", "generation_tokens", "request_success"
)  # fmt: skip
OBSERVED = (  # and histograms, whose sums of tokens or whose counts are the same
    "time_to_first_token_seconds_count e2e_request_latency_seconds_count "
    "iteration_tokens_total_sum request_generation_tokens_sum request_prompt_tokens_sum"
)


def bodies(**options: Any) -> list[dict[str, Any]]:
    return [completion(n, **options) for n in LENGTHS] + [chat(n, **options) for n in CHATS]


def assert_equal(ours: list[Answer], stock: list[Answer], asked: list[dict[str, Any]]) -> None:
    for mine, theirs, body in zip(ours, stock, asked, strict=True):
        size = len(body.get("prompt", "")) or len(body["messages"][0]["content"])
        assert theirs.token_ids
        assert mine.same_as(theirs), f"{size}: {mine} != {theirs}"
        assert mine.headers["x-tetri-prefill"] == "prefill-0", body
        is_over = len(theirs.token_ids) == 1  # then there is nothing to decode
        assert mine.headers["x-tetri-decode"] == ("prefill-0" if is_over else "decode-0")


async def assert_equal_one_by_one(
    cluster: Cluster, stock: Stock, asked: list[dict[str, Any]]
) -> None:
    async def one_by_one(url: str) -> list[Answer]:
        return [await ask(url, body) for body in asked]

    ours, theirs = await asyncio.gather(one_by_one(cluster.url), one_by_one(stock.url))
    assert_equal(ours, theirs, asked)


async def test_alone(stock: Stock, cluster: Cluster) -> None:
    cluster.audit()  # the last reports on earlier requests have come
    before = cluster.instances()["decode-0"]
    asked = bodies()
    await assert_equal_one_by_one(cluster, stock, asked)
    cluster.audit()
    after = cluster.instances()["decode-0"]
    assert after["decodes_done"] - before["decodes_done"] == len(asked)


async def test_again_with_prefix_cache_hits_on_both_sides(stock: Stock, cluster: Cluster) -> None:
    asked = [completion(n) for n in (300, 1000, 1500)]
    for body in asked:
        body["prompt"] = [*asked[-1]["prompt"][: len(body["prompt"]) - 7], 5, 6, 7, 8, 9, 10, 11]
    for _ in range(2):
        await assert_equal_one_by_one(cluster, stock, asked)


async def test_streamed(stock: Stock, cluster: Cluster) -> None:
    asked = bodies(**STREAM)[::2]
    await assert_equal_one_by_one(cluster, stock, asked)


def counts(url: str) -> dict[str, float]:
    """vLLM's counts of requests and tokens; of requests by how they ended."""
    series = read_families([metrics(url)])
    names = {f"vllm:{name}_total" for name in COUNTED} | {f"vllm:{n}" for n in OBSERVED.split()}
    return {
        key: sum(values)
        for family in series.values()
        for key, values in family.series.items()
        if key.partition("{")[0] in names
    }


async def test_vllms_metrics_count_a_split_request_once(stock: Stock, cluster: Cluster) -> None:
    before = [counts(each.url) for each in (stock, cluster)]
    asked = [completion(n, max_tokens=each) for n in (40, 700) for each in (1, 2, 9)]
    await assert_equal_one_by_one(cluster, stock, [*asked, chat(40, **STREAM)])

    def grown(url: str, since: dict[str, float]) -> dict[str, float]:
        return {key: value - since.get(key, 0) for key, value in counts(url).items()}

    theirs = grown(stock.url, before[0])
    assert theirs
    await until(lambda: grown(cluster.url, before[1]) == theirs, "the counts are those of stock")


@pytest.mark.parametrize("options", [{}, STREAM], ids=["whole", "streamed"])
async def test_eight_at_once(stock: Stock, cluster: Cluster, options: dict[str, Any]) -> None:
    asked = bodies(**options)
    for start in range(0, len(asked), 8):
        group = asked[start : start + 8]
        ours = await ask_all(cluster.url, group)
        theirs = await ask_all(stock.url, group)
        assert_equal(ours, theirs, group)
