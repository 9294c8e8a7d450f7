"""Small clusters whose times can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm_tetri.sim.cluster import run
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, InstanceConfig, make_instances
from vllm_tetri.sim.log import Decision, Step
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


def decode_s(context_tokens: int, steps: int) -> float:
    """Steps of one request alone, from so much context on."""
    return sum(COST.step_s(1, context_tokens + step, 0, 0) for step in range(steps))


def decisions(config: ClusterConfig, specs: Sequence[RequestSpec]) -> list[Decision]:
    """Everything that the cluster decides."""
    found: list[Decision] = []
    run(config, specs, log=found.append)
    return found


def steps(config: ClusterConfig, specs: Sequence[RequestSpec]) -> list[Step]:
    return [each for each in decisions(config, specs) if isinstance(each, Step)]
