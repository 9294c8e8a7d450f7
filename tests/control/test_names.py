"""A control address whose host is a name: of several routers, which come and go."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.control.channel import PERIOD_S, Joined, eventually, joined, monitor, states
from vllm_tetri.control.links import addresses_of
from vllm_tetri.control.monitor import Monitor
from vllm_tetri.errors import ConfigError
from vllm_tetri.launch.machine import free_port
from vllm_tetri.security import Secret

SECRET = Secret(bytes(range(32)))
FIRST, SECOND, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"


class Names:
    """What the name ``routers`` stands for, by a resolver that can fail."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.error: Exception | None = None
        self.asked = 0

    def __call__(self, host: str, port: str, **_: Any) -> list[Any]:
        assert host == "routers"
        self.asked += 1
        if self.error is not None or not self.addresses:
            raise self.error or socket.gaierror(-2, "Name or service not known")
        return [_entry(each, int(port)) for each in self.addresses * 2]  # twice, as some do

    async def asked_again(self) -> None:
        """Until an answer of now has been used."""
        wanted = self.asked + 3
        await eventually(lambda: self.asked >= wanted)


def _entry(address: str, port: int) -> Any:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return (family, socket.SOCK_STREAM, 6, "", (address, port))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    monkeypatch.setattr("vllm_tetri.control.links.RESOLVE_S", PERIOD_S)
    return made


def num_routers(router: Any) -> int:
    (one,) = router.view().instances
    return int(one.info.num_routers)


def member(port: int) -> Any:
    return joined(f"tcp://routers:{port}", secret=SECRET)


@asynccontextmanager
async def two_routers(names: Names) -> AsyncIterator[tuple[int, Monitor, Monitor]]:
    """Two routers of one name at one port, and an instance that has joined both."""
    port = free_port()
    names.addresses = [FIRST, SECOND]
    async with (
        monitor(f"tcp://{FIRST}:{port}", "one", secret=SECRET) as one,
        monitor(f"tcp://{SECOND}:{port}", "two", secret=SECRET) as two,
        member(port),
    ):
        await eventually(lambda: states(one) and states(two))
        yield port, one, two


async def test_an_instance_joins_every_router_of_a_name(names: Names) -> None:
    async with two_routers(names) as (_, one, two):
        await eventually(lambda: num_routers(one) == num_routers(two) == 2)


async def test_routers_that_come_later_are_found(names: Names) -> None:
    """Also the first one: a name that does not exist yet is looked up again."""
    port = free_port()
    async with member(port):
        await names.asked_again()
        async with monitor(f"tcp://{FIRST}:{port}", "one", secret=SECRET) as one:
            names.addresses = [FIRST]
            await eventually(lambda: states(one))
            assert num_routers(one) == 1
            names.addresses = [FIRST, SECOND]
            async with monitor(f"tcp://{SECOND}:{port}", "two", secret=SECRET) as two:
                await eventually(lambda: states(two))
                await eventually(lambda: num_routers(one) == 2)


async def test_a_router_leaves_with_its_connection_not_with_its_address(names: Names) -> None:
    async with two_routers(names) as (port, one, two):
        names.addresses = [SECOND]
        await names.asked_again()
        seen = one.view().instances[0].seq
        await eventually(lambda: one.view().instances[0].seq > seen + 2)  # it still reports
        one.close()
        await eventually(lambda: num_routers(two) == 1)
        # A router at an address that is no longer one is not dialled, and its number is free.
        async with monitor(f"tcp://{FIRST}:{port}", "stranger", secret=SECRET) as stranger:
            names.addresses = [SECOND, THIRD]
            async with monitor(f"tcp://{THIRD}:{port}", "three", secret=SECRET) as three:
                await eventually(lambda: states(three))
                await eventually(lambda: num_routers(two) == 2)
                assert states(stranger) == {}


@pytest.mark.parametrize(
    "error", [socket.gaierror(-3, "Temporary failure"), UnicodeError("label too long")]
)
async def test_a_resolver_that_fails_changes_nothing(names: Names, error: Exception) -> None:
    port = free_port()
    names.addresses = [FIRST]
    async with monitor(f"tcp://{FIRST}:{port}", "one", secret=SECRET) as one, member(port):
        await eventually(lambda: states(one))
        names.error = error
        await names.asked_again()
        seen = one.view().instances[0].seq
        await eventually(lambda: one.view().instances[0].seq > seen + 2)
        names.error, names.addresses = None, [FIRST, SECOND]
        async with monitor(f"tcp://{SECOND}:{port}", "two", secret=SECRET) as two:
            await eventually(lambda: states(two))


async def test_addresses_in_numbers_are_not_looked_up(names: Names) -> None:
    async with monitor() as one, joined(one.address):
        await eventually(lambda: states(one))
    assert names.asked == 0


def test_a_router_with_addresses_of_both_families_is_dialled_once(names: Names) -> None:
    names.addresses = ["fd00::1", FIRST]
    assert addresses_of("tcp://routers:7") == (f"tcp://{FIRST}:7",)
    names.addresses = ["fd00::1"]
    assert addresses_of("tcp://routers:7") == ("tcp://[fd00::1]:7",)


def test_a_name_needs_a_secret() -> None:
    with pytest.raises(ConfigError, match="vllm-tetri secret FILE"):
        Joined("tcp://routers:7")
