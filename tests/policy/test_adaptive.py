"""Whole or split, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import COST, alone, known, serving, times
from vllm_tetri.policy import adaptive
from vllm_tetri.policy.adaptive import (
    Objective,
    PriceCandidates,
    PricedRoute,
    price_decode,
    price_route,
)
from vllm_tetri.policy.cluster import InstanceRow, Need
from vllm_tetri.types import InstanceId, InstanceView, Role, StepCoefficients

NOW = 100.0
USUAL = Need(512, 128)


def rows_of(*instances: InstanceView) -> list[InstanceRow]:
    return known(*instances).bases


def choose(
    *instances: InstanceView,
    prompt: int = 500,
    answer: float = 100,
    taken: Iterable[str] = (),
    may_split: bool = True,
    spares_prefill: bool = True,
    spares_decode: bool = False,
    **options: Any,
) -> PricedRoute | None:
    made = known(*instances)
    spares = {"spares_prefill": spares_prefill, "spares_decode": spares_decode}
    candidates = PriceCandidates(made.state, made.bases, USUAL, **spares)
    them = set(map(InstanceId, taken))
    return price_route(candidates, Need(prompt, answer), may_split=may_split, taken=them, **options)


def chosen(*instances: InstanceView, **options: Any) -> PricedRoute:
    place = choose(*instances, **options)
    assert place is not None
    return place


def where(*instances: InstanceView, **options: Any) -> tuple[str, str] | None:
    """Of the prompt and of the answer."""
    place = choose(*instances, **options)
    return None if place is None else (place.prefill, place.decode)


PREFILL, DECODE = serving("p", "prefill"), serving("d", "decode")
BUSY = serving("d", "decode", decodes=40)


# -- whole or split -------------------------------------------------------------------


@given(st.integers(1, 8000), st.floats(0, 4000))
def test_an_idle_cluster_serves_whole_because_a_hand_over_only_costs(
    prompt: int, answer: float
) -> None:
    assert where(PREFILL, DECODE, prompt=prompt, answer=answer) == ("d", "d")
    assert not chosen(serving("a"), serving("b"), prompt=prompt, answer=answer).is_split


@pytest.mark.parametrize(
    ("first", "may_split", "found"),
    [
        (PREFILL, True, ("p", "d")),
        (PREFILL, False, ("d", "d")),
        (serving("p", "prefill", queued_tokens=1_000_000), True, ("d", "d")),
        (serving("p", "prefill", handover_s=1000.0), True, ("d", "d")),
    ],
    ids=["idle", "may not", "long queue", "slow hand-over"],
)
def test_a_long_prompt_beside_many_decodes_is_split_where_that_pays(
    first: InstanceView, may_split: bool, found: tuple[str, str]
) -> None:
    assert where(first, BUSY, prompt=4000, may_split=may_split) == found


def test_in_split_mode_two_share_it_whatever_that_costs() -> None:
    assert where(PREFILL, DECODE, prefers_split=True) == ("p", "d")
    assert where(DECODE, prefers_split=True) == ("d", "d")
    foreign = serving("p", "prefill", layout="other")
    assert where(foreign, DECODE, prefers_split=True) == ("d", "d")


@pytest.mark.parametrize("prefers_split", [True, False])
def test_instances_that_exchange_kv_with_none_share_all_requests(prefers_split: bool) -> None:
    one, busy = alone("p", "prefill"), alone("d", "decode", queued_prefill_tokens=9000)
    assert where(one, busy, prefers_split=prefers_split) == ("p", "p")


def test_as_long_as_steps_are_guessed_a_split_must_gain_more() -> None:
    guessed = replace(COST, confidence=0.0)

    def splits(cost: StepCoefficients) -> set[int]:
        """Lengths of prompts that are split."""
        pair = serving("p", "prefill", cost=cost), serving("d", "decode", decodes=5, cost=cost)
        lengths = range(50, 8000, 50)
        return {n for n in lengths if where(*pair, prompt=n, answer=300) == ("p", "d")}

    assert splits(guessed) < splits(COST)


# -- which one ------------------------------------------------------------------------


def test_answers_avoid_prefill_instances_as_long_as_somebody_else_is_there() -> None:
    crowded = serving("d", "decode", decodes=200)
    assert chosen(PREFILL, crowded, prompt=10, answer=2000).decode == "d"
    assert where(PREFILL, crowded, prompt=10, answer=2000, taken=("d",)) == ("p", "p")
    assert where(PREFILL) == ("p", "p")
    assert where(PREFILL, crowded, spares_prefill=False, answer=2000) == ("p", "p")


def test_prompts_avoid_decode_instances_in_split_mode_unless_nobody_else_is_there() -> None:
    queued = serving("p", "prefill", queued_tokens=100_000)
    two = DECODE, serving("e", "decode")
    options: dict[str, Any] = {"prefers_split": True, "spares_decode": True}
    assert chosen(queued, *two, **options).prefill == "p"
    assert set(where(queued, *two, taken="p", **options) or ()) == {"d", "e"}


def test_two_prefill_instances_alone_serve_whole() -> None:
    assert where(serving("p", "prefill", queued_tokens=9000), serving("q", "prefill")) == ("q", "q")


def test_short_answers_go_where_they_begin_soon_and_long_ones_where_they_go_on_quickly() -> None:
    queue = serving("queue", queued_tokens=5000, waiting=19)
    decodes = serving("decodes", decodes=30)
    lengths = [1, 10, 100, 1000, 4000]
    found = [
        where(queue, decodes, prompt=20, answer=n, may_split=False, spares_prefill=False)
        for n in lengths
    ]
    assert found[0] == ("decodes", "decodes")
    assert found[-1] == ("queue", "queue")
    changes = sum(one != other for one, other in pairwise(found))
    assert changes == 1


def test_a_full_pool_is_waited_for_or_avoided() -> None:
    full = serving("full", decodes=1, left_tokens=3000, blocks_total=20)
    roomy = serving("roomy", decodes=3, left_tokens=3000)
    assert where(full, roomy) == ("roomy", "roomy")
    assert where(replace(full, load=replace(full.load, blocks_total=10_000)), roomy) == (
        "full",
        "full",
    )


def test_answers_on_one_device_gather_where_somebody_decodes_already() -> None:
    busy = serving("busy", device="x", decodes=8)
    idle = serving("idle", device="x")
    assert where(busy, idle) == ("busy", "busy")
    assert where(busy, serving("idle", device="y")) == ("idle", "idle")


def test_nobody_is_left_when_all_are_taken() -> None:
    assert where(PREFILL, DECODE, taken=("p", "d")) is None
    assert where() is None


def test_what_was_sent_since_the_last_report_spreads_requests() -> None:
    made = known(*(serving(name) for name in "abcd"))
    candidates = PriceCandidates(made.state, made.bases, USUAL)
    sent = Counter[str]()
    for _ in range(20):
        place = price_route(candidates, USUAL, may_split=True)
        assert place is not None
        made.send(place.prefill, place.decode, USUAL, NOW)
        sent[place.decode] += 1
    assert sent == {"a": 5, "b": 5, "c": 5, "d": 5}


# -- prefix caches ---------------------------------------------------------------------


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    cluster = [serving(name) for name in "abc"]
    held = {InstanceId("b"): 900, InstanceId("c"): 500}
    place = chosen(*cluster, prompt=1000, cached=held)
    assert (place.prefill, place.decode) == ("b", "b")
    assert place.ttft_s < 0.3 * chosen(*cluster, prompt=1000).ttft_s
    assert "900 tokens of 1000 cached" in place.reason


@given(st.integers(2, 4000), st.integers(1, 4000), st.integers(0, 20_000))
def test_a_cache_is_worth_exactly_what_it_saves(prompt: int, held: int, queued: int) -> None:
    """Without a cache elsewhere, the one with it is taken iff that is the cheaper place."""
    busy, idle = serving("a", queued_prefill_tokens=queued), serving("b")
    cached = {InstanceId("a"): held}
    place = chosen(busy, idle, prompt=prompt, cached=cached, may_split=False)
    costs = {
        name: chosen(one, prompt=prompt, cached=cached, may_split=False).ttft_s
        for name, one in (("a", busy), ("b", idle))
    }
    assert costs[place.prefill] <= min(costs.values()) * (1 + 1e-9)


def test_decodes_are_left_alone_if_what_is_not_cached_disturbs_them_more() -> None:
    busy = serving("d", "decode", decodes=40)
    assert where(PREFILL, busy, prompt=4000, cached={InstanceId("d"): 3990}) == ("d", "d")
    assert where(PREFILL, busy, prompt=4000, cached={InstanceId("d"): 500}) == ("p", "d")


def test_of_equal_decode_instances_the_one_that_holds_the_prompt_gets_it() -> None:
    slow = {"handover_s": 0.01, "handover_token_s": 1e-4}
    prefill = serving("p", "prefill", **slow)
    decodes = [serving(name, "decode", decodes=30) for name in ("d1", "d2", "d3")]
    for name in ("d1", "d2", "d3"):
        cached = {InstanceId(name): 400, InstanceId("p"): 3000}
        assert where(prefill, *decodes, prompt=4000, cached=cached) == ("p", name)


def test_holders_are_found_among_many() -> None:
    many = [serving(f"i{at}") for at in range(60)]
    assert where(*many, prompt=1000, cached={InstanceId("i59"): 900}) == ("i59", "i59")
    assert where(*many, prompt=1000, cached={InstanceId("gone"): 900}) is not None
    taken = where(*many, prompt=1000, cached={InstanceId("i59"): 900}, taken=["i59"])
    assert taken is not None
    assert "i59" not in taken


def test_a_long_prompt_waits_behind_no_other_to_leave_some_decodes_alone() -> None:
    quick = {"cost": StepCoefficients(0.007, 1.2e-5, 5e-8, 2e-5, 9e-10, confidence=1)}
    busy = serving("busy", queued_tokens=60_000, decodes=3, context_tokens=30_000, **quick)
    free = serving("free", decodes=5, context_tokens=50_000, **quick)
    assert where(busy, free, prompt=85_000, answer=300, may_split=False) == ("free", "free")


# -- what was promised ----------------------------------------------------------------


@pytest.mark.parametrize(("answer", "queued"), [(100, 700), (800, 1400)])
def test_a_place_that_keeps_the_first_token_s_promise_comes_before_a_cheaper_one(
    answer: int, queued: int
) -> None:
    pair = serving("cheap", queued_tokens=queued, waiting=9), serving("quick", decodes=30)
    options: dict[str, Any] = {"prompt": 20, "answer": answer, "may_split": False}
    late, soon = (chosen(each, **options).ttft_s for each in pair)
    assert soon < late < 60
    for ttft_s, name in ((inf, "cheap"), (60, "cheap"), ((soon + late) / 2, "quick")):
        assert where(*pair, objective=Objective(ttft_s=ttft_s), **options) == (name, name)


def test_a_place_that_keeps_the_pace_comes_before_a_cheaper_one() -> None:
    pair = serving("cheap", decodes=30, left_tokens=20), serving("steady", queued_tokens=7000)
    options: dict[str, Any] = {"prompt": 20, "answer": 60, "may_split": False}
    slow, quick = (chosen(each, **options).tpot_s for each in pair)
    assert quick < slow
    for tpot_s, name in ((inf, "cheap"), (1, "cheap"), ((quick + slow) / 2, "steady")):
        assert where(*pair, objective=Objective(tpot_s=tpot_s), **options) == (name, name)


def test_where_nobody_keeps_a_promise_the_least_late_is_taken() -> None:
    many = [serving(f"q{n}", queued_tokens=n * 5000) for n in (3, 1, 2)]
    assert where(*many, objective=Objective(ttft_s=0.001)) == ("q1", "q1")


# -- what a place says of itself ------------------------------------------------------


def test_a_place_says_what_is_expected_there() -> None:
    place = chosen(PREFILL, BUSY, prompt=4000)
    p, d = rows_of(PREFILL, BUSY)
    assert place.ttft_s == adaptive.ttft_s(p, 4000)
    assert place.tpot_s == adaptive.tpot_s(d, 4050)
    assert place.is_split
    assert (place.waits, place.shares, place.confidence) == (False, True, 1.0)


def test_a_place_says_whether_others_are_in_the_way_and_what_is_a_guess() -> None:
    guessed = serving("d", "decode", cost=replace(COST, confidence=0.1))
    idle, queued = chosen(guessed), chosen(serving("d", "decode", queued_tokens=10))
    assert (idle.waits, idle.shares, idle.confidence) == (False, False, 0.1)
    assert (queued.waits, queued.shares, queued.confidence) == (True, False, 1.0)


# -- again, when part of the prompt is computed ---------------------------------------


def again(
    *instances: InstanceView, at: str | None, prompt: int = 500, answer: float = 100, **options: Any
) -> str | None:
    sites = rows_of(*instances)
    here = next((site for site in sites if site.id == at), None)
    chosen = price_decode(sites, Need(prompt, answer), at=here, **options)
    return None if chosen is None else chosen[0]


def test_an_answer_stays_where_its_prompt_is_if_that_is_as_good() -> None:
    assert again(serving("a"), serving("b"), at="b") == "b"
    assert again(serving("a", decodes=3), serving("b", decodes=3), at="b") == "b"
    assert again(serving("b"), at="b") == "b"


def test_an_answer_goes_where_fewer_decode() -> None:
    busy = serving("a", decodes=30)
    assert again(busy, serving("b"), at="a") == "b"
    assert again(busy, serving("b", handover_token_s=1.0), at="a") == "b"  # what counts is a's
    assert again(serving("a", decodes=30, handover_token_s=1.0), serving("b"), at="a") == "a"
    # A second leg is needed either way.
    assert again(serving("a", decodes=30, handover_s=50.0), serving("b"), at="a") == "b"


def test_only_what_is_left_of_an_answer_makes_a_move_worth_it() -> None:
    pair = serving("a", decodes=2, handover_token_s=2e-5), serving("b")
    assert again(*pair, at="a", answer=1) == "a"
    assert again(*pair, at="a", answer=1000) == "b"


def test_a_prompt_that_may_not_stay_goes_to_the_cheapest() -> None:
    assert again(serving("a", decodes=9), serving("b", decodes=2), at=None) == "b"
    assert again(at=None) is None


# -- many -----------------------------------------------------------------------------


def test_the_best_of_many_is_found_though_few_are_looked_at() -> None:
    many = [serving(f"d{n}", "decode", decodes=30 + n % 7) for n in range(60)]
    for free in (0, 31, 59):
        some = list(many)
        some[free] = serving(f"d{free}", "decode")
        assert where(*some) == (f"d{free}", f"d{free}")


def test_of_many_any_that_is_not_taken_is_found() -> None:
    many = [serving(f"d{n}", "decode", decodes=n) for n in range(40)]
    taken = tuple(f"d{n}" for n in range(40) if n != 37)
    assert where(*many, taken=taken) == ("d37", "d37")
    assert where(*many, taken=(*taken, "d37")) is None


def test_when_all_that_decode_are_taken_one_of_many_prefill_instances_answers() -> None:
    many = [serving(f"{role[0]}{n}", role) for role in ("prefill", "decode") for n in range(20)]
    assert chosen(*many).decode.startswith("d")
    assert chosen(*many, taken=[f"d{n}" for n in range(20)]).decode.startswith("p")


# -- whatever the cluster -------------------------------------------------------------

coefficients = st.builds(
    lambda scale, confidence: replace(times(COST, scale), confidence=confidence),
    st.floats(0.05, 20),
    st.floats(0, 1),
)
instances = st.builds(
    serving,
    st.sampled_from([f"i{n}" for n in range(8)]),
    st.sampled_from(list(Role)),
    decodes=st.integers(0, 80),
    left_tokens=st.integers(0, 2000),
    context_tokens=st.integers(1, 4000),
    queued_tokens=st.integers(0, 50_000),
    cost=coefficients,
    layout=st.sampled_from("ab"),
    device=st.sampled_from(["", "x", "y"]),
    blocks_total=st.integers(1, 1000),
    chunk_tokens=st.sampled_from([0, 256, 2048]),
    handover_s=st.floats(0, 0.5),
    handover_token_s=st.floats(0, 1e-3),
)
clusters = st.lists(instances, unique_by=lambda each: each.info.id, max_size=8)
asks = st.builds(Need, st.integers(1, 20_000), st.floats(1, 5000))
objectives = st.builds(
    Objective, st.sampled_from([0.01, 0.5, 5.0, inf]), st.sampled_from([0.001, 0.05, inf])
)


def placed(many: list[InstanceView], ask: Need, **options: Any) -> PricedRoute | None:
    return choose(*many, prompt=ask.prompt_tokens, answer=ask.output_tokens, **options)


@given(clusters, asks, objectives)
def test_nothing_whole_among_those_who_may_answer_is_cheaper(
    many: list[InstanceView], ask: Need, objective: Objective
) -> None:
    place = placed(many, ask, objective=objective)
    if not many:
        assert place is None
        return
    assert place is not None
    answering = [each.info.id for each in many if each.info.role is not Role.PREFILL]
    answering = answering or [each.info.id for each in many]
    assert place.decode in answering
    for name in answering:
        assert place.cost_s <= _whole_s(many, name, ask, objective) * (1 + 1e-9)


def _whole_s(many: list[InstanceView], name: str, ask: Need, objective: Objective) -> float:
    """What serving it there whole costs, written down anew: the sums of docs/modes.md."""
    sites = {site.id: site for site in rows_of(*many)}
    answering = [s for s in sites.values() if s.role is not Role.PREFILL] or list(sites.values())
    site, tokens = sites[InstanceId(name)], ask.output_tokens
    context = ask.prompt_tokens + tokens / 2
    least_ttft_s = min(adaptive.ttft_s(each, ask.prompt_tokens) for each in sites.values())
    least_answer_s = tokens * min(adaptive.tpot_s(each, context) for each in answering)
    usual_s, best = min((adaptive.ttft_s(each, USUAL[0]), each.id) for each in sites.values())
    answer_s = USUAL[1] * adaptive.tpot_s(sites[best], USUAL[0] + USUAL[1] / 2)
    parts = least_answer_s / least_ttft_s, answer_s / usual_s
    weight = 1 + min(50, 0.8 * (1 + max(parts)))
    ttft_s = adaptive.ttft_s(site, ask.prompt_tokens)
    tpot_s = adaptive.tpot_s(site, context)
    cost_s = weight * ttft_s + adaptive.prefill_harm_s(site, ask.prompt_tokens)
    cost_s += tokens * tpot_s + adaptive.decode_harm_s(site, ask)
    cost_s += 20 * max(0, ttft_s - objective.ttft_s) + 20 * tokens * max(
        0, tpot_s - objective.tpot_s
    )
    if site.decodes and objective.tpot_s < inf:
        step_s = site.step_s * (1 + site.busy_others) / (1 - site.prompt_share)
        pause_s = ask.prompt_tokens * site.token_s(ask.prompt_tokens)
        late_s = step_s + pause_s / max(1, 2 * site.left_tokens) - objective.tpot_s
        cost_s += 20 * max(0, late_s) * 2 * site.remaining_tokens
    missing_tokens = max(0, ask.prompt_tokens + tokens - site.free_tokens)
    used_tokens = max(1, site.block_size * site.view.load.blocks_total - site.free_tokens)
    steps = max(
        min(missing_tokens, site.left_tokens), 2 * site.left_tokens * missing_tokens / used_tokens
    )
    return cost_s + (1 + weight) * steps * tpot_s


@given(clusters, asks, st.sets(st.sampled_from([f"i{n}" for n in range(8)])), st.booleans())
def test_nobody_taken_and_no_pair_of_two_identities_is_ever_chosen(
    many: list[InstanceView], ask: Need, taken: set[str], prefers_split: bool
) -> None:
    place = placed(many, ask, taken=tuple(taken), prefers_split=prefers_split)
    free = {each.info.id: each for each in many if each.info.id not in taken}
    assert (place is None) == (not free)
    if place is not None:
        assert {place.prefill, place.decode} <= set(free)
        assert free[place.prefill].info.identity == free[place.decode].info.identity


@given(clusters, asks)
def test_a_split_is_better_by_more_than_noise(many: list[InstanceView], ask: Need) -> None:
    place, whole = placed(many, ask), placed(many, ask, may_split=False)
    if place is not None and place.is_split:
        assert whole is not None
        assert place.cost_s < whole.cost_s * 0.95


def scaled(one: InstanceView, factor: float) -> InstanceView:
    """An instance that takes so much longer for everything."""
    load = one.load
    slower: dict[str, Any] = {"cost": times(load.cost, factor)}
    for name in ("handover_s", "handover_token_s"):
        slower[name] = getattr(load, name) * factor
    return replace(one, load=replace(load, **slower))


@given(clusters.filter(len), asks, objectives)
def test_choices_do_not_depend_on_how_quick_all_are(
    many: list[InstanceView], ask: Need, objective: Objective
) -> None:
    # Times 16, so that no rounding decides between equal places.
    slower = Objective(objective.ttft_s * 16, objective.tpot_s * 16)
    place = placed(many, ask, objective=objective)
    other = placed([scaled(each, 16) for each in many], ask, objective=slower)
    assert place is not None
    assert other is not None
    assert (other.prefill, other.decode) == (place.prefill, place.decode)
    assert other.cost_s == pytest.approx(place.cost_s * 16)


@given(clusters, asks, st.sampled_from([f"i{n}" for n in range(8)]))
def test_the_second_choice_is_somebody_of_those_with_room_or_stays(
    many: list[InstanceView], ask: Need, at: str
) -> None:
    chosen = again(*many, at=at, prompt=ask.prompt_tokens, answer=ask.output_tokens)
    names = {each.info.id for each in many}
    assert (chosen is None) == (not names)
    assert chosen is None or chosen in names
