"""Instances without an engine for `vllm-tetri bench router`: real agents, answers at once.

One process with three of them, each with an HTTP server of its own: one that serves
whole, and a pair of prefill and decode. A child of the benchmark; it prints the URLs
as one line of JSON and ends with its input.

The answers have the shape of vLLM's completions and of our legs. A prefill instance
says that its last chunk begins, and answers when that is done; until then a second leg
that came early waits, as a decode engine waits for the KV. A body with
``step_s`` (no field of OpenAI's) is answered by a stream that goes on until the client
leaves: one event in every stream each so many seconds, as an engine writes them, or as
fast as they are read with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import uvloop

from vllm_tetri import handover
from vllm_tetri.control.agent import Agent
from vllm_tetri.handover import DecodeLeg, Given, Prefilled, PrefillLeg
from vllm_tetri.messages import Dispatched, Opening
from vllm_tetri.types import InstanceId, InstanceInfo, InstanceLoad, Role

MODEL = "stub"
PREFILL, DECODE, WHOLE = "prefill", "decode", "whole"
DIRECT = "direct"  # name of transfers that no router knows
_BACKLOG = 1024
_PERIOD_S = 0.1
_LAST_CHUNK_S = 0.01
_TEXT = " token"
_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_DONE = b"data: [DONE]\n\n"
_END = b"0\r\n\r\n"


class Pacer:
    """Writes the next event into every endless stream, all in one go per step."""

    def __init__(self) -> None:
        self._streams: dict[Connection, bytes] = {}
        self._step_s = 0.0
        self._next_s = 0.0

    @property
    def num_streams(self) -> int:
        """How many go on."""
        return len(self._streams)

    def add(self, stream: Connection, event: bytes, step_s: float) -> None:
        """Begin a stream. All that exist at a time have the same step."""
        self._streams[stream] = event
        if len(self._streams) == 1:
            self._step_s = step_s
            self._next_s = asyncio.get_running_loop().time()
            self._plan()

    def drop(self, stream: Connection) -> None:
        """End it. Idempotent."""
        self._streams.pop(stream, None)

    def _plan(self) -> None:
        loop = asyncio.get_running_loop()
        if self._step_s == 0:
            loop.call_soon(self._step)
            return
        self._next_s = max(loop.time(), self._next_s + self._step_s)
        loop.call_at(self._next_s, self._step)

    def _step(self) -> None:
        for stream, event in self._streams.items():
            stream.write(event)
        if self._streams:
            self._plan()


class Arrivals:
    """Transfers that are done, and who waits for one."""

    def __init__(self) -> None:
        self._done: set[str] = set()
        self._waiting: dict[str, Callable[[], None]] = {}

    def done(self, transfer: str) -> None:
        """The KV of a transfer is there."""
        go_on = self._waiting.pop(transfer, None)
        if go_on is not None:
            go_on()
        else:
            self._done.add(transfer)

    def wait(self, transfer: str, go_on: Callable[[], None]) -> None:
        """Go on when the KV is there."""
        if transfer in self._done:
            self._done.remove(transfer)
            go_on()
        else:
            self._waiting[transfer] = go_on


class Stub:
    """What one instance answers."""

    def __init__(
        self, name: str, role: Role, prompt_tokens: int, pacer: Pacer, arrivals: Arrivals
    ) -> None:
        self.name = name
        self.pacer = pacer
        self._arrivals = arrivals
        self._role = role
        self._prompt_token_ids = list(range(prompt_tokens))
        self._agent: Agent | None = None
        self._server: asyncio.Server | None = None

    async def start(self, control: str) -> str:
        """Serve, and announce itself to a router; returns its URL."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), "127.0.0.1", 0, backlog=_BACKLOG
        )
        url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        info = InstanceInfo(
            id=InstanceId(self.name), url=url, role=self._role, models=(MODEL,),
            kv_endpoint="127.0.0.1:1", identity={"model": MODEL}, max_model_len=1 << 20,
            block_size=16, pid=os.getpid(), version="0",
        )  # fmt: skip
        load = InstanceLoad(blocks_total=1 << 20, arena_total_bytes=1 << 40)
        self._agent = Agent(
            routers=(control,),
            info=info,
            read_load=lambda: load,
            on_cancel=lambda _: None,
            period_s=_PERIOD_S,
        )
        self._agent.start()
        return url

    async def close(self) -> None:
        """Say goodbye to the router, and take no more connections. Idempotent."""
        if self._agent is not None:
            await asyncio.to_thread(self._agent.close)
        if self._server is not None:
            self._server.close()

    def answer(self, connection: Connection, body: dict[str, Any]) -> None:
        """Write what an instance answers to a completion."""
        leg = handover.from_params(body.get(handover.FIELD))
        created = int(time.time())
        if isinstance(leg, PrefillLeg):
            self._announce(leg)
            asyncio.get_running_loop().call_later(
                _LAST_CHUNK_S, self._finish, connection, leg, created
            )
        elif not body.get("stream"):  # leg 1 of another router
            whole = _json(_answer(created, {"remote_engine_id": self.name}))
            asyncio.get_running_loop().call_later(_LAST_CHUNK_S, connection.write, whole)
        elif (step_s := body.get("step_s")) is not None:
            connection.write(_STREAM_HEAD)
            event = _event(created, 1, tells_ids=body.get("return_token_ids") is True)
            self.pacer.add(connection, _chunk(event), step_s)
        else:
            connection.write(_STREAM_HEAD)
            is_pair = isinstance(leg, DecodeLeg)
            events = _events(
                created,
                body["max_tokens"],
                2 if is_pair else 1,
                self._prompt_token_ids if body.get("return_token_ids") else None,
            )
            if isinstance(leg, DecodeLeg) and leg.is_early:
                self._arrivals.wait(leg.transfer, partial(_stream, connection, events))
            else:
                _stream(connection, events)

    def _announce(self, leg: PrefillLeg) -> None:
        assert self._agent is not None
        opening = Opening(leg.transfer, "stub", self._prompt_token_ids)
        self._agent.publish(
            Dispatched(leg.request, leg.transfer, InstanceId(DECODE), "stub", opening=opening)
        )

    def _finish(self, connection: Connection, leg: PrefillLeg, created: int) -> None:
        prefilled = Prefilled(
            transfer=leg.transfer, decode=InstanceId(DECODE),
            num_tokens=len(self._prompt_token_ids), digest="stub",
            num_chunks=2, num_bytes=1, reason="", given=Given([1]),
        )  # fmt: skip
        connection.write(_json(_answer(created, handover.to_params(prefilled))))
        if leg.transfer != DIRECT:
            self._arrivals.done(leg.transfer)


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection. Belongs to the event loop."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._buffer = b""
        self._is_full = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    def connection_lost(self, error: Exception | None) -> None:
        self._stub.pacer.drop(self)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False

    def write(self, data: bytes) -> None:
        """Send, unless nobody reads: then these bytes are left out."""
        if not self._is_full and self._transport is not None:
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (request := self._take()) is not None:
            line, body = request
            if line.startswith(b"POST /v1/completions "):
                self._stub.answer(self, json.loads(body))
            elif line.startswith(b"GET /health "):
                self.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            else:
                self.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")

    def _take(self) -> tuple[bytes, bytes] | None:
        """First line and body of the next request, once all of it is there."""
        head, end, rest = self._buffer.partition(_HEAD_END)
        if not end:
            return None
        length = _LENGTH.search(head)
        size = int(length[1]) if length else 0
        if len(rest) < size:
            return None
        self._buffer = rest[size:]
        return head.partition(b"\r\n")[0], rest[:size]


