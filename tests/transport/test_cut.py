"""A sender on another host, and the network between them is cut without a word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.eventually import eventually
from tests.faults.hosts import Hosts, hosts, require_hosts
from tests.transport.children import child
from tests.transport.conftest import KEY, Backend, empty
from vllm_tetri.transport.native import SlotState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

# Both ends look at their connections for themselves: 10 s, and the pause between two looks.
NOTICED_S = 16.0


@pytest.fixture
def net() -> Iterator[Hosts]:
    require_hosts()
    with hosts("here", "there") as made:
        yield made


def test_both_ends_notice_a_cut_before_any_transfer_is_late(net: Hosts, tcp: Backend) -> None:
    receiver = tcp.receiver(
        host=net.addresses["here"], key=KEY, arena_bytes=4 << 20, fill_timeout_s=60.0
    )
    with child(receiver.endpoint, "tcp", KEY, within=net.within("there")) as process:
        assert receiver.find("child").state == SlotState.FILLING
        net.part("here", "there")
        eventually(lambda: empty(receiver), NOTICED_S)
        assert receiver.find("child").state == SlotState.FAILED
        eventually(lambda: receiver.stats().connections == 0, NOTICED_S)
        assert process.stdout is not None
        assert process.stdout.readline() == "PEER_LOST\n"  # its own timeout is 30 s


def test_hosts_that_are_namespaces_share_memory(net: Hosts, tcp: Backend) -> None:
    """Why tests of a cut ask for TCP: they have one boot id and one /dev/shm."""
    receiver = tcp.receiver(host=net.addresses["here"], key=KEY, arena_bytes=4 << 20)
    with child(receiver.endpoint, "shm", KEY, within=net.within("there")):
        assert receiver.find("child").state == SlotState.FILLING
