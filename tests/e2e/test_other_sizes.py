"""Prefill and decode instances of different tensor-parallel sizes, either way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.client import Answer, ask, ask_all, flipped, order, split_once
from tests.e2e.cluster import ByHand, Stock, running
from tests.e2e.prompts import STREAM, completion
from tests.models.families import FAMILIES

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

WORKERS = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
LENGTHS = (3, 64, 129, 200, 513, 1025)


@contextmanager
def sizes(model: Path, folder: Path) -> Iterator[ByHand]:
    """An instance of one worker for prefill, and one of two for decode; ready when waited for."""
    with running(ByHand(folder, "--silent-after", "10")) as cluster:
        cluster.start("one", "prefill", model)
        cluster.start("two", "decode", model, *WORKERS)
        yield cluster


async def turn(cluster: ByHand) -> None:
    """Let both instances take the role of the other."""
    for name, role in (("one", "both"), ("two", "prefill"), ("one", "decode")):
        status, answer = await order(cluster.url, name, role)
        assert status == 202, answer
        assert (await flipped(cluster, name, answer["epoch"]))["role"] == role


async def answers_of(
    url: str, lengths: tuple[int, ...], salt: str, *, is_together: bool = False
) -> list[Answer]:
    """Answers to prompts without hits of prefixes."""
    bodies = [completion(n, max_tokens=16, cache_salt=f"{salt} {n}", **STREAM) for n in lengths]
    return await ask_all(url, bodies) if is_together else [await ask(url, body) for body in bodies]


async def handed_over(
    cluster: ByHand, lengths: tuple[int, ...], prefill: str, decode: str, *, is_together: bool
) -> tuple[list[Answer], int, int]:
    """Answers of both, and how many bytes of KV were sent and loaded for them."""

    def counts() -> tuple[int, int]:
        rows = cluster.instances()
        assert rows[decode]["kv_loads_failed"] == 0
        return rows[prefill]["kv_bytes_sent"], rows[decode]["kv_bytes_received"]

    await split_once(cluster)
    await asyncio.to_thread(cluster.audit)  # its bytes are counted
    before, salt = counts(), f"{prefill} {is_together}"
    found = await answers_of(cluster.url, lengths, salt, is_together=is_together)
    ran = {(each.headers["x-tetri-prefill"], each.decode) for each in found}
    assert ran == {(prefill, decode)}
    await asyncio.to_thread(cluster.audit)
    sent, loaded = (now - then for now, then in zip(counts(), before, strict=True))
    return found, sent, loaded


def failures(folder: Path) -> list[str]:
    """What the instances say about transfers and loads that failed."""
    lines = [line for name in ("one", "two") for line in (folder / f"{name}.log").open()]
    return [line for line in lines if "KV" in line and "failed" in line]


async def test_heads_go_either_way_and_answers_equal_stock(tmp_path: Path) -> None:
    model, volumes = FAMILIES["Llama-3"].make(), dict[tuple[str, bool], tuple[int, int]]()
    stock = Stock(model, tmp_path)
    with sizes(model, tmp_path) as cluster:
        with running(stock):
            expected = await answers_of(stock.url, LENGTHS, "stock")
        cluster.wait("one", "two")
        for prefill, decode in (("one", "two"), ("two", "one")):
            for together in (False, True):
                found, sent, loaded = await handed_over(
                    cluster, LENGTHS, prefill, decode, is_together=together
                )
                for mine, other in zip(found, expected, strict=True):
                    assert mine.same_as(other), f"{mine} != {other}"
                volumes[prefill, together] = sent, loaded
            if prefill == "one":
                await turn(cluster)
        each_once = len({each for both in volumes.values() for each in both}) == 1
        assert each_once, (volumes, failures(tmp_path))
        await asyncio.to_thread(cluster.audit)
