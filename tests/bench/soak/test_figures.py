"""What a soak makes of what it saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vllm_tetri.bench.soak.faults import AWAY, Fault, Kind
from vllm_tetri.bench.soak.report import plain, promise_of_rests, show
from vllm_tetri.bench.soak.silence import Gaps, Spread, gaps
from vllm_tetri.bench.soak.tally import (
    CALM,
    LASTS_S,
    Asked,
    End,
    Leftovers,
    promise_of_audits,
    promises_of_answers,
    rows,
)
from vllm_tetri.bench.soak.usage import Usage, promises_of_usage, trends
from vllm_tetri.bench.soak.watch import Look, Rest, Seen, busy_of, resumed_in


def asked(end: End, at_s: float, **more: Any) -> Asked:
    return Asked(end, at_s - 1, at_s, **more)


def test_a_request_is_on_the_account_of_the_newest_fault() -> None:
    faults = [Fault(Kind.KILL_DECODE, "d", 10.0, whole_s=14.0), Fault(Kind.STOP_ROUTER, "r", 20.0)]
    found = rows(
        [
            asked(End.GOOD, 9.0, gap_s=0.5),
            asked(End.LOST, 10.0),
            asked(End.GOOD, 19.0, gap_s=2.0, again=3),
            asked(End.WRONG, 21.0),
            asked(End.LEFT, 22.0),
        ],
        faults,
    )
    by_name = {row.name: row for row in found}
    assert list(by_name) == [CALM, "kill-decode", "stop-router", "all"]
    assert (by_name[CALM].good, by_name[CALM].faults) == (1, 0)
    killed = by_name["kill-decode"]
    assert (killed.lost, killed.good, killed.again, killed.gap_s, killed.whole_s) == (
        1, 1, 3, 2.0, 4.0,
    )  # fmt: skip
    stopped = by_name["stop-router"]
    assert (stopped.wrong, stopped.left, stopped.whole_s) == (1, 1, 0.0)
    assert (by_name["all"].faults, by_name["all"].lost, by_name["all"].good) == (2, 1, 2)


def broken(found: list[Asked], faults: list[Fault]) -> list[str]:
    return [each.text for each in promises_of_answers(found, faults) if not each.is_kept]


KILLED = Fault(Kind.KILL_ROUTER, "router-0", 10.0)


def test_only_what_went_with_its_router_may_be_lost() -> None:
    good, lost = asked(End.GOOD, 5.0), asked(End.LOST, 10.5, router="router-0")
    kept = promises_of_answers([good, lost], [KILLED])
    assert (kept[0].is_kept, kept[0].found) == (True, "0, 1 with their router")
    others = [
        asked(End.LOST, 10.5, router="router-1"),  # that one lived
        asked(End.LOST, 9.9, router="router-0"),  # so did that one, still
        asked(End.LOST, 13.0, router="router-0"),  # and the next of its name
    ]
    for each in others:
        assert broken([good, each], [KILLED]) == ["no request is lost"]
    stopped = Fault(Kind.STOP_ROUTER, "router-0", 10.0)
    assert broken([good, lost], [stopped]) == ["no request is lost"]
    bad = [good, asked(End.WRONG, 22.0), asked(End.ERROR, 23.0)]
    assert broken(bad, [KILLED]) == ["no answer ends with an error", "no answer is wrong"]


def test_a_router_that_lives_may_not_break_connections_before_it_answers() -> None:
    with_it = asked(End.GOOD, 10.5, router="router-1", broke=("router-0",), again=1)
    assert broken([with_it], [KILLED]) == []
    assert promises_of_answers([with_it], [KILLED])[1].found == "0, 1 with their router"
    alone = asked(End.GOOD, 10.5, router="router-0", broke=("router-1",), again=1)
    assert broken([alone], [KILLED]) == ["no router breaks a connection while it lives"]


def test_a_soak_without_an_answer_kept_nothing() -> None:
    assert not promises_of_answers([], [])[-1].is_kept


# -- silence -----------------------------------------------------------------------


def stream(*heard_s: float, **more: Any) -> Asked:
    return Asked(End.GOOD, heard_s[0] - 1, heard_s[-1], heard_s=heard_s, **more)


def test_silence_is_that_of_streams_under_way_from_a_fault_to_the_next() -> None:
    faults = [Fault(Kind.KILL_DECODE, "d", 10.0), Fault(Kind.STOP_ROUTER, "r", 20.0)]
    found = gaps(
        [
            stream(1.0, 1.5, 2.0),  # before all of them
            stream(4.0, 7.0, 9.5, 12.0, 12.5),  # what was before the fault does not count
            stream(9.0, 9.9, 14.0, 15.0, 18.0, id="moved"),
            stream(18.0, 19.0, 23.0),
            stream(21.0, 29.0),  # behind them
            Asked(End.LOST, 8.0, 30.0, heard_s=(9.0, 30.0)),
            Asked(End.GOOD, 8.0, 30.0),  # no stream
        ],
        faults,
        {"moved"},
    )
    by_name = {each.name: each for each in found}
    assert by_name[CALM] == Gaps(CALM, Spread(1, 0.5, 0.5, 0.5), Spread())
    killed = by_name["kill-decode"]
    assert killed.under_way.number == 2
    assert killed.under_way.longest_s == pytest.approx(4.1)
    assert killed.under_way.p50_s == pytest.approx((2.5 + 4.1) / 2)
    assert killed.resumed.number == 1
    assert killed.resumed.p99_s == pytest.approx(4.1)
    assert by_name["stop-router"].under_way == Spread(1, 4.0, 4.0, 4.0)
    assert by_name["stop-router"].resumed == Spread()
    assert (by_name["all faults"].under_way.number, by_name["all faults"].resumed.number) == (3, 1)


def test_a_stream_that_went_on_counts_under_the_fault_that_broke_it() -> None:
    faults = [Fault(Kind.STOP_ROUTER, "r", 10.0), Fault(Kind.KILL_ENGINE, "d", 20.0)]
    found = gaps([stream(9.0, 11.0, 19.5, 25.0, 26.0, id="moved")], faults, {"moved"})
    by_name = {each.name: each for each in found}
    assert by_name["stop-router"].resumed.number == 1  # 8.5 s, longer than those 5.5
    quick = gaps([stream(9.0, 10.5, 15, 19.5, 25.0, id="moved")], faults, {"moved"})
    by_name = {each.name: each for each in quick}
    assert by_name["kill-engine"].resumed == Spread(1, 5.5, 5.5, 5.5)
    assert by_name["stop-router"].under_way.number == 1


def test_a_stream_may_begin_behind_the_fault_that_breaks_it() -> None:
    faults = [Fault(Kind.KILL_ENGINE, "d", 10.0)]
    found = gaps([stream(10.5, 10.75, 13.0, 13.5, id="moved")], faults, {"moved"})
    by_name = {each.name: each for each in found}
    assert by_name["kill-engine"].resumed == Spread(1, 2.25, 2.25, 2.25)
    assert by_name["kill-engine"].under_way == Spread()


def test_routers_say_in_their_logs_what_they_went_on_with(tmp_path: Path) -> None:
    line = "INFO vllm_tetri.router.relay: request {} goes on after 0.412 s\n"
    (tmp_path / "router-0.log").write_text("clients: here\n" + line.format("soak-a"))
    (tmp_path / "router-1.log").write_text(line.format("soak-b") + line.format("soak-c"))
    (tmp_path / "prefill-0.log").write_text(line.format("soak-d"))
    assert resumed_in(tmp_path) == {"soak-a", "soak-b", "soak-c"}


# -- rests -------------------------------------------------------------------------


def test_only_leftovers_that_stay_break_a_promise() -> None:
    leftovers = Leftovers()
    leftovers.note({"d": ["3 blocks"], "p": []}, 0.0)
    leftovers.note({"d": ["4 blocks"]}, LASTS_S - 0.1)
    assert promise_of_audits(leftovers).is_kept
    assert promise_of_audits(leftovers).found == "nothing (for less than 5 s: d: blocks)"
    leftovers.note({"d": ["4 blocks"]}, LASTS_S)
    assert not promise_of_audits(leftovers).is_kept
    assert promise_of_audits(leftovers).found == "d: blocks"


def test_leftovers_that_come_and_go_or_wait_for_somebody_stopped_do_not_stay() -> None:
    leftovers = Leftovers()
    leftovers.note({"d": ["3 blocks"]}, 0.0)
    leftovers.note({"d": []}, 3.0)
    leftovers.note({"d": ["3 blocks"]}, 6.0)
    leftovers.excuse()
    leftovers.note({"d": ["3 blocks"]}, 12.0)
    assert leftovers.stayed == set()


def usage(minute: float, processes: int = 10, **more: int) -> Usage:
    usual = {"rss_bytes": 1 << 30, "descriptors": 500, "threads": 200, "shared_bytes": 1 << 28}
    return Usage(at_s=60 * minute, processes=processes, **{**usual, **more})


def test_slopes_leave_out_samples_with_another_number_of_processes() -> None:
    samples = [usage(0), usage(1, processes=9, descriptors=9), usage(2, descriptors=700)]
    found = {each.name: each for each in trends(samples)}
    descriptors = found["file descriptors"]
    assert (descriptors.start, descriptors.end) == (500, 700)
    assert descriptors.per_minute == pytest.approx(100)
    assert found["threads"].per_minute == 0


def test_the_sample_before_the_first_fault_counts_only_where_others_are_missing() -> None:
    cold = usage(0, rss_bytes=1 << 29)
    warm = [usage(minute) for minute in (10, 20, 30)]
    found = {each.name: each for each in trends([cold, *warm])}
    assert found["memory (MiB)"].growth == 0
    found = {each.name: each for each in trends([cold, *warm[:2]])}
    assert found["memory (MiB)"].growth > 0


def test_one_sample_among_many_is_no_growth() -> None:
    samples = [usage(2 * each) for each in range(16)]
    samples[12] = usage(24, descriptors=600, rss_bytes=3 << 29)
    assert all(each.is_kept for each in promises_of_usage(samples) if "shm" not in each.text)
    grows = [usage(2 * each, descriptors=500 + 6 * each) for each in range(16)]
    assert [each.text for each in promises_of_usage(grows) if not each.is_kept] == [
        "file descriptors: no growth"
    ]


@pytest.mark.parametrize(
    ("last", "broken"),
    [
        (usage(30), None),
        (usage(30, descriptors=540), None),
        (usage(30, descriptors=541), "file descriptors: no growth"),
        (usage(30, threads=221), "threads: no growth"),
        (usage(30, shared_bytes=(1 << 28) + 1), "/dev/shm (MiB): no growth"),
        (usage(30, rss_bytes=3 << 29), "memory (MiB): no growth"),
    ],
)
def test_growth_breaks_a_promise(last: Usage, broken: str | None) -> None:
    found = promises_of_usage([usage(0), last])
    assert [each.text for each in found if each.is_kept is False] == ([broken] if broken else [])


def test_processes_that_stay_break_a_promise_and_leave_nothing_to_compare() -> None:
    """Every rest finds one more, so no two samples are of the same processes."""
    samples = [usage(2 * each, 10 + each, descriptors=500 + 100 * each) for each in range(8)]
    found = {each.text: each.is_kept for each in promises_of_usage(samples)}
    assert found.pop("processes: no growth") is False
    assert set(found.values()) == {None}
    steady = [usage(2 * each, 10 + each % 2) for each in range(8)]
    assert promises_of_usage(steady)[0].is_kept
    assert {each.is_kept for each in promises_of_usage(samples[:1])} == {None}


def test_memory_is_not_judged_after_a_short_time() -> None:
    found = promises_of_usage([usage(0), usage(3, rss_bytes=3 << 29)])
    assert [each.text for each in found if each.is_kept is None] == ["memory (MiB): no growth"]


def test_the_table_says_what_was_broken() -> None:
    seen = Seen(asked=[asked(End.GOOD, 1.0), asked(End.ERROR, 12.0, words="HTTP 502 it broke")])
    seen.faults.append(Fault(Kind.KILL_DECODE, "decode-0", 10.0, whole_s=12.5))
    seen.rests.append(Rest(1, 4.0, ("decode-0: held 2",)))
    seen.samples += [usage(0), usage(1)]
    console = Console(width=150, record=True, quiet=False, force_terminal=False)
    with console.capture() as shown:
        assert not show(console, seen)
    text = shown.get()
    assert "BROKEN" in text
    assert "1 × error: HTTP 502 it broke" in text
    assert "behind 1 faults: decode-0: held 2" in text
    found = json.loads(json.dumps(plain(seen, {"seed": 0})))
    assert found["faults"][0]["whole_s"] == 2.5
    assert [each["name"] for each in found["gaps"]] == [CALM, "kill-decode", "all faults"]


def test_every_rest_has_to_be_one() -> None:
    assert not promise_of_rests([]).is_kept
    kept = promise_of_rests([Rest(0, 2.5, ()), Rest(9, 41.0, ())])
    assert (kept.is_kept, kept.found) == (True, "everything, 2 times, within 41 s")
    missed = promise_of_rests([Rest(0, 2.5, ()), Rest(9, 180.0, ("router-1 does not answer",))])
    assert (missed.is_kept, missed.found) == (False, "behind 9 faults: router-1 does not answer")


READY = {"role": "decode", "state": "ready"}
SILENT = {"role": "decode", "state": "silent"}


def test_a_router_that_starts_is_not_believed() -> None:
    look = Look({"router-0": {}, "router-1": {"d": READY}}, {"p's predictor": "ready"})
    assert look.states() == {
        "router-0": ("router", AWAY),
        "router-1": ("router", "ready"),
        "d": ("decode", "ready"),
        "p's predictor": ("predictor", "ready"),
    }
    assert Look({"router-0": {}}).states() == {"router-0": ("router", AWAY)}


def test_everybody_has_to_be_there_for_every_router() -> None:
    assert Look({"a": {"d": READY}, "b": {"d": READY}}, {"x": "ready"}).missing("d", "x") == []
    assert Look({"a": {"d": READY}, "b": {"d": SILENT}}).missing("d", "x") == [
        "d is not ready for b",
        "x does not run",
    ]
    assert Look({"a": {"d": READY}, "b": {}}).missing("d", "") == ["b does not answer"]


def test_what_is_busy_is_named() -> None:
    table = {
        "d": {"state": "ready", "running": 0, "held": 2},
        "gone": {"state": "silent", "running": 5},
    }
    assert busy_of(table) == ["d: held 2"]
