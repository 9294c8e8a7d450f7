"""Which decode instance takes over a prefilled request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import Known, info, instance, view
from vllm_tetri.policy.cluster import Need
from vllm_tetri.policy.dispatch import (
    DISPATCHES,
    GRACE_S,
    DecodeCandidates,
    Dispatch,
    choose_decode,
    power_of_two,
)
from vllm_tetri.types import ClusterView, InstanceId, InstanceView

ME = info("me", "prefill")
NOW = 100.0


def need(
    num_tokens: int = 100,
    num_bytes: int = 1000,
    total_tokens: int | None = None,
    *,
    is_heavy: bool = False,
) -> Need:
    total_tokens = num_tokens if total_tokens is None else total_tokens
    output_tokens = 200 if is_heavy else 0
    reserved = total_tokens - num_tokens
    return Need(num_tokens, output_tokens, num_bytes, reserved, heavy_part=float(is_heavy))


Own = list[tuple[str, Need, float]]


def choose(
    cluster: ClusterView,
    *,
    me=ME,
    need: Need = need(),  # noqa: B008
    refused: tuple[str, ...] = (),
    own: Own | None = None,
    policy: str = "power-of-two",
    seed: int = 0,
    cached: Mapping[str, int] | None = None,
) -> Dispatch | None:
    made = Known(GRACE_S)
    for name, sent_need, at_s in own or ():
        made.send(None, InstanceId(name), sent_need, at_s)
    made.renew(cluster, NOW)
    them = frozenset(map(InstanceId, refused))
    candidates = DecodeCandidates(made.state, me, need, them, Random(seed))
    held = {InstanceId(name): tokens for name, tokens in (cached or {}).items()}
    return choose_decode(candidates, need, DISPATCHES[policy], held)


def chosen(*instances: InstanceView, **options) -> str | None:
    dispatch = choose(view(*instances), **options)
    return dispatch.instance if dispatch else None


def chosen_by_seeds(*instances: InstanceView, **options) -> set[str | None]:
    return {chosen(*instances, seed=seed, **options) for seed in range(20)}


def sent(*instances: str, at_s: float = NOW, **options) -> Own:
    return [(each, need(**options), at_s) for each in instances]


# -- who is asked at all ---------------------------------------------------------


def test_the_only_decode_instance_is_chosen_with_its_endpoint() -> None:
    dispatch = choose(view(instance("p", "prefill"), instance("d", "decode")))
    assert dispatch is not None
    assert (dispatch.instance, dispatch.kv_endpoint, dispatch.has_capacity) == ("d", "d:1", True)
    assert dispatch.reason


def test_an_instance_hands_over_to_itself_only_when_it_is_alone_and_does_both() -> None:
    me = info("me", "both")
    pair = instance("me", "both"), instance("d", "decode")
    assert chosen(*pair, me=me) == "d"
    assert chosen(*pair, me=me, refused=("d",)) == "me"
    assert chosen(*pair, me=me, refused=("d", "me")) is None
    assert chosen(instance("me", "both"), me=me) == "me"
    assert chosen(instance("me", "decode"), me=info("me", "decode")) is None


# -- room ------------------------------------------------------------------------


def test_exactly_enough_room_is_room() -> None:
    exact = instance("d1", "decode", blocks_used=93, arena_used_bytes=9_000)
    assert chosen(exact, instance("d2", "decode", light=1), need=need(112)) == "d1"


def test_room_is_for_the_predicted_answer_too() -> None:
    pair = instance("d1", "decode", blocks_used=50), instance("d2", "decode", light=9)
    assert chosen(*pair, need=need(100, total_tokens=800)) == "d1"
    assert chosen(*pair, need=need(100, total_tokens=801)) == "d2"


def test_when_nobody_has_capacity_the_freest_arena_is_named_and_the_caller_told() -> None:
    full = {"blocks_used": 100}
    pair = (
        instance("d1", "decode", arena_used_bytes=500, **full),
        instance("d2", "decode", arena_used_bytes=400, **full),
    )
    dispatch = choose(view(*pair))
    assert dispatch is not None
    assert (dispatch.instance, dispatch.has_capacity) == ("d2", False)
    assert chosen(*pair, refused=("d2",)) == "d1"


def test_when_nobody_has_capacity_own_dispatches_move_on_to_the_next() -> None:
    cluster = [instance(f"d{index}", "decode", blocks_used=100) for index in range(3)]
    own: Own = []
    taken = []
    for _ in range(6):
        choice = chosen(*cluster, own=own)
        assert choice is not None
        taken.append(choice)
        own.append((choice, need(), NOW))
    assert Counter(taken) == {"d0": 2, "d1": 2, "d2": 2}


# -- which of two ----------------------------------------------------------------


@pytest.mark.parametrize(("is_heavy", "better"), [(True, "d2"), (False, "d1")])
def test_the_probe_with_fewer_of_the_same_kind_wins(is_heavy: bool, better: str) -> None:
    pair = instance("d1", "decode", heavy=3, light=1), instance("d2", "decode", heavy=1, light=3)
    assert chosen_by_seeds(*pair, need=need(is_heavy=is_heavy)) == {better}


def test_equal_probes_are_told_apart_by_tokens_to_come_then_by_free_blocks() -> None:
    def decoding(name: str, light: int, remaining_tokens: int) -> InstanceView:
        return instance(name, "decode", heavy=2, light=light, remaining_tokens=remaining_tokens)

    pair = decoding("d1", 4, 900), decoding("d2", 5, 800)
    assert chosen_by_seeds(*pair, need=need(is_heavy=True)) == {"d2"}
    pair = instance("d1", "decode", blocks_used=50), instance("d2", "decode", blocks_used=10)
    assert chosen_by_seeds(*pair) == {"d2"}


def test_the_ratio_of_the_paper_counts_the_request_in() -> None:
    def better(one: tuple[int, int], other: tuple[int, int], *, is_heavy: bool) -> set[str | None]:
        pair = [
            instance(name, "decode", heavy=heavy, light=light)
            for name, (heavy, light) in (("d1", one), ("d2", other))
        ]
        return chosen_by_seeds(*pair, need=need(is_heavy=is_heavy), policy="power-of-two-ratio")

    assert better((1, 3), (1, 1), is_heavy=True) == {"d1"}
    assert better((5, 4), (10, 10), is_heavy=True) == {"d2"}  # why it is not the default
    assert better((1, 0), (0, 1), is_heavy=False) == {"d2"}
    assert better((2, 0), (1, 0), is_heavy=True) == {"d2"}  # no lights: fewer heavy ones
    assert better((0, 0), (0, 3), is_heavy=False) == {"d1"}  # no heavy ones: fewer lights


def test_two_probes_spread_over_equal_instances() -> None:
    for count in (3, 8, 40):
        many = [instance(f"d{index}", "decode") for index in range(count)]
        seen = Counter(chosen(*many, seed=seed) for seed in range(count * 40))
        assert len(seen) == count
        assert max(seen.values()) < 3 * min(seen.values())


def test_the_few_with_room_among_many_are_found() -> None:
    for full in ({"arena_used_bytes": 9_500}, {"blocks_used": 100}):
        many = [instance(f"d{index:03}", "decode", **full) for index in range(200)]
        many[77] = instance("d077", "decode", light=7)
        assert chosen_by_seeds(*many) == {"d077"}
    half = [
        instance(f"d{index:03}", "decode", **({"blocks_used": 100} if index < 100 else full))
        for index, full in enumerate([{"arena_used_bytes": 9_500}] * 200)
    ]
    half[123] = instance("d123", "decode")
    assert chosen_by_seeds(*half) == {"d123"}


# -- own dispatches ----------------------------------------------------------------


def test_what_was_sent_since_the_report_counts_as_there() -> None:
    pair = instance("d1", "decode"), instance("d2", "decode", light=1)
    assert chosen(*pair) == "d1"
    assert chosen(*pair, own=sent("d1", "d1")) == "d2"
    assert chosen(*pair, own=sent("d1", num_tokens=1550)) == "d2"  # blocks
    assert chosen(*pair, own=sent("d1", num_bytes=9_500)) == "d2"  # arena
    assert chosen(*pair, need=need(is_heavy=True), own=sent("d1", is_heavy=True)) == "d2"


def test_a_burst_on_one_stale_view_does_not_run_into_one_instance() -> None:
    made, rng = Known(GRACE_S), Random(0)
    made.renew(view(*(instance(f"d{index}", "decode") for index in range(4))), NOW)
    taken: Counter[str] = Counter()
    for _ in range(40):
        candidates = DecodeCandidates(made.state, ME, need(112), (), rng)
        dispatch = choose_decode(candidates, need(112), power_of_two)
        assert dispatch is not None
        assert dispatch.has_capacity
        made.send(None, dispatch.instance, need(112), NOW)
        taken[dispatch.instance] += 1
    assert max(taken.values()) - min(taken.values()) <= 2


# -- contracts -----------------------------------------------------------------------


loads = st.builds(
    instance,
    st.sampled_from([f"d{index}" for index in range(40)]),
    st.sampled_from(["prefill", "decode", "decode", "both"]),
    state=st.sampled_from(["starting", "ready", "ready", "silent", "draining"]),
    layout=st.sampled_from(["a", "a", "b"]),
    blocks_used=st.integers(0, 100),
    reserved_blocks=st.integers(0, 30),
    arena_used_bytes=st.integers(0, 10_000),
    heavy=st.integers(0, 5),
    light=st.integers(0, 5),
)


@given(
    st.lists(loads, unique_by=lambda each: each.info.id, max_size=40),
    st.integers(1, 1000),
    st.integers(0, 800),
    st.integers(0, 12_000),
    st.booleans(),
    st.sampled_from(list(DISPATCHES)),
    st.lists(st.sampled_from(["d1", "d2", "d3"]), max_size=4),
    st.integers(),
)
def test_the_choice_has_capacity_whenever_anybody_has_and_none_only_if_nobody_is_able(
    instances: list[InstanceView],
    num_tokens: int,
    answer_tokens: int,
    num_bytes: int,
    is_heavy: bool,
    policy: str,
    already: list[str],
    seed: int,
) -> None:
    asked = need(num_tokens, num_bytes, num_tokens + answer_tokens, is_heavy=is_heavy)
    own = sent(*already)
    dispatch = choose(
        view(*instances), need=asked, own=own, policy=policy, seed=seed, refused=("d5", "d6")
    )
    able = {
        each.info.id: each.load
        for each in instances
        if each.state == "ready"
        and each.info.role != "prefill"
        and each.info.identity == ME.identity
        and each.info.id not in ("d5", "d6")
    }
    roomy = {
        name
        for name, load in able.items()
        if load.blocks_total - load.blocks_used - load.reserved_blocks
        - -(-100 * already.count(name) // 16) >= -(-asked.total_tokens // 16)
        and load.arena_total_bytes - load.arena_used_bytes - 1000 * already.count(name) >= num_bytes
    }  # fmt: skip
    if not able:
        assert dispatch is None
        return
    assert dispatch is not None
    assert dispatch.has_capacity == bool(roomy)
    assert dispatch.instance in (roomy or able)


@pytest.mark.parametrize("seed", range(8))
def test_who_holds_the_prompt_takes_it_unless_it_has_more_decodes(seed: int) -> None:
    room = {"blocks_total": 100, "arena_total_bytes": 5000}
    equal = [instance(f"d{at}", "decode", light=3, **room) for at in range(5)]
    # A prefill instance that holds as much, or more, is no candidate.
    found = choose(view(*equal), seed=seed, cached={"p": 96, "d3": 64, "d1": 32})
    assert found is not None
    assert found.instance == "d3"
    found = choose(view(*equal[:4], instance("d9", "decode", light=4, **room)), seed=seed,
                   cached={"d9": 64})  # fmt: skip
    assert found is not None
    assert found.instance != "d9"
    full = instance("d9", "decode", light=0, blocks_total=2, arena_total_bytes=5000)
    found = choose(view(*equal, full), seed=seed, cached={"d9": 64, "gone": 3})
    assert found is not None
    assert found.instance != "d9"


def test_a_cache_is_not_relied_on_where_requests_wait_for_its_memory() -> None:
    def keeps(waiting: int, free_blocks: int) -> bool:
        one = instance("d", "decode", waiting=waiting, blocks_total=free_blocks,
                       arena_total_bytes=5000)  # fmt: skip
        found = choose(view(one), need=need(160), cached={"d": 64})
        assert found is not None
        return found.keeps_cache

    assert keeps(0, 10)
    assert not keeps(1, 10)
    assert keeps(1, 20)
    assert not keeps(0, 9)  # nor is there room for it
