"""A stream whose instance dies goes on from another one, as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.router.fakes import (
    FakeInstance,
    Handler,
    answer_500,
    cluster,
    eventually,
    full,
    hang,
    hang_up,
    metric,
    trio,
)
from tests.router.scripts import CHAT, Script, event, joined
from tests.router.writers import (
    COMPLETION,
    PATHS,
    STREAM_HEADERS,
    TEXTS,
    begin_stream,
    body_of,
    dies,
    expected,
    num_given,
    pair_and_spare,
    prefill,
    script_of,
    several,
    stream_of,
    two,
    writer,
)
from vllm_tetri.handover import DecodeParams
from vllm_tetri.router import relay as relay_module
from vllm_tetri.router import retry, scheduler
from vllm_tetri.types import Mode, Role

USAGE = {"stream_options": {"include_usage": True}}
USAGE_EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def is_whole(raw: bytes, headers: Any, path: str, **options: Any) -> None:
    """It is the stream of one instance, but for where it was cut into events."""
    script = expected(headers, path, **options)
    created = json.loads(raw.split(b"\n\n")[0][6:])["created"]
    assert created
    whole = b"".join(Script.events(script))
    assert joined(raw.replace(b'"created":%d' % created, b'"created":1700000000')) == joined(whole)
    assert raw.count(b"[DONE]") == 1
    assert raw.count(b'"role"') == (path == CHAT)
    assert raw.count(b'"finish_reason":"length"') == 1


# -- split: what the decode instance wrote goes on elsewhere -------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dies_after", [1, 2, 4, 6])
@pytest.mark.parametrize("cut", [0, 40])
async def test_a_stream_goes_on_behind_its_last_event(path: str, dies_after: int, cut: int) -> None:
    async with cluster(*pair_and_spare(dies_after, cut=cut)) as made:
        raw, headers = await stream_of(made, path)
        is_whole(raw, headers, path)
        assert headers["x-tetri-decode"] == "d1"
        leg = next(
            each
            for name in ("d2", "p")
            for index in range(len(made[name].calls))
            if isinstance(each := made[name].leg(index), DecodeParams)
        )
        assert leg.transfer == ""
        assert leg.prior_output is not None
        assert leg.prior_output.token_ids == list(range(100, 100 + len(leg.prior_output.token_ids)))
        assert await metric(made, 'tetri_streams_broken_total{outcome="resumed"}') == 1
        assert await metric(made, "tetri_resume_gap_seconds_count") == 1
        assert await made.table() == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (USAGE, {"has_usage": True}),
        (USAGE_EACH, {"has_usage": True, "counts_each": True}),
        ({"return_token_ids": True}, {"has_token_ids": True}),
        ({"logprobs": True}, {"has_logprobs": True}),
        ({"seed": 5, "temperature": 1.0}, {}),
        ({"stop": ["never"]}, {}),
        ({"response_format": {"type": "json_object"}}, {}),
    ],
    ids=str,
)
async def test_whatever_the_client_wants_to_see(
    path: str, options: dict[str, Any], shape: dict[str, Any]
) -> None:
    async with cluster(*pair_and_spare(4)) as made:
        raw, headers = await stream_of(made, path, **options)
        is_whole(raw, headers, path, **shape)
        assert await metric(made, 'tetri_streams_broken_total{outcome="resumed"}') == 1
        (call,) = made["d2"].calls
        leg = made["d2"].leg()
        assert isinstance(leg, DecodeParams)
        assert leg.prior_output is not None
        assert leg.prior_output.is_seen
        is_chat = path == CHAT  # the prompt is not tokenised again
        sent = call[1]["kv_transfer_params"]["prompt_token_ids"] if is_chat else call[1]["prompt"]
        assert sent == [5, 6, 7]


# -- whole ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dies_after", [1, 2, 5])
async def test_a_stream_of_one_instance_goes_on_as_well(path: str, dies_after: int) -> None:
    both = two(writer(dies_after), writer(created=1_800_000_000))
    async with cluster(*both, mode=Mode.WHOLE) as made:
        raw, headers = await stream_of(made, path, **USAGE)
        is_whole(raw, headers, path, has_usage=True)
        assert len(made["a"].calls) == len(made["b"].calls) == 1
        assert made["a"].calls[0][1]["return_token_ids"] is True


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{}, {"n": 2}], ids=str)
async def test_a_stream_that_breaks_in_its_first_event_begins_anew(
    path: str, options: dict[str, Any]
) -> None:
    """Also one that no other instance could continue."""
    both = two(writer(0, cut=40), writer(created=1_800_000_000))
    async with cluster(*both, mode=Mode.WHOLE) as made:
        raw, headers = await stream_of(made, path, **options)
        is_whole(raw, headers, path)
        assert headers["x-tetri-decode"] == "b"
        assert raw.count(b'"created":1800000000,') == raw.count(b'"created"')
        assert await metric(made, "tetri_retries_total") == 1
        (row,) = made.scheduler.history.since(0.0)
        assert row.first_byte_s is not None
        assert row.first_byte_s - row.arrival_s > 0.04  # when the first instance died


# -- what may go wrong next ----------------------------------------------------------------


async def test_a_request_is_refused_after_the_second_crash() -> None:
    fakes = pair_and_spare(3)
    fakes[2].handler = writer(2)
    async with cluster(*fakes) as made:
        raw, _ = await stream_of(made, COMPLETION)
        assert b"engines crashed while they had this request" in raw
        assert b"DONE" not in raw
        text = b"".join(
            json.loads(each[6:])["choices"][0]["text"].encode()
            for each in raw.split(b"\n\n")
            if each and b'"error"' not in each
        )
        assert "".join(TEXTS).encode().startswith(text)
        assert not [call for call in made["p"].calls if call[1].get("stream")]
        assert await metric(made, "tetri_poison_requests_total") == 1

        status, answer, headers = await made.ask(**body_of(COMPLETION, stream=True))
        assert (status, headers["x-tetri-error"]) == (500, "poison_request")
        assert answer["error"]["type"] == "InternalServerError"
        assert await metric(made, "tetri_poison_requests_refused_total") == 1
        assert (await made.ask(prompt="another"))[0] == 200
        assert await made.table() == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_other_routes_refuse_what_engines_crash_with_too(path: str) -> None:
    async def crashes(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        fake.is_healthy = False
        fake.speaks.clear()
        return web.json_response({"error": {"message": "died"}}, status=500)

    fakes = [FakeInstance(name, Role.BOTH) for name in "abc"]
    for each in fakes:
        each.handler = crashes
    async with cluster(*fakes) as made:
        answers = []
        for _ in range(3):
            answers.append(await made.ask(path, model="tiny", x=1))
            asked = [each.id for each in fakes if each.calls]
            await eventually(
                lambda asked=asked: all(made.state(each) == "silent" for each in asked)
            )
        assert answers[-1][2]["x-tetri-error"] == "poison_request"
        assert sum(len(each.calls) for each in fakes) == 2


async def test_streams_that_break_without_a_death_move_twice_and_no_more() -> None:
    async def breaks(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        await begin_stream(request, *script_of(request, body).events(num_given(body) + 1)[:2])
        await asyncio.sleep(0.05)
        return await hang_up(fake, request, body)

    both = [FakeInstance(name, Role.BOTH) for name in "abcd"]
    for each in both:
        each.handler = breaks
    async with cluster(*both, mode=Mode.WHOLE) as made:
        raw, _ = await stream_of(made, COMPLETION)
        assert sum(len(each.calls) for each in both) == 3
        assert b'"error"' in raw
        assert b"(tried 3)" in raw
        assert await metric(made, 'tetri_streams_broken_total{outcome="failed"}') == 1
        assert await metric(made, "tetri_poison_requests_total") == 0
        assert raw.count(b'"text"') == 6  # each of them went on


@pytest.mark.parametrize("path", PATHS)
async def test_a_node_with_many_instances_may_die(path: str) -> None:
    """Each of them fails the stream once, and the request is not to blame."""
    both = several(writer(2), *[writer()] * 4)
    async with cluster(*both, mode=Mode.WHOLE) as made:
        for name in "bcd":
            await made[name].stop_http()
        raw, headers = await stream_of(made, path)
        is_whole(raw, headers, path)
        assert [len(each.calls) for each in both] == [1, 0, 0, 0, 1]


async def test_an_instance_that_goes_on_otherwise_is_an_error() -> None:
    fakes = pair_and_spare(4)
    fakes[2].handler = writer(texts=("Ab", " other", "x", "y"))
    async with cluster(*fakes) as made:
        raw, _ = await stream_of(made, COMPLETION)
        assert b"other" not in raw.split(b'"error"')[0]
        assert b"does not continue the output" in raw
        assert await metric(made, 'tetri_streams_broken_total{outcome="mismatch"}') == 1


async def test_an_engine_that_computes_all_again_is_followed() -> None:
    """What cannot take the tokens writes them once more, one by one."""

    async def again(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        return await begin_stream(request, *script_of(request, body).events())

    for path in PATHS:
        fakes = pair_and_spare(5)
        fakes[2].handler = again
        async with cluster(*fakes) as made:
            raw, headers = await stream_of(made, path, return_token_ids=True)
            is_whole(raw, headers, path, has_token_ids=True)


@pytest.mark.parametrize("options", [{"tools": [{}]}, {"n": 2}], ids=str)
async def test_what_is_more_than_one_text_ends_with_one_error(options: dict[str, Any]) -> None:
    async with cluster(*pair_and_spare(3)) as made:
        raw, _ = await stream_of(made, CHAT, **options)
        *events, last, empty = raw.split(b"\n\n")
        assert empty == b""
        assert len(events) == 3
        error = json.loads(last[6:])["error"]
        assert error["code"] == 502
        assert "instance d1 broke off in the middle of the response; only" in error["message"]
        assert await metric(made, 'tetri_streams_broken_total{outcome="unprovable"}') == 1
        assert await made.table() == []


async def test_an_instance_of_another_kind_goes_on_only_if_it_may() -> None:
    for resumes_anywhere in (False, True):
        both = two(writer(2), writer())
        both[1].identity = {"model": "tiny", "dtype": "bfloat16"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(retry, "RETRY_S", 0.3)
            async with cluster(*both, mode=Mode.WHOLE, resumes_anywhere=resumes_anywhere) as made:
                raw, headers = await stream_of(made, COMPLETION)
                if resumes_anywhere:
                    is_whole(raw, headers, COMPLETION)
                else:
                    assert b'"error"' in raw
                    assert both[1].calls == []


async def test_a_stream_waits_for_an_instance_that_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "_PLACE_AGAIN_S", 0.02)
    only = FakeInstance("a", Role.BOTH)
    only.handler = writer(3)
    async with cluster(only) as made:
        asking = asyncio.create_task(stream_of(made, COMPLETION))
        await eventually(lambda: not only.is_healthy)
        again = FakeInstance("a", Role.BOTH)
        again.pid = 4712
        again.handler = writer()
        await only.stop_http()
        await again.start(made.control)
        made.instances["again"] = again
        raw, headers = await asking
        is_whole(raw, headers, COMPLETION)


async def test_a_stream_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "_PLACE_AGAIN_S", 0.02)
    asked = 0

    async def full_at_first(
        fake: FakeInstance, request: web.Request, body: Any
    ) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return await (full() if asked <= 2 else writer()(fake, request, body))

    async with cluster(*two(writer(3), full_at_first), mode=Mode.WHOLE) as made:
        raw, headers = await stream_of(made, COMPLETION)
        is_whole(raw, headers, COMPLETION)
        assert asked == 3


@pytest.mark.parametrize("decode", ["d1", ""])
async def test_a_stream_waits_for_room_behind_its_first_token(
    monkeypatch: pytest.MonkeyPatch, decode: str
) -> None:
    """Without a decode instance it is the prefill instance that is asked first."""
    monkeypatch.setattr(relay_module, "DECODE_PATIENCE_S", 0.1)
    monkeypatch.setattr(relay_module, "_PLACE_AGAIN_S", 0.02)
    asked = set[str]()

    async def full_at_first(
        fake: FakeInstance, request: web.Request, body: Any
    ) -> web.StreamResponse:
        if not body.get("stream"):
            return await prefill(decode_name=decode)(fake, request, body)
        is_full = fake.id == decode or fake.id not in asked
        asked.add(fake.id)
        return await (full() if is_full else writer()(fake, request, body))

    async with cluster(*trio(full_at_first, full_at_first)) as made:
        raw, headers = await stream_of(made, COMPLETION)
        is_whole(raw, headers, COMPLETION)


async def test_a_client_that_leaves_in_the_gap_takes_all_with_it() -> None:
    fakes = pair_and_spare(3)
    async with cluster(*fakes) as made:
        for name in ("d2", "p"):
            made[name].chunk_gate.clear()
        body = body_of(COMPLETION, stream=True)
        async with (
            aiohttp.ClientSession() as session,
            session.post(made.url + COMPLETION, json=body) as response,
        ):
            await response.content.readany()
            await eventually(lambda: made["d2"].calls)
            response.close()
        await eventually(lambda: made["d2"].aborted == 1)
        await eventually(lambda: not len(made.scheduler.table))


# -- errors that are no deaths, and deaths that look like errors --------------------------


async def test_an_error_in_the_stream_of_a_live_engine_is_the_clients() -> None:
    error = event({"error": {"message": "no more pages", "code": 500}}) + b"data: [DONE]\n\n"

    async def complains(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        return await begin_stream(request, *script_of(request, body).events(2)[:2], error)

    fakes = pair_and_spare(3)
    fakes[1].handler = complains
    async with cluster(*fakes) as made:
        raw, _ = await stream_of(made, COMPLETION)
        assert raw.endswith(error)
        assert made["d2"].calls == []


@pytest.mark.parametrize("comes_first", [False, True])
async def test_an_error_in_the_stream_of_a_dead_engine_is_a_death(comes_first: bool) -> None:
    error = event({"error": {"message": "EngineCore died", "code": 500}}) + b"data: [DONE]\n\n"

    async def dies(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        fake.is_healthy = False
        events = [] if comes_first else script_of(request, body).events(2)[:3]
        return await begin_stream(request, *events, error)

    async with cluster(*two(dies, writer()), mode=Mode.WHOLE) as made:
        raw, headers = await stream_of(made, COMPLETION)
        is_whole(raw, headers, COMPLETION)
        assert headers["x-tetri-decode"] == ("b" if comes_first else "a")


GIVES_UP = [("Ab", " cd", ""), ()]  # without a token vLLM ends a stream and gives no reason


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("texts", GIVES_UP)
async def test_an_engine_that_gives_up_is_replaced(path: str, texts: tuple[str, ...]) -> None:
    aborts = writer(texts=texts, finish_reason="abort")
    async with cluster(*two(aborts, writer()), mode=Mode.WHOLE) as made:
        raw, headers = await stream_of(made, path, **USAGE)
        is_whole(raw, headers, path, has_usage=True)
    async with cluster(*two(aborts, writer()), mode=Mode.WHOLE) as made:
        status, answer, _ = await made.ask()
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("texts", GIVES_UP)
@pytest.mark.parametrize("options", [{}, USAGE], ids=str)
async def test_engines_that_give_up_before_they_have_caught_up_are_replaced(
    path: str, texts: tuple[str, ...], options: dict[str, Any]
) -> None:
    """However many: they end in order, and the request is not to blame."""
    aborts = [writer(texts=texts, finish_reason="abort")] * 3
    async with cluster(*several(writer(6), *aborts, writer()), mode=Mode.WHOLE) as made:
        raw, headers = await stream_of(made, path, **options)
        is_whole(raw, headers, path, has_usage=bool(options))
        assert [len(each.calls) for each in made.instances.values()] == [1] * 5


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("options", "num_missing"), [({}, 1), (USAGE, 1), (USAGE, 2)])
async def test_a_stream_that_lacks_only_its_end_gets_it(
    path: str, options: dict[str, Any], num_missing: int
) -> None:
    size = len(TEXTS) + (path == CHAT) + (2 - num_missing if options else 0)
    both = FakeInstance("a", Role.BOTH)
    both.handler = writer(size)
    async with cluster(both) as made:
        raw, headers = await stream_of(made, path, **options)
        whole = b"".join(expected(headers, path, has_usage=bool(options)).events())
        fingerprint = b',"system_fingerprint":"f1"'
        assert raw.replace(fingerprint, b"") == whole.replace(fingerprint, b"")
        assert len(both.calls) == 1
        await asyncio.sleep(0.05)  # a check of the dead instance is connecting to it


# -- silence --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_an_instance_that_falls_silent_is_given_up(stream: bool) -> None:
    """As after SIGSTOP: its connections stay open, and it answers nothing."""
    stopped = asyncio.Event()

    async def stops(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        if body.get("stream"):
            await begin_stream(request, *script_of(request, body).events()[:3])
        fake.speaks.clear()
        fake.is_healthy = False
        stopped.set()
        return await hang()

    fakes = pair_and_spare(0)
    fakes[1].handler = stops
    async with cluster(*fakes) as made:
        if stream:
            raw, headers = await stream_of(made, COMPLETION)
            is_whole(raw, headers, COMPLETION)
        else:
            status, answer, headers = await made.ask()
            assert (status, headers["x-tetri-decode"]) == (200, "d2")
            assert answer["choices"][0]["text"] == "".join(TEXTS)
        assert stopped.is_set()
        await eventually(lambda: made["d1"].aborted == 1)

        made["d1"].speaks.set()
        made["d1"].is_healthy = True
        await eventually(lambda: made.state("d1") == "ready")
        made["d1"].handler = writer()
        assert (await made.ask())[0] == 200


async def test_a_prefill_instance_that_falls_silent_is_given_up() -> None:
    async def stops(fake: FakeInstance, *_: Any) -> web.StreamResponse:
        fake.speaks.clear()
        return await hang()

    fakes = pair_and_spare(99)
    fakes[0].handler = stops
    async with cluster(*fakes) as made:
        await made.add(FakeInstance("p2", Role.PREFILL, decode="d2"))
        made["p2"].handler = writer()
        await made.report("p2", queued_prefill_tokens=10_000)
        raw, headers = await stream_of(made, COMPLETION)
        is_whole(raw, headers, COMPLETION)
        assert headers["x-tetri-prefill"] == "p2"
        assert await metric(made, "tetri_retries_total") == 1


async def test_one_that_is_silent_but_writes_is_left_alone() -> None:
    fakes = pair_and_spare(99)
    async with cluster(*fakes) as made:
        made["d1"].speaks.clear()
        await eventually(lambda: made.state("d1") == "silent")
        made["d1"].speaks.set()
        await eventually(lambda: made.state("d1") == "ready")

        async def slowly(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
            fake.speaks.clear()
            answer = await begin_stream(request)
            for each in script_of(request, body).events(num_given(body) + 1):
                await answer.write(each)
                await asyncio.sleep(0.4)
            return answer

        made["d1"].handler = slowly
        raw, headers = await stream_of(made, COMPLETION)
        is_whole(raw, headers, COMPLETION)
        assert made["d2"].calls == []


def stutterer(events_before: int) -> tuple[Handler, asyncio.Event]:
    """Falls silent in the middle, as a whole instance, and goes on when the event is set.
    With 0 not even the head of an answer comes."""
    goes_on = asyncio.Event()

    async def handle(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        answer = web.StreamResponse(headers=STREAM_HEADERS)
        script = script_of(request, body).events(num_given(body) + 1)
        for index, each in enumerate(script):
            if index == events_before and not goes_on.is_set():
                fake.speaks.clear()
                await goes_on.wait()
            if index == 0:
                await answer.prepare(request)
            await answer.write(each)
        return answer

    return handle, goes_on


@pytest.mark.parametrize("events_before", [0, 3])
async def test_streams_that_cannot_move_are_given_more_time(events_before: int) -> None:
    fakes = pair_and_spare(99)
    fakes[1].handler, goes_on = stutterer(events_before)
    async with cluster(*fakes) as made:
        moving = asyncio.create_task(stream_of(made, CHAT))
        await eventually(lambda: not fakes[1].speaks.is_set())
        staying = asyncio.create_task(stream_of(made, CHAT, tools=[{}]))
        raw, headers = await moving
        is_whole(raw, headers, CHAT)
        assert not goes_on.is_set()  # it went on without d1
        assert not staying.done()
        fakes[1].speaks.set()
        goes_on.set()
        raw, headers = await staying
        is_whole(raw, headers, CHAT)
        assert await metric(made, "tetri_retries_total") == 0


async def test_a_stream_goes_on_with_the_same_instance_if_there_is_no_other() -> None:
    only = FakeInstance("a", Role.BOTH)
    only.handler, goes_on = stutterer(3)
    async with cluster(only) as made:
        asking = asyncio.create_task(stream_of(made, COMPLETION))
        await eventually(lambda: only.aborted == 1)  # the router has left it
        goes_on.set()
        only.speaks.set()
        raw, headers = await asking
        is_whole(raw, headers, COMPLETION)
        assert await made.table() == []


async def test_who_waits_for_the_kv_of_a_silent_instance_is_told() -> None:
    fakes = pair_and_spare(99)
    fakes[1].chunk_gate.clear()
    async with cluster(*fakes) as made:
        asking = asyncio.create_task(stream_of(made, COMPLETION))
        await eventually(lambda: made["d1"].calls)
        (entry,) = made.scheduler.table
        transfer = entry.transfer
        assert transfer is not None
        made["p"].speaks.clear()
        await eventually(lambda: made["d1"].lost)
        assert made["d1"].lost == [transfer]
        assert made["d2"].lost == made["p"].lost == []
        made["d1"].chunk_gate.set()
        raw, headers = await asking
        is_whole(raw, headers, COMPLETION)


# -- who is asked before the first byte -----------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_death_before_the_first_byte_is_hidden(stream: bool) -> None:
    fakes = pair_and_spare(99)
    fakes[0].handler = dies
    async with cluster(*fakes) as made:
        if stream:
            raw, headers = await stream_of(made, COMPLETION)
            is_whole(raw, headers, COMPLETION)
        else:
            assert (await made.ask())[0] == 200
        assert await metric(made, "tetri_retries_total") == 1
        await eventually(lambda: len(made.scheduler.poison.crashes) == 0)  # it was answered


async def test_instances_that_were_silent_and_report_again_have_not_crashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "GIVE_UP_AFTER", 1)

    async def starves(fake: FakeInstance, *_: Any) -> web.StreamResponse:
        fake.speaks.clear()
        fake.is_healthy = False
        asyncio.get_running_loop().call_later(1.3, fake.speaks.set)  # it is given up after 1 s
        return await hang()

    both = [FakeInstance(name, Role.BOTH) for name in "ab"]
    both[0].handler = both[1].handler = starves
    async with cluster(*both, mode=Mode.WHOLE) as made:
        _, _, headers = await made.ask()
        assert headers.get("x-tetri-error") != "poison_request"
        assert await metric(made, "tetri_crashes_with_request_total") == 0


async def leaves(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
    """End in good order, and say so."""
    assert fake.agent is not None
    await asyncio.to_thread(fake.agent.close)
    fake.is_healthy = False
    return await hang_up(fake, request, body)


@pytest.mark.parametrize("fault", [answer_500, leaves])
async def test_errors_ends_in_good_order_and_refused_connections_are_not_crashes(
    fault: Handler,
) -> None:
    both = [FakeInstance(name, Role.BOTH) for name in "abc"]
    both[0].handler = both[1].handler = fault
    async with cluster(*both, mode=Mode.WHOLE) as made:
        await made["c"].stop_http()
        status, answer, _ = await made.ask()
        assert status in (502, 503)
        assert "(tried 3)" in answer["error"]["message"]
        await asyncio.sleep(0.5)  # longer than a crash is looked into
        assert len(made.scheduler.poison.crashes) == 0
