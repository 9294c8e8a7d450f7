"""Instances without an engine, for router.py: real control agents, responses at once.

One process with three of them: one that serves aggregated, and a pair of prefill and decode. It
prints their URLs as one line of JSON and ends with its input. A prefill instance says that its last
chunk begins and responds when that is done; a decode request that came early waits until then, as
an engine waits for KV. A body with ``step_s`` (no field of OpenAI's) gets a stream without an end:
one event in every stream each ``step_s`` seconds, or as fast as they are read with 0. One with
``hold`` gets its response after ``GET /release``; ``GET /held`` says how many wait for that.
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
from vllm_tetri.handover import DecodeParams, Prefilled, PrefillParams, PriorOutput
from vllm_tetri.messages import Dispatched, PrefillEnding, ToEngine
from vllm_tetri.types import InstanceId, InstanceInfo, InstanceLoad, Role

MODEL = "fake"
DIRECT = "direct"  # name of transfers that no router knows
LAST_CHUNK_S = 0.01
PERIOD_S = 0.1
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class Fake:
    """One instance: the engine's side of its agent, and its HTTP responses."""

    def __init__(self, name: str, role: Role, prompt_tokens: int, shared: Shared) -> None:
        self.name = name
        self.shared = shared
        self._role = role
        self._prompt_ids = list(range(prompt_tokens))
        self._agent: Agent | None = None

    async def start(self, control: str) -> str:
        """Serve, join a router, and return the URL."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(self), "127.0.0.1", 0, backlog=1024)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        info = InstanceInfo(
            id=InstanceId(self.name), url=url, role=self._role, models=(MODEL,),
            kv_endpoint="127.0.0.1:1", identity={"model": MODEL}, max_model_len=1 << 20,
            block_size=16, pid=os.getpid(), root="m",
        )  # fmt: skip
        self._agent = Agent(tuple(control.split(",")), info, self, period_s=PERIOD_S)
        self._agent.start()
        return url

    async def close(self) -> None:
        """Leave the router."""
        if self._agent is not None:
            await asyncio.to_thread(self._agent.close)

    # What the agent asks of an engine.

    def read_load(self) -> InstanceLoad:
        return InstanceLoad(blocks_total=1 << 20, arena_total_bytes=1 << 40)

    def read_cache(self, seq: int, *, is_all: bool) -> None: ...

    def unfinished(self, role: Role) -> str:
        return ""

    def is_idle(self) -> bool:
        return True

    def take(self, message: ToEngine) -> None: ...
    def abandon(self, router: str) -> None: ...
    def on_drained(self) -> None: ...

    # What clients and routers ask.

    def respond(self, connection: Connection, body: dict[str, Any]) -> None:
        """Write what an instance responds to a completion."""
        params, loop = handover.from_params(body.get(handover.FIELD)), asyncio.get_running_loop()
        with_ids = body.get("return_token_ids") is True
        if body.pop("hold", False) and not isinstance(params, DecodeParams):
            self.shared.held.append(partial(self.respond, connection, body))
            return
        if isinstance(params, PrefillParams):
            self._announce(params)
            loop.call_later(LAST_CHUNK_S, self._finish, connection, params)
        elif not body.get("stream"):  # the prefill request of another router
            loop.call_later(
                LAST_CHUNK_S, connection.write, _completion({"remote_engine_id": self.name})
            )
        elif (step_s := body.get("step_s")) is not None:
            connection.write(_STREAM_HEAD)
            self.shared.add(connection, _chunk(_event(1, None, [] if with_ids else None)), step_s)
        else:
            first = 2 if isinstance(params, DecodeParams) else 1
            events = _events(body["max_tokens"], first, self._prompt_ids if with_ids else None)
            write = partial(
                connection.write, _STREAM_HEAD + b"".join(map(_chunk, events)) + b"0\r\n\r\n"
            )
            if isinstance(params, DecodeParams) and params.is_early:
                self.shared.wait(params.transfer, write)
            else:
                write()

    def _announce(self, params: PrefillParams) -> None:
        assert self._agent is not None
        ending = PrefillEnding(params.transfer, "fake", self._prompt_ids)
        decode = InstanceId("decode")
        self._agent.publish(Dispatched(params.request, params.transfer, decode, ending=ending))

    def _finish(self, connection: Connection, params: PrefillParams) -> None:
        prefilled = Prefilled(
            params.transfer, InstanceId("decode"), len(self._prompt_ids), "fake", "",
            prior_output=PriorOutput([1]),
        )  # fmt: skip
        connection.write(_completion(handover.to_params(prefilled)))
        if params.transfer != DIRECT:
            self.shared.done(params.transfer)


class Shared:
    """Streams without an end, written all in one go per step, and transfers that are done."""

    def __init__(self) -> None:
        self._streams: dict[Connection, bytes] = {}
        self._step_s = self._next_s = 0.0
        self._done: set[str] = set()
        self._waiting: dict[str, Any] = {}
        self.held: list[Callable[[], None]] = []

    def add(self, stream: Connection, event: bytes, step_s: float) -> None:
        """Begin a stream; all that exist at a time have the same step."""
        self._streams[stream] = event
        if len(self._streams) == 1:
            self._step_s, self._next_s = step_s, asyncio.get_running_loop().time()
            self._plan()

    def drop(self, stream: Connection) -> None:
        """End a stream, if there is one."""
        self._streams.pop(stream, None)

    def _plan(self) -> None:
        loop = asyncio.get_running_loop()
        self._next_s = max(loop.time(), self._next_s + self._step_s)
        if self._step_s:
            loop.call_at(self._next_s, self._step)
        else:
            loop.call_soon(self._step)

    def _step(self) -> None:
        for stream, event in self._streams.items():
            stream.write(event)
        if self._streams:
            self._plan()

    def release(self) -> None:
        """Respond to all requests that are held."""
        held, self.held = self.held, []
        for respond in held:
            respond()

    def done(self, transfer: str) -> None:
        """The KV of a transfer has arrived."""
        if (resume := self._waiting.pop(transfer, None)) is not None:
            resume()
        else:
            self._done.add(transfer)

    def wait(self, transfer: str, resume: Any) -> None:
        """Call `resume` when the KV is there."""
        if transfer in self._done:
            self._done.remove(transfer)
            resume()
        else:
            self._waiting[transfer] = resume


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection."""

    def __init__(self, fake: Fake) -> None:
        self._fake = fake
        self._buffer = b""
        self._is_full = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    def connection_lost(self, error: Exception | None) -> None:
        self._fake.shared.drop(self)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False

    def write(self, data: bytes) -> None:
        """Send; while nothing is read, events are left out."""
        if not self._is_full and self._transport is not None:
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            length = _LENGTH.search(head)
            size = int(length[1]) if length else 0
            if not end or len(rest) < size:
                return
            self._buffer = rest[size:]
            if head.startswith(b"POST /v1/completions "):
                self._fake.respond(self, json.loads(rest[:size]))
            elif head.startswith((b"GET /held ", b"GET /release ")):
                body = _dump({"held": len(self._fake.shared.held)})
                self.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
                if head.startswith(b"GET /release "):
                    self._fake.shared.release()
            else:
                status = b"200 OK" if head.startswith(b"GET /health ") else b"404 Not Found"
                self.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\n\r\n" % status)


