"""How long streams said nothing when something broke. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from vllm_tetri.bench.soak.faults import Fault, Kind
from vllm_tetri.bench.soak.tally import CALM, Asked, End
from vllm_tetri.bench.stats import quantile


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the longest silence of each of `number` streams."""

    number: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    longest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Gaps:
    """Of streams that ended well, by kind of fault.

    Attributes:
        under_way: Of those that had begun when it hit, whoever wrote them.
        resumed: Of those that broke and went on from another instance; some began behind
            the fault, before anybody had noticed it.
    """

    name: str
    under_way: Spread
    resumed: Spread


def gaps(asked: Sequence[Asked], faults: Sequence[Fault], resumed: Collection[str]) -> list[Gaps]:
    """One for the time before faults, for every kind that happened, and for all of them.

    Args:
        faults: In the order of their times.
        resumed: Ids of requests that routers say they went on with.
    """
    under_way: dict[str, list[float]] = {CALM: []}
    moved: dict[str, list[float]] = {}
    for each in asked:
        if each.end is not End.GOOD or len(each.heard_s) < 2:
            continue
        if not faults or each.heard_s[-1] < faults[0].at_s:
            under_way[CALM].append(max(later - at for at, later in pairwise(each.heard_s)))
            continue
        for kind, silence_s in _silences(each, faults):
            under_way.setdefault(kind, []).append(silence_s)
        if each.id in resumed:
            # The longest silence is the break.
            middle_s, silence_s = max(_all_silences(each), key=lambda pair: pair[1])
            place = bisect_right(faults, middle_s, key=lambda fault: fault.at_s)
            if place:
                moved.setdefault(faults[place - 1].kind.value, []).append(silence_s)
    happened = {each.kind for each in faults}
    names = [CALM, *(kind.value for kind in Kind if kind in happened)]
    rows = [Gaps(name, _spread(under_way.get(name)), _spread(moved.get(name))) for name in names]
    hit = [value for name, values in under_way.items() if name != CALM for value in values]
    every = [value for values in moved.values() for value in values]
    return [*rows, Gaps("all faults", _spread(hit), _spread(every))]


def _silences(asked: Asked, faults: Sequence[Fault]) -> Iterator[tuple[str, float]]:
    """Kinds of the faults that hit while a stream was under way, and its longest silence
    from each up to the next one. A silence that a fault divides is on the side of its
    larger part."""
    silences = _all_silences(asked)
    first = bisect_right(faults, asked.heard_s[0], key=lambda each: each.at_s)
    for index in range(first, len(faults)):
        at_s = faults[index].at_s
        if at_s >= asked.heard_s[-1]:
            return
        next_s = faults[index + 1].at_s if index + 1 < len(faults) else math.inf
        found = [silence_s for middle_s, silence_s in silences if at_s <= middle_s < next_s]
        if found:
            yield faults[index].kind.value, max(found)


def _all_silences(asked: Asked) -> list[tuple[float, float]]:
    """Middle and length of each."""
    return [((at + later) / 2, later - at) for at, later in pairwise(asked.heard_s)]


def _spread(values: Sequence[float] | None) -> Spread:
    if not values:
        return Spread()
    return Spread(len(values), quantile(values, 0.5), quantile(values, 0.99), max(values))
