"""Writes that the sender's caller moves: here by numpy, into what it mapped itself."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.eventually import eventually
from tests.transport.conftest import IDENTITY, Backend, Cache, empty, ended, fails, make_backend
from tests.transport.wire import Rogue
from vllm_tetri.transport.native import Arena, Layout, Status, TransferState

IDS = np.array([3, 1, 2], np.int32)


@pytest.fixture
def dma() -> Iterator[Backend]:
    yield from make_backend("dma")


def on_device(cache: Cache) -> Any:
    """The layout of a cache as if its addresses were a device's."""
    whole = cache.layout
    return Layout(
        whole.bases, whole.block_strides, whole.page_bytes, whole.num_blocks, cache, is_device=True
    )


def memory(address: int, num_bytes: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def rows(order: Any) -> Any:
    """The order's bytes in the order of the wire; skipped ones are 0."""
    layout = order.layout
    found = np.zeros((len(order.block_ids), layout.block_bytes), np.uint8)
    pages = zip(layout.bases, layout.block_strides, layout.page_bytes, layout.starts, strict=True)
    for base, stride, size, start in pages:
        for row, block in enumerate(order.block_ids):
            found[row, start : start + size] = memory(int(base + block * stride), int(size))
    return found


def place(order: Any, target: Any) -> None:
    """Copy the order's pages to their places in the receiver's memory."""
    layout, found = order.layout, rows(order)
    for row in range(len(found)):
        for start, size in zip(layout.starts, layout.page_bytes, strict=True):
            at = order.offset + row * layout.block_bytes + int(start)
            target[at : at + int(size)] = found[row, start : start + size]


def carry_out(order: Any) -> None:
    """Do what a mover of device memory does, for orders of kind dma."""
    arena = Arena(order.offer.decode())
    place(order, memory(arena.address, arena.num_bytes))
    arena.close()


def begun_order(backend: Backend, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A receiver, a sender, the transfer `t` of three, and its one order, begun."""
    receiver, sender = backend.receiver(), backend.sender(**options)
    cache = backend.cache(seed=1)
    transfer = sender.open(receiver.endpoint, "t", 3, cache.layout.block_bytes)
    transfer.write(on_device(cache), 0, IDS)
    order = sender.take_order(10.0)
    assert order.begin()
    return receiver, sender, transfer, order


@pytest.mark.parametrize("link", ["dma", "shm"])
def test_an_order_says_where_from_and_where_to(dma: Backend, link: str) -> None:
    receiver, sender = dma.receiver(), dma.sender(links=[link])
    cache = dma.cache(seed=1)
    layout = on_device(cache)
    transfer = sender.open(receiver.endpoint, "t", 4, layout.block_bytes)
    transfer.write(layout, 1, IDS, tag=7)
    transfer.write(layout, 0, IDS[:1], tag=8)
    transfer.finish()
    first = sender.take_order(10.0)
    slot = receiver.find("t")
    assert (first.transfer, first.endpoint, first.kind) == ("t", receiver.endpoint, "dma")
    assert first.offer == receiver.segment.encode()
    assert first.offset == slot.offset + layout.block_bytes
    assert (first.layout is layout, first.tag) == (True, 7)
    assert first.block_ids.tolist() == IDS.tolist()
    assert first.num_bytes == 3 * layout.block_bytes
    assert first.begin()
    assert first.live()
    carry_out(first)
    first.placed()
    assert first.is_done()
    second = sender.take_order(10.0)
    assert second.tag == 8
    assert second.begin()
    carry_out(second)
    assert transfer.state == TransferState.SENDING
    second.placed()
    assert ended(transfer) == TransferState.DONE, transfer.error
    assert (transfer.link, transfer.bytes_sent) == (link, 4 * layout.block_bytes)
    assert dma.arrived(receiver, "t", cache) == cache.bytes_of([3, *IDS])


def test_an_order_of_some_pages(dma: Backend) -> None:
    receiver, sender, cache = dma.receiver(), dma.sender(), dma.cache(num_layers=3, seed=1)
    transfer = sender.open(receiver.endpoint, "t", 3, cache.layout.block_bytes)
    for page in range(3):
        transfer.write(on_device(cache).part(page, 1), 0, IDS)
    transfer.finish()
    for _ in range(3):
        order = sender.take_order(10.0)
        assert order.num_bytes == 3 * cache.page_bytes
        assert order.begin()
        carry_out(order)
        order.placed()
    assert ended(transfer) == TransferState.DONE, transfer.error
    assert dma.arrived(receiver, "t", cache) == cache.bytes_of(IDS)


def test_over_tcp_staged_rows_are_sent(tcp: Backend) -> None:
    receiver, sender, cache = tcp.receiver(), tcp.sender(), tcp.cache(num_layers=3, seed=1)
    transfer = sender.open(receiver.endpoint, "t", 3, cache.layout.block_bytes)
    for first, count in ((0, 2), (2, 1)):
        transfer.write(on_device(cache).part(first, count), 0, IDS)
    transfer.finish()
    for _ in range(2):
        order = sender.take_order(10.0)
        assert (order.kind, order.offer, order.begin()) == ("tcp", b"", True)
        with pytest.raises(ValueError, match="staged"):
            order.placed()
        part, stage = order.layout, rows(order)
        step = np.full(len(part.starts), part.block_bytes, np.uint64)
        places = np.uint64(stage.ctypes.data) + part.starts
        sizes = part.page_bytes, 3, stage, part.starts, part.block_bytes
        order.staged(Layout(places, step, *sizes))
        eventually(order.is_done)
        stage.fill(0xEE)
    assert ended(transfer) == TransferState.DONE, transfer.error
    assert transfer.bytes_sent == 3 * cache.layout.block_bytes
    assert tcp.arrived(receiver, "t", cache) == cache.bytes_of(IDS)


def test_memory_of_the_callers_own_behind_an_offer(dma: Backend) -> None:
    """As a device's arena: the segment has control words, and slots are offsets from 0."""
    arena = np.zeros(1 << 16, np.uint8)
    where = str(arena.ctypes.data).encode()
    receiver = dma.receiver(arena_bytes=len(arena), has_host_memory=False, offers={"ipc": where})
    sender, cache = dma.sender(links=["ipc", "tcp"]), dma.cache(seed=1)
    for name in ("a", "b"):
        transfer = dma.push(sender, receiver, name, cache, IDS)
        order = sender.take_order(10.0)
        assert (order.kind, order.offer, order.begin()) == ("ipc", where, True)
        place(order, memory(int(order.offer), len(arena)))
        order.placed()
        assert ended(transfer) == TransferState.DONE, transfer.error
    first, second = receiver.take("a"), receiver.take("b")
    assert first.offset == 0
    for slot in (first, second):
        found = arena[slot.offset : slot.offset + slot.rank_bytes].tobytes()
        assert found == cache.bytes_of(IDS)
    for link in ("shm", "dma", "tcp"):
        refused = dma.sender(links=[link]).open(receiver.endpoint, "t", 1, 512)
        fails(refused, Status.REFUSED, f"this side can use {link}; the receiver offers ipc")
    with Rogue(receiver.endpoint) as rogue:
        rogue.greet(IDENTITY, link="tcp")
        assert rogue.at_end()
    assert receiver.stats().bad_frames == 1


def test_an_offer_that_is_made_later_is_seen_by_later_sessions(dma: Backend) -> None:
    receiver, sender, cache = dma.receiver(), dma.sender(links=["nixl", "shm"]), dma.cache(seed=1)
    assert dma.pushed(sender, receiver, "a", cache, IDS).link == "shm"
    receiver.offer("nixl", b"agent")
    later = dma.sender(links=["nixl", "shm"])
    transfer = dma.push(later, receiver, "b", cache, IDS)
    order = later.take_order(10.0)
    assert (order.kind, order.offer, order.live()) == ("nixl", b"agent", True)
    transfer.cancel()
    assert not order.begin()


def test_an_order_of_a_transfer_that_is_over_does_not_begin(dma: Backend) -> None:
    receiver, sender, cache = dma.ends()
    transfer = dma.push(sender, receiver, "t", cache, IDS)
    order = sender.take_order(10.0)
    transfer.cancel()
    assert not order.begin()
    assert order.is_done()
    with pytest.raises(ValueError, match="not begun"):
        order.placed()
    eventually(lambda: empty(receiver))
    assert transfer.quiesced


def test_orders_of_a_transfer_that_is_over_are_not_handed_out(dma: Backend) -> None:
    receiver, sender, cache = dma.ends()
    transfer = dma.push(sender, receiver, "t", cache, IDS)
    eventually(lambda: transfer.state == TransferState.SENDING)
    transfer.cancel()
    eventually(lambda: empty(receiver))
    assert sender.take_order(0.0) is None


@pytest.mark.parametrize("begins", [False, True])
def test_an_order_that_is_dropped_fails_its_transfer(dma: Backend, begins: bool) -> None:
    receiver, sender, cache = dma.ends()
    transfer = dma.push(sender, receiver, "t", cache, IDS)
    order = sender.take_order(10.0)
    if begins:
        order.begin()
    del order
    gc.collect()
    fails(transfer, Status.INVALID, "dropped without an end")
    eventually(lambda: transfer.quiesced)
    eventually(lambda: empty(receiver))


def test_a_mover_that_fails_fails_the_transfer_in_its_words(dma: Backend) -> None:
    receiver, _sender, transfer, order = begun_order(dma)
    order.failed("error 700 of the device")
    fails(transfer, Status.INVALID, "error 700 of the device")
    eventually(lambda: empty(receiver))
    dma.still_works(receiver, links=["shm"])


def test_a_link_that_the_caller_gives_up_is_not_chosen_again(dma: Backend) -> None:
    receiver = dma.receiver(offers={"ipc": b"handle"})
    sender, cache = dma.sender(links=["ipc", "dma"]), dma.cache(seed=1)
    transfer = dma.push(sender, receiver, "t", cache, IDS)
    order = sender.take_order(10.0)
    assert order.kind == "ipc"
    sender.exclude(receiver.endpoint, "ipc")
    fails(transfer, Status.PEER_LOST, "the ipc link to")
    assert not order.begin()
    eventually(lambda: empty(receiver))
    again = dma.push(sender, receiver, "u", cache, IDS)
    second = sender.take_order(10.0)
    assert second.kind == "dma"
    sender.exclude(receiver.endpoint, "dma")
    fails(again, Status.PEER_LOST)
    last = sender.open(receiver.endpoint, "v", 1, 512)
    fails(last, Status.REFUSED, "this side can use nothing; the receiver offers shm, dma, tcp, ipc")


def test_closing_waits_for_an_order_that_is_begun(dma: Backend) -> None:
    receiver, sender, transfer, order = begun_order(dma)
    closing = threading.Thread(target=sender.close)
    closing.start()
    eventually(lambda: transfer.state == TransferState.CANCELLED)
    assert sender.take_order(10.0) is None
    assert not transfer.quiesced
    assert receiver.stats().filling == 1
    order.placed()
    closing.join(4.0)
    assert not closing.is_alive()
    eventually(lambda: empty(receiver))
