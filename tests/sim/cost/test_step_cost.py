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

ROOF = Roofline(
    overhead_s=0.002, weights_s=0.01, token_s=1e-4, kv_s=1e-6, attention_s=1e-8, link_s=1e-6
)


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
    assert max(errors) < 0.37
    assert sum(errors) / len(errors) < 0.15


@pytest.mark.parametrize("name", ["llama-3-8b:h100", "opt-13b:v100:2", "llama-3-70b:h200:4"])
def test_a_long_prompt_is_reported_to_take_about_what_it_takes(name: str) -> None:
    cost, chunk = profile(f"roofline:{name}").cost, 2048
    steps = [(0, 0, chunk, start + (chunk - 1) / 2) for start in range(0, 85_000, chunk)]
    took_s = sum(cost.step_s(*step) for step in steps)
    assert sum(linear(cost).step_s(*step) for step in steps) == pytest.approx(took_s, rel=0.25)


def test_a_simulated_engine_takes_what_the_roofline_says() -> None:
    config = ClusterConfig(make_instances(both=1, engine=EngineConfig(cost=ROOF)), System.WHOLE)

    (served,) = simulate(config, [spec(0, 300, 3)])

    assert served.ttft_s == pytest.approx(ROOF.step_s(0, 0, 300, 149.5))
    assert served.jct_s - served.ttft_s == pytest.approx(
        ROOF.step_s(1, 300, 0, 0) + ROOF.step_s(1, 301, 0, 0)
    )
