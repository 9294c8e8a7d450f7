"""KV connections between ends that must hold the same key."""

from __future__ import annotations

import struct
import time

import numpy as np
import pytest

from tests.faults.proxy import Proxy
from tests.transport import wire
from tests.transport.conftest import IDENTITY, KEY, Backend, eventually, fails
from tests.transport.wire import Rogue
from tests.transport.wire_proof import PROOF, Prover, challenge, proof, proof_of
from vllm_tetri.transport.native import Status

OTHER = bytes(range(1, 33))


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        (OTHER, KEY, "another secret than this receiver"),
        (b"", KEY, "wants to be shown the cluster's secret first"),
        (KEY, b"", "was given no secret"),
    ],
    ids=["other", "none", "unguarded"],
)
def test_ends_that_do_not_refuse_each_other_in_words(
    core: Backend, here: bytes, there: bytes, words: str
) -> None:
    receiver = core.receiver(key=there)
    sender = core.sender(key=here)
    cache = core.cache(seed=1)
    transfer = core.push(sender, receiver, "t", cache, [1, 2])
    fails(transfer, Status.REFUSED)
    assert words in transfer.error
    assert receiver.find("t") is None
    assert receiver.stats().refused_unauthenticated == bool(there)
    eventually(lambda: receiver.stats().connections == 0)
    core.still_works(receiver, key=there)


def test_the_proof_is_what_the_protocol_says(tcp: Backend) -> None:
    """An implementation of a few lines of Python gets in, and is answered by a proof."""
    receiver = tcp.receiver(key=KEY)
    with Prover(receiver.endpoint) as peer:
        peer.prove(KEY)
        peer.greet(IDENTITY, shm=False)
        with Prover(receiver.endpoint) as stream:
            stream.prove(KEY)
            stream.join(peer)
            status, *_ = peer.open("t", 1, 4096)  # a session ends with any of its connections
            assert status == 0


def test_nothing_is_read_before_the_proof(tcp: Backend) -> None:
    receiver = tcp.receiver(key=KEY)
    session = b"\0" * 8
    for raw in (
        wire.hello(IDENTITY),
        wire.frame(wire.JOIN, session),
        wire.frame(wire.MESSAGE, struct.pack("<Q", 1) + wire.text("boo")),
        proof(b"x" * 32),
        challenge(b"x" * 32) + wire.hello(IDENTITY),
        challenge(b"x" * 31),
        challenge(b"x" * 33),
        challenge(b"x" * 32) + challenge(b"x" * 32),
        challenge(b"x" * 32) + proof(b"y" * 32) + wire.hello(IDENTITY),
    ):
        with Rogue(receiver.endpoint) as rogue:
            rogue.send(raw)
            kinds = said_by(rogue)
            assert wire.WELCOME not in kinds
            assert PROOF not in kinds
            assert kinds[-1] == wire.REFUSED
    assert receiver.receive() is None
    assert receiver.stats().refused_unauthenticated == 9
    tcp.still_works(receiver, key=KEY)


def said_by(rogue: Rogue) -> list[int]:
    """Types of all frames until the receiver hangs up."""
    kinds = []
    try:
        while True:
            kinds.append(rogue.receive()[0])
    except (AssertionError, ConnectionError):
        return kinds


def test_neither_an_old_proof_nor_the_receivers_own_gets_in(tcp: Backend) -> None:
    receiver = tcp.receiver(key=KEY)
    with Prover(receiver.endpoint) as peer:
        mine, theirs = peer.exchange()
        old = proof(proof_of(KEY, b"sender", mine, theirs, receiver.endpoint))
        peer.send(old)
        assert peer.receive()[0] == PROOF
    for raw in (old, None):
        with Prover(receiver.endpoint) as peer:
            peer.send(challenge(mine))
            _, body = peer.receive()
            assert body[4:] != theirs  # another every time
            own = proof_of(KEY, b"receiver", mine, body[4:], receiver.endpoint)
            peer.send(raw or proof(own))
            kind, body = peer.receive()
            assert kind == wire.REFUSED
            assert b"another secret" in body
            assert peer.at_end()


def test_a_listener_elsewhere_cannot_relay_the_proof(core: Backend) -> None:
    """At a port that a dead receiver had, for example."""
    receiver = core.receiver(key=KEY)
    sender, cache = core.sender(key=KEY), core.cache(seed=1)
    with Proxy.to(receiver.endpoint) as elsewhere:
        transfer = sender.open(elsewhere.endpoint, "t", 2, cache.layout.block_bytes)
        transfer.write(cache.layout, 0, np.arange(2, dtype=np.int32))
        transfer.finish()
        fails(transfer, Status.REFUSED, "or came by another address")
    assert receiver.find("t") is None
    assert receiver.stats().refused_unauthenticated == 1
    core.still_works(receiver, key=KEY)


@pytest.mark.parametrize(
    "key", [pytest.param(b"", id="open", marks=pytest.mark.slow), pytest.param(KEY, id="guarded")]
)
def test_a_peer_that_waits_before_it_has_said_who_it_is_is_closed(tcp: Backend, key: bytes) -> None:
    receiver = tcp.receiver(key=key)
    with Rogue(receiver.endpoint) as silent, Prover(receiver.endpoint) as slow:
        if key:
            slow.exchange()
        else:
            slow.send(wire.hello(IDENTITY)[:20])
        for each in (silent, slow):
            each.socket.settimeout(15.0)
        started = time.monotonic()
        assert silent.at_end()
        assert slow.at_end()
        assert 3.0 < time.monotonic() - started < 10.0
    eventually(lambda: receiver.stats().connections == 0)


def test_unauthenticated_peers_are_bounded_and_never_displace_a_peer(core: Backend) -> None:
    receiver = core.receiver(key=KEY, max_connections=8)
    rogues = [Rogue(receiver.endpoint) for _ in range(300)]
    core.still_works(receiver, key=KEY)
    assert receiver.stats().connections <= 256 + 8
    for each in rogues:
        each.socket.close()
    eventually(lambda: receiver.stats().connections == 0)


def test_peers_that_come_at_once_do_not_displace_each_other(tcp: Backend) -> None:
    receiver = tcp.receiver(key=KEY, max_connections=128)
    peers = [Prover(receiver.endpoint) for _ in range(100)]
    for each in peers:
        each.prove(KEY)
    eventually(lambda: receiver.stats().connections == 100)
    for each in peers:
        each.socket.close()
    eventually(lambda: receiver.stats().connections == 0)


@pytest.mark.parametrize("key", [b"", KEY], ids=["open", "guarded"])
def test_peers_are_bounded_too(tcp: Backend, key: bytes) -> None:
    receiver = tcp.receiver(key=key, max_connections=2)
    peers = [Prover(receiver.endpoint) for _ in range(2)]
    for each in peers if key else ():
        each.prove(KEY)
    eventually(lambda: receiver.stats().connections == 2)
    with Rogue(receiver.endpoint) as third:
        assert third.at_end()
    for each in peers:
        each.socket.close()
    eventually(lambda: receiver.stats().connections == 0)
