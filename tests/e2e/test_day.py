"""An operator's day: deploy, scale out, drain, roll a new revision, lose an instance, and read why
a request was slow, while clients notice none of it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.benchmarks.faults import send
from tests.e2e.client import Load, load, stock_answers, until
from tests.e2e.cluster import ByHand, running
from tests.e2e.prompts import STREAM, chat, completion
from vllm_tetri import cli

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

BODIES = [
    completion(300, max_tokens=60, **STREAM),
    completion(100, max_tokens=90, temperature=0.8, seed=11, **STREAM),
    chat(150, max_tokens=70, **STREAM),
    completion(500, max_tokens=20),
]
CLIENTS = 3
MORNING = {"prefill-0", "decode-0", "decode-1"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ByHand]:
    with running(ByHand(tmp_path)) as cluster:
        yield cluster


async def drain(cluster: ByHand, name: str) -> None:
    assert await asyncio.to_thread(cli.main, ["drain", name, "--url", cluster.url]) == 0
    part = cluster.parts.pop(name)
    await until(lambda: part.child.poll() is not None, f"{name} has ended")
    assert part.child.returncode == 0


async def test_a_day(
    tiny_llama: Path,
    cluster: ByHand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = await asyncio.to_thread(stock_answers, tiny_llama, tmp_path, BODIES)

    async def start(*instances: str) -> None:
        for each in instances:
            cluster.start(each, each.partition("-")[0], tiny_llama)
        await asyncio.to_thread(cluster.wait, *instances)

    monkeypatch.setenv("TETRI_REVISION", "morning")
    await start("prefill-0", "decode-0")
    async with load(cluster.url, BODIES, expected, CLIENTS) as clients:
        await clients.until_served("decode-0")

        await start("decode-1")  # scale out
        await clients.until_served("decode-1")
        await drain(cluster, "decode-0")

        monkeypatch.setenv("TETRI_REVISION", "noon")
        await start("prefill-1", "decode-2")  # both revisions serve, and exchange no KV
        await clients.until_served("decode-2")
        await drain(cluster, "prefill-0")
        await drain(cluster, "decode-1")

        await start("decode-3")
        await clients.until_served("decode-3")
        send(cluster.parts["decode-2"].tree(), signal.SIGKILL)
        await clients.more(2 * CLIENTS)
        await why_slow(cluster, clients, capsys)
    assert not clients.wrong, clients.wrong[0]
    assert not clients.failed, clients.failed[0]
    pairs = [(each.headers["x-tetri-prefill"], each.decode) for each in clients.all]
    assert [pair for pair in pairs if len({name in MORNING for name in pair}) > 1] == []
    await until(lambda: cluster.state_of("decode-2") == "gone", "the lost one is forgotten")
    cluster.rest(2)


async def why_slow(cluster: ByHand, clients: Load, capsys: pytest.CaptureFixture[str]) -> None:
    """The slowest request of the day is explained."""
    slowest = max(clients.all, key=lambda each: each.end_s - each.begin_s)
    capsys.readouterr()
    headers = {name.lower(): each for name, each in slowest.headers.items()}
    words = ["explain", headers["x-request-id"], "--url", cluster.url]
    assert await asyncio.to_thread(cli.main, words) == 0
    assert "JCT" in capsys.readouterr().out
