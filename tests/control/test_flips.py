"""Flips over the control channel: real agents and monitors, an engine of a few lines."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from tests.control.channel import INFO, FakeRouter, eventually, joined, monitor, states
from vllm_tetri.control.monitor import Monitor
from vllm_tetri.launch.machine import free_port
from vllm_tetri.messages import FlipRole
from vllm_tetri.types import Flip, FlipStage, InstanceId, Role

DECODE = replace(INFO, role=Role.DECODE)
OTHER = replace(INFO, id=InstanceId("other"), role=Role.PREFILL, pid=2)


def order(role: Role = Role.PREFILL, **options: Any) -> FlipRole:
    return FlipRole(0, role, **{"is_now": False, "deadline_s": 5.0, "reason": "test", **options})


def flip_of(made: Monitor) -> Flip | None:
    (one,) = (each for each in made.view().instances if each.info.id == "i")
    return one.flip


def role_of(made: Monitor) -> Role:
    (one,) = (each for each in made.view().instances if each.info.id == "i")
    return one.info.role


def is_committed(made: Monitor) -> bool:
    flip = flip_of(made)
    return flip is not None and flip.commit_s > 0


async def until_ready(made: Monitor) -> None:
    await eventually(lambda: states(made))
    for each in made.view().instances:
        made.members.mark_ready(each.info)


async def test_it_drains_takes_the_role_and_all_learn_it() -> None:
    unfinished, side = ["2 requests"], FakeRouter()
    side.in_flight = 1
    async with (
        monitor(side=side) as router,
        joined(router.address, info=OTHER) as other,
        joined(router.address, info=DECODE, unfinished=lambda _: unfinished[0]),
    ):
        await eventually(lambda: len(states(router)) == 2)
        await until_ready(router)
        assert router.order_flip(DECODE.id, order()) == 1
        assert states(router)["i"] == "flipping"
        ordered = flip_of(router)
        assert ordered is not None
        assert not ordered.is_heard  # only this router knows of it yet
        await eventually(lambda: (heard := flip_of(router)) is not None and heard.is_heard)
        await eventually(lambda: ("i", "flipping") in other.sees())
        unfinished[0] = ""
        await asyncio.sleep(0.1)
        assert role_of(router) is Role.DECODE  # the router still has something for it
        side.in_flight = 0
        await eventually(lambda: is_committed(router))
        assert (role_of(router), states(router)["i"]) == (Role.PREFILL, "ready")
        flip = flip_of(router)
        assert flip is not None
        assert (flip.stage, flip.target, flip.epoch) == (FlipStage.DONE, Role.PREFILL, 1)
        assert flip.drain_s >= 0.1
        await eventually(lambda: "i" not in dict(other.sees()))  # it decodes no more
        await eventually(lambda: [name for name, _ in side.flips] == ["i"])


async def test_at_once_it_waits_for_the_engines_next_step() -> None:
    async with (
        monitor() as router,
        joined(
            router.address, info=DECODE, unfinished=lambda _: "9 requests", is_idle=lambda: False
        ) as one,
    ):
        await until_ready(router)
        router.order_flip(DECODE.id, order(is_now=True))
        await eventually(lambda: (flip := flip_of(router)) and flip.age_s > 0.05)
        assert (role_of(router), states(router)["i"]) == (Role.DECODE, "ready")
        assert one.agent.take_role() is Role.PREFILL
        await eventually(lambda: is_committed(router))
        assert role_of(router) is Role.PREFILL
        assert one.agent.take_role() is None


async def test_an_engine_without_steps_is_left_alone_at_the_deadline() -> None:
    async with (
        monitor() as router,
        joined(router.address, info=DECODE, is_idle=lambda: False) as one,
    ):
        await until_ready(router)
        router.order_flip(DECODE.id, order(is_now=True, deadline_s=0.1))
        await eventually(
            lambda: (flip := flip_of(router)) and flip.problem == "the engine takes no step"
        )
        assert one.agent.take_role() is None
        assert role_of(router) is Role.DECODE


async def test_what_is_not_drained_in_time_is_rolled_back() -> None:
    options: dict[str, Any] = {"unfinished": lambda _: "9 requests"}
    async with monitor() as router, joined(router.address, info=DECODE, **options):
        await until_ready(router)
        router.order_flip(DECODE.id, order(deadline_s=0.1))
        await eventually(
            lambda: (flip := flip_of(router)) and flip.problem == "not drained in time: 9 requests"
        )
        assert (role_of(router), states(router)["i"]) == (Role.DECODE, "ready")
        assert router.order_flip(DECODE.id, order(is_now=True)) == 2
        await eventually(lambda: is_committed(router))


async def test_a_router_that_starts_anew_learns_who_drains_and_who_flipped() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    unfinished, side = ["something"], FakeRouter()
    options: dict[str, Any] = {"unfinished": lambda _: unfinished[0]}
    async with joined(address, info=DECODE, **options):
        async with monitor(address) as router:
            await until_ready(router)
            router.order_flip(DECODE.id, order())
            await eventually(lambda: (flip := flip_of(router)) and flip.age_s > 0.05)
        async with monitor(address) as router:
            await until_ready(router)
            await eventually(lambda: states(router) == {"i": "flipping"})
            unfinished[0] = ""
            await eventually(lambda: is_committed(router))
            assert role_of(router) is Role.PREFILL
        async with monitor(address, side=side) as router:
            await until_ready(router)
            await eventually(lambda: is_committed(router))
            assert role_of(router) is Role.PREFILL
            assert router.order_flip(DECODE.id, order(Role.DECODE)) == 2
            await eventually(lambda: role_of(router) is Role.DECODE)
            await eventually(lambda: side.flips)
            assert [flip.epoch for _, flip in side.flips] == [2]  # not what was over before it came


async def test_of_two_routers_that_order_at_once_one_is_heard() -> None:
    async with (
        monitor() as first,
        monitor() as second,
        joined(first.address, second.address, info=DECODE),
    ):
        for each in (first, second):
            await until_ready(each)
        first.order_flip(DECODE.id, order(Role.PREFILL))
        second.order_flip(DECODE.id, order(Role.BOTH))
        await eventually(lambda: is_committed(first) and is_committed(second))
        flip = flip_of(first)
        assert flip is not None
        assert flip.epoch == 1
        assert role_of(first) is role_of(second) is flip.target


async def test_orders_of_a_watcher_that_lost_its_lease_do_nothing() -> None:
    """Two routers; the first had the lease, the second has it, an operator needs none."""
    async with (
        monitor() as former,
        monitor() as present,
        joined(former.address, present.address, info=DECODE),
    ):
        for each in (former, present):
            await until_ready(each)
        present.order_flip(DECODE.id, order(Role.PREFILL, is_now=True, lease=8))
        await eventually(lambda: role_of(former) is role_of(present) is Role.PREFILL)
        former.order_flip(DECODE.id, order(Role.BOTH, is_now=True, lease=7))
        seq = former.view().instances[0].seq
        await eventually(lambda: former.view().instances[0].seq > seq + 3)  # it says it again
        assert role_of(former) is role_of(present) is Role.PREFILL
        present.order_flip(DECODE.id, order(Role.DECODE, is_now=True, lease=8))
        await eventually(lambda: role_of(former) is role_of(present) is Role.DECODE)
        await eventually(lambda: is_committed(present))
        former.order_flip(DECODE.id, order(Role.BOTH, is_now=True))
        await eventually(lambda: role_of(former) is role_of(present) is Role.BOTH)
