"""What is asked in `vllm-tetri bench modes`: classes of requests, rates, and schedules.

A class is a range of prompts and one of answers, each light or heavy: of prompts the
border is 512 tokens, of answers 128 (section 5.1 of the paper). A schedule depends on
class, rate and repeat only, so that every system gets the same requests at the same times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from vllm_tetri.bench.arrivals import Arrival, Length

Range = tuple[int, int]

_LIGHT_PROMPT, _HEAVY_PROMPT = (16, 511), (512, 1536)
_LIGHT_ANSWER, _HEAVY_ANSWER = (8, 127), (129, 512)
PLAIN: dict[str, tuple[Range, Range]] = {
    "lpld": (_LIGHT_PROMPT, _LIGHT_ANSWER),
    "lphd": (_LIGHT_PROMPT, _HEAVY_ANSWER),
    "hpld": (_HEAVY_PROMPT, _LIGHT_ANSWER),
    "hphd": (_HEAVY_PROMPT, _HEAVY_ANSWER),
}
MIXED = "mixed"  # each of the four with equal chance
SWING = "swing"  # two of them in turn
CLASSES = (*PLAIN, MIXED, SWING)
MEASURED = (*PLAIN, MIXED)  # classes with a capacity of their own
WINDOW_TOKENS = _HEAVY_PROMPT[1] + _HEAVY_ANSWER[1]

KNEE = "knee"
RATES = {"light": 0.35, KNEE: 0.7, "past": 1.1}  # of a class's capacity
_SWINGS = ("lphd", "hpld", "lphd")

Load = tuple[str, str]  # class and rate


def loads(classes: Sequence[str], rates: Sequence[str]) -> list[Load]:
    """What a system is asked in a repeat. A swing has one rate, that of each of its parts."""
    return [(name, rate) for name in classes for rate in rates if name != SWING or rate == KNEE]


def measured(classes: Sequence[str]) -> list[str]:
    """Classes whose capacity has to be known for these."""
    needed = {part for name in classes for part in (_SWINGS if name == SWING else (name,))}
    return [name for name in MEASURED if name in needed]


def rate_per_s(load: Load, capacities: Mapping[str, float]) -> float:
    """Requests per second, of a swing on average.

    Args:
        capacities: Requests per second that stock vLLM answers, by class.
    """
    name, rate = load
    parts = _SWINGS if name == SWING else (name,)
    return len(parts) * RATES[rate] / sum(1 / capacities[part] for part in parts)


def schedule(load: Load, count: int, capacities: Mapping[str, float], rng: Random) -> list[Arrival]:
    """So many Poisson arrivals, in order of time, with their lengths."""
    name, rate = load
    parts = _SWINGS if name == SWING else (name,)
    found, at_s = [], 0.0
    for place in range(count):
        phase = place * len(parts) // count
        at_s += rng.expovariate(RATES[rate] * capacities[parts[phase]])
        found.append(Arrival(at_s, phase, draw(parts[phase], rng)))
    return found


def at_once(name: str, count: int, rng: Random) -> list[Arrival]:
    """So many requests of a class, all due at the start."""
    return [Arrival(0.0, 0, draw(name, rng)) for _ in range(count)]


def draw(name: str, rng: Random) -> Length:
    """One request's: prompts are log-uniform in their range, answers uniform."""
    prompt, answer = PLAIN[rng.choice(list(PLAIN)) if name == MIXED else name]
    least, most = prompt
    prompt_tokens = round(least * (most / least) ** rng.random())
    return Length(prompt_tokens, rng.randint(*answer))
