"""Instances that are full: who is asked next, and what the client is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from tests.router.fakes import BUSY, FakeInstance, answer_500, cluster, eventually, full, metric
from tests.router.scripts import event
from tests.router.writers import begin_stream
from vllm_tetri.handover import DecodeParams
from vllm_tetri.router import relay as router_relay
from vllm_tetri.types import Role, StepCoefficients


async def full_in_the_stream(
    fake: FakeInstance, request: web.Request, body: Any
) -> web.StreamResponse:
    """vLLM let the request in, began the stream and only then found itself full."""
    if not body.get("stream"):
        return await full()
    return await begin_stream(request, event({"error": BUSY}), b"data: [DONE]\n\n")


def full_times(
    times: int, busy: Callable[..., Awaitable[web.StreamResponse]] = full
) -> Callable[..., Awaitable[web.StreamResponse]]:
    left = times

    async def answer(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        nonlocal left
        left -= 1
        return await (busy if left >= 0 else FakeInstance.answer)(fake, request, body)

    return answer


def many_prefill(count: int) -> list[FakeInstance]:
    return [
        *(FakeInstance(f"p{index}", Role.PREFILL, decode="d") for index in range(count)),
        FakeInstance("d", Role.DECODE),
    ]


async def test_every_other_prefill_instance_is_asked_once() -> None:
    """Also more of them than a request may see failures."""
    async with cluster(*many_prefill(6)) as made:
        for name in list(made.instances)[:5]:
            made[name].handler = full
        status, answer, headers = await made.ask()

        assert (status, answer["kind"], headers["x-tetri-prefill"]) == (200, "injected", "p5")
        assert all(len(made[f"p{index}"].calls) <= 1 for index in range(6))
        assert await metric(made, 'tetri_requests_total{outcome="ok",route="split"}') == 1


async def test_when_all_are_full_the_client_is_told_when_to_come_back() -> None:
    async with cluster(*many_prefill(5)) as made:
        for index in range(5):
            made[f"p{index}"].handler = full
        status, answer, headers = await made.ask()

        assert (status, headers["Retry-After"]) == (503, "1")
        error = answer["error"]
        assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
        assert error["message"] == "all prefill instances (5) are at their limits; try again in 1 s"
        assert [len(each.calls) for each in made.instances.values()] == [1, 1, 1, 1, 1, 0]
        assert await made.table() == []


async def test_a_request_that_every_instance_refused_leaves_nothing_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with cluster(*many_prefill(2)) as made:
        made["p0"].handler = made["p1"].handler = full
        await made.ask()
        await made.ask(stream=True)

        assert all(each.cancelled == [] for each in made.instances.values())
        assert await metric(made, "tetri_transfers_cancelled_total") == 0
        assert await metric(made, 'tetri_requests_total{outcome="busy",route="split"}') == 2
        assert await metric(made, 'tetri_requests_total{outcome="error",route="split"}') == 0
        assert await metric(made, 'tetri_instance_busy_responses_total{instance="p0"}') == 2
        assert not [each for each in caplog.records if each.levelno > logging.INFO]
        made["p0"].handler = None
        assert (await made.ask())[0] == 200


async def test_the_wait_follows_from_what_steps_take() -> None:
    async with cluster(*many_prefill(1)) as made:
        made["p0"].handler = full
        cost = StepCoefficients(prompt_s=0.001)
        await made.report("p0", queued_prefill_tokens=100_000, waiting=3, cost=cost)
        _, answer, headers = await made.ask()

        assert headers["Retry-After"] == "25"
        assert answer["error"]["message"].endswith("try again in 25 s")


@pytest.mark.parametrize(
    "other",
    [
        web.Response(status=503),
        web.Response(status=503, text="upstream connect error"),
        web.json_response({"error": "The model is currently scaling."}, status=503),
        web.json_response({"error": {**BUSY, "type": "ServiceUnavailableError"}}, status=503),
        web.json_response({"error": BUSY}, status=500),
    ],
)
async def test_another_503_is_a_failure(other: web.Response) -> None:
    async def broken(*_: Any) -> web.StreamResponse:
        return web.Response(status=other.status, body=other.body, content_type=other.content_type)

    async with cluster(*many_prefill(1)) as made:
        made["p0"].handler = broken
        status, answer, _ = await made.ask()
        assert (status, answer["kind"], answer["by"]) == (200, "whole", "d")


async def test_one_that_failed_and_one_that_is_full_is_no_reason_to_disturb_decoding() -> None:
    async with cluster(*many_prefill(2)) as made:
        made["p0"].handler, made["p1"].handler = answer_500, full
        status, answer, _ = await made.ask()
        assert (status, answer["error"]["code"]) == (503, 503)
        assert made["d"].calls == []


@pytest.mark.parametrize("busy", [full, full_in_the_stream])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_full_decode_instance_is_asked_again_because_it_holds_the_kv(
    busy: Any, is_streamed: bool
) -> None:
    async with cluster(*many_prefill(1)) as made:
        made["d"].handler = full_times(3, busy)
        status, answer, headers = await made.ask(stream=is_streamed)

        assert (status, headers["x-tetri-decode"]) == (200, "d")
        assert b"DONE" in answer if is_streamed else answer["kind"] == "injected"
        assert b"Unavailable" not in answer if is_streamed else True
        assert len(made["p0"].calls) == 1
        legs = [made["d"].leg(index) for index in range(4)]
        assert isinstance(legs[0], DecodeParams)
        assert legs == [legs[0]] * 4
        assert made["d"].cancelled == made["p0"].cancelled == []


async def test_a_decode_instance_that_stays_full_hands_over_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_relay, "DECODE_PATIENCE_S", 0.1)
    async with cluster(*many_prefill(1), FakeInstance("d2", Role.DECODE)) as made:
        made["d"].handler = full
        status, answer, _ = await made.ask()
        assert (status, answer["by"], answer["kind"]) == (200, "d2", "whole")

        made["d2"].handler = full
        status, answer, headers = await made.ask()
        assert (status, headers["x-tetri-error"], headers["Retry-After"]) == (
            503,
            "queue_full",
            "1",
        )
        transfers = {made["p0"].leg(index).transfer for index in range(2)}  # type: ignore[attr-defined]
        for name in ("p0", "d"):  # both were opened, so both are called off
            await eventually(lambda name=name: set(made[name].cancelled) >= transfers)


@pytest.mark.parametrize("busy", [full, full_in_the_stream])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_whole_request_goes_to_the_next_instance(busy: Any, is_streamed: bool) -> None:
    both = FakeInstance("b1", Role.BOTH), FakeInstance("b2", Role.BOTH)
    async with cluster(*both) as made:
        made["b1"].handler = busy
        status, answer, headers = await made.ask(stream=is_streamed, best_of=2)
        assert (status, headers["x-tetri-decode"]) == (200, "b2")
        assert b"Unavailable" not in answer if is_streamed else answer["by"] == "b2"

        made["b2"].handler = busy
        status, answer, headers = await made.ask(stream=is_streamed, best_of=2)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "instances that could serve it alone (2)" in answer["error"]["message"]
        assert await metric(made, 'tetri_requests_total{outcome="busy",route="whole"}') == 1


async def test_a_client_that_leaves_while_decode_is_full_cancels() -> None:
    async with cluster(*many_prefill(1)) as made:
        made["d"].handler = full
        asking = asyncio.create_task(made.ask(stream=True))
        await eventually(lambda: len(made["d"].calls) > 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await eventually(lambda: made["d"].cancelled and made["p0"].cancelled)
        await eventually(lambda: len(made.scheduler.table) == 0)