def _stream(connection: Connection, events: list[bytes]) -> None:
    for event in events:
        connection.write(_chunk(event))
    connection.write(_END)


def _answer(created: int, params: dict[str, Any]) -> dict[str, Any]:
    """vLLM: `CompletionResponse` of one token."""
    choice = {**_choice(_TEXT, "length"), "prompt_logprobs": None}
    usage = {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1}
    return {
        **_frame(created, choice),
        "service_tier": None,
        "system_fingerprint": "stub",
        "usage": {**usage, "prompt_tokens_details": None},
        handover.FIELD: params,
        "metrics": None,
    }


def _events(
    created: int, num_tokens: int, first_size: int, prompt_token_ids: list[int] | None
) -> list[bytes]:
    """A stream of so many tokens; the first event holds `first_size` of them, and the
    prompt's where ids are told."""
    tells_ids = prompt_token_ids is not None
    sizes = [first_size, *[1] * (num_tokens - first_size)]
    reasons = [*[None] * (len(sizes) - 1), "length"]
    prompts = [prompt_token_ids, *[None] * (len(sizes) - 1)]
    events = [
        _event(created, size, reason, tells_ids=tells_ids, prompt=prompt)
        for size, reason, prompt in zip(sizes, reasons, prompts, strict=True)
    ]
    return [*events, _DONE]


def _event(
    created: int,
    num_tokens: int,
    finish_reason: str | None = None,
    *,
    tells_ids: bool,
    prompt: list[int] | None = None,
) -> bytes:
    """vLLM: `CompletionStreamResponse`."""
    choice = _choice(_TEXT * num_tokens, finish_reason)
    choice["prompt_token_ids"] = prompt
    choice["token_ids"] = [1] * num_tokens if tells_ids else None
    return b"data: %b\n\n" % _dump(_frame(created, choice))


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {
        "index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason,
        "stop_reason": None, "prompt_token_ids": None, "token_ids": None,
    }  # fmt: skip


def _frame(created: int, choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": created,
        "model": MODEL,
        "choices": [choice],
    }


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _json(value: object) -> bytes:
    body = _dump(value)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d" % len(body)
    return head + _HEAD_END + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(options: argparse.Namespace) -> None:
    pacer = Pacer()
    plan = (
        (WHOLE, Role.BOTH, options.whole_control),
        (PREFILL, Role.PREFILL, options.split_control),
        (DECODE, Role.DECODE, options.split_control),
    )
    arrivals = Arrivals()
    stubs = [Stub(name, role, options.prompt, pacer, arrivals) for name, role, _ in plan]
    try:
        urls = {
            stub.name: await stub.start(control)
            for stub, (_, _, control) in zip(stubs, plan, strict=True)
        }
        print(json.dumps(urls), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        for stub in stubs:
            await stub.close()


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--whole-control", required=True)
    parser.add_argument("--split-control", required=True)
    parser.add_argument("--prompt", type=int, required=True)
    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    _main()
