"""Instances that refuse, die or fall silent, and clients that leave."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.router.fakes import (
    Cluster,
    FakeInstance,
    answer_500,
    begin,
    both,
    cluster,
    door,
    eventually,
    hang,
    hang_up,
    held_back,
    let_go,
    metric,
    pair,
    trio,
)
from tests.router.writers import begin_stream
from vllm_tetri.handover import PrefillParams
from vllm_tetri.launch.machine import free_port
from vllm_tetri.router import liveness
from vllm_tetri.types import Role, TransferId


async def test_a_refused_connection_leads_to_another_prefill_instance() -> None:
    async with cluster(*trio()) as made:
        await made["p"].stop_http()
        await made.add(FakeInstance("p2", Role.PREFILL, decode="d2"))
        await made.report("p2", queued_prefill_tokens=10_000)

        status, _, headers = await made.ask()

        assert (status, headers["x-tetri-prefill"], headers["x-tetri-decode"]) == (200, "p2", "d2")


async def test_an_instance_whose_server_refuses_gets_no_requests_until_it_answers() -> None:
    """Its engine goes on reporting that it has nothing to do, so it would get all of them."""
    async with cluster(both("a"), both("b")) as made:
        await made.report("b", queued_prefill_tokens=10_000)
        await made["a"].stop_http()
        assert (await made.ask())[2]["x-tetri-prefill"] == "b"
        await eventually(lambda: made.state("a") == "starting")
        await made["a"].start_http()
        await eventually(lambda: made.state("a") == "ready")


async def test_an_instance_at_whose_address_another_one_answers_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(both("a")) as made:
        other = both("b")
        other.url = made["a"].url
        other.join(made.scheduler.monitor.address)
        await eventually(lambda: "b is not used: at http://" in caplog.text)
        assert made.state("b") == "starting"
        await other.close()


async def test_a_model_whose_instance_is_started_again_is_not_ready_instead_of_unknown() -> None:
    named = {"models": ("other",)}
    async with cluster(both("a"), FakeInstance("b", Role.BOTH, **named)) as made:
        await made["b"].close()
        await eventually(lambda: len(made.scheduler.monitor.view().instances) == 1)
        assert (await made.ask(model="other"))[0] == 503
        assert (await made.ask(model="never"))[0] == 404


async def test_an_instance_whose_server_hangs_gets_no_further_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "IDLE_S", 0.3)
    monkeypatch.setattr(liveness, "_TIMEOUT_S", 0.3)
    one, other = both("a"), both("b")
    async with cluster(one, other) as made:
        await made.report("b", queued_prefill_tokens=10_000)
        one.handler, one.is_healthy = hang, False
        asking = asyncio.create_task(made.ask())
        await eventually(lambda: made.state("a") == "starting")
        assert (await made.ask())[2]["x-tetri-prefill"] == "b"
        asking.cancel()


@pytest.mark.parametrize("fault", [answer_500, hang_up])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_failed_decode_leg_is_served_whole_elsewhere(fault: Any, is_streamed: bool) -> None:
    async with cluster(*trio()) as made:
        made["d1"].handler = fault
        status, answer, headers = await made.ask(stream=is_streamed)

        assert (status, headers["x-tetri-decode"]) == (200, "d2")
        assert b"DONE" in answer if is_streamed else answer["kind"] == "whole"
        await eventually(lambda: made["d1"].cancelled and made["p"].cancelled)
        assert made["d2"].leg() is None


async def test_a_decode_instance_that_is_gone_is_no_obstacle() -> None:
    async with cluster(*trio()) as made:
        made["p"].decode = "never-heard-of"
        status, answer, _ = await made.ask()
        assert (status, answer["kind"]) == (200, "whole")


@pytest.mark.parametrize("params", [None, {"tetri": {"type": "nonsense"}}, {"x": 1}, 5, []])
async def test_a_prefill_answer_without_a_transfer_is_computed_again(params: Any) -> None:
    async def odd(*_: Any) -> web.StreamResponse:
        return web.json_response({"kv_transfer_params": params})

    async with cluster(*trio()) as made:
        made["p"].handler = odd
        status, answer, _ = await made.ask()
        assert (status, answer["kind"]) == (200, "whole")
        await eventually(lambda: made["p"].cancelled and made["d1"].cancelled)


async def test_when_every_instance_fails_there_is_one_clear_error() -> None:
    async with cluster(*trio()) as made:
        for each in made.instances.values():
            each.handler = answer_500
        status, answer, _ = await made.ask()

        assert status == 502
        assert "HTTP 500 engine died" in answer["error"]["message"]
        assert sum(len(each.calls) for each in made.instances.values()) == 3
        assert await made.table() == []


async def test_an_instance_that_does_not_answer_is_504() -> None:
    async with cluster(*trio(), first_byte_s=0.3) as made:
        made["p"].handler = hang
        status, answer, _ = await made.ask()

        assert (status, answer["error"]["code"]) == (504, 504)
        await eventually(lambda: made["p"].aborted == 1 and made["p"].cancelled)


async def test_a_router_that_is_too_busy_to_listen_takes_no_instance_for_silent() -> None:
    async with cluster(*pair()) as made:
        time.sleep(1.1)  # noqa: ASYNC251 - as a burst does; `silent_after_s` is 1.0
        assert made.scheduler.placer.models()
        assert (await made.ask())[0] == 200


async def keep_alive(
    fake: FakeInstance, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """The request is in a queue; a stream has begun (vLLM's --sse-keep-alive-interval)."""
    if not body.get("stream"):
        await fake.chunk_gate.wait()
        return await fake.answer(request, body)
    stream = await begin_stream(request)
    while not fake.chunk_gate.is_set():
        await stream.write(b": keep-alive\n\n")
        await asyncio.sleep(0.05)
    await stream.write(b'data: {"index": 0}\n\ndata: [DONE]\n\n')
    return stream


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_time_in_the_queue_of_an_instance_that_works_is_no_silence(is_streamed: bool) -> None:
    first_byte_s = 0.4
    async with cluster(*held_back(both()), first_byte_s=first_byte_s) as made:
        made["b"].handler = keep_alive
        (asking,), since_s = await begin(made, 1, stream=is_streamed), time.monotonic()
        while time.monotonic() - since_s < 3 * first_byte_s:
            await made.report("b", prompt_tokens_done=made["b"].load.prompt_tokens_done + 1)
        assert not asking.done()
        if not is_streamed:
            let_go(made["b"])
        status, answer, _ = await asking  # from here on it makes no progress
        assert status == 504 if is_streamed else 200
        assert not is_streamed or "computed nothing" in answer["error"]["message"]


@pytest.mark.parametrize("part", [b"", b'data: {"cho'])
async def test_a_stream_that_breaks_ends_with_an_error_event(part: bytes) -> None:
    async def break_off(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        await begin_stream(request, b"data: 1\n\n" + part)
        await asyncio.sleep(0.1)
        return await hang_up(fake, request, body)

    async with cluster(*trio()) as made:
        made["d1"].handler = break_off
        status, answer, _ = await made.ask(stream=True)

        assert status == 200
        assert answer.startswith(b"data: 1\n\n")
        assert b'\n\ndata: {"error":{"message":"instance d1' in answer
        assert await made.table() == []
        assert made["p"].cancelled == []  # its KV is consumed


async def leave(made: Cluster, when: Any, **body: Any) -> None:
    task = asyncio.create_task(made.ask(**body))
    await eventually(when)
    task.cancel()
    with pytest.raises((asyncio.CancelledError, aiohttp.ClientError)):
        await task


async def test_a_client_that_leaves_during_prefill_cancels_everywhere() -> None:
    async with cluster(*trio()) as made:
        made["p"].handler = hang
        await leave(made, lambda: made["p"].calls)

        await eventually(lambda: made["p"].aborted == 1)
        transfer = made["p"].leg().transfer  # type: ignore[attr-defined]
        for name in ("p", "d1", "d2"):  # it is not known yet which one gets the KV
            await eventually(lambda name=name: made[name].cancelled == [transfer])
        assert await made.table() == []


async def end_and_hang(
    fake: FakeInstance, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    await fake.stream(request)
    return await hang()


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_stream_is_served_when_its_end_is_sent(leaves: bool) -> None:
    """Whether the client leaves then, or the instance never ends its response."""
    async with cluster(both(), first_byte_s=60.0) as made:
        made["b"].handler = end_and_hang
        made["b"].chunk_gate.set()
        body = {"model": "tiny", "prompt": "hello", "stream": True}
        async with made.client.post(f"{made.url}/v1/completions", json=body) as response:
            if leaves:
                await response.content.readuntil(b"[DONE]\n\n")
                response.close()
            else:
                assert (await response.read()).endswith(b"[DONE]\n\n")
        await eventually(lambda: not list(made.scheduler.table))
        assert await metric(made, 'tetri_requests_total{outcome="ok",route="whole"}') == 1
        assert len(made["b"].calls) == made["b"].aborted == 1


async def announce_and_hang(fake: FakeInstance, _: web.Request, __: Any) -> web.StreamResponse:
    fake.announce(fake.leg())  # type: ignore[arg-type]
    return await hang()


async def test_a_choice_that_comes_after_the_client_has_left_is_cancelled_there_too() -> None:
    """The prefill instance tried another one when the first refused, and knew no better."""

    async with cluster(*trio()) as made:
        made["p"].handler = announce_and_hang
        table = made.scheduler.table
        await leave(made, lambda: any(each.decode == "d1" for each in table))
        await eventually(lambda: made["p"].cancelled and made["d1"].cancelled)
        assert made["d2"].cancelled == []
        leg = made["p"].leg()
        assert isinstance(leg, PrefillParams)

        made["p"].decode = "d2"
        made["p"].announce(PrefillParams(TransferId("another-router/1"), leg.request))
        made["p"].announce(leg)
        await eventually(lambda: made["d2"].cancelled)
        assert made["d2"].cancelled == [leg.transfer]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("has_output", [False, True])
async def test_a_client_that_leaves_during_decode_cancels(
    has_output: bool, is_streamed: bool
) -> None:
    async with cluster(*trio()) as made:
        made["d1"].chunk_gate.clear()
        made["d1"].handler = None if has_output and is_streamed else hang
        table = made.scheduler.table

        def is_decoding() -> bool:
            waits = made["d1"].handler is not None and bool(made["d1"].calls)
            return waits or any(each.generated for each in table)

        await leave(made, is_decoding, stream=is_streamed)
        await eventually(lambda: made["d1"].aborted == 1)
        await eventually(lambda: not len(table))
        if has_output and is_streamed:
            assert made["p"].cancelled == []  # its KV is consumed
        else:
            await eventually(lambda: made["p"].cancelled and made["d1"].cancelled)
        assert await made.table() == []


BYTES = (b"\xff\xfe", b"[" * 5000, b'{"error": "\xbd"}', b"{", b"", b"null", b'{"error": []}')


@pytest.mark.parametrize("status", [200, 400, 404, 500, 503])
@pytest.mark.parametrize("role", list(Role))
async def test_an_answer_may_be_any_bytes(status: int, role: Role) -> None:
    said = b""

    async def say(*_: Any) -> web.StreamResponse:
        return web.Response(status=status, body=said, content_type="application/json")

    async def stream(_: FakeInstance, request: web.Request, __: Any) -> web.StreamResponse:
        return await begin_stream(request, b"data: " + said + b"\n\n")

    one = FakeInstance("x", role, decode="d")
    others = [FakeInstance("d", Role.DECODE)] if role is Role.PREFILL else []
    async with cluster(one, *others) as made:
        for said in BYTES:
            for one.handler in (say, stream):
                for path in ("/v1/completions", "/v1/embeddings"):
                    body = {"model": "tiny", "prompt": "x", "stream": True}
                    async with made.client.post(made.url + path, json=body) as response:
                        answer = await response.read()
                    # 500 may come from the instance; never is it the router's own.
                    assert b"see its log" not in answer, (said, path)
        one.handler = None
        assert (await made.ask())[0] == 200
        assert await made.table() == []


async def test_an_instance_that_falls_silent_while_it_starts_is_asked_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm_tetri.router.liveness._LONG_S", 0.1)
    late = FakeInstance("late", Role.BOTH)
    late.is_healthy = False
    async with cluster() as made:
        adding = asyncio.create_task(made.add(late))
        await eventually(lambda: made.state("late") == "starting")
        await eventually(lambda: f"{late.url}/health has not answered" in caplog.text)
        late.speaks.clear()
        await eventually(lambda: made.state("late") == "silent")
        seen = late.num_probes
        await eventually(lambda: late.num_probes > seen + 1)
        assert (await made.ask())[0] == 503
        late.is_healthy = True
        late.speaks.set()
        await adding  # until it is ready
        assert (await made.ask())[0] == 200


@pytest.mark.parametrize("why", ["", "it has layers of another kind"])
async def test_an_instance_that_others_cannot_send_kv_to_is_named(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One that exchanges none is not."""
    made = [FakeInstance(name, Role.BOTH) for name in "abc"]
    made[2].abilities = {"kv_endpoint": "10.0.0.9:1", "alone": why}
    async with cluster(*made):
        await eventually(lambda: not why or f"exchanges no KV, since {why}" in caplog.text)
        await eventually(lambda: why or caplog.text.count("receives KV at 127.0.0.1:1") == 2)
    assert caplog.text.count("receives KV at") == (0 if why else 2)


async def test_a_silent_instance_is_not_used_until_it_speaks_again() -> None:
    async with cluster(*trio()) as made:
        made["p"].speaks.clear()
        await eventually(lambda: made.state("p") == "silent")

        status, answer, _ = await made.ask()
        assert (status, answer["kind"]) == (200, "whole")
        assert made["p"].calls == []

        made["p"].speaks.set()
        await eventually(lambda: made.state("p") == "ready")
        async with asyncio.timeout(5):  # the router's table of instances is renewed every 20 ms
            while (await made.ask())[1]["kind"] != "injected":
                await asyncio.sleep(0.01)


async def test_a_request_waits_while_all_are_silent_until_one_is_given_up() -> None:
    async with cluster(both("b")) as made:
        made["b"].speaks.clear()
        await eventually(lambda: made.state("b") == "silent")
        asking = asyncio.create_task(made.ask())
        await asyncio.sleep(0.2)
        assert not asking.done()
        made["b"].speaks.set()
        assert (await asking)[0] == 200

        made["b"].speaks.clear()
        await eventually(lambda: made.state("b") == "silent")
        began_s = time.monotonic()
        assert (await made.ask())[0] == 503
        assert time.monotonic() - began_s < 5


async def test_an_instance_that_leaves_is_forgotten_at_once() -> None:
    async with cluster(*trio()) as made:
        agent = made["d1"].agent
        assert agent is not None
        await asyncio.to_thread(agent.close)
        await eventually(lambda: made.state("d1") == "absent")


async def test_a_restarted_router_has_the_whole_picture_at_once() -> None:
    control = f"tcp://127.0.0.1:{free_port()}"
    fakes = pair()
    try:
        for each in fakes:
            await each.start(control)  # before any router is there
        for _ in range(2):
            async with door(control) as (scheduler, _, _):
                ready = scheduler.placer.models
                await eventually(ready)
                view = scheduler.monitor.view
                await eventually(
                    lambda view=view: [each.state for each in view().instances] == ["ready"] * 2
                )
    finally:
        for each in fakes:
            await each.close()
