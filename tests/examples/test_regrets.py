"""Ways of serving, simulated: what they cost, and their goodput; several routers."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from math import inf
from statistics import fmean

import pytest

from examples.benchmarks import regrets
from examples.benchmarks.goodputs import goodput, strict
from examples.benchmarks.regrets import clusters
from examples.benchmarks.several import LAG_S, several
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, Stock, make_instances, of_profile
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.sim.plan.goodput import Demand, score
from vllm_tetri.sim.workload import draw


def test_each_cell_names_the_best_way_and_what_others_cost_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(regrets, "CLASSES", ("hpld",))
    monkeypatch.setattr(regrets, "RATES", {"knee": 0.7})
    (cell,) = regrets.cells(
        "smollm2-1core", Namespace(num_prompts=80, seconds=0, rates="knee", repeats=1)
    )
    assert (cell["class"], cell["rate"]) == ("hpld", "knee")
    assert min(cell["usual"], cell["roles"], cell["usual_of_layouts"]) >= 0
    assert cell["usual_of_layouts"] <= cell["usual"]
    assert cell["roles"] > cell["usual_of_layouts"]  # decodes are dear where cores compute
    assert cell["best"].split()[0].strip(",") in ("adaptive", "whole", "split")
    shown = cell["figures"]
    assert shown.keys() >= regrets.LAYOUTS.keys()
    first, second = (tuple(shown[f"{regrets.STOCK}{tokens}"]) for tokens in regrets.BUDGETS)
    assert first != second, "budgets count"
    assert all(0 < ttft_s < jct_s for ttft_s, _, jct_s in shown.values())


def test_an_slo_is_that_of_requests_alone_and_more_requests_keep_a_looser_one() -> None:
    engine = of_profile(EngineConfig(), profile("opt-13b-2xv100"))
    light, heavy = strict(engine, "lpld"), strict(engine, "hpld")
    assert light.ttft_s < heavy.ttft_s
    way, demand = clusters(engine)["whole"], Demand("lpld", least_requests=60)
    assert 0 < goodput(way, demand, light, 20.0) < goodput(way, demand, heavy, 20.0)


def test_a_goodput_lasts() -> None:
    """Before the first outputs have ended, a batch is not as large as it becomes."""
    engine = of_profile(EngineConfig(), profile("opt-13b-2xv100"))
    stock = make_instances(both=1, engine=replace(engine, kind=Stock()))
    one, demand = ClusterConfig(stock, "least-in-flight"), Demand("lphd", least_requests=100)
    slo = strict(engine, "lphd")
    rate = goodput(one, demand, slo, 4.0)
    assert score(one, demand.specs(rate, 360.0), slo).kept > 0.85  # four times as long


@pytest.mark.parametrize(
    ("name", "budgets"),
    [("opt-13b-2xv100", [512, 2048]), ("roofline:llama-3-8b:h100", [512, 2048, 8192])],
)
def test_stock_has_the_default_budget_of_its_device_and_others(
    name: str, budgets: list[int]
) -> None:
    names = list(clusters(of_profile(EngineConfig(), profile(name))))
    assert names[-len(budgets) :] == [f"{regrets.STOCK}{tokens}" for tokens in budgets]
    assert sum(each.startswith(regrets.STOCK) for each in names) == len(budgets)


def test_routers_that_tell_each_other_what_they_send_are_nearly_one() -> None:
    engine = of_profile(EngineConfig(), profile("opt-13b-2xv100"))
    instances, specs = make_instances(both=8, engine=engine), draw("hpld", 300, 20.0, 0)

    def ttft_s(count: int, lag_s: float) -> float:
        served = simulate(ClusterConfig(instances, several(count, lag_s)), specs)
        return fmean(each.ttft_s for each in served)

    one, told, alone = ttft_s(1, inf), ttft_s(8, LAG_S), ttft_s(8, inf)
    assert told < 1.15 * one
    assert alone > 1.2 * one
