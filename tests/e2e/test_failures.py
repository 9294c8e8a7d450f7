"""Instances die in the middle of requests, and their clients see a pause at most.

The cluster is this module's own: two prefill and two decode instances, started again by
`up` whenever one is killed, and waited for before the next test.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from examples.benchmarks.faults import send
from tests.e2e.client import posted, until
from tests.e2e.cluster import Cluster, Stock
from tests.e2e.compare import Reply, difference, joined, merged, replies_to
from tests.e2e.prompts import chat, completion
from tests.eventually import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

LONG = {"max_tokens": 500, "ignore_eos": True}
STREAM = {**LONG, "stream": True, "stream_options": {"include_usage": True}}
# They are rounded to three places.
LOGPROB_TOLERANCE = 0.0021
EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.fixture
def cluster(many: Cluster) -> Iterator[Cluster]:
    """Complete when a test begins, and when it has ended."""
    eventually(lambda: many.are_ready(4), 180, "all four are ready")
    yield many
    eventually(lambda: many.are_ready(4), 180, "all four are ready again")


class Seen(Reply):
    """What a client got, and when."""

    def __init__(self) -> None:
        super().__init__(0, {}, b"")
        self.times_s: list[float] = []

    @property
    def gap_s(self) -> float:
        """The longest pause between two parts."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return max((then - now for now, then in pairs), default=0.0)


async def read(url: str, body: dict[str, Any], seen: Seen) -> Seen:
    async with posted(url, body) as response:
        seen.status, seen.headers = response.status, dict(response.headers)
        async for part in response.content.iter_any():
            seen.raw += part
            seen.times_s.append(time.monotonic())
    return seen


@asynccontextmanager
async def under_way(
    url: str, bodies: list[dict[str, Any]]
) -> AsyncIterator[tuple[list[Seen], list[asyncio.Task[Seen]]]]:
    seen = [Seen() for _ in bodies]
    tasks = [
        asyncio.create_task(read(url, body, each)) for body, each in zip(bodies, seen, strict=True)
    ]
    try:
        yield seen, tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


SHAPES: list[dict[str, Any]] = [
    {},
    {"logprobs": True},
    {"temperature": 0.9, "seed": 7},
    {"frequency_penalty": 1.2, "presence_penalty": 0.4, "repetition_penalty": 1.3},
    {"stop": ["\u2603 never \u2603"]},
    {**EACH},
    {"return_token_ids": False},
    {"structured_outputs": {"regex": "[a-f ]{300,400}"}, "ignore_eos": False},
    {"min_tokens": 480, "ignore_eos": False, "temperature": 0.5, "seed": 3},
]


def bodies() -> list[dict[str, Any]]:
    """Every shape as chat and as completion, and two answers that are not streamed."""
    found = []
    for index, shape in enumerate(SHAPES):
        for make in (completion, chat):
            body = make(60 + 7 * index, **{**STREAM, **shape})
            if make is chat and shape.get("logprobs"):
                body["top_logprobs"] = 2
            found.append(body)
    return [*found, completion(90, **LONG), chat(40, **LONG)]


def same(seen: Seen, reply: Any, body: dict[str, Any]) -> None:
    assert seen.status == reply.status == 200, seen.raw
    if not body.get("stream"):
        ours, theirs = json.loads(seen.raw), reply.json
        assert ours["choices"][0]["finish_reason"] == theirs["choices"][0]["finish_reason"]
        assert ours["usage"] == theirs["usage"]
        key = "message" if "messages" in body else "text"
        assert ours["choices"][0][key] == theirs["choices"][0][key]
        return
    assert b'"error"' not in seen.raw, seen.raw[-2000:]
    ours, theirs = joined(seen.events), joined(reply.events)
    assert not difference(ours, theirs, tolerance=LOGPROB_TOLERANCE)
    assert seen.raw.count(b'"role"') == reply.raw.count(b'"role"')
    assert seen.raw.count(b"[DONE]") == 1


def moved(seen: list[Seen], asked: list[dict[str, Any]], name: str) -> list[Seen]:
    """Streams that had begun at an instance."""
    return [
        each
        for each, body in zip(seen, asked, strict=True)
        if body.get("stream") and each.headers.get("x-tetri-decode") == name
    ]


