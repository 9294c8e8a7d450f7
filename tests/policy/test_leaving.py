from __future__ import annotations

from dataclasses import replace

import pytest

from tests.policy.builders import instance, view
from vllm_tetri.policy.role import QUIET_S, ROUTER_LOST_S, Expected, Leaving, Verdict, why_needed
from vllm_tetri.types import Flip, FlipStage, InstanceView, Role

STEP_S = 0.1


def looks(leaving: Leaving, start: float, for_s: float, *, is_at_rest: bool = True) -> set[Verdict]:
    """What it decides at every period of some time."""
    times = [start + STEP_S * index for index in range(round(for_s / STEP_S))]
    return {leaving.decide(is_at_rest=is_at_rest, now=now) for now in times}


def asked(deadline_s: float | None = None) -> Leaving:
    leaving = Leaving(Expected())
    leaving.ask(deadline_s, now=0.0)
    return leaving


def test_one_that_was_not_asked_stays() -> None:
    assert looks(Leaving(Expected()), 0.0, 100.0) == {Verdict.STAY}


def test_it_goes_when_all_has_been_quiet_for_a_while() -> None:
    leaving = asked()
    assert looks(leaving, 0.0, 5.0, is_at_rest=False) == {Verdict.STAY}
    assert leaving.decide(is_at_rest=True, now=5.0) is Verdict.STAY
    assert leaving.decide(is_at_rest=True, now=5.0 + QUIET_S) is Verdict.GO


def test_anything_that_comes_starts_the_quiet_time_anew() -> None:
    leaving = asked()
    assert leaving.decide(is_at_rest=True, now=0.0) is Verdict.STAY
    assert leaving.decide(is_at_rest=False, now=QUIET_S - 0.1) is Verdict.STAY
    assert leaving.decide(is_at_rest=True, now=QUIET_S) is Verdict.STAY
    assert leaving.decide(is_at_rest=True, now=2 * QUIET_S) is Verdict.GO


def test_it_waits_for_what_any_router_still_has_for_it() -> None:
    leaving = asked()
    for now in range(5):
        leaving.expected.record_in_flight(0, 0, float(now))
        leaving.expected.record_in_flight(1, 1, float(now))
        assert leaving.decide(is_at_rest=True, now=float(now)) is Verdict.STAY
    leaving.expected.record_in_flight(1, 0, 5.0)
    assert leaving.decide(is_at_rest=True, now=5.0) is Verdict.STAY
    assert leaving.decide(is_at_rest=True, now=5.0 + QUIET_S) is Verdict.GO


def test_a_router_that_died_does_not_keep_it() -> None:
    leaving = asked()
    leaving.expected.record_in_flight(0, 7, 0.0)
    assert leaving.decide(is_at_rest=True, now=ROUTER_LOST_S / 2) is Verdict.STAY
    assert leaving.decide(is_at_rest=True, now=ROUTER_LOST_S) is Verdict.STAY
    assert leaving.decide(is_at_rest=True, now=ROUTER_LOST_S + QUIET_S) is Verdict.GO


def test_a_deadline_cuts_off_what_is_left_and_the_last_word_counts() -> None:
    leaving = asked(deadline_s=10.0)
    assert looks(leaving, 0.0, 9.0, is_at_rest=False) == {Verdict.STAY}
    assert leaving.decide(is_at_rest=False, now=10.0) is Verdict.CUT_OFF
    leaving.ask(None, now=10.0)
    assert leaving.decide(is_at_rest=False, now=1000.0) is Verdict.STAY


def test_a_deadline_does_not_hurry_one_that_is_at_rest() -> None:
    leaving = asked(deadline_s=10.0)
    leaving.decide(is_at_rest=True, now=9.0)
    assert leaving.decide(is_at_rest=True, now=20.0) is Verdict.GO


P, D, B = instance("p", "prefill"), instance("d", "decode"), instance("b", "both")
P2, D2, B2 = instance("p2", "prefill"), instance("d2", "decode"), instance("b2", "both")


def test_one_that_is_about_to_change_its_role_does_not_stand_in() -> None:
    flip = Flip(1, Role.DECODE, Role.PREFILL, FlipStage.SWITCHING)
    assert why_needed(view(D, P, replace(D2, flip=flip)), D)
    assert not why_needed(view(D, P, replace(D2, flip=replace(flip, stage=FlipStage.DONE))), D)


@pytest.mark.parametrize(
    ("one", "becomes", "missing"),
    [(D, Role.PREFILL, "decode"), (D, Role.BOTH, ""), (P, Role.DECODE, "prefill")],
)
def test_what_it_becomes_may_do_instead(one: InstanceView, becomes: Role, missing: str) -> None:
    why = why_needed(view(P, D), one, becomes=becomes)
    assert why == (f"{one.info.id} is the last instance for {missing}" if missing else "")


@pytest.mark.parametrize(
    ("one", "others", "missing"),
    [
        (P, (D,), "prefill"),
        (D, (P,), "decode"),
        (P, (P2,), ""),
        (D, (P, D2), ""),
        (P, (B,), ""),
        (D, (B,), ""),
        (B, (), "decode and prefill"),
        (B, (P,), "decode"),
        (B, (P, D), ""),
        (B, (B2,), ""),
        (D, (P, instance("x", "decode", state="draining")), "decode"),
        (D, (P, instance("x", "decode", state="starting")), "decode"),
        (D, (P, instance("x", "decode", model="huge")), "decode"),
    ],
)
def test_the_last_one_for_something_is_needed(one, others, missing: str) -> None:
    why = why_needed(view(one, *others), one)
    assert why == (f"{one.info.id} is the last instance for {missing}" if missing else "")
