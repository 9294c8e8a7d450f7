"""How long an engine's steps take. Owner: the engine thread."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from vllm_tetri.engine.compat import SchedulerOutput
from vllm_tetri.policy.step_fit import StepFit

_REFRESH_S = 0.25


class _Step(NamedTuple):
    begun_s: float
    num_decodes: int
    decode_context: int
    prompt_tokens: int
    prompt_context: float


class StepClock:
    """Times steps, and learns from them.

    A step begins when it is scheduled. While requests run, it begins when the one before it
    has ended: what the engine does between two steps is part of every gap that clients see,
    and with asynchronous scheduling a step is scheduled while the one before it runs.
    """

    def __init__(self, fit: StepFit) -> None:
        self._fit = fit
        self._begun: deque[_Step] = deque()
        self._ended_s = float("-inf")
        self._is_interrupted = False
        self._refreshed_s = float("-inf")

    def begin(self, output: SchedulerOutput, now: float, *, goes_on: bool) -> None:
        """A step is scheduled; it computes something.

        Args:
            goes_on: Whether requests ran when its scheduling began.
        """
        follows = goes_on and not self._is_interrupted
        self._is_interrupted = False
        self._begun.append(_read(output, self._ended_s if follows else now))

    def interrupt(self) -> None:
        """What runs does not go on for now: the next step begins when it is scheduled."""
        self._is_interrupted = True

    def end(self, now: float, *, learns: bool = True) -> float:
        """The oldest of them has ended; returns its seconds."""
        step = self._begun.popleft()
        seconds = now - max(step.begun_s, self._ended_s)
        self._ended_s = now
        if learns:
            self._fit.learn(*step[1:], seconds)
            if now - self._refreshed_s >= _REFRESH_S:
                self._refreshed_s = now
                self._fit.refresh()
        return seconds


def _read(output: SchedulerOutput, now: float) -> _Step:
    """What a step computes, behind what earlier ones did."""
    scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    total_context = sum(cached.num_computed_tokens)
    num_decodes, prompts = len(scheduled), []
    if output.total_num_scheduled_tokens > num_decodes:  # else everybody gets one token
        known = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        new = ((each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs)
        prompts = [
            (tokens, context)
            for pairs in (known, new)
            for name, context in pairs
            if (tokens := scheduled[name]) > 1
        ]
    total_context += sum(each.num_computed_tokens for each in output.scheduled_new_reqs)
    prompt_tokens = sum(tokens for tokens, _ in prompts)
    squares = sum(tokens * (context + (tokens - 1) / 2) for tokens, context in prompts)
    return _Step(
        now,
        num_decodes - len(prompts),
        total_context - sum(context for _, context in prompts),
        prompt_tokens,
        squares / prompt_tokens if prompt_tokens else 0.0,
    )
