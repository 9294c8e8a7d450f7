"""The paper's device: OPT-13B on two V100, as far as what it states says what steps take.

Sections 2.1 and 2.2 state how many times longer steps take beside others, no times. So the
proportions of a linear step cost are fitted to those, and its scale is that of a roofline:
a step that decodes one request. What the text does not say is assumed here, and marked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_tetri.sim.cost.architecture import MODELS
from vllm_tetri.sim.cost.roofline import GPUS, roofline
from vllm_tetri.sim.cost.step_cost import StepCost
from vllm_tetri.types import StepCoefficients

PARALLEL = 2
LIGHT_PROMPT, HEAVY_PROMPT = 18, 512  # section 2.2.1
_WINDOW_TOKENS = 2048  # of the model
# Answers of 20 to 100 and of 512 tokens: half of that is there on average.
LIGHT_CONTEXT, HEAVY_CONTEXT = LIGHT_PROMPT + 30, LIGHT_PROMPT + 256
_BATCH = 128
# `fit`'s, rounded.
COST = StepCoefficients(0.0214, 0.000245, 8.41e-7, 0.000164, 5.46e-9, confidence=1.0)


@dataclass(frozen=True, slots=True)
class Statement:
    """A number of the paper.

    Attributes:
        where: Section and figure.
        words: What it says, and what is assumed in brackets.
        stated: How many times.
        of: What a step cost gives for it.
        is_fitted: Whether the profile was fitted to it.
        is_least: Whether it says "more than".
    """

    where: str
    words: str
    stated: float
    of: Callable[[StepCost], float]
    is_fitted: bool = True
    is_least: bool = False

    def deviation(self, cost: StepCost) -> float:
        """Of a cost, as part of what is stated; 0 for more than a least."""
        found = self.of(cost) / self.stated - 1
        return min(found, 0.0) if self.is_least else found


def prompts_s(cost: StepCost, prompts: Sequence[int], num_decodes: int = 0) -> float:
    """A step of whole prompts, beside light decodes."""
    tokens = sum(prompts)
    before = sum(each * (each - 1) / 2 for each in prompts) / tokens if tokens else 0.0
    return cost.step_s(num_decodes, num_decodes * LIGHT_CONTEXT, tokens, before)


def _beside(watched: int, others: Sequence[int], num_decodes: int = 0) -> Callable[..., float]:
    """How many times longer a prompt takes with others than alone."""

    def times(cost: StepCost) -> float:
        return prompts_s(cost, [watched, *others], num_decodes) / prompts_s(cost, [watched])

    return times


def _decode_beside_heavy(cost: StepCost) -> float:
    return prompts_s(cost, [HEAVY_PROMPT], 1) / prompts_s(cost, [], 1)


def _half_heavy(cost: StepCost) -> float:
    """A batch half of heavy decodes, by one of light ones."""
    half = _BATCH // 2
    mixed = cost.step_s(_BATCH, half * (LIGHT_CONTEXT + HEAVY_CONTEXT), 0, 0)
    return mixed / cost.step_s(_BATCH, _BATCH * LIGHT_CONTEXT, 0, 0)


def _half_heavy_throughput(cost: StepCost) -> float:
    return 1 / _half_heavy(cost)


def _saturated(cost: StepCost) -> float:
    """Throughput of a prompt of 512 tokens, by the best of any up to the model's window."""

    def throughput(tokens: int) -> float:
        return tokens / prompts_s(cost, [tokens])

    best = max(throughput(tokens) for tokens in range(128, _WINDOW_TOKENS + 1, 128))
    return throughput(HEAVY_PROMPT) / best


