"""Messages between agents and a monitor."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.control.channel import (
    DISPATCHED,
    INFO,
    PERIOD_S,
    FakeEngine,
    FakeRouter,
    Joined,
    eventually,
    joined,
    monitor,
    states,
)
from tests.footprint import footprint
from vllm_tetri.control.agent import MAX_QUEUED, Agent
from vllm_tetri.control.monitor import Monitor
from vllm_tetri.errors import ConfigError
from vllm_tetri.launch.machine import free_port
from vllm_tetri.messages import CancelTransfer, LengthMap, OutputEnded, Placed
from vllm_tetri.security import Secret
from vllm_tetri.types import InstanceId, InstanceLoad, TransferId

SECRET = Secret(bytes(range(32)))


async def test_an_instance_joins_reports_sees_itself_and_leaves() -> None:
    side = FakeRouter()
    async with monitor(side=side) as router:
        async with joined(router.address) as one:
            await eventually(lambda: states(router) == {"i": "starting"})
            assert side.hellos[0] == INFO
            router.members.mark_ready(INFO)
            await eventually(lambda: one.sees() == [("i", "ready")])
            await eventually(lambda: router.view().instances[0].load.running == 1)
        await eventually(lambda: states(router) == {})


async def test_whatever_goes_wrong_in_a_period_there_is_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with monitor() as router, joined(router.address) as one:
        monkeypatch.setattr(router.members, "forget_gone", "no function")
        await asyncio.sleep(2 * PERIOD_S)
        monkeypatch.undo()
        await eventually(lambda: states(router) == {"i": "starting"})
        before = router.view().seq
        await eventually(lambda: router.view().seq > before + 2)
        await eventually(lambda: one.sees())


def hold_up(seconds: float) -> None:
    """The event loop does nothing else."""
    time.sleep(seconds)


async def test_a_router_that_was_held_up_marks_no_instance_silent() -> None:
    """As after SIGSTOP: what was said meanwhile comes a moment after it goes on."""
    speaks = threading.Event()
    speaks.set()

    def read_load() -> InstanceLoad:
        speaks.wait(5)
        return InstanceLoad()

    async with monitor() as router, joined(router.address, read_load=read_load):
        await eventually(lambda: states(router) == {"i": "starting"})
        speaks.clear()
        hold_up(0.5)  # longer than an instance may be silent
        for _ in range(5):
            await asyncio.sleep(PERIOD_S / 2)
            assert states(router) == {"i": "starting"}
        await eventually(lambda: states(router) == {"i": "silent"})
        speaks.set()
        await eventually(lambda: states(router) == {"i": "starting"})


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "guarded"])
async def test_a_loopback_url_from_another_machine_is_refused_by_name(
    secret: Secret | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm_tetri.config.is_here", lambda address: False)
    elsewhere = replace(INFO, id=InstanceId("e"), url="http://10.0.0.5:8000")
    async with monitor(secret=secret) as router, joined(router.address, secret=secret):
        await eventually(lambda: "a router refused this instance" in caplog.text)
        words = "i connects from 127.0.0.1, and only its own machine reaches http://127.0.0.1:1"
        assert caplog.text.count(words) == 2  # router and instance say so
        assert states(router) == {}
        async with joined(router.address, info=elsewhere, secret=secret):
            await eventually(lambda: states(router) == {"e": "starting"})


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "guarded"])
async def test_messages_travel_both_ways(secret: Secret | None) -> None:
    side = FakeRouter()
    async with (
        monitor(side=side, secret=secret) as router,
        joined(router.address, secret=secret) as one,
    ):
        await eventually(lambda: states(router))
        one.agent.publish(DISPATCHED)
        await eventually(lambda: side.dispatched == [DISPATCHED])
        ended = [OutputEnded(InstanceId(name), TransferId("t"), 7) for name in ("i", "gone")]
        for each in ended:  # which the instance gets that has the prompt
            one.agent.publish(each)
        await eventually(lambda: one.engine.taken == ended[:1])
        cancel = CancelTransfer(TransferId("t"))
        assert router.send(InstanceId("i"), cancel)
        await eventually(lambda: one.engine.taken[1:] == [cancel])
        assert not router.send(InstanceId("unknown"), cancel)
        assert router.counters.undelivered == 2
        assert router.counters.dropped == one.agent.dropped_messages == 0


async def test_what_one_learns_of_lengths_all_others_are_told() -> None:
    learnt = LengthMap("model", b"x" * 200_000)
    other, third = (replace(INFO, id=InstanceId(name)) for name in ("o", "p"))
    async with (
        monitor() as router,
        joined(router.address) as one,
        joined(router.address, info=other) as two,
        joined(router.address, info=third) as three,
    ):
        await eventually(lambda: len(states(router)) == 3)
        one.agent.publish(learnt)
        await eventually(lambda: two.engine.taken == three.engine.taken == [learnt])
        assert one.engine.taken == []


async def test_what_one_router_sends_the_others_of_an_instance_are_told() -> None:
    sent, answer = (Placed(InstanceId("i"), tokens, decode_after_s=0.5) for tokens in (700, 1))
    sides = FakeRouter(), FakeRouter()
    async with (
        monitor(side=sides[0], name="one") as router,
        monitor(side=sides[1], name="other") as other,
        joined(router.address, other.address),
    ):
        await eventually(lambda: states(router) and states(other))
        assert router.send(InstanceId("i"), sent)
        await eventually(lambda: sides[1].dispatched == [sent])
        assert other.send(InstanceId("i"), answer)
        await eventually(lambda: sides[0].dispatched == [answer])
        assert sides[1].dispatched == [sent]


async def test_what_an_instance_tells_anew_is_known_at_once_and_its_state_stays() -> None:
    async with monitor() as router, joined(router.address) as one:
        await eventually(lambda: states(router) == {"i": "starting"})
        router.members.mark_ready(INFO)
        await eventually(lambda: one.sees() == [("i", "ready")])
        one.agent.describe(replace(INFO, identity={"weights": "new"}))
        await eventually(lambda: one.view.instances[0].info.identity == {"weights": "new"})
        assert states(router) == {"i": "ready"}


async def test_what_is_told_while_something_else_is_told_is_known_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    news = [replace(INFO, identity={"weights": name}) for name in ("new", "newest")]

    def tell_more(*args: Any, **changes: Any) -> Any:
        monkeypatch.undo()
        one.agent.describe(news[1])
        return replace(*args, **changes)

    async with monitor() as router, joined(router.address) as one:
        await eventually(one.sees)
        monkeypatch.setattr("vllm_tetri.control.agent.replace", tell_more)
        one.agent.describe(news[0])
        await eventually(lambda: one.view.instances[0].info.identity == {"weights": "newest"})


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "guarded"])
async def test_a_router_that_starts_late_or_again_learns_everything_soon(
    secret: Secret | None,
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    async with joined(address, secret=secret):
        for _ in range(3):
            async with monitor(address, secret=secret) as router:
                await eventually(lambda router=router: states(router))
                await eventually(lambda router=router: router.view().instances[0].load.running)


async def test_a_restarted_process_replaces_the_one_of_the_same_name() -> None:
    side = FakeRouter()
    async with monitor(side=side) as router:
        two_pids = joined(router.address), joined(router.address, info=replace(INFO, pid=2))
        async with two_pids[0] as one, two_pids[1] as two:
            await eventually(lambda: {each.pid for each in side.hellos} == {1, 2})
            last = side.hellos[-1].pid
            router.members.mark_ready(replace(INFO, pid=3 - last))
            known = len(side.hellos)
            await asyncio.sleep(5 * PERIOD_S)
            assert states(router) == {"i": "starting"}
            assert len(side.hellos) <= known + 2  # the two stop fighting over the name
            assert two.agent.dropped_messages == 0
            former, latter = {INFO.pid: one, 2: two}, side.hellos[-1].pid
            await former.pop(latter).close()
            (left,) = former
            await eventually(lambda: side.hellos[-1].pid == left)  # the name is free
            await eventually(lambda: states(router) == {"i": "starting"})


async def test_an_address_given_twice_is_one_router() -> None:
    async with monitor() as router:
        async with joined(router.address, router.address) as one:
            await eventually(lambda: one.sees() == [("i", "starting")])
        await eventually(lambda: "tetri-agent" not in {each.name for each in threading.enumerate()})


async def test_a_restarted_process_with_the_same_number_starts_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine of every container may be process 7."""
    side = FakeRouter()
    async with monitor(side=side) as router:
        monkeypatch.setattr(router.members, "left", lambda *_: False)  # it is killed
        async with joined(router.address):
            await eventually(lambda: any(each.seq > 9 for each in router.view().instances))
            router.members.mark_ready(INFO)
        known = len(side.hellos)
        async with joined(router.address) as one:
            await eventually(lambda: len(side.hellos) > known)  # so it is probed
            assert states(router) == {"i": "starting"}
            router.members.mark_ready(INFO)
            await eventually(lambda: one.view.instances and one.view.instances[0].seq > 9)
            assert one.sees() == [("i", "ready")]


