"""Thousands of malformed frames, to receivers and to senders."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from random import Random

import pytest

from tests.footprint import footprint
from tests.mutation import COUNTS, mutated
from tests.transport import wire
from tests.transport.conftest import IDENTITY, KEY, Backend, empty, ended, eventually, fails
from tests.transport.wire import Rogue
from tests.transport.wire_proof import FalseReceiver, Prover, challenge, proof
from vllm_tetri.transport.native import Arena, SlotState, Status, TransferState

SIZES = (0, 1, 64, 4096, 1 << 31, (1 << 63) - 1, (1 << 64) - 1)


def number(rng: Random, known: list[int]) -> bytes:
    return struct.pack("<Q", rng.choice((*SIZES, *known)))


def peer_frame(rng: Random, known: list[int]) -> bytes:
    """A frame that a sender may send, about whatever it knows or makes up."""
    names = ("a", "b", "", "x" * 2000, b"\xff\xfe")
    several = (number(rng, known) for _ in iter(int, 1))
    kind = rng.choice(
        (wire.OPEN, wire.DONE, wire.CANCEL, wire.STOPPED, wire.MESSAGE, wire.HELLO, wire.PROGRESS)
    )
    match kind:
        case wire.OPEN:
            body = next(several) + wire.text(rng.choice(names)) + next(several) + next(several)
        case wire.DONE:
            body = next(several) + next(several)
        case wire.CANCEL:
            body = next(several) + wire.text(rng.choice(names))
        case wire.MESSAGE:
            body = next(several) + wire.text(rng.randbytes(rng.randrange(100)))
        case _:
            body = next(several)
    frame = wire.frame(kind, body)
    return mutated(rng, frame) if rng.random() < 0.3 else frame


@pytest.mark.parametrize("count", COUNTS)
def test_unauthenticated_frames_at_a_guarded_port(tcp: Backend, count: int) -> None:
    receiver = tcp.receiver(key=KEY)
    tcp.still_works(receiver, "first", key=KEY)
    before = footprint()
    rng = Random(1)
    good = challenge(bytes(32)) + proof(bytes(32)) + wire.hello(IDENTITY)
    for index in range(count):
        with Rogue(receiver.endpoint) as rogue:
            try:
                rogue.send(mutated(rng, good[: rng.choice((48, 96, len(good)))]) or b"\0")
            except ConnectionError:
                continue
        if index % 500 == 0:
            tcp.still_works(receiver, f"works-{index}", key=KEY)
    eventually(lambda: receiver.stats().connections == 0)
    assert receiver.stats().refused_unauthenticated > count / 3
    assert receiver.stats().slots == 0
    tcp.still_works(receiver, "last", key=KEY)
    eventually(lambda: footprint().fits(before))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shm", [False, True], ids=["tcp", "shm"])
def test_a_peer_that_says_strange_things(tcp: Backend, count: int, shm: bool) -> None:
    """It has the key, so nothing stands between it and the receiver but the checks."""
    receiver = tcp.receiver(key=KEY, fill_timeout_s=0.2, hold_timeout_s=0.2)
    rng = Random(2)
    sent = 0
    while sent < count:
        with Prover(receiver.endpoint) as peer:
            peer.prove(KEY)
            peer.greet(IDENTITY, shm=shm)
            _, generation, *_ = peer.open("a", 1, 4096)
            for _ in range(20):
                sent += 1
                try:
                    peer.send(peer_frame(rng, [generation]))
                except ConnectionError:
                    break
        for name in ("a", "b"):
            slot = receiver.find(name)
            assert slot is None or isinstance(slot.error, str)
        while receiver.receive() is not None:
            pass
    eventually(lambda: receiver.stats().connections == 0)
    eventually(lambda: empty(receiver))
    assert receiver.stats().bad_frames > count / 100
    tcp.still_works(receiver, "last", key=KEY)


@pytest.mark.parametrize("count", COUNTS)
def test_data_that_is_not_what_it_says(tcp: Backend, count: int) -> None:
    receiver = tcp.receiver(arena_bytes=1 << 20, hold_timeout_s=600.0)
    cache = tcp.cache(1, 2, 4096, seed=1)
    sender = tcp.sender()
    tcp.pushed(sender, receiver, "kept", cache, [0, 1])
    rng = Random(3)
    sent = 0
    while sent < count:
        with Rogue(receiver.endpoint) as control, Rogue(receiver.endpoint) as stream:
            control.greet(IDENTITY, shm=False)
            stream.join(control)
            _, generation, *_ = control.open("mine", 1, 4096)
            for _ in range(20):
                sent += 1
                offset = rng.choice((0, 1, 4095, 4096, *SIZES))
                known = rng.choice((generation, generation - 1, generation + 1, 0))
                frame = wire.data(known, offset, b"\xff" * rng.choice((0, 1, 64, 5000)))
                try:
                    stream.send(mutated(rng, frame) if rng.random() < 0.3 else frame)
                except ConnectionError:
                    break
    eventually(lambda: receiver.stats().connections <= 3)  # of the honest sender
    assert tcp.arrived(receiver, "kept", cache) == cache.bytes_of([0, 1])
    eventually(lambda: empty(receiver))
    tcp.still_works(receiver, "last")


def false_answers(rng: Random, kind: int, body: bytes) -> bytes | None:
    """What a receiver may say to a frame, with something wrong in it."""
    answers = {
        wire.HELLO: wire.welcome(),
        wire.JOIN: wire.frame(wire.JOINED),
        wire.MESSAGE: wire.frame(wire.MESSAGE_ACK, body[:8] + struct.pack("<I", 0)),
        wire.OPEN: wire.frame(
            wire.OPENED, body[:8] + struct.pack("<IQQI", 0, 5, 1 << 20, 1) + wire.text("")
        ),
        wire.DONE: wire.frame(wire.CONFIRM, body[:8]),
    }
    unasked = (
        wire.frame(wire.STOP, struct.pack("<QI", 5, rng.randrange(20)) + wire.text(b"\xff\xfe")),
        wire.frame(wire.CONFIRM, struct.pack("<Q", 5)),
        wire.frame(wire.REFUSED, wire.text(b"\xff\0" * 3000)),
        wire.frame(wire.OPENED, struct.pack("<QIQQI", 1, 3, 5, 0, 9999) + wire.text(b"\xfe")),
        b"",
    )
    if rng.random() < 0.1:
        return None
    answer = answers.get(kind, b"") + rng.choice(unasked)
    return mutated(rng, answer) if rng.random() < 0.3 else answer


@pytest.mark.parametrize("count", COUNTS)
def test_a_receiver_that_says_strange_things(tcp: Backend, count: int) -> None:
    """Whatever it says, transfers end, in words, and the sender goes on."""
    rng = Random(4)
    false = FalseReceiver(lambda kind, body: false_answers(rng, kind, body))
    sender = tcp.sender(open_timeout_s=0.5, io_timeout_s=0.2, streams=1, links=["shm", "tcp"])
    cache = tcp.cache(1, 4, 4096, seed=1)
    try:
        for index in range(count // 50):
            transfer = tcp.push(sender, false, f"t{index}", cache, [0])
            ended(transfer)
            assert transfer.error.isprintable()
            assert transfer.error or transfer.state == TransferState.DONE
            eventually(lambda transfer=transfer: transfer.quiesced)
        receiver = tcp.receiver()
        tcp.pushed(sender, receiver, "last", cache, [1])
    finally:
        sender.close()
        false.close()


def test_words_of_a_peer_are_fit_for_python(tcp: Backend) -> None:
    """Bytes that are no UTF-8 would raise wherever the engine looks at the slot."""
    receiver = tcp.receiver()
    with Rogue(receiver.endpoint) as rogue:
        rogue.greet(IDENTITY, shm=False)
        _, generation, *_ = rogue.open("t", 1, 4096)
        rogue.send(wire.frame(wire.CANCEL, struct.pack("<Q", generation) + wire.text(b"\xff\nno")))
        slot = eventually(lambda: (found := receiver.find("t")).state == SlotState.FAILED and found)
        assert slot.error == "the sender cancelled it: ??no"


def test_a_place_of_a_peer_is_fit_for_python(shm: Backend) -> None:
    welcome = wire.welcome(b"/dev/shm/\xff\n", bytes(16))
    false = FalseReceiver(lambda kind, _: welcome if kind == wire.HELLO else None)
    sender = shm.sender(links=["shm"])
    try:
        transfer = sender.open(false.endpoint, "t", 1, 4096)
        assert ended(transfer) == TransferState.FAILED
        assert "not the path of a receive arena: /dev/shm/??" in transfer.error
    finally:
        sender.close()
        false.close()


def test_an_arena_that_others_may_open_is_not_attached(shm: Backend) -> None:
    """A process that shortens the file ends every process that has mapped it."""
    receiver = shm.receiver()
    path = Path(receiver.segment)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_uid == os.geteuid()
    path.chmod(0o660)
    with pytest.raises(RuntimeError, match="not this user's alone"):
        Arena(receiver.segment)
    transfer = shm.sender(links=["shm"]).open(receiver.endpoint, "t", 1, 4096)
    fails(transfer, Status.REFUSED, "not this user's alone")
    path.chmod(0o600)
    shm.still_works(receiver, "later")
