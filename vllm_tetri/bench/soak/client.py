"""Clients of a soak: they ask, compare, come again when they are told to, and note what
became of every request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from vllm_tetri.bench.soak.load import Request
from vllm_tetri.bench.soak.tally import Asked, End

# What a client waits for one answer, and how long it comes again.
LIMIT_S = 120.0
PATIENCE_S = 90.0
_AGAIN_S = 0.25
_LONGEST_AGAIN_S = 1.0
_COME_AGAIN = (429, 503)
_ABORTS = 0.1  # of requests
_ABORT_WITHIN_S = 1.0
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
        super().__init__(words)
        self.end = end


class _ComeAgain(Exception):
    """Nobody took the request."""

    def __init__(self, end: End, words: str, wait_s: float) -> None:
        super().__init__(words)
        self.end = end
        self.wait_s = wait_s


class Client:
    """Asks one router. Owner: one event loop; `close` it.

    Args:
        url: Of the router.
        limit_s: Longest time for one answer.
        patience_s: How long it comes again when nobody takes a request.
    """

    def __init__(
        self, url: str, *, limit_s: float = LIMIT_S, patience_s: float = PATIENCE_S
    ) -> None:
        self._url = url
        self._limit_s = limit_s
        self._patience_s = patience_s
        # A connection of a router that died must not be taken for one of the next.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def get(self, path: str) -> dict[str, Any] | None:
        """What the router says of itself; None if it does not answer."""
        try:
            async with asyncio.timeout(5.0), self._session.get(self._url + path) as response:
                found = await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    async def answer(self, request: Request) -> Answer:
        """One answer, on the first try.

        Raises:
            Failed: There is none.
        """
        try:
            return await self._once(request, _Silence())
        except _ComeAgain as error:
            raise Failed(error.end, str(error)) from error

    async def ask(
        self, request: Request, expected: Answer, *, leaves_after_s: float | None = None
    ) -> Asked:
        """Ask until there is an answer or an error, and compare.

        Args:
            leaves_after_s: The client does not wait for longer.
        """
        began_s, silence, again = time.monotonic(), _Silence(), 0
        try:
            async with asyncio.timeout(leaves_after_s):
                while True:
                    try:
                        answer = await self._once(request, silence)
                    except _ComeAgain as error:
                        if time.monotonic() - began_s > self._patience_s:
                            raise Failed(error.end, str(error)) from error
                        again += 1
                        await asyncio.sleep(error.wait_s)
                    else:
                        break
        except Failed as error:
            return _ended(error.end, began_s, silence, again, str(error))
        except TimeoutError:
            return _ended(End.LEFT, began_s, silence, again)
        if answer == expected:
            return _ended(End.GOOD, began_s, silence, again)
        return _ended(End.WRONG, began_s, silence, again, difference(answer, expected))

    async def _once(self, request: Request, silence: _Silence) -> Answer:
        limit = asyncio.timeout(self._limit_s)
        silence.begin()
        try:
            async with (
                limit,
                self._session.post(self._url + request.path, json=request.body) as response,
            ):
                if response.status != 200:
                    raise _refusal(response, await response.text())
                if request.body.get("stream"):
                    return await _read_stream(response, silence)
                return _whole(await response.json())
        except TimeoutError as error:
            if limit.expired():
                raise Failed(End.LOST, f"no answer within {self._limit_s:g} s") from error
            raise
        except aiohttp.ClientConnectorError as error:
            raise _ComeAgain(End.LOST, f"nobody listens: {error}", _AGAIN_S) from error
        except (aiohttp.ClientError, ConnectionError, ValueError, LookupError) as error:
            words = f"{type(error).__name__}: {error}"
            raise Failed(End.LOST, words[:_SHOWN]) from error


class _Silence:
    """The longest time without a piece of a stream."""

    def __init__(self) -> None:
        self._heard_s = time.monotonic()
        self.longest_s = 0.0

    def begin(self) -> None:
        """The request is on its way."""
        self._heard_s = time.monotonic()

    def heard(self) -> None:
        """A piece came."""
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - self._heard_s)
        self._heard_s = now


def _ended(end: End, began_s: float, silence: _Silence, again: int, words: str = "") -> Asked:
    return Asked(end, began_s, time.monotonic(), silence.longest_s, again, words)


def _refusal(response: aiohttp.ClientResponse, text: str) -> Exception:
    """What an answer other than 200 means."""
    words = f"HTTP {response.status} {text}"[:_SHOWN]
    try:
        is_clear = bool(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return Failed(End.LOST, f"no clear error: {words}")
    if is_clear and response.status in _COME_AGAIN:
        wait_s = min(float(response.headers.get("Retry-After") or _AGAIN_S), _LONGEST_AGAIN_S)
        return _ComeAgain(End.ERROR, words, wait_s)
    return Failed(End.ERROR, words)


async def _read_stream(response: aiohttp.ClientResponse, silence: _Silence) -> Answer:
    answer, is_complete = Answer(), False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        silence.heard()
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            is_complete = True
            continue
        event = json.loads(data)
        if event.get("error"):
            raise Failed(End.ERROR, str(event["error"])[:_SHOWN])
        for choice in event.get("choices", ()):
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            answer.take(choice, text or "")
    if not is_complete:
        raise Failed(End.LOST, "the stream ended in the middle, without an error")
    return answer


def _whole(body: Mapping[str, Any]) -> Answer:
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


async def loop(
    client: Client,
    known: Sequence[tuple[Request, Answer]],
    rng: Random,
    note: Callable[[Asked], None],
    is_over: Callable[[], bool],
) -> None:
    """One client: asks for one thing after the other until it is over."""
    while not is_over():
        request, expected = rng.choice(known)
        if rng.random() < 0.5:
            request = request.streamed()
        leaves = rng.uniform(0, _ABORT_WITHIN_S) if rng.random() < _ABORTS else None
        note(await client.ask(request, expected, leaves_after_s=leaves))