_LIGHT = [LIGHT_PROMPT]
STATEMENTS = (
    Statement("2.1, fig. 2", "prefill throughput is flat from 512 tokens on", 1.0, _saturated),
    Statement(
        "2.2.1, fig. 3a", "light prompt with 7 light ones", 2.0, _beside(LIGHT_PROMPT, _LIGHT * 7)
    ),
    Statement(
        "2.2.1, fig. 3a", "light prompt with 63 light ones", 8.0, _beside(LIGHT_PROMPT, _LIGHT * 63)
    ),
    Statement(
        "2.2.1, fig. 3b",
        "light prompt with heavy ones, more than [7 of them]",
        10.0,
        _beside(LIGHT_PROMPT, [HEAVY_PROMPT] * 7),
        is_fitted=False,
        is_least=True,
    ),
    Statement(
        "2.2.1, fig. 3c",
        "heavy prompt with light ones [63 of them]",
        3.0,
        _beside(HEAVY_PROMPT, _LIGHT * 63),
        is_fitted=False,
    ),
    Statement("2.2.2, fig. 4b", "light decode with 1 heavy prompt", 5.0, _decode_beside_heavy),
    Statement(
        "2.2.2, fig. 4c",
        "light prompt with light decodes, up to [128 of them]",
        2.5,
        _beside(LIGHT_PROMPT, [], _BATCH),
    ),
    Statement(
        "2.2.2, fig. 4d",
        "heavy prompt with light decodes, up to [128 of them]",
        2.5,
        _beside(HEAVY_PROMPT, [], _BATCH),
        is_fitted=False,
    ),
    Statement(
        "2.2.3, fig. 5", "latency, batch of 128, half heavy decodes by none", 1.23, _half_heavy
    ),
    Statement("2.2.3, fig. 5", "throughput of the same", 0.84, _half_heavy_throughput),
)


def fit() -> StepCoefficients:
    """The proportions that deviate least from the fitted statements: squares of the
    logarithms of what they give by what is stated (Gauss-Newton)."""
    wanted = [each for each in STATEMENTS if each.is_fitted]
    parts = np.log(np.array([0.005, 2e-5, 0.005]))
    for _ in range(50):
        residual = _residual(parts, wanted)
        step = 1e-6
        slopes = np.stack(
            [(_residual(parts + step * unit, wanted) - residual) / step for unit in np.eye(3)],
            axis=1,
        )
        change = np.linalg.lstsq(slopes, -residual, rcond=None)[0]
        parts = parts + np.clip(change, -0.5, 0.5)
    return _cost(parts)


def _residual(parts: np.ndarray, wanted: Sequence[Statement]) -> np.ndarray:
    cost = _cost(parts)
    return np.array([residual(each, cost) for each in wanted])


def residual(statement: Statement, cost: StepCost) -> float:
    """Logarithm of what a cost gives by what is stated."""
    return math.log(statement.of(cost) / statement.stated)


def _cost(parts: np.ndarray) -> StepCoefficients:
    """With these logarithms of seconds per decode, token of context and prompt token, each by
    a step that decodes one request, which takes what the roofline says."""
    estimate = roofline(MODELS["opt-13b"], GPUS["v100-32g"], PARALLEL)
    lone_s = estimate.step_s(1, LIGHT_CONTEXT, 0, 0)
    request_s, token_s, prompt_s = (float(each) * lone_s for each in np.exp(parts))
    return StepCoefficients(
        base_s=lone_s - request_s - LIGHT_CONTEXT * token_s,
        request_s=request_s,
        token_s=token_s,
        prompt_s=prompt_s,
        context_s=estimate.attention_s,
        confidence=1.0,
    )


def markdown(cost: StepCost) -> list[str]:
    """The statements beside what a cost gives."""
    lines = [
        "| paper | what | stated | profile | deviation |  |",
        "|---|---|--:|--:|--:|---|",
    ]
    for each in STATEMENTS:
        mark = "" if each.is_fitted else "not fitted"
        sign = "> " if each.is_least else ""
        lines.append(
            f"| {each.where} | {each.words} | {sign}{each.stated:g} | {each.of(cost):.2f} "
            f"| {each.deviation(cost):+.0%} | {mark} |"
        )
    return lines
