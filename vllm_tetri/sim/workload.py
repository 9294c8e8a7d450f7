"""Requests: how long, when, and with which prediction.

A class of requests has light or heavy prompts and light or heavy outputs (TetriInfer, section
5.1.1); `mixed` takes each of the four equally often. `sim.trace` reads recorded requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from vllm_tetri.errors import ConfigError
from vllm_tetri.types import Prediction

GRANULARITY_TOKENS = 200
NUM_BUCKETS = 10
LIGHT_PROMPT, HEAVY_PROMPT = (16, 511), (512, 1536)
LIGHT_OUTPUT, HEAVY_OUTPUT = (8, 127), (129, 512)
CLASSES = {
    "lpld": (LIGHT_PROMPT, LIGHT_OUTPUT),
    "lphd": (LIGHT_PROMPT, HEAVY_OUTPUT),
    "hpld": (HEAVY_PROMPT, LIGHT_OUTPUT),
    "hphd": (HEAVY_PROMPT, HEAVY_OUTPUT),
}
KINDS = (*CLASSES, "mixed")

Lengths = tuple[int, int]
"""Tokens of a prompt and of its output."""
Arrival = tuple[float, int, int]
"""Seconds at which a request arrives, and its lengths."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request before it arrives; no policy may read `output_tokens`."""

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    predicted: Prediction | None = None


def above_0(**given: float | None) -> None:
    """Raise ConfigError if a number is not above 0, or not finite; None is not given."""
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name.replace('_', ' ')}: {value:g} must be above 0")


def variation_of(arrivals: str) -> float | None:
    """Read `poisson`, `gamma:CV` or `at-once`, as `variation` of `draw`; raises ConfigError if it
    is something else."""
    if arrivals in ("poisson", "at-once"):
        return 1.0 if arrivals == "poisson" else None
    name, _, number = arrivals.partition(":")
    try:
        variation = float(number if name == "gamma" else "")
    except ValueError:
        variation = 0.0
    if not 0 < variation < math.inf:
        raise ConfigError(f"arrivals {arrivals!r}: write poisson, at-once or gamma:3 for example")
    return variation


def draw(
    kind: str,
    count: int,
    rate: float,
    seed: int,
    *,
    accuracy: float = 1.0,
    known: Sequence[Lengths] | None = None,
    variation: float | None = 1.0,
) -> list[RequestSpec]:
    """Draw requests of one kind.

    Args:
        kind: One of `KINDS`; ignored with `known`.
        rate: Arrivals per second.
        accuracy: Share of right predictions.
        known: Lengths to draw from.
        variation: Coefficient of variation of the times between arrivals, which are
            gamma-distributed as in BurstGPT and ServeGen: 1 is Poisson, more comes in bursts;
            None: all at once. Lengths do not depend on it.
    """
    rng, bursts = Random(f"{kind} {seed}"), Random(f"arrivals {seed}")

    def drawn() -> Iterator[Arrival]:
        now = 0.0
        for _ in range(count):
            gap_s = rng.expovariate(rate)
            if variation is None:
                gap_s = 0.0
            elif variation != 1.0:
                gap_s = bursts.gammavariate(variation**-2, variation**2 / rate)
            now += gap_s
            yield now, *(_lengths(kind, rng) if known is None else rng.choice(known))

    return predicted(drawn(), accuracy, seed)


def draw_phases(phases: Iterable[tuple[str, float, float]], seed: int) -> Iterator[Arrival]:
    """Draw arrivals of one phase after the other: kind, requests per second, and seconds."""
    rng, start_s = Random(f"phases {seed}"), 0.0
    for kind, rate, seconds in phases:
        now, end_s = start_s, start_s + seconds
        while (now := now + rng.expovariate(rate)) < end_s:
            yield now, *_lengths(kind, rng)
        start_s = end_s


def _lengths(kind: str, rng: Random) -> Lengths:
    classes = [CLASSES[kind]] if kind in CLASSES else list(CLASSES.values())
    (low, high), outputs = rng.choice(classes)
    if low == LIGHT_PROMPT[0]:
        prompt = min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))
    else:
        prompt = rng.randint(low, high)
    return prompt, rng.randint(*outputs)


def predicted(arrivals: Iterable[Arrival], accuracy: float, seed: int) -> list[RequestSpec]:
    """Make requests whose length buckets are predicted, a share of them right and the others as a
    neighbouring bucket; raises ConfigError if the accuracy is not from 0 to 1."""
    if not 0 <= accuracy <= 1:
        raise ConfigError(f"an accuracy of {accuracy:g}: must be from 0 to 1")
    rng, specs = Random(f"predictions {seed}"), []
    for number, (at_s, prompt, output) in enumerate(arrivals):
        bucket = min(output // GRANULARITY_TOKENS, NUM_BUCKETS - 1)
        is_right, step = rng.random() < accuracy, rng.choice((-1, 1))
        if not is_right:
            bucket += step if 0 <= bucket + step < NUM_BUCKETS else -step
        guess = Prediction(bucket, NUM_BUCKETS, GRANULARITY_TOKENS)
        specs.append(RequestSpec(number, at_s, prompt, output, guess))
    return specs
