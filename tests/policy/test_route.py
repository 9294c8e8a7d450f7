from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import instance, view
from vllm_tetri.policy.route import (
    Full,
    Route,
    Shortlist,
    Split,
    Submissions,
    Whole,
    choose_keeper,
    choose_route,
)
from vllm_tetri.types import InstanceId, InstanceView


def route(
    *instances: InstanceView,
    splittable: bool = True,
    own: dict[str, int] | None = None,
    excluded: tuple[str, ...] = (),
    full: tuple[str, ...] = (),
    crowded: tuple[str, ...] = (),
    model: str = "tiny",
) -> Route | Full | None:
    return choose_route(
        view(*instances),
        model=model,
        splittable=splittable,
        own_tokens={InstanceId(name): tokens for name, tokens in (own or {}).items()},
        excluded=frozenset(map(InstanceId, excluded)),
        full=frozenset(map(InstanceId, full)),
        crowded=frozenset(map(InstanceId, crowded)),
    )


def target(*instances: InstanceView, **options) -> tuple[str, ...] | None:
    match route(*instances, **options):
        case Split(prefill=prefill):
            return "split", prefill
        case Whole(instance=whole):
            return "whole", whole
        case Full(instances=them):
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
    assert target(PREFILL, DECODE, BOTH, splittable=False) == ("whole", "b")
    assert target(PREFILL, DECODE, splittable=False) == ("whole", "d")
    assert target(PREFILL, splittable=False) == ("whole", "p")


def test_layouts_that_differ_do_not_make_a_pair() -> None:
    assert target(PREFILL, instance("d", "decode", layout="b")) == ("whole", "d")


def test_only_ready_instances_that_serve_the_model_count() -> None:
    assert target(PREFILL, instance("d", "decode", state="silent")) == ("whole", "p")
    assert target(PREFILL, instance("d", "decode", model="huge")) == ("whole", "p")
    assert target(instance("p", "prefill", state="starting")) is None
    assert target(PREFILL, DECODE, model="huge") is None


def test_an_instance_that_failed_is_not_asked_again() -> None:
    assert target(PREFILL, DECODE, BOTH, excluded=("p",)) == ("split", "b")
    assert target(PREFILL, DECODE, excluded=("d",)) == ("whole", "p")
    assert target(PREFILL, excluded=("p",)) is None


def test_the_next_prefill_instance_is_asked_when_one_is_full() -> None:
    many = PREFILL, instance("q", "prefill", queued_prefill_tokens=9), BOTH, DECODE
    assert target(*many, full=("p", "b")) == ("split", "q")
    assert target(*many, full=("p", "q")) == ("split", "b")


def test_full_prefill_instances_never_send_a_prompt_to_a_decode_instance() -> None:
    assert target(PREFILL, DECODE, full=("p",)) == ("full", "p")
    assert target(PREFILL, DECODE, BOTH, full=("p", "b")) == ("full", "p", "b")
    # One failed, the other is full: still no reason to disturb decoding.
    two = PREFILL, instance("q", "prefill")
    assert target(*two, DECODE, excluded=("q",), full=("p",)) == ("full", "p")


def test_one_with_as_many_requests_as_it_may_have_is_passed_over() -> None:
    two = PREFILL, instance("q", "prefill", queued_prefill_tokens=9)
    assert target(*two, DECODE, crowded=("p",)) == ("split", "q")
    assert target(*two, DECODE, crowded=("p",), full=("q",)) == ("full", "p", "q")
    assert target(BOTH, instance("c", "both"), splittable=False, crowded=("b",)) == ("whole", "c")
    assert target(BOTH, splittable=False, crowded=("b",)) == ("full", "b")


def test_prompts_wait_outside_while_all_that_decode_are_crowded() -> None:
    two = DECODE, instance("e", "decode")
    assert target(PREFILL, *two, crowded=("d",)) == ("split", "p")
    assert target(PREFILL, *two, crowded=("d", "e")) == ("full", "d", "e")
    # A decode instance that was busy once is asked again by who holds KV for it.
    assert target(PREFILL, *two, full=("d", "e")) == ("split", "p")


def test_one_that_leaves_gets_nothing_new() -> None:
    leaving = instance("q", "prefill", state="leaving")
    assert target(leaving, PREFILL, DECODE) == ("split", "p")
    assert target(leaving, DECODE) == ("whole", "d")
    assert target(PREFILL, instance("d", "decode", state="leaving")) == ("whole", "p")
    assert choose_keeper(view(instance("b", "both", state="leaving"), DECODE), model="tiny") == "d"


def test_identities_pair_up_each_with_its_own() -> None:
    other = instance("p2", "prefill", layout="b"), instance("d2", "decode", layout="b")
    assert target(PREFILL, *other, DECODE, excluded=("p",)) == ("split", "p2")
    assert target(PREFILL, *other, DECODE, excluded=("d2",)) == ("split", "p")
    assert target(instance("x", layout="c"), *other, excluded=("p2",)) == ("whole", "x")


def test_a_whole_request_stays_with_its_kind_when_that_is_full() -> None:
    two = BOTH, instance("c", "both")
    assert target(*two, DECODE, splittable=False, full=("b",)) == ("whole", "c")
    assert target(*two, DECODE, splittable=False, full=("b", "c")) == ("full", "b", "c")
    assert target(PREFILL, DECODE, splittable=False, full=("d",)) == ("full", "d")
    assert target(BOTH, full=("b",)) == ("full", "b")


