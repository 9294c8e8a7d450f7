"""Every wrong request gets one clear OpenAI-shaped answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from tests.router.fakes import Cluster, FakeInstance, both, cluster, eventually, metric, pair
from vllm_tetri.router.adapters import LOAD
from vllm_tetri.router.metrics import LOAD_NUMBERS
from vllm_tetri.router.request import parse_request
from vllm_tetri.types import Role


def vllm_error(message: str, param: str | None, status: int = 400) -> web.Response:
    error = {"message": message, "type": "BadRequestError", "param": param, "code": status}
    return web.json_response({"error": error}, status=status)


def assert_shaped(answer: Any) -> None:
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b"nul", b"null", b"[" * 100_000),
        *(b'{"a": NaN}', b'{"a":' * 5000),
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    async with cluster(*pair()) as made:
        headers = {"Content-Type": "application/json"}
        for path in ("/v1/completions", "/v1/chat/completions"):
            async with made.client.post(made.url + path, data=raw, headers=headers) as response:
                assert response.status == 400
                assert_shaped(await response.json())
        assert made["p"].calls == []
        assert await made.table() == []


async def test_a_byte_order_mark_is_no_error() -> None:
    async with cluster(FakeInstance("b", Role.BOTH)) as made:
        headers = {"Content-Type": "application/json"}
        raw = b'\xef\xbb\xbf{"model": "tiny", "prompt": "a"}'
        for path in ("/v1/completions", "/v1/responses"):
            async with made.client.post(made.url + path, data=raw, headers=headers) as response:
                assert response.status == 200
            assert not made["b"].calls[-1].raw.startswith(b"\xef")


@pytest.mark.parametrize("flag", ["stream", "return_token_ids"])
def test_a_flag_that_is_no_boolean_is_for_an_instance_to_read(flag: str) -> None:
    for value, is_splittable in ((True, True), (False, True), (1, False), ("true", False)):
        raw = json.dumps({"prompt": "a", flag: value}).encode()
        assert parse_request("/v1/completions", raw, {}).is_splittable is is_splittable


@pytest.mark.parametrize("body", [{}, {"model": ""}])
async def test_a_body_without_a_model_names_one_where_there_are_several(body: Any) -> None:
    many = FakeInstance("a", Role.BOTH), FakeInstance("b", Role.BOTH, models=("large",))
    async with cluster(*many) as made:
        url, body = made.url + "/v1/completions", {"prompt": "a", **body}
        async with made.client.post(url, json=body) as response:
            assert response.status == 400
            assert "names no model" in (await response.json())["error"]["message"]


async def test_an_unknown_model_is_not_found() -> None:
    async with cluster(*pair()) as made:
        status, answer, headers = await made.ask(model="huge")
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, 404, "model")
        assert headers["x-tetri-error"] == "model_not_found"
        assert_shaped(answer)
        assert await metric(made, 'tetri_requests_total{outcome="rejected",route="none"}') == 1


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
async def test_another_content_type_is_refused_as_vllm_does(kind: str) -> None:
    async with cluster(*pair()) as made:
        status, answer, _ = await made.ask(headers={"Content-Type": kind})
        assert (status, answer["error"]["code"]) == (400, 400)
        assert "Only 'application/json' is allowed" in answer["error"]["message"]
        assert (await made.ask(headers={"Content-Type": "Application/JSON; charset=x"}))[0] == 200


async def test_pages_of_other_origins_cannot_give_orders_without_being_asked() -> None:
    """A browser sends this without asking first, as long as it is no JSON."""
    plain = {"Content-Type": "text/plain", "Origin": "http://evil"}
    async with cluster(*pair()) as made:
        for path in ("/tetri/v1/instances/d/drain", LOAD):
            status, answer, _ = await made.ask(path, headers=plain, force=True)
            assert (status, answer["error"]["code"]) == (400, 400)
        assert made.state("d") == "ready"


async def test_no_model_among_several_is_refused() -> None:
    two = FakeInstance("x", Role.BOTH, models=("one",)), FakeInstance("y", Role.BOTH)
    async with cluster(*two) as made:
        status, answer, _ = await made.ask(model=None)
        assert (status, answer["error"]["param"]) == (400, "model")


async def test_without_instances_retry_after_is_sent() -> None:
    async with cluster() as made:
        status, answer, headers = await made.ask()
        assert (status, headers["Retry-After"]) == (503, "1")
        assert await metric(made, 'tetri_requests_total{outcome="error",route="none"}') == 1
        assert_shaped(answer)
        assert await health(made) == {503}
        async with made.client.get(made.url + "/livez") as response:
            assert response.status == 200
        await made.add(both())
        assert await health(made) == {200}


async def health(made: Cluster) -> set[int]:
    """The status of every route that shows it."""
    found = set()
    for words in ("GET /health", "GET /readyz", "GET /ping", "POST /ping"):
        method, path = words.split()
        async with made.client.request(method, made.url + path) as response:
            found.add(response.status)
    return found


@pytest.mark.parametrize("where", ["p", "d"])
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("error", [400, 501])
async def test_an_instances_own_complaint_reaches_the_client(
    where: str, is_streamed: bool, error: int
) -> None:
    async def complain(*_: Any) -> web.StreamResponse:
        return vllm_error("max_tokens must be at least 1", "max_tokens", error)

    async with cluster(*pair()) as made:
        made[where].handler = complain
        status, answer, _ = await made.ask(max_tokens=0, stream=is_streamed)

        assert (status, answer["error"]["param"]) == (error, "max_tokens")
        if where == "p" and error == 400:  # it did not begin
            assert await metric(made, "tetri_transfers_cancelled_total") == 0
        else:
            await eventually(lambda: made[where].cancelled)
        # A stream's error may be an event: the instance that refused is asked for that shape.
        assert len(made["p"].calls) == (2 if is_streamed and where == "p" else 1)
        assert await made.table() == []


async def test_models_are_the_union_in_the_order_in_which_they_are_served() -> None:
    two = FakeInstance("x", Role.BOTH, models=("one", "alias")), FakeInstance("y", Role.BOTH)
    async with cluster(*two) as made:
        answer = await made.get("/v1/models")
        assert answer["object"] == "list"
        assert [each["id"] for each in answer["data"]] == ["one", "alias", "tiny"]
        assert (answer["data"][0]["root"], answer["data"][0]["owned_by"]) == (
            "/models/tiny",
            "vllm",
        )
        assert answer["data"][0]["permission"][0]["allow_sampling"] is True
        assert answer["data"][0]["max_model_len"] == 2048


async def test_instances_are_shown_in_the_documented_shape() -> None:
    async with cluster(*pair()) as made:
        answer = await made.get("/tetri/v1/instances")
        first = answer["instances"][0]
        assert set(first) == {
            *("id", "url", "model", "role", "state", "age_s", "seq", "in_flight", "flip"),
            *LOAD_NUMBERS,
        }
        assert (first["id"], first["role"], first["state"]) == ("p", "prefill", "ready")
        assert first["blocks_total"] == 100
