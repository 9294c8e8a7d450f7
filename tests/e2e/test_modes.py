"""Whole, split, or decided for every request: the same tokens in any mode."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest

from tests.e2e.client import Answer, ask, ask_all
from tests.e2e.cluster import Cluster, Stock, get
from tests.e2e.prompts import completion
from vllm_tetri.types import Mode

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
# Short and long prompts to short and long answers, streamed and not, greedy and seeded.
BODIES = [
    completion(num_tokens, max_tokens=max_tokens, **options)
    for num_tokens, max_tokens, options in (
        (5, 40, {}),
        (30, 120, STREAM),
        (64, 6, {"temperature": 0.8, "seed": 3}),
        (65, 1, STREAM),
        (100, 80, {"n": 2, "temperature": 0.7, "seed": 5}),
        (200, 4, STREAM),
        (300, 30, {"logprobs": 2}),
        (450, 2, {}),
        (700, 60, STREAM),
        (1000, 12, STREAM),
    )
]
CLIENTS = 12


def set_mode(cluster: Cluster, mode: str) -> None:
    order = urllib.request.Request(
        f"{cluster.url}/tetri/v1/mode",
        data=json.dumps({"mode": mode}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(order, timeout=10) as answer:
        assert json.load(answer) == {"mode": mode}
    assert get(f"{cluster.url}/tetri/v1/mode") == {"mode": mode}


@pytest.fixture
def cluster(many: Cluster) -> Iterator[Cluster]:
    yield many
    set_mode(many, Mode.SPLIT)


def is_split(answer: Answer) -> bool:
    return answer.headers["x-tetri-prefill"] != answer.headers["x-tetri-decode"]


@pytest.mark.parametrize("mode", list(Mode))
async def test_tokens_are_the_same_in_every_mode(
    single: Stock, cluster: Cluster, mode: Mode
) -> None:
    set_mode(cluster, mode)
    expected = [await ask(single.url, body) for body in BODIES]
    answers = [await ask(cluster.url, body) for body in BODIES]
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.same_as(wanted), f"{answer} != {wanted}"
    together = await ask_all(cluster.url, BODIES * 2)
    for answer, wanted in zip(together, expected * 2, strict=True):
        assert answer.same_as(wanted), f"{answer} != {wanted}"
    if mode is Mode.WHOLE:
        assert not any(map(is_split, [*answers, *together]))


async def test_the_mode_changes_under_load_without_any_loss(
    single: Stock, cluster: Cluster
) -> None:
    expected = [await ask(single.url, body) for body in BODIES]
    turns, wrong, seen = cycle(range(len(BODIES))), [], Counter[bool]()

    async def client() -> None:
        while True:
            index = next(turns)
            answer = await ask(cluster.url, BODIES[index])
            seen[is_split(answer)] += 1
            if not answer.same_as(expected[index]):
                wrong.append(f"{index}: {answer} != {expected[index]}")

    tasks = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    try:
        for mode in [*Mode, *reversed(Mode)] * 2:
            before = sum(seen.values())
            await asyncio.to_thread(set_mode, cluster, mode)
            while sum(seen.values()) < before + 3 * CLIENTS:
                await asyncio.sleep(0.02)
                assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert wrong == []
    assert seen[True] > 0
    assert seen[False] > 0


async def test_adaptive_requests_move_to_where_least_is_waited(cluster: Cluster) -> None:
    set_mode(cluster, Mode.ADAPTIVE)
    alone = await ask(cluster.url, completion(64, max_tokens=40))
    assert not is_split(alone)  # nobody waits, so a hand-over only costs
    roles = {name: row["role"] for name, row in cluster.instances().items()}
    answers = await ask_all(cluster.url, [completion(200 + n, max_tokens=150) for n in range(24)])
    decoded = Counter(answer.headers["x-tetri-decode"] for answer in answers)
    assert all(roles[name] == "decode" for name in decoded)
    # Decodes are beside them there, so that some prompts are quicker elsewhere.
    assert any(map(is_split, answers))


def test_a_mode_that_does_not_exist_is_refused(cluster: Cluster) -> None:
    order = urllib.request.Request(f"{cluster.url}/tetri/v1/mode", data=b'{"mode": "half"}')
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(order, timeout=10)
    answer: Any = json.load(error.value)
    assert error.value.code == 400
    assert "half" in answer["error"]["message"]
