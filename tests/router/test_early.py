"""The decode request is sent before the prefill response, and used only where it fits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from tests.router.fakes import Cluster, FakeInstance, Handler, cluster, eventually, full, trio
from tests.router.scripts import CHAT
from tests.router.writers import COMPLETION, PATHS, script_of, writer
from vllm_tetri.handover import (
    DecodeParams,
    Prefilled,
    PrefillParams,
    PriorOutput,
    from_params,
    to_params,
)
from vllm_tetri.messages import Dispatched, PrefillEnding
from vllm_tetri.router.relay import arrived
from vllm_tetri.types import InstanceId, Prediction, TransferId

PROMPT = [5, 6, 7]
TEXTS = ("Ab", " cd", "", "é", "!")
continuation = writer(created=1_800_000_000, texts=TEXTS)
PREDICTED = Prediction(1, 5, 200)


def early_prefill(
    release: asyncio.Event, *, attempt: str = "", decode: str = "d1", is_final: bool = False
) -> Handler:
    """Announces its last chunk for d1, answers on `release`."""

    async def handle(
        fake: FakeInstance, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        leg = from_params(body.get("kv_transfer_params"))
        if not isinstance(leg, PrefillParams):
            return await continuation(fake, request, body)
        assert fake.agent is not None
        ending = PrefillEnding(leg.transfer, "d1", PROMPT)
        fake.agent.publish(
            Dispatched(leg.request, leg.transfer, InstanceId("d1"), "test", PREDICTED, ending)
        )
        await release.wait()
        script = script_of(request, body, texts=TEXTS)
        first = script_of(request, body, texts=TEXTS[:1])
        prefilled = Prefilled(
            TransferId(leg.transfer + attempt), InstanceId("" if is_final else decode), 3, "d1",
            2, 100, "why", PriorOutput(script.token_ids[:1]), is_final, [] if is_final else PROMPT,
            PREDICTED,
        )  # fmt: skip
        return web.json_response(first.whole(**to_params(prefilled)))

    return handle


def legs(instance: FakeInstance) -> list[DecodeParams]:
    found = [instance.leg(index) for index in range(len(instance.calls))]
    return [leg for leg in found if isinstance(leg, DecodeParams)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_second_leg_is_open_before_the_first_answers(path: str, stream: bool) -> None:
    release = asyncio.Event()
    async with cluster(*trio(early_prefill(release), continuation)) as made:
        asking = asyncio.create_task(ask(made, path, stream=stream))
        await eventually(lambda: legs(made["d1"]))
        (leg,) = legs(made["d1"])
        assert leg.is_early
        assert leg.prior_output is None
        assert leg.predicted == PREDICTED
        release.set()
        status, answer = await asking
        assert status == 200
        assert whole_text(answer, path, stream=stream) == "".join(TEXTS)
        assert len(legs(made["d1"])) == 1
        assert not legs(made["d2"])


def whole_text(answer: Any, path: str, *, stream: bool) -> str:
    if stream:
        return "".join(_texts(answer, path))
    choice = answer["choices"][0]
    return choice["message"]["content"] if path == CHAT else choice["text"]


def _texts(raw: bytes, path: str) -> list[str]:
    choices = [
        choice
        for line in raw.decode().split("\n\n")
        if line.startswith("data: {")
        for choice in json.loads(line[6:])["choices"]
    ]
    if path == CHAT:
        return [choice["delta"].get("content") or "" for choice in choices]
    return [choice["text"] for choice in choices]


async def ask(made: Cluster, path: str = COMPLETION, **body: Any) -> tuple[int, Any]:
    messages = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {}
    status, answer, _ = await made.ask(path, **messages, **body)
    return status, answer


@pytest.mark.parametrize("change", [{"attempt": "~1"}, {"decode": "d2"}])
async def test_a_leg_that_went_to_the_wrong_place_is_left_for_the_right_one(
    change: dict[str, str],
) -> None:
    release = asyncio.Event()
    instances = trio(early_prefill(release, **change), continuation)
    instances[1].chunk_gate.clear()
    async with cluster(*instances) as made:
        asking = asyncio.create_task(ask(made, stream=True))
        await eventually(lambda: legs(made["d1"]))
        release.set()
        await eventually(lambda: made["d1"].aborted == 1)
        made["d1"].chunk_gate.set()
        status, answer = await asking
        assert status == 200
        assert "".join(_texts(answer, COMPLETION)) == "".join(TEXTS)
        used = made[change.get("decode", "d1")]
        assert legs(used)[-1].prior_output is not None
        assert not legs(used)[-1].is_early


async def test_a_first_token_that_is_the_last_leaves_the_second_leg() -> None:
    release = asyncio.Event()
    instances = trio(early_prefill(release, is_final=True), continuation)
    instances[1].chunk_gate.clear()
    async with cluster(*instances) as made:
        asking = asyncio.create_task(ask(made, stream=True))
        await eventually(lambda: legs(made["d1"]))
        release.set()
        status, answer = await asking
        assert status == 200
        assert "".join(_texts(answer, COMPLETION)) == TEXTS[0]
        await eventually(lambda: made["d1"].aborted == 1)


async def test_a_client_that_leaves_takes_both_legs_along() -> None:
    instances = trio(early_prefill(asyncio.Event()), continuation)
    instances[1].chunk_gate.clear()
    async with cluster(*instances) as made:
        asking = asyncio.create_task(ask(made, stream=True))
        await eventually(lambda: legs(made["d1"]))
        asking.cancel()
        await eventually(lambda: made["d1"].aborted == 1 and made["p"].aborted == 1)
        await eventually(lambda: not len(made.scheduler.table))


async def test_an_early_leg_that_finds_no_room_is_sent_again_with_the_token() -> None:
    release = asyncio.Event()
    instances = trio(early_prefill(release), continuation)

    async def busy_at_first(
        fake: FakeInstance, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        if len(fake.calls) == 1:
            return await full()
        return await continuation(fake, request, body)

    instances[1].handler = busy_at_first
    async with cluster(*instances) as made:
        asking = asyncio.create_task(ask(made, stream=True))
        await eventually(lambda: legs(made["d1"]))
        release.set()
        status, answer = await asking
        assert status == 200
        assert "".join(_texts(answer, COMPLETION)) == "".join(TEXTS)
        assert not made["d2"].calls


@pytest.mark.parametrize(
    "body",
    [{"n": 2}, {"logprobs": 1}, {"stop": ["x"]}, {"response_format": {"type": "json_object"}}],
)
async def test_a_leg_that_needs_more_than_the_token_is_not_opened_early(
    body: dict[str, Any],
) -> None:
    release = asyncio.Event()
    release.set()
    async with cluster(*trio(early_prefill(release), continuation)) as made:
        status, _ = await ask(made, **body)
        assert status == 200
        assert not any(leg.is_early for leg in legs(made["d1"]))


class _Coming:
    """Stands for an answer; says whether it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("steps", range(4))
async def test_an_early_response_is_closed_when_its_request_is_cancelled(steps: int) -> None:
    """Also when both happen in the same moment."""
    coming, come = _Coming(), asyncio.Event()

    async def post() -> Any:
        await come.wait()
        return coming

    opened = asyncio.create_task(post())
    waiting = asyncio.create_task(arrived(opened))
    await asyncio.sleep(0)
    come.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    is_taken = waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting, opened])
    await asyncio.sleep(0)
    assert is_taken or opened.cancelled() or coming.is_closed
