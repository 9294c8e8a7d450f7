"""SIGTERM lets requests end: that of one instance after the other, and that of `up`."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Answer, ask, load, until
from tests.e2e.cluster import ByHand, Cluster, Stock, metrics, running
from tests.e2e.prompts import STREAM, chat, completion

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

DRAIN_S = 40
BODIES: list[dict[str, Any]] = [
    *[completion(20 + 50 * index, max_tokens=400, **STREAM) for index in range(3)],
    completion(60, max_tokens=300, echo=True, **STREAM),  # no other instance continues it
    chat(30, max_tokens=300, ignore_eos=True, **STREAM),
    completion(90, max_tokens=300),
]


@pytest.fixture(scope="module")
def started(
    tiny_llama: Path, stock: Stock, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, list[Answer]]]:
    """A cluster, and what stock answers."""
    folder, words = tmp_path_factory.mktemp("sigterm"), ("--shutdown-timeout", str(DRAIN_S))
    cluster = Cluster(tiny_llama, folder, roles=("--decode", "2", *words), serve=words)
    with running(cluster):
        yield cluster, asyncio.run(_answers(stock.url))


async def _answers(url: str) -> list[Answer]:
    answers = [await ask(url, body) for body in BODIES]
    assert all(answer.is_complete for answer in answers), answers
    return answers


@pytest.mark.long
async def test_instances_restart_one_after_the_other_under_load(
    started: tuple[Cluster, list[Answer]],
) -> None:
    cluster, expected = started
    async with load(cluster.url, BODIES, expected, len(BODIES)) as clients:
        for name in ("decode-0", "decode-1", "prefill-0"):
            if name != "prefill-0":
                await clients.until_served(name)
                await until(partial(_decodes, cluster, name), f"{name} decodes")
            guard, server = cluster.processes(name)[:2]
            begin_s = time.monotonic()
            (guard if name == "decode-0" else server).send_signal(signal.SIGTERM)
            await until(partial(_is, cluster, name, "draining"), f"{name} drains", 5)
            await asyncio.to_thread(server.wait, DRAIN_S + 5)
            print(f"\n{name} is gone after {time.monotonic() - begin_s:.1f} s")
            await until(lambda: cluster.are_ready(3), f"{name} is back", 180)
    pauses = [each.pause_s for each in clients.all if "event-stream" in str(each.headers)]
    print(f"{len(clients.all)} requests, longest pause of a stream {max(pauses):.2f} s")
    assert (clients.wrong, clients.failed) == ([], [])
    text = await asyncio.to_thread(metrics, cluster.url)
    assert set(re.findall(r"tetri_streams_broken_total{[^}]*} ([\d.]+)", text)) == {"0.0"}


def _decodes(cluster: Cluster, name: str) -> bool:
    return int(cluster.instances()[name]["running"]) > 1


def _is(cluster: Cluster, name: str, state: str) -> bool:
    return cluster.state_of(name) == state


async def test_up_lets_requests_end(started: tuple[Cluster, list[Answer]]) -> None:
    cluster, expected = started
    answers = [Answer() for _ in BODIES]
    tasks = [
        asyncio.create_task(ask(cluster.url, body, answer))
        for body, answer in zip(BODIES, answers, strict=True)
    ]
    streams = [each for each, body in zip(answers, BODIES, strict=True) if "stream" in body]
    await until(lambda: all(len(each.text) > 20 for each in streams), "streams have begun")
    begin_s = time.monotonic()
    cluster.child.send_signal(signal.SIGTERM)
    await asyncio.gather(*tasks)
    assert all(map(Answer.same_as, answers, expected))
    assert await asyncio.to_thread(cluster.child.wait, 30) == 0
    print(f"\nup is gone after {time.monotonic() - begin_s:.1f} s")


async def test_of_several_api_servers_each_lets_its_requests_end(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with running(ByHand(tmp_path)) as cluster:
        cluster.start("a", "both", tiny_llama, "--api-server-count", "2")
        await until(lambda: cluster.are_ready(1), "it is ready", 180)
        answers = [Answer() for _ in range(4)]
        body = completion(20, max_tokens=400, ignore_eos=True, **STREAM)
        asked = [asyncio.create_task(ask(cluster.url, body, each)) for each in answers]
        await until(lambda: all(len(each.text) > 20 for each in answers), "streams have begun")
        cluster.parts["a"].child.send_signal(signal.SIGTERM)
        await asyncio.gather(*asked)
        assert all(each.is_complete for each in answers), answers


async def test_an_engine_whose_server_is_killed_ends(tiny_llama: Path, tmp_path: Path) -> None:
    with running(ByHand(tmp_path)) as cluster:
        cluster.start("a", "both", tiny_llama)
        await until(lambda: cluster.are_ready(1), "it is ready", 180)
        server, *engines = cluster.parts["a"].tree()
        assert engines
        server.kill()
        await until(lambda: not cluster.instances(), "it has left", 20)
        await until(lambda: not any(each.is_running() for each in engines), "its engine ends", 20)
