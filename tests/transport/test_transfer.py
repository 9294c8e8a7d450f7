"""Transfers that go well, and bad arguments, over each link."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tests.eventually import eventually
from tests.transport.conftest import IDENTITY, Backend, ended
from vllm_tetri.transport.native import Arena, Receiver, SlotState, Status, TransferState


@pytest.mark.parametrize(
    ("layers", "page_bytes", "gap", "count"),
    [(1, 64, 0, 1), (1, 4096, 4096, 3), (2, 100, 28, 7), (30, 512, 0, 16), (5, 16384, 64, 9)],
)
def test_blocks_arrive_unchanged_in_any_layout(
    core: Backend, layers: int, page_bytes: int, gap: int, count: int
) -> None:
    receiver, sender = core.receiver(arena_bytes=4 << 20), core.sender()
    cache = core.cache(layers, 32, page_bytes, gap, seed=1)
    ids = np.random.default_rng(2).permutation(32).astype(np.int32)[::2][:count]  # a view
    transfer = core.pushed(sender, receiver, "t", cache, ids)
    assert transfer.status == Status.OK
    assert transfer.quiesced
    assert transfer.link == core.link
    assert receiver.wait(5.0)
    slot = receiver.find("t")
    assert (slot.state, slot.num_blocks, slot.error) == (SlotState.ARRIVED, count, "")
    assert core.arrived(receiver, "t", cache) == cache.bytes_of(ids)
    assert receiver.find("t") is None
    assert receiver.stats().arena_used_bytes == 0


def test_chunks_may_come_in_any_order_and_twice(core: Backend) -> None:
    receiver, sender = core.receiver(arena_bytes=8 << 20), core.sender()
    cache = core.cache(2, 64, 32768, seed=1)
    transfer = sender.open(receiver.endpoint, "t", 40, cache.layout.block_bytes)
    ids = np.arange(40, dtype=np.int32)
    assert transfer.write(cache.layout, 20, ids[20:]) == Status.OK
    assert transfer.write(cache.layout, 0, ids[:20] + 24) == Status.OK
    assert transfer.write(cache.layout, 0, ids[:20]) == Status.OK
    assert transfer.write(cache.layout, 0, ids[:0]) == Status.OK
    transfer.finish()
    assert ended(transfer) == TransferState.DONE
    assert transfer.bytes_sent == 60 * cache.layout.block_bytes
    assert core.arrived(receiver, "t", cache) == cache.bytes_of(ids)


def test_a_slot_is_not_takeable_before_it_arrived(core: Backend) -> None:
    receiver, sender, cache = core.ends()
    transfer = sender.open(receiver.endpoint, "t", 2, cache.layout.block_bytes)
    eventually(lambda: receiver.find("t"))
    assert receiver.find("t").state == SlotState.FILLING
    assert receiver.take("t") is None
    receiver.release("t")
    transfer.write(cache.layout, 0, np.array([3, 4], np.int32))
    transfer.finish()
    ended(transfer)
    assert receiver.take("t").state == SlotState.TAKEN
    assert receiver.take("t") is None
    receiver.release("t")
    receiver.release("t")
    assert receiver.stats().slots == 0


def test_many_transfers_at_once_do_not_mix(core: Backend) -> None:
    receiver, sender = core.receiver(arena_bytes=16 << 20), core.sender()
    cache = core.cache(3, 64, 4096, seed=3)
    random = np.random.default_rng(4)
    wanted: dict[str, Any] = {}

    def work(worker: int) -> None:
        for index in range(8):
            ids = np.random.default_rng(worker * 100 + index).permutation(64)[: 5 + index]
            name = f"{worker}-{index}"
            wanted[name] = (core.push(sender, receiver, name, cache, ids), ids)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = list(wanted)
    random.shuffle(names)
    for name in names:
        transfer, ids = wanted[name]
        assert ended(transfer) == TransferState.DONE, transfer.error
        assert core.arrived(receiver, name, cache) == cache.bytes_of(ids)
    assert receiver.stats().arena_used_bytes == 0
    assert receiver.stats().arrived == 32


def test_ranks_share_a_slot_that_arrives_when_all_are_done(core: Backend) -> None:
    receiver = core.receiver()
    senders = [core.sender(rank=rank, num_ranks=3) for rank in range(3)]
    caches = [core.cache(seed=rank) for rank in range(3)]
    ids = np.array([5, 1, 9], np.int32)
    early = [core.push(senders[rank], receiver, "t", caches[rank], ids) for rank in (2, 0)]
    eventually(
        lambda: all(each.bytes_sent == len(ids) * caches[0].layout.block_bytes for each in early)
    )
    assert receiver.find("t").state == SlotState.FILLING
    assert {each.state for each in early} == {TransferState.SENDING}
    late = core.push(senders[1], receiver, "t", caches[1], ids)
    assert {ended(each) for each in (*early, late)} == {TransferState.DONE}
    assert receiver.find("t").state == SlotState.ARRIVED
    slot = receiver.take("t")
    assert slot.num_ranks == 3
    arena = Arena(receiver.segment)
    for rank in range(3):
        target = core.cache()
        offset = slot.offset + rank * slot.rank_bytes
        arena.load(offset, 0, target.layout, np.arange(3, dtype=np.int32))
        assert target.bytes_of(range(3)) == caches[rank].bytes_of(ids)
    arena.close()


def test_parts_of_a_slot_load_alone(core: Backend) -> None:
    receiver, sender = core.receiver(), core.sender()
    cache = core.cache(2, 16, 512, seed=1)
    ended(core.push(sender, receiver, "t", cache, range(10)))
    slot = receiver.take("t")
    arena = Arena(receiver.segment)
    target = core.cache()
    arena.load(slot.offset, 4, target.layout, np.array([7, 0, 2], np.int32))
    assert target.bytes_of([7, 0, 2]) == cache.bytes_of([4, 5, 6])
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.load(slot.offset, 0, target.layout, np.array([0], np.int32))


def test_messages_arrive_in_order(core: Backend) -> None:
    receiver, sender = core.receiver(), core.sender()
    for index in range(5):
        assert sender.send(receiver.endpoint, b"m%d" % index, 5.0) == Status.OK
    assert sender.send(receiver.endpoint, b"x" * 65536, 5.0) == Status.OK
    assert [receiver.receive() for _ in range(5)] == [b"m%d" % index for index in range(5)]
    assert receiver.receive() == b"x" * 65536
    assert receiver.receive() is None
    with pytest.raises(ValueError, match="65536"):
        sender.send(receiver.endpoint, b"x" * 65537, 1.0)


def test_a_message_wakes_a_thread_that_waits_for_kv(core: Backend) -> None:
    receiver, sender = core.receiver(), core.sender()
    assert not receiver.wait(0.0)
    assert sender.send(receiver.endpoint, b"note", 5.0) == Status.OK
    assert receiver.wait(0.0)
    assert receiver.receive() == b"note"
    assert not receiver.wait(0.0)


def test_message_queue_is_bounded_and_drops_the_newest(core: Backend) -> None:
    receiver, sender = core.receiver(), core.sender()
    answers = [sender.send(receiver.endpoint, b"%d" % index, 5.0) for index in range(1030)]
    assert answers[0] == Status.OK
    assert answers[-1] == Status.FULL
    assert receiver.receive() == b"0"


@pytest.mark.parametrize(
    ("first", "ids"), [(0, [16]), (0, [-1]), (3, [0, 1]), (5, [0]), (0, [0, 1, 2, 3, 4])]
)
def test_ids_and_ranges_are_checked_at_entry(core: Backend, first: int, ids: list[int]) -> None:
    receiver, sender = core.receiver(), core.sender()
    cache = core.cache()
    transfer = sender.open(receiver.endpoint, "t", 4, cache.layout.block_bytes)
    with pytest.raises(ValueError, match="outside"):
        transfer.write(cache.layout, first, np.array(ids, np.int32))
    transfer.cancel()


def test_blocks_of_another_size_are_refused_at_entry(core: Backend) -> None:
    receiver, sender = core.receiver(), core.sender()
    transfer = sender.open(receiver.endpoint, "t", 4, 512)
    with pytest.raises(ValueError, match="blocks of 512 bytes"):
        transfer.write(core.cache(2).layout, 0, np.array([0], np.int32))


def test_a_receiver_has_the_port_that_it_is_given_or_says_that_it_is_taken() -> None:
    options: dict[str, Any] = {"arena_bytes": 1 << 20, "identity": IDENTITY}
    first = Receiver(**options)
    port = int(first.endpoint.rpartition(":")[2])
    with pytest.raises(RuntimeError, match=f"127.0.0.1:{port}: Address already in use"):
        Receiver(**options, port=port)
    first.close()
    again = Receiver(**options, port=port)
    assert again.endpoint == first.endpoint
    again.close()


@pytest.mark.parametrize("endpoint", ["", "localhost", "127.0.0.1:x", ":5"])
def test_malformed_endpoints_are_refused(core: Backend, endpoint: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        core.sender().open(endpoint, "t", 1, 1)


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        ("sender", "rank", 1),
        ("sender", "streams", 0),
        ("sender", "links", []),
        ("sender", "io_timeout_s", 0.0),
        ("receiver", "arena_bytes", 1 << 47),
        ("receiver", "port", 70000),
        ("receiver", "fill_timeout_s", 0.0),
        *((make, "key", key) for make in ("sender", "receiver") for key in (b"short", bytes(33))),
    ],
)
def test_wrong_options_are_refused(core: Backend, make: str, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option.removesuffix("_s")):
        getattr(core, make)(**{option: value})
