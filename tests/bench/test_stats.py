"""Intervals and quantiles."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vllm_tetri.bench.stats import estimate, quantile, student_t


def test_interval_is_students() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.303 / math.sqrt(3))
    assert found.text(1000) == "2000 ±2484"


def test_a_single_repeat_has_no_interval() -> None:
    assert math.isnan(estimate([1.5]).half)
    assert estimate([1.5]).text(digits=1) == "1.5"


def test_nothing_has_no_mean() -> None:
    with pytest.raises(ValueError):
        estimate([])


def test_factor_falls_with_repeats_and_is_never_too_small() -> None:
    factors = [student_t(degrees) for degrees in range(1, 200)]
    assert factors == sorted(factors, reverse=True)
    assert student_t(25) >= 2.060
    assert student_t(1000) >= 1.962


@pytest.mark.parametrize("part", [0.0, 0.5, 0.9, 0.99, 1.0])
def test_quantile_is_numpys(part: float) -> None:
    values = [5.0, 1.0, 4.0, 9.0, 2.5]
    assert quantile(values, part) == pytest.approx(float(np.quantile(values, part)))


def test_quantile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError):
        quantile([], 0.5)
