"""Numbers about samples, and how sure they are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t, 97.5 %, by degrees of freedom; between two of them the larger factor.
_T = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.0, 120: 1.98,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over repeats, and half the width of its 95 % confidence interval.

    `half` is NaN with a single repeat, which says nothing about the spread.
    """

    mean: float
    half: float

    def text(self, factor: float = 1.0, digits: int = 0) -> str:
        """The mean times `factor`, with its interval where there is one."""
        mean = f"{self.mean * factor:.{digits}f}"
        return mean if math.isnan(self.half) else f"{mean} ±{self.half * factor:.{digits}f}"


def estimate(values: Sequence[float]) -> Estimate:
    """Of one value per repeat.

    Raises:
        ValueError: There is none.
    """
    if not values:
        raise ValueError("no values to average")
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, math.nan)
    return Estimate(
        mean, student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    )


def student_t(degrees: int) -> float:
    """The factor of a two-sided 95 % interval; `degrees` is at least 1."""
    return _T[max(known for known in _T if known <= degrees)]


def quantile(values: Sequence[float], part: float) -> float:
    """Linear between neighbours, as numpy's default.

    Raises:
        ValueError: There are no values, or `part` is not within 0 and 1.
    """
    if not values or not 0 <= part <= 1:
        raise ValueError(f"no {part} quantile of {len(values)} values")
    ordered = sorted(values)
    position = part * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
