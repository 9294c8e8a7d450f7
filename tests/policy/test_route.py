from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import alone, info, instance, known, view
from vllm_tetri.policy.cluster import Need
from vllm_tetri.policy.route import (
    ENDED,
    TRANSITIONS,
    AllAtLimit,
    Event,
    Phase,
    Route,
    RouteCandidates,
    advance,
    apart,
    choose_keeper,
    choose_route,
)
from vllm_tetri.types import ClusterView, InstanceId, InstanceInfo, InstanceView


def route(
    *instances: InstanceView,
    may_split: bool = True,
    own: dict[str, int] | None = None,
    excluded: tuple[str, ...] = (),
    refused: tuple[str, ...] = (),
    at_limit: tuple[str, ...] = (),
    model: str = "tiny",
) -> Route | AllAtLimit | None:
    made = known(*instances)
    for name, tokens in (own or {}).items():
        made.send(InstanceId(name), None, Need(tokens, 0), 100.0)
    return choose_route(
        RouteCandidates(made.state, made.by_model.get(model, ())),
        may_split=may_split,
        excluded=frozenset(map(InstanceId, excluded)),
        refused=frozenset(map(InstanceId, refused)),
        at_limit=frozenset(map(InstanceId, at_limit)),
    )


def target(*instances: InstanceView, **options) -> tuple[str, ...] | None:
    match route(*instances, **options):
        case Route(prefill=prefill) as found:
            return "split" if found.is_split else "whole", prefill
        case AllAtLimit(instances=them):
            return "full", *them
    return None


PREFILL = instance("p", "prefill")
DECODE = instance("d", "decode")
BOTH = instance("b", "both")


def test_a_pair_splits() -> None:
    assert target(PREFILL, DECODE) == ("split", "p")
    assert target(PREFILL, BOTH) == ("split", "p")
    assert target(BOTH, DECODE) == ("split", "b")
    assert target(BOTH, instance("c", "both")) == ("split", "b")


def test_no_pair_is_served_whole_by_who_is_there() -> None:
    assert target(BOTH) == ("whole", "b")
    assert target(DECODE) == ("whole", "d")
    assert target(PREFILL) == ("whole", "p")
    assert target(PREFILL, instance("q", "prefill")) == ("whole", "p")
    assert target() is None


def test_what_cannot_be_split_prefers_both_then_decode_then_prefill() -> None:
    assert target(PREFILL, DECODE, BOTH, may_split=False) == ("whole", "b")
    assert target(PREFILL, DECODE, may_split=False) == ("whole", "d")
    assert target(PREFILL, may_split=False) == ("whole", "p")


def test_layouts_that_differ_do_not_make_a_pair() -> None:
    assert target(PREFILL, instance("d", "decode", layout="b")) == ("whole", "d")


def test_only_ready_instances_that_serve_the_model_count() -> None:
    for state in ("silent", "draining"):
        assert target(PREFILL, instance("d", "decode", state=state)) == ("whole", "p")
    assert target(PREFILL, instance("d", "decode", model="huge")) == ("whole", "p")
    assert target(instance("p", "prefill", state="starting")) is None
    assert target(PREFILL, DECODE, model="huge") is None


def test_an_instance_that_failed_is_not_asked_again() -> None:
    assert target(PREFILL, DECODE, BOTH, excluded=("p",)) == ("split", "b")
    assert target(PREFILL, DECODE, excluded=("d",)) == ("whole", "p")
    assert target(PREFILL, excluded=("p",)) is None


def test_the_next_prefill_instance_is_asked_when_one_is_full() -> None:
    many = PREFILL, instance("q", "prefill", queued_prefill_tokens=9), BOTH, DECODE
    assert target(*many, refused=("p", "b")) == ("split", "q")
    assert target(*many, refused=("p", "q")) == ("split", "b")


def test_full_prefill_instances_never_send_a_prompt_to_a_decode_instance() -> None:
    assert target(PREFILL, DECODE, refused=("p",)) == ("full", "p")
    assert target(PREFILL, DECODE, BOTH, refused=("p", "b")) == ("full", "p", "b")
    # One failed, the other is full: still no reason to disturb decoding.
    two = PREFILL, instance("q", "prefill")
    assert target(*two, DECODE, excluded=("q",), refused=("p",)) == ("full", "p")


def test_one_with_as_many_requests_as_it_may_have_is_passed_over() -> None:
    two = PREFILL, instance("q", "prefill", queued_prefill_tokens=9)
    assert target(*two, DECODE, at_limit=("p",)) == ("split", "q")
    assert target(*two, DECODE, at_limit=("p",), refused=("q",)) == ("full", "p", "q")
    assert target(BOTH, instance("c", "both"), may_split=False, at_limit=("b",)) == ("whole", "c")
    assert target(BOTH, may_split=False, at_limit=("b",)) == ("full", "b")


def test_prompts_wait_outside_while_all_that_decode_are_crowded() -> None:
    two = DECODE, instance("e", "decode")
    assert target(PREFILL, *two, at_limit=("d",)) == ("split", "p")
    assert target(PREFILL, *two, at_limit=("d", "e")) == ("full", "d", "e")
    # A decode instance that was busy once is asked again by who holds KV for it.
    assert target(PREFILL, *two, refused=("d", "e")) == ("split", "p")


