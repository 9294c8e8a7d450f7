"""More prompts than a cluster takes: some are refused at once, the rest are right."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from examples.benchmarks.cluster import metric
from tests.e2e.client import Answer, ask, ask_all, assert_as_stock
from tests.e2e.cluster import Cluster, Stock
from tests.e2e.prompts import chat, completion

pytestmark = [pytest.mark.e2e, pytest.mark.long]

BOUND_TOKENS = 600  # one of the prompts below at a time; the decode instance has it too
OWN = {"serve": ("--max-num-queued-tokens", str(BOUND_TOKENS))}
PROMPT_TOKENS = (700, 900, 1100, 1300)


def burst() -> list[dict[str, Any]]:
    """Both endpoints, streamed or not."""
    bodies = [completion(n, stream=n % 200 == 100) for n in PROMPT_TOKENS * 3]
    return bodies + [chat(500, stream=index % 2 == 0) for index in range(6)]


def assert_refused_well(answer: Answer) -> None:
    assert answer.status == 503
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    assert answer.error is not None
    assert (answer.error["type"], answer.error["code"]) == ("ServiceUnavailableError", 503)
    assert answer.headers["x-tetri-error"] == "queue_full"
    assert "all prefill instances (1) are at their limits" in answer.error["message"]


async def test_a_burst_is_answered_rightly_or_refused_at_once(stock: Stock, own: Cluster) -> None:
    bodies = burst()
    answers = await ask_all(own.url, bodies)
    served = [pair for pair in zip(answers, bodies, strict=True) if pair[0].status == 200]
    refused = [answer for answer in answers if answer.status != 200]
    assert served
    assert refused
    for answer in refused:
        assert_refused_well(answer)
    for answer, body in served:
        assert answer.error is None
        assert answer.headers["x-tetri-prefill"] == "prefill-0"  # never whole on the other one
        assert answer.same_as(await ask(stock.url, body))
    own.rest()
    assert metric(own.url, "tetri_requests_total", 'outcome="busy"') == len(refused)
    by_instance = metric(own.url, "tetri_instance_busy_responses_total", 'instance="prefill-0"')
    assert by_instance >= len(refused)
    assert metric(own.url, "tetri_requests_total", 'route="fallback"') == 0


async def test_clients_that_come_back_when_told_are_all_served(stock: Stock, own: Cluster) -> None:
    deadline = time.monotonic() + 60

    async def until_served(body: dict[str, Any]) -> Answer:
        while (answer := await ask(own.url, body)).status == 503:
            assert time.monotonic() < deadline, "was never served"
            await asyncio.sleep(int(answer.headers["Retry-After"]))
        return answer

    bodies = [completion(n) for n in PROMPT_TOKENS]
    answers = await asyncio.gather(*map(until_served, bodies))
    await assert_as_stock(list(answers), stock.url, bodies)


async def test_requests_that_are_not_split_are_bounded_too(stock: Stock, own: Cluster) -> None:
    bodies = [completion(1300, n=2, temperature=1, stream=index % 2 == 0) for index in range(8)]
    answers = await ask_all(own.url, bodies)
    assert {answer.status for answer in answers} == {200, 503}
    assert {answer.headers.get("x-tetri-decode") for answer in answers} == {None, "decode-0"}
    for answer in answers:
        assert answer.status == 503 or answer.error is None


async def test_afterwards_service_is_normal(stock: Stock, own: Cluster) -> None:
    for body in (completion(100), completion(1500, stream=True), chat(50)):
        assert (await ask(own.url, body)).same_as(await ask(stock.url, body))


async def test_a_priority_is_accepted_and_a_wrong_one_refused(stock: Stock, own: Cluster) -> None:
    body = completion(100)
    expected = await ask(stock.url, body)
    for priority in (-3, 7):
        assert (await ask(own.url, {**body, "priority": priority})).same_as(expected)
    answer = await ask(own.url, {**body, "priority": "high"})
    assert answer.status == 400
    assert answer.error is not None
    assert "priority" in answer.error["message"]
