"""Times between two tokens, summed up without keeping each."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sim.builders import ask, one
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.gaps import Gaps
from vllm_tetri.sim.setting import Setting, Shape, places
from vllm_tetri.sim.workload import draw


@pytest.mark.parametrize("count", [1, 2, 7, 150])
def test_quantiles_are_those_of_all_gaps_to_the_bit(count: int) -> None:
    tight = Shape(kv_blocks=140, chunk_tokens=128, arena_tokens=2500)
    served = simulate(
        Setting(places(2, 2, 1, shape=tight), "split"), draw("mixed", count, 3.0, seed=count)
    )

    found = Gaps(served)

    every = np.concatenate([part for each in served for part in each.gap_parts])
    assert len(found) == len(every)
    assert found.max_s == every.max()
    for part in (0.0, 0.01, 0.5, 0.9, 0.99, 0.999, 1.0):
        assert found.quantile(part) == np.quantile(every, part)


def test_without_a_second_token_there_is_none() -> None:
    found = Gaps(simulate(one(), [ask(0, 10, 1)]))

    assert (len(found), found.max_s, found.quantile(0.5)) == (1, 0.0, 0.0)
