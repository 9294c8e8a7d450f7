"""Figures of a simulation."""

from __future__ import annotations

import math

import pytest

from tests.sim.builders import one, spec
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.sim.cluster import RefusedRequest, simulate
from vllm_tetri.sim.figures import figures, gap_quantiles


def test_an_output_of_one_token_has_no_gaps() -> None:
    assert gap_quantiles(simulate(one(), [spec(0, 10, 1)]), (0.5, 1.0)) == [0.0, 0.0]


def test_refused_requests_count_as_not_good_and_have_no_times() -> None:
    refused = [RefusedRequest(spec(number, 9, 9), "no") for number in range(2)]

    found = figures([], Objective(1.0, 0.1), refused)

    assert (found["good"], found["good_per_s"]) == (0.0, 0.0)
    assert (found["refused"], found["requests"]) == (2, 2)
    assert math.isnan(found["ttft_mean_s"])


def test_figures_count_what_is_within_the_slo() -> None:
    served = simulate(one(), [spec(0, 10, 3), spec(1, 10, 2, arrival_s=10.0), spec(2, 64, 1, 20.0)])

    found = figures(served, Objective(ttft_s=1.2, tpot_s=1.1102))

    # Times per token 1.1105, 1.11 and none; the last prompt takes 1.64 s.
    assert found["good"] == pytest.approx(1 / 3)
    assert found["good_per_s"] == pytest.approx(1 / 21.64)
    assert found["ttft_mean_s"] == pytest.approx((1.1 + 1.1 + 1.64) / 3)
    assert found["itl_max_s"] == pytest.approx(1.111)
    assert found["itl_p50_s"] == pytest.approx(1.11)
    assert found["jct_mean_s"] == pytest.approx((3.321 + 2.21 + 1.64) / 3)
    assert found["split"] == 0.0
