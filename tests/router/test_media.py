"""Requests with images: what instances are sent, and what of theirs goes to the client."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from tests.router.fakes import FakeInstance, answer_500, cluster, metric, trio
from tests.router.writers import CHAT, TEXTS, body_of, continuation, dies, prefill, stream_of, two
from tests.router.writers import writer as writes
from vllm_tetri.handover import DecodeParams, PrefillParams
from vllm_tetri.types import Mode

INLINE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
LINKED = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
BAD = {"message": "Cannot connect to host", "type": "InternalServerError", "param": None,
       "code": 500}  # fmt: skip


def saying(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": "hello"}, *parts]}]


async def bad_media(*_: Any) -> web.StreamResponse:
    return web.json_response({"error": BAD}, status=500)


@pytest.mark.parametrize("part", [INLINE, LINKED, {"image_url": "https://example.com/a.png"}])
async def test_the_decode_instance_gets_the_media_and_not_the_token_ids(part: Any) -> None:
    messages = saying(part)
    async with cluster(*trio(prefill(), continuation)) as made:
        raw, headers = await stream_of(made, CHAT, messages=messages)
        assert headers["x-tetri-decode"] == "d1"
        assert raw.count(b"[DONE]") == 1
        for name, params in (("p", PrefillParams), ("d1", DecodeParams)):
            (call,) = made[name].calls
            assert isinstance(made[name].leg(), params)
            assert call.body["messages"] == messages
            assert call.body["kv_transfer_params"].keys() == {"tetri"}
        # Behind a link there may be another image later, and so another first token.
        how = "early" if part is INLINE else "with_second"
        assert await metric(made, f'tetri_first_tokens_total{{how="{how}"}}') == 1


async def test_parts_of_text_are_tokenised_once() -> None:
    async with cluster(*trio(prefill(), continuation)) as made:
        await stream_of(made, CHAT, messages=saying({"type": "text", "text": "you", "x": 1}))
        assert "prompt_token_ids" in made["d1"].calls[0].body["kv_transfer_params"]


@pytest.mark.parametrize(
    "part",
    [
        {**INLINE, "uuid": "mine"},
        {"type": "text", "text": "t", "uuid": "mine", "image_url": "data:,"},
        {"type": "prompt_embeds", "data": "AAAA"},
        {"prompt_embeds": None, "data": "AAAA"},
    ],
)
async def test_what_no_digest_names_is_served_by_one_instance(part: Any) -> None:
    async with cluster(*trio(prefill(), continuation)) as made:
        _, headers = await stream_of(made, CHAT, messages=saying(part))
        assert headers["x-tetri-prefill"] == headers["x-tetri-decode"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_error_about_media_is_vllms_own_and_comes_once(is_streamed: bool) -> None:
    async with cluster(*two(bad_media, bad_media)) as made:
        body = body_of(CHAT, messages=saying(LINKED), stream=is_streamed)
        status, answer, _ = await made.ask(CHAT, **body)
        assert (status, answer) == (500, {"error": BAD})
        assert sum(len(each.calls) for each in made.instances.values()) == 1
        assert await metric(made, "tetri_crashes_with_request_total") == 0


async def test_an_instance_that_is_dead_is_no_error_about_media() -> None:
    async def broken(fake: FakeInstance, *_: Any) -> web.StreamResponse:
        fake.is_healthy = False
        return await bad_media()

    for handler in (broken, answer_500, dies):
        async with cluster(*two(handler, continuation)) as made:
            raw, _ = await stream_of(made, CHAT, messages=saying(INLINE))
            assert raw.count(b"[DONE]") == 1
            assert len(made["b"].calls) == 1


async def test_a_decode_instance_that_cannot_read_the_media_is_replaced() -> None:
    async with cluster(*trio(prefill(), continuation)) as made:
        made["d1"].handler = bad_media
        raw, headers = await stream_of(made, CHAT, messages=saying(LINKED))
        assert raw.count(b"[DONE]") == 1
        assert headers["x-tetri-decode"] != "d1"


@pytest.mark.parametrize(
    ("part", "num_received", "is_continued"),
    [(INLINE, 4, True), (LINKED, 4, False), (LINKED, 1 + len(TEXTS), True)],  # it lacks only DONE
)
async def test_a_stream_of_one_instance_goes_on_if_its_media_are_the_same(
    part: Any, num_received: int, is_continued: bool
) -> None:
    async with cluster(*two(writes(num_received), continuation), mode=Mode.WHOLE) as made:
        raw, _ = await stream_of(made, CHAT, messages=saying(part))
        assert (b"[DONE]" in raw) == is_continued
        assert (b'"error"' in raw) == (not is_continued)
        assert (TEXTS[-1].encode() in raw) == is_continued
