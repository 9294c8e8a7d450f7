"""Figures of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.job import Served


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
        good: Share of requests within the SLO.
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


def figures(served: Sequence[Served], slo: Slo) -> Figures:
    """Of at least one request.

    Raises:
        ConfigError: There is none.
    """
    if not served:
        raise ConfigError("no requests to sum up")
    ttft = np.array([each.ttft_s for each in served])
    jct = np.array([each.jct_s for each in served])
    tpot = np.array([each.tpot_s for each in served])
    parts = [part for each in served for part in each.gap_parts]
    itl = np.concatenate(parts) if parts else np.zeros(1)
    arrivals = np.array([each.ask.arrival_s for each in served])
    good = (ttft <= slo.ttft_s) & (tpot <= slo.tpot_s)
    ttft_p50, ttft_p99 = np.quantile(ttft, (0.5, 0.99))
    itl_p50, itl_p99 = np.quantile(itl, (0.5, 0.99))
    return Figures(
        requests=len(served),
        ttft_mean_s=float(ttft.mean()),
        ttft_p50_s=float(ttft_p50),
        ttft_p99_s=float(ttft_p99),
        itl_p50_s=float(itl_p50),
        itl_p99_s=float(itl_p99),
        itl_max_s=float(itl.max()),
        tpot_mean_s=float(tpot.mean()),
        jct_mean_s=float(jct.mean()),
        jct_p99_s=float(np.quantile(jct, 0.99)),
        good=float(good.mean()),
        goodput=float(good.sum() / ((arrivals + jct).max() - arrivals.min())),
        split=float(np.mean([each.is_split for each in served])),
    )