def test_identities_pair_up_each_with_its_own() -> None:
    other = instance("p2", "prefill", layout="b"), instance("d2", "decode", layout="b")
    assert target(PREFILL, *other, DECODE, excluded=("p",)) == ("split", "p2")
    assert target(PREFILL, *other, DECODE, excluded=("d2",)) == ("split", "p")
    assert target(instance("x", layout="c"), *other, excluded=("p2",)) == ("whole", "x")


def test_who_differs_from_most_is_told_from_whom_and_in_what() -> None:
    def one(name: str, source: str, model: str = "tiny", **identity: str) -> InstanceInfo:
        return replace(info(name, model=model), identity=identity, checkpoint=source)

    base = [one(name, "o/base@1", weights="ab", isa="avx2") for name in ("d0", "d1")]
    equal = one("p0", "o/copy@2", weights="ab", isa="avx2")
    assert apart([*base, equal]) == {}
    tuned = one("p1", "o/instruct@3", weights="cd", isa="avx2")
    elsewhere = one("p2", "o/base@1", weights="ab")
    stranger = one("p3", "o/other@1", "big", weights="ef")
    found = apart([elsewhere, tuned, stranger, *base])
    assert found == {
        "p1": "d0 and p1 exchange no KV, since they differ in weights ab (o/base@1) and "
        "cd (o/instruct@3)",
        "p2": "d0 and p2 exchange no KV, since they differ in isa avx2 and none",
    }


def test_only_the_groups_that_differ_are_told() -> None:
    full, window = "3 x 16 Full", "2 x 16 Sliding 64; 1 x 8 Mamba"
    kinds = {"d": f"{full}; {window}", "e": full, "p": f"{full}; 2 x 16 Sliding 128"}
    begin = "exchange no KV, since they differ in layout"
    assert apart(info(name, layout=kind) for name, kind in kinds.items()) == {
        "e": f"d and e {begin} {window} and {full}",
        "p": f"d and p {begin} {window} and 2 x 16 Sliding 128",
    }


def test_those_that_exchange_kv_with_none_share_all_requests_whatever_their_role() -> None:
    one = alone("p", "prefill")
    busy = alone("d", "decode", queued_prefill_tokens=9)
    assert target(one, busy) == target(busy, one, may_split=False) == ("whole", "p")
    assert target(one, busy, refused=("p",)) == ("whole", "d")
    assert apart(each.info for each in (one, busy)) == {
        name: f"{name} exchanges no KV, since it is multimodal" for name in ("d", "p")
    }
    assert target(one, PREFILL, DECODE) == ("split", "p")


def test_a_whole_request_stays_with_its_kind_when_that_is_full() -> None:
    two = BOTH, instance("c", "both")
    assert target(*two, DECODE, may_split=False, refused=("b",)) == ("whole", "c")
    assert target(*two, DECODE, may_split=False, refused=("b", "c")) == ("full", "b", "c")
    assert target(PREFILL, DECODE, may_split=False, refused=("d",)) == ("full", "d")
    assert target(BOTH, refused=("b",)) == ("full", "b")


def test_nobody_there_is_not_the_same_as_full() -> None:
    assert target(PREFILL, excluded=("p",), refused=("p",)) is None


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 4), st.frozensets(st.integers(0, 5)))),
    st.dictionaries(st.integers(0, 5), st.integers(1, 4)),
)
def test_request_after_request_goes_to_the_least_loaded(
    queued: list[int], requests: list[tuple[int, frozenset[int]]], cached: dict[int, int]
) -> None:
    names = [InstanceId(f"p{number}") for number in range(len(queued))]
    rows = [
        instance(name, "prefill", queued_prefill_tokens=tokens)
        for name, tokens in zip(names, queued, strict=True)
    ]
    made = known(*rows, DECODE)
    candidates = RouteCandidates(made.state, made.by_model["tiny"])
    held = {InstanceId(f"p{number}"): tokens for number, tokens in cached.items()}
    left = dict(zip(names, queued, strict=True))
    for tokens, full in requests:
        at_limit = {InstanceId(f"p{number}") for number in full}
        found = choose_route(candidates, may_split=True, at_limit=at_limit, cached=held)
        able = {name: left[name] - held.get(name, 0) for name in names if name not in at_limit}
        if not able:
            assert isinstance(found, AllAtLimit)
            continue
        assert isinstance(found, Route)
        assert found.is_split
        assert able[found.prefill] == min(able.values())
        made.send(found.prefill, None, Need(tokens, 0), 100.0)
        left[found.prefill] += tokens


def test_the_least_loaded_prefill_instance_wins() -> None:
    pair = instance("p1", "prefill", queued_prefill_tokens=50), instance("p2", "prefill")
    assert target(*pair, DECODE) == ("split", "p2")
    assert target(*pair, DECODE, own={"p2": 51}) == ("split", "p1")


