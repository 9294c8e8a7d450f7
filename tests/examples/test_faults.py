"""Soak and overload: which member a fault hits, and what becomes of a verdict."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from examples.benchmarks.client import Reply, Request
from examples.benchmarks.faults import (
    KINDS,
    LASTS_S,
    Asked,
    Deck,
    Fault,
    Leftovers,
    promises_of_outputs,
    promises_of_usage,
    rows,
    victims,
)
from examples.benchmarks.overload import back_s, promises, row
from examples.benchmarks.soak import end_of

STATES = {
    "prefill-0": ("prefill", "ready"),
    "prefill-1": ("prefill", "ready"),
    "decode-0": ("decode", "ready"),
    "decode-1": ("decode", "starting"),
    "router-0": ("router", "ready"),
    "prefill-0's predictor": ("predictor", "ready"),
}


@pytest.mark.parametrize(
    ("kind", "hit"),
    [
        ("kill-prefill", ["prefill-0", "prefill-1"]),
        ("kill-decode", []),
        ("stop-router", []),
        ("kill-predictor", ["prefill-0's predictor"]),
        ("kill-engine", ["prefill-0", "prefill-1"]),
    ],
)
def test_the_last_ready_member_of_a_role_is_spared(kind: str, hit: list[str]) -> None:
    assert victims(kind, STATES) == hit


def test_every_kind_is_drawn_equally_often() -> None:
    everything = {f"{role}-{n}": (role, "ready") for role in ("prefill", "decode", "router")
                  for n in range(2)} | {"p": ("predictor", "ready")}  # fmt: skip
    deck = Deck(KINDS, 2 * len(KINDS), Random(0))
    drawn = [deck.draw(everything) for _ in range(2 * len(KINDS))]
    assert Counter(each[0] for each in drawn if each) == dict.fromkeys(KINDS, 2)
    assert len(deck) == 0
    assert deck.draw(everything) is None


def test_a_victim_is_whole_only_after_it_was_gone() -> None:
    fault = Fault("kill-prefill", "prefill-0", 10.0)
    for now, state in ((10.1, "ready"), (11.0, "dead"), (15.0, "ready"), (16.0, "ready")):
        fault.observe({"prefill-0": ("prefill", state)}, now)
    assert fault.whole_s == 15.0


def asked(end: str, ended_s: float, router: str = "router-0", broke: tuple[str, ...] = ()) -> Asked:
    return Asked(end, ended_s - 1.0, ended_s, 0.5, router=router, broke=broke)


def test_requests_are_counted_under_the_newest_fault_before_their_end() -> None:
    hits = [Fault("kill-prefill", "prefill-0", 10.0, True, 13.0), Fault("stop-decode", "d", 20.0)]
    ends = [asked("good", 5.0), asked("good", 12.0), asked("error", 19.0), asked("good", 30.0)]
    table = {each["after"]: each for each in rows(ends, hits)}
    assert list(table) == ["no fault", "kill-prefill", "stop-decode", "all"]
    assert (table["kill-prefill"]["good"], table["kill-prefill"]["error"]) == (1, 1)
    assert table["kill-prefill"]["whole after, s"] == 3.0
    assert table["all"]["good"] == 3


@pytest.mark.parametrize(
    ("end", "broken"),
    [
        (asked("lost", 12.0), "no request is lost"),
        (asked("error", 12.0), "no output ends with an error"),
        (asked("wrong", 12.0), "no output is wrong"),
        (asked("good", 12.0, broke=("router-0",)), "no router breaks a connection while it lives"),
    ],
)
def test_a_bad_end_breaks_its_promise_and_no_other(end: Asked, broken: str) -> None:
    kept = promises_of_outputs([asked("good", 5.0), end], [])
    assert [each.text for each in kept if not each.is_kept] == [broken]


def test_a_request_dies_with_its_router() -> None:
    ends = [asked("lost", 12.0), asked("good", 12.0, broke=("router-0",))]
    kept = promises_of_outputs(ends, [Fault("kill-router", "router-0", 11.5)])
    assert all(each.is_kept for each in kept)


def test_leftovers_count_when_they_last() -> None:
    leftovers = Leftovers()
    leftovers.record({"decode-0": ["1 slot"]}, 0.0)
    leftovers.record({"decode-0": []}, 1.0)
    leftovers.record({"decode-0": ["2 slot"]}, 2.0)
    assert leftovers.promise().is_kept
    leftovers.record({"decode-0": ["1 slot"]}, 2.0 + LASTS_S)
    assert not leftovers.promise().is_kept


def usage(descriptors: float) -> dict[str, float]:
    return {"processes": 4, "descriptors": descriptors, "threads": 40, "shared MiB": 64}


@pytest.mark.parametrize(
    ("counts", "is_kept"),
    [((50, 100, 102, 101, 100), True), ((50, 100, 150, 200, 250), False), ((50,), None)],
)
def test_usage_at_rest_may_not_grow(counts: tuple[int, ...], is_kept: bool | None) -> None:
    kept = {each.text: each.is_kept for each in promises_of_usage([usage(n) for n in counts])}
    assert kept["descriptors: no growth"] is is_kept


def test_an_output_is_compared_token_by_token() -> None:
    known = Reply(200, text="ab", token_ids=[1, 2], num_tokens=2)
    assert end_of(known, known) == ("good", "")
    assert end_of(Reply(200, text="ac", token_ids=[1, 3], num_tokens=2), known)[0] == "wrong"
    assert end_of(Reply(error='{"error": {"message": "no"}}'), known)[0] == "error"
    assert end_of(Reply(error="connection lost"), known)[0] == "lost"


# -- overload ------------------------------------------------------------------------

SERVED = Reply(200, ttft_s=0.1, jct_s=0.5, num_tokens=4)
REFUSAL = Reply(429, jct_s=0.01, headers={"retry-after": "1"}, error='{"error": {"message": "x"}}')


def at(at_s: float, reply: Reply) -> tuple[Request, Reply]:
    return Request(at_s, [1], 4), reply


def test_a_refusal_without_a_time_to_return_is_bad() -> None:
    vague = Reply(429, error='{"error": {"message": "x"}}')
    found = row("overload", [at(0.0, SERVED), at(1.0, REFUSAL), at(2.0, vague)], 0.0, 10.0)
    assert (found["sent"], found["served"], found["refused"], found["bad"]) == (3, 1, 1, 1)
    assert found["TTFT p50, ms"] == 100.0


def test_service_is_back_when_the_last_unusual_request_is_over() -> None:
    usual = [at(float(second), SERVED) for second in range(10, 30)]
    assert back_s(usual, 10.0, 30.0, 0.2) == 0.0
    assert back_s([*usual, at(12.0, REFUSAL)], 10.0, 30.0, 0.2) == 2.0
    assert back_s([*usual, at(28.0, REFUSAL)], 10.0, 30.0, 0.2) is None


def test_a_short_overload_says_nothing_about_speed() -> None:
    parts = [row(name, [at(0.0, SERVED)], 0.0, 10.0) for name in ("normal", "overload", "after")]
    of_speed = [each.is_kept for each in promises(parts, 100.0, 14.0, 10.0)][1:]
    assert of_speed == [None, None]
    of_speed = [each.is_kept for each in promises(parts, 100.0, 14.0, 60.0)][1:]
    assert of_speed == [False, False]
