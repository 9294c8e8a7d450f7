"""Cancel, timeouts, a full arena, gone routers and closing, over each link."""

from __future__ import annotations

import threading
import time

import numpy as np

from tests.eventually import eventually
from tests.transport.conftest import IDENTITY, Backend, empty, ended, fails
from vllm_tetri.transport.native import SlotState, Status, TransferState

ONE = np.array([0], np.int32)


def test_sender_cancels_while_filling(core: Backend) -> None:
    receiver, _, cache, transfer = core.begun(4)
    transfer.cancel()
    transfer.cancel()
    assert (transfer.state, transfer.status) == (TransferState.CANCELLED, Status.CANCELLED)
    eventually(lambda: transfer.quiesced)
    eventually(lambda: empty(receiver))
    slot = receiver.find("t")
    assert slot.state == SlotState.FAILED
    assert "the sender cancelled it" in slot.error
    assert transfer.write(cache.layout, 1, ONE) == Status.CANCELLED
    transfer.finish()
    assert transfer.state == TransferState.CANCELLED
    receiver.release("t")
    assert receiver.find("t") is None


def test_sender_cancels_before_the_answer(core: Backend) -> None:
    receiver, sender, _ = core.ends()
    transfers = [sender.open(receiver.endpoint, f"t{index}", 4, 512) for index in range(20)]
    for each in transfers:
        each.cancel()
    assert sender.send(receiver.endpoint, b"after", 5.0) == Status.OK
    eventually(lambda: empty(receiver))
    assert {each.state for each in transfers} == {TransferState.CANCELLED}


def test_cancel_after_done_changes_nothing(core: Backend) -> None:
    receiver, sender, cache = core.ends()
    transfer = core.push(sender, receiver, "t", cache, [1, 2])
    ended(transfer)
    transfer.cancel()
    assert transfer.state == TransferState.DONE
    assert core.arrived(receiver, "t", cache) == cache.bytes_of([1, 2])


def test_cancel_from_another_thread_while_large_writes_run(core: Backend) -> None:
    receiver, sender = core.receiver(arena_bytes=64 << 20), core.sender()
    cache = core.cache(4, 128, 65536, seed=1)
    ids = np.arange(128, dtype=np.int32)
    for index in range(8):
        transfer = sender.open(receiver.endpoint, f"t{index}", 128, cache.layout.block_bytes)
        transfer.write(cache.layout, 0, ids)
        time.sleep(0.001 * index)
        transfer.cancel()
        eventually(lambda transfer=transfer: transfer.quiesced)
    eventually(lambda: empty(receiver))
    core.pushed(sender, receiver, "good", cache, ids)
    assert core.arrived(receiver, "good", cache) == cache.bytes_of(ids)


def test_receiver_cancels_while_filling_and_refuses_the_name(core: Backend) -> None:
    receiver, sender, cache, transfer = core.begun(4)
    receiver.cancel("t")
    assert receiver.find("t") is None
    fails(transfer, Status.CANCELLED)
    assert transfer.quiesced
    eventually(lambda: empty(receiver))
    again = sender.open(receiver.endpoint, "t", 4, cache.layout.block_bytes)
    fails(again, Status.CANCELLED, "cancelled it before")


def test_a_name_cancelled_before_it_was_opened_is_refused_until_fill_timeout(core: Backend) -> None:
    receiver, sender, cache = core.ends(fill_timeout_s=0.5)
    receiver.cancel("t")
    fails(core.push(sender, receiver, "t", cache, [1]), Status.CANCELLED)
    eventually(lambda: ended(core.push(sender, receiver, "t", cache, [1])) == TransferState.DONE)


def test_receiver_cancels_what_arrived_but_never_what_is_taken(core: Backend) -> None:
    receiver, sender, cache = core.ends()
    for name in ("a", "b"):
        ended(core.push(sender, receiver, name, cache, [1]))
    receiver.take("b")
    receiver.cancel("a")
    receiver.cancel("b")
    assert receiver.find("a") is None
    assert receiver.find("b").state == SlotState.TAKEN
    receiver.release("b")
    assert empty(receiver)


def test_a_full_arena_is_an_answer_and_has_room_again_later(core: Backend) -> None:
    receiver, sender = core.receiver(arena_bytes=64 << 10), core.sender()
    cache = core.cache(1, 16, 4096, seed=1)
    core.pushed(sender, receiver, "a", cache, range(12))
    second = core.push(sender, receiver, "b", cache, range(8))
    fails(second, Status.FULL, "no room")
    assert receiver.find("b") is None
    assert receiver.stats().refused_full == 1
    core.arrived(receiver, "a", cache)
    core.pushed(sender, receiver, "b", cache, range(8))


def test_a_transfer_larger_than_the_arena_is_refused_for_good(core: Backend) -> None:
    receiver, sender = core.receiver(arena_bytes=8192), core.sender()
    transfer = sender.open(receiver.endpoint, "t", 3, 4096)
    fails(transfer, Status.REFUSED, "arena_bytes")


def test_the_same_name_cannot_be_open_twice(core: Backend) -> None:
    receiver, sender = core.receiver(), core.sender()
    first = sender.open(receiver.endpoint, "t", 1, 512)
    eventually(lambda: receiver.find("t"))
    second = sender.open(receiver.endpoint, "t", 1, 512)
    fails(second, Status.REFUSED, "open already")
    assert first.state != TransferState.FAILED
    first.cancel()


