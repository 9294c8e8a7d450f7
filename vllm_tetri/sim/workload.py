"""Requests: how long, when, and with which prediction.

A class of requests has light or heavy prompts and light or heavy outputs (TetriInfer, section
5.1.1); `mixed` takes each of the four equally often. `sim.trace` reads recorded requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

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


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request before it arrives; no policy may read `output_tokens`. Raises ConfigError if it has
    no tokens, or arrives before 0 s."""

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    predicted: Prediction | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1 or not 0 <= self.arrival_s < math.inf:
            raise ConfigError(f"no request: {self}")


class LoadPhase(NamedTuple):
    """Requests of one kind for a while."""

    kind: str
    rate: float
    seconds: float


def arrivals(text: str) -> float | None:
    """Read `poisson`, `gamma:CV` or `at-once`, as `variation` of `draw`; raises ConfigError if it
    is something else."""
    if text in ("poisson", "at-once"):
        return 1.0 if text == "poisson" else None
    name, _, number = text.partition(":")
    try:
        variation = float(number if name == "gamma" else "")
    except ValueError:
        variation = 0.0
    if not 0 < variation < math.inf:
        raise ConfigError(
            f"arrivals {text!r}: write poisson, at-once or gamma:CV with a coefficient of "
            "variation above 0, gamma:3 for example"
        )
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
        accuracy: Share of right predictions; the others are a neighbouring bucket.
        known: Lengths to draw from.
        variation: Coefficient of variation of the times between arrivals, which are
            gamma-distributed as in BurstGPT and ServeGen: 1 is Poisson, more comes in bursts;
            None: all at once. Lengths do not depend on it.

    Raises:
        ConfigError: The kind is unknown, or a number out of range.
    """
    _check(kind, rate)
    if count < 1:
        raise ConfigError(f"{count} requests: must be at least 1")
    rng, bursts = Random(f"{kind} {seed}"), Random(f"arrivals {seed}")
    predict = predictor(accuracy, seed)
    specs, now = [], 0.0
    for number in range(count):
        gap_s = rng.expovariate(rate)
        if variation is None:
            gap_s = 0.0
        elif variation != 1.0:
            gap_s = bursts.gammavariate(variation**-2, variation**2 / rate)
        now += gap_s
        prompt, output = rng.choice(known) if known is not None else _lengths(kind, rng)
        specs.append(RequestSpec(number, now, prompt, output, predict(output)))
    return specs


def draw_phases(
    phases: Sequence[LoadPhase], seed: int, *, accuracy: float = 1.0
) -> list[RequestSpec]:
    """Draw requests of one phase after the other; raises ConfigError if there are none."""
    rng, predict = Random(f"phases {seed}"), predictor(accuracy, seed)
    specs: list[RequestSpec] = []
    start_s = 0.0
    for phase in phases:
        _check(phase.kind, phase.rate)
        if not 0 < phase.seconds < math.inf:
            raise ConfigError(f"a phase of {phase.seconds:g} s: must be longer than 0 s")
        now, end_s = start_s, start_s + phase.seconds
        while (now := now + rng.expovariate(phase.rate)) < end_s:
            prompt, output = _lengths(phase.kind, rng)
            specs.append(RequestSpec(len(specs), now, prompt, output, predict(output)))
        start_s = end_s
    if not specs:
        raise ConfigError("no request arrives in these phases; make them longer")
    return specs


def _check(kind: str, rate: float) -> None:
    if kind not in KINDS:
        raise ConfigError(f"no kind of requests {kind!r}; there are {', '.join(KINDS)}")
    if not 0 < rate < math.inf:
        raise ConfigError(f"a rate of {rate:g} requests/s: must be above 0")


def _lengths(kind: str, rng: Random) -> Lengths:
    classes = [CLASSES[kind]] if kind in CLASSES else list(CLASSES.values())
    (low, high), outputs = rng.choice(classes)
    if low == LIGHT_PROMPT[0]:
        prompt = min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))
    else:
        prompt = rng.randint(low, high)
    return prompt, rng.randint(*outputs)


def predictor(accuracy: float, seed: int) -> Callable[[int], Prediction]:
    """Return what predicts the bucket of an output's tokens, with an accuracy from 0 to 1, else
    raises ConfigError. Its errors do not change what is drawn otherwise."""
    if not 0 <= accuracy <= 1:
        raise ConfigError(f"an accuracy of {accuracy:g}: must be from 0 to 1")
    rng = Random(f"predictions {seed}")

    def predict(output_tokens: int) -> Prediction:
        bucket = min(output_tokens // GRANULARITY_TOKENS, NUM_BUCKETS - 1)
        is_right, step = rng.random() < accuracy, rng.choice((-1, 1))
        if not is_right:
            bucket += step if 0 <= bucket + step < NUM_BUCKETS else -step
        return Prediction(bucket, NUM_BUCKETS, GRANULARITY_TOKENS)

    return predict
