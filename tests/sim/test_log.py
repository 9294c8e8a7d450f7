"""What a simulation tells of its decisions."""

from __future__ import annotations

from collections.abc import Sequence

from tests.sim.builders import SHAPE, ask, pair, shape
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.sim.cluster import Outcome, run
from vllm_tetri.sim.log import Decision, Dispatched, Held, Refusal, Routed
from vllm_tetri.sim.setting import Place, Setting, places
from vllm_tetri.sim.workload import Ask
from vllm_tetri.types import InstanceId, Role


def told(setting: Setting, asks: Sequence[Ask]) -> tuple[Outcome, list[Decision]]:
    found: list[Decision] = []
    return run(setting, asks, log=found.append), found


def refusals(decisions: Sequence[Decision]) -> list[Refusal]:
    return [each for each in decisions if isinstance(each, Refusal)]


def test_every_request_is_routed_or_refused_and_the_reason_is_told() -> None:
    burst = [ask(number, 500, 5, 0.05 * number) for number in range(40)]
    setting = Setting(places(1, 1), "mooncake", objective=Objective(2.0, 0.1))

    outcome, decisions = told(setting, burst)

    found = refusals(decisions)
    assert len(found) > 20
    assert [(each.request, each.reason) for each in found] == [
        (each.ask.id, each.reason) for each in outcome.refused
    ]
    assert all("first token expected in" in each.reason for each in found)
    assert all(each.retry_after_s >= 1 for each in found)
    routed = [each.request for each in decisions if isinstance(each, Routed)]
    assert sorted(routed + [each.request for each in found]) == list(range(40))


def test_a_refusal_for_want_of_room_is_told() -> None:
    cluster = (
        Place(InstanceId("p"), Role.PREFILL, SHAPE),
        Place(InstanceId("d"), Role.DECODE, shape(kv_blocks=10, chunk_tokens=8)),
    )
    asks = [ask(number, 60, 80, 2.5 * number) for number in range(6)]

    _, decisions = told(Setting(cluster, "mooncake"), asks)

    reasons = {each.reason for each in refusals(decisions)}
    assert reasons == {"no decode instance has room for its KV"}


def test_kv_that_finds_the_arena_full_is_told() -> None:
    decode = shape(kv_blocks=3, arena_tokens=20)
    asks = [ask(number, 20, 20) for number in range(4)]

    _, decisions = told(pair(decode=decode, chunk_tokens=20), asks)

    # The arena has room for one: when the second comes, the first is in its first step there.
    held = [each for each in decisions if isinstance(each, Held)]
    assert held == [Held(number, InstanceId("d")) for number in (1, 2, 3)]
    for each in held:
        assert decisions.index(Dispatched(each.request, each.at)) < decisions.index(each)


def test_nothing_is_told_of_where_there_is_room() -> None:
    asks = [ask(number, 20, 20) for number in range(4)]

    _, decisions = told(pair(), asks)

    assert not any(isinstance(each, Held | Refusal) for each in decisions)
