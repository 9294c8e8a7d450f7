"""The decode request is sent before the prefill response, and used only where it fits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.router.fakes import Cluster, FakeInstance, Handler, cluster, eventually, full, trio
from tests.router.writers import (
    CACHED_TOKENS,
    CHAT,
    COMPLETION,
    HELD_TOKENS,
    PATHS,
    PREDICTED,
    TEXTS,
    body_of,
    continuation,
    pieces,
    prefill,
    writer,
)
from vllm_tetri.handover import DecodeParams
from vllm_tetri.router.request import parse_request


def legs(instance: FakeInstance) -> list[DecodeParams]:
    found = [instance.leg(index) for index in range(len(instance.calls))]
    return [leg for leg in found if isinstance(leg, DecodeParams)]


@asynccontextmanager
async def opened(
    path: str = COMPLETION,
    *,
    decode: Handler = continuation,
    is_held: bool = True,
    stream: bool = True,
    **change: Any,
) -> AsyncIterator[tuple[Cluster, asyncio.Event, asyncio.Task[Any]]]:
    """Both requests are under way; prefill responds when the event is set."""
    release = asyncio.Event()
    instances = trio(prefill(release=release, **change), decode)
    if is_held:
        instances[1].chunk_gate.clear()
    async with cluster(*instances) as made:
        asking = asyncio.create_task(made.ask(path, **body_of(path, stream=stream)))
        await eventually(lambda: legs(made["d1"]))
        yield made, release, asking


async def text_of(asking: asyncio.Task[Any]) -> str:
    status, answer, _ = await asking
    assert status == 200
    return "".join(pieces(answer))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_second_leg_is_open_before_the_first_answers(path: str, stream: bool) -> None:
    async with opened(path, is_held=False, stream=stream) as (made, release, asking):
        (leg,) = legs(made["d1"])
        assert leg.is_early
        assert leg.prior_output is None
        assert leg.predicted == PREDICTED
        assert (leg.cached_tokens, leg.held_tokens) == (CACHED_TOKENS, HELD_TOKENS)
        release.set()
        if stream:
            assert await text_of(asking) == "".join(TEXTS)
        else:
            (choice,) = (await asking)[1]["choices"]
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert text == "".join(TEXTS)
        assert len(legs(made["d1"])) == 1
        assert not legs(made["d2"])


@pytest.mark.parametrize("change", [{"attempt": "~1"}, {"decode_name": "d2"}])
async def test_a_leg_that_went_to_the_wrong_place_is_left_for_the_right_one(
    change: dict[str, str],
) -> None:
    async with opened(**change) as (made, release, asking):
        release.set()
        await eventually(lambda: made["d1"].aborted == 1)
        made["d1"].chunk_gate.set()
        assert await text_of(asking) == "".join(TEXTS)
        used = made[change.get("decode_name", "d1")]
        assert legs(used)[-1].prior_output is not None
        assert not legs(used)[-1].is_early


async def test_a_first_token_that_is_the_last_leaves_the_second_leg() -> None:
    async with opened(is_final=True) as (made, release, asking):
        release.set()
        assert await text_of(asking) == TEXTS[0]
        await eventually(lambda: made["d1"].aborted == 1)


async def test_a_client_that_leaves_takes_both_legs_along() -> None:
    async with opened() as (made, _, asking):
        asking.cancel()
        await eventually(lambda: made["d1"].aborted == 1 and made["p"].aborted == 1)
        await eventually(lambda: not len(made.scheduler.table))


async def test_an_early_leg_that_finds_no_room_is_sent_again_with_the_token() -> None:
    async def busy_at_first(
        fake: FakeInstance, request: web.Request, body: Any
    ) -> web.StreamResponse:
        return await (full() if len(fake.calls) == 1 else continuation(fake, request, body))

    async with opened(is_held=False, decode=busy_at_first) as (made, release, asking):
        release.set()
        assert await text_of(asking) == "".join(TEXTS)
        assert not made["d2"].calls


@pytest.mark.parametrize("path", PATHS)
async def test_an_output_whose_first_token_was_lost_on_the_way_goes_on_elsewhere(path: str) -> None:
    """The client has that token; the instance draws another one, as there is no seed."""
    otherwise = writer(texts=("other", "x"))

    async def handle(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        leg = legs(fake)[-1] if legs(fake) else None
        is_lost = leg is not None and leg.prior_output is None
        return await (otherwise if is_lost else continuation)(fake, request, body)

    async with opened(path, is_held=False, decode=handle) as (made, release, asking):
        release.set()
        assert await text_of(asking) == "".join(TEXTS)
        assert made["d2"].calls


@pytest.mark.parametrize(
    "body",
    [{"n": 2}, {"logprobs": 1}, {"stop": ["x"]}, {"response_format": {"type": "json_object"}}],
)
async def test_a_leg_that_needs_more_than_the_token_is_not_opened_early(
    body: dict[str, Any],
) -> None:
    release = asyncio.Event()
    release.set()
    async with cluster(*trio(prefill(release=release), continuation)) as made:
        assert (await made.ask(**body))[0] == 200
        assert not any(leg.is_early for leg in legs(made["d1"]))


@pytest.mark.parametrize(
    ("more", "is_early"), [({}, True), ({"tool_choice": None}, False), ({"stop": "x"}, False)]
)
async def test_no_text_is_shown_that_a_parser_may_keep(
    more: dict[str, Any], is_early: bool
) -> None:
    """vLLM parses tools with `"tool_choice": null`, too, though not where it is absent."""
    parsed = parse_request(CHAT, json.dumps(body_of(CHAT) | more).encode(), {})
    assert parsed.may_decode_early is is_early


async def test_a_suffix_is_in_the_prompt_that_decode_gets() -> None:
    async with cluster(*trio(prefill(), continuation)) as made:
        status, *_ = await made.ask(COMPLETION, **body_of(COMPLETION) | {"suffix": "return 1"})
        assert status == 200
        calls = [call for each in made.instances.values() for call in each.calls]
        suffixes = [call.body.get("suffix") for call in calls]
        assert sorted(map(str, suffixes)) == ["None", "return 1"]
