"""Requests: how long, when, and what is predicted of them.

A class of requests has light or heavy prompts and light or heavy answers (paper section
5.1.1); `mixed` takes each of the four equally often. `sim.arrivals` says how they follow each
other, `sim.trace` reads recorded ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.arrivals import POISSON, Arrivals
from vllm_tetri.types import Prediction

GRANULARITY_TOKENS = 200
NUM_BUCKETS = 10
LIGHT_PROMPT, HEAVY_PROMPT = (16, 511), (512, 1536)
LIGHT_ANSWER, HEAVY_ANSWER = (8, 127), (129, 512)
CLASSES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "lpld": (LIGHT_PROMPT, LIGHT_ANSWER),
    "lphd": (LIGHT_PROMPT, HEAVY_ANSWER),
    "hpld": (HEAVY_PROMPT, LIGHT_ANSWER),
    "hphd": (HEAVY_PROMPT, HEAVY_ANSWER),
}
KINDS = (*CLASSES, "mixed")

Lengths = tuple[int, int]
"""Tokens of a prompt and of its answer."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request.

    Attributes:
        id: Its place among all requests.
        output_tokens: Of its answer. No policy may look at this.
        predicted: What a predictor says of the answer.

    Raises:
        ConfigError: It has no tokens, or comes before the beginning.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    predicted: Prediction | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1 or not 0 <= self.arrival_s < math.inf:
            raise ConfigError(f"no request: {self}")


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests of one kind for a while.

    Raises:
        ConfigError: No such kind, or no time or rate.
    """

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
) -> list[Ask]:
    """Requests of one kind.

    Args:
        kind: One of `KINDS`; its lengths do not count when there are known ones.
        count: How many.
        rate: Of arrivals, per second.
        accuracy: Share of answers whose bucket is predicted rightly; the others get a
            neighbouring one.
        known: Lengths to draw from.
        arrivals: How they follow each other; their lengths do not depend on it.

    Raises:
        ConfigError: No such kind, or a number makes no sense.
    """
    _check(kind, rate)
    if count < 1:
        raise ConfigError(f"{count} requests: must be at least 1")
    rng = Random(f"{kind} {seed}")
    lengths_of = _drawer(kind) if known is None else (lambda rng: rng.choice(known))
    asks, now = [], 0.0
    predictions, bursts = Predictor(accuracy, seed), Random(f"arrivals {seed}")
    for number in range(count):
        now += arrivals.gap_s(rng.expovariate(rate), rate, bursts)
        prompt, answer = lengths_of(rng)
        asks.append(Ask(number, now, prompt, answer, predictions.of(answer)))
    return asks


def draw_phases(phases: Sequence[Phase], seed: int, *, accuracy: float = 1.0) -> list[Ask]:
    """Requests of one phase after the other.

    Raises:
        ConfigError: There is no request in them.
    """
    rng = Random(f"phases {seed}")
    predictions = Predictor(accuracy, seed)
    asks: list[Ask] = []
    start_s = 0.0
    for phase in phases:
        lengths_of, now = _drawer(phase.kind), start_s
        end_s = start_s + phase.seconds
        while (now := now + rng.expovariate(phase.rate)) < end_s:
            prompt, answer = lengths_of(rng)
            asks.append(Ask(len(asks), now, prompt, answer, predictions.of(answer)))
        start_s = end_s
    if not asks:
        raise ConfigError("no request arrives in these phases; make them longer")
    return asks


def _check(kind: str, rate: float) -> None:
    if kind not in KINDS:
        raise ConfigError(f"no kind of requests {kind!r}; there are {', '.join(KINDS)}")
    if not 0 < rate < math.inf:
        raise ConfigError(f"a rate of {rate:g} requests/s: must be above 0")


def _drawer(kind: str) -> Callable[[Random], Lengths]:
    classes = [CLASSES[kind]] if kind in CLASSES else list(CLASSES.values())

    def lengths(rng: Random) -> Lengths:
        (low, high), answers = rng.choice(classes)
        if low == LIGHT_PROMPT[0]:
            prompt = min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))
        else:
            prompt = rng.randint(low, high)
        return prompt, rng.randint(*answers)

    return lengths


class Predictor:
    """Right so often; its errors do not change what is drawn otherwise.

    Raises:
        ConfigError: So often cannot be.
    """

    def __init__(self, accuracy: float, seed: int) -> None:
        if not 0 <= accuracy <= 1:
            raise ConfigError(f"an accuracy of {accuracy:g}: must be from 0 to 1")
        self._accuracy = accuracy
        self._rng = Random(f"predictions {seed}")
        self._predictions = [
            Prediction(bucket, NUM_BUCKETS, GRANULARITY_TOKENS) for bucket in range(NUM_BUCKETS)
        ]

    def of(self, output_tokens: int) -> Prediction:
        """What is predicted of an answer of so many tokens."""
        bucket = min(output_tokens // GRANULARITY_TOKENS, NUM_BUCKETS - 1)
        is_right = self._rng.random() < self._accuracy
        step = self._rng.choice((-1, 1))
        if not is_right:
            bucket += step if 0 <= bucket + step < NUM_BUCKETS else -step
        return self._predictions[bucket]
