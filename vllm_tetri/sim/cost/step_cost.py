"""What a step of an engine costs: linear in what it computes, or a roofline.

Policies use `types.StepCoefficients`, which real engines fit to their own steps. A roofline bends
where arithmetic takes longer than reading the weights; what an engine would fit to such steps is
`linear`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from vllm_tetri.types import StepCoefficients

# Steps that an engine meets: decodes, context of each, prompt tokens, tokens before those.
_STEPS = ((0, 1, 8, 32, 64, 128, 256), (128, 1024), (0, 64, 256, 512, 2048), (0, 1024, 16384))


@dataclass(frozen=True, slots=True)
class Roofline:
    """Layers in sequence. Linear ones take as long as their arithmetic or as reading their
    weights, whichever is longer; attention of decodes takes as long as reading their KV, and that
    of prompts as long as its arithmetic. All in seconds."""

    overhead_s: float  # fixed part of a step: launches, sampling, waiting for other devices
    weights_s: float  # to read all weights once
    token_s: float  # arithmetic of linear layers per token
    kv_s: float  # to read the KV of a token of context
    attention_s: float  # arithmetic per prompt token and token before it
    link_s: float = 0.0  # to add up activations between devices, per token

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


StepCost = StepCoefficients | Roofline
"""Durations of an engine's steps."""


@cache
def linear(cost: StepCost) -> StepCoefficients:
    """Return what an engine with these steps would report: linear costs themselves, else the least
    squares by relative error over steps of all kinds, without negative coefficients (the lowest is
    left out until there is none)."""
    if isinstance(cost, StepCoefficients):
        return cost
    rows, seconds = [], []
    for decodes, context, prompt, earlier in product(*_STEPS):
        if decodes + prompt:
            before = (prompt - 1) / 2 + earlier if prompt else 0.0
            rows.append((1.0, decodes, decodes * context, prompt, prompt * before))
            seconds.append(cost.step_s(decodes, decodes * context, prompt, before))
    relative = np.array(rows, dtype=float) / np.array(seconds)[:, None]
    scale, kept = np.abs(relative).max(axis=0), list(range(5))
    while True:
        solved = np.linalg.lstsq(relative[:, kept] / scale[kept], np.ones(len(rows)), rcond=None)[0]
        if solved.min() >= 0:
            break
        kept.pop(int(solved.argmin()))
    found = np.zeros(5)
    found[kept] = solved / scale[kept]
    base_s, request_s, token_s, prompt_s, context_s = map(float, found)
    return StepCoefficients(base_s, request_s, token_s, prompt_s, context_s, confidence=1.0)