def _completion(params: dict[str, Any]) -> bytes:
    """Return a response of one token, as vLLM's `CompletionResponse`."""
    usage = {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1}
    frame = {**_frame(1, "length", None), "usage": usage, handover.FIELD: params}
    body = _dump(frame)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def _events(num_tokens: int, first: int, prompt_ids: list[int] | None) -> list[bytes]:
    """Return a stream of tokens; its first event has `first` of them, and the prompt's ids."""
    sizes = [first, *[1] * (num_tokens - first)]
    events = [
        _event(size, "length" if place == len(sizes) - 1 else None, prompt_ids, is_first=not place)
        for place, size in enumerate(sizes)
    ]
    return [*events, b"data: [DONE]\n\n"]


def _event(
    num_tokens: int, reason: str | None, prompt_ids: list[int] | None, *, is_first: bool = False
) -> bytes:
    frame = _frame(num_tokens, reason, None if prompt_ids is None else [1] * num_tokens)
    if is_first:
        frame["choices"][0]["prompt_token_ids"] = prompt_ids
    return b"data: %b\n\n" % _dump(frame)


def _frame(num_tokens: int, reason: str | None, token_ids: list[int] | None) -> dict[str, Any]:
    """Return one piece of a completion, with all fields that vLLM writes."""
    choice = {
        "index": 0, "text": " token" * num_tokens, "logprobs": None, "finish_reason": reason,
        "stop_reason": None, "prompt_token_ids": None, "token_ids": token_ids,
    }  # fmt: skip
    return {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
    }


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(options: argparse.Namespace) -> None:
    shared = Shared()
    roles = {
        "aggregated": (Role.BOTH, options.aggregated),
        "prefill": (Role.PREFILL, options.split),
        "decode": (Role.DECODE, options.split),
    }
    fakes = {name: Fake(name, role, options.input_len, shared) for name, (role, _) in roles.items()}
    urls = {name: await fake.start(roles[name][1]) for name, fake in fakes.items()}
    print(json.dumps(urls), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for fake in fakes.values():
        await fake.close()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument(
        "--aggregated", required=True, help="control addresses of routers, with commas"
    )
    arguments.add_argument("--split", required=True, help="those of the pair's routers")
    arguments.add_argument("--input-len", type=int, required=True)
    uvloop.run(_serve(arguments.parse_args()))
