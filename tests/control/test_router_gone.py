"""An instance notices that a router has gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

from tests.control.channel import INFO, Joined, eventually, joined, monitor, states
from vllm_tetri.launch.machine import free_port
from vllm_tetri.types import InstanceLoad, Role


class Told:
    """How often an instance reported, and which routers it missed."""

    def __init__(self) -> None:
        self.reports = 0
        self.gone: list[str] = []

    def report(self) -> InstanceLoad:
        self.reports += 1
        return InstanceLoad()

    async def go_on(self) -> None:
        """Until it has reported a few times more."""
        wanted = self.reports + 3
        await eventually(lambda: self.reports >= wanted)


@asynccontextmanager
async def one(told: Told, *addresses: str, role: Role = Role.DECODE) -> AsyncIterator[Joined]:
    async with joined(
        *addresses, info=replace(INFO, role=role), read_load=told.report, abandon=told.gone.append
    ) as made:
        yield made


async def test_an_instance_that_never_had_a_router_misses_none() -> None:
    told = Told()
    async with one(told, f"tcp://127.0.0.1:{free_port()}"):
        await told.go_on()
        assert told.gone == []


@pytest.mark.parametrize("role", list(Role))
async def test_the_end_of_a_router_is_told_until_it_is_back(role: Role) -> None:
    told, address = Told(), f"tcp://127.0.0.1:{free_port()}"
    async with one(told, address, role=role):
        for _ in range(2):
            async with monitor(address) as router:
                await eventually(partial(states, router))
                await told.go_on()
                told.gone.clear()
                await told.go_on()
                assert told.gone == []
            await eventually(lambda: told.gone[:3] == ["router"] * 3)  # at once, and with reports


async def test_another_router_at_the_same_address_does_not_hide_it() -> None:
    told, address = Told(), f"tcp://127.0.0.1:{free_port()}"
    async with one(told, address):
        async with monitor(address, name="first") as router:
            await eventually(lambda: states(router))
            await told.go_on()
        async with monitor(address, name="second") as router:
            await eventually(lambda: states(router))
            await told.go_on()
            assert set(told.gone) == {"first"}
            told.gone.clear()
            await eventually(lambda: told.gone[:3] == ["first"] * 3)  # it may have left more


async def test_of_several_routers_only_the_one_that_went_is_missed() -> None:
    told = Told()
    async with (
        monitor(name="stays") as stays,
        monitor(name="goes") as goes,
        one(told, goes.address, stays.address),
    ):
        await eventually(lambda: states(goes) and states(stays))
        await told.go_on()
        goes.close()
        await eventually(lambda: told.gone)
        assert set(told.gone) == {"goes"}


async def test_trouble_with_what_a_router_left_does_not_stop_the_agent() -> None:
    def broken(_: str) -> None:
        raise RuntimeError("out of memory")

    address = f"tcp://127.0.0.1:{free_port()}"
    async with joined(address, abandon=broken):
        for _ in range(2):
            async with monitor(address) as router:
                await eventually(partial(states, router))
