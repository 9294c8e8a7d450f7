"""Instances die in the middle of requests, and their clients see a pause at most.

The cluster is this module's own: two prefill and two decode instances, started again by
`up` whenever one is killed, and waited for before the next test.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.e2e.client import TIMEOUT
from tests.e2e.cluster import Cluster, Stock, get, side_by_side
from tests.e2e.compare import ask_raw, merged
from tests.e2e.prompts import chat, completion
from tests.e2e.test_first_token import joined

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ROLES = ("--prefill", "2", "--decode", "2")
NAMES = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
LONG = {"max_tokens": 500, "ignore_eos": True}
STREAM = {**LONG, "stream": True, "stream_options": {"include_usage": True}}
# They are rounded to three places.
LOGPROB_TOLERANCE = 0.0021
EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.fixture(scope="module")
def _both(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stock, Cluster]]:
    folder = tmp_path_factory.mktemp("failures")
    with side_by_side(Stock(tiny_llama, folder), Cluster(tiny_llama, folder, roles=ROLES)) as both:
        yield both


@pytest.fixture
def stock(_both: tuple[Stock, Cluster]) -> Stock:
    return _both[0]


@pytest.fixture
def cluster(_both: tuple[Stock, Cluster]) -> Iterator[Cluster]:
    """Complete when a test begins, at rest when it has ended."""
    made = _both[1]
    wait_for(lambda: all_ready(made), "all four are ready")
    yield made
    wait_for(lambda: all_ready(made), "all four are ready again")
    made.rest()


def all_ready(cluster: Cluster) -> bool:
    rows = cluster.instances()
    return set(rows) == NAMES and all(row["state"] == "ready" for row in rows.values())


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s:.0f} s: {what}"
        time.sleep(0.05)


def tree_of(cluster: Cluster, name: str) -> list[psutil.Process]:
    """All processes of an instance, as it is now; its guard first."""
    words = ["--tetri-instance", name]
    for each in psutil.Process(cluster.child.pid).children(recursive=True):
        line = each.cmdline()
        if any(line[at : at + 2] == words for at in range(len(line))):
            return [each, *each.children(recursive=True)]
    raise AssertionError(f"there is no {name}")


def signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    for each in processes:
        if each.is_running():
            os.kill(each.pid, number)


@dataclass
class Seen:
    """What a client got, and when."""

    raw: bytes = b""
    times_s: list[float] = field(default_factory=list)
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def gap_s(self) -> float:
        """The longest pause between two parts."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return max((then - now for now, then in pairs), default=0.0)

    @property
    def events(self) -> list[dict[str, Any]]:
        parts = self.raw.split(b"\n\n")
        assert parts[-2:] == [b"data: [DONE]", b""], parts[-3:]
        return [json.loads(each.removeprefix(b"data: ")) for each in parts[:-2]]


async def read(url: str, body: dict[str, Any], seen: Seen) -> Seen:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.post(url + path, json=body) as response,
    ):
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


async def until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"not in {timeout_s:.0f} s: {what}"
        await asyncio.sleep(0.01)


