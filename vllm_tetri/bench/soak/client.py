"""A client of a soak: it asks one router after the other, compares, and notes what became
of every request."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from vllm_tetri.bench.soak.answers import (
    AGAIN_S,
    Answer,
    ComeAgain,
    Failed,
    difference,
    read_stream,
    refusal,
    whole,
)
from vllm_tetri.bench.soak.load import Request
from vllm_tetri.bench.soak.tally import Asked, End

# What a client waits for one answer, and how long it comes again.
LIMIT_S = 120.0
PATIENCE_S = 90.0
# A router that does not say within this what it sees is away; shorter than a stop.
_GET_S = 2.0


class Client:
    """Asks routers in turn, as through a load balancer. Owner: one event loop; `close` it.

    Args:
        routers: Their URLs by name.
        limit_s: Longest time for one answer.
        patience_s: How long it comes again when nobody takes a request.
    """

    def __init__(
        self,
        routers: Mapping[str, str],
        *,
        limit_s: float = LIMIT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.routers = dict(routers)
        self._names = list(routers)
        self._turns = itertools.count()
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

    async def get(self, router: str, path: str) -> dict[str, Any] | None:
        """What a router says of itself; None if it does not answer."""
        url = self.routers[router] + path
        try:
            async with asyncio.timeout(_GET_S), self._session.get(url) as response:
                found = await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    async def answer(self, request: Request) -> Answer:
        """One answer, on the first try.

        Raises:
            Failed: There is none.
        """
        return await self._once(request, _Call(self._names[next(self._turns) % len(self._names)]))

    async def ask(
        self, request: Request, expected: Answer, *, leaves_after_s: float | None = None
    ) -> Asked:
        """Ask until there is an answer or an error, and compare.

        Args:
            leaves_after_s: The client does not wait for longer.
        """
        inquiry = _Inquiry(self._names, next(self._turns))
        try:
            async with asyncio.timeout(leaves_after_s):
                answer = await self._until_taken(request, inquiry)
        except Failed as error:
            return inquiry.ended(error.end, str(error))
        except TimeoutError:
            return inquiry.ended(End.LEFT)
        if answer == expected:
            return inquiry.ended(End.GOOD)
        return inquiry.ended(End.WRONG, difference(answer, expected))

    async def _until_taken(self, request: Request, inquiry: _Inquiry) -> Answer:
        while True:
            try:
                return await self._once(request, inquiry.next())
            except ComeAgain as error:
                if time.monotonic() - inquiry.began_s > self._patience_s:
                    raise
                inquiry.note(error)
                if inquiry.again % len(self._names) == 0:
                    await asyncio.sleep(error.wait_s)

    async def _once(self, request: Request, call: _Call) -> Answer:
        limit = asyncio.timeout(self._limit_s)
        url, has_head = self.routers[call.router] + request.path, False
        headers = {"X-Request-Id": call.id}
        try:
            async with (
                limit,
                self._session.post(url, json=request.body, headers=headers) as response,
            ):
                has_head = True
                if response.status != 200:
                    raise refusal(response, await response.text())
                if request.body.get("stream"):
                    return await read_stream(response, call.heard_s)
                return whole(await response.json())
        except TimeoutError as error:
            if limit.expired():
                raise Failed(End.LOST, f"no answer within {self._limit_s:g} s") from error
            raise
        except aiohttp.ClientConnectorError as error:
            raise ComeAgain(End.LOST, f"nobody listens: {error}", AGAIN_S) from error
        except (aiohttp.ClientError, ConnectionError, ValueError, LookupError) as error:
            words = f"{type(error).__name__}: {error}"
            if not has_head and isinstance(error, aiohttp.ClientConnectionError | ConnectionError):
                raise ComeAgain(End.LOST, words, AGAIN_S, is_broken=True) from error
            raise Failed(End.LOST, words) from error


@dataclass(slots=True)
class _Call:
    """A request at one router; `heard_s` are the times of its events."""

    router: str
    id: str = field(default_factory=lambda: f"soak-{uuid.uuid4().hex}")
    sent_s: float = field(default_factory=time.monotonic)
    heard_s: list[float] = field(default_factory=list)

    @property
    def gap_s(self) -> float:
        """The longest time without an event."""
        times = [self.sent_s, *self.heard_s]
        return max((later - at for at, later in itertools.pairwise(times)), default=0.0)


class _Inquiry:
    """A request from its first router to its last one."""

    def __init__(self, routers: list[str], turn: int) -> None:
        self._routers = routers
        self._turn = turn
        self._broke: list[str] = []
        self._call = _Call(routers[turn % len(routers)])
        self.began_s = self._call.sent_s
        self.again = 0

    def next(self) -> _Call:
        """Begin at the router whose turn it is."""
        self._call = _Call(self._routers[(self._turn + self.again) % len(self._routers)])
        return self._call

    def note(self, error: ComeAgain) -> None:
        """The router was none for it."""
        self.again += 1
        if error.is_broken:
            self._broke.append(self._call.router)

    def ended(self, end: End, words: str = "") -> Asked:
        """What became of it."""
        call = self._call
        return Asked(
            end,
            self.began_s,
            time.monotonic(),
            gap_s=call.gap_s,
            again=self.again,
            words=words,
            id=call.id,
            router=call.router,
            broke=tuple(self._broke),
            heard_s=tuple(call.heard_s),
        )
