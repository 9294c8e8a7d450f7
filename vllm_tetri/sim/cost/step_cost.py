"""What a step of an engine takes: linear in what it computes, or a roofline.

Policies price with `types.StepCoefficients`, which real engines fit to their own steps. A
roofline bends where arithmetic takes longer than reading the weights; what an engine would
fit to such steps is `linear`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Protocol

import numpy as np

from vllm_tetri.types import StepCoefficients

# Steps that an engine meets: decodes, context of each, prompt tokens, tokens before those.
_DECODES = (0, 1, 8, 32, 64, 128, 256)
_CONTEXTS = (128, 1024)
_PROMPTS = (0, 64, 256, 512, 2048)
_EARLIER = (0, 1024)


class StepCost(Hashable, Protocol):
    """What steps of an engine take."""

    def step_s(
        self, num_decodes: float, decode_context: float, prompt_tokens: float, prompt_context: float
    ) -> float:
        """Seconds of a step.

        Args:
            num_decodes: Requests that get a token each.
            decode_context: Tokens of context of all those together.
            prompt_tokens: That are computed.
            prompt_context: Tokens before each of them in the mean.
        """


@dataclass(frozen=True, slots=True)
class Roofline:
    """Layers one after the other: linear ones take as long as their arithmetic or as reading
    their weights, whichever is longer; attention of decodes as long as reading their KV,
    and that of prompts as long as its arithmetic. All in seconds.

    Attributes:
        overhead_s: Of any step: launches, sampling, waiting for other devices.
        weights_s: To read all weights once.
        token_s: Arithmetic of linear layers per token.
        kv_s: To read the KV of a token of context.
        attention_s: Arithmetic per prompt token and token before it.
        link_s: To add up activations between devices, per token.
    """

    overhead_s: float
    weights_s: float
    token_s: float
    kv_s: float
    attention_s: float
    link_s: float = 0.0

    @property
    def ridge_tokens(self) -> float:
        """In a step from which arithmetic takes longer than reading the weights."""
        return self.weights_s / self.token_s

    def step_s(
        self, num_decodes: float, decode_context: float, prompt_tokens: float, prompt_context: float
    ) -> float:
        tokens = num_decodes + prompt_tokens
        return (
            self.overhead_s
            + tokens * self.link_s
            + max(self.weights_s, tokens * self.token_s)
            + decode_context * self.kv_s
            + prompt_tokens * prompt_context * self.attention_s
        )


def prompt_s(cost: StepCost, prompt_tokens: int, chunk_tokens: int) -> float:
    """A prompt in chunks, with nobody before or beside it."""
    seconds, done = 0.0, 0
    while done < prompt_tokens:
        tokens = min(chunk_tokens, prompt_tokens - done)
        seconds += cost.step_s(0, 0, tokens, done + (tokens - 1) / 2)
        done += tokens
    return seconds


@cache
def linear(cost: StepCost) -> StepCoefficients:
    """What an engine with these steps would report: themselves if they are linear, else the
    least squares by relative error over steps of all kinds, no coefficient below 0."""
    if isinstance(cost, StepCoefficients):
        return cost
    rows, seconds = [], []
    for decodes, context, prompt, earlier in product(_DECODES, _CONTEXTS, _PROMPTS, _EARLIER):
        if decodes + prompt == 0:
            continue
        before = (prompt - 1) / 2 + earlier if prompt else 0.0
        rows.append((1.0, decodes, decodes * context, prompt, prompt * before))
        seconds.append(cost.step_s(decodes, decodes * context, prompt, before))
    relative = np.array(rows, dtype=float) / np.array(seconds)[:, None]
    solved = _not_negative(relative, np.ones(len(rows)))
    base_s, request_s, token_s, prompt_s, context_s = (float(each) for each in solved)
    return StepCoefficients(base_s, request_s, token_s, prompt_s, context_s, confidence=1.0)


def _not_negative(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares without negative parts: whatever comes out below 0 is left out, the
    lowest first."""
    kept = list(range(rows.shape[1]))
    scale = np.abs(rows).max(axis=0)
    found = np.zeros(rows.shape[1])
    while kept:
        solved = np.linalg.lstsq(rows[:, kept] / scale[kept], wanted, rcond=None)[0]
        if solved.min() >= 0:
            found[kept] = solved / scale[kept]
            break
        kept.pop(int(solved.argmin()))
    return found
