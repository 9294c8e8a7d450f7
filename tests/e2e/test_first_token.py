"""The first token leaves from prefill, once, and the rest is what one instance says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.e2e.client import TIMEOUT, Answer, ask
from tests.e2e.cluster import Cluster, Stock, running
from tests.e2e.prompts import LENGTHS, chat, completion

pytestmark = pytest.mark.e2e

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
# Differ from answer to answer, on one instance too.
OF_ITS_OWN = ("id", "created", "system_fingerprint")
GROUPED = ("choices", "usage")  # depend on how many tokens an event has


@asynccontextmanager
async def streamed(url: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.post(url + path, json=body) as response,
    ):
        assert response.status == 200
        yield response


async def events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with streamed(url, body) as response:
        raw = (await response.read()).split(b"\n\n")
    assert raw[-2:] == [b"data: [DONE]", b""]
    return [json.loads(each.removeprefix(b"data: ")) for each in raw[:-2]]


def text_of(chunk: dict[str, Any]) -> str:
    (choice,) = chunk["choices"]
    found = choice["text"] if "text" in choice else choice["delta"].get("content")
    return str(found or "")


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client sees of a stream, however tokens were grouped into events."""
    assert [each for each in chunks if "error" in each] == []
    assert len({(each["id"], each["created"], each["model"]) for each in chunks}) == 1
    pieces = [each for each in chunks if each["choices"]]
    choices = [each["choices"][0] for each in pieces]
    last = next(each for each in pieces if each["choices"][0]["finish_reason"])
    logprobs: dict[str, list[Any]] = {}
    for choice in choices:
        for key, values in (choice["logprobs"] or {}).items():
            logprobs.setdefault(key, []).extend(values)
    return {
        "text": "".join(map(text_of, pieces)),
        "token_ids": [token for each in choices for token in each.get("token_ids") or []],
        "logprobs": rounded(logprobs),
        "finish": [each["finish_reason"] for each in choices if each["finish_reason"]],
        "stop": [each["stop_reason"] for each in choices if each.get("stop_reason")],
        "first": {k: v for k, v in chunks[0].items() if k not in (*OF_ITS_OWN, *GROUPED)},
        "prompts": [each for each in choices if each.get("prompt_token_ids")][1:],
        "keys": [(*each, *each["choices"][0]) for each in (chunks[0], last)],
        "end": {k: v for k, v in chunks[-1].items() if k not in (*OF_ITS_OWN, "choices")},
    }


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


async def with_text_first(stock: Stock, make: Any, **options: Any) -> dict[str, Any]:
    """A streamed request whose first token is text that can stand alone."""
    for size in range(90, 190, 9):
        body = make(size, **options)
        text = (await ask(stock.url, {**body, "max_tokens": 1})).text
        if text and "\ufffd" not in text:
            return {**STREAM, **body, "stream": True}
    raise AssertionError("the tiny model never begins with text")


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bare": {"return_token_ids": False, "stream_options": None},
    "seeded": {"temperature": 0.9, "seed": 7},
    "penalties": {"frequency_penalty": 1.2, "presence_penalty": 0.4, "repetition_penalty": 1.3},
    "two tokens": {"max_tokens": 2},
    "usage of every event": {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}
    },
    "stop never": {"stop": ["\u2603"]},
}


@pytest.mark.parametrize("has_logprobs", [False, True])
@pytest.mark.parametrize("name", SHAPES)
async def test_streams_are_those_of_one_instance(
    stock: Stock, cluster: Cluster, name: str, has_logprobs: bool
) -> None:
    for make, logprobs in (
        (completion, {"logprobs": 2}),
        (chat, {"logprobs": True, "top_logprobs": 2}),
    ):
        body = make(60, **{**STREAM, **SHAPES[name], **(logprobs if has_logprobs else {})})
        ours, theirs = await events(cluster.url, body), await events(stock.url, body)
        assert joined(theirs)["text"]
        assert joined(ours) == joined(theirs)


@pytest.mark.parametrize("make", [completion, chat])
async def test_usage_of_every_event_begins_with_one_token(
    stock: Stock, cluster: Cluster, make: Any
) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    body = await with_text_first(stock, make, max_tokens=5)
    ours = await events(cluster.url, body | options)
    theirs = await events(stock.url, body | options)
    role = 1 if make is chat else 0
    assert [each["usage"]["completion_tokens"] for each in ours[: role + 1]] == [0, 1][1 - role :]
    assert {(*each["usage"],) for each in ours[:-1]} == {(*theirs[0]["usage"],)}
    assert joined(ours) == joined(theirs)


async def test_texts_of_many_first_tokens(stock: Stock, cluster: Cluster) -> None:
    """Spaces, parts of characters and special tokens come first in some of these."""
    first = set()
    for size in LENGTHS[:16]:
        for seed in range(4):
            body = completion(size, **STREAM, temperature=2.0, seed=seed, max_tokens=6)
            ours, theirs = await events(cluster.url, body), await events(stock.url, body)
            assert joined(ours) == joined(theirs), (size, seed)
            first.add(text_of(theirs[0]))
    assert "" in first or any("\ufffd" in text for text in first)
    assert len(first) > 20