def test_nobody_there_is_not_the_same_as_full() -> None:
    assert target(PREFILL, excluded=("p",), full=("p",)) is None


def test_the_least_loaded_prefill_instance_wins() -> None:
    pair = instance("p1", "prefill", queued_prefill_tokens=50), instance("p2", "prefill")
    assert target(*pair, DECODE) == ("split", "p2")
    assert target(*pair, DECODE, own={"p2": 51}) == ("split", "p1")


def test_a_dedicated_prefill_instance_wins_a_tie() -> None:
    assert target(BOTH, PREFILL, DECODE) == ("split", "p")


def test_whole_requests_spread_by_what_runs() -> None:
    pair = instance("b1", running=5), instance("b2", running=1)
    assert target(*pair, splittable=False) == ("whole", "b2")


def test_every_choice_says_why() -> None:
    for found in (route(PREFILL, DECODE), route(BOTH), route(BOTH, splittable=False)):
        assert isinstance(found, Split | Whole)
        assert found.reason


instances = st.builds(
    instance,
    st.sampled_from("abcde"),
    st.sampled_from(["prefill", "decode", "both"]),
    state=st.sampled_from(["starting", "ready", "silent", "refused"]),
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
    many: list[InstanceView], splittable: bool, full: set[str]
) -> None:
    asked: list[str] = []
    while (found := target(*many, splittable=splittable, full=tuple(asked))) is not None:
        kind, *names = found
        if kind == "full" or names[0] not in full:
            break
        assert names[0] not in asked
        asked.append(names[0])
    if found is not None and found[0] == "full":
        assert set(asked) == set(found[1:])


@given(st.lists(instances, unique_by=lambda each: each.info.id), st.booleans())
def test_somebody_serves_whenever_anybody_can(many: list[InstanceView], splittable: bool) -> None:
    able = {e.info.id: e for e in many if e.state == "ready" and "tiny" in e.info.models}
    match route(*many, splittable=splittable, excluded=("e",)):
        case None:
            assert set(able) <= {"e"}
        case Split(prefill=name):
            assert splittable
            assert able[name].info.role != "decode"
        case Whole(instance=name):
            assert name in able
            assert name != "e"


def test_submissions_count_until_a_later_report_shows_them() -> None:
    sent = Submissions(grace_s=0.05)
    sent.add(InstanceId("p"), 100, now=10.0)
    sent.add(InstanceId("p"), 20, now=10.2)

    def unreported(reported_s: float, now: float) -> dict[InstanceId, int]:
        return sent.unreported(view(instance("p", age_s=now - reported_s)), now)

    assert unreported(9.9, 10.3) == {"p": 120}
    assert unreported(10.04, 10.3) == {"p": 120}  # the engine may not have seen it yet
    assert unreported(10.1, 10.3) == {"p": 20}
    assert unreported(10.3, 10.4) == {}
    assert unreported(9.0, 10.4) == {}


def test_submissions_to_an_instance_that_is_gone_are_forgotten() -> None:
    sent = Submissions()
    sent.add(InstanceId("p"), 100, now=10.0)
    assert sent.unreported(view(), 11.0) == {}


def test_answers_are_kept_by_the_same_instance_whatever_its_load() -> None:
    busy, idle = instance("d1", "decode", running=9, waiting=9), instance("d2", "decode")
    for order in ((PREFILL, busy, idle), (idle, PREFILL, busy)):
        assert choose_keeper(view(*order), model="tiny") == "d1"
    assert choose_keeper(view(busy, idle, BOTH), model="tiny") == "b"
    assert choose_keeper(view(PREFILL), model="tiny") == "p"


def test_another_one_keeps_answers_only_when_the_first_is_out_of_use() -> None:
    silent = instance("d1", "decode", state="silent")
    assert choose_keeper(view(silent, instance("d2", "decode")), model="tiny") == "d2"
    assert choose_keeper(view(DECODE, BOTH), model="tiny", excluded={InstanceId("b")}) == "d"
    assert choose_keeper(view(DECODE), model="another") is None


@given(
    many=st.lists(st.sampled_from(["prefill", "decode", "both"]), max_size=6),
    queued=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    running=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    prompts=st.lists(st.integers(1, 4), max_size=30),
    splittable=st.booleans(),
    is_sent=st.booleans(),
)
def test_a_shortlist_says_the_same_of_one_request_after_the_other(
    many: list[str],
    queued: list[int],
    running: list[int],
    prompts: list[int],
    splittable: bool,
    is_sent: bool,
) -> None:
    seen = view(
        *(
            instance(
                f"{role}{place}",
                role,
                queued_prefill_tokens=queued[place],
                running=running[place],
            )
            for place, role in enumerate(many)
        )
    )
    own = {seen.instances[0].info.id: 2} if is_sent and many else {}
    shortlist = Shortlist(seen, model="tiny", splittable=splittable, own_tokens=own)
    for num_tokens in prompts:
        expected = choose_route(seen, model="tiny", splittable=splittable, own_tokens=own)
        found = shortlist.choose()
        assert found == expected
        if found is None:
            return
        to = found.prefill if isinstance(found, Split) else found.instance
        own[to] = own.get(to, 0) + num_tokens
        shortlist.sent(to, num_tokens)
