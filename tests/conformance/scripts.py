"""Scripts: a cluster, and requests at certain times."""

from __future__ import annotations

from random import Random
from typing import Any

from vllm_tetri.policy.admission import DecodePolicy
from vllm_tetri.policy.dispatch import DispatchPolicy
from vllm_tetri.policy.order import PrefillPolicy
from vllm_tetri.sim.engine.kinds import Stock
from vllm_tetri.sim.setting import Place, Setting, Shape
from vllm_tetri.sim.workload import GRANULARITY_TOKENS, NUM_BUCKETS, Ask
from vllm_tetri.types import InstanceId, Prediction, Role, StepCoefficients

# Odd, so that nothing happens at the same time by chance.
STEP_S, OTHER_STEP_S, PREFILL_STEP_S = 1.0, 0.9173, 1.1321
HANDOVER_S = 1e-4
BLOCK = 16


def shape(*, step_s: float = STEP_S, **changes: Any) -> Shape:
    """An engine whose steps all take the same."""
    usual: dict[str, Any] = {"kv_blocks": 200, "chunk_tokens": 64, "max_requests": 64}
    return Shape(cost=StepCoefficients(base_s=step_s), **{**usual, **changes})


def one(**changes: Any) -> Setting:
    """An instance that does everything."""
    return Setting((Place(InstanceId("one"), Role.BOTH, shape(**changes)),), report_period_s=0.5)


def three(
    *, prefill: dict[str, Any] | None = None, dispatch: str = "power-of-two", **changes: Any
) -> Setting:
    """A prefill and two decode instances; `changes` are of the latter."""
    return Setting(
        (
            Place(
                InstanceId("p"),
                Role.PREFILL,
                shape(**{"step_s": PREFILL_STEP_S, "kv_blocks": 400, **(prefill or {})}),
            ),
            Place(InstanceId("d0"), Role.DECODE, shape(**changes)),
            Place(InstanceId("d1"), Role.DECODE, shape(**{"step_s": OTHER_STEP_S, **changes})),
        ),
        report_period_s=0.7,
        handover_base_s=HANDOVER_S,
        handover_token_s=0.0,
        dispatch=DispatchPolicy(dispatch),
    )


def ask(
    number: int,
    arrival_s: float,
    prompt_tokens: int,
    output_tokens: int,
    predicted: int | None = None,
) -> Ask:
    """A request; `predicted` is a bucket."""
    return Ask(
        number,
        arrival_s,
        prompt_tokens,
        output_tokens,
        None if predicted is None else Prediction(predicted, NUM_BUCKETS, GRANULARITY_TOKENS),
    )


def drawn(rng: Random, count: int, *, until_s: float, most_output: int = 90) -> list[Ask]:
    """Requests at random, short and long, most of them predicted."""
    times = sorted(rng.uniform(0.01, until_s) for _ in range(count))
    asks = []
    for number, time_s in enumerate(times):
        prompt = rng.randint(1, 40) if rng.random() < 0.5 else rng.randint(41, 210)
        output = rng.randint(1, most_output)
        asks.append(ask(number, time_s, prompt, output, rng.choice((None, 0, 0, 0, 1))))
    return asks


def pool_for(rng: Random, asks: list[Ask]) -> int:
    """Blocks that hold the longest request and not much more."""
    longest = max(each.prompt_tokens + each.output_tokens for each in asks)
    return -(-longest // BLOCK) + rng.randint(0, 12)


def random_one(seed: int) -> tuple[Setting, list[Ask]]:
    """A small instance that does everything, and too much for it."""
    rng = Random(f"one {seed}")
    asks = drawn(rng, rng.randint(6, 14), until_s=rng.choice((0.5, 10.0, 40.0)))
    return one(
        kv_blocks=pool_for(rng, asks),
        chunk_tokens=rng.choice((16, 40, 64, 150)),
        max_requests=rng.choice((2, 4, 64)),
        order=rng.choice(list(PrefillPolicy)),
        sched_batch=rng.choice((1, 3, 16)),
        admission=rng.choice(list(DecodePolicy)),
    ), asks


def random_stock(seed: int) -> tuple[Setting, list[Ask]]:
    """The same without this package."""
    rng = Random(f"stock {seed}")
    asks = drawn(rng, rng.randint(6, 14), until_s=rng.choice((0.5, 10.0, 40.0)))
    return one(
        kv_blocks=pool_for(rng, asks),
        max_requests=rng.choice((2, 4, 64)),
        engine=Stock(rng.choice((16, 64, 128))),
    ), asks


def random_three(seed: int) -> tuple[Setting, list[Ask]]:
    """Small decode instances behind a prefill instance."""
    rng = Random(f"three {seed}")
    asks = drawn(rng, rng.randint(8, 16), until_s=rng.choice((0.5, 10.0, 40.0)))
    return three(
        prefill={
            "order": rng.choice(list(PrefillPolicy)),
            "chunk_tokens": rng.choice((40, 64, 150)),
            "sched_batch": rng.choice((1, 3, 16)),
        },
        kv_blocks=pool_for(rng, asks),
        max_requests=rng.choice((3, 64)),
        admission=rng.choice(list(DecodePolicy)),
        dispatch=rng.choice(list(DispatchPolicy)),
    ), asks
