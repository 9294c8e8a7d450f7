"""Goodput of ways of serving, by search."""

from __future__ import annotations

from examples.benchmarks.goodputs import goodput, strict
from examples.benchmarks.regrets import clusters
from vllm_tetri.sim.config import EngineConfig, of_profile
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.sim.plan.goodput import Demand


def test_an_slo_is_that_of_requests_alone_and_more_requests_keep_a_looser_one() -> None:
    engine = of_profile(EngineConfig(), profile("opt-13b-2xv100"))
    light, heavy = strict(engine, "lpld"), strict(engine, "hpld")
    assert light.ttft_s < heavy.ttft_s
    way, demand = clusters(engine)["whole"], Demand("lpld", least_requests=60)
    assert 0 < goodput(way, demand, light, 20.0) < goodput(way, demand, heavy, 20.0)
