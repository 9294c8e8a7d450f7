"""An instance that is drained."""

from __future__ import annotations

import asyncio

import pytest

from tests.control.channel import INFO, PERIOD_S, FakeRouter, eventually, joined, monitor, states
from vllm_tetri.launch.machine import free_port
from vllm_tetri.policy.role import QUIET_S


async def test_one_that_is_asked_goes_when_nothing_is_left_anywhere() -> None:
    unfinished, side = ["2 requests"], FakeRouter()
    side.in_flight = 1
    async with (
        monitor(side=side) as router,
        joined(router.address, unfinished=lambda _: unfinished[0]) as one,
    ):
        await eventually(lambda: states(router) == {"i": "starting"})
        router.members.mark_ready(INFO)
        router.order_drain(INFO.id, None)
        await eventually(lambda: states(router) == {"i": "draining"})
        await eventually(lambda: one.sees() == [("i", "draining")])
        seq = router.view().instances[0].seq
        await eventually(lambda: router.view().instances[0].seq > seq + 3)  # it still reports
        unfinished[0] = ""
        await asyncio.sleep(2 * QUIET_S)
        assert not one.engine.drained.is_set()  # the router still has something for it
        side.in_flight = 0
        await eventually(one.engine.drained.is_set)
        await eventually(lambda: states(router) == {})
        assert router.members.departed == {"i": ""}


async def test_a_deadline_ends_it_and_says_what_was_cut_off() -> None:
    async with (
        monitor() as router,
        joined(router.address, unfinished=lambda _: "3 requests") as one,
    ):
        await eventually(lambda: states(router))
        router.members.mark_ready(INFO)
        router.order_drain(INFO.id, 0.1)
        await eventually(one.engine.drained.is_set)
        await eventually(lambda: router.members.departed == {"i": "3 requests"})


async def test_one_whose_server_does_not_answer_any_more_is_drained() -> None:
    async with monitor() as router, joined(router.address) as one:
        await eventually(lambda: states(router))
        router.members.mark_ready(INFO)
        router.members.mark_ready(INFO, is_ready=False)
        router.order_drain(INFO.id, None)
        await eventually(one.engine.drained.is_set)


async def test_sigterm_drains_one_that_may_come_back() -> None:
    unfinished, side = ["2 requests"], FakeRouter()
    async with (
        monitor(side=side) as router,
        joined(router.address, unfinished=lambda _: unfinished[0]) as one,
    ):
        await eventually(lambda: states(router) == {"i": "starting"})
        router.members.mark_ready(INFO)
        one.agent.leave(60.0)
        await eventually(lambda: states(router) == {"i": "draining"})
        unfinished[0] = ""
        await eventually(one.engine.drained.is_set)
        await eventually(lambda: states(router) == {})
        assert (router.members.departed, side.cut_off) == ({}, [])


@pytest.mark.parametrize("is_ordered", [False, True])
async def test_the_deadline_of_sigterm_counts_and_moves_what_it_cuts_off(is_ordered: bool) -> None:
    side = FakeRouter()
    async with (
        monitor(side=side) as router,
        joined(router.address, unfinished=lambda _: "3 requests") as one,
    ):
        await eventually(lambda: states(router))
        router.members.mark_ready(INFO)
        if is_ordered:  # by an operator, without a deadline
            router.order_drain(INFO.id, None)
            await eventually(lambda: states(router) == {"i": "draining"})
        one.agent.leave(0.1)
        await eventually(one.engine.drained.is_set)
        await eventually(lambda: side.cut_off == ["i"])
        assert router.members.departed == ({"i": "3 requests"} if is_ordered else {})


async def test_a_router_that_starts_anew_learns_who_leaves() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    async with joined(address, unfinished=lambda _: "something") as one:
        async with monitor(address) as router:
            await eventually(lambda: states(router))
            router.members.mark_ready(INFO)
            router.order_drain(INFO.id, None)
            await eventually(lambda: router.view().instances[0].state == "draining")
            await asyncio.sleep(5 * PERIOD_S)
        async with monitor(address) as router:
            await eventually(lambda: states(router) == {"i": "draining"})
    assert not one.engine.drained.is_set()  # it was closed from outside before it could go


async def test_trouble_in_looking_at_what_is_left_keeps_it_until_the_deadline() -> None:
    def broken(_: object) -> str:
        raise RuntimeError("engine trouble")

    async with monitor() as router, joined(router.address, unfinished=broken):
        await eventually(lambda: states(router))
        router.members.mark_ready(INFO)
        router.order_drain(INFO.id, 1.0)
        await eventually(lambda: router.members.departed == {"i": "unknown"})
