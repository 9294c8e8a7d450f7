"""Slots that nobody will ask for: their router is gone."""

from __future__ import annotations

from tests.transport.conftest import Backend, ended, eventually
from tests.transport.test_lifetimes import empty
from vllm_tetri.transport.native import Status, TransferState


def test_what_nobody_took_goes_and_says_why(backend: Backend) -> None:
    receiver, sender = backend.receiver(), backend.sender()
    cache = backend.cache(seed=1)
    for name in ("arrived", "kept", "taken"):
        assert ended(backend.push(sender, receiver, name, cache, [1, 2])) == TransferState.DONE
    filling = sender.open(receiver.endpoint, "filling", 2, cache.layout.block_bytes)
    eventually(lambda: receiver.find("filling"))
    assert receiver.take("taken")
    assert (receiver.stats().filling, receiver.stats().unclaimed) == (1, 2)

    receiver.abandon(["kept"], "no router is left")

    assert ended(filling) == TransferState.FAILED
    assert filling.status == Status.CANCELLED
    for name in ("arrived", "filling"):
        assert receiver.find(name).error == "no router is left"
    eventually(lambda: (receiver.stats().filling, receiver.stats().unclaimed) == (0, 1))
    assert backend.arrived(receiver, "kept", cache) == cache.bytes_of([1, 2])
    receiver.release("taken")
    eventually(lambda: empty(receiver))


def test_a_name_that_was_abandoned_may_come_again(backend: Backend) -> None:
    receiver, sender = backend.receiver(), backend.sender()
    cache = backend.cache(seed=1)
    assert ended(backend.push(sender, receiver, "t", cache, [1])) == TransferState.DONE
    receiver.abandon([], "no router is left")
    assert ended(backend.push(sender, receiver, "t", cache, [2])) == TransferState.DONE
    assert backend.arrived(receiver, "t", cache) == cache.bytes_of([2])