@pytest.mark.parametrize("make", [completion, chat])
async def test_answers_that_are_not_streamed_have_the_same_keys_and_values(
    stock: Stock, cluster: Cluster, make: Any
) -> None:
    path = "/v1/chat/completions" if make is chat else "/v1/completions"
    for options in ({}, {"max_tokens": 1}, {"logprobs": 1}):
        found = []
        for url in (cluster.url, stock.url):
            async with (
                aiohttp.ClientSession(timeout=TIMEOUT) as session,
                session.post(url + path, json=make(50, **options)) as response,
            ):
                answer = await response.json()
                found.append({k: v for k, v in answer.items() if k not in OF_ITS_OWN})
        assert rounded(found[0]) == rounded(found[1])
        assert list(found[0]) == list(found[1])


@pytest.mark.parametrize("options", [{}, STREAM], ids=["whole", "streamed"])
@pytest.mark.parametrize("make", [completion, chat])
async def test_a_first_token_that_is_the_last_never_gets_to_decode(
    stock: Stock, cluster: Cluster, make: Any, options: dict[str, Any]
) -> None:
    usual: Answer = await ask(stock.url, make(150, max_tokens=1, ignore_eos=True))
    token, text = usual.token_ids[0], usual.text
    before = cluster.instances()["decode-0"]
    for ending in (
        {"max_tokens": 1},
        {"stop_token_ids": [token], "ignore_eos": True},
        {"stop": [text[-1:] or "x"]},
        {"logit_bias": {"2": 100.0}, "ignore_eos": False},
        {"stop_token_ids": [token], "logprobs": 1},
    ):
        body = make(150, **options, **ending)
        ours, theirs = await ask(cluster.url, body), await ask(stock.url, body)
        assert len(theirs.token_ids) == 1, ending
        assert ours.same_as(theirs), ending
        assert ours.headers["x-tetri-decode"] == ours.headers["x-tetri-prefill"] == "prefill-0"
    cluster.rest()
    after = cluster.instances()["decode-0"]
    for counter in ("decodes_done", "prefills_done", "kv_bytes_received"):
        assert after[counter] == before[counter]


def server_of(cluster: Cluster, name: str) -> int:
    """Process id of an instance's API server; its engine is another process, and
    goes on telling the cluster that it is there."""
    facts = next(each for each in cluster.facts["instances"] if each["id"] == name)
    port = int(facts["url"].rpartition(":")[2])
    for child in psutil.Process(facts["pid"]).children(recursive=True):
        sockets = child.net_connections(kind="tcp4")
        is_there = any(each.status == "LISTEN" and each.laddr.port == port for each in sockets)
        if is_there and "EngineCore" not in " ".join(child.cmdline()):
            return int(child.pid)
    raise AssertionError(f"nobody listens for {name}")


@pytest.mark.parametrize("make", [completion, chat])
async def test_the_first_token_does_not_wait_for_the_decode_instance(
    stock: Stock, cluster: Cluster, make: Any
) -> None:
    body = await with_text_first(stock, make)
    pid = server_of(cluster, "decode-0")
    os.kill(pid, signal.SIGSTOP)
    try:
        async with streamed(cluster.url, body) as response:
            seen = b""
            while not seen.endswith(b"\n\n"):
                seen += await response.content.readany()
            chunks = [json.loads(each[6:]) for each in seen.split(b"\n\n") if each]
            os.kill(pid, signal.SIGCONT)
            rest = await response.read()
    finally:
        os.kill(pid, signal.SIGCONT)
    rest = rest.removesuffix(b"data: [DONE]\n\n")
    assert "".join(map(text_of, chunks))
    chunks += [json.loads(each[6:]) for each in rest.split(b"\n\n") if each]
    assert joined(chunks) == joined(await events(stock.url, body))


@pytest.fixture(scope="module")
def mortal(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of this module's own, whose decode instance dies."""
    with running(Cluster(tiny_llama, tmp_path_factory.mktemp("mortal"))) as cluster:
        yield cluster


async def test_when_the_decode_instance_dies_behind_the_token_the_text_is_the_same(
    stock: Stock, mortal: Cluster
) -> None:
    bodies = [
        await with_text_first(stock, completion),
        await with_text_first(stock, chat),
        await with_text_first(stock, completion, temperature=0.9, seed=5, logprobs=1),
    ]
    pid = server_of(mortal, "decode-0")
    os.kill(pid, signal.SIGSTOP)
    shown = asyncio.Barrier(len(bodies) + 1)

    async def one(body: dict[str, Any]) -> list[dict[str, Any]]:
        async with streamed(mortal.url, body) as response:
            seen = await response.content.readany()
            assert b'"choices"' in seen
            await shown.wait()
            seen += await response.read()
        raw = seen.removesuffix(b"data: [DONE]\n\n")
        return [json.loads(each[6:]) for each in raw.split(b"\n\n") if each]

    tasks = [asyncio.create_task(one(body)) for body in bodies]
    try:
        async with asyncio.timeout(60):
            await shown.wait()
    finally:
        os.kill(pid, signal.SIGKILL)
    for body, task in zip(bodies, tasks, strict=True):
        assert joined(await task) == joined(await events(stock.url, body))
