"""Connections between a C++ sender and a receiver fail: one clear error in time, the slot
is free, and the next transfer is fine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.eventually import eventually
from tests.faults.proxy import Kind, Proxy, Trouble
from tests.transport import wire
from tests.transport.conftest import IDENTITY, Backend, empty, ended, make_backend
from vllm_tetri.transport.native import SlotState, Status, TransferState

LIMIT_S = 0.6  # without progress
DEADLINE_S = 3.0
BLOCKS, PAGE = 32, 65536
CONTROL, STREAM = 0, 1  # connections of a sender with one stream
JOIN_BYTES = 20  # before the first block on a stream
IN_HELLO = 60
# On the control connection, when all that follows is that the transfer is done.
LINK_FRAME = wire.frame(wire.LINK, wire.text("tcp") + wire.text(b""))
OPENED_BYTES = len(wire.hello(IDENTITY) + LINK_FRAME + wire.open_frame("broken", 0, 0))


@pytest.fixture
def tcp() -> Iterator[Backend]:
    yield from make_backend("tcp")


class Way:
    """A receiver, a proxy before it, and a sender that knows only the proxy."""

    def __init__(self, tcp: Backend, proxy: Proxy, receiver: Any) -> None:
        self.receiver = receiver
        self.proxy = proxy
        self.tcp = tcp
        self.sender = tcp.sender(streams=1, io_timeout_s=LIMIT_S, open_timeout_s=2.0)
        self.cache = tcp.cache(1, BLOCKS, PAGE, seed=1)

    def push(self, name: str) -> Any:
        transfer = self.sender.open(self.proxy.endpoint, name, BLOCKS, PAGE)
        transfer.write(self.cache.layout, 0, np.arange(BLOCKS, dtype=np.int32))
        transfer.finish()
        return transfer

    def works(self, name: str) -> None:
        transfer = self.push(name)
        assert ended(transfer, DEADLINE_S) == TransferState.DONE, transfer.error
        there = self.tcp.arrived(self.receiver, name, self.cache)
        assert there == self.cache.bytes_of(range(BLOCKS))


@pytest.fixture
def way(tcp: Backend) -> Iterator[Way]:
    receiver = tcp.receiver(arena_bytes=BLOCKS * PAGE, fill_timeout_s=LIMIT_S)
    with Proxy.to(receiver.endpoint) as proxy:
        yield Way(tcp, proxy, receiver)


TROUBLES = {
    "data cut": Trouble(Kind.CUT, 5 * PAGE, connection=STREAM),
    "data ended": Trouble(Kind.END, 5 * PAGE, connection=STREAM),
    "data half open": Trouble(Kind.HALF_OPEN, 5 * PAGE, connection=STREAM),
    "data stalled": Trouble(Kind.STALL, 5 * PAGE, connection=STREAM),
    "data corrupt": Trouble(Kind.CORRUPT, JOIN_BYTES, connection=STREAM),
    "place corrupt": Trouble(Kind.CORRUPT, JOIN_BYTES + 12 + 9, connection=STREAM),
    "block corrupt": Trouble(Kind.CORRUPT, JOIN_BYTES + 5 * PAGE, connection=STREAM),
    "join corrupt": Trouble(Kind.CORRUPT, 0, connection=STREAM),
    "hello cut": Trouble(Kind.CUT, IN_HELLO, connection=CONTROL),
    "hello ended": Trouble(Kind.END, IN_HELLO, connection=CONTROL),
    "hello stalled": Trouble(Kind.STALL, IN_HELLO, connection=CONTROL),
    "done cut": Trouble(Kind.CUT, OPENED_BYTES, connection=CONTROL),
    "done ended": Trouble(Kind.END, OPENED_BYTES, connection=CONTROL),
    "done stalled": Trouble(Kind.STALL, OPENED_BYTES, connection=CONTROL),
    "done corrupt": Trouble(Kind.CORRUPT, OPENED_BYTES, connection=CONTROL),
    "hello corrupt": Trouble(Kind.CORRUPT, 0, connection=CONTROL),
    "answer corrupt": Trouble(Kind.CORRUPT, 0, up=False, connection=CONTROL),
    "answer cut": Trouble(Kind.CUT, 0, up=False, connection=CONTROL),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_a_transfer_fails_in_time_and_the_next_one_is_fine(way: Way, name: str) -> None:
    way.proxy.make(TROUBLES[name])
    transfer = way.push("broken")
    assert ended(transfer, DEADLINE_S) == TransferState.FAILED
    assert transfer.error
    assert transfer.quiesced
    eventually(lambda: empty(way.receiver), DEADLINE_S)
    way.proxy.clear()
    way.works("next")


def test_a_byte_that_changes_inside_a_block_ends_only_its_transfer(way: Way) -> None:
    way.works("first")
    way.proxy.make(Trouble(Kind.CORRUPT, 5 * PAGE, connection=STREAM))
    transfer = way.push("broken")
    assert ended(transfer, DEADLINE_S) == TransferState.FAILED
    assert (transfer.status, transfer.error) == (Status.INVALID, "bytes changed on their way")
    slot = eventually(lambda: way.receiver.find("broken"))
    assert (slot.state, slot.error) == (SlotState.FAILED, "bytes changed on their way")
    way.proxy.clear()
    way.works("next")
    assert way.proxy.num_connections == 2  # the same ones


def test_a_transfer_that_is_called_off_is_not_taken_for_a_broken_one(way: Way) -> None:
    way.works("first")
    errors = set()
    for number in range(40):
        transfer = way.push(f"off {number}")
        eventually(lambda: transfer.state != TransferState.OPENING)  # noqa: B023
        time.sleep(number / 20_000)
        transfer.cancel()
        ended(transfer, DEADLINE_S)
        eventually(lambda: empty(way.receiver) or way.receiver.stats().unclaimed, DEADLINE_S)
        if (slot := way.receiver.find(f"off {number}")) is not None:
            errors.add(slot.error)
            way.receiver.cancel(f"off {number}")
    assert "bytes changed on their way" not in errors, errors


def test_a_slow_way_is_no_trouble(way: Way) -> None:
    way.proxy.make(Trouble(Kind.DELAY, delay_s=0.01))
    way.works("slow")


def test_a_receiver_that_is_gone_is_an_error_at_once(way: Way) -> None:
    way.receiver.close()
    transfer = way.push("late")
    assert ended(transfer, DEADLINE_S) == TransferState.FAILED
    assert transfer.status in (Status.PEER_LOST, Status.TIMEOUT)
