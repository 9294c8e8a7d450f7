"""What a router answers: the pieces of a stream and when they came, or one body."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from vllm_tetri.bench.soak.tally import End

AGAIN_S = 0.25
_LONGEST_AGAIN_S = 1.0
_COME_AGAIN = (429, 503)
_SHOWN = 200


@dataclass(slots=True)
class Answer:
    """What a client can compare."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)

    def take(self, choice: Mapping[str, Any], text: str) -> None:
        """A piece of it."""
        self.text += text
        self.token_ids += choice.get("token_ids") or []


class Failed(Exception):
    """A request has ended without an answer."""

    def __init__(self, end: End, words: str) -> None:
        super().__init__(words[:_SHOWN])
        self.end = end


class ComeAgain(Failed):
    """A router has not taken the request, or went before it said anything.

    Attributes:
        end: What becomes of the request if nobody else takes it.
        wait_s: How long to wait when all routers say so.
        is_broken: Whether the connection broke.
    """

    def __init__(self, end: End, words: str, wait_s: float, *, is_broken: bool = False) -> None:
        super().__init__(end, words)
        self.wait_s = wait_s
        self.is_broken = is_broken


def refusal(response: aiohttp.ClientResponse, text: str) -> Failed:
    """What an answer other than 200 means."""
    words = f"HTTP {response.status} {text}"
    try:
        is_clear = bool(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return Failed(End.LOST, f"no clear error: {words}")
    if is_clear and response.status in _COME_AGAIN:
        wait_s = min(float(response.headers.get("Retry-After") or AGAIN_S), _LONGEST_AGAIN_S)
        return ComeAgain(End.ERROR, words, wait_s)
    return Failed(End.ERROR, words)


async def read_stream(response: aiohttp.ClientResponse, heard_s: list[float]) -> Answer:
    """A stream to its end.

    Args:
        heard_s: Gets the monotonic time of every event, of those of a stream that breaks,
            too.

    Raises:
        Failed: It ended with an error, or too early.
    """
    answer, is_complete = Answer(), False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        heard_s.append(time.monotonic())
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            is_complete = True
            continue
        event = json.loads(data)
        if event.get("error"):
            raise Failed(End.ERROR, str(event["error"]))
        for choice in event.get("choices", ()):
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            answer.take(choice, text or "")
    if not is_complete:
        raise Failed(End.LOST, "the stream ended in the middle, without an error")
    return answer


def whole(body: Mapping[str, Any]) -> Answer:
    """An answer that is not streamed."""
    choice, answer = body["choices"][0], Answer()
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    answer.take(choice, text or "")
    return answer


def difference(answer: Answer, expected: Answer) -> str:
    """Where an answer leaves the one that was expected."""
    ours, theirs = answer.token_ids, expected.token_ids
    place = next(
        (index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
        min(len(ours), len(theirs)),
    )
    return f"{len(ours)} tokens instead of {len(theirs)}, equal up to token {place}"
