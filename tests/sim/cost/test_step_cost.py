"""What steps take: linear, a roofline, and what policies are told of it."""

from __future__ import annotations

from itertools import product

import pytest

from tests.sim.builders import spec
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, make_instances
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.sim.cost.step_cost import Roofline, linear
from vllm_tetri.sim.plan.values import System
from vllm_tetri.types import StepCoefficients

ROOF = Roofline(
    overhead_s=0.002, weights_s=0.01, token_s=1e-4, kv_s=1e-6, attention_s=1e-8, link_s=1e-6
)


def test_weights_are_read_once_however_many_tokens_there_are() -> None:
    few, many = ROOF.step_s(1, 0, 0, 0), ROOF.step_s(40, 0, 50, 0)

    assert few == pytest.approx(0.002 + 0.01 + 1e-6)
    assert many - few == pytest.approx(89e-6)  # the link alone


def test_arithmetic_takes_longer_from_the_ridge_on() -> None:
    twice = ROOF.step_s(0, 0, 400, 0) - ROOF.step_s(0, 0, 200, 0)

    assert twice == pytest.approx(200 * (1e-4 + 1e-6))


def test_attention_of_decodes_reads_and_of_prompts_computes() -> None:
    alone = ROOF.step_s(8, 0, 10, 0)

    assert ROOF.step_s(8, 8000, 10, 0) - alone == pytest.approx(8000e-6)
    assert ROOF.step_s(8, 0, 10, 500) - alone == pytest.approx(10 * 500e-8)


def test_a_linear_cost_is_reported_as_it_is() -> None:
    cost = StepCoefficients(0.01, 0.001, 1e-6, 1e-4, 1e-8, confidence=0.7)

    assert linear(cost) is cost


@pytest.mark.parametrize("name", ["llama-3-8b:h100", "opt-13b:v100:2", "llama-3-70b:h200:4"])
def test_what_is_reported_of_a_roofline_is_not_far_off(name: str) -> None:
    cost = profile(f"roofline:{name}").cost
    about = linear(cost)

    assert about.confidence == 1.0
    assert min(about.request_s, about.token_s, about.prompt_s, about.context_s) >= 0
    errors = []
    for decodes, context, prompt in product((0, 1, 16, 64, 200), (200, 1000), (0, 100, 500, 1500)):
        if decodes + prompt:
            step = (decodes, decodes * context, prompt, prompt / 2)
            errors.append(abs(about.step_s(*step) / cost.step_s(*step) - 1))
    assert max(errors) < 0.35
    assert sum(errors) / len(errors) < 0.15


def test_a_simulated_engine_takes_what_the_roofline_says() -> None:
    config = ClusterConfig(make_instances(both=1, engine=EngineConfig(cost=ROOF)), System.WHOLE)

    (served,) = simulate(config, [spec(0, 300, 3)])

    assert served.ttft_s == pytest.approx(ROOF.step_s(0, 0, 300, 149.5))
    assert served.jct_s - served.ttft_s == pytest.approx(
        ROOF.step_s(1, 300, 0, 0) + ROOF.step_s(1, 301, 0, 0)
    )


@pytest.mark.parametrize("mode", ["adaptive", "split"])
def test_modes_that_price_run_on_rooflines(mode: str) -> None:
    engine = EngineConfig(cost=ROOF, tbt_slo_s=0.03)
    specs = [spec(number, 200, 20, number / 20) for number in range(60)]

    served = simulate(ClusterConfig(make_instances(1, 1, engine=engine), mode), specs)

    assert len(served) == 60
