"""What a step costs, and what fits into one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tetri.policy.cost import (
    CurvePoint,
    Drift,
    StepCost,
    has_flattened,
    interpolate,
    knee_tokens,
)

# One core with SmolLM2: 5 ms and 0.6 ms a token.
CPU = tuple(CurvePoint(n, 0.005 + 0.0006 * n) for n in (16, 32, 64, 128, 256, 512, 1024))
# A GPU: reading the weights takes 10 ms, from 512 tokens on computing takes longer.
GPU = tuple(CurvePoint(n, max(0.010, n * 0.010 / 512)) for n in (128, 256, 512, 1024, 2048))
COST = StepCost(CPU, 3.5e-7, 0.013, 0.0006, 2.9e-6, 0.004)


def test_knee_of_a_device_with_fixed_costs_is_where_they_stop_to_matter() -> None:
    assert knee_tokens(CPU, aligned_to=16) == 80  # 80 / 53 ms is 90 % of 1024 / 619 ms


def test_knee_of_a_gpu_is_where_computing_takes_over() -> None:
    assert knee_tokens(GPU, aligned_to=128) == 512


def test_knee_is_aligned() -> None:
    assert knee_tokens(GPU, aligned_to=300) == 600


def test_knee_is_the_largest_aligned_size_when_throughput_never_stops_to_grow() -> None:
    curve = [CurvePoint(n, 0.01) for n in (16, 32, 70)]
    assert knee_tokens(curve, aligned_to=16) == 64


def test_knee_of_a_model_with_a_window_below_the_alignment_is_what_fits() -> None:
    assert knee_tokens([CurvePoint(10, 0.01)], aligned_to=16) == 10


def test_knee_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no point"):
        knee_tokens([])


def test_curve_has_flattened_after_two_doublings_without_gain() -> None:
    assert not has_flattened(GPU[:2])
    assert not has_flattened(GPU[:4])  # 512 was still better than 256
    assert has_flattened(GPU)


def test_interpolation_goes_through_the_points_and_beyond_the_last() -> None:
    assert [interpolate(CPU, point.tokens) for point in CPU] == [point.seconds for point in CPU]
    assert interpolate(CPU, 192) == pytest.approx(0.005 + 0.0006 * 192)
    assert interpolate(CPU, 1) == CPU[0].seconds
    assert interpolate(CPU, 2048) == pytest.approx(2 * CPU[-1].seconds)


def test_parts_of_a_step_share_their_fixed_cost_once() -> None:
    decode, prefill = COST.decode_s(8, 4000), COST.prefill_s(128, 512)
    assert COST.step_s(8, 4000, 128, 512) == pytest.approx(decode + prefill - 0.004)
    assert COST.step_s(8, 4000, 0) == decode
    assert COST.step_s(0, 0, 128, 512) == prefill
    assert COST.step_s(0, 0, 0) == 0


def test_a_shared_step_is_never_shorter_than_either_part() -> None:
    cost = StepCost(GPU, base_s=0.011, shared_s=1.0)
    assert cost.step_s(1, 0, 128) == pytest.approx(0.011)
    assert cost.step_s(1, 0, 2048) == pytest.approx(0.040)


@given(
    limit_s=st.floats(0.0, 2.0),
    decodes=st.integers(0, 256),
    context=st.integers(0, 100_000),
    prefill_context=st.integers(0, 4000),
    most=st.integers(1, 2048),
    tile=st.sampled_from([1, 16, 128]),
)
def test_budget_is_the_largest_that_fits(
    limit_s: float, decodes: int, context: int, prefill_context: int, most: int, tile: int
) -> None:
    def takes(total: int) -> float:
        return COST.step_s(decodes, context, total - decodes, prefill_context)

    total = COST.most_tokens(limit_s, decodes, context, prefill_context, most=most, tile=tile)
    assert total <= most
    assert total == most or total % tile == 0
    assert total == most or total - decodes >= tile  # prompts go on
    if total - tile >= decodes + tile:  # more than it had to be
        assert takes(total) <= limit_s
    if total + tile <= most:
        assert takes(total + tile) > limit_s


def test_drift_lowers_the_limit_on_a_slower_machine() -> None:
    drift = Drift()
    for _ in range(200):
        drift.learn(0.15, 0.1)
    assert drift.mean == pytest.approx(1.5, abs=0.01)
    assert drift.limit_s(0.3) == pytest.approx(0.2, rel=0.05)


def test_drift_lowers_the_limit_further_when_steps_scatter() -> None:
    steady, noisy = Drift(), Drift()
    for index in range(200):
        steady.learn(0.1, 0.1)
        noisy.learn(0.07 if index % 2 else 0.13, 0.1)
    assert steady.limit_s(0.1) == pytest.approx(0.1)
    assert noisy.limit_s(0.1) < 0.6 * steady.limit_s(0.1)


def test_drift_forgives_a_hiccup() -> None:
    drift = Drift()
    drift.learn(60.0, 0.1)
    assert drift.limit_s(0.1) > 0.04
    for _ in range(100):
        drift.learn(0.1, 0.1)
    assert drift.limit_s(0.1) > 0.09