def test_filling_without_progress_ends(core: Backend) -> None:
    receiver, _, _, transfer = core.begun(4, fill_timeout_s=0.2)
    assert receiver.wait(5.0)
    slot = receiver.find("t")
    assert slot.state == SlotState.FAILED
    assert "no progress for 0.2 s" in slot.error
    fails(transfer, Status.TIMEOUT)
    eventually(lambda: empty(receiver))
    assert receiver.stats().expired == 1


def test_filling_with_progress_goes_on(core: Backend) -> None:
    receiver, sender, cache = core.ends(fill_timeout_s=1.0)
    transfer = sender.open(receiver.endpoint, "t", 12, cache.layout.block_bytes)
    for block in range(12):
        assert transfer.write(cache.layout, block, np.array([block], np.int32)) == Status.OK
        time.sleep(0.1)
    transfer.finish()
    assert ended(transfer) == TransferState.DONE, transfer.error


def test_arrived_but_not_taken_ends(core: Backend) -> None:
    receiver, sender, cache = core.ends(hold_timeout_s=0.2)
    ended(core.push(sender, receiver, "t", cache, [1]))
    ended(core.push(sender, receiver, "pinned", cache, [1]))
    assert receiver.take("pinned") is not None
    eventually(lambda: receiver.stats().expired == 1)
    assert receiver.take("t") is None
    time.sleep(0.3)
    assert receiver.find("pinned").state == SlotState.TAKEN
    receiver.release("pinned")
    eventually(lambda: empty(receiver))
    eventually(lambda: receiver.find("t") is None)


def test_finish_with_missing_blocks_fails_and_names_one(core: Backend) -> None:
    receiver, sender, cache = core.ends()
    transfer = sender.open(receiver.endpoint, "t", 3, cache.layout.block_bytes)
    transfer.write(cache.layout, 0, ONE)
    transfer.write(cache.layout, 2, ONE)
    transfer.finish()
    fails(transfer, Status.INVALID, "block 1 of 3")
    eventually(lambda: empty(receiver))


def test_too_many_queued_blocks_fail_the_transfer(core: Backend) -> None:
    receiver, sender = core.receiver(), core.sender(max_queued_blocks=8)
    cache = core.cache(seed=1)
    transfer = sender.open(receiver.endpoint, "t", 9, cache.layout.block_bytes)
    assert transfer.write(cache.layout, 0, np.arange(9, dtype=np.int32)) == Status.FULL
    assert (transfer.state, transfer.status) == (TransferState.FAILED, Status.FULL)
    eventually(lambda: empty(receiver))
    core.pushed(sender, receiver, "u", cache, range(8))


def test_identity_that_differs_is_refused_key_by_key(core: Backend) -> None:
    receiver = core.receiver(identity=IDENTITY | {"block_size": "128", "isa": "avx2"})
    sender = core.sender()
    transfer = sender.open(receiver.endpoint, "t", 1, 512)
    fails(transfer, Status.REFUSED, "block_size: here 16, there 128")
    assert "isa: here absent, there avx2" in transfer.error
    assert "model" not in transfer.error
    assert sender.send(receiver.endpoint, b"m", 5.0) == Status.REFUSED
    assert receiver.stats().refused_identity == 2
    assert empty(receiver)


def test_an_endpoint_without_a_receiver(core: Backend) -> None:
    sender = core.sender()
    receiver = core.receiver()
    receiver.close()
    transfer = sender.open(receiver.endpoint, "t", 1, 512)
    fails(transfer, Status.PEER_LOST)
    assert transfer.quiesced
    assert sender.send(receiver.endpoint, b"m", 5.0) == Status.PEER_LOST


def test_sender_closes_with_work_in_flight(core: Backend) -> None:
    receiver, sender, _, transfer = core.begun(4)
    sender.close()
    sender.close()
    assert transfer.quiesced
    assert (transfer.state, transfer.status) == (TransferState.CANCELLED, Status.CLOSED)
    eventually(lambda: empty(receiver))
    assert receiver.find("t").state == SlotState.FAILED
    late = sender.open(receiver.endpoint, "u", 1, 512)
    assert late.status == Status.CLOSED
    assert late.quiesced
    assert sender.send(receiver.endpoint, b"m", 1.0) == Status.CLOSED


def test_receiver_closes_with_work_in_flight(core: Backend) -> None:
    receiver, _, _, transfer = core.begun(4)
    receiver.close()
    receiver.close()
    fails(transfer, Status.PEER_LOST)
    assert receiver.take("t") is None
    receiver.cancel("t")
    receiver.release("t")
    receiver.wait(0.0)


def test_close_wakes_those_who_wait(core: Backend) -> None:
    receiver, sender = core.receiver(), core.sender()
    waits = [lambda: receiver.wait(30.0), lambda: sender.wait(30.0)]
    threads = [threading.Thread(target=wait) for wait in waits]
    for thread in threads:
        thread.start()
    receiver.close()
    sender.close()
    for thread in threads:
        thread.join(5.0)
        assert not thread.is_alive()
