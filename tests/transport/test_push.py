"""KV of a device moves in the right order: over a fake device and the real C++ core.

Streams are held, so that what does not wait for an event shows at once.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from tests.eventually import eventually
from tests.transport.conftest import Backend, empty, ended, fails
from tests.transport.fake_device import POISON, FakeDevice
from tests.transport.sides import BLOCKS, BUFFER, PAGE, Two, make_two, still
from vllm_tetri.transport import wires
from vllm_tetri.transport.blocks import DeviceMover
from vllm_tetri.transport.device import Copies, DeviceArena, DeviceEvent, places_of
from vllm_tetri.transport.native import Status, TransferState

EACH = wires.NUM_BUFFERS // 2  # buffers that one receiver gets while no other needs any


@pytest.fixture(params=["dma", "ipc", "tcp"])
def two(request: pytest.FixtureRequest, shm: Backend) -> Iterator[Two]:
    yield from make_two(request.param, shm)


@pytest.fixture(params=["dma", "ipc", "nccl", "tcp"])
def every(request: pytest.FixtureRequest, shm: Backend) -> Iterator[Two]:
    """NCCL has no stream before it is needed."""
    yield from make_two(request.param, shm)


@pytest.fixture(params=["dma", "ipc"])
def direct(request: pytest.FixtureRequest, shm: Backend) -> Iterator[Two]:
    """What copies straight into an arena."""
    yield from make_two(request.param, shm)


@pytest.fixture
def dma(shm: Backend) -> Iterator[Two]:
    yield from make_two("dma", shm)


@pytest.fixture
def ipc(shm: Backend) -> Iterator[Two]:
    yield from make_two("ipc", shm)


@pytest.fixture
def staged(shm: Backend) -> Iterator[Two]:
    yield from make_two("tcp", shm)


def test_blocks_leave_when_their_event_fires_and_not_before(every: Two) -> None:
    out, into = every.side(1), every.side(2)
    with out.device.held(out.device.compute):
        out.compute([3, 1, 7], 5)
        transfer = out.send(into, "t", [3, 1, 7])
        assert still(lambda: transfer.state is not TransferState.DONE)
        assert transfer.bytes_sent == 0
    assert ended(transfer) is TransferState.DONE, transfer.error  # without another step
    into.load("t", [0, 2, 4])
    assert into.holds([0, 2, 4], 5)
    assert into.holds([1, 3, 5, 6, 7], 0)


def test_an_event_is_kept_until_it_fires(every: Two) -> None:
    out, into = every.side(1), every.side(2)
    with out.device.held(out.device.compute):
        out.compute([3, 1], 5)
        transfer = out.send(into, "t", [3, 1])  # its order comes after the handshake
        for _ in range(50):  # steps
            out.push.mark(out.device.mark())
        assert still(lambda: transfer.bytes_sent == 0 and not into.receiver.take("t"))
    assert ended(transfer) is TransferState.DONE, transfer.error
    into.load("t", [0, 2])
    assert into.holds([0, 2], 5)


def test_a_transfer_is_not_done_before_its_copies_are(two: Two) -> None:
    out, into = two.side(1), two.side(2)
    out.compute([1, 2], 5)
    with out.device.held(out.wire.stream):
        transfer = out.send(into, "t", [1, 2])
        eventually(lambda: out.device.num_copies)
        assert still(lambda: transfer.state is TransferState.SENDING)
        transfer.cancel()
        assert still(lambda: not transfer.quiesced)  # a copy reads the blocks
        assert not into.receiver.take("t")
        if two.link != "tcp":
            assert not empty(into.receiver)  # it writes into the slot
    eventually(lambda: transfer.quiesced)
    eventually(lambda: empty(into.receiver))


def test_a_cancelled_transfer_is_not_read_any_more(two: Two) -> None:
    out, into = two.side(1), two.side(2)
    with out.device.held(*out.device.streams):
        first = out.send(into, "a", [1])  # fills the stream
        eventually(lambda: out.device.num_copies)
        second = out.open(into, "b", 1)
        second.cancel()
        out.write(second, 0, [2])
        eventually(lambda: second.quiesced)
        assert out.device.num_copies == 1
    assert ended(first) is TransferState.DONE


def test_a_load_waits_for_work_that_was_there_before(direct: Two) -> None:
    out, into = direct.side(1), direct.side(2)
    out.compute([1, 2], 5)
    assert ended(out.send(into, "t", [1, 2])) is TransferState.DONE
    with ThreadPoolExecutor(1) as copier:
        with into.device.held(into.device.compute):
            into.compute([4, 5], 9)  # of a request that had these blocks
            done = copier.submit(into.load, "t", [4, 5], into.device.mark())
            assert still(lambda: not done.done())
            assert into.holds([4, 5], 0)
        done.result(10.0)
    into.device.synchronize()
    assert into.holds([4, 5], 5)


def test_a_load_is_over_when_its_copies_are(direct: Two) -> None:
    out, into = direct.side(1), direct.side(2)
    out.compute([1, 2], 5)
    assert ended(out.send(into, "t", [1, 2])) is TransferState.DONE
    with ThreadPoolExecutor(1) as copier:
        with into.device.held(into.mover.stream):
            done = copier.submit(into.load, "t", [4, 5])
            eventually(lambda: into.device.num_copies)
            assert still(lambda: not done.done())
            assert not empty(into.receiver)  # the slot is not another transfer's yet
        done.result(10.0)
    assert into.holds([4, 5], 5)


def test_a_pool_gets_and_gives_blocks_in_the_order_of_the_device(dma: Two) -> None:
    side = dma.side(1)
    mover, device, rows = side.mover, side.device, np.array([0, 1], np.int32)
    memory = np.zeros((2, mover.layout.block_bytes), np.uint8)
    mover.adopt(memory)

    def load(after: DeviceEvent | None) -> None:
        mover.load_rows(memory, rows, np.array([4, 5], np.int32), after)

    with device.held(device.compute):
        side.compute([1, 2], 5)
        mover.save_rows(memory, rows, np.array([1, 2], np.int32))
        side.compute([1, 2], 9)  # of the request that gets these blocks
        assert still(lambda: not memory.any())
    device.synchronize()
    assert (memory == 5).all()
    with ThreadPoolExecutor(1) as copier:
        with device.held(device.compute):
            side.compute([4, 5], 9)  # of a request that had these blocks
            done = copier.submit(load, device.mark())
            assert still(lambda: not done.done())
        done.result(10.0)
        assert side.holds([4, 5], 5)
        with device.held(mover.stream):
            done = copier.submit(load, None)
            assert still(lambda: not done.done())
        done.result(10.0)


def test_a_pool_is_let_go_when_what_was_copied_to_it_is_there(dma: Two) -> None:
    side = dma.side(1)
    mover, device, rows = side.mover, side.device, np.array([0], np.int32)
    memory = np.zeros((1, mover.layout.block_bytes), np.uint8)
    mover.adopt(memory)
    with ThreadPoolExecutor(1) as other:
        with device.held(device.compute):
            side.compute([1], 5)
            mover.save_rows(memory, rows, np.array([1], np.int32))
            done = other.submit(mover.close)
            assert still(lambda: memory.ctypes.data in device.registered)
        done.result(10.0)
    assert memory.ctypes.data not in device.registered
    assert (memory == 5).all()


def test_a_full_ring_makes_orders_wait_and_not_the_engine(staged: Two) -> None:
    out, into = staged.side(1), staged.side(2)
    count = EACH + 2
    with out.device.held(out.wire.stream):
        transfers = [out.send(into, f"t{each}", [each]) for each in range(count)]
        eventually(lambda: out.device.num_copies == EACH)
        assert still(lambda: out.device.num_copies == EACH)
        transfers[-1].cancel()
        eventually(lambda: transfers[-1].quiesced)  # nothing of it has begun
    assert {ended(each) for each in transfers[:-1]} == {TransferState.DONE}
    assert len(out.device.registered) == EACH


def test_a_receiver_that_takes_nothing_does_not_hold_up_others(staged: Two) -> None:
    out, slow, other = staged.side(1, emulate=(1e9, 60.0)), staged.side(2), staged.side(3)
    sent = [out.send(slow, f"t{each}", [each]) for each in range(EACH + 2)]
    eventually(lambda: out.device.num_copies == EACH)
    sent.append(out.send(other, "a", [1]))
    eventually(lambda: out.device.num_copies == EACH + 1)
    for each in sent:
        each.cancel()
    eventually(lambda: all(each.quiesced for each in sent))


def test_a_buffer_is_used_again_only_when_it_was_sent(staged: Two) -> None:
    # As a receiver that takes 100 buffers a second.
    out = staged.side(1, emulate=(100.0 * BUFFER, 0.0))
    into = staged.side(2)
    groups = [[*range(4 * each, 4 * each + 4)] for each in range(3)]
    for value, ids in enumerate(groups, 1):
        out.compute(ids, value)
    transfers = [out.send(into, f"t{each}", groups[each % 3]) for each in range(12)]
    for each, transfer in enumerate(transfers):
        assert ended(transfer) is TransferState.DONE
        into.load(f"t{each}", [4, 5, 6, 7])
        assert into.holds([4, 5, 6, 7], each % 3 + 1)


def test_a_buffer_that_the_core_sends_is_not_free(staged: Two) -> None:
    out, into = staged.side(1, emulate=(1e9, 60.0)), staged.side(2)  # sending takes seconds
    transfers = [out.send(into, f"t{each}", [each]) for each in range(EACH + 2)]
    eventually(lambda: out.device.num_copies == EACH)
    assert still(lambda: out.device.num_copies == EACH)
    for each in transfers:
        each.cancel()
    eventually(lambda: all(each.quiesced for each in transfers))


def test_a_ring_that_stays_full_fails_transfers(staged: Two) -> None:
    out, into = staged.side(1, io_timeout_s=0.3), staged.side(2)
    with out.device.held(out.wire.stream):
        last = [out.send(into, f"t{each}", [each]) for each in range(EACH + 1)][-1]
        assert ended(last) is TransferState.FAILED
        assert last.quiesced


@pytest.mark.parametrize("when", ["mark", "copy", "event"])
def test_a_device_that_is_gone_fails_what_it_moves(
    two: Two, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    out, into = two.side(1), two.side(2)
    transfers = [out.open(into, f"t{each}", 1) for each in range(2)]
    if when == "mark":
        out.device.is_lost = True
        with pytest.raises(RuntimeError, match="CUDA"):
            out.write(transfers[0], 0, [1])
        return
    with out.device.held(*out.device.streams):
        if when == "copy":
            tags = [out.push.mark(out.device.mark()) for _ in transfers]
            out.device.is_lost = True
            for transfer, tag in zip(transfers, tags, strict=True):
                transfer.write(out.mover.layout, 0, np.int32([1]), tag)
        else:
            for transfer in transfers:
                out.write(transfer, 0, [1])
            eventually(lambda: out.device.num_copies == 2)
            out.device.is_lost = True
        words = "cannot reach|the device failed, restart this instance"
        for transfer in transfers:
            assert ended(transfer) is TransferState.FAILED
            assert transfer.status is not Status.TIMEOUT
            eventually(lambda transfer=transfer: transfer.quiesced)
    lines = [each for each in caplog.messages if "pushing KV" in each]
    assert lines
    assert len(lines) == len(set(lines))
    assert words.split("|")[0] in lines[0] or words.split("|")[1] in lines[0]


def test_a_load_on_a_device_that_is_gone_raises(direct: Two) -> None:
    out, into = direct.side(1), direct.side(2)
    assert ended(out.send(into, "t", [1, 2])) is TransferState.DONE
    with ThreadPoolExecutor(1) as copier, into.device.held(into.mover.stream):
        done = copier.submit(into.load, "t", [4, 5])
        eventually(lambda: into.device.num_copies)
        into.device.is_lost = True
        with pytest.raises(RuntimeError, match="CUDA"):
            done.result(10.0)


def test_a_receiver_that_ends_fails_transfers_and_its_arena_is_let_go(two: Two) -> None:
    out, into, other = two.side(1), two.side(2), two.side(3)
    with out.device.held(out.wire.stream):
        transfer = out.send(into, "t", [1, 2])
        eventually(lambda: out.device.num_copies)
        into.receiver.close()
        assert still(lambda: not transfer.quiesced)
    fails(transfer, Status.PEER_LOST)
    eventually(lambda: transfer.quiesced)
    eventually(lambda: out.wire.has_room(SimpleNamespace(endpoint=into.receiver.endpoint)))
    assert ended(out.send(other, "t", [1, 2])) is TransferState.DONE
    if two.link == "dma":
        assert len(out.device.registered) == 1
    if two.link == "ipc":
        assert len(out.device.opened) == 1


def test_bytes_do_not_leave_the_arena_of_a_device(ipc: Two) -> None:
    out, into = ipc.side(1), ipc.side(2)
    small = DeviceArena(into.arena.address, 2 * PAGE, into.arena.handle)
    into.receiver.offer("ipc", small.offer(into.receiver.segment))  # it grants more than that
    transfer = out.send(into, "a", [1, 2])
    fails(transfer, Status.INVALID, "not in its arena")
    assert out.device.num_copies == 0
    assert ended(out.send(into, "b", [1])) is TransferState.DONE
    into.arena = DeviceArena(into.arena.address, PAGE, into.arena.handle)
    with pytest.raises(ValueError, match="not in the arena"):
        into.load("b", [1])


@pytest.mark.parametrize("offer", [b"", b"\x10" * 12, b"\x01" + bytes(9) + b"another handle"])
def test_memory_that_cannot_be_opened_is_left_to_the_next_link(
    dma: Two, offer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    out, into = dma.side(1, links=["ipc", "dma"]), dma.side(2)
    into.receiver.offer("ipc", offer)
    out.compute([1, 2], 5)
    with caplog.at_level(logging.ERROR):
        fails(out.send(into, "a", [1, 2]), Status.INVALID)
    assert "link ipc failed" in caplog.text
    names = map(str, count())

    def goes() -> bool:  # a retry at once may still meet the link that failed
        again = out.open(into, name := next(names), 2)
        out.write(again, 0, [1, 2])
        again.finish()
        if ended(again) is not TransferState.DONE:
            return False
        assert again.link == "dma"
        into.load(name, [4, 5])
        return True

    eventually(goes)
    assert into.holds([4, 5], 5)


def test_an_arena_of_a_device_is_out_of_reach_of_other_links(ipc: Two) -> None:
    out, into = ipc.side(1), ipc.side(2)
    for kind in ("shm", "dma", "tcp"):
        refused = out.core.sender(links=[kind]).open(into.receiver.endpoint, "t", 1, PAGE)
        fails(refused, Status.REFUSED, f"this side can use {kind}; the receiver offers ipc")
        assert "set --tetri-link auto on both" in refused.error


def test_memory_that_is_not_registered_is_refused() -> None:
    device = FakeDevice()
    host, own = np.zeros(64, np.uint8), device.zeros(64)
    at = [np.int64([each]) for each in (own.data_ptr(), host.ctypes.data, 64)]
    with pytest.raises(RuntimeError, match="not registered"):
        device.copy(device.make_stream(), Copies(*at), None)
    device.register(int(at[1][0]), 64)
    own.fill_(7)
    device.copy(device.streams[-1], Copies(*at), None).synchronize()
    assert (host == 7).all()
    device.close()
    assert POISON != 7


def test_runs_that_follow_one_another_are_one_copy(dma: Two) -> None:
    side = dma.side(1)
    memory = side.device.zeros(BLOCKS, 2, PAGE)
    outermost = DeviceMover(side.device, [memory[:, 0], memory[:, 1]], BLOCKS)
    ids = np.int32([4, 5, 6, 1])
    sizes = places_of(outermost.layout, ids, 0)[2]
    assert sizes.tolist() == [3 * 2 * PAGE, 2 * PAGE]  # blocks 4 to 6 at once
    assert places_of(side.mover.layout, ids, 0)[2].tolist() == [PAGE] * 8


@pytest.mark.parametrize("rounds", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_both_directions_at_once_for_many_rounds(every: Two, rounds: int) -> None:
    """Every round has its own bytes, so what is read too early or too late shows."""
    dice, sides = random.Random(11), [every.side(1), every.side(2)]
    for number in range(rounds):
        value, ids = number % 199 + 1, dice.sample(range(8), dice.randint(1, 4))
        sent = []
        for me, other in (sides, sides[::-1]):
            me.compute(ids, value)
            sent.append((me.send(other, f"t{number}", ids), me, other))
            if dice.random() < 0.1:  # a preemption: its blocks are another request's
                sent[-1][0].cancel()
                eventually(lambda transfer=sent[-1][0]: transfer.quiesced)
                me.compute(ids, 255)
        targets = [8 + each for each in ids]
        for transfer, _, other in sent:
            if ended(transfer) is TransferState.DONE:
                other.load(f"t{number}", targets, other.device.mark())
                assert other.holds(targets, value)
            else:  # it may have arrived before the sender's word, as a router tells both sides
                other.receiver.cancel(f"t{number}")
    for side in sides:
        eventually(lambda side=side: empty(side.receiver))
