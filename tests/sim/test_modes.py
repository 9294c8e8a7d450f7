"""How requests find instances."""

from __future__ import annotations

from tests.sim.builders import ENGINE, engine, spec
from vllm_tetri.policy.cluster import ClusterTable
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.route import Route
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.config import ClusterConfig, Stock, make_instances
from vllm_tetri.sim.modes import SplitMode
from vllm_tetri.sim.request import SimRequest
from vllm_tetri.sim.workload import RequestSpec
from vllm_tetri.types import InstanceId


def test_prompts_go_where_fewest_are_queued() -> None:
    specs = [spec(0, 60, 2), spec(1, 10, 2, 0.01), spec(2, 10, 2, 0.02), spec(3, 10, 2, 0.03)]

    served = simulate(ClusterConfig(make_instances(2, 1, engine=ENGINE)), specs)

    assert [each.prefill for each in served] == ["prefill-0", *["prefill-1"] * 3]


def test_reports_tell_the_router_what_is_done() -> None:
    specs = [spec(0, 60, 2), spec(1, 50, 2, 0.01), spec(2, 64, 2, 5.0), spec(3, 10, 2, 5.01)]

    served = simulate(ClusterConfig(make_instances(2, 1, engine=ENGINE)), specs)

    assert [each.prefill for each in served[2:]] == ["prefill-0", "prefill-1"]


def test_decodes_spread_over_instances() -> None:
    specs = [spec(number, 10, 200, 2.0 * number) for number in range(20)]

    served = simulate(ClusterConfig(make_instances(1, 2, engine=ENGINE)), specs)

    counts = [sum(each.decode == f"decode-{index}" for each in served) for index in range(2)]
    assert min(counts) >= 8


def test_whole_goes_where_least_is_waited_whatever_the_role() -> None:
    specs = [spec(0, 60, 2), spec(1, 10, 2, 0.01), spec(2, 10, 2, 0.02)]

    served = simulate(ClusterConfig(make_instances(1, 1, engine=ENGINE), "whole"), specs)

    assert [each.prefill for each in served] == ["prefill-0", "decode-0", "decode-0"]
    assert not any(each.is_split for each in served)


def test_replicas_are_chosen_without_reports() -> None:
    specs = [spec(0, 10, 50), *(spec(number, 10, 1, 3.0 * number) for number in range(1, 4))]

    replicas = make_instances(both=2, engine=engine(kind=Stock(64)))
    served = simulate(ClusterConfig(replicas, "least-in-flight"), specs)

    assert [each.prefill for each in served] == ["both-0", *["both-1"] * 3]


class _KeepsIt(SplitMode):
    """Changes its mind when a chunk is done."""

    def route(self, table: ClusterTable, spec: RequestSpec, now: float) -> Route:
        return Route(InstanceId("prefill-0"), InstanceId(""), "always")

    def dispatch(
        self, request: SimRequest, table: ClusterTable, now: float, *, may_wait: bool
    ) -> Dispatch | None:
        return Dispatch(request.prefill, "", "stays")


def test_a_mode_of_ones_own_may_keep_a_request_after_its_first_chunk() -> None:
    config = ClusterConfig(make_instances(1, 1, engine=engine(chunk_tokens=8)), _KeepsIt)

    (served,) = simulate(config, [spec(0, 20, 5)])

    assert (served.prefill, served.decode) == ("prefill-0", "prefill-0")
