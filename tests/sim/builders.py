"""Small clusters whose times can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_tetri.sim.setting import Place, Setting, Shape, places
from vllm_tetri.sim.workload import Ask
from vllm_tetri.types import InstanceId, Role, StepCoefficients

COST = StepCoefficients(base_s=1.0, request_s=0.1, token_s=0.001, prompt_s=0.01, context_s=0.0)
HANDOVER_S, HANDOVER_TOKEN_S = 0.5, 0.002
SHAPE = Shape(cost=COST, kv_blocks=100, chunk_tokens=64)


def shape(**changes: Any) -> Shape:
    return replace(SHAPE, **changes)


def one(mode: str = "whole", **changes: Any) -> Setting:
    """A single instance that does everything."""
    return Setting(places(both=1, shape=shape(**changes)), mode)


def pair(*, decode: Shape = SHAPE, **changes: Any) -> Setting:
    """A prefill and a decode instance; `changes` are of the former."""
    return Setting(
        (
            Place(InstanceId("p"), Role.PREFILL, shape(**changes)),
            Place(InstanceId("d"), Role.DECODE, decode),
        ),
        "split",
        handover_base_s=HANDOVER_S,
        handover_token_s=HANDOVER_TOKEN_S,
    )


def ask(number: int, prompt_tokens: int, output_tokens: int, arrival_s: float = 0.0) -> Ask:
    return Ask(number, arrival_s, prompt_tokens, output_tokens)


def decode_s(context_tokens: int, steps: int) -> float:
    """Steps of one request alone, from so much context on."""
    return sum(COST.step_s(1, context_tokens + step, 0, 0) for step in range(steps))
