"""What is left although no request is there."""

from __future__ import annotations

from dataclasses import fields

import pytest

from vllm_tetri.engine.audit import (
    OTHERS_PATIENCE_S,
    OWN_PATIENCE_S,
    Audit,
    Counts,
    leftovers,
)


def words(counts: Counts) -> list[str]:
    return [str(each) for each in leftovers(counts)]


def test_an_engine_at_rest_has_nothing() -> None:
    assert words(Counts()) == []


def test_nothing_is_left_while_there_is_a_request() -> None:
    everything = {each.name: 3 for each in fields(Counts)}
    assert words(Counts(**everything)) == []


@pytest.mark.parametrize(
    "name", [each.name for each in fields(Counts) if each.name != "unfinished"]
)
def test_whatever_is_there_alone_is_found(name: str) -> None:
    found = words(Counts(**{name: 2}))
    assert len(found) == 1
    assert found[0].startswith("2 ")


def test_what_a_transfer_needs_is_no_leftover() -> None:
    assert words(Counts(finished=2, hand_overs=2, blocks=9)) == []
    assert words(Counts(finished=1, arrivals=1, taken_slots=1, blocks=9)) == []
    assert words(Counts(finished=1, hand_overs=1, swapped=1, taken_slots=1)) == [
        "1 copies of preempted requests"
    ]


def test_what_a_transfer_needs_is_counted_apart_from_the_rest() -> None:
    assert words(Counts(finished=3, hand_overs=2)) == ["1 finished requests that nothing reads"]
    assert words(Counts(finished=1, hand_overs=2)) == ["1 transfers of requests that are gone"]
    assert words(Counts(taken_slots=3, swapped=1)) == [
        "2 slots of the arena that nobody reads",
        "1 copies of preempted requests",
    ]


def test_only_what_stays_is_reported() -> None:
    audit = Audit()
    assert audit.look(Counts(blocks=1), 0.0) == ()
    assert audit.look(Counts(unfinished=1), OWN_PATIENCE_S) == ()
    assert audit.look(Counts(blocks=1), 1.0) == ()
    assert audit.look(Counts(blocks=2), 1.0 + OWN_PATIENCE_S) == ("2 blocks",)
    assert audit.look(Counts(), 2.0) == ()


def test_a_verdict_stands_until_there_is_no_request_again() -> None:
    audit = Audit()
    audit.look(Counts(blocks=1), 0.0)
    assert audit.look(Counts(blocks=1), 1.0) == ("1 blocks",)
    assert audit.look(Counts(unfinished=1), 2.0) == ("1 blocks",)
    assert audit.look(Counts(blocks=3), 3.0) == ("1 blocks",)  # perhaps on its way
    assert audit.look(Counts(blocks=3), 4.0) == ("3 blocks",)
    assert audit.look(Counts(), 5.0) == ()


def test_what_others_have_a_part_in_gets_the_time_that_is_promised() -> None:
    audit = Audit()
    counts = Counts(unclaimed_slots=1, queued=1)
    audit.look(counts, 0.0)
    assert audit.look(counts, OTHERS_PATIENCE_S / 2) == ("1 prompts in the queue",)
    assert audit.look(counts, OTHERS_PATIENCE_S) == (
        "1 prompts in the queue",
        "1 transfers that arrived for nobody",
    )
