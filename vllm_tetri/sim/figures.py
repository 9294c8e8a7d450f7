"""Figures of a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.request import RefusedRequest, Served


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds to the first token, and mean seconds per token after it; raises ConfigError if they
    are not above 0."""

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tpot_s > 0):
            raise ConfigError(f"SLOs of {self.ttft_s:g} and {self.tpot_s:g} s: must be above 0 s")


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of all requests of a simulation.

    Attributes:
        requests: All, refused ones included; times are of the others, nan if there are none.
        itl_p50_s, itl_p99_s, itl_max_s: Over all times between two tokens of all outputs.
        good: Share of requests within the SLOs; a refused one is not.
        goodput: Requests within the SLOs per second, from the first arrival to the last token.
        split: Share of requests that two instances served.
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


def figures(served: Sequence[Served], slo: Slo, refused: Sequence[RefusedRequest] = ()) -> Figures:
    """Sum up at least one request; raises ConfigError if there is none."""
    count = len(served) + len(refused)
    if not count:
        raise ConfigError("no requests to sum up")
    ttft = np.array([each.ttft_s for each in served] or [np.nan])
    jct = np.array([each.jct_s for each in served] or [np.nan])
    tpot = np.array([each.tpot_s for each in served] or [np.nan])
    specs = [each.spec for each in served] + [each.spec for each in refused]
    ends = [each.spec.arrival_s + each.jct_s for each in served]
    good = float(((ttft <= slo.ttft_s) & (tpot <= slo.tpot_s)).sum())
    ttft_p50, ttft_p99 = np.quantile(ttft, (0.5, 0.99))
    itl_p50, itl_p99, itl_max = gap_quantiles(served, (0.5, 0.99, 1.0))
    return Figures(
        requests=count,
        ttft_mean_s=float(ttft.mean()),
        ttft_p50_s=float(ttft_p50),
        ttft_p99_s=float(ttft_p99),
        itl_p50_s=itl_p50,
        itl_p99_s=itl_p99,
        itl_max_s=itl_max,
        tpot_mean_s=float(tpot.mean()),
        jct_mean_s=float(jct.mean()),
        jct_p99_s=float(np.quantile(jct, 0.99)),
        good=good / count,
        goodput=good / (max(ends) - min(spec.arrival_s for spec in specs)) if ends else 0.0,
        split=float(np.mean([each.is_split for each in served])) if served else 0.0,
        refused=len(refused),
    )


def gap_quantiles(served: Iterable[Served], parts: Sequence[float]) -> list[float]:
    """Quantiles of all times between two tokens; 0 where no output has two tokens."""
    gaps = [part for each in served for part in each.gap_parts]
    return np.quantile(np.concatenate(gaps), parts).tolist() if gaps else [0.0] * len(parts)
