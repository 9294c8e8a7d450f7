"""From measured steps to the cost model of `policy.cost`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate, combinations

import numpy as np

from vllm_tetri.engine.profile import DecodePoint, Profile
from vllm_tetri.engine.trials import Trial
from vllm_tetri.policy.cost import CurvePoint, StepCost, knee_tokens

Steps = Mapping[Trial, float]  # seconds of a step


def fit(steps: Steps, *, block_tokens: int, tile_tokens: int, took_s: float) -> Profile:
    """The profile that explains these steps; at least one is a chunk without context."""
    curve = sorted(
        (
            CurvePoint(trial.prefill, seconds)
            for trial, seconds in steps.items()
            if not trial.decodes and not trial.prefill_context
        ),
        key=lambda point: point.tokens,
    )
    decodes = sorted(
        (
            DecodePoint(trial.decodes, trial.decode_context, seconds)
            for trial, seconds in steps.items()
            if not trial.prefill
        ),
        key=lambda point: (point.context_tokens, point.num_decodes),
    )
    return Profile(
        curve=tuple(curve),
        decodes=tuple(decodes),
        chunk_tokens=knee_tokens(curve, aligned_to=math.lcm(block_tokens, tile_tokens)),
        tile_tokens=tile_tokens,
        cost=_cost(steps, curve, decodes),
        took_s=took_s,
    )


def _cost(steps: Steps, curve: Sequence[CurvePoint], decodes: Sequence[DecodePoint]) -> StepCost:
    # A longer chunk cannot take less time; where it seems to, the machine was disturbed.
    rising = accumulate((point.seconds for point in curve), max)
    parts = StepCost(
        tuple(CurvePoint(point.tokens, s) for point, s in zip(curve, rising, strict=True))
    )
    context_s = _context_s(steps, parts)
    base_s, request_s, token_s = _decode_s(decodes)
    if not decodes:
        base_s = parts.curve[0].seconds  # not less than this, for want of a better guess
    parts = StepCost(parts.curve, context_s, base_s, request_s, token_s)
    return StepCost(
        parts.curve, context_s, base_s, request_s, token_s, shared_s=_shared_s(steps, parts)
    )


def _context_s(steps: Steps, cost: StepCost) -> float:
    """Least squares of what context adds to a chunk."""
    rows = [
        (trial.prefill * trial.prefill_context, seconds - cost.prefill_s(trial.prefill))
        for trial, seconds in steps.items()
        if trial.prefill_context and not trial.decodes
    ]
    squares = sum(size * size for size, _ in rows)
    return max(0.0, sum(size * rest for size, rest in rows) / squares) if rows else 0.0


def _decode_s(points: Sequence[DecodePoint]) -> tuple[float, float, float]:
    """Non-negative least squares of relative errors: base, per request, per context token.

    With three unknowns, all sets of them that may be non-zero can be tried.
    """
    if not points:
        return 0.0, 0.0, 0.0
    rows = np.array(
        [(1.0, point.num_decodes, point.num_decodes * point.context_tokens) for point in points]
    )
    weights = 1.0 / np.array([point.seconds for point in points])
    rows *= weights[:, None]
    best, least = np.zeros(3), math.inf
    for size in range(1, 4):
        for columns in combinations(range(3), size):
            solution = np.linalg.lstsq(rows[:, columns], np.ones(len(points)), rcond=None)[0]
            if (solution < 0).any():
                continue
            candidate = np.zeros(3)
            candidate[list(columns)] = solution
            error = float(((rows @ candidate - 1.0) ** 2).sum())
            if error < least:
                best, least = candidate, error
    base_s, request_s, token_s = (float(value) for value in best)
    return base_s, request_s, token_s


def _shared_s(steps: Steps, cost: StepCost) -> float:
    saved = [
        cost.decode_s(trial.decodes, trial.decodes * trial.decode_context)
        + cost.prefill_s(trial.prefill, trial.prefill_context)
        - seconds
        for trial, seconds in steps.items()
        if trial.decodes and trial.prefill
    ]
    return min(max(statistics.median(saved), 0.0), cost.base_s) if saved else 0.0
