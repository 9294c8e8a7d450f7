"""Instances that die in the middle of an answer, and others that go on behind it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from aiohttp import web

from tests.router.fakes import Cluster, FakeInstance, Handler, hang, trio
from tests.router.scripts import CHAT, PROMPT_IDS, Script
from vllm_tetri.handover import (
    USAGE_HEADER,
    DecodeParams,
    Prefilled,
    PrefillParams,
    PriorOutput,
    from_params,
    to_params,
)
from vllm_tetri.messages import Dispatched, PrefillEnding
from vllm_tetri.types import InstanceId, Prediction, Role, TransferId

COMPLETION = "/v1/completions"
PATHS = [COMPLETION, CHAT]
TEXTS = ("Ab", " cd", "", "é", ' "x\\', "\n", "日", " end")
PREDICTED = Prediction.of_bucket(1, 200)
CACHED_TOKENS, HELD_TOKENS = 2, 1
STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


def script_of(request: web.Request, body: dict[str, Any], **changes: Any) -> Script:
    """What an instance answers to a body."""
    options = body.get("stream_options") or {}
    script = Script(
        TEXTS,
        is_chat=request.path == CHAT,
        has_logprobs=bool(body.get("logprobs")),
        has_token_ids=bool(body.get("return_token_ids")),
        has_usage=bool(options.get("include_usage")),
        counts_each=bool(options.get("continuous_usage_stats")),
        id=request.headers["X-Request-Id"],
    )
    return replace(script, **changes)


def expected(headers: Any, path: str, **options: Any) -> Script:
    """What the client of a request should have got."""
    return Script(TEXTS, is_chat=path == CHAT, id=headers["x-request-id"], **options)


def num_given(body: dict[str, Any]) -> int:
    """Count the output tokens that a request brings along."""
    leg = from_params(body.get("kv_transfer_params"))
    return (
        len(leg.prior_output.token_ids) if isinstance(leg, DecodeParams) and leg.prior_output else 0
    )


async def begin_stream(request: web.Request, *events: bytes) -> web.StreamResponse:
    """Send the head of a stream, and its first events."""
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    await response.write(b"".join(events))
    return response


async def dies(fake: FakeInstance, request: web.Request, _: Any) -> web.StreamResponse:
    """Die before the first byte of a response."""
    die(fake, request)
    return await hang()


def several(*handlers: Handler) -> list[FakeInstance]:
    """Return instances a, b and so on of both roles, which are asked in this order."""
    found = [FakeInstance(name, Role.BOTH) for name in "abcdefgh"[: len(handlers)]]
    for index, each in enumerate(found):
        each.handler = handlers[index]
        each.load = replace(each.load, queued_prefill_tokens=10_000 * index)
    return found


def two(first: Handler, second: Handler) -> list[FakeInstance]:
    """Return instances a and b of both roles; a gets the first request."""
    return several(first, second)


def die(fake: FakeInstance, request: web.Request) -> None:
    """As after SIGKILL: connections are reset, no response, no report."""
    fake.is_healthy = False
    fake.speaks.clear()
    assert request.transport is not None
    request.transport.abort()


def compact(value: object) -> str:
    """JSON as vLLM's server writes it."""
    return json.dumps(value, separators=(",", ":"))


def writer(dies_after: int | None = None, *, cut: int = 0, **changes: Any) -> Handler:
    """Streams a script, one event a token; what was given comes first, in one event.

    Args:
        dies_after: Events (a chat's first one is its role) before it dies; None: never. What
            is not streamed dies with 0.
        cut: Bytes of the next event that still get out.
        changes: Attributes of the script that differ.
    """

    async def handle(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        script = script_of(request, body, **changes)
        leg = from_params(body.get("kv_transfer_params"))
        if isinstance(leg, PrefillParams):
            return prefilled(script, leg, fake.decode)
        if not body.get("stream"):
            if dies_after == 0:
                die(fake, request)
                await hang()
            return web.json_response(script.whole(), dumps=compact)
        events = script.events(num_given(body) + 1)
        answer = web.StreamResponse(headers=STREAM_HEADERS)
        await answer.prepare(request)
        for index, event in enumerate(events):
            if index == dies_after:
                if cut:
                    await answer.write(event[:cut])
                await asyncio.sleep(0.05)  # what was written is read first
                die(fake, request)
                await hang()
            await fake.chunk_gate.wait()
            await answer.write(event)
        return answer

    return handle


continuation = writer(created=1_800_000_000)


def prefilled(
    script: Script,
    leg: PrefillParams,
    decode: str,
    *,
    attempt: str = "",
    is_final: bool = False,
    is_early: bool = False,
    **changes: Any,
) -> web.Response:
    """The prefill response: the script's first token, with changes."""
    first = replace(script, **{"texts": script.texts[:1], **changes})
    logprobs = "AAAA" if script.has_logprobs else ""
    said = Prefilled(
        TransferId(leg.transfer + attempt), InstanceId("" if is_final else decode), 3, "d1",
        "why", PriorOutput(script.token_ids[:1], logprobs), is_final,
        [] if is_final else PROMPT_IDS, PREDICTED if is_early else None, CACHED_TOKENS,
        HELD_TOKENS,
    )  # fmt: skip
    headers = {USAGE_HEADER: "1"} if first.counts_each else None
    return web.json_response(first.whole(**to_params(said)), headers=headers)


def prefill(
    *, decode_name: str = "d1", release: asyncio.Event | None = None, **changes: Any
) -> Handler:
    """A prefill instance that responds with a script's first token; with `release`, it announces
    its last chunk for d1 and responds when this is set."""

    async def handle(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        leg = from_params(body.get("kv_transfer_params"))
        if not isinstance(leg, PrefillParams):
            return await continuation(fake, request, body)
        if release is not None:
            assert fake.agent is not None
            ending = PrefillEnding(leg.transfer, "d1", PROMPT_IDS, CACHED_TOKENS, HELD_TOKENS)
            fake.agent.publish(
                Dispatched(leg.request, leg.transfer, InstanceId("d1"), PREDICTED, ending)
            )
            await release.wait()
        script = script_of(request, body)
        return prefilled(script, leg, decode_name, is_early=release is not None, **changes)

    return handle


def pair_and_spare(dies_after: int, *, cut: int = 0, **later: Any) -> tuple[FakeInstance, ...]:
    """d1 dies; d2 and p can go on. `later` changes what those write."""
    found = trio(writer(**later), writer(created=1_700_000_050, **later))
    found[1].handler = writer(dies_after, cut=cut)
    return found


def body_of(path: str, **options: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": "hello"}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": "hello"}]}
    return {"model": "tiny", **prompt, **options}


async def stream_of(made: Cluster, path: str, **options: Any) -> tuple[bytes, Any]:
    """Ask for a stream; return its bytes and headers."""
    body = body_of(path, stream=True, **options)
    async with made.client.post(made.url + path, json=body) as response:
        assert response.status == 200
        return await response.read(), response.headers


def pieces(raw: bytes) -> list[str]:
    """The texts of a stream's events; role, usage and the end are left out."""
    found = []
    for line in raw.split(b"\n\n"):
        if line and line != b"data: [DONE]":
            for choice in json.loads(line.removeprefix(b"data: ")).get("choices", []):
                delta = choice.get("delta", {})
                if "role" not in delta:
                    found.append(delta.get("content", choice.get("text")))
    return found
