"""Peers that misbehave: nothing dies, nothing leaks, what is wrong is counted."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from tests.eventually import eventually
from tests.transport import wire
from tests.transport.conftest import IDENTITY, Backend, empty, ended
from tests.transport.wire import Rogue
from vllm_tetri.transport.native import Receiver, SlotState, TransferState
from vllm_tetri.transport.segments import abandoned_segments


def test_another_protocol_version_is_refused_in_words(tcp: Backend) -> None:
    receiver = tcp.receiver()
    with Rogue(receiver.endpoint) as rogue:
        rogue.send(wire.frame(wire.HELLO, b"", version=7))
        kind, body = rogue.receive()
        assert kind == wire.REFUSED
        assert b"a frame of protocol version 7, and this side speaks 3" in body
        assert rogue.at_end()
    assert receiver.stats().bad_frames == 1


def test_huge_lengths_and_counts_are_refused(tcp: Backend) -> None:
    receiver = tcp.receiver()
    evil = [
        struct.pack("<IHHI", wire.MAGIC, wire.VERSION, wire.HELLO, 0xFFFFFFFF),
        wire.frame(wire.HELLO, struct.pack("<I", 0xFFFFFFFF)),
        wire.frame(wire.HELLO, struct.pack("<II", 1, 0xFFFFFFFF)),
        wire.frame(wire.DATA, b"x" * 16),
        wire.frame(wire.JOIN, struct.pack("<Q", 42)),
        wire.hello(IDENTITY, rank=5, num_ranks=2),
    ]
    for raw in evil:
        with Rogue(receiver.endpoint) as rogue:
            rogue.send(raw)
            assert rogue.at_end()
    assert receiver.stats().bad_frames == len(evil)
    tcp.still_works(receiver)


def test_sizes_that_overflow_are_refused(tcp: Backend) -> None:
    receiver = tcp.receiver()
    with Rogue(receiver.endpoint) as rogue:
        rogue.greet(IDENTITY)
        for blocks, size in [(1 << 63, 2), (0, 5), (5, 0), (1 << 33, 1 << 33)]:
            status, *_ = rogue.open("t", blocks, size)
            assert status == 3
    assert empty(receiver)


def test_stale_and_misplaced_data_never_reach_the_arena(tcp: Backend) -> None:
    receiver = tcp.receiver(arena_bytes=8192)
    with Rogue(receiver.endpoint) as control, Rogue(receiver.endpoint) as stream:
        control.greet(IDENTITY, shm=False)
        stream.join(control)
        _, old, _, _ = control.open("old", 2, 4096)
        receiver.cancel("old")
        kind, body = control.receive()
        assert kind == wire.STOP
        assert struct.unpack_from("<Q", body)[0] == old
        cache = tcp.cache(1, 2, 4096, seed=1)
        sender = tcp.sender()
        tcp.pushed(sender, receiver, "new", cache, [0, 1])
        stream.send(wire.data(old, 0, b"\xff" * 8192))
        kind, body = control.receive()
        assert kind == wire.STOP
        assert struct.unpack_from("<QI", body) == (old, 7)
        assert tcp.arrived(receiver, "new", cache) == cache.bytes_of([0, 1])
        _, mine, _, _ = control.open("mine", 1, 4096)
        stream.send(wire.data(mine, 4000, b"\xff" * 100))
        assert stream.at_end()
    eventually(lambda: empty(receiver))
    assert receiver.stats().bad_frames == 1


def test_more_bytes_than_counted_end_the_session(tcp: Backend) -> None:
    receiver = tcp.receiver()
    with Rogue(receiver.endpoint) as control, Rogue(receiver.endpoint) as stream:
        control.greet(IDENTITY, shm=False)
        stream.join(control)
        _, mine, _, _ = control.open("t", 1, 4096)
        stream.send(wire.data(mine, 0, b"x" * 4096))
        eventually(lambda: receiver.stats().bytes_received == 4096)
        control.send(wire.frame(wire.DONE, struct.pack("<QQ", mine, 100)))
        assert control.at_end()
    eventually(lambda: empty(receiver))
    assert receiver.find("t").state == SlotState.FAILED


def test_a_dropped_shm_writer_stays_in_quarantine_until_it_closes(shm: Backend) -> None:
    receiver = shm.receiver()
    with Rogue(receiver.endpoint) as rogue:
        rogue.greet(IDENTITY)
        rogue.open("t", 2, 4096)
        rogue.send(b"no frame, and a lot of it")
        eventually(lambda: receiver.find("t").state == SlotState.FAILED)
        assert receiver.stats().quarantined_bytes == 8192
    eventually(lambda: empty(receiver))


def test_a_segment_has_an_unguessable_name_and_only_its_owner_may_open_it(shm: Backend) -> None:
    receiver = shm.receiver()
    path = Path(receiver.segment)
    assert path.parent == Path("/dev/shm")
    assert len(path.name) == len("tetri-") + 32
    assert path.stat().st_mode & 0o777 == 0o600
    receiver.close()
    assert not path.exists()


def test_segments_of_dead_owners_are_swept_and_those_of_living_ones_are_not(shm: Backend) -> None:
    living = shm.receiver()
    dead = Path("/dev/shm") / f"tetri-{os.urandom(16).hex()}"
    dead.write_bytes(b"x")
    foreign = Path("/dev/shm") / f"tetri-not-ours-{os.getpid()}"
    foreign.write_bytes(b"x")
    try:
        abandoned_segments(remove=True)
        assert not dead.exists()
        assert foreign.exists()
        assert Path(living.segment).exists()
    finally:
        foreign.unlink()


def test_auto_link_falls_back_to_tcp_when_the_segment_cannot_be_opened(shm: Backend) -> None:
    receiver = shm.receiver()
    cache = shm.cache(seed=1)
    Path(receiver.segment).unlink()
    transfer = shm.pushed(shm.sender(links=["shm", "tcp"]), receiver, "t", cache, [1])
    assert transfer.link == "tcp"
    refused = shm.push(shm.sender(links=["shm"]), receiver, "u", cache, [1])
    assert ended(refused) == TransferState.FAILED
    assert "this side can use shm; the receiver offers shm, dma, tcp, but" in refused.error
    assert "set --tetri-link auto on both" in refused.error


def test_an_arena_larger_than_dev_shm_is_an_error_that_says_so() -> None:
    before = abandoned_segments()
    with pytest.raises(RuntimeError, match="lower arena_bytes"):
        Receiver(arena_bytes=1 << 45, identity={})
    eventually(lambda: set(abandoned_segments()) <= set(before))
