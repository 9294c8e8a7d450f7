"""How many instances a load needs, and when one is started or drained."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import instance, view
from vllm_tetri.policy.balance import Look
from vllm_tetri.policy.scale import (
    DRAIN_AFTER_S,
    LEAST_BUSY,
    MOST_BUSY,
    START_AFTER_S,
    Bounds,
    Scale,
    missing,
)
from vllm_tetri.policy.watcher import Watcher, WatchPolicy
from vllm_tetri.types import InstanceView, Role, StepCoefficients

P, D = Role.PREFILL, Role.DECODE
LOOK_S = 0.25
COST = StepCoefficients(base_s=0.013, request_s=0.004, prompt_s=1 / 1500)
FOUR = {P: Bounds(1, 4), D: Bounds(1, 4)}

ranges = st.tuples(st.integers(1, 6), st.integers(0, 6)).map(lambda two: Bounds(two[0], sum(two)))
demands = st.fixed_dictionaries({P: st.floats(0, 12), D: st.floats(0, 12)})


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[Role, Bounds], dict[Role, int]]:
    bounds = {role: draw(ranges) for role in (P, D)}
    return bounds, {
        role: draw(st.integers(each.least, int(each.most))) for role, each in bounds.items()
    }


def changes(
    scale: Scale, demand: dict[Role, float], counts: dict[Role, int], for_s: float
) -> list[tuple[float, Role, int]]:
    """What it asks for, which is done at once."""
    found, now = [], 0.0
    while now < for_s:
        now += LOOK_S
        if (wanted := scale.look(demand, counts, now)) is not None:
            counts[wanted[0]] += wanted[1]
            found.append((now, *wanted))
    return found


@given(clusters(), demands)
def test_a_constant_load_is_followed_one_way_within_bounds_and_then_all_rests(
    cluster: tuple[dict[Role, Bounds], dict[Role, int]], demand: dict[Role, float]
) -> None:
    bounds, counts = cluster
    scale = Scale(bounds)
    found = changes(scale, demand, counts, 12 * DRAIN_AFTER_S)
    assert len({number for _, _, number in found}) <= 1
    assert all(each.least <= counts[role] <= each.most for role, each in bounds.items())
    assert missing(demand, counts, bounds) is None


@given(clusters(), demands)
def test_a_start_is_not_taken_back_by_flips_nor_by_a_little_less_load(
    cluster: tuple[dict[Role, Bounds], dict[Role, int]], demand: dict[Role, float]
) -> None:
    bounds, counts = cluster
    has_started = False
    while (wanted := missing(demand, counts, bounds)) is not None and wanted[1] > 0:
        counts[wanted[0]] += 1
        has_started = True
    less = {role: each * (LEAST_BUSY / MOST_BUSY + 0.01) for role, each in demand.items()}
    assert not has_started or missing(less, counts, bounds) is None
    # A flip changes no total, so that nothing is started or drained for it.
    for role, other in ((P, D), (D, P)):
        flipped = {role: counts[role] - 1, other: counts[other] + 1}
        if all(each.least <= flipped[kind] <= each.most for kind, each in bounds.items()):
            first, second = (missing(demand, each, bounds) for each in (counts, flipped))
            assert (first and first[1]) == (second and second[1])


def test_a_role_that_has_a_request_now_and_then_loses_instances() -> None:
    scale, loads = Scale({P: Bounds(1, 4), D: Bounds(1, 4)}), ({P: 0.0, D: 0.0}, None)
    found = [scale.look(loads[step % 8 < 2], {P: 4, D: 4}, step * LOOK_S) for step in range(1000)]
    assert any(found)


def test_a_change_has_to_be_right_for_a_while_with_the_same_instances() -> None:
    found = changes(Scale(FOUR), {P: 2.0, D: 0.5}, {P: 1, D: 1}, 100.0)
    assert [(role, number) for _, role, number in found] == [(P, 1), (P, 1)]
    assert found[0][0] == pytest.approx(START_AFTER_S, abs=2 * LOOK_S)
    assert found[1][0] - found[0][0] >= START_AFTER_S
    scale, burst, calm = Scale(FOUR), {P: 2.0, D: 0.5}, {P: 0.5, D: 0.5}
    for step in range(400):  # bursts that are over sooner
        demand = burst if step * LOOK_S % (START_AFTER_S + 2) < START_AFTER_S - 1 else calm
        assert scale.look(demand, {P: 1, D: 1}, step * LOOK_S) is None


def test_draining_takes_longer_and_an_unknown_load_drains_nothing() -> None:
    found = changes(Scale(FOUR), {P: 0.1, D: 0.1}, {P: 2, D: 1}, 100.0)
    assert [(role, number) for _, role, number in found] == [(P, -1)]
    assert found[0][0] == pytest.approx(DRAIN_AFTER_S, abs=2 * LOOK_S)
    scale = Scale(FOUR)
    assert not any(scale.look(None, {P: 4, D: 4}, step * LOOK_S) for step in range(1000))


@pytest.mark.parametrize(
    ("demand", "counts", "expected"),
    [
        ({P: 1.5, D: 0.2}, {P: 1, D: 2}, None),  # a flip does
        ({P: 1.5, D: 1.5}, {P: 1, D: 2}, (P, 1)),
        ({P: 0.7, D: 3.1}, {P: 2, D: 2}, (D, 1)),
        ({P: 0.0, D: 0.0}, {P: 1, D: 2}, (D, -1)),
        ({P: 9.0, D: 9.0}, {P: 4, D: 4}, None),  # bounds
        ({P: 0.0, D: 0.0}, {P: 1, D: 1}, None),
    ],
)
def test_roles_flip_before_instances_start(
    demand: dict[Role, float], counts: dict[Role, int], expected: tuple[Role, int] | None
) -> None:
    assert missing(demand, counts, FOUR) == expected


@pytest.mark.parametrize("text", ["", "x", "2:1", "0:2", "-1", "1:2:3", ":3", "1:"])
def test_bounds_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Bounds.parse(text)


def test_bounds_are_written_as_they_are_read() -> None:
    assert [str(Bounds.parse(text)) for text in ("0", "3", "1:4")] == ["0", "3", "1:4"]


def looks(
    made: Watcher, instances: list[InstanceView], for_s: float, per_s: float, begin_s: float = 0.0
) -> list[Look]:
    """The looks of a while in which prompts of 1,000 tokens and outputs of 100 come."""
    found = []
    for step in range(int(for_s / LOOK_S)):
        done = int(step * LOOK_S * per_s / max(1, len(instances) // 2))
        seen = [
            replace(
                each,
                seq=step + 1,
                load=replace(
                    each.load,
                    prefills_done=done * (each.info.role is P),
                    prompt_tokens_done=1000 * done * (each.info.role is P),
                    output_tokens_done=1 + 100 * done * (each.info.role is D),
                ),
            )
            for each in instances
        ]
        found.append(made.look(view(*seen), begin_s + step * LOOK_S))
    return found


def made(name: str, role: str, state: str = "ready") -> InstanceView:
    return instance(name, role, state=state, cost=COST, chunk_tokens=512, blocks_total=1250)


def test_the_watcher_asks_for_an_instance_and_for_the_drain_of_the_least_loaded() -> None:
    watcher = Watcher(WatchPolicy.BALANCE, bounds={P: Bounds(1, 3), D: Bounds(1, 3)})
    two = [made("p", "prefill"), made("d", "decode")]
    *_, last = looks(watcher, two, 40.0, per_s=1.4)
    (change,) = last.changes
    assert (change.role, change.drained) == (P, None)
    three = [*two, made("q", "prefill")]
    idle = looks(watcher, three, 3 * DRAIN_AFTER_S, per_s=0.0, begin_s=40.0)
    asked = [change for each in idle for change in each.changes]
    assert {(each.role, each.drained) for each in asked} == {(P, "p")}
    # While something starts or ends there, nothing else does.
    waiting = looks(watcher, [*two, made("q", "prefill", "starting")], 200.0, 1.4, begin_s=300.0)
    assert not any(each.changes for each in waiting)
    unbound = looks(Watcher(WatchPolicy.BALANCE), two, 40.0, per_s=1.4)
    assert not any(each.changes for each in unbound)
