from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import info, instance, view
from vllm_tetri.policy.dispatch import Dispatch, choose_decode
from vllm_tetri.types import ClusterView, InstanceId, InstanceView

ME = info("me", "prefill")


def choose(
    cluster: ClusterView,
    *,
    me=ME,
    num_tokens: int = 100,
    num_bytes: int = 1000,
    refused: tuple[str, ...] = (),
    seed: int = 0,
) -> Dispatch | None:
    return choose_decode(
        cluster,
        me=me,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        refused=frozenset(map(InstanceId, refused)),
        rng=Random(seed),
    )


def chosen(*instances: InstanceView, **options) -> str | None:
    dispatch = choose(view(*instances), **options)
    return dispatch.instance if dispatch else None


def test_the_only_decode_instance_is_chosen_with_its_endpoint() -> None:
    dispatch = choose(view(instance("p", "prefill"), instance("d", "decode")))
    assert dispatch is not None
    assert (dispatch.instance, dispatch.kv_endpoint) == ("d", "d:1")
    assert dispatch.reason


@pytest.mark.parametrize("state", ["starting", "silent", "refused"])
def test_an_instance_that_is_not_ready_is_never_chosen(state: str) -> None:
    assert chosen(instance("d", "decode", state=state)) is None


def test_another_layout_is_never_chosen() -> None:
    assert chosen(instance("d", "decode", layout="b")) is None


def test_an_instance_that_refused_is_not_asked_again() -> None:
    pair = instance("d1", "decode"), instance("d2", "decode")
    assert chosen(*pair, refused=("d1",)) == "d2"
    assert chosen(*pair, refused=("d1", "d2")) is None


def test_an_instance_hands_over_to_itself_only_when_it_is_alone_and_does_both() -> None:
    me = info("me", "both")
    assert chosen(instance("me", "both"), instance("d", "decode"), me=me) == "d"
    assert chosen(instance("me", "both"), me=me) == "me"
    assert chosen(instance("me", "decode"), me=info("me", "decode")) is None


def test_the_lighter_of_two_probes_wins_whatever_the_order_of_probes() -> None:
    pair = instance("d1", "decode", heavy=3, light=1), instance("d2", "decode", heavy=1, light=3)
    assert {chosen(*pair, seed=seed) for seed in range(20)} == {"d2"}


def test_equally_light_probes_are_told_apart_by_free_blocks() -> None:
    pair = instance("d1", "decode", blocks_used=50), instance("d2", "decode", blocks_used=10)
    assert {chosen(*pair, seed=seed) for seed in range(20)} == {"d2"}


@pytest.mark.parametrize("full", [{"blocks_used": 94}, {"arena_used_bytes": 9_500}])
def test_an_instance_without_room_is_not_probed(full: dict[str, int]) -> None:
    pair = instance("d1", "decode", **full), instance("d2", "decode", heavy=9)
    assert {chosen(*pair, seed=seed) for seed in range(20)} == {"d2"}


def test_exactly_enough_room_is_room() -> None:
    exact = instance("d1", "decode", blocks_used=93, arena_used_bytes=9_000)
    assert chosen(exact, instance("d2", "decode", heavy=1), num_tokens=112) == "d1"


def test_when_nobody_has_room_the_freest_arena_is_taken() -> None:
    full = {"blocks_used": 100}
    pair = (
        instance("d1", "decode", arena_used_bytes=500, **full),
        instance("d2", "decode", arena_used_bytes=400, **full),
    )
    assert chosen(*pair) == "d2"


def test_two_probes_spread_over_equal_instances() -> None:
    many = [instance(f"d{index}", "decode") for index in range(8)]
    assert len({chosen(*many, seed=seed) for seed in range(200)}) == 8


def test_nothing_to_hand_over_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        choose(view(), num_tokens=0)


loads = st.builds(
    instance,
    st.sampled_from(["a", "b", "c", "d", "e"]),
    st.sampled_from(["prefill", "decode", "both"]),
    state=st.sampled_from(["starting", "ready", "silent", "refused"]),
    layout=st.sampled_from(["a", "b"]),
    blocks_used=st.integers(0, 100),
    arena_used_bytes=st.integers(0, 10_000),
    heavy=st.integers(0, 5),
    light=st.integers(0, 5),
)


@given(
    st.lists(loads, unique_by=lambda each: each.info.id),
    st.integers(1, 2000),
    st.integers(0, 20_000),
    st.integers(),
)
def test_the_choice_is_always_able_and_none_only_if_nobody_is(
    instances: list[InstanceView], num_tokens: int, num_bytes: int, seed: int
) -> None:
    dispatch = choose(
        view(*instances), num_tokens=num_tokens, num_bytes=num_bytes, seed=seed, refused=("e",)
    )
    able = {
        each.info.id
        for each in instances
        if each.state == "ready"
        and each.info.role != "prefill"
        and each.info.identity == ME.identity
        and each.info.id != "e"
    }
    assert (dispatch is None) == (not able)
    assert dispatch is None or dispatch.instance in able