async def test_trouble_in_the_engine_does_not_stop_the_agent() -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("engine trouble")

    async with monitor() as router, joined(router.address, read_load=broken, take=broken) as one:
        await eventually(lambda: states(router))
        router.send(InstanceId("i"), CancelTransfer(TransferId("t")))
        seq = one.view.seq
        await eventually(lambda: one.view.seq > seq + 2)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:1",
        "tcp://10.0.0.1:1",
        "ipc:///tmp/x",
        "no",
        "tcp://127.0.0.1:65537",
        "tcp://::1:18555",
    ],
)
def test_only_loopback_addresses_are_accepted(address: str) -> None:
    with pytest.raises(ConfigError):
        Monitor(address, "router", FakeRouter())
    with pytest.raises(ConfigError):
        Joined(address)


async def test_a_port_in_use_is_a_clear_error() -> None:
    async with monitor() as router:
        second = Monitor(router.address, "second", FakeRouter())
        with pytest.raises(ConfigError, match="another port"):
            second.start()


def test_publishing_never_waits_even_without_a_router() -> None:
    agent = Agent(("tcp://127.0.0.1:1",), INFO, FakeEngine(), period_s=PERIOD_S)
    for _ in range(MAX_QUEUED + 10):
        agent.publish(DISPATCHED)
    assert agent.dropped_messages == 10
    agent.start()
    started = time.monotonic()
    agent.close()
    agent.close()
    assert time.monotonic() - started < 2.0


async def test_nothing_is_left_after_close() -> None:
    async with monitor() as router, joined(router.address) as one:
        await eventually(one.sees)  # whatever the first use opens for good is open now
    gc.collect()
    before = threads(), footprint().files
    async with monitor() as router, joined(router.address) as one:
        await eventually(one.sees)
    await eventually(lambda: threads() <= before[0])
    await eventually(lambda: footprint().files <= before[1])


def threads() -> set[threading.Thread]:
    """Those of the loop's executor stay, and it may take a new one at any time."""
    return {each for each in threading.enumerate() if not each.name.startswith("asyncio_")}
