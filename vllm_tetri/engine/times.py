"""How long requests wait, are computed and written in this engine, for `vllm-tetri explain`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_tetri.engine.compat import EngineCoreOutput, NewRequestData, Request
from vllm_tetri.messages import Served


@dataclass(slots=True)
class _Times:
    """Monotonic seconds; None: not yet."""

    added_s: float
    begun_s: float | None = None
    first_token_s: float | None = None
    cached_tokens: int = 0


class RequestTimes:
    """When requests were added, first scheduled, and got their first new token. Owner: the engine
    thread."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Times] = {}
        self._computing: set[str] = set()  # begun, without a new token

    def add(self, request_id: str) -> None:
        """Record a request that entered the engine."""
        self._by_id[request_id] = _Times(time.monotonic())

    def begin(self, requests: Iterable[NewRequestData]) -> None:
        """Record requests that a step has for the first time."""
        for each in requests:
            times = self._by_id.get(each.req_id)
            if times is not None and times.begun_s is None:  # V2 gets preempted ones as new
                times.begun_s, times.cached_tokens = time.monotonic(), each.num_computed_tokens
                self._computing.add(each.req_id)

    def begin_anew(self, request_id: str) -> None:
        """Record that what was found or loaded of a prompt is computed after all."""
        if (times := self._by_id.get(request_id)) is not None:
            times.cached_tokens = 0

    def end_step(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Record requests that a step made tokens of."""
        if self._computing:
            for request_id in self._computing.intersection([each.request_id for each in outputs]):
                self._by_id[request_id].first_token_s = time.monotonic()
                self._computing.discard(request_id)

    def take(self, request: Request) -> Served | None:
        """Return what a request took that ends now, and forget it; None if it never entered."""
        self._computing.discard(request.request_id)
        times, now = self._by_id.pop(request.request_id, None), time.monotonic()
        if times is None:
            return None
        begun_s = now if times.begun_s is None else times.begun_s
        first_s = now if times.first_token_s is None else times.first_token_s
        return Served(
            request.request_id,
            queue_s=begun_s - times.added_s,
            compute_s=first_s - begun_s,
            output_s=now - first_s,
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=times.cached_tokens,
            output_tokens=request.num_output_tokens,
            preemptions=request.num_preemptions,
        )
