"""The first token goes to the client before the second exists, and only once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from tests.router.fakes import (
    FakeInstance,
    Handler,
    answer_500,
    cluster,
    eventually,
    hang_up,
    metric,
    trio,
)
from tests.router.scripts import Script, event
from tests.router.writers import (
    CACHED_TOKENS,
    CHAT,
    COMPLETION,
    HELD_TOKENS,
    PATHS,
    TEXTS,
    begin_stream,
    body_of,
    continuation,
    pieces,
    prefill,
    script_of,
    stream_of,
    writer,
)
from vllm_tetri.handover import DecodeParams, PriorOutput, from_params
from vllm_tetri.types import TransferId


async def engine_dies(fake: FakeInstance, request: web.Request, _: Any) -> web.StreamResponse:
    answer = await begin_stream(request)
    await fake.chunk_gate.wait()
    await answer.write(event({"error": {"message": "EngineCore died", "code": 500}}))
    return answer


async def breaks_after_the_role(
    fake: FakeInstance, request: web.Request, body: Any
) -> web.StreamResponse:
    await begin_stream(request, script_of(request, body).events(2)[0][:60])
    await asyncio.sleep(0.05)
    return await hang_up(fake, request, body)


@pytest.mark.parametrize("path", PATHS)
async def test_the_token_is_there_while_the_decode_instance_is_silent(path: str) -> None:
    async with cluster(*trio(prefill(), continuation)) as made:
        made["d1"].chunk_gate.clear()
        body = body_of(path, stream=True)
        async with made.client.post(made.url + path, json=body) as response:
            seen = await response.content.readany()
            assert pieces(seen) == ["Ab"]
            assert response.headers["x-tetri-decode"] == "d1"
            (entry,) = await made.table()
            assert (entry["phase"], entry["generated"]) == ("handing_over", 1)
            await eventually(lambda: made["d1"].calls)
            made["d1"].chunk_gate.set()
            seen += await response.content.read()
        assert pieces(seen) == list(TEXTS)
        assert await metric(made, 'tetri_first_tokens_total{how="early"}') == 1
        assert await metric(made, "tetri_time_to_first_token_seconds_count") == 1
        assert made["p"].cancelled == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seen", [{}, {"logprobs": 1, "return_token_ids": True}])
async def test_the_stream_is_the_one_of_one_instance(path: str, seen: dict[str, Any]) -> None:
    options = {"stream_options": {"include_usage": True}, **seen}
    async with cluster(*trio(prefill(), continuation)) as made:
        raw, _ = await stream_of(made, path, **options)

    def normal(text: bytes) -> list[dict[str, Any]]:
        lines = [line.removeprefix(b"data: ") for line in text.split(b"\n\n")]
        return [json.loads(line) for line in lines if line and line != b"[DONE]"]

    events = normal(raw)
    assert len({each["created"] for each in events}) == 1
    assert len({each["id"] for each in events}) == 1
    expected = normal(b"".join(Script(
        TEXTS, is_chat=path == CHAT, has_usage=True, has_logprobs="logprobs" in seen,
        has_token_ids="return_token_ids" in seen,
    ).events()))  # fmt: skip
    for each in (*events, *expected):
        del each["id"], each["created"]
    assert events == expected
    assert raw.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("path", PATHS)
async def test_the_second_leg_carries_token_and_prompt_ids(path: str) -> None:
    async with cluster(*trio(prefill(), continuation)) as made:
        await made.ask(path, **body_of(path))
        body = made["d1"].calls[0][1]
        leg = made["d1"].leg()
        assert isinstance(leg, DecodeParams)
        assert leg.prior_output == PriorOutput([100])
        assert (leg.cached_tokens, leg.held_tokens) == (CACHED_TOKENS, HELD_TOKENS)
        if path == CHAT:
            assert body["kv_transfer_params"]["prompt_token_ids"] == [5, 6, 7]
            assert body["messages"] == body_of(path)["messages"]
        else:
            assert body["prompt"] == [5, 6, 7]


async def test_the_rendered_prompt_is_rendered_again_where_it_is_wanted() -> None:
    async with cluster(*trio(prefill(), continuation)) as made:
        await stream_of(made, CHAT, return_prompt_text=True)
        assert "prompt_token_ids" not in made["d1"].calls[0][1]["kv_transfer_params"]


KEPT: list[dict[str, Any]] = [
    {"stop": ["x"]},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
    {"tools": [{}]},
    {"tool_choice": "auto"},
    {"n": 2},
]


@pytest.mark.parametrize("options", KEPT, ids=str)
async def test_what_is_not_plain_text_waits_for_the_second_leg(options: dict[str, Any]) -> None:
    async with cluster(*trio(prefill(), continuation)) as made:
        made["d1"].chunk_gate.clear()
        task = asyncio.create_task(stream_of(made, CHAT, **options))
        await eventually(lambda: made["d1"].calls)
        (entry,) = await made.table()
        assert entry["generated"] == 0
        made["d1"].chunk_gate.set()
        assert "".join(pieces((await task)[0])) == "".join(TEXTS)
        assert await metric(made, 'tetri_first_tokens_total{how="early"}') == 0


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"continues": False}, {}),
        ({"continues_seeded": False}, {"seed": 3}),
        ({"reasons": True}, {}),
    ],
)
async def test_a_token_that_may_continue_differently_is_not_shown_early(
    change: dict[str, bool], options: dict[str, Any]
) -> None:
    fakes = trio(prefill(), continuation)
    fakes[1].abilities = change
    async with cluster(*fakes) as made:
        await stream_of(made, CHAT, **options)
        assert await metric(made, 'tetri_first_tokens_total{how="with_second"}') == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("text", ["", "\ufffd"])  # none, or a part of a character
async def test_a_token_without_text_yet_is_shown_early_without_it(path: str, text: str) -> None:
    async with cluster(*trio(prefill(texts=(text,)), writer(texts=("", "日", " end")))) as made:
        raw, _ = await stream_of(made, path)
        assert await metric(made, 'tetri_first_tokens_total{how="early"}') == 1
        assert pieces(raw)[0] == ""
        assert "".join(pieces(raw)) == "日 end"
        assert raw.endswith(b"data: [DONE]\n\n")


async def test_every_choice_draws_its_own_first_token() -> None:
    async with cluster(*trio(prefill(), continuation)) as made:
        await stream_of(made, COMPLETION, n=3, temperature=1.0, stop=["x"], stop_token_ids=[3])
        first, second = made["p"].calls[0][1], made["d1"].calls[0][1]
        assert (first["n"], first["ignore_eos"]) == (1, True)
        assert not {"stop", "stop_token_ids"} & set(first)
        assert (second["n"], second["stop"], second["stop_token_ids"]) == (3, ["x"], [3])
        leg = made["d1"].leg()
        assert isinstance(leg, DecodeParams)
        assert leg.transfer
        assert leg.prior_output is None


async def test_a_complaint_about_the_choices_passes_and_the_kv_is_dropped() -> None:
    error = {"error": {"message": "n must be 1", "code": 400}}

    async def complain(*_: Any) -> web.StreamResponse:
        return web.json_response(error, status=400)

    async with cluster(*trio(prefill(), continuation)) as made:
        made["d1"].handler = complain
        assert (await made.ask(n=2))[:2] == (400, error)
        await eventually(lambda: made["d1"].cancelled and made["p"].cancelled)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("has_stop_string", [False, True])
async def test_a_first_token_that_is_the_last_starts_no_second_leg(
    path: str, is_streamed: bool, has_stop_string: bool
) -> None:
    handler = prefill(is_final=not has_stop_string, finish_reason="stop", texts=("Ab",))
    async with cluster(*trio(handler, continuation)) as made:
        _, answer, headers = await made.ask(path, **body_of(path, stream=is_streamed))
        assert headers["x-tetri-decode"] == "p"
        if is_streamed:
            assert pieces(answer) == ["Ab"]
            assert answer.endswith(b"data: [DONE]\n\n")
        else:
            assert answer["kv_transfer_params"] is None
            assert answer["choices"][0]["finish_reason"] == "stop"
        assert made["d1"].calls == made["d2"].calls == []
        assert await made.table() == []
        assert await metric(made, 'tetri_first_tokens_total{how="last"}') == 1
        if has_stop_string:  # a transfer was opened
            await eventually(lambda: made["p"].cancelled and made["d1"].cancelled)
        else:
            assert await metric(made, "tetri_transfers_cancelled_total") == 0


@pytest.mark.parametrize("path", PATHS)
async def test_instances_that_count_tokens_in_every_stream_count_here_too(path: str) -> None:
    handler = prefill(is_final=True, finish_reason="stop", texts=("Ab",), counts_each=True)
    async with cluster(*trio(handler, continuation)) as made:
        raw, _ = await stream_of(made, path)  # the client asks for no usage
        events = [json.loads(each[6:]) for each in raw.split(b"\n\n")[:-2]]
        counts = [each["usage"]["completion_tokens"] for each in events]
        assert counts == ([0, 1, 1] if path == CHAT else [1, 1])
        assert events[-1]["choices"] == []

    async with cluster(*trio(prefill(counts_each=True), continuation)) as made:
        raw, _ = await stream_of(made, path)
        events = [json.loads(each[6:]) for each in raw.split(b"\n\n")[: 2 if path == CHAT else 1]]
        assert [each["usage"]["completion_tokens"] for each in events] == [0, 1][-len(events) :]


@pytest.mark.parametrize("options", [{"tools": [{}]}, {"n": 2}])
async def test_an_ending_first_token_that_cannot_be_the_answer_is_served_whole(
    options: dict[str, Any],
) -> None:
    async with cluster(*trio(prefill(is_final=True, finish_reason="stop"), continuation)) as made:
        assert pieces((await stream_of(made, CHAT, **options))[0]) == list(TEXTS)
        calls = [*made["d1"].calls, *made["d2"].calls]
        assert [call[1].get("kv_transfer_params") for call in calls] == [None]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", [answer_500, engine_dies, breaks_after_the_role])
async def test_after_the_token_another_instance_goes_on(path: str, fault: Handler) -> None:
    async with cluster(*trio(prefill(), continuation)) as made:
        made["d1"].handler = fault
        seen, _ = await stream_of(made, path)
        assert pieces(seen) == list(TEXTS)
        leg = made["d2"].leg()
        assert isinstance(leg, DecodeParams)
        assert (leg.transfer, leg.prior_output) == ("", PriorOutput([100], is_seen=True))
        await eventually(lambda: made["d1"].cancelled and made["p"].cancelled)
        assert await metric(made, 'tetri_fallbacks_total{reason="decode_failed"}') == 1


async def test_the_prefill_instance_goes_on_when_there_is_no_other() -> None:
    async with cluster(*trio(prefill(), continuation)[:2]) as made:
        made["d1"].handler = answer_500
        assert pieces((await stream_of(made, COMPLETION))[0]) == list(TEXTS)
        assert len(made["p"].calls) == 2


async def test_without_a_taker_for_the_kv_the_prefill_instance_goes_on() -> None:
    async with cluster(*trio(prefill(decode_name=""), continuation)) as made:
        seen, _ = await stream_of(made, COMPLETION)
        assert pieces(seen) == list(TEXTS)
        assert [*made["d1"].calls, *made["d2"].calls] == []
        _, call = made["p"].calls
        leg = from_params(call[1]["kv_transfer_params"])
        prior = PriorOutput([100])
        expected = DecodeParams(TransferId(""), "d1", prior, cached_tokens=CACHED_TOKENS)
        assert leg == expected
        assert await metric(made, 'tetri_first_tokens_total{how="early"}') == 1
        assert await metric(made, 'tetri_fallbacks_total{reason="no_decode_instance"}') == 1


async def test_a_decode_instance_that_goes_on_otherwise_is_an_error_not_a_wrong_text() -> None:
    async def other(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        return await begin_stream(request, *Script(("other", "x")).events(2))

    async with cluster(*trio(prefill(), continuation)) as made:
        made["d1"].handler = other
        seen, _ = await stream_of(made, COMPLETION)
        assert b"other" not in seen.split(b'"error"')[0]
        assert b'"error"' in seen
        assert await metric(made, 'tetri_first_tokens_total{how="mismatch"}') == 1
