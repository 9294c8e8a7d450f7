"""Routes that one instance answers say the same through the router as without it."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import TIMEOUT
from tests.e2e.cluster import MODEL, Cluster, Stock, get
from tests.e2e.compare import Reply, ask_raw, difference, stripped
from tests.e2e.prompts import text_prompt, token_prompt
from tests.e2e.shapes import TOOLS, user

pytestmark = pytest.mark.e2e

SHORT: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
ROUTES: dict[str, tuple[str, dict[str, Any], int]] = {
    "tokenize text": ("/tokenize", {"model": MODEL, "prompt": text_prompt(50)}, 200),
    "tokenize messages": (
        "/tokenize",
        {"messages": user("hello"), "return_token_strs": True, "tools": TOOLS},
        200,
    ),
    "tokenize of nothing": ("/tokenize", {"model": MODEL}, 400),
    "tokenize of an unknown model": ("/tokenize", {"model": "unknown", "prompt": "x"}, 404),
    "detokenize": ("/detokenize", {"model": MODEL, "tokens": token_prompt(40)}, 200),
    "detokenize of words": ("/detokenize", {"model": MODEL, "tokens": ["a"]}, 400),
    "responses": (
        "/v1/responses",
        {"model": MODEL, "input": text_prompt(60), "max_output_tokens": 8, "temperature": 0},
        200,
    ),
    "responses of an unknown model": ("/v1/responses", {"model": "unknown", "input": "x"}, 404),
    "responses after one that is gone": (
        "/v1/responses",
        {"model": MODEL, "input": "x", "previous_response_id": "resp_gone"},
        404,
    ),
    "responses without input": ("/v1/responses", {"model": MODEL}, 400),
    "messages": ("/v1/messages", {**SHORT, "messages": user(text_prompt(60))}, 200),
    "messages of an unknown model": (
        "/v1/messages",
        {**SHORT, "model": "unknown", "messages": user("x")},
        404,
    ),
    "messages without a bound": ("/v1/messages", {"model": MODEL, "messages": user("x")}, 400),
    "count_tokens": ("/v1/messages/count_tokens", {"model": MODEL, "messages": user("hi")}, 200),
    "several chats": (
        "/v1/chat/completions/batch",
        {**SHORT, "messages": [user("one"), user(text_prompt(20))]},
        200,
    ),
    "render": ("/v1/chat/completions/render", {"model": MODEL, "messages": user("x")}, 403),
    "tokens in, tokens out": ("/inference/v1/generate", {"token_ids": [5, 6]}, 403),
}
POOLING = (
    "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank",
    "/v1/rerank", "/v2/rerank",
)  # fmt: skip
_TIMES = ("created_at", "completed_at")


@pytest.mark.parametrize("name", ROUTES)
async def test_equal_to_stock(stock: Stock, cluster: Cluster, name: str) -> None:
    path, body, status = ROUTES[name]
    theirs, ours = [await ask_raw(each.url, path, body) for each in (stock, cluster)]
    assert theirs.status == status, theirs.raw
    assert (ours.status, ours.content_type) == (status, theirs.content_type), ours.raw
    mine, other = (_without_times(each.json) for each in (ours, theirs))
    assert not difference(mine, other), (ours.raw, theirs.raw)
    assert ours.headers["x-tetri-decode"] == "decode-0"


@pytest.mark.parametrize("name", ["responses", "messages"])
async def test_equal_to_stock_streamed(stock: Stock, cluster: Cluster, name: str) -> None:
    path, body, _ = ROUTES[name]
    found = []
    for each in (stock, cluster):
        reply = await ask_raw(each.url, path, {**body, "stream": True})
        assert (reply.status, reply.is_stream) == (200, True)
        found.append(_text_of(reply))
    assert found[0][0]
    assert found[0] == found[1]


async def test_what_is_only_read(stock: Stock, cluster: Cluster) -> None:
    assert get(f"{cluster.url}/version") == get(f"{stock.url}/version")
    async with aiohttp.ClientSession() as session:
        for path in ("/v1/responses/resp_gone", "/tokenizer_info", "/ping"):
            seen = []
            for each in (stock, cluster):
                async with session.get(each.url + path) as response:
                    seen.append((response.status, await response.read()))
            if path != "/tokenizer_info":  # an instance without this route has few words
                assert seen[0] == seen[1]
            assert seen[0][0] == seen[1][0]


@pytest.mark.parametrize("path", POOLING)
async def test_what_the_model_cannot_do_is_404(stock: Stock, cluster: Cluster, path: str) -> None:
    body = {"model": MODEL, "input": "x"}
    theirs, ours = [await ask_raw(each.url, path, body) for each in (stock, cluster)]
    assert ours.status == theirs.status == 404
    assert theirs.json == {"detail": "Not Found"}
    error = ours.json["error"]
    assert (error["type"], error["code"]) == ("NotFoundError", 404)
    assert error["message"].startswith(f"POST {path}: no instance offers this route")


async def test_wrong_methods(stock: Stock, cluster: Cluster) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/tokenize", "/v1/responses", "/v1/chat/completions", "/v1/messages"):
            async with session.get(stock.url + path) as response:
                assert (response.status, response.headers["Allow"]) == (405, "POST")
            async with session.get(cluster.url + path) as response:
                assert (response.status, response.headers["Allow"]) == (405, "POST")
                assert (await response.json())["error"]["code"] == 405


async def test_a_client_that_leaves_takes_the_request_with_it(cluster: Cluster) -> None:
    body = {"model": MODEL, "input": "x", "max_output_tokens": 1500, "stream": True}
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        async with session.post(f"{cluster.url}/v1/responses", json=body) as response:
            await response.content.readany()
            (entry,) = get(f"{cluster.url}/tetri/v1/requests")["requests"]
            assert (entry["phase"], entry["decode"]) == ("serving", "decode-0")
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await ask_raw(cluster.url, "/v1/responses", {**body, "stream": False})
    cluster.rest()


def _without_times(answer: Any) -> Any:
    kept = stripped(answer)
    return {key: value for key, value in kept.items() if key not in _TIMES}


def _text_of(reply: Reply) -> tuple[str, list[str]]:
    """The text of a stream of named events, and the names in the order of their first time."""
    text, names = "", []
    for block in reply.raw.decode().strip().split("\n\n"):
        name, _, data = block.partition("\n")
        if not data or not name.startswith("event: "):
            continue
        event = json.loads(data.removeprefix("data: "))
        names.append(name)
        delta = event.get("delta")
        text += delta if isinstance(delta, str) else (delta or {}).get("text") or ""
    return text, list(dict.fromkeys(names))
