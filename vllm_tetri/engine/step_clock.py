"""How long an engine's steps take. Owner: the engine thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from vllm_tetri.policy.speeds import StepSpeeds


class StepClock:
    """Times steps from their scheduling to their end, and learns from them.

    With asynchronous scheduling a step is scheduled while the one before it runs, so it
    begins when that one has ended.
    """

    def __init__(self, speeds: StepSpeeds) -> None:
        self._speeds = speeds
        self._begun: deque[tuple[float, int, int]] = deque()
        self._ended_s = float("-inf")

    def begin(self, num_scheduled_tokens: Mapping[str, int], now: float) -> None:
        """A step is scheduled, with so many tokens of every request; it computes something."""
        prompt_tokens = sum(tokens for tokens in num_scheduled_tokens.values() if tokens > 1)
        num_decodes = sum(tokens == 1 for tokens in num_scheduled_tokens.values())
        self._begun.append((now, num_decodes, prompt_tokens))

    def end(self, now: float, *, learns: bool = True) -> float:
        """The oldest of them has ended; returns its seconds."""
        begun_s, num_decodes, prompt_tokens = self._begun.popleft()
        seconds = now - max(begun_s, self._ended_s)
        self._ended_s = now
        if learns:
            self._speeds.learn(num_decodes, prompt_tokens, seconds)
        return seconds
