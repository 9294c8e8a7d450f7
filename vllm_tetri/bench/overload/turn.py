"""What the client of an overload is told to do, and what became of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random


class End(StrEnum):
    """How a request ended."""

    SERVED = "served"  # every token of it
    REFUSED = "refused"  # 429 or 503, with the time after which to come again
    BAD = "bad"  # anything else


@dataclass(frozen=True, slots=True)
class Turn:
    """Requests at their times, or some clients that ask without a pause.

    Attributes:
        at_s: When each request is due, in seconds from the start, in order.
        keys: API keys of the clients there are; empty if none is needed.
        whose: Place in `keys` of each request's.
        clients: With it the lists are empty, and so many clients ask one thing after the
            other.
        seconds: How long these begin new requests.
        limit_s: Longest time for one answer.
        seed: Of the prompts' tokens.
    """

    url: str
    model: str
    prompt_tokens: int
    answer_tokens: int
    limit_s: float
    seed: str
    at_s: Sequence[float] = ()
    keys: Sequence[str] = ()
    whose: Sequence[int] = ()
    clients: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a request; times in seconds.

    Attributes:
        at_s: When it was due, from the turn's start.
        late_s: How much later it was sent: the client's own fault.
        first_s: From when it was due to its first token.
        done_s: The same to the end of its answer, or of its refusal.
        retry_after_s: When a refused one may come again.
        whose: Place of its client's key.
        words: Why it is bad.
    """

    end: End
    at_s: float
    late_s: float
    first_s: float
    done_s: float
    retry_after_s: int = 0
    whose: int = 0
    words: str = ""


@dataclass(frozen=True, slots=True)
class Played:
    """A turn.

    Attributes:
        started_s: Monotonic time of its second 0.
        took_s: Until the last answer.
        cpu_s: What the client used of a core meanwhile.
    """

    replies: list[Reply]
    started_s: float
    took_s: float
    cpu_s: float


def poisson(rate: float, begin_s: float, end_s: float, rng: Random) -> list[float]:
    """Times of arrivals of such a rate, in order.

    Args:
        rate: Requests per second, above 0.
    """
    found = []
    at_s = begin_s + rng.expovariate(rate)
    while at_s < end_s:
        found.append(at_s)
        at_s += rng.expovariate(rate)
    return found
