"""An instance that is asked to leave."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

from tests.control.channel import (
    INFO,
    PERIOD_S,
    eventually,
    joined,
    monitor,
    states,
)
from vllm_tetri.policy.leaving import QUIET_S


async def test_one_that_is_asked_goes_when_nothing_is_left_anywhere() -> None:
    left, unfinished, in_flight = threading.Event(), ["2 requests"], [1]
    options: dict[str, Any] = {"unfinished": lambda _: unfinished[0], "on_left": left.set}
    async with (
        monitor(in_flight=lambda _: in_flight[0]) as router,
        joined(router.address, info=INFO, **options) as one,
    ):
        await eventually(lambda: states(router) == {"i": "starting"})
        router.mark_ready(INFO)
        router.ask_to_leave(INFO.id, None)
        await eventually(lambda: states(router) == {"i": "leaving"})
        await eventually(lambda: one.sees() == [("i", "leaving")])
        seq = router.view().instances[0].seq
        await eventually(lambda: router.view().instances[0].seq > seq + 3)  # it still reports
        unfinished[0] = ""
        await asyncio.sleep(2 * QUIET_S)
        assert not left.is_set()  # the router still has something for it
        in_flight[0] = 0
        await eventually(left.is_set)
        await eventually(lambda: states(router) == {})
        assert router.departed == {"i": ""}


async def test_a_deadline_ends_it_and_says_what_was_cut_off() -> None:
    left = threading.Event()
    options: dict[str, Any] = {"unfinished": lambda _: "3 requests", "on_left": left.set}
    async with monitor() as router, joined(router.address, **options):
        await eventually(lambda: states(router))
        router.mark_ready(INFO)
        router.ask_to_leave(INFO.id, 0.1)
        await eventually(left.is_set)
        await eventually(lambda: router.departed == {"i": "3 requests"})


async def test_a_router_that_starts_anew_learns_who_leaves() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    left = threading.Event()
    async with joined(address, unfinished=lambda _: "something", on_left=left.set):
        async with monitor(address) as router:
            await eventually(lambda: states(router))
            router.mark_ready(INFO)
            router.ask_to_leave(INFO.id, None)
            await eventually(lambda: router.view().instances[0].state == "leaving")
            await asyncio.sleep(5 * PERIOD_S)
        async with monitor(address) as router:
            await eventually(lambda: states(router) == {"i": "leaving"})
    assert not left.is_set()  # it was closed from outside before it could go


async def test_trouble_in_looking_at_what_is_left_keeps_it_until_the_deadline() -> None:
    def broken(_: object) -> str:
        raise RuntimeError("engine trouble")

    async with monitor() as router, joined(router.address, unfinished=broken):
        await eventually(lambda: states(router))
        router.mark_ready(INFO)
        router.ask_to_leave(INFO.id, 1.0)
        await eventually(lambda: router.departed == {"i": "unknown"})
