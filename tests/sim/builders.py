"""Small clusters whose times can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

from vllm_tetri.sim.cluster import ENGINES, run
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, InstanceConfig, make_instances
from vllm_tetri.sim.engine.instance import Instance, Share
from vllm_tetri.sim.request import SimRequest
from vllm_tetri.sim.workload import RequestSpec
from vllm_tetri.types import InstanceId, Role, StepCoefficients

COST = StepCoefficients(base_s=1.0, request_s=0.1, token_s=0.001, prompt_s=0.01, context_s=0.0)
HANDOVER_S, HANDOVER_TOKEN_S = 0.5, 0.002
ENGINE = EngineConfig(cost=COST, kv_blocks=100, chunk_tokens=64)


def engine(**changes: Any) -> EngineConfig:
    return replace(ENGINE, **changes)


def one(mode: str = "whole", **changes: Any) -> ClusterConfig:
    """A single instance that does everything."""
    return ClusterConfig(make_instances(both=1, engine=engine(**changes)), mode)


def pair(*, decode: EngineConfig = ENGINE, **changes: Any) -> ClusterConfig:
    """A prefill and a decode instance; `changes` are of the former."""
    return ClusterConfig(
        (
            InstanceConfig(InstanceId("p"), Role.PREFILL, engine(**changes)),
            InstanceConfig(InstanceId("d"), Role.DECODE, decode),
        ),
        "split",
        handover_base_s=HANDOVER_S,
        handover_token_s=HANDOVER_TOKEN_S,
    )


def spec(
    number: int, prompt_tokens: int, output_tokens: int, arrival_s: float = 0.0
) -> RequestSpec:
    return RequestSpec(number, arrival_s, prompt_tokens, output_tokens)


def named(
    number: int, prompt: int, output: int, names: tuple[int, ...], at_s: float = 0.0
) -> RequestSpec:
    return replace(spec(number, prompt, output, at_s), names=names)


def prompt_s(tokens: int) -> float:
    """A step with a prompt alone."""
    return COST.step_s(0, 0, tokens, 0)


def decode_s(context_tokens: int, steps: int) -> float:
    """Steps of one request alone, from so much context on."""
    return sum(COST.step_s(1, context_tokens + step, 0, 0) for step in range(steps))


def max_itl_s(served: SimRequest) -> float:
    """The longest time between two tokens."""
    return max(float(part.max()) for part in served.gap_parts)


class Step(NamedTuple):
    """Requests with the prompt tokens that a step computes, and those that get a token."""

    prompts: list[tuple[int, int]]
    decodes: list[int]


def steps(config: ClusterConfig, specs: Sequence[RequestSpec]) -> list[Step]:
    """The steps of all instances, in order of time."""
    found: list[Step] = []

    def watched(kind: type[Instance]) -> type[Instance]:
        class Watched(kind):  # type: ignore[misc, valid-type]
            def compose(self, now: float) -> list[Share]:
                shares: list[Share] = super().compose(now)
                prompts = [(request.spec.id, tokens) for request, tokens in shares]
                decodes = [] if self.is_batch_paused else [each.spec.id for each in self.batch]
                if prompts or decodes:
                    found.append(Step(prompts, decodes))
                return shares

        return Watched

    with patch.dict(ENGINES, {key: watched(kind) for key, kind in ENGINES.items()}):
        run(config, specs)
    return found
