"""Changing role and leaving, as one instance does both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.policy.builders import instance, view
from vllm_tetri.policy.role import (
    QUIET_S,
    ROUTER_LOST_S,
    Expected,
    Flipping,
    Leaving,
    Verdict,
    why_needed,
)
from vllm_tetri.types import Flip, FlipStage, InstanceView, Role

BUSY = "1 unfinished requests"


def ordered(
    target: Role = Role.PREFILL, *, is_now: bool = False, deadline_s: float | None = 60.0
) -> Flipping:
    flipping = Flipping(Role.DECODE)
    assert flipping.order(1, target, is_now=is_now, deadline_s=deadline_s, reason="why", now=0.0)
    return flipping


def test_it_drains_until_nothing_is_left_here_or_on_its_way() -> None:
    flipping = ordered()
    flipping.advance("", 0.1)
    assert flipping.wanted is None  # no router has said yet that it has nothing
    flipping.expected.record_in_flight(0, 2, 0.2)
    flipping.advance("", 0.2)
    assert flipping.stage is FlipStage.DRAINING
    flipping.expected.record_in_flight(0, 0, 0.3)
    flipping.advance(BUSY, 0.3)
    assert flipping.stage is FlipStage.DRAINING
    flipping.advance("", 0.5)
    assert flipping.wanted is Role.PREFILL
    assert flipping.role is Role.DECODE
    flipping.record_taken(0.51)
    assert (flipping.role, flipping.stage) == (Role.PREFILL, None)
    assert flipping.record_commit(1, 0.502, 0.504)
    assert not flipping.record_commit(1, 0.7, 0.8)  # of a second router
    flip = flipping.newest(1.51)
    assert flip is not None
    assert (flip.source, flip.target, flip.stage) == (Role.DECODE, Role.PREFILL, FlipStage.DONE)
    assert (flip.drain_s, flip.commit_s, flip.age_s) == pytest.approx((0.5, 0.002, 1.0))
    assert (flip.epoch, flip.reason, flip.problem) == (1, "why", "")


def test_at_once_it_waits_for_the_step_boundary_only() -> None:
    flipping = ordered(is_now=True)
    assert flipping.wanted is Role.PREFILL
    flipping.advance(BUSY, 0.1)
    assert flipping.stage is FlipStage.SWITCHING
    flipping.record_taken(0.4)
    flipping.record_commit(1, 77.0, 0.401)  # another machine's clock
    flip = flipping.newest(0.4)
    assert flip is not None
    assert (flip.drain_s, flip.commit_s) == pytest.approx((0.0, 0.001))


def test_without_a_router_it_goes_on_after_a_while() -> None:
    flipping = ordered()
    flipping.expected.record_in_flight(0, 3, 0.0)
    flipping.advance("", ROUTER_LOST_S - 0.1)
    assert flipping.stage is FlipStage.DRAINING
    flipping.advance("", ROUTER_LOST_S)
    assert flipping.stage is FlipStage.SWITCHING


@pytest.mark.parametrize(
    ("left", "problem"),
    [(BUSY, "not drained in time: " + BUSY), ("", "not drained in time: more is on its way")],
)
def test_past_its_deadline_it_is_what_it_was(left: str, problem: str) -> None:
    flipping = ordered(deadline_s=5.0)
    for second in range(6):
        flipping.expected.record_in_flight(0, 1, float(second))
        flipping.advance(left, float(second))
    flip = flipping.newest(7.0)
    assert flip is not None
    assert (flipping.stage, flipping.role, flipping.wanted) == (None, Role.DECODE, None)
    assert (flip.stage, flip.problem, flip.age_s) == (FlipStage.ROLLED_BACK, problem, 2.0)


def test_every_router_that_can_be_heard_has_a_say() -> None:
    flipping = Flipping(Role.DECODE)
    flipping.expected.record_message(1, -0.1)
    flipping.order(1, Role.PREFILL, is_now=False, deadline_s=None, reason="why", now=0.0)
    flipping.expected.record_in_flight(0, 0, 0.1)
    flipping.advance("", 0.1)
    assert flipping.stage is FlipStage.DRAINING  # the other one has not told yet
    flipping.expected.record_in_flight(1, 3, 0.2)
    flipping.advance("", 0.2)
    assert flipping.stage is FlipStage.DRAINING
    flipping.expected.record_in_flight(1, 0, 0.3)
    flipping.advance("", 0.3)
    assert flipping.stage is FlipStage.SWITCHING


def test_an_engine_that_takes_no_step_keeps_its_role() -> None:
    flipping = ordered(is_now=True, deadline_s=5.0)
    assert not flipping.is_overdue(4.9)
    assert flipping.is_overdue(5.0)
    flipping.roll_back("the engine takes no step", 5.0)
    flip = flipping.newest(5.0)
    assert flip is not None
    assert (flipping.role, flip.problem) == (Role.DECODE, "the engine takes no step")


def order(flipping: Flipping, epoch: int, role: Role, *, is_now: bool = False) -> bool:
    return flipping.order(epoch, role, is_now=is_now, deadline_s=None, reason="again", now=1.0)


@pytest.mark.parametrize("epoch", [-1, 0, 1])
def test_orders_that_are_repeated_or_late_do_nothing(epoch: int) -> None:
    flipping = ordered()
    assert not order(flipping, epoch, Role.BOTH)
    assert flipping.epoch == 1
    flipping.advance("", ROUTER_LOST_S)
    assert flipping.wanted is Role.PREFILL


def test_its_present_role_calls_a_drain_off() -> None:
    flipping = ordered()
    assert order(flipping, 2, Role.DECODE)
    flip = flipping.newest(1.0)
    assert flip is not None
    assert (flipping.stage, flipping.epoch) == (None, 2)
    assert (flip.stage, flip.problem) == (FlipStage.ROLLED_BACK, "called off: again")
    assert not order(flipping, 3, Role.DECODE)
    assert flipping.epoch == 3  # heard, so the router need not say it again
    assert order(flipping, 4, Role.PREFILL)


def test_a_drain_can_be_cut_short() -> None:
    flipping = ordered()
    assert order(flipping, 2, Role.PREFILL, is_now=True)
    assert flipping.wanted is Role.PREFILL


def test_while_the_engine_switches_orders_wait() -> None:
    flipping = ordered(is_now=True)
    assert not order(flipping, 2, Role.DECODE)
    assert flipping.epoch == 1
    flipping.record_taken(1.0)
    assert order(flipping, 2, Role.DECODE)


# -- leaving ----


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
