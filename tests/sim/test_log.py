"""The log of a simulation."""

from __future__ import annotations

from tests.sim.builders import ENGINE, decisions, engine, pair, spec
from vllm_tetri.policy.overload import Late
from vllm_tetri.policy.route import Route
from vllm_tetri.sim.config import ClusterConfig, make_instances
from vllm_tetri.sim.log import DecodeChosen, Held, RefusedLate, Routed
from vllm_tetri.sim.modes import RoundRobin
from vllm_tetri.sim.snapshot import SimSnapshot
from vllm_tetri.sim.workload import RequestSpec
from vllm_tetri.types import InstanceId


class _RefusesLong(RoundRobin):
    def route(self, snapshot: SimSnapshot, spec: RequestSpec, now: float) -> Route | Late:  # type: ignore[override]
        if spec.prompt_tokens > 50:
            return Late("too long", 3)
        return super().route(snapshot, spec, now)


def test_every_request_is_logged_as_routed_or_as_refused_with_the_reason() -> None:
    config = ClusterConfig(make_instances(both=1, engine=ENGINE), _RefusesLong)

    found = decisions(config, [spec(0, 9, 2), spec(1, 90, 2, 0.1), spec(2, 9, 2, 0.2)])

    assert [each for each in found if isinstance(each, RefusedLate)] == [
        RefusedLate(1, "too long", 3)
    ]
    assert [each.request for each in found if isinstance(each, Routed)] == [0, 2]


def test_kv_that_finds_the_arena_full_is_logged() -> None:
    decode = engine(kv_blocks=3, arena_tokens=20)
    specs = [spec(number, 20, 20) for number in range(4)]

    found = decisions(pair(decode=decode, chunk_tokens=20), specs)

    # The arena has room for one: when the second comes, the first is in its first step there.
    held = [each for each in found if isinstance(each, Held)]
    assert held == [Held(number, InstanceId("d")) for number in (1, 2, 3)]
    for each in held:
        assert found.index(DecodeChosen(each.request, each.at)) < found.index(each)
    assert not any(isinstance(each, Held) for each in decisions(pair(), specs))
