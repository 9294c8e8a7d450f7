"""Aggregated, split, or decided for every request: the same tokens in any mode."""

from __future__ import annotations

import json
import urllib.error
from typing import Any

import pytest

from tests.e2e.client import Answer, ask, ask_all, load
from tests.e2e.cluster import Cluster, Stock, get, post
from tests.e2e.prompts import STREAM, completion
from vllm_tetri.types import Mode

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# Short and long prompts to short and long outputs, streamed and not, greedy and seeded.
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
    assert post(f"{cluster.url}/tetri/v1/mode", {"mode": mode}) == {"mode": mode}
    assert get(f"{cluster.url}/tetri/v1/mode") == {"mode": mode}


def is_split(answer: Answer) -> bool:
    return answer.headers["x-tetri-prefill"] != answer.decode


@pytest.mark.parametrize("mode", [Mode.WHOLE, Mode.ADAPTIVE])
async def test_tokens_are_the_same_in_every_mode(stock: Stock, free: Cluster, mode: Mode) -> None:
    set_mode(free, mode)
    expected = [await ask(stock.url, body) for body in BODIES]
    answers = [await ask(free.url, body) for body in BODIES]
    together = await ask_all(free.url, BODIES * 2)
    for answer, wanted in zip([*answers, *together], expected * 3, strict=True):
        assert answer.same_as(wanted), f"{answer} != {wanted}"
    if mode is Mode.WHOLE:
        assert not any(map(is_split, [*answers, *together]))


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(Mode.SPLIT, marks=pytest.mark.long),
        pytest.param(Mode.ADAPTIVE, marks=pytest.mark.slow),
    ],
)
async def test_hundreds_at_once_wait_and_are_all_answered(
    stock: Stock, free: Cluster, mode: Mode
) -> None:
    """They wait for longer than --tetri-transfer-timeout, and for an arena that is often full."""
    set_mode(free, mode)
    expected = [await ask(stock.url, body) for body in BODIES]
    answers = await ask_all(free.url, BODIES * 40)
    for answer, wanted in zip(answers, expected * 40, strict=True):
        assert answer.same_as(wanted), f"{answer} != {wanted}"


async def test_the_mode_changes_under_load_without_any_loss(stock: Stock, free: Cluster) -> None:
    expected = [await ask(stock.url, body) for body in BODIES]
    async with load(free.url, BODIES, expected, CLIENTS) as clients:
        for mode in [*Mode, *reversed(Mode)]:
            set_mode(free, mode)
            await clients.more(3 * CLIENTS)
    assert (clients.wrong, clients.failed) == ([], [])
    assert {is_split(answer) for answer in clients.all} == {True, False}


async def test_adaptive_requests_are_decoded_where_decoding_is(free: Cluster) -> None:
    """How many are split depends on how long steps take, so only what must hold is asserted."""
    set_mode(free, Mode.ADAPTIVE)
    answers = await ask_all(free.url, [completion(200 + n, max_tokens=50) for n in range(12)])
    assert {answer.status for answer in answers} == {200}
    assert {answer.decode for answer in answers} == {"decode-0"}


def test_a_mode_that_does_not_exist_is_refused(cluster: Cluster) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        post(f"{cluster.url}/tetri/v1/mode", {"mode": "half"})
    answer: Any = json.load(error.value)
    assert error.value.code == 400
    assert "half" in answer["error"]["message"]
