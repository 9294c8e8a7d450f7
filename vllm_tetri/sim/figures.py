"""Figures of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.gaps import Gaps
from vllm_tetri.sim.job import Refused, Served


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count: seconds to its first token, and seconds per token
    behind that in the mean.

    Raises:
        ConfigError: They are not above 0.
    """

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tpot_s > 0):
            raise ConfigError(f"SLO {self.ttft_s:g},{self.tpot_s:g}: both must be above 0 s")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of all requests of a simulation.

    Attributes:
        itl_p99_s: Over all times between two tokens of all answers.
        requests: All, those refused included; times are of the others, nan if there are none.
        good: Share of requests within the SLO; one refused is not.
        goodput: Requests within the SLO per second, from the first arrival to the last
            token.
        split: Share of requests that two instances shared.
    """

    requests: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    itl_max_s: float
    tpot_mean_s: float
    jct_mean_s: float
    jct_p99_s: float
    good: float
    goodput: float
    split: float
    refused: int


def figures(served: Sequence[Served], slo: Slo, refused: Sequence[Refused] = ()) -> Figures:
    """Of at least one request.

    Raises:
        ConfigError: There is none.
    """
    count = len(served) + len(refused)
    if not count:
        raise ConfigError("no requests to sum up")
    ttft = _times([each.ttft_s for each in served])
    jct = _times([each.jct_s for each in served])
    tpot = _times([each.tpot_s for each in served])
    itl = Gaps(served)
    asks = [each.ask for each in served] + [each.ask for each in refused]
    first_s = min(ask.arrival_s for ask in asks)
    ends = [each.ask.arrival_s + each.jct_s for each in served]
    good = (ttft <= slo.ttft_s) & (tpot <= slo.tpot_s)
    ttft_p50, ttft_p99 = np.quantile(ttft, (0.5, 0.99))
    return Figures(
        requests=count,
        ttft_mean_s=float(ttft.mean()),
        ttft_p50_s=float(ttft_p50),
        ttft_p99_s=float(ttft_p99),
        itl_p50_s=itl.quantile(0.5),
        itl_p99_s=itl.quantile(0.99),
        itl_max_s=itl.max_s,
        tpot_mean_s=float(tpot.mean()),
        jct_mean_s=float(jct.mean()),
        jct_p99_s=float(np.quantile(jct, 0.99)),
        good=float(good.sum()) / count,
        goodput=float(good.sum()) / (max(ends) - first_s) if ends else 0.0,
        split=float(np.mean([each.is_split for each in served])) if served else 0.0,
        refused=len(refused),
    )


def _times(seconds: list[float]) -> NDArray[np.float64]:
    return np.array(seconds or [np.nan])
