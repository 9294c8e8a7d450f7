"""Times of KV on its way, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.sim.builders import HANDOVER_S, decode_s, engine, max_itl_s, pair, spec
from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.config import ClusterConfig
from vllm_tetri.sim.links import Links, Transfer, link
from vllm_tetri.sim.loop import Loop
from vllm_tetri.types import InstanceId

# A piece of a transfer: name, from, to, when, bytes, whether it is the last one.
Piece = tuple[str, str, str, float, float, bool]


def ends(pieces: list[Piece]) -> dict[str, float]:
    """When each transfer has arrived over links of 100 bytes per second."""
    loop, found = Loop(), dict[str, float]()
    links = Links(100.0, loop)
    transfers = {
        name: Transfer(InstanceId(sender), InstanceId(receiver), partial(found.__setitem__, name))
        for name, sender, receiver, *_ in pieces
    }
    for name, _, _, at_s, num_bytes, is_last in pieces:

        def send(
            now: float, name: str = name, num_bytes: float = num_bytes, is_last: bool = is_last
        ) -> None:
            links.send(transfers[name], num_bytes, now, is_last=is_last)

        loop.at(at_s, send)
    loop.run()
    return found


@pytest.mark.parametrize(
    ("first", "second"),
    [(("p", "d"), ("p", "e")), (("p", "d"), ("q", "d")), (("p", "d"), ("p", "d"))],
)
def test_two_at_the_same_end_get_half_each(first: tuple[str, str], second: tuple[str, str]) -> None:
    found = ends([("a", *first, 0.0, 100, True), ("b", *second, 0.5, 100, True)])

    # 50 bytes alone, 50 at half the speed; by then 50 of the other one are left, alone.
    assert found == pytest.approx({"a": 1.5, "b": 2.0})


@pytest.mark.parametrize("other", [("q", "e"), ("d", "p"), ("d", "e"), ("q", "p")])
def test_others_and_the_other_direction_are_not_in_the_way(other: tuple[str, str]) -> None:
    found = ends([("a", "p", "d", 0.0, 100, True), ("b", *other, 0.0, 100, True)])

    assert found == {"a": 1.0, "b": 1.0}


def test_the_fuller_end_counts_and_the_rest_of_the_other_is_not_used() -> None:
    found = ends(
        [
            ("x", "p", "d", 0.0, 100, True),
            ("y", "p", "e", 0.0, 100, True),
            ("z", "p", "f", 0.0, 100, True),
            ("w", "q", "f", 0.0, 50, True),
        ]
    )

    # A third each at p; half of f for the one from q, though f has a sixth to spare.
    assert found == pytest.approx({"w": 1.0, "x": 3.0, "y": 3.0, "z": 3.0})


def test_pieces_follow_each_other() -> None:
    gap: list[Piece] = [("a", "p", "d", 0.0, 30, False), ("a", "p", "d", 1.0, 20, True)]
    close: list[Piece] = [("a", "p", "d", 0.0, 30, False), ("a", "p", "d", 0.1, 70, True)]

    assert ends(gap) == pytest.approx({"a": 1.2})
    assert ends(close) == pytest.approx({"a": 1.0})


def test_one_that_has_nothing_to_send_takes_nothing_from_others() -> None:
    found = ends(
        [
            ("a", "p", "d", 0.0, 10, False),
            ("b", "p", "d", 1.0, 100, True),
            ("a", "p", "d", 1.5, 10, True),
        ]
    )

    # Alone from 1.0 to 1.5, half the speed while a's 10 bytes take 0.2 s, then 40 more.
    assert found == pytest.approx({"a": 1.7, "b": 2.1})


# -- in a cluster ------------------------------------------------------------------------


def linked(tokens_per_s: float, **changes: object) -> ClusterConfig:
    """A pair whose link sends a number of tokens a second."""
    config = pair(decode=engine(kv_token_bytes=1), kv_token_bytes=1, **changes)
    return replace(config, link=tokens_per_s)


def test_a_chunk_travels_while_the_next_is_computed() -> None:
    (served,) = simulate(linked(4.0, chunk_tokens=4), [spec(0, 10, 2)])

    # Chunks of 4, 4 and 2 tokens take 1.04, 1.04 and 1.02 s; 4 tokens travel in 1 s.
    assert served.ttft_s == pytest.approx(3.1)
    assert max_itl_s(served) == pytest.approx(2 / 4 + HANDOVER_S + decode_s(10, 1))


def test_a_link_that_is_slower_than_the_prompt_has_to_catch_up() -> None:
    (served,) = simulate(linked(2.0, chunk_tokens=4), [spec(0, 10, 2)])

    # All of it travels in 5 s, from the end of the first chunk on.
    assert max_itl_s(served) == pytest.approx(1.04 + 5 - 3.1 + HANDOVER_S + decode_s(10, 1))


def test_by_request_nothing_travels_before_the_prompt_is_done() -> None:
    config = replace(linked(2.0, chunk_tokens=4), sends_chunks=False)
    without = replace(pair(chunk_tokens=4), sends_chunks=False, handover_token_s=0.5)

    for each in (config, without):
        (served,) = simulate(each, [spec(0, 10, 2)])
        assert max_itl_s(served) == pytest.approx(5 + HANDOVER_S + decode_s(10, 1))


# -- names ------------------------------------------------------------------------------


def test_a_link_is_gbit_too() -> None:
    assert link("100") == 12.5e9


@pytest.mark.parametrize("text", ["", "ethernet", "0", "-1", "nan", "inf", "10:1"])
def test_another_link_is_one_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match="link") as error:
        link(text)
    assert "\n" not in str(error.value)


def test_a_link_needs_to_know_what_a_token_takes() -> None:
    with pytest.raises(ConfigError, match="kv_token_bytes"):
        replace(pair(), link=1.0)
