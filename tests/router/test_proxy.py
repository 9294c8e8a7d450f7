"""Routes that are not split: one instance answers, and the router adds and loses nothing."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.router.fakes import (
    BUSY,
    Cluster,
    FakeInstance,
    Handler,
    cluster,
    eventually,
    hang_up,
    metric,
)
from tests.router.writers import begin_stream
from vllm_tetri.router.app import PROXIED
from vllm_tetri.router.relay import Relay
from vllm_tetri.types import Role

RESPONSES = "/v1/responses"

PLAIN = [(method, path, rules) for method, path, rules in PROXIED if "{" not in path]
JSON_POSTS = [path for method, path, rules in PLAIN if method == "POST" and rules.has_json]
FORMS = [path for _, path, rules in PLAIN if not rules.has_json]
GETS = [path for method, path, _ in PLAIN if method == "GET"]


async def name_itself(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
    """Respond to any route, with bytes that the router could not have made."""
    if body.get("stream"):
        return await fake.stream(request)
    raw = b'{ "by": "%s" }' % fake.id.encode()
    return web.Response(body=raw, content_type="application/json", headers={"X-Extra": "kept"})


def named(*names: str, role: Role = Role.BOTH, **more: Any) -> tuple[FakeInstance, ...]:
    found = tuple(FakeInstance(name, role, **more) for name in names)
    for each in found:
        each.handler = name_itself
    return found


def fails(status: int, error: Any) -> Handler:
    async def fail(*_: Any) -> web.StreamResponse:
        return web.json_response({"error": error}, status=status)

    return fail


async def ask(
    made: Cluster, path: str, method: str = "POST", headers: Any = None, **body: Any
) -> tuple[int, bytes, Any]:
    sent = json.dumps(body).encode() if method == "POST" else None
    if sent is not None:
        headers = {"Content-Type": "application/json", **(headers or {})}
    async with made.client.request(method, made.url + path, data=sent, headers=headers) as got:
        return got.status, await got.read(), got.headers


async def test_bytes_go_through_unchanged_in_both_directions() -> None:
    sent = {"X-Mine": "1", "Authorization": "Bearer key"}
    async with cluster(*named("b")) as made:
        for path in JSON_POSTS:
            status, answer, headers = await ask(made, path, headers=sent, model="tiny", x=[1])
            assert (status, answer) == (200, b'{ "by": "b" }'), path
            assert (headers["X-Extra"], headers["x-tetri-decode"]) == ("kept", "b"), path
            (seen,) = made["b"].calls
            assert (seen.method, seen.target) == ("POST", path)
            assert seen.raw == b'{"model": "tiny", "x": [1]}', path
            assert {name: seen.headers[name] for name in sent} == sent, path
            assert seen.headers["X-Request-Id"] == headers["x-request-id"], path
            assert await made.table() == [], path
            made["b"].calls.clear()


async def test_what_is_only_read_goes_through_too() -> None:
    async with cluster(*named("b")) as made:
        for path in (*GETS, RESPONSES + "/resp_1"):
            status, answer, _ = await ask(made, path + "?stream=false", "GET")
            assert (status, answer) == (200, b'{ "by": "b" }'), path
            (seen,) = made["b"].calls
            assert (seen.method, seen.target, seen.raw) == ("GET", path + "?stream=false", b"")
            made["b"].calls.clear()


async def test_forms_go_through_as_they_are() -> None:
    async with cluster(*named("b")) as made:
        for path in FORMS:
            form = aiohttp.FormData()
            form.add_field("file", bytes(range(256)), filename="a.wav")
            async with made.client.post(made.url + path, data=form) as response:
                assert response.status == 200, path
            (seen,) = made["b"].calls
            assert bytes(range(256)) in seen.raw, path
            assert seen.headers["Content-Type"].startswith("multipart/form-data; boundary="), path
            made["b"].calls.clear()


async def test_a_stream_arrives_while_it_is_made_and_is_in_the_table() -> None:
    async with cluster(*named("b")) as made:
        made["b"].chunk_gate.clear()
        url, body = made.url + RESPONSES, b'{"stream": true}'
        async with made.client.post(url, data=body, headers={"X-Request-Id": "r1"}) as response:
            assert await response.content.readany() == b'data: {"index": 0}\n\n'
            (entry,) = await made.table()
            assert (entry["id"], entry["phase"], entry["decode"]) == ("r1", "serving", "b")
            made["b"].chunk_gate.set()
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
            assert response.headers["x-request-id"] == "r1"
        assert await metric(made, 'tetri_requests_total{outcome="ok",route="passed"}') == 1


async def test_nothing_of_a_request_is_left_to_the_garbage_collector() -> None:
    async with cluster(*named("b")) as made:
        await made.ask(stream=True)
        known = relays()  # of other tests
        gc.disable()
        try:
            await made.ask(stream=True)
            await eventually(lambda: relays() <= known)
        finally:
            gc.enable()


def relays() -> set[int]:
    return {id(each) for each in gc.get_objects() if type(each) is Relay}


async def test_a_client_that_leaves_ends_the_request_at_the_instance() -> None:
    async with cluster(*named("b")) as made:
        made["b"].chunk_gate.clear()
        async with made.client.post(made.url + RESPONSES, data=b'{"stream": true}') as response:
            await response.content.readany()
        await eventually(lambda: made["b"].aborted == 1)
        await eventually(lambda: len(made.scheduler.table) == 0)


async def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    async def break_off(fake: FakeInstance, request: web.Request, _: Any) -> web.StreamResponse:
        await begin_stream(request, b"data: 1\n\n")
        await asyncio.sleep(0.05)
        return await hang_up(fake, request, _)

    async with cluster(*named("b")) as made:
        made["b"].handler = break_off
        status, answer, _ = await ask(made, "/v1/messages", stream=True)
        assert status == 200
        assert answer.startswith(b'data: 1\n\ndata: {"error":{"message":"instance b broke off')


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", RESPONSES])
@pytest.mark.parametrize("status", [400, 404, 422, 501])
async def test_an_instances_error_reaches_the_client_unchanged(path: str, status: int) -> None:
    error = {"message": "m", "type": "t", "param": "p", "code": status}
    async with cluster(*named("b1", "b2")) as made:
        for each in made.instances.values():
            each.handler = fails(status, error)
        assert (await ask(made, path))[0] == status
        assert json.loads((await ask(made, path, model="tiny"))[1]) == {"error": error}
        assert sum(len(each.calls) for each in made.instances.values()) == 2


async def test_an_instance_in_trouble_is_no_obstacle() -> None:
    async with cluster(*named("b1", "b2")) as made:
        made["b1"].handler = fails(500, {"message": "died"})
        assert (await ask(made, "/v1/messages"))[1] == b'{ "by": "b2" }'
        made["b1"].handler = hang_up
        assert (await ask(made, "/tokenize"))[1] == b'{ "by": "b2" }'


async def test_when_all_are_in_trouble_the_last_says_it_itself() -> None:
    async with cluster(*named("b1", "b2")) as made:
        for each in made.instances.values():
            each.handler = fails(500, {"message": "died"})
        status, answer, _ = await ask(made, "/v1/messages")
        assert (status, json.loads(answer)) == (500, {"error": {"message": "died"}})
        assert await metric(made, 'tetri_requests_total{outcome="error",route="passed"}') == 1


async def test_a_full_instance_is_passed_over_and_all_full_is_503() -> None:
    async with cluster(*named("b1", "b2")) as made:
        made["b1"].handler = fails(503, BUSY)
        assert (await ask(made, "/v1/messages"))[1] == b'{ "by": "b2" }'
        made["b2"].handler = fails(503, BUSY)
        status, _, headers = await ask(made, "/v1/messages")
        assert (status, headers["Retry-After"]) == (503, "1")
        assert headers["x-tetri-error"] == "queue_full"


async def test_requests_at_the_same_moment_spread_over_instances() -> None:
    async with cluster(*named("b1", "b2")) as made:
        for each in made.instances.values():
            each.chunk_gate.clear()
        asking = [asyncio.create_task(ask(made, "/v1/messages", stream=True)) for _ in range(6)]
        await eventually(lambda: sum(len(each.calls) for each in made.instances.values()) == 6)
        assert [len(each.calls) for each in made.instances.values()] == [3, 3]
        for each in made.instances.values():
            each.chunk_gate.set()
        await asyncio.gather(*asking)


async def test_all_about_responses_goes_to_one_instance_while_it_is_ready() -> None:
    decodes = named("d2", "d1", role=Role.DECODE)
    async with cluster(*named("p", role=Role.PREFILL), *decodes) as made:
        for _ in range(3):
            assert (await ask(made, RESPONSES))[1] == b'{ "by": "d1" }'
        assert (await ask(made, RESPONSES + "/resp_1", "GET"))[1] == b'{ "by": "d1" }'
        assert (await ask(made, RESPONSES + "/resp_1/cancel"))[1] == b'{ "by": "d1" }'
        made["d1"].handler = fails(503, BUSY)
        assert (await ask(made, RESPONSES))[0] == 503  # a stored answer would be nowhere else
        await made["d1"].stop_http()
        assert (await ask(made, RESPONSES))[1] == b'{ "by": "d2" }'


async def test_a_stored_response_is_found_whatever_model_it_is_of() -> None:
    two = *named("x", models=("a",)), *named("y", models=("b",))
    async with cluster(*two) as made:
        error = {"message": "no such response", "type": "t", "param": None, "code": 404}
        made["x"].handler = fails(404, error)
        assert (await ask(made, RESPONSES + "/resp_1", "GET"))[1] == b'{ "by": "y" }'
        made["y"].handler = fails(404, error)
        status, answer, _ = await ask(made, RESPONSES + "/resp_1", "GET")
        assert (status, json.loads(answer)) == (404, {"error": error})


async def test_a_stored_response_is_found_where_responses_were_stored_before() -> None:
    stored = {"previous_response_id": "resp_1", "model": "tiny"}
    async with cluster(*named("p", role=Role.PREFILL), *named("d2", role=Role.DECODE)) as made:
        await ask(made, RESPONSES)
        assert made["d2"].calls
        d1 = await made.add(named("d1", role=Role.DECODE)[0])  # which stores from now on
        d1.handler = fails(404, {"message": "no such response"})
        for method, path, body in (("GET", "/resp_1", {}), ("POST", "", stored)):
            answer = (await ask(made, RESPONSES + path, method, **body))[1]
            assert answer == b'{ "by": "d2" }', path


async def test_a_model_whose_instance_is_silent_for_a_moment_is_waited_for() -> None:
    async with cluster(*named("x", models=("a",)), *named("y", models=("b",))) as made:
        for path in ("/v1/messages", "/v1/completions"):
            made["x"].speaks.clear()
            await eventually(lambda: made.state("x") == "silent")
            asking = asyncio.create_task(ask(made, path, model="a", prompt="hello"))
            await asyncio.sleep(0.1)
            assert not asking.done()
            made["x"].speaks.set()
            status, answer, _ = await asking
            assert (status, answer) == (200, b'{ "by": "x" }'), path
        assert made["y"].calls == []
        await made["x"].close()
        await eventually(lambda: made.state("x") != "ready")
        assert (await ask(made, "/v1/completions", model="a", prompt="x"))[0] in (404, 503)


async def test_a_model_decides_the_instance_and_an_unknown_one_is_for_an_instance_to_refuse() -> (
    None
):
    two = *named("x", models=("a",)), *named("y", models=("b",))
    async with cluster(*two) as made:
        for model, name in (("a", b"x"), ("b", b"y"), ("unknown", b"x")):
            assert (await ask(made, "/v1/embeddings", model=model))[1] == b'{ "by": "%s" }' % name


@pytest.mark.parametrize(
    "forged",
    [
        {"kv_transfer_params": {"tetri": "evil"}},
        {"vllm_xargs": {"kv_transfer_params": "evil"}},
        {"sampling_params": {"extra_args": {"kv_transfer_params": "evil"}}},
    ],
)
async def test_a_client_cannot_set_our_parameters(forged: dict[str, Any]) -> None:
    async with cluster(*named("b")) as made:
        for path in ("/v1/messages", RESPONSES, "/inference/v1/generate"):
            await ask(made, path, token_ids=[1], **forged)
            seen = made["b"].calls[-1]
            assert b"evil" not in seen.raw
            assert b"token_ids" in seen.raw


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/batch"])
async def test_token_ids_of_the_prompt_reach_the_instance_as_in_vllm(path: str) -> None:
    given = {"prompt_token_ids": [1, 2], "tetri": "evil"}
    async with cluster(FakeInstance("p", Role.PREFILL, decode="d"), *named("d")) as made:
        await ask(made, path, model="tiny", messages=[], kv_transfer_params=given)
        seen = [each.body["kv_transfer_params"] for name in "pd" for each in made[name].calls]
        assert len(seen) == (1 if path.endswith("batch") else 2)
        assert all(each["prompt_token_ids"] == [1, 2] for each in seen)
        assert "evil" not in str(seen)


async def test_stream_options_of_what_is_no_stream_are_for_an_instance_to_refuse() -> None:
    async with cluster(FakeInstance("p", Role.PREFILL, decode="d"), *named("d")) as made:
        options = {"include_usage": True}
        for more in ({}, {"stream": False}):
            await ask(made, "/v1/completions", prompt="x", stream_options=options, **more)
            assert made["d"].calls[-1].body["stream_options"] == options
        assert made["p"].calls == []


async def test_a_route_that_instances_do_not_have_says_so() -> None:
    async def not_found(*_: Any) -> web.StreamResponse:
        return web.Response(body=b'{"detail":"Not Found"}', status=404)

    async with cluster(*named("b")) as made:
        made["b"].handler = not_found
        status, answer, _ = await ask(made, "/v1/embeddings")
        error = json.loads(answer)["error"]
        assert (status, error["type"], error["code"]) == (404, "NotFoundError", 404)
        assert error["message"].startswith("POST /v1/embeddings: no instance offers this route")


@pytest.mark.parametrize("path", ["/sleep", "/v1/realtime", "/nothing"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_what_is_not_served_says_why(path: str, method: str) -> None:
    async with cluster() as made:
        status, answer, _ = await ask(made, path, method)
        error = json.loads(answer)["error"]
        assert (status, error["type"]) == (404, "NotFoundError")
        assert error["message"].startswith(f"{method} {path}: ")
        assert "/tetri/v1/instances" in error["message"]


@pytest.mark.parametrize(
    ("path", "method"),
    [("/tokenize", "GET"), (RESPONSES, "GET"), ("/version", "POST"), ("/v1/embeddings", "PUT")],
)
async def test_a_wrong_method_is_405(path: str, method: str) -> None:
    async with cluster(*named("b")) as made:
        status, answer, headers = await ask(made, path, method)
        assert (status, headers["Allow"]) == (405, "GET" if path == "/version" else "POST")
        assert json.loads(answer)["error"]["type"] == "MethodNotAllowed"
        assert made["b"].calls == []
