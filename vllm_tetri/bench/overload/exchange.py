"""One request on a connection of its own, at as little cost as tells what became of it."""

from __future__ import annotations

import asyncio
import re
import time
from typing import cast

from vllm_tetri.bench.overload.turn import End

COME_AGAIN = (429, 503)
LONGEST_WAIT_S = 60  # that OpenAI's clients accept
_HEAD_END = b"\r\n\r\n"
_MOST_HEAD_BYTES = 64 << 10
_STREAM_END = b"\r\n0\r\n\r\n"
# A line end within a text is escaped, so neither is ever part of one.
_EVENT = b"\ndata: {"
_ERROR = b'\ndata: {"error"'
_DONE = b"data: [DONE]"
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *(\d+)\r\n", re.IGNORECASE)
_COUNT = re.compile(rb'"completion_tokens": ?(\d+)')
_TAIL_BYTES = 2048  # of a stream, in which its last event is
_SHOWN = 200


class Broken(Exception):
    """An answer is none, or not as HTTP has it."""


class Exchange(asyncio.Protocol):
    """A connection for one answer. Owner: one event loop; `close` it.

    Attributes:
        status: Of the answer; 0 before its head has come.
        first_s: Monotonic time of the first event of a stream; 0 before.
    """

    def __init__(self) -> None:
        self.status = 0
        self.first_s = 0.0
        self._head = b""
        self._body = b""  # of a stream only the end
        self._length = 0
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def ask(self, request: bytes) -> None:
        """Send a request and wait for the end of its answer.

        Raises:
            Broken: There is none, or its stream says an error.
        """
        assert self._transport is not None
        self._transport.write(request)
        await self._ended

    def outcome(self, answer_tokens: int) -> tuple[End, int, str]:
        """Of an answer that has ended: how, when to come again, and what is wrong with it.

        Args:
            answer_tokens: That a complete answer has.
        """
        if self.status == 200:
            counted = _COUNT.findall(self._body)
            tokens = int(counted[-1]) if counted else 0
            if tokens == answer_tokens and _DONE in self._body:
                return End.SERVED, 0, ""
            return End.BAD, 0, f"{tokens} of {answer_tokens} tokens came"
        again = _RETRY_AFTER.search(self._head)
        if self.status not in COME_AGAIN:
            return End.BAD, 0, f"{self.status} {_text(self._body)}"
        if again is None or not 1 <= int(again[1]) <= LONGEST_WAIT_S:
            return End.BAD, 0, f"{self.status} without a Retry-After of 1 to {LONGEST_WAIT_S} s"
        if not self._body.startswith(b'{"error":'):
            return End.BAD, 0, f"{self.status} without an error: {_text(self._body)}"
        return End.REFUSED, int(again[1]), ""

    def close(self) -> None:
        """Leave, whatever is on its way."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"connection lost: {error or _text(self._body)}")

    def data_received(self, data: bytes) -> None:
        if not self.status:
            self._head += data
            head, end, data = self._head.partition(_HEAD_END)
            if not end:
                if len(self._head) > _MOST_HEAD_BYTES:
                    self._fail("a head without an end")
                return
            self._begin(head + b"\r\n")
        if self.status == 200:
            self._flow(data)
        else:
            self._body += data
            if len(self._body) >= self._length:
                self._end()

    def _begin(self, head: bytes) -> None:
        self._head = head
        status, length = _STATUS.match(head), _LENGTH.search(head)
        if status is None:
            self._fail(f"no HTTP: {_text(head)}")
            return
        self.status = int(status[1])
        self._length = int(length[1]) if length else 0

    def _flow(self, data: bytes) -> None:
        text = self._body + data
        if not self.first_s and _EVENT in text:
            self.first_s = time.monotonic()
        if _ERROR in text:
            self._fail(_text(text[text.index(_ERROR) :]))
        self._body = text[-_TAIL_BYTES:]
        if text.endswith(_STREAM_END):
            self._end()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, words: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(Broken(words))
            self._ended.exception()  # nobody may be waiting for it
        self.close()


def _text(raw: bytes) -> str:
    return raw[:_SHOWN].decode("latin-1").strip()
