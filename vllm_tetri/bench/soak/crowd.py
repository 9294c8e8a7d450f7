"""The clients of a soak, who all ask at a time, and all pause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from types import TracebackType

from vllm_tetri.bench.soak.answers import Answer
from vllm_tetri.bench.soak.client import Client
from vllm_tetri.bench.soak.load import Request
from vllm_tetri.bench.soak.tally import Asked

Known = Sequence[tuple[Request, Answer]]

_ABORTS = 0.1  # of requests
_ABORT_WITHIN_S = 1.0


class Crowd:
    """Asks for one thing after the other as long as this is entered. Used by one event loop.

    Args:
        known: What is asked, and what must be answered.
        number: Of requests at a time.
        note: Told what became of each.
    """

    def __init__(
        self, client: Client, known: Known, rng: Random, number: int, note: Callable[[Asked], None]
    ) -> None:
        self._client = client
        self._known = known
        self._note = note
        self._seeds = [rng.random() for _ in range(number)]
        self._tasks: list[asyncio.Task[None]] = []
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._asking = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def __aenter__(self) -> Crowd:
        self._tasks = [asyncio.create_task(self._ask(Random(seed))) for seed in self._seeds]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def pause(self) -> None:
        """Let every request end, and begin none."""
        self._is_open.clear()
        await self._is_idle.wait()
        for task in self._tasks:
            if task.done():
                task.result()  # a client that failed is a defect of this program

    def go_on(self) -> None:
        """Behind `pause`."""
        self._is_open.set()

    async def _ask(self, rng: Random) -> None:
        while True:
            while not self._is_open.is_set():  # it may be closed again before this goes on
                await self._is_open.wait()
            self._asking += 1
            self._is_idle.clear()
            try:
                await self._one(rng)
            finally:
                self._asking -= 1
                if not self._asking:
                    self._is_idle.set()

    async def _one(self, rng: Random) -> None:
        request, expected = rng.choice(self._known)
        if rng.random() < 0.5:
            request = request.streamed()
        leaves = rng.uniform(0, _ABORT_WITHIN_S) if rng.random() < _ABORTS else None
        self._note(await self._client.ask(request, expected, leaves_after_s=leaves))
