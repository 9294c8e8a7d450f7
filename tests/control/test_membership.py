"""The table of instances, with a clock of the test's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.policy.builders import info
from vllm_tetri.control.membership import MAX_DEPARTED, Membership
from vllm_tetri.control.views import GONE_AFTER_S, Received, merge_views
from vllm_tetri.errors import ProtocolError
from vllm_tetri.messages import Leave, Left, LoadReport
from vllm_tetri.types import ClusterView, InstanceId, InstanceLoad, InstanceState, InstanceView

ONE, TWO = info("one", "decode"), info("two", "prefill")
SILENT_AFTER_S = 1.0


def joined(*, is_ready: bool = True) -> Membership:
    members = Membership(SILENT_AFTER_S)
    for one in (ONE, TWO):
        members.join(one.id.encode(), one, 0.0)
        if is_ready:
            members.mark_ready(one)
    return members


def report(members: Membership, name: str, now: float, *, seq: int = 1, **options: bool) -> bool:
    message = LoadReport(InstanceId(name), seq, InstanceLoad(running=seq), **options)
    return members.report(name.encode(), message, now)


def states(members: Membership, now: float) -> dict[str, str]:
    return {each.info.id: each.state.value for each in members.views(now)}


def test_a_report_is_shown_with_its_number_and_its_age() -> None:
    members = joined()
    assert report(members, "one", 0.3, seq=7)
    one = members.view_of(InstanceId("one"), 0.5)
    assert one is not None
    assert (one.seq, one.load.running, round(one.age_s, 3)) == (7, 7, 0.2)
    assert members.view_of(InstanceId("nobody"), 0.5) is None
    assert not members.report(b"nobody", LoadReport(InstanceId("one"), 1, InstanceLoad()), 0.5)


def test_silence_takes_an_instance_out_of_use_and_later_out_of_the_view() -> None:
    members = joined()
    report(members, "two", SILENT_AFTER_S)
    assert states(members, SILENT_AFTER_S) == {"one": "silent", "two": "ready"}
    members.forget_gone(GONE_AFTER_S - 0.1)
    assert states(members, GONE_AFTER_S - 0.1) == {"one": "silent", "two": "silent"}
    report(members, "two", GONE_AFTER_S)
    members.forget_gone(GONE_AFTER_S)
    assert states(members, GONE_AFTER_S) == {"two": "ready"}
    assert not report(members, "one", GONE_AFTER_S)  # it has to introduce itself again


def test_one_that_is_asked_leaves_until_it_is_gone() -> None:
    members, name = joined(), InstanceId("one")
    assert members.leave_for(name, 0.0) is None
    members.ask_to_leave(name, by_s=10.0)
    report(members, "one", 0.1)
    assert states(members, 0.2) == {"one": "leaving", "two": "ready"}
    assert members.leave_for(name, 4.0) == Leave(6.0)  # its report did not say so: again
    assert members.leave_for(name, 40.0) == Leave(0.0)
    report(members, "one", 0.3, is_leaving=True)
    assert members.leave_for(name, 0.4) is None
    members.join(b"other connection", ONE, 0.5)
    assert states(members, 0.5)["one"] == "leaving"
    assert members.left(b"other connection", Left(name, was_asked=True, cut_off="something"))
    assert states(members, 0.5) == {"two": "ready"}
    assert members.departed == {"one": "something"}


def test_one_that_still_starts_is_told_when_it_has_started() -> None:
    members, name = joined(is_ready=False), InstanceId("one")
    members.ask_to_leave(name, by_s=2.0)
    assert members.leave_for(name, 0.1) is None
    assert states(members, 0.1)["one"] == "leaving"
    members.mark_ready(ONE)
    assert members.leave_for(name, 0.5) == Leave(1.5)


def test_what_one_router_asked_for_is_known_to_all_by_the_report() -> None:
    members = joined()
    report(members, "one", 0.1, is_leaving=True)
    assert states(members, 0.1)["one"] == "leaving"
    assert members.leave_for(InstanceId("one"), 0.1) is None


def test_leaving_and_silent_is_silent() -> None:
    members = joined()
    members.ask_to_leave(InstanceId("one"), by_s=None)
    assert states(members, SILENT_AFTER_S)["one"] == "silent"


def test_a_time_in_which_nobody_could_be_heard_is_no_silence() -> None:
    members = joined()
    members.forgive(5.0, 5.0)
    assert states(members, 5.0) == {"one": "ready", "two": "ready"}
    assert states(members, 5.0 + SILENT_AFTER_S) == {"one": "silent", "two": "silent"}
    report(members, "one", 6.0)
    members.forgive(5.0, 6.0)  # it has been heard since
    assert {each.info.id: each.age_s for each in members.views(6.0)} == {"one": 0.0, "two": 0.0}


def test_one_that_comes_back_is_not_leaving_nor_departed() -> None:
    members, name = joined(), InstanceId("one")
    members.ask_to_leave(name, by_s=None)
    members.join(b"new process", replace(ONE, pid=99), 0.1)
    assert states(members, 0.1)["one"] == "starting"
    members.left(b"new process", Left(name, was_asked=True))
    assert members.departed == {"one": ""}
    members.join(b"one", ONE, 0.2)
    assert members.departed == {}


def test_one_that_ended_unasked_is_only_forgotten() -> None:
    members = joined()
    assert not members.left(b"two", Left(InstanceId("one")))
    assert members.left(b"one", Left(InstanceId("one")))
    assert members.departed == {}
    assert not members.left(b"one", Left(InstanceId("one")))


def test_only_the_newest_departures_are_remembered() -> None:
    members = Membership(SILENT_AFTER_S)
    for number in range(MAX_DEPARTED + 5):
        one = info(f"i{number}")
        members.join(b"x", one, 0.0)
        members.left(b"x", Left(one.id, was_asked=True))
    assert len(members.departed) == MAX_DEPARTED
    assert "i4" not in members.departed


def test_views_go_to_who_dispatches_and_cues_to_the_others_and_who_leaves() -> None:
    members = joined()
    members.join(b"b", info("b", "both"), 0.0)
    assert members.dispatchers() == [b"two", b"b"]
    assert members.cued() == [(b"one", "one", False)]
    members.ask_to_leave(InstanceId("two"), by_s=None)
    assert members.dispatchers() == [b"two", b"b"]
    assert members.cued() == [(b"one", "one", False), (b"two", "two", True)]


def seen(state: str, age_s: float) -> ClusterView:
    one = InstanceView(ONE, InstanceState(state), InstanceLoad(), age_s, seq=3)
    return ClusterView("router", 1, (one,))


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [
        (("ready", 0.1), ("starting", 0.0), "ready"),
        (("ready", 0.0), ("leaving", 0.1), "leaving"),
        (("silent", 5.0), ("ready", 0.0), "ready"),
        (("ready", 5.0), ("silent", 2.0), "silent"),
    ],
)
def test_of_two_routers_the_one_that_knows_more_counts(
    first: tuple[str, float], second: tuple[str, float], state: str
) -> None:
    received = Received(seen(*first), 10.0), Received(seen(*second), 10.0)
    for order in (received, received[::-1]):
        (one,) = merge_views(order, 10.5).instances
        assert (one.state, one.seq) == (state, 3)


def test_what_no_router_heard_of_for_a_minute_leaves_the_view() -> None:
    received = (Received(seen("ready", 1.0), 10.0),)
    assert len(merge_views(received, 10.0 + GONE_AFTER_S - 1.1).instances) == 1
    assert merge_views(received, 10.0 + GONE_AFTER_S - 1.0).instances == ()


@pytest.mark.parametrize("port", ["", "x", "0", "65536", "-1", "\u00b2", "9" * 5000], ids=len)
def test_what_is_no_kv_endpoint_is_refused(port: str) -> None:
    members = joined()
    with pytest.raises(ProtocolError, match="KV endpoint"):
        members.join(b"three", replace(ONE, id=InstanceId("three"), kv_endpoint=f"h:{port}"), 0.0)
