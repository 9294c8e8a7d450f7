"""Prefixes that simulated instances fetch from each other."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from tests.sim.builders import HANDOVER_S, HANDOVER_TOKEN_S, decode_s, engine, named, prompt_s
from vllm_tetri.policy.fetch import FetchPlan
from vllm_tetri.sim.cluster import ENGINES, simulate
from vllm_tetri.sim.config import ClusterConfig, EngineKind, make_instances
from vllm_tetri.sim.engine.tetri import TetriInstance
from vllm_tetri.sim.modes import WholeMode
from vllm_tetri.sim.workload import RequestSpec
from vllm_tetri.types import InstanceId, InstanceLoad

NAMES = (1, 2, 3)
STEP_S, LAST_BLOCK_S = 1 + 256 * 0.01, 16 * 0.01  # of a step with a full chunk
MOVED_S = HANDOVER_S + 1536 * HANDOVER_TOKEN_S
# The first instance has a prefix, and computes something else when the prefix is needed again.
SPECS = [named(0, 1600, 1, NAMES), named(1, 4000, 1, (), 100.0), named(2, 1600, 1, NAMES, 100.01)]


def cluster(mode: object = "whole", **changes: object) -> ClusterConfig:
    roomy = engine(**{"kv_blocks": 600, "chunk_tokens": 256, "kv_token_bytes": 1000, **changes})
    return ClusterConfig(
        make_instances(both=2, engine=roomy), mode,  # type: ignore[arg-type]
        handover_base_s=HANDOVER_S, handover_token_s=HANDOVER_TOKEN_S,
    )  # fmt: skip


@pytest.mark.parametrize("link", [None, 1000 / HANDOVER_TOKEN_S])
def test_a_prefix_comes_with_the_next_step_of_its_holder(link: float | None) -> None:
    """The holder computes its last block, whatever is queued there, and then it travels."""
    loads: list[InstanceLoad] = []

    class Watched(TetriInstance):
        def load(self) -> InstanceLoad:
            if self.fetching:
                loads.append(super().load())
            return super().load()

    with patch.dict(ENGINES, {EngineKind: Watched}):
        _, busy, served = simulate(replace(cluster(), link=link), SPECS)

    assert (busy.prefill, served.prefill) == ("both-0", "both-1")
    assert (served.cached_tokens, served.fetched_tokens) == (1536, 1536)
    arrived_s = 100 + 2 * STEP_S + LAST_BLOCK_S + MOVED_S
    assert served.first_token_s == pytest.approx(arrived_s + prompt_s(64))
    assert busy.ttft_s == pytest.approx(16 * 1.0 + 40.0 + LAST_BLOCK_S)  # 16 steps
    assert {
        (each.waiting, each.queued_prefill_tokens, each.heavy + each.light) for each in loads
    } == {(1, 64, 1)}


def test_what_is_fetched_is_found_by_the_next_prompt() -> None:
    *_, again = simulate(cluster(), [*SPECS, named(3, 1600, 1, NAMES, 120.0)])

    assert (again.prefill, again.cached_tokens, again.fetched_tokens) == ("both-1", 1536, 0)


def test_only_what_the_instance_lacks_travels() -> None:
    """The second one has a third of it, from a prompt of its own."""
    own = named(3, 600, 1, NAMES[:1], 0.01)

    _, first, _, served = simulate(cluster(), [SPECS[0], own, *SPECS[1:]])

    assert [each.prefill for each in (first, served)] == ["both-1", "both-1"]
    assert served.cached_tokens == 1536
    assert served.fetched_tokens == 1024


def test_what_is_fetched_is_not_counted_as_to_be_computed() -> None:
    """Where the prefix goes, 64 tokens are queued, and at the third instance 1,000."""
    more = [named(3, 1000, 1, (), 100.005), named(4, 500, 1, (), 100.02)]
    config = cluster()
    config = replace(config, instances=make_instances(both=3, engine=config.instances[0].engine))

    *_, served, third, last = simulate(config, [*SPECS, *more])

    assert [each.prefill for each in (third, served, last)] == ["both-1", "both-2", "both-2"]


def test_what_is_dearer_to_fetch_is_computed() -> None:
    slow = replace(cluster(), handover_token_s=0.011)

    *_, served = simulate(slow, SPECS)

    assert (served.fetched_tokens, served.cached_tokens) == (0, 0)
    assert served.ttft_s == pytest.approx(7 * 1.0 + 16.0)  # steps and tokens


def test_a_prefill_instance_fetches_what_was_written_elsewhere() -> None:
    turns = [named(0, 600, 500, (1, 2)), named(1, 1200, 3, (1, 2), 1000.0)]
    config = replace(cluster("split"), instances=make_instances(
        1, 1, engine=engine(kv_blocks=600, chunk_tokens=2048)))  # fmt: skip

    _, second = simulate(config, turns)

    assert (second.cached_tokens, second.fetched_tokens) == (1024, 512)
    fetched_s = prompt_s(16) + HANDOVER_S + 512 * HANDOVER_TOKEN_S
    assert second.ttft_s == pytest.approx(fetched_s + prompt_s(176))
    moved_s = HANDOVER_S + 176 * HANDOVER_TOKEN_S
    assert second.jct_s - second.ttft_s == pytest.approx(moved_s + decode_s(1200, 2))


class _Hopes(WholeMode):
    """Takes the first instance to hold what it may not have."""

    def plan_fetch(self, spec: RequestSpec, instance: InstanceId) -> FetchPlan | None:
        is_asked = spec.id == 2 and instance == "both-1"
        return FetchPlan(InstanceId("both-0"), 1536, 0.0, 1e3) if is_asked else None


def test_a_prefix_that_is_gone_is_not_waited_for() -> None:
    """The holder has other work; it can tell when its next step begins."""
    specs = [replace(SPECS[1], arrival_s=99.0), replace(SPECS[2], arrival_s=102.0)]

    _, served = simulate(cluster(_Hopes), specs)

    assert (served.prefill, served.fetched_tokens) == ("both-1", 0)
    assert served.first_token_s == pytest.approx(99 + STEP_S + 7 * 1.0 + 16.0)


def test_a_prefix_that_comes_late_is_dropped() -> None:
    """It is waited for a second; instances assert at the end that they keep no block."""
    *_, served = simulate(cluster(_Hopes), SPECS)

    assert (served.prefill, served.cached_tokens, served.fetched_tokens) == ("both-1", 0, 0)
    assert served.ttft_s == pytest.approx(1.0 + 7 * 1.0 + 16.0)


def test_a_mode_may_do_without_fetches() -> None:
    *_, served = simulate(cluster(type("NoFetches", (WholeMode,), {"may_fetch": False})), SPECS)

    assert (served.fetched_tokens, served.cached_tokens) == (0, 0)
