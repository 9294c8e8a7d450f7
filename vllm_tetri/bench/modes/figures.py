"""What raw results of `vllm-tetri bench modes` amount to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from vllm_tetri.bench.arrivals import Slo
from vllm_tetri.bench.modes.cells import Cell, Request
from vllm_tetri.bench.modes.load import RATES, Load
from vllm_tetri.bench.modes.systems import SYSTEMS
from vllm_tetri.bench.stats import Estimate, estimate, quantile

LOOSE = (10.0, 6.0)  # of TTFT and time per further token on an idle stock instance
STRICT = (4.0, 2.5)
_MOST_DELAY_S = 2.0  # median TTFT at a rate that is sustained

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a cell, and how it is shown.

    Attributes:
        factor: From its unit to the one in the title.
        is_rate: The more the better.
    """

    key: str
    title: str
    factor: float = 1e3
    digits: int = 0
    is_rate: bool = False


METRICS = (
    Metric("ttft_mean_s", "TTFT mean, ms"),
    Metric("ttft_p99_s", "TTFT p99, ms"),
    Metric("itl_p99_s", "ITL p99, ms"),
    Metric("jct_mean_s", "JCT mean, s", 1, 2),
    Metric("jct_p99_s", "JCT p99, s", 1, 2),
    Metric("goodput_loose", "goodput loose, 1/s", 1, 2, is_rate=True),
    Metric("share_loose", "in time, %", 100, 0, is_rate=True),
    Metric("goodput_strict", "goodput strict, 1/s", 1, 2, is_rate=True),
    Metric("share_strict", "in time, %", 100, 0, is_rate=True),
    Metric("failed", "failed", 1, 1),
    Metric("busy", "CPU, %", 100),
    Metric("foreign", "others' CPU, %", 100),
)
COMPARED = tuple(
    metric
    for metric in METRICS
    if metric.key in ("ttft_mean_s", "jct_mean_s", "itl_p99_s", "goodput_strict")
)


@dataclass(frozen=True, slots=True)
class Slos:
    """The two in whose terms requests are in time."""

    loose: Slo
    strict: Slo


def slos(
    lone: Mapping[str, float], loose: Sequence[float] | None, strict: Sequence[float] | None
) -> Slos:
    """What is given, or multiples of what stock vLLM takes for one request at a time.

    Args:
        lone: Its `ttft_s` and `tpot_s`.
        loose: Both in seconds.
    """

    def of(given: Sequence[float] | None, factors: tuple[float, float]) -> Slo:
        if given is not None:
            return Slo(*given)
        return Slo(factors[0] * lone["ttft_s"], factors[1] * lone["tpot_s"])

    return Slos(of(loose, LOOSE), of(strict, STRICT))


def tpot_s(request: Request) -> float:
    """From the first token to the last, per further token."""
    return (request.reply.jct_s - request.reply.ttft_s) / (request.output_tokens - 1)


def figures(cell: Cell, slo: Slos) -> Figures:
    """One number per metric, and `ttft_p50_s`. Times are of requests that were answered, and
    missing where none was; one that failed is in time for no SLO."""
    answered = cell.answered
    loose, strict = (_in_time(answered, each) for each in (slo.loose, slo.strict))
    return {
        **_times(answered),
        "goodput_loose": loose / cell.took_s,
        "share_loose": loose / len(cell.requests),
        "goodput_strict": strict / cell.took_s,
        "share_strict": strict / len(cell.requests),
        "failed": len(cell.requests) - len(answered),
        "busy": cell.busy,
        "foreign": cell.foreign,
    }


