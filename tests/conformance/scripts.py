"""Scripts: a cluster, and requests at certain times."""

from __future__ import annotations

from random import Random
from typing import Any

from vllm_tetri.policy.admission import ADMISSIONS
from vllm_tetri.policy.dispatch import DISPATCHES
from vllm_tetri.policy.order import ORDERS
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, InstanceConfig, Stock
from vllm_tetri.sim.workload import GRANULARITY_TOKENS, NUM_BUCKETS, RequestSpec
from vllm_tetri.types import InstanceId, Prediction, Role, StepCoefficients

# Odd, so that nothing happens at the same time by chance.
STEP_S, OTHER_STEP_S, PREFILL_STEP_S = 1.0, 0.9173, 1.1321
HANDOVER_S = 1e-4
BLOCK = 16


def engine(*, step_s: float = STEP_S, **changes: Any) -> EngineConfig:
    """An engine whose steps all take the same."""
    usual: dict[str, Any] = {"kv_blocks": 200, "chunk_tokens": 64, "max_requests": 64}
    return EngineConfig(cost=StepCoefficients(base_s=step_s), **{**usual, **changes})


def one(**changes: Any) -> ClusterConfig:
    """An instance that does everything."""
    return ClusterConfig(
        (InstanceConfig(InstanceId("one"), Role.BOTH, engine(**changes)),), report_period_s=0.5
    )


def three(
    *, prefill: dict[str, Any] | None = None, dispatch: str = "power-of-two", **changes: Any
) -> ClusterConfig:
    """A prefill and two decode instances; `changes` are of the latter."""
    return ClusterConfig(
        (
            InstanceConfig(
                InstanceId("p"),
                Role.PREFILL,
                engine(**{"step_s": PREFILL_STEP_S, "kv_blocks": 400, **(prefill or {})}),
            ),
            InstanceConfig(InstanceId("d0"), Role.DECODE, engine(**changes)),
            InstanceConfig(
                InstanceId("d1"), Role.DECODE, engine(**{"step_s": OTHER_STEP_S, **changes})
            ),
        ),
        report_period_s=0.7,
        handover_base_s=HANDOVER_S,
        handover_token_s=0.0,
        dispatch=dispatch,
    )


def spec(
    number: int,
    arrival_s: float,
    prompt_tokens: int,
    output_tokens: int,
    predicted: int | None = None,
) -> RequestSpec:
    """A request; `predicted` is a bucket."""
    return RequestSpec(
        number,
        arrival_s,
        prompt_tokens,
        output_tokens,
        None if predicted is None else Prediction(predicted, NUM_BUCKETS, GRANULARITY_TOKENS),
    )


def drawn(rng: Random, count: int, *, until_s: float, most_output: int = 90) -> list[RequestSpec]:
    """Requests at random, short and long, most of them predicted."""
    times = sorted(rng.uniform(0.01, until_s) for _ in range(count))
    specs = []
    for number, time_s in enumerate(times):
        prompt = rng.randint(1, 40) if rng.random() < 0.5 else rng.randint(41, 210)
        output = rng.randint(1, most_output)
        specs.append(spec(number, time_s, prompt, output, rng.choice((None, 0, 0, 0, 1))))
    return specs


def pool_for(rng: Random, specs: list[RequestSpec]) -> int:
    """Blocks that hold the longest request and not much more."""
    longest = max(each.prompt_tokens + each.output_tokens for each in specs)
    return -(-longest // BLOCK) + rng.randint(0, 12)


def random_one(seed: int) -> tuple[ClusterConfig, list[RequestSpec]]:
    """A small instance that does everything, and too much for it."""
    rng = Random(f"one {seed}")
    specs = drawn(rng, rng.randint(6, 14), until_s=rng.choice((0.5, 10.0, 40.0)))
    return one(
        kv_blocks=pool_for(rng, specs),
        chunk_tokens=rng.choice((16, 40, 64, 150)),
        max_requests=rng.choice((2, 4, 64)),
        order=rng.choice(list(ORDERS)),
        sched_batch=rng.choice((1, 3, 16)),
        admission=rng.choice(list(ADMISSIONS)),
    ), specs


def random_stock(seed: int) -> tuple[ClusterConfig, list[RequestSpec]]:
    """Return the same setting without this package."""
    rng = Random(f"stock {seed}")
    specs = drawn(rng, rng.randint(6, 14), until_s=rng.choice((0.5, 10.0, 40.0)))
    return one(
        kv_blocks=pool_for(rng, specs),
        max_requests=rng.choice((2, 4, 64)),
        kind=Stock(rng.choice((16, 64, 128))),
    ), specs


def random_three(seed: int) -> tuple[ClusterConfig, list[RequestSpec]]:
    """Small decode instances after a prefill instance."""
    rng = Random(f"three {seed}")
    specs = drawn(rng, rng.randint(8, 16), until_s=rng.choice((0.5, 10.0, 40.0)))
    return three(
        prefill={
            "order": rng.choice(list(ORDERS)),
            "chunk_tokens": rng.choice((40, 64, 150)),
            "sched_batch": rng.choice((1, 3, 16)),
        },
        kv_blocks=pool_for(rng, specs),
        max_requests=rng.choice((3, 64)),
        admission=rng.choice(list(ADMISSIONS)),
        dispatch=rng.choice(list(DISPATCHES)),
    ), specs
