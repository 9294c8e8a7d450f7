"""Instances that cannot be reached are left alone, and tried again by one request at a time."""

from __future__ import annotations

from vllm_tetri.policy.reach import AVOID_S, Reach


def test_it_is_avoided_for_a_while_then_tried_by_one() -> None:
    reach = Reach()
    assert not reach.avoided(0.0)
    reach.failed("a", 0.0)
    assert reach.avoided(AVOID_S - 1) == {"a"}
    assert not reach.avoided(AVOID_S)
    reach.tries("a", AVOID_S)
    assert reach.avoided(AVOID_S + 1) == {"a"}  # the others wait for that one
    reach.succeeded("a")
    assert not reach.avoided(AVOID_S + 1)


def test_those_that_never_failed_are_tried_by_all() -> None:
    reach = Reach()
    reach.tries("a", 0.0)
    assert not reach.avoided(0.0)


def test_what_is_remembered_has_a_bound() -> None:
    reach = Reach()
    for number in range(5000):
        reach.failed(str(number), 0.0)
    assert len(reach.avoided(0.0)) == 1024
    assert "4999" in reach.avoided(0.0)
