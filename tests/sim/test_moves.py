from __future__ import annotations

from random import Random

import numpy as np
import pytest

from examples.benchmarks.moves import alternate
from vllm_tetri.policy.moves import MOST_MOVES
from vllm_tetri.sim.cluster import Outcome, run
from vllm_tetri.sim.config import ClusterConfig, make_instances
from vllm_tetri.sim.workload import RequestSpec


def skewed(num: int, rate: float, seed: int) -> list[RequestSpec]:
    """Every other output is long, so that one of two instances gets all of these."""
    rng, now, specs = Random(seed), 0.0, []
    for each in range(num):
        now += rng.expovariate(rate)
        output_tokens = rng.randint(1500, 2500) if each % 2 else rng.randint(10, 60)
        specs.append(RequestSpec(each, now, rng.randint(50, 400), output_tokens))
    return specs


def simulated(*, moves: bool, seed: int = 1) -> Outcome:
    dispatch = f"{alternate.__module__}:{alternate.__name__}"
    config = ClusterConfig(make_instances(1, 2), dispatch=dispatch, moves=moves)
    return run(config, skewed(120, 0.4, seed))


def test_long_outputs_on_one_of_two_instances_spread_over_both() -> None:
    with_moves, without = simulated(moves=True), simulated(moves=False)
    tails = [
        float(np.percentile([each.jct_s for each in outcome.served], 99))
        for outcome in (with_moves, without)
    ]
    assert tails[0] < 0.7 * tails[1]
    moved = [each.num_moves for each in with_moves.served]
    assert max(moved) <= MOST_MOVES
    assert sum(moved) > 10
    assert {each.num_moves for each in without.served} == {0}


@pytest.mark.parametrize("seed", range(3))
def test_an_output_that_moved_has_all_its_tokens_in_order(seed: int) -> None:
    for each in simulated(moves=True, seed=seed).served:
        assert each.num_output_tokens == each.spec.output_tokens
        gaps = np.concatenate(each.gap_parts or [np.zeros(0)])
        assert len(gaps) == each.spec.output_tokens - 1
        assert each.first_token_s + gaps.sum() == pytest.approx(each.last_token_s)
