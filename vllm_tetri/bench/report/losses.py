"""Where disaggregation loses, computed from the results: nothing here is written by hand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vllm_tetri.bench.report.values import (
    DIFFERENCES,
    METRICS,
    NEUTRAL,
    OURS,
    Source,
    Value,
    difference,
    is_certain,
    ratio,
)
from vllm_tetri.bench.stats import Estimate


@dataclass(frozen=True, slots=True)
class Beside:
    """A metric of a system of ours beside the best of the others.

    Attributes:
        times: Of ours to the best other's, repeat by repeat; None where that says nothing,
            since it is 0 or around it.
        is_worse: By the means over the repeats that both have.
        is_certain: Whether the 95 % interval of the ratio, or without one of the difference,
            leaves out equality; None with one repeat.
    """

    mine: Value
    best: Value
    times: Estimate | None
    is_worse: bool
    is_certain: bool | None


def beside(found: Sequence[Value], rivals: Collection[str] | None = None) -> list[Beside]:
    """Every value of ours that another system has, too, asked the same.

    Args:
        rivals: Whose best is compared with; None: all that are not ours.
    """
    made = []
    groups: dict[tuple[str, Source, str, str], list[Value]] = {}
    for each in found:
        key = each.experiment, each.source, each.group, each.metric
        groups.setdefault(key, []).append(each)
    for (_, _, _, metric), members in groups.items():
        others = [
            each
            for each in members
            if each.system not in OURS and (rivals is None or each.system in rivals)
        ]
        if metric in NEUTRAL or not others:
            continue
        best = _best(others, metric)
        made += [_beside(each, best) for each in members if each.system in OURS]
    return made


def losses(found: Sequence[Value]) -> list[Beside]:
    """Those that are worse: the certain ones first, then by how much."""
    lost = [each for each in beside(found) if each.is_worse]
    return sorted(lost, key=lambda each: (each.is_certain is not True, -_factor(each)))


def _best(others: Sequence[Value], metric: str) -> Value:
    sign = -1 if METRICS[metric].is_rate else 1
    return min(others, key=lambda each: sign * each.found.mean)


def _beside(mine: Value, best: Value) -> Beside:
    apart = difference(mine, best)
    more = mine.found.mean - best.found.mean if apart is None else apart.mean
    is_worse = more < 0 if METRICS[mine.metric].is_rate else more > 0
    times = None if mine.metric in DIFFERENCES else ratio(mine, best)
    if times is not None:
        return Beside(mine, best, times, is_worse, is_certain(times))
    return Beside(mine, best, None, is_worse, None if apart is None else is_certain(apart, 0.0))


def _factor(each: Beside) -> float:
    """How much worse, as a factor above 1."""
    if each.times is None or each.times.mean <= 0:
        return float("inf")
    mean = each.times.mean
    return 1 / mean if METRICS[each.mine.metric].is_rate else mean
