"""KV over a fake NCCL: what peers and a library can do that they should not."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest

from tests.eventually import eventually
from tests.transport.conftest import Backend, empty, ended, fails
from tests.transport.sides import ARENA, BLOCKS, BUFFER, PAGE, Side, Two, make_two, still
from vllm_tetri.transport import nccl
from vllm_tetri.transport.device import DeviceArena, read_offer
from vllm_tetri.transport.native import Status, Transfer, TransferState

BLOCK = 2 * PAGE  # bytes
ALL = ARENA // BLOCK  # blocks


class Peer:
    """A sender that follows the protocol as far as a test wants."""

    def __init__(self, out: Side, into: Side) -> None:
        self.segment, _, handle = read_offer(into.arena.offer(into.receiver.segment))
        _, port, self.token = nccl.HANDLE.unpack_from(handle)
        self.line = nccl.line_of(socket.create_connection(("127.0.0.1", port)))
        self.out, self.into = out, into
        self.unique = bytes(out.library.ncclGetUniqueId().internal)

    def hello(self) -> bytes:
        self.line.send_bytes(nccl.HELLO + self.token + self.unique + self.segment.encode())
        return self.heard()

    def heard(self) -> bytes:
        assert self.line.poll(4.0)
        return bytes(self.line.recv_bytes())

    def meet(self) -> Peer:
        assert self.hello() == nccl.WELCOME
        self.made = self.out.library.ncclCommInitRank(2, self.unique, 0)
        self.lane = self.out.device.make_stream()
        self.send(1)
        assert self.heard() == nccl.READY
        return self

    def send(self, size: int) -> None:
        """Post a send of sevens."""
        source = self.out.device.zeros(size).fill_(7)
        self.out.library.ncclSend(source.data_ptr(), size, 1, 1, self.made, self.lane.handle)

    def order(self, name: str, num_blocks: int = 4) -> tuple[Any, Any]:
        """A transfer and its order, which was begun."""
        sender = self.out.core.sender(links=["nccl"])
        transfer = sender.open(self.into.receiver.endpoint, name, num_blocks, BLOCK)
        transfer.write(self.out.mover.layout, 0, np.arange(num_blocks, dtype=np.int32) % BLOCKS)
        transfer.finish()
        order = sender.take_order(10.0)
        assert order.begin()
        return transfer, order

    def announce(self, order: Any, **changes: int) -> bytes:
        named = ("control", "generation", "offset")
        place = {name: getattr(order, name) for name in named} | {"num_bytes": order.num_bytes}
        self.line.send_bytes(nccl.ANNOUNCE + nccl.PLACE.pack(*(place | changes).values()))
        return self.heard()

    def at_end(self) -> bool:
        with pytest.raises((EOFError, ConnectionError)):
            self.heard()
        return True

    def close(self) -> None:
        self.line.close()
        if hasattr(self, "made"):
            self.out.library.ncclCommAbort(self.made)


@pytest.fixture
def two(shm: Backend) -> Iterator[Two]:
    yield from make_two("nccl", shm)


@pytest.fixture
def sides(two: Two) -> tuple[Side, Side]:
    return two.side(1), two.side(2)


@pytest.fixture
def peer(sides: tuple[Side, Side]) -> Iterator[Peer]:
    made = Peer(*sides)
    yield made
    made.close()


def works(out: Side, into: Side, name: str = "works") -> bool:
    """Whether a transfer that takes all of the arena arrives; none is under way."""
    eventually(lambda: empty(into.receiver))
    assert into.library.num_receives == 0
    out.compute([1, 2], 77)
    transfer = out.open(into, name, ALL)
    for first in range(0, ALL, 4):
        out.write(transfer, first, [1, 2, 1, 2])
    transfer.finish()
    assert ended(transfer) is TransferState.DONE, transfer.error
    slot = into.receiver.take(name)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * ARENA).from_address(into.arena.address))
    found = bool((memory == 77).all())
    into.receiver.release(name)
    return found and slot.num_blocks == ALL


def posted(side: Side, name: str) -> int:
    """How many calls posted real bytes, not the first one."""
    return sum(call == name and size > 1 for call, size in side.library.calls)


@contextmanager
def under_way(out: Side, into: Side) -> Iterator[Transfer]:
    """A transfer whose send is posted, and does not end before the context does."""
    before = posted(out, "send")
    with out.device.held(out.device.streams[-1]):
        transfer = out.send(into, "t", [1, 2])
        eventually(lambda: posted(out, "send") > before)
        yield transfer


def test_nothing_is_posted_before_the_blocks_are_complete(sides: tuple[Side, Side]) -> None:
    out, into = sides
    assert works(out, into)
    before = len(into.library.calls)
    with out.device.held(out.device.compute):
        out.compute([3, 4], 5)
        transfer = out.send(into, "t", [3, 4])
        assert still(lambda: len(into.library.calls) == before)
    assert ended(transfer) is TransferState.DONE, transfer.error
    assert len(out.library.calls) == len(into.library.calls) == before + 1
    assert out.library.num_made == 1


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_blocks_are_read_until_their_send_is_over(
    sides: tuple[Side, Side], is_cancelled: bool
) -> None:
    out, into = sides
    assert works(out, into)
    with under_way(out, into) as transfer:
        if is_cancelled:
            transfer.cancel()
            into.receiver.cancel("t")
        else:
            assert into.end is not None
            into.end.close()
        assert still(lambda: not transfer.quiesced and not empty(into.receiver))
    eventually(lambda: transfer.quiesced)
    eventually(lambda: empty(into.receiver))
    if is_cancelled:
        assert works(out, into, "again")


@pytest.mark.parametrize("how", ["leaves", "is late"])
def test_a_slot_is_not_another_ones_while_a_receive_is_posted(two: Two, how: str) -> None:
    out, into = two.side(1), two.side(2, io_timeout_s=2.0 if how == "is late" else 5.0)
    peer = Peer(out, into).meet()
    transfer, order = peer.order("t", ALL)
    assert peer.announce(order) == nccl.POSTED
    into.library.hangs = "abort"
    order.failed("given up")  # now the receiver's core is told that nothing writes any more
    fails(transfer, Status.INVALID)
    if how == "leaves":
        peer.close()
    else:
        assert peer.at_end()
        peer.close()
    eventually(lambda: into.receiver.stats().quarantined_bytes == ARENA)
    assert still(lambda: into.receiver.stats().quarantined_bytes == ARENA)
    fails(out.open(into, "other", 1), Status.FULL)
    into.library.hangs = ""
    assert works(out, into)  # nothing that was posted writes there any more


def test_a_slot_of_another_generation_is_refused(peer: Peer) -> None:
    _, order = peer.meet().order("t")
    for changes in ({"generation": order.generation + 1}, {"control": order.control + 1}):
        assert peer.announce(order, **changes).startswith(nccl.REFUSED)
    order.failed("given up")
    eventually(lambda: empty(peer.into.receiver))
    assert peer.announce(order).startswith(nccl.REFUSED)
    transfer, order = peer.order("again")
    assert peer.announce(order) == nccl.POSTED
    assert still(lambda: not peer.line.poll())
    peer.send(4 * BLOCK)
    assert peer.heard() == nccl.DONE
    order.placed()
    assert ended(transfer) is TransferState.DONE
    peer.into.load("again", [0, 1, 2, 3])
    assert peer.into.holds([0, 1, 2, 3], 7)


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": ARENA - 1},
        {"offset": (1 << 64) - 1, "num_bytes": 2},
        {"num_bytes": 0},
        {"num_bytes": ARENA + 1},
        {"control": 1 << 20},
    ],
)
def test_places_out_of_bounds_end_the_pair(peer: Peer, changes: dict[str, int]) -> None:
    _, order = peer.meet().order("t")
    with pytest.raises((EOFError, ConnectionError)):
        peer.announce(order, **changes)
    assert posted(peer.into, "recv") == 0
    order.failed("given up")
    assert works(peer.out, peer.into)


def test_a_sender_without_the_token_is_refused(peer: Peer) -> None:
    peer.token = bytes(32)
    assert peer.hello() == nccl.REFUSED + b"this instance did not make that offer"
    assert peer.at_end()
    assert peer.into.library.num_made == 0
    assert works(peer.out, peer.into)


@pytest.mark.parametrize(
    "raw", [*b"\x7f\xff\xff\xff \xff\xff\xff\xfe \0\0\2\1 \0\0\0\0 GET/HTTP/1.1".split()]
)
@pytest.mark.parametrize("has_met", [False, True])
def test_what_is_no_message_ends_the_connection(peer: Peer, raw: bytes, has_met: bool) -> None:
    if has_met:
        peer.meet()
    os.write(peer.line.fileno(), raw)
    assert peer.at_end()
    assert works(peer.out, peer.into)


def test_connections_that_say_nothing_are_bounded(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "MOST_OPENING", 3)
    peers = [Peer(*sides) for _ in range(7)]
    assert all(peer.at_end() for peer in peers[:4])
    assert works(*sides)
    assert not peers[-1].line.poll()


def test_half_a_message_blocks_for_a_moment_alone(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "PAUSE", struct.pack("ll", 0, 100_000))
    peer = Peer(*sides)
    os.write(peer.line.fileno(), b"\0\0")
    assert peer.at_end()
    peer.close()


def test_what_is_announced_at_once_is_bounded(peer: Peer) -> None:
    _, order = peer.meet().order("t")
    for _ in range(nccl.MAX_ORDERS):
        assert peer.announce(order) == nccl.POSTED
    with pytest.raises((EOFError, ConnectionError)):
        peer.announce(order)
    order.failed("given up")
    assert works(peer.out, peer.into)


@pytest.mark.parametrize("state", ["connected", "half", "hello", "ready", "announced"])
def test_a_sender_that_goes_away_leaves_nothing(sides: tuple[Side, Side], state: str) -> None:
    peer = Peer(*sides)
    if state == "half":
        os.write(peer.line.fileno(), b"\0\0")
    elif state == "hello":
        assert peer.hello() == nccl.WELCOME
        peer.made = peer.out.library.ncclCommInitRank(2, peer.unique, 0)
    elif state != "connected":
        peer.meet()
    if state == "announced":
        _, order = peer.order("t")
        assert peer.announce(order) == nccl.POSTED
        order.failed("given up")
    peer.close()
    names = lambda: [each.name for each in threading.enumerate()]  # noqa: E731
    eventually(lambda: names().count("tetri-nccl") == 2, 2.0)  # those that listen
    before = len(sides[1].device.streams)
    assert works(*sides)
    assert state in ("connected", "half") or len(sides[1].device.streams) == before


def false_receiver(out: Side, into: Side, num_messages: int) -> threading.Thread:
    """A receiver whose side channel ends after so many messages."""

    def run() -> None:
        library, made = into.library, None
        with listener, nccl.line_of(listener.accept()[0]) as line:
            unique = line.recv_bytes()[33:161]
            if num_messages > 0:
                line.send_bytes(nccl.WELCOME)
                made = library.ncclCommInitRank(2, unique, 1)
            if num_messages > 1:
                stream = into.device.make_stream()
                library.ncclRecv(into.device.reserve(1), 1, 1, 0, made, stream.handle)
                line.send_bytes(nccl.READY)
                line.recv_bytes()
            if num_messages > 2:
                line.send_bytes(nccl.POSTED)
                eventually(lambda: posted(out, "send"))
        if made is not None:
            library.ncclCommAbort(made)

    listener = socket.create_server(("127.0.0.1", 0))
    handle = nccl.HANDLE.pack(22703, listener.getsockname()[1], bytes(32)) + b"127.0.0.1"
    into.receiver.offer("nccl", DeviceArena(0, ARENA, handle).offer(into.receiver.segment))
    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("num_messages", range(4))
def test_a_receiver_that_goes_away_fails_the_transfer_alone(two: Two, num_messages: int) -> None:
    out, into, other = two.side(1), two.side(2), two.side(3)
    gone = false_receiver(out, into, num_messages)
    transfer = out.send(into, "t", [1, 2, 3, 4])
    fails(transfer, Status.INVALID)
    eventually(lambda: transfer.quiesced)
    gone.join()
    eventually(lambda: empty(into.receiver))
    assert works(out, other)


@pytest.mark.parametrize(("side", "hangs"), [(0, "init"), (0, "send"), (1, "init"), (1, "recv")])
def test_an_opening_that_hangs_is_given_up_twice(
    two: Two, side: int, hangs: str, caplog: pytest.LogCaptureFixture
) -> None:
    sides = out, into = two.side(1, io_timeout_s=0.8), two.side(2)
    sides[side].library.hangs = hangs
    with caplog.at_level(logging.ERROR):
        for number in range(2):
            transfer = out.send(into, f"t{number}", [1])
            fails(transfer, Status.INVALID, "0.4 s")  # says NCCL, or the other side
            eventually(lambda transfer=transfer: transfer.quiesced)
        names = count(2)

        def given_up() -> bool:
            """A transfer may still meet the session that ends."""
            assert ended(out.send(into, f"t{next(names)}", [1])) is TransferState.FAILED
            return "2 attempts failed, the last one: " in caplog.text

        eventually(given_up)

    def refused() -> bool:
        transfer = out.open(into, "more", 1)
        assert ended(transfer) is TransferState.FAILED
        return "this side can use nothing; the receiver offers nccl" in transfer.error

    eventually(refused)
    assert all("\n" not in each for each in caplog.messages)
    eventually(lambda: empty(into.receiver))


def test_versions_that_do_not_fit_are_named(two: Two) -> None:
    out, into = two.side(1), two.side(2)
    out.library.version = 32001
    transfer = out.send(into, "t", [1])
    fails(transfer, Status.INVALID, "NCCL 3.x here and 2.x at the receiver do not work together")
    assert out.library.num_made == 0


def test_a_device_that_fails_ends_its_transfers_at_once(sides: tuple[Side, Side]) -> None:
    out, into = sides
    assert works(out, into)
    with under_way(out, into) as transfer:
        out.device.is_lost = True
        fails(transfer, Status.INVALID, "the device failed, restart this instance", 2.0)
    out.device.is_lost = False
    eventually(lambda: transfer.quiesced)


def test_an_order_that_is_not_whole_blocks_fails(sides: tuple[Side, Side]) -> None:
    out, into = sides
    fails(out.send(into, "t", list(range(BUFFER // BLOCK + 1))), Status.INVALID, "whole blocks")
    transfer = out.open(into, "u", 1)
    for first in range(2):
        transfer.write(out.mover.layout.part(first, 1), 0, np.int32([1]))
    transfer.finish()
    fails(transfer, Status.INVALID, "whole blocks")
    assert works(out, into)