def test_a_dedicated_prefill_instance_wins_a_tie() -> None:
    assert target(BOTH, PREFILL, DECODE) == ("split", "p")


def test_whole_requests_spread_by_what_runs() -> None:
    pair = instance("b1", running=5), instance("b2", running=1)
    assert target(*pair, may_split=False) == ("whole", "b2")


def test_every_choice_says_why() -> None:
    for found in (route(PREFILL, DECODE), route(BOTH), route(BOTH, may_split=False)):
        assert isinstance(found, Route)
        assert found.reason


instances = st.builds(
    instance,
    st.sampled_from("abcde"),
    st.sampled_from(["prefill", "decode", "both"]),
    state=st.sampled_from(["starting", "ready", "silent"]),
    layout=st.sampled_from(["a", "b"]),
    model=st.sampled_from(["tiny", "huge"]),
    queued_prefill_tokens=st.integers(0, 100),
)


@given(
    st.lists(instances, unique_by=lambda each: each.info.id),
    st.booleans(),
    st.sets(st.sampled_from("abcde")),
)
def test_asking_one_full_instance_after_another_comes_to_an_end(
    many: list[InstanceView], may_split: bool, full: set[str]
) -> None:
    asked: list[str] = []
    while (found := target(*many, may_split=may_split, refused=tuple(asked))) is not None:
        kind, *names = found
        if kind == "full" or names[0] not in full:
            break
        assert names[0] not in asked
        asked.append(names[0])
    if found is not None and found[0] == "full":
        assert set(asked) == set(found[1:])


@given(st.lists(instances, unique_by=lambda each: each.info.id), st.booleans())
def test_somebody_serves_whenever_anybody_can(many: list[InstanceView], may_split: bool) -> None:
    able = {e.info.id: e for e in many if e.state == "ready" and "tiny" in e.info.models}
    match route(*many, may_split=may_split, excluded=("e",)):
        case None:
            assert set(able) <= {"e"}
        case Route(prefill=name) as found if found.is_split:
            assert may_split
            assert able[name].info.role != "decode"
        case Route(prefill=name):
            assert name in able
            assert name != "e"


def keeper(view: ClusterView, **more: Any) -> str:
    chosen = choose_keeper(view, "tiny", **more)
    assert isinstance(chosen, Route)
    return chosen.prefill


def test_answers_are_kept_by_the_same_instance_whatever_its_load() -> None:
    busy, idle = instance("d1", "decode", running=9, waiting=9), instance("d2", "decode")
    for order in ((PREFILL, busy, idle), (idle, PREFILL, busy)):
        assert keeper(view(*order)) == "d1"
    assert keeper(view(busy, idle, BOTH)) == "b"
    assert keeper(view(PREFILL)) == "p"


def test_another_one_keeps_answers_only_when_the_first_is_out_of_use() -> None:
    for state in ("silent", "draining"):
        away = instance("d1", "decode", state=state)
        assert keeper(view(away, instance("d2", "decode"))) == "d2"
    assert keeper(view(DECODE, BOTH), excluded={InstanceId("b")}) == "d"
    assert choose_keeper(view(DECODE), "another") is None


# -- phases of a request ----


SPLIT = [Event.PREFILL_SENT, Event.PREFILLED, Event.ANSWERING]


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        (SPLIT[:1], Phase.PREFILLING),
        (SPLIT[:2], Phase.HANDING_OVER),
        (SPLIT, Phase.DECODING),
        ([*SPLIT, Event.FINISH], Phase.FINISHED),
        ([Event.WHOLE_SENT, Event.ANSWERING], Phase.SERVING),
        ([Event.WHOLE_SENT, Event.ANSWERING, Event.FINISH], Phase.FINISHED),
        # A split that fails is served whole.
        ([Event.PREFILL_SENT, Event.PREFILL_SENT, Event.WHOLE_SENT], Phase.SERVING),
        ([*SPLIT[:2], Event.WHOLE_SENT], Phase.SERVING),
        # An output goes on elsewhere.
        ([*SPLIT, Event.WHOLE_SENT, Event.ANSWERING], Phase.SERVING),
        # The first token is the last.
        ([Event.PREFILL_SENT, Event.ANSWERING, Event.FINISH], Phase.FINISHED),
    ],
)
def test_events_lead_to_phases(events: list[Event], phase: Phase) -> None:
    assert reduce(advance, events, Phase.ARRIVED) is phase


@pytest.mark.parametrize(("event", "end"), [("fail", "failed"), ("cancel", "cancelled")])
def test_a_request_can_end_early_from_every_phase_that_is_not_the_end(event: str, end: str) -> None:
    for phase in set(Phase) - ENDED:
        assert advance(phase, Event(event)) == end


def test_unknown_pairs_raise() -> None:
    for pair in set(product(Phase, Event)) - set(TRANSITIONS):
        with pytest.raises(ValueError, match=pair[1]):
            advance(*pair)


def test_the_end_is_the_end_and_every_phase_can_be_reached() -> None:
    assert not {phase for phase, _ in TRANSITIONS} & ENDED
    assert {Phase.ARRIVED, *TRANSITIONS.values()} == set(Phase)
