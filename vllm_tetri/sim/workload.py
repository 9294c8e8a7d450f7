"""Requests: how long, when, and with which prediction.

A class of requests has light or heavy prompts and light or heavy outputs (TetriInfer, section
5.1.1); `mixed` takes each of the four equally often. `sim.trace` reads recorded requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How requests follow each other.

    Times between arrivals are gamma-distributed, as BurstGPT and ServeGen describe real traffic,
    with this coefficient of variation: 1 is Poisson, more comes in bursts; None: all at once.
    Raises ConfigError if it is not above 0.
    """

    variation: float | None = 1.0

    def __post_init__(self) -> None:
        if self.variation is not None and not 0 < self.variation < math.inf:
            raise ConfigError(
                f"a coefficient of variation of {self.variation:g}: must be above 0; "
                "1 is poisson, more comes in bursts"
            )

    def gap_s(self, poisson_s: float, rate: float, rng: Random) -> float:
        """Time until the next request: `poisson_s`, or drawn from a source of its own, so that
        lengths do not depend on arrivals."""
        if self.variation is None or self.variation == 1.0:
            return 0.0 if self.variation is None else poisson_s
        shape = self.variation**-2
        return rng.gammavariate(shape, 1 / (shape * rate))


POISSON = Arrivals()


def arrivals(text: str) -> Arrivals:
    """Read `poisson`, `gamma:CV` or `at-once`; raises ConfigError if it is something else."""
    if text in ("poisson", "at-once"):
        return POISSON if text == "poisson" else Arrivals(None)
    name, _, number = text.partition(":")
    try:
        variation = float(number if name == "gamma" else "")
    except ValueError:
        raise ConfigError(
            f"arrivals {text!r}: write poisson, at-once or gamma:CV, gamma:3 for example"
        ) from None
    return Arrivals(variation)


@dataclass(frozen=True, slots=True)
class LoadPhase:
    """Requests of one kind for a while; raises ConfigError if there is no such kind, or rate or
    time are not above 0."""

    kind: str
    rate: float
    seconds: float

    def __post_init__(self) -> None:
        _check(self.kind, self.rate)
        if not 0 < self.seconds < math.inf:
            raise ConfigError(f"a phase of {self.seconds:g} s: must be longer than 0 s")


def draw(
    kind: str,
    count: int,
    rate: float,
    seed: int,
    *,
    accuracy: float = 1.0,
    known: Sequence[Lengths] | None = None,
    arrivals: Arrivals = POISSON,
) -> list[RequestSpec]:
    """Draw requests of one kind.

    Args:
        kind: One of `KINDS`; ignored with `known`.
        rate: Arrivals per second.
        accuracy: Share of right predictions; the others are a neighbouring bucket.
        known: Lengths to draw from.
        arrivals: How they follow each other; lengths do not depend on it.

    Raises:
        ConfigError: The kind is unknown, or a number out of range.
    """
    _check(kind, rate)
    if count < 1:
        raise ConfigError(f"{count} requests: must be at least 1")
    rng = Random(f"{kind} {seed}")
    lengths_of = _drawer(kind) if known is None else (lambda rng: rng.choice(known))
    specs, now = [], 0.0
    predictions, bursts = NoisyPredictor(accuracy, seed), Random(f"arrivals {seed}")
    for number in range(count):
        now += arrivals.gap_s(rng.expovariate(rate), rate, bursts)
        prompt, output = lengths_of(rng)
        specs.append(RequestSpec(number, now, prompt, output, predictions.of(output)))
    return specs


def draw_phases(
    phases: Sequence[LoadPhase], seed: int, *, accuracy: float = 1.0
) -> list[RequestSpec]:
    """Draw requests of one phase after the other; raises ConfigError if there are none."""
    rng = Random(f"phases {seed}")
    predictions = NoisyPredictor(accuracy, seed)
    specs: list[RequestSpec] = []
    start_s = 0.0
    for phase in phases:
        lengths_of, now = _drawer(phase.kind), start_s
        end_s = start_s + phase.seconds
        while (now := now + rng.expovariate(phase.rate)) < end_s:
            prompt, output = lengths_of(rng)
            specs.append(RequestSpec(len(specs), now, prompt, output, predictions.of(output)))
        start_s = end_s
    if not specs:
        raise ConfigError("no request arrives in these phases; make them longer")
    return specs


def _check(kind: str, rate: float) -> None:
    if kind not in KINDS:
        raise ConfigError(f"no kind of requests {kind!r}; there are {', '.join(KINDS)}")
    if not 0 < rate < math.inf:
        raise ConfigError(f"a rate of {rate:g} requests/s: must be above 0")


def _drawer(kind: str) -> Callable[[Random], Lengths]:
    classes = [CLASSES[kind]] if kind in CLASSES else list(CLASSES.values())

    def lengths(rng: Random) -> Lengths:
        (low, high), outputs = rng.choice(classes)
        if low == LIGHT_PROMPT[0]:
            prompt = min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))
        else:
            prompt = rng.randint(low, high)
        return prompt, rng.randint(*outputs)

    return lengths


class NoisyPredictor:
    """Predicts buckets with an accuracy from 0 to 1, else raises ConfigError. Its errors do not
    change what is drawn otherwise."""

    def __init__(self, accuracy: float, seed: int) -> None:
        if not 0 <= accuracy <= 1:
            raise ConfigError(f"an accuracy of {accuracy:g}: must be from 0 to 1")
        self._accuracy = accuracy
        self._rng = Random(f"predictions {seed}")
        self._predictions = [
            Prediction(bucket, NUM_BUCKETS, GRANULARITY_TOKENS) for bucket in range(NUM_BUCKETS)
        ]

    def of(self, output_tokens: int) -> Prediction:
        """Predict the length of an output."""
        bucket = min(output_tokens // GRANULARITY_TOKENS, NUM_BUCKETS - 1)
        is_right = self._rng.random() < self._accuracy
        step = self._rng.choice((-1, 1))
        if not is_right:
            bucket += step if 0 <= bucket + step < NUM_BUCKETS else -step
        return self._predictions[bucket]
