"""When a client that nobody had room for should come back.

An instance past its bound refuses prompts until one of those that it has is
computed. How long that takes follows from its load report and from how fast it
computed prompts so far.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from vllm_tetri.types import ClusterView, InstanceId, InstanceView

SHORTEST_S = 1
LONGEST_S = 60  # what OpenAI's client library is willing to wait
_KEPT = 0.9  # weight of what came before, at each prompt
_MOST_INSTANCES = 2048


class PrefillSpeeds:
    """Prompt tokens per second of every instance, from the prompts it answered.

    The time that a prompt took is counted from the answer before it, or from
    when it was sent if that was later: so neither waiting nor idleness counts.
    Calls come in order of `now`.
    """

    def __init__(self) -> None:
        self._tokens: dict[InstanceId, tuple[float, float, float]] = {}

    def answered(self, instance: InstanceId, num_tokens: int, *, sent_s: float, now: float) -> None:
        """A prompt that was sent at `sent_s` is computed."""
        tokens, busy_s, last_s = self._tokens.pop(instance, (0.0, 0.0, sent_s))
        tokens = _KEPT * tokens + num_tokens
        busy_s = _KEPT * busy_s + max(0.0, now - max(last_s, sent_s))
        if len(self._tokens) >= _MOST_INSTANCES:
            del self._tokens[next(iter(self._tokens))]
        self._tokens[instance] = (tokens, busy_s, now)

    def tokens_per_s(self, instance: InstanceId) -> float | None:
        """None while nothing is known."""
        tokens, busy_s, _ = self._tokens.get(instance, (0.0, 0.0, 0.0))
        return tokens / busy_s if tokens > 0 and busy_s > 0 else None


def retry_after_s(
    view: ClusterView,
    full: Collection[InstanceId],
    speeds: PrefillSpeeds,
    *,
    standing: Collection[InstanceId] = (),
) -> int:
    """Whole seconds, 1 to 60, until the first of the full instances has room again.

    That is about one prompt of average length, and all that are queued where a queue is
    kept from standing (`policy.standing`). An instance of which too little is known counts
    as 1 s.
    """
    waits = [
        queue_wait_s(each, speeds) if each.info.id in standing else _prompt_s(each, speeds)
        for each in view.instances
        if each.info.id in full
    ]
    return whole_seconds(min((wait or 0.0 for wait in waits), default=0.0))


def queue_wait_s(each: InstanceView, speeds: PrefillSpeeds) -> float | None:
    """How long the prompts take that an instance has; None while nothing is known."""
    speed = speeds.tokens_per_s(each.info.id)
    return None if speed is None else max(0, each.load.queued_prefill_tokens) / speed


def whole_seconds(wait_s: float) -> int:
    """A wait as `Retry-After` says it, 1 to 60."""
    return min(LONGEST_S, max(SHORTEST_S, math.ceil(wait_s)))


def _prompt_s(each: InstanceView, speeds: PrefillSpeeds) -> float | None:
    # One prompt is being computed; others that run are decoding or sending their KV.
    num_prompts = max(0, each.load.waiting) + 1
    wait_s = queue_wait_s(each, speeds)
    return None if wait_s is None else wait_s / num_prompts
