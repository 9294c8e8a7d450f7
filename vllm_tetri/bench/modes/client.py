"""The client of `vllm-tetri bench modes`: a process that sends one schedule at a time.

A child of the benchmark: it reads turns as lines of JSON and answers each with a line. It
shares its cores with what it measures, so it does as little as tells when tokens came: it
looks for the starts of events, and reads nothing but the count of tokens at the end.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from random import Random
from typing import cast
from urllib.parse import urlsplit

import uvloop

_TOKEN_IDS = range(10, 500)  # every tokenizer has them
_BEFORE_FIRST_S = 0.2
_HEAD_END = b"\r\n\r\n"
_EVENT = b"\ndata: {"  # a line end within a text is escaped, so this is never part of one
_ERROR = b'\ndata: {"error"'
_STREAM_END = b"\r\n0\r\n\r\n"
_COUNT = re.compile(rb'"completion_tokens": ?(\d+)')
_TAIL_BYTES = 2048  # of an answer, in which its last event is
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Turn:
    """What to send; one entry per request in the lists.

    Attributes:
        at_s: When each is due, in seconds from the start, in order.
        seed: Of the prompts' tokens.
        quiet_s: Everything is given up when nothing has come for so long, although a request
            waits: how long all of it takes is a matter of the machine.
    """

    url: str
    model: str
    at_s: Sequence[float]
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    seed: str
    quiet_s: float


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a request, from the moment it was due.

    Attributes:
        ttft_s: To the first token.
        jct_s: To the last token.
        gaps_us: Microseconds between events. An event is a token, or more that came together.
        error: Why it failed; times are without meaning then.
    """

    ttft_s: float = 0.0
    jct_s: float = 0.0
    gaps_us: Sequence[int] = ()
    error: str = ""


class Pulse:
    """When something last came from the server."""

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s
        self._newest = 0.0
        self._waiting = 0  # requests under way

    def sent(self, now: float) -> None:
        """A request begins to wait."""
        self._waiting += 1
        self._newest = now

    def came(self, now: float) -> None:
        """A part of any answer."""
        self._newest = now

    def ended(self) -> None:
        """A request waits no longer, whatever became of it."""
        self._waiting -= 1

    def left_s(self, now: float) -> float:
        """Until it has been quiet for too long; at most 0: it has."""
        return self._newest + self._quiet_s - now if self._waiting else self._quiet_s


async def play(turn: Turn) -> list[Reply]:
    """Send everything and wait for the last answer; replies in the order of the schedule."""
    bodies, pulse = _bodies(turn), Pulse(turn.quiet_s)
    started = time.monotonic() + _BEFORE_FIRST_S
    sending = [
        asyncio.create_task(_one(turn, body, started + at_s, output_tokens, pulse))
        for body, at_s, output_tokens in zip(bodies, turn.at_s, turn.output_tokens, strict=True)
    ]
    pending = set(sending)
    while pending and (left_s := pulse.left_s(time.monotonic())) > 0:
        _, pending = await asyncio.wait(pending, timeout=left_s)
    for task in sending:
        task.cancel()
    given_up = Reply(error=f"nothing came for {turn.quiet_s:.0f} s")
    found = await asyncio.gather(*sending, return_exceptions=True)
    return [
        given_up if isinstance(each, asyncio.CancelledError) else _checked(each) for each in found
    ]


def _checked(found: Reply | BaseException) -> Reply:
    if isinstance(found, BaseException):
        raise found
    return found


async def _one(turn: Turn, body: bytes, due: float, output_tokens: int, pulse: Pulse) -> Reply:
    await asyncio.sleep(due - time.monotonic())
    pulse.sent(time.monotonic())
    loop = asyncio.get_running_loop()
    host, port = urlsplit(turn.url).netloc.split(":")
    stream: Stream | None = None
    try:
        _, stream = await loop.create_connection(lambda: Stream(pulse), host, int(port))
        await stream.ask(body)
    except OSError as error:
        return Reply(error=f"{type(error).__name__}: {error}")
    finally:
        pulse.ended()
        if stream is not None:
            stream.close()
    *tokens, _ = stream.event_s  # the last event has the counts
    if stream.num_tokens != output_tokens or not tokens:
        return Reply(error=f"{stream.num_tokens} of {output_tokens} tokens came")
    gaps_us = [round(1e6 * (later - earlier)) for earlier, later in pairwise(tokens)]
    return Reply(tokens[0] - due, tokens[-1] - due, gaps_us)


class Stream(asyncio.Protocol):
    """One HTTP/1.1 connection for one streamed answer.

    Attributes:
        event_s: Monotonic time when each event came.
        num_tokens: Of the answer, as the server counts them; 0 until it has said so.
    """

    def __init__(self, pulse: Pulse) -> None:
        self.event_s: list[float] = []
        self.num_tokens = 0
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head = b""
        self._has_head = False
        self._tail = b""
        self._pulse = pulse

    async def ask(self, request: bytes) -> None:
        """Send a request and wait for the end of its answer.

        Raises:
            ConnectionError: No answer, or an error.
        """
        assert self._transport is not None
        self._transport.write(request)
        await self._ended

    def close(self) -> None:
        """Leave, whatever is on its way."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"connection lost: {error or self._tail[-_SHOWN:]!r}")

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self._pulse.came(now)
        if not self._has_head:
            self._head += data
            head, end, data = self._head.partition(_HEAD_END)
            if not end:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self._fail((head.partition(b"\r")[0] + b" " + data[:_SHOWN]).decode("latin-1"))
                return
            self._has_head = True
        text = self._tail + data
        # Behind the last event that was counted, or as much as may be part of one.
        if count := text.count(_EVENT, max(0, len(self._tail) - len(_EVENT) + 1)):
            self.event_s += [now] * count
            if _ERROR in text:
                self._fail(text[text.index(_ERROR) :][:_SHOWN].decode("latin-1"))
                return
        if text.endswith(_STREAM_END):
            counted = _COUNT.findall(text)
            self.num_tokens = int(counted[-1]) if counted else 0
            if not self._ended.done():
                self._ended.set_result(None)
        self._tail = text[-_TAIL_BYTES:]

    def _fail(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(ConnectionError(reason))


def _bodies(turn: Turn) -> list[bytes]:
    """Whole HTTP requests, with prompts of random tokens."""
    rng, netloc = Random(turn.seed), urlsplit(turn.url).netloc
    found = []
    for prompt_tokens, output_tokens in zip(turn.prompt_tokens, turn.output_tokens, strict=True):
        body = {
            "model": turn.model,
            "prompt": rng.choices(_TOKEN_IDS, k=prompt_tokens),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        raw = json.dumps(body, separators=(",", ":")).encode()
        lines = (
            "POST /v1/completions HTTP/1.1",
            f"Host: {netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(raw)}",
        )
        found.append("\r\n".join(lines).encode() + _HEAD_END + raw)
    return found


def _main() -> None:
    gc.disable()  # a collection would look like a stall of whatever is measured
    # Without a buffer, as PYTHONUNBUFFERED has it, print loses what a full pipe did not take.
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        for line in sys.stdin:
            replies = uvloop.run(play(Turn(**json.loads(line))))
            answer = {"replies": [asdict(each) for each in replies]}
            out.write(json.dumps(answer).encode() + b"\n")
            out.flush()
            gc.collect()


if __name__ == "__main__":
    _main()