async def streaming_from(name: str, seen: list[Seen], asked: list[dict[str, Any]]) -> None:
    """Wait until every stream that has begun at an instance is well under way."""

    def are_under_way() -> bool:
        begun = moved(seen, asked, name)
        return bool(begun) and all(each.raw.count(b"\n\n") > 20 for each in begun)

    await until(are_under_way, f"streams of {name} are under way")


def check(what: str, seen: list[Seen], replies: list[Reply], asked: list[dict[str, Any]]) -> None:
    """Every output is stock's, and some streams had begun at the instance that was hit."""
    gaps = sorted(each.gap_s for each in moved(seen, asked, "decode-0"))
    print(f"\n{what}: {len(gaps)} streams, gap {gaps[0]:.2f} to {gaps[-1]:.2f} s")
    for one, reply, body in zip(seen, replies, asked, strict=True):
        same(one, reply, body)


@pytest.mark.parametrize(
    "who", ["all", *(pytest.param(name, marks=pytest.mark.long) for name in ("engine", "server"))]
)
async def test_a_decode_instance_ends_mid_stream(stock: Stock, cluster: Cluster, who: str) -> None:
    """SIGKILL; or SIGINT to its server: vLLM gives up what it has, at once."""
    asked = bodies()
    theirs = await replies_to(stock.url, asked)
    before = cluster.resumed()
    async with under_way(cluster.url, asked) as (seen, tasks):
        await streaming_from("decode-0", seen, asked)
        if who == "server":
            cluster.processes("decode-0")[1].send_signal(signal.SIGINT)
        else:
            every = cluster.processes("decode-0")
            send([cluster.engine("decode-0")] if who == "engine" else every, signal.SIGKILL)
        await asyncio.gather(*tasks)
    check(f"end of {who} of a decode instance", seen, theirs, asked)
    assert cluster.resumed() >= before + 1


async def test_a_prefill_instance_is_killed_while_it_prefills(
    stock: Stock, cluster: Cluster
) -> None:
    asked = [completion(1400 + i, max_tokens=20, stream=i % 2 == 0) for i in range(10)]
    asked += [chat(500 + i, max_tokens=20, stream=i % 2 == 0) for i in range(4)]
    theirs = await replies_to(stock.url, asked)
    async with under_way(cluster.url, asked) as (seen, tasks):

        def is_prefilling() -> bool:
            rows = [each for each in cluster.requests() if each["phase"] == "prefilling"]
            return any(each["prefill"] == "prefill-0" for each in rows) and (
                cluster.instances()["prefill-0"]["running"] > 0
            )

        await until(is_prefilling, "a prompt is being computed")
        reports = cluster.instances()["prefill-0"]["seq"]
        send(cluster.processes("prefill-0"), signal.SIGKILL)
        await asyncio.gather(*tasks)
    for one, reply, body in zip(seen, theirs, asked, strict=True):
        assert one.status == 200, one.raw
        if body.get("stream"):
            assert joined(one.events) == joined(reply.events)
        else:
            kept = ("choices", "usage")
            ours = merged(type(reply)(one.status, one.headers, one.raw))
            assert {key: ours[key] for key in kept} == {key: merged(reply)[key] for key in kept}

    def is_back() -> bool:
        return cluster.are_ready(4) and cluster.instances()["prefill-0"]["seq"] < reports

    await until(is_back, "it is back and counts its reports from the start")


@pytest.mark.long
async def test_a_decode_instance_that_is_stopped_is_given_up(
    stock: Stock, cluster: Cluster
) -> None:
    asked = bodies()
    theirs = await replies_to(stock.url, asked)
    tree = cluster.processes("decode-0")
    async with under_way(cluster.url, asked) as (seen, tasks):
        await streaming_from("decode-0", seen, asked)
        send(tree, signal.SIGSTOP)
        try:
            await asyncio.gather(*tasks)
            assert cluster.state_of("decode-0") == "silent"
        finally:
            send(tree, signal.SIGCONT)
    check("SIGSTOP of a decode instance", seen, theirs, asked)
    await until(lambda: cluster.are_ready(4), "it is back")
    cluster.rest(5.0)
    short = [{**body, "max_tokens": 20} for body in asked if "min_tokens" not in body]
    async with under_way(cluster.url, short) as (seen, tasks):
        await asyncio.gather(*tasks)
    for one, reply, body in zip(seen, await replies_to(stock.url, short), short, strict=True):
        same(one, reply, body)
