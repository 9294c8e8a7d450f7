"""What receivers offer to senders in the handshake, and who may change it."""

from __future__ import annotations

import struct

import pytest

from tests.transport import wire
from tests.transport.conftest import IDENTITY, KEY, Backend, fails
from tests.transport.wire import Rogue
from tests.transport.wire_proof import (
    CHALLENGE,
    PROOF,
    FalseReceiver,
    Prover,
    challenge,
    context_of,
    mac_of,
    proof,
    proof_of,
)
from vllm_tetri.transport.native import Status


@pytest.mark.parametrize(
    ("kind", "blob"), [("shm", b""), ("tcp", b""), ("", b""), ("x" * 33, b""), ("a", b"x" * 65537)]
)
def test_offers_are_bounded(shm: Backend, kind: str, blob: bytes) -> None:
    receiver = shm.receiver()
    with pytest.raises(ValueError, match="offer"):
        receiver.offer(kind, blob)
    for number in range(8):
        receiver.offer(str(number), b"x" * 65536)
    with pytest.raises(ValueError, match="at most 8 offers"):
        receiver.offer("8", b"")
    shm.still_works(receiver)


def test_a_choice_that_was_not_offered_is_refused(shm: Backend) -> None:
    receiver = shm.receiver()
    for kind in ("ipc", "nixl", "shm\0", "\xff"):
        with Rogue(receiver.endpoint) as rogue:
            rogue.greet(IDENTITY, link=kind)
            assert rogue.receive()[0] == wire.REFUSED
            assert rogue.at_end()
    assert receiver.stats().bad_frames == 4
    shm.still_works(receiver)


def test_a_choice_that_was_changed_on_its_way_is_refused(shm: Backend) -> None:
    receiver = shm.receiver(key=KEY, offers={"ipc": b"handle"})

    class Changing(Prover):
        def send(self, raw: bytes) -> None:
            super().send(raw.replace(wire.text("ipc"), wire.text("tcp")))

    for peer_class, is_refused in ((Changing, True), (Prover, False)):
        with peer_class(receiver.endpoint) as peer:
            peer.prove(KEY)
            peer.greet(IDENTITY, link="ipc")
            peer.send(wire.frame(wire.MESSAGE, struct.pack("<Q", 1) + wire.text("hello")))
            kind, body = peer.receive()
            assert kind == (wire.REFUSED if is_refused else wire.MESSAGE_ACK)
            assert (b"changed on their way" in body) == is_refused
    shm.still_works(receiver, key=KEY)


@pytest.mark.parametrize("changed", [False, True])
def test_an_offer_that_was_changed_on_its_way_is_refused(shm: Backend, changed: bool) -> None:
    """What is between both ends passes the proofs on, and puts another handle into the offer."""
    nonces: list[bytes] = []

    def answer(kind: int, body: bytes) -> bytes | None:
        if kind == CHALLENGE:
            nonces[:] = [body[4:], bytes(32)]
            return challenge(nonces[1])
        if kind == PROOF:
            return proof(proof_of(KEY, b"receiver", nonces[0], nonces[1], false.endpoint))
        if kind != wire.HELLO:
            return None
        agreed = body + wire.welcome(offers={"ipc": b"good", "nixl": b"good"})[12:]
        mac = mac_of(KEY, b"receiver", context_of(*nonces, false.endpoint), agreed)
        return wire.welcome(
            offers={"ipc": b"good", "nixl": b"evil" if changed else b"good"}, mac=mac
        )

    false = FalseReceiver(answer)
    sender = shm.sender(key=KEY, links=["nixl"])
    try:
        transfer = sender.open(false.endpoint, "t", 1, 4096)
        if changed:
            fails(transfer, Status.REFUSED, "changed on their way")
        else:
            fails(transfer, Status.PEER_LOST)  # it agreed, and then hung up
    finally:
        sender.close()
        false.close()
