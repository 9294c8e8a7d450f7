"""What steps cost on an imagined device."""

from __future__ import annotations

from vllm_tetri.policy.cost import CurvePoint, StepCost

COST = StepCost(
    tuple(CurvePoint(n, 0.005 + 0.0006 * n) for n in (16, 32, 64, 128, 256, 512, 1024, 2048)),
    context_s=3.5e-7,
    base_s=0.013,
    request_s=0.0006,
    token_s=2.9e-6,
    shared_s=0.004,
)
