"""An instance notices when its last router has gone."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.control.channel import Joined, eventually, joined, monitor, states
from vllm_tetri.types import InstanceLoad


class Told:
    """How often an instance reported, and was told that it is alone."""

    def __init__(self) -> None:
        self.reports = 0
        self.alone = 0

    def report(self) -> InstanceLoad:
        self.reports += 1
        return InstanceLoad()

    def be_alone(self) -> None:
        self.alone += 1

    async def go_on(self) -> None:
        """Until it has reported a few times more."""
        wanted = self.reports + 3
        await eventually(lambda: self.reports >= wanted)


@asynccontextmanager
async def one(told: Told, *addresses: str) -> AsyncIterator[Joined]:
    async with joined(*addresses, read_load=told.report, on_alone=told.be_alone) as made:
        yield made


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


async def test_an_instance_that_never_had_a_router_was_not_left() -> None:
    told = Told()
    async with one(told, free_address()):
        await told.go_on()
        assert told.alone == 0


async def test_the_end_of_the_last_router_is_noticed_until_there_is_another() -> None:
    told, address = Told(), free_address()
    async with one(told, address):
        async with monitor(address) as router:
            await eventually(lambda: states(router))
            assert told.alone == 0
        await eventually(lambda: told.alone >= 3)  # at once, and with reports
        async with monitor(address) as router:
            await eventually(lambda: states(router))
            number = told.alone
            await told.go_on()
            assert told.alone == number


async def test_a_router_that_stays_is_enough() -> None:
    told = Told()
    async with (
        monitor() as stays,
        monitor() as goes,
        one(told, goes.address, stays.address),
    ):
        await eventually(lambda: states(goes) and states(stays))
        goes.close()
        await told.go_on()
        assert told.alone == 0
        stays.close()
        await eventually(lambda: told.alone)


async def test_trouble_with_being_alone_does_not_stop_the_agent() -> None:
    def broken() -> None:
        raise RuntimeError("out of memory")

    address = free_address()
    async with joined(address, on_alone=broken):
        for _ in range(2):
            async with monitor(address) as router:
                await eventually(lambda router=router: states(router))
