"""The table of instances, with a clock of the test's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.policy.builders import info
from vllm_tetri.control.membership import MAX_DEPARTED, Membership
from vllm_tetri.control.view import GONE_AFTER_S, ViewStore, row_of
from vllm_tetri.errors import ProtocolError
from vllm_tetri.messages import Drain, Goodbye, LoadReport, Poll
from vllm_tetri.types import InstanceId, InstanceLoad, InstanceState, InstanceView

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
    return members.report(name.encode(), message, now).is_welcome


def states(members: Membership, now: float) -> dict[str, str]:
    return {each.info.id: each.state.value for each in members.views(now)}


def test_a_report_is_shown_with_its_number_and_its_age() -> None:
    members = joined()
    assert report(members, "one", 0.3, seq=7)
    one = members.view_of(InstanceId("one"), 0.5)
    assert one is not None
    assert (one.seq, one.load.running, round(one.age_s, 3)) == (7, 7, 0.2)
    assert members.view_of(InstanceId("unknown"), 0.5) is None
    foreign = LoadReport(InstanceId("one"), 1, InstanceLoad())
    assert not members.report(b"unknown", foreign, 0.5).is_welcome


def test_silence_takes_an_instance_out_of_use_and_later_out_of_the_view() -> None:
    members = joined()
    report(members, "two", SILENT_AFTER_S)
    assert states(members, SILENT_AFTER_S) == {"one": "silent", "two": "ready"}
    assert members.forget_gone(GONE_AFTER_S - 0.1) == []
    assert states(members, GONE_AFTER_S - 0.1) == {"one": "silent", "two": "silent"}
    report(members, "two", GONE_AFTER_S)
    assert members.forget_gone(GONE_AFTER_S) == ["one"]
    assert states(members, GONE_AFTER_S) == {"two": "ready"}
    assert not report(members, "one", GONE_AFTER_S)  # it has to introduce itself again


def test_one_that_is_asked_leaves_until_it_is_gone() -> None:
    members, name = joined(), InstanceId("one")
    assert members.orders_for(name, 0.0) == []
    members.order_drain(name, by_s=10.0)
    report(members, "one", 0.1)
    assert states(members, 0.2) == {"one": "draining", "two": "ready"}
    assert members.orders_for(name, 4.0) == [Drain(6.0)]  # its report did not say so: again
    assert members.orders_for(name, 40.0) == [Drain(0.0)]
    report(members, "one", 0.3, is_draining=True)
    assert members.orders_for(name, 0.4) == []
    members.join(b"other connection", ONE, 0.5)
    assert states(members, 0.5)["one"] == "draining"
    assert members.left(b"other connection", Goodbye(name, was_asked=True, cut_off="something"))
    assert states(members, 0.5) == {"two": "ready"}
    assert members.departed == {"one": "something"}


def test_one_that_still_starts_is_told_when_it_has_started() -> None:
    members, name = joined(is_ready=False), InstanceId("one")
    members.order_drain(name, by_s=2.0)
    assert members.orders_for(name, 0.1) == []
    assert states(members, 0.1)["one"] == "draining"
    members.mark_ready(ONE)
    assert members.orders_for(name, 0.5) == [Drain(1.5)]


def test_what_one_router_asked_for_is_known_to_all_by_the_report() -> None:
    members = joined()
    report(members, "one", 0.1, is_draining=True)
    assert states(members, 0.1)["one"] == "draining"
    assert members.orders_for(InstanceId("one"), 0.1) == []
    assert states(members, 0.1 + SILENT_AFTER_S)["one"] == "silent"


def test_a_time_in_which_the_router_could_not_receive_is_no_silence() -> None:
    members = joined()
    members.forgive(5.0, 5.0)
    assert states(members, 5.0) == {"one": "ready", "two": "ready"}
    assert states(members, 5.0 + SILENT_AFTER_S) == {"one": "silent", "two": "silent"}
    report(members, "one", 6.0)
    members.forgive(5.0, 6.0)  # it has been heard since
    assert {each.info.id: each.age_s for each in members.views(6.0)} == {"one": 0.0, "two": 0.0}


def test_one_that_comes_back_is_not_leaving_nor_departed() -> None:
    members, name = joined(), InstanceId("one")
    members.order_drain(name, by_s=None)
    members.join(b"new process", replace(ONE, pid=99), 0.1)
    assert states(members, 0.1)["one"] == "starting"
    members.left(b"new process", Goodbye(name, was_asked=True))
    assert members.departed == {"one": ""}
    members.join(b"one", ONE, 0.2)
    assert members.departed == {}


def test_an_older_report_is_of_another_process_which_has_to_introduce_itself() -> None:
    members = joined()
    assert report(members, "one", 0.1, seq=9)
    assert report(members, "one", 0.1, seq=9)  # by two addresses of this router
    members.join(b"one", ONE, 0.2)
    assert report(members, "one", 0.2, seq=10)  # a connection broke
    assert states(members, 0.2)["one"] == "ready"
    members.join(b"one", ONE, 0.3)
    assert not report(members, "one", 0.3, seq=1)
    assert not report(members, "one", 0.4, seq=2)  # the answer got lost
    members.join(b"one", ONE, 0.5)
    assert report(members, "one", 0.5, seq=3)
    assert states(members, 0.5)["one"] == "starting"


def test_one_that_ended_unasked_is_only_forgotten() -> None:
    members = joined()
    assert not members.left(b"two", Goodbye(InstanceId("one")))
    assert members.left(b"one", Goodbye(InstanceId("one")))
    assert members.departed == {}
    assert not members.left(b"one", Goodbye(InstanceId("one")))


def test_a_server_that_ends_unasked_was_not_drained_though_one_of_its_ranks_was() -> None:
    members = joined()
    for rank in ("s-dp0", "s-dp1"):
        members.join(rank.encode(), info(rank, "both"), 0.0)
    assert members.left(b"s-dp0", Goodbye(InstanceId("s-dp0"), was_asked=True))
    assert members.left(b"two", Goodbye(InstanceId("two"), was_asked=True))
    assert members.departed == {"s-dp0": "", "two": ""}
    assert members.left(b"s-dp1", Goodbye(InstanceId("s-dp1")))
    assert members.departed == {"two": ""}


def test_only_the_newest_departures_are_remembered() -> None:
    members = Membership(SILENT_AFTER_S)
    for number in range(MAX_DEPARTED + 5):
        one = info(f"i{number}")
        members.join(b"x", one, 0.0)
        members.left(b"x", Goodbye(one.id, was_asked=True))
    assert len(members.departed) == MAX_DEPARTED
    assert "i4" not in members.departed


def test_a_poll_carries_views_to_dispatchers_and_requests_in_flight_to_those_that_end() -> None:
    members = joined()
    members.join(b"b", info("b", "both"), 0.0)
    one, two, both = (InstanceId(name) for name in ("one", "two", "b"))
    assert [*map(members.dispatches, (one, two, both))] == [False, True, True]
    assert not any(map(members.is_ending, (one, two, both)))
    members.order_drain(InstanceId("two"), by_s=None)
    assert [*map(members.is_ending, (one, two, both))] == [False, True, False]


def seen(state: str, age_s: float) -> Poll:
    one = InstanceView(ONE, InstanceState(state), InstanceLoad(), age_s, seq=3)
    return Poll("router", 1, 1, (ONE,), [row_of(one)])


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [
        (("ready", 0.1), ("starting", 0.0), "ready"),
        (("ready", 0.0), ("draining", 0.1), "draining"),
        (("silent", 5.0), ("ready", 0.0), "ready"),
        (("ready", 5.0), ("silent", 2.0), "silent"),
    ],
)
def test_of_two_routers_the_one_that_knows_more_counts(
    first: tuple[str, float], second: tuple[str, float], state: str
) -> None:
    for polls in ((first, second), (second, first)):
        store = ViewStore()
        for router, poll in enumerate(polls):
            assert store.observe(router, seen(*poll), 10.0)
        (one,) = store.snapshot(10.5).view.instances
        assert (one.state, one.seq) == (state, 3)


def test_what_a_router_told_that_is_gone_yields_to_what_others_tell() -> None:
    store = ViewStore()
    store.observe(1, seen("ready", 0.05), 10.0)
    assert store.snapshot(14.0).view.instances[0].state == "ready"  # better than nothing
    store.observe(0, seen("silent", 5.05), 15.0)  # of a host that both lost
    assert store.snapshot(15.0).view.instances[0].state == "silent"
    store.observe(0, Poll("router", 2, 1, (), []), 16.0)  # it said goodbye
    assert store.snapshot(16.0).view.instances == ()


def test_an_instance_that_no_router_heard_for_a_minute_leaves_the_view() -> None:
    store = ViewStore()
    store.observe(0, seen("ready", 1.0), 10.0)
    assert len(store.snapshot(10.0 + GONE_AFTER_S - 1.1).view.instances) == 1
    assert store.snapshot(10.0 + GONE_AFTER_S).view.instances == ()


def test_a_snapshot_stays_the_same_object_until_a_poll_comes() -> None:
    store = ViewStore()
    store.observe(0, seen("ready", 0.0), 10.0)
    first = store.snapshot(10.1)
    assert store.snapshot(10.5) is first
    aged = store.snapshot(11.2)  # without a poll, silent instances must leave it
    assert [each.age_s for each in (*first.view.instances, *aged.view.instances)] == [
        pytest.approx(0.1),
        pytest.approx(1.2),
    ]
    rows = seen("silent", 5.0).rows
    assert store.observe(0, Poll("router", 2, 1, rows=rows), 11.3)
    assert store.observe(0, Poll("router", 3), 11.4)  # carries nothing
    (now,) = store.snapshot(11.4).view.instances
    assert (now.state, now.info, now.age_s) == ("silent", ONE, pytest.approx(5.1))
    assert not store.observe(0, Poll("router", 4, 7, rows=rows), 11.5)
    assert not store.observe(0, Poll("another", 4, 1, rows=rows), 11.5)
    with pytest.raises(ProtocolError, match="0 loads of 1"):
        store.observe(0, Poll("router", 5, 1, rows=[]), 11.5)


BAD_PORTS = ("", "x", "0", "65536", "-1", "\u00b2", "9" * 5000)


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        *(("KV endpoint", {"kv_endpoint": f"h:{port}"}) for port in BAD_PORTS),
        ("printable characters", {"id": "y" * 1000}),
        ("does not start with http", {"url": "file:///etc/passwd"}),
    ],
    ids=str,
)
def test_a_description_that_cannot_be_used_is_refused(words: str, fact: dict[str, str]) -> None:
    with pytest.raises(ProtocolError, match=words):
        joined().join(b"three", replace(ONE, **({"id": "three"} | fact)), 0.0)
