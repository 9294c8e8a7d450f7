"""A prefix is fetched where that is cheaper than computing it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.policy.builders import alone, known, serving
from vllm_tetri.policy.adaptive import ttft_s
from vllm_tetri.policy.cluster import InstanceRow
from vllm_tetri.policy.fetch import FetchPlan, Prefix, fetch_s
from vllm_tetri.policy.route import Route, RouteCandidates, choose_route
from vllm_tetri.types import InstanceId, InstanceView

A, B, C = map(InstanceId, "abc")
SLOW = {"handover_s": 0.5, "handover_token_s": 1e-3}


def held_of(tokens: dict[str, int]) -> dict[InstanceId, int]:
    return {InstanceId(name): each for name, each in tokens.items()}


def rows_of(*instances: InstanceView) -> dict[InstanceId, InstanceRow]:
    return {row.id: row for row in known(*instances).bases}


def plan(*instances: InstanceView, prompt: int = 1000, at: InstanceId = A, **cached: int) -> Any:
    rows, held = rows_of(*instances), held_of(cached)
    return Prefix(prompt, held, [rows[name] for name in held]).plan(rows[at])


@given(
    prompt=st.integers(1, 4000),
    here=st.integers(0, 4000),
    there=st.integers(0, 4000),
    queued=st.integers(0, 8000),
    base_s=st.floats(0, 1),
    token_s=st.floats(0, 1e-3),
)
def test_a_fetch_is_never_dearer_than_computing(
    prompt: int, here: int, there: int, queued: int, base_s: float, token_s: float
) -> None:
    holder = serving(
        "b", queued_tokens=queued, decodes=queued % 7, handover_s=base_s, handover_token_s=token_s
    )
    rows = rows_of(serving("a"), holder)
    prefix = Prefix(prompt, {A: here, B: there}, list(rows.values()))
    found = prefix.plan(rows[A])
    if found is None:
        assert prefix.reach(rows[A]) == here
        return
    assert (found.holder, found.tokens) == (B, min(there, prompt - 1))
    assert here < found.tokens < prompt
    with_it = found.seconds + ttft_s(rows[A], prompt, found.tokens)
    assert with_it < ttft_s(rows[A], prompt, here)
    assert here < prefix.reach(rows[A]) <= found.tokens
    assert found.seconds == pytest.approx(fetch_s(rows[B], found.tokens - here))
    assert found.wait_s >= max(1.0, found.seconds)


@given(st.integers(17, 4000), st.integers(0, 4000))
def test_the_more_is_held_elsewhere_the_more_it_is_worth(prompt: int, more: int) -> None:
    rows = rows_of(serving("a"), serving("b"))
    reached = [
        Prefix(prompt, {B: min(held, prompt)}, list(rows.values())).reach(rows[A])
        for held in (prompt // 2, prompt // 2 + more)
    ]
    assert reached[0] <= reached[1] * (1 + 1e-9)


def test_the_best_holder_is_not_always_the_one_with_most() -> None:
    slow = serving("b", decodes=60, context_tokens=3000)
    assert plan(serving("a"), slow, serving("c"), b=950, c=900).holder == C
    assert plan(serving("a"), serving("b"), serving("c"), b=950, c=900).holder == B


def test_a_queue_at_the_holder_is_not_waited_for() -> None:
    quick, queued = (plan(serving("a"), serving("b", queued_tokens=each), b=900) for each in
                     (4096, 40_960))  # fmt: skip
    assert quick.seconds == queued.seconds


@pytest.mark.parametrize("other", [
    serving("b", layout="other"), alone("b", "both"), serving("b", **SLOW),
])  # fmt: skip
def test_nothing_is_fetched(other: InstanceView) -> None:
    assert plan(serving("a"), other, b=900) is None
    assert plan(other, serving("a"), at=B, a=16) is None
    assert plan(serving("a"), serving("b"), a=900, b=900) is None
    assert plan(serving("a"), serving("b"), prompt=1, b=900) is None


def route(*instances: InstanceView, **cached: int) -> Route:
    made, held = known(*instances), held_of(cached)
    prefix = Prefix(2000, held, [made.by_id[name] for name in held])
    candidates = RouteCandidates(made.state, made.bases)
    found = choose_route(candidates, may_split=True, cached=held, reach=prefix.reach)
    assert isinstance(found, Route)
    return found


def test_a_prompt_goes_to_an_idle_instance_sooner_if_that_can_fetch() -> None:
    def cluster(queued: int, **load: Any) -> list[InstanceView]:
        holder = serving("a", "prefill", queued_tokens=queued, **load)
        return [holder, serving("b", "prefill"), serving("d", "decode")]

    assert route(*cluster(0), a=1900).prefill == A
    assert route(*cluster(1000), a=1900).prefill == B
    assert route(*cluster(1000, **SLOW), a=1900).prefill == A
    assert route(*cluster(3000, **SLOW), a=1900).prefill == B


@example([(0, 0), (1, 5), (1, 1)])
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), min_size=1, max_size=5))
def test_a_prompt_goes_where_least_is_left_to_compute(loads: list[tuple[int, int]]) -> None:
    instances = [
        serving(f"p{number}", "prefill", queued_tokens=400 * queued)
        for number, (queued, _) in enumerate(loads)
    ]
    held = {f"p{number}": 400 * each for number, (_, each) in enumerate(loads) if each}
    made = known(*instances, serving("d", "decode"))
    prefix = Prefix(2000, held_of(held), [made.by_id[InstanceId(name)] for name in held])
    idlest = min(made.bases[:-1], key=lambda row: row.queued_tokens)
    left = {
        row.id: row.queued_tokens - (prefix.reach(row) if row is idlest else held.get(row.id, 0))
        for row in made.bases[:-1]
    }
    assert left[route(*instances, serving("d", "decode"), **held).prefill] == min(left.values())


def test_plans_say_how_long_they_are_worth_waiting_for() -> None:
    assert FetchPlan(A, 100, 0.01, 50).wait_s == 1.0
    assert FetchPlan(A, 100, 2.0, 50).wait_s > 4.0


@pytest.mark.parametrize("changes", [{"alone": "it is multimodal"}, {"kv_endpoint": ""}])
def test_nothing_is_fetched_from_instances_that_hand_nothing_over(changes: Any) -> None:
    holder = serving("b")
    assert plan(serving("a"), holder, b=900) is not None
    assert plan(serving("a"), replace(holder, info=replace(holder.info, **changes)), b=900) is None