def table(cluster: Cluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = get(f"{cluster.url}/tetri/v1/requests")["requests"]
    return found


def counted(cluster: Cluster, outcome: str) -> float:
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(f'tetri_streams_broken_total{{outcome="{outcome}"}}'):
                return float(line.rsplit(" ", 1)[1])
    return 0.0


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


async def answers_of_stock(stock: Stock, asked: list[dict[str, Any]]) -> list[Any]:
    kinds = ["chat" if "messages" in body else "completion" for body in asked]
    replies = [ask_raw(stock.url, kind, body) for kind, body in zip(kinds, asked, strict=True)]
    return list(await asyncio.gather(*replies))


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
    far = farthest(ours.pop("logprobs"), theirs.pop("logprobs"))
    assert far < LOGPROB_TOLERANCE
    assert ours == theirs
    assert seen.raw.count(b'"role"') == reply.raw.count(b'"role"')
    assert seen.raw.count(b"[DONE]") == 1


def farthest(ours: Any, theirs: Any) -> float:
    """The greatest difference of numbers of two values that are equal otherwise."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        return max((farthest(ours[key], theirs[key]) for key in ours), default=0.0)
    if isinstance(ours, list):
        return max((farthest(*pair) for pair in zip(ours, theirs, strict=True)), default=0.0)
    assert ours == theirs
    return 0.0


def moved(seen: list[Seen], asked: list[dict[str, Any]], name: str) -> list[Seen]:
    """Streams that had begun at an instance."""
    return [
        each
        for each, body in zip(seen, asked, strict=True)
        if body.get("stream") and each.headers.get("x-tetri-decode") == name
    ]


async def all_streaming(cluster: Cluster, seen: list[Seen], asked: list[dict[str, Any]]) -> None:
    streams = [one for one, body in zip(seen, asked, strict=True) if body.get("stream")]
    await until(
        lambda: all(each.raw.count(b"\n\n") > 20 for each in streams), "all streams are under way"
    )


def report(what: str, seen: list[Seen]) -> None:
    gaps = sorted(each.gap_s for each in seen)
    print(f"\n{what}: {len(gaps)} streams, gap {gaps[0]:.2f} to {gaps[-1]:.2f} s")


@pytest.mark.parametrize("who", ["all", "engine"])
async def test_a_decode_instance_is_killed_mid_stream(
    stock: Stock, cluster: Cluster, who: str
) -> None:
    asked = bodies()
    theirs = await answers_of_stock(stock, asked)
    before = counted(cluster, "resumed")
    async with under_way(cluster.url, asked) as (seen, tasks):
        await all_streaming(cluster, seen, asked)
        tree = tree_of(cluster, "decode-0")
        if who == "engine":
            tree = [each for each in tree if "EngineCore" in " ".join(each.cmdline())]
            assert tree
        signal_all(tree, signal.SIGKILL)
        await asyncio.gather(*tasks)
    hit = moved(seen, asked, "decode-0")
    report(f"SIGKILL of {who} of a decode instance", hit)
    assert hit
    assert counted(cluster, "resumed") >= before + 1
    for one, reply, body in zip(seen, theirs, asked, strict=True):
        same(one, reply, body)


async def test_a_decode_instance_is_shut_down_mid_stream(stock: Stock, cluster: Cluster) -> None:
    """SIGTERM: vLLM gives up what it has, at once."""
    asked = bodies()
    theirs = await answers_of_stock(stock, asked)
    async with under_way(cluster.url, asked) as (seen, tasks):
        await all_streaming(cluster, seen, asked)
        server = tree_of(cluster, "decode-0")[1]
        server.send_signal(signal.SIGTERM)
        await asyncio.gather(*tasks)
    hit = moved(seen, asked, "decode-0")
    report("SIGTERM of a decode instance", hit)
    assert hit
    for one, reply, body in zip(seen, theirs, asked, strict=True):
        same(one, reply, body)


async def test_a_prefill_instance_is_killed_while_it_prefills(
    stock: Stock, cluster: Cluster
) -> None:
    asked = [completion(1400 + i, max_tokens=20, stream=i % 2 == 0) for i in range(10)]
    asked += [chat(500 + i, max_tokens=20, stream=i % 2 == 0) for i in range(4)]
    theirs = await answers_of_stock(stock, asked)
    async with under_way(cluster.url, asked) as (seen, tasks):

        def is_prefilling() -> bool:
            rows = [each for each in table(cluster) if each["phase"] == "prefilling"]
            return any(each["prefill"] == "prefill-0" for each in rows) and (
                cluster.instances()["prefill-0"]["running"] > 0
            )

        await until(is_prefilling, "a prompt is being computed")
        signal_all(tree_of(cluster, "prefill-0"), signal.SIGKILL)
        await asyncio.gather(*tasks)
    for one, reply, body in zip(seen, theirs, asked, strict=True):
        assert one.status == 200, one.raw
        if body.get("stream"):
            assert joined(one.events) == joined(reply.events)
        else:
            kept = ("choices", "usage")
            ours = merged(type(reply)(one.status, one.headers, one.raw))
            assert {key: ours[key] for key in kept} == {key: merged(reply)[key] for key in kept}


async def test_a_decode_instance_that_is_stopped_is_given_up(
    stock: Stock, cluster: Cluster
) -> None:
    asked = bodies()
    theirs = await answers_of_stock(stock, asked)
    tree = tree_of(cluster, "decode-0")
    async with under_way(cluster.url, asked) as (seen, tasks):
        await all_streaming(cluster, seen, asked)
        signal_all(tree, signal.SIGSTOP)
        try:
            await asyncio.gather(*tasks)
            assert cluster.instances()["decode-0"]["state"] == "silent"
        finally:
            signal_all(tree, signal.SIGCONT)
    hit = moved(seen, asked, "decode-0")
    report("SIGSTOP of a decode instance", hit)
    assert hit
    for one, reply, body in zip(seen, theirs, asked, strict=True):
        same(one, reply, body)
    await until(lambda: all_ready(cluster), "it is back")
    cluster.rest(5.0)
    short = [{**body, "max_tokens": 20} for body in asked if "min_tokens" not in body]
    async with under_way(cluster.url, short) as (seen, tasks):
        await asyncio.gather(*tasks)
    for one, reply, body in zip(seen, await answers_of_stock(stock, short), short, strict=True):
        same(one, reply, body)
