"""Refuse early what would come late (Mooncake's early rejection). Pure.

A request whose first token, or pace, is expected to miss what clients were promised would
take time from others and be of no use to its own. So it is refused when it arrives, and
told when to come back: when the work before it is done as far as it must be. What would
miss it with nobody else there is served: coming back would not help.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tetri.policy.adaptive import Objective, Place
from vllm_tetri.policy.backpressure import whole_seconds

# Forecasts are off by so much either way; only what is later than that is refused.
_TOLERANCE = 1.25
# Forecasts from steps that are known less are guesses, and nobody is refused by a guess.
_LEAST_CONFIDENCE = 0.5


@dataclass(frozen=True, slots=True)
class Late:
    """Why a request is refused, and the whole seconds after which it may come again."""

    reason: str
    retry_after_s: int


def expected_late(place: Place, objective: Objective, answer_tokens: float) -> Late | None:
    """What the best place for a request would miss; None if it keeps what was promised.

    Args:
        answer_tokens: Expected; a pace recovers when answers like it have ended.
    """
    if place.confidence < _LEAST_CONFIDENCE:
        return None  # serving it is how one learns
    late_s = place.ttft_s - objective.ttft_s
    if place.waits and place.ttft_s > _TOLERANCE * objective.ttft_s:
        said = f"first token expected in {place.ttft_s:.2g} s, promised {objective.ttft_s:g} s"
        return Late(said, whole_seconds(late_s))
    if place.shares and place.tpot_s > _TOLERANCE * objective.tpot_s:
        said = (
            f"{place.tpot_s * 1e3:.3g} ms a token expected, promised {objective.tpot_s * 1e3:g} ms"
        )
        # Answers are half written on average.
        return Late(said, whole_seconds(place.tpot_s * answer_tokens / 2))
    return None
