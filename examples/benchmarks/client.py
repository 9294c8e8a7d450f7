"""The one HTTP client of the laboratory: open loop, one raw connection a request, little CPU.

It shares its cores with what it measures, so it reads no more than tells when tokens came: it
counts the starts of events and parses nothing but the usage at the end. Times count from when a
request was *due*, so a client or server that falls behind cannot hide it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

TOKEN_IDS = range(10, 500)  # every tokenizer has them
_LEAD_S = 0.2
_HEAD_END = b"\r\n\r\n"
_EVENT = b"\ndata: {"  # a line end within a text is escaped, so this is never part of one
_ERROR = b'\ndata: {"error"'
_STREAM_END = b"\r\n0\r\n\r\n"
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
_TAIL_BYTES = 2048
_SHOWN = 300
# When so many tokens of a request have come; requests that are due then wait for it.
_Marks = dict[int, asyncio.Future[float]]


@dataclass(frozen=True, slots=True)
class Request:
    """A greedy completion and when it is due.

    Attributes:
        at_s: Seconds after the start, or after what `after` waits for.
        prompt: Token ids, or the text of a chat's only message.
        output_tokens: Exactly this many must come.
        stream: Whether tokens come one by one.
        extra: Further fields of the body.
        headers: Further headers.
        after: Place of another request of the schedule, and how many of its tokens must have come,
            unless it has ended before.
    """

    at_s: float
    prompt: list[int] | str
    output_tokens: int
    stream: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    after: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a request.

    Attributes:
        status: HTTP status; 0 without a response.
        ttft_s: From when it was due to the first event with tokens.
        jct_s: From when it was due to the end, whatever the end was.
        gaps_us: Microseconds between events; an event is a token, or several that came together.
        text, token_ids: What was generated, where the caller keeps it.
        headers: Headers of the response, names in lower case.
        error: Why it failed; empty if it was served.
        due_s: When it was due, in seconds after the start of the schedule.
    """

    status: int = 0
    ttft_s: float = 0.0
    jct_s: float = 0.0
    gaps_us: Sequence[int] = ()
    num_tokens: int = 0
    text: str = ""
    token_ids: Sequence[int] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    due_s: float = 0.0

    @property
    def is_refused(self) -> bool:
        """Whether the server said that it cannot take the request now."""
        return self.status in (429, 503)

    @property
    def is_clear_error(self) -> bool:
        """Whether the server said in OpenAI's form what went wrong."""
        return '{"error"' in self.error.replace(" ", "") and '"message"' in self.error


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and how long to wait for any sign of life from there."""

    url: str
    model: str
    quiet_s: float = 300.0
    keep_outputs: bool = False


async def play(target: Target, requests: Sequence[Request]) -> list[Reply]:
    """Send every request when it is due and wait for all; replies in the order of requests."""
    raw = [_http(target, each) for each in requests]
    pulse = _Pulse(target.quiet_s)
    marks: list[_Marks] = [{} for _ in requests]
    for place, tokens in (each.after for each in requests if each.after):
        marks[place].setdefault(tokens, asyncio.get_running_loop().create_future())
    start = time.monotonic() + _LEAD_S
    tasks = [
        asyncio.create_task(_send_when_due(target, place, requests, body, start, pulse, marks))
        for place, body in enumerate(raw)
    ]
    pending = set(tasks)
    while pending and (left_s := pulse.left_s()) > 0:
        _, pending = await asyncio.wait(pending, timeout=left_s)
    for task in pending:
        task.cancel()
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    quiet = Reply(error=f"nothing was received for {target.quiet_s:.0f} s")
    return [each if isinstance(each, Reply) else _given_up(each, quiet) for each in replies]


def _given_up(outcome: BaseException, quiet: Reply) -> Reply:
    if isinstance(outcome, asyncio.CancelledError):
        return quiet
    raise outcome


async def send(target: Target, request: Request) -> Reply:
    """Send one request now."""
    raw = _http(target, request)
    return await _send(target, request, raw, time.monotonic(), _Pulse(target.quiet_s), {})


async def _send_when_due(
    target: Target,
    place: int,
    requests: Sequence[Request],
    raw: bytes,
    start: float,
    pulse: _Pulse,
    marks: Sequence[_Marks],
) -> Reply:
    each = requests[place]
    begun = start
    if each.after:
        other, tokens = each.after
        begun = await asyncio.shield(marks[other][tokens])
    due = begun + each.at_s
    await asyncio.sleep(due - time.monotonic())
    own = dict(marks[place])
    try:
        reply = await _send(target, each, raw, due, pulse, own)
    finally:
        for mark in own.values():
            mark.set_result(time.monotonic())
    return replace(reply, due_s=round(due - start, 5))


async def _send(
    target: Target, each: Request, raw: bytes, due: float, pulse: _Pulse, marks: _Marks
) -> Reply:
    pulse.begin()
    keeps, stream, error = target.keep_outputs or not each.stream, Stream(pulse), ""
    try:
        stream = await Stream.open(target.url, pulse, keep_body=keeps, marks=marks)
        await stream.exchange(raw)
    except OSError as failure:
        error = f"{type(failure).__name__}: {failure}"
    finally:
        pulse.end()
        stream.close()
    return stream.reply(each, due, error)


class _Pulse:
    """When something was last received for any of the requests in flight."""

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s
        self._newest = 0.0
        self._in_flight = 0

    def begin(self) -> None:
        self._in_flight += 1
        self._newest = time.monotonic()

    def record(self, now: float) -> None:
        self._newest = now

    def end(self) -> None:
        self._in_flight -= 1

    def left_s(self) -> float:
        """Seconds until the quiet has lasted too long; 0 or less when it has."""
        idle = not self._in_flight
        return self._quiet_s if idle else self._newest + self._quiet_s - time.monotonic()


class Stream(asyncio.Protocol):
    """One HTTP/1.1 connection for one response after the other.

    Attributes:
        event_s: Monotonic times of the events of the newest response.
    """

    def __init__(
        self, pulse: _Pulse, *, keep_body: bool = False, marks: _Marks | None = None
    ) -> None:
        self.event_s: list[float] = []
        self._pulse = pulse
        self._marks = {} if marks is None else marks
        self._keep_body = keep_body
        self._transport: asyncio.Transport | None = None
        self._begin()

    @classmethod
    async def open(
        cls,
        url: str,
        pulse: _Pulse | None = None,
        *,
        keep_body: bool = False,
        marks: _Marks | None = None,
    ) -> Stream:
        """Connect.

        Raises:
            OSError: Nothing listens there.
        """
        address, loop = urlsplit(url), asyncio.get_running_loop()
        host, port = address.hostname or "127.0.0.1", address.port or 80
        context = _trusting_all() if address.scheme == "https" else None
        stream = cls(pulse or _Pulse(math.inf), keep_body=keep_body, marks=marks)
        await loop.create_connection(lambda: stream, host, port, ssl=context)
        return stream

    async def exchange(self, raw: bytes) -> None:
        """Send a request and wait for the end of the response.

        Raises:
            ConnectionError: The connection or the stream ended early.
        """
        self._begin()
        assert self._transport is not None
        self._transport.write(raw)
        await self._ended

    def _begin(self) -> None:
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head = self._tail = b""
        self._body = bytearray()
        self._num_tokens = self._status = 0
        self.event_s = []

    def close(self) -> None:
        """Close the connection, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def reply(self, request: Request, due: float, error: str) -> Reply:
        """Return the outcome; `error` is why the exchange failed, if it did."""
        now, head = time.monotonic(), self._head.partition(_HEAD_END)[0].decode("latin-1")
        lines = [line.partition(":") for line in head.split("\r\n")[1:]]
        headers = {name.lower(): value.strip() for name, _, value in lines}
        body = dechunk(self._body) if "transfer-encoding" in headers else bytes(self._body)
        if not error and self._status != 200:
            error = f"HTTP {self._status} {body[:_SHOWN].decode(errors='replace')}"
        # The last event of a stream has the usage and no token.
        tokens = self.event_s[:-1] if request.stream and self._num_tokens else self.event_s
        if not error and self._num_tokens != request.output_tokens:
            error = f"{self._num_tokens} of {request.output_tokens} tokens came"
        text, token_ids = outputs_of(body) if self._keep_body and not error else ("", [])
        return Reply(
            status=self._status,
            ttft_s=round(tokens[0] - due, 5) if tokens else 0.0,
            jct_s=round((now if error or not tokens else tokens[-1]) - due, 5),
            gaps_us=[round(1e6 * (later - earlier)) for earlier, later in pairwise(tokens)],
            num_tokens=self._num_tokens,
            text=text,
            token_ids=token_ids,
            headers=headers,
            error=error,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    def connection_lost(self, error: Exception | None) -> None:
        if self._status not in (0, 200) and not self._ended.done():
            self._ended.set_result(None)
        self._fail(f"connection lost: {error or self._tail[-_SHOWN:]!r}")

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self._pulse.record(now)
        if not self._status:
            self._head += data
            head, end, data = self._head.partition(_HEAD_END)
            if not end:
                return
            self._status = int(head.split(b" ", 2)[1])
        if self._keep_body or self._status != 200:
            self._body += data
        text = self._tail + data
        # Count what follows the last counted event, or what may be a part of one.
        if count := text.count(_EVENT, max(0, len(self._tail) - len(_EVENT) + 1)):
            self.event_s += [now] * count
            for tokens in [each for each in self._marks if each <= len(self.event_s)]:
                self._marks.pop(tokens).set_result(now)
            if _ERROR in text:
                self._fail(text[text.index(_ERROR) :][:_SHOWN].decode("latin-1"))
        self._tail = text[-_TAIL_BYTES:]
        if text.endswith(_STREAM_END) or self._is_whole():
            usage = _USAGE.findall(text)
            self._num_tokens = int(usage[-1]) if usage else 0
            if not self._ended.done():
                self._ended.set_result(None)

    def _is_whole(self) -> bool:
        """Whether a response with a length, which is an error's, is complete."""
        found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", self._head)
        return found is not None and len(self._body) >= int(found[1])

    def _fail(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(ConnectionError(reason))
            self._ended.exception()  # if nothing waits for it, it is no news


def dechunk(raw: bytes | bytearray) -> bytes:
    """Return the content of a chunked body, or of what has come of it."""
    content, rest = bytearray(), bytes(raw)
    while size := int(rest.partition(b"\r\n")[0] or b"0", 16):
        rest = rest.partition(b"\r\n")[2]
        content += rest[:size]
        rest = rest[size + 2 :]
    return bytes(content)


def outputs_of(body: bytes) -> tuple[str, list[int]]:
    """Return the text and the token ids of a response, streamed or not."""
    events = re.findall(rb"^data: (\{.*\})", body, re.MULTILINE) or [body]
    text, token_ids = "", list[int]()
    for choice in (each for event in events for each in json.loads(event).get("choices") or ()):
        message = choice.get("delta") or choice.get("message") or choice
        text += message.get("content") or message.get("text") or ""
        token_ids += choice.get("token_ids") or []
    return text, token_ids


def random_prompt(length: int, rng: Random) -> list[int]:
    """Draw token ids that every tokenizer has."""
    return rng.choices(TOKEN_IDS, k=length)


def _http(target: Target, request: Request) -> bytes:
    is_chat = isinstance(request.prompt, str)
    message = {"role": "user", "content": request.prompt}
    body: dict[str, Any] = {
        "model": target.model,
        **({"messages": [message]} if is_chat else {"prompt": request.prompt}),
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **request.extra,
    }
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    raw = json.dumps(body, separators=(",", ":")).encode()
    headers = {
        "Host": urlsplit(target.url).netloc,
        "Content-Type": "application/json",
        "Content-Length": str(len(raw)),
        **request.headers,
    }
    lines = "".join(f"\r\n{name}: {value}" for name, value in headers.items())
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    return f"POST {path} HTTP/1.1{lines}\r\n\r\n".encode() + raw


def _trusting_all() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


# -- in a process of its own ---------------------------------------------------------


class Client:
    """The client in a process of its own, pinned to cores, asked with one schedule at a time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def play(self, target: Target, requests: Sequence[Request]) -> list[Reply]:
        """Send a schedule and wait for its end."""
        content = {"target": asdict(target), "requests": [asdict(each) for each in requests]}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(content).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the client process ended; its messages are above")
        return [Reply(**each) for each in json.loads(line)]


@contextmanager
def client(cores: Iterable[int]) -> Iterator[Client]:
    """Start a client process; it ends when the block is left."""
    own = set(cores)
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.benchmarks.client"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        preexec_fn=lambda: os.sched_setaffinity(0, own),
    )
    try:
        yield Client(process)
    finally:
        process.kill()
        process.communicate()


def _serve() -> None:
    gc.disable()  # a collection would look like a stall of whatever is measured
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        for line in sys.stdin:
            asked = json.loads(line)
            requests = [Request(**each) for each in asked["requests"]]
            replies = uvloop.run(play(Target(**asked["target"]), requests))
            out.write(json.dumps([asdict(each) for each in replies]).encode() + b"\n")
            out.flush()
            gc.collect()


if __name__ == "__main__":
    _serve()