def _times(answered: Sequence[Request]) -> dict[str, float]:
    if not answered:
        return {}
    ttft_s = [each.reply.ttft_s for each in answered]
    jct_s = [each.reply.jct_s for each in answered]
    found = {
        "ttft_mean_s": fmean(ttft_s),
        "ttft_p50_s": median(ttft_s),
        "ttft_p99_s": quantile(ttft_s, 0.99),
        "jct_mean_s": fmean(jct_s),
        "jct_p99_s": quantile(jct_s, 0.99),
    }
    if gaps_s := [gap / 1e6 for each in answered for gap in each.reply.gaps_us]:
        found["itl_p99_s"] = quantile(gaps_s, 0.99)
    return found


def _in_time(answered: Sequence[Request], slo: Slo) -> int:
    return sum(each.reply.ttft_s <= slo.ttft_s and tpot_s(each) <= slo.tpot_s for each in answered)


class Results:
    """Figures of all cells, by load, system and repeat."""

    def __init__(self, cells: Sequence[Cell], slo: Slos) -> None:
        self.slo = slo
        self._rate_per_s = {cell.load: cell.rate_per_s for cell in cells}
        self._found: dict[tuple[Load, str], dict[int, Figures]] = {}
        for cell in cells:
            repeats = self._found.setdefault((cell.load, cell.system), {})
            repeats[cell.repeat] = figures(cell, slo)

    def systems(self) -> list[str]:
        """Those that have any cell, in their usual order."""
        present = {system for _, system in self._found}
        return [name for name in SYSTEMS if name in present]

    def rate_per_s(self, load: Load) -> float:
        """At which its requests came."""
        return self._rate_per_s[load]

    def repeats(self, load: Load, system: str) -> Mapping[int, Figures]:
        """Of every repeat that there is."""
        return self._found.get((load, system), {})

    def mean(self, load: Load, system: str, key: str) -> Estimate | None:
        """Over the repeats that have it; None without any."""
        found = [each[key] for each in self.repeats(load, system).values() if key in each]
        return estimate(found) if found else None

    def sustained(self, name: str, system: str) -> str | None:
        """The largest rate of a class at which stalls stay within the loose SLO, the median
        first token comes within two seconds and nothing fails: capacity in the terms of
        Sarathi-Serve."""
        for rate in sorted(RATES, key=RATES.__getitem__, reverse=True):
            load = name, rate
            stall, delay, failed = (
                self.mean(load, system, key) for key in ("itl_p99_s", "ttft_p50_s", "failed")
            )
            if stall is None or delay is None or failed is None:
                continue
            is_calm = stall.mean <= self.slo.loose.tpot_s and delay.mean <= _MOST_DELAY_S
            if is_calm and failed.mean == 0:
                return rate
        return None


@dataclass(frozen=True, slots=True)
class Ratio:
    """A metric of one system over another's, repeat by repeat.

    Attributes:
        value: None where the other's is 0.
        won: Whether it is better with 95 % certainty; None: neither is.
    """

    to: str
    value: Estimate | None
    won: bool | None


def ratio(results: Results, load: Load, system: str, other: str, metric: Metric) -> Ratio | None:
    """Over the repeats in which both have it; None without any."""
    mine, theirs = (
        {repeat: each for repeat, each in results.repeats(load, name).items() if metric.key in each}
        for name in (system, other)
    )
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        return None
    if any(theirs[repeat][metric.key] == 0 for repeat in common):
        return Ratio(other, None, None)
    value = estimate([mine[each][metric.key] / theirs[each][metric.key] for each in common])
    return Ratio(other, value, _won(value, metric))


def best_other(results: Results, load: Load, metric: Metric) -> str | None:
    """Which of those that are not ours has the best mean."""
    means = {
        name: found.mean
        for name in results.systems()
        if not SYSTEMS[name].is_ours and (found := results.mean(load, name, metric.key)) is not None
    }
    sign = -1 if metric.is_rate else 1
    return min(means, key=lambda name: sign * means[name]) if means else None


def _won(value: Estimate, metric: Metric) -> bool | None:
    if math.isnan(value.half) or abs(value.mean - 1) <= value.half:
        return None
    return (value.mean > 1) == metric.is_rate
