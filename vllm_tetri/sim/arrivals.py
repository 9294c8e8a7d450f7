"""When requests come: how long after each other.

`poisson` is what many independent clients are: times between arrivals are exponential, with
a coefficient of variation (standard deviation by mean) of 1. Gamma-distributed times have any
other one at the same mean, as BurstGPT and ServeGen describe real traffic: above 1 requests
come in bursts with silence between, below 1 more evenly. `at-once` is a closed benchmark: all
of them are there at the beginning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from vllm_tetri.errors import ConfigError

_WORDS = "poisson, gamma:CV and at-once"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How requests follow each other.

    Attributes:
        variation: Coefficient of variation of the times between them; None for requests
            that all come at once.

    Raises:
        ConfigError: It is not above 0.
    """

    variation: float | None = 1.0

    def __post_init__(self) -> None:
        if self.variation is not None and not 0 < self.variation < math.inf:
            raise ConfigError(
                f"a coefficient of variation of {self.variation:g}: must be above 0; "
                "1 is poisson, more comes in bursts"
            )

    def gap_s(self, poisson_s: float, rate: float, rng: Random) -> float:
        """Until the next request.

        Args:
            poisson_s: What it would be under `poisson`.
            rate: Arrivals per second, in the mean.
            rng: Source of other ones, so that requests are the same however they come.
        """
        if self.variation is None:
            return 0.0
        if self.variation == 1.0:
            return poisson_s
        shape = self.variation**-2
        return rng.gammavariate(shape, 1 / (shape * rate))


POISSON = Arrivals()
AT_ONCE = Arrivals(None)


def arrivals(text: str) -> Arrivals:
    """`poisson`, `gamma:CV` or `at-once`.

    Raises:
        ConfigError: It is something else, or CV makes no sense.
    """
    name, _, number = text.partition(":")
    if text == "poisson":
        return POISSON
    if text == "at-once":
        return AT_ONCE
    try:
        variation = float(number) if name == "gamma" else None
    except ValueError:
        variation = None
    if variation is None:
        raise ConfigError(f"arrivals {text!r}: there are {_WORDS}, gamma:3 for example")
    return Arrivals(variation)
