"""The first token leaves from prefill, once, and the rest is what one instance says."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import psutil
import pytest

from tests.e2e.client import Answer, ask, posted
from tests.e2e.cluster import Cluster, Stock
from tests.e2e.compare import Reply, joined, text_of
from tests.e2e.prompts import LENGTHS, STREAM, chat, completion

pytestmark = pytest.mark.e2e

OWN: dict[str, Any] = {}  # a cluster whose decode instance dies


@asynccontextmanager
async def streamed(url: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
    async with posted(url, body) as response:
        assert response.status == 200
        yield response


async def events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with streamed(url, body) as response:
        return parsed(await response.read())


def parsed(raw: bytes) -> list[dict[str, Any]]:
    return Reply(200, {}, raw).events


async def with_text_first(stock: Stock, make: Any, **options: Any) -> dict[str, Any]:
    """A streamed request whose first token is text that can stand alone."""
    for size in range(90, 190, 9):
        body = make(size, **options)
        text = (await ask(stock.url, {**body, "max_tokens": 1})).text
        if text and "\ufffd" not in text:
            return {**STREAM, **body, "stream": True}
    raise AssertionError("the tiny model never begins with text")


@pytest.mark.parametrize("make", [completion, chat])
async def test_usage_of_every_event_begins_with_one_token(
    stock: Stock, cluster: Cluster, make: Any
) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    body = await with_text_first(stock, make, max_tokens=5)
    ours = await events(cluster.url, body | options)
    theirs = await events(stock.url, body | options)
    role = 1 if make is chat else 0
    assert [each["usage"]["completion_tokens"] for each in ours[: role + 1]] == [0, 1][1 - role :]
    assert {(*each["usage"],) for each in ours[:-1]} == {(*theirs[0]["usage"],)}
    assert joined(ours) == joined(theirs)


@pytest.mark.slow
async def test_texts_of_many_first_tokens(stock: Stock, cluster: Cluster) -> None:
    """Spaces, parts of characters and special tokens come first in some of these."""
    first = set()
    for size in LENGTHS[:16]:
        for seed in range(4):
            body = completion(size, **STREAM, temperature=2.0, seed=seed, max_tokens=6)
            ours, theirs = await events(cluster.url, body), await events(stock.url, body)
            assert joined(ours) == joined(theirs), (size, seed)
            first.add(text_of(theirs[0]))
    assert "" in first or any("\ufffd" in text for text in first)
    assert len(first) > 20


@pytest.mark.parametrize("options", [{}, STREAM], ids=["whole", "streamed"])
@pytest.mark.parametrize("make", [completion, chat])
async def test_a_first_token_that_is_the_last_never_gets_to_decode(
    stock: Stock, cluster: Cluster, make: Any, options: dict[str, Any]
) -> None:
    usual: Answer = await ask(stock.url, make(150, max_tokens=1, ignore_eos=True))
    token, text = usual.token_ids[0], usual.text
    cluster.audit()  # the last reports on earlier requests have come
    before = cluster.instances()["decode-0"]
    for ending in (
        {"max_tokens": 1},
        {"stop_token_ids": [token], "ignore_eos": True},
        {"stop": [text[-1:] or "x"]},
        {"logit_bias": {"2": 100.0}, "ignore_eos": False},
        {"stop_token_ids": [token], "logprobs": 1},
    ):
        body = make(150, **options, **ending)
        ours, theirs = await ask(cluster.url, body), await ask(stock.url, body)
        assert len(theirs.token_ids) == 1, ending
        assert ours.same_as(theirs), ending
        assert ours.headers["x-tetri-decode"] == ours.headers["x-tetri-prefill"] == "prefill-0"
    cluster.rest()
    after = cluster.instances()["decode-0"]
    for counter in ("decodes_done", "prefills_done", "kv_bytes_received"):
        assert after[counter] == before[counter]


def server_of(cluster: Cluster, name: str) -> int:
    """Process id of an instance's API server; its engine is another process, and
    goes on telling the cluster that it is there."""
    facts = next(each for each in cluster.facts["instances"] if each["id"] == name)
    port = int(facts["url"].rpartition(":")[2])
    for child in psutil.Process(facts["pid"]).children(recursive=True):
        sockets = child.net_connections(kind="tcp4")
        is_there = any(each.status == "LISTEN" and each.laddr.port == port for each in sockets)
        if is_there and "EngineCore" not in " ".join(child.cmdline()):
            return int(child.pid)
    raise AssertionError(f"no process listens for {name}")


@pytest.mark.parametrize("make", [completion, chat])
async def test_the_first_token_does_not_wait_for_the_decode_instance(
    stock: Stock, cluster: Cluster, make: Any
) -> None:
    body = await with_text_first(stock, make)
    pid = server_of(cluster, "decode-0")
    os.kill(pid, signal.SIGSTOP)
    try:
        async with streamed(cluster.url, body) as response:
            seen = b""
            while not seen.endswith(b"\n\n"):
                seen += await response.content.readany()
            assert "".join(map(text_of, parsed(seen + b"data: [DONE]\n\n")))
            os.kill(pid, signal.SIGCONT)
            seen += await response.read()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert joined(parsed(seen)) == joined(await events(stock.url, body))


@pytest.mark.long
async def test_when_the_decode_instance_dies_after_the_token_the_text_is_the_same(
    stock: Stock, own_started: Cluster
) -> None:
    bodies = [
        await with_text_first(stock, completion),
        await with_text_first(stock, chat),
        await with_text_first(stock, completion, temperature=0.9, seed=5, logprobs=1),
    ]
    pid = server_of(own_started, "decode-0")
    os.kill(pid, signal.SIGSTOP)
    shown = asyncio.Barrier(len(bodies) + 1)

    async def one(body: dict[str, Any]) -> list[dict[str, Any]]:
        async with streamed(own_started.url, body) as response:
            seen = await response.content.readany()
            assert b'"choices"' in seen
            await shown.wait()
            return parsed(seen + await response.read())

    tasks = [asyncio.create_task(one(body)) for body in bodies]
    try:
        async with asyncio.timeout(60):
            await shown.wait()
    finally:
        os.kill(pid, signal.SIGKILL)
    for body, task in zip(bodies, tasks, strict=True):
        assert joined(await task) == joined(await events(stock.url, body))
