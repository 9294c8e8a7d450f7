"""Several routers of the same instances, simulated."""

from __future__ import annotations

from math import inf
from statistics import fmean

from examples.benchmarks.several import LAG_S, several
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, make_instances, of_profile
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.sim.workload import draw


def test_routers_that_tell_each_other_what_they_send_are_nearly_one() -> None:
    engine = of_profile(EngineConfig(), profile("opt-13b-2xv100"))
    instances, specs = make_instances(both=8, engine=engine), draw("hpld", 300, 20.0, 0)

    def ttft_s(count: int, lag_s: float) -> float:
        served = simulate(ClusterConfig(instances, several(count, lag_s)), specs)
        return fmean(each.ttft_s for each in served)

    one, told, alone = ttft_s(1, inf), ttft_s(8, LAG_S), ttft_s(8, inf)
    assert told < 1.15 * one
    assert alone > 1.2 * one
