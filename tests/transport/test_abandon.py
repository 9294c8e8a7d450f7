"""Slots that nobody will ask for: their router is gone."""

from __future__ import annotations

from tests.eventually import eventually
from tests.transport.conftest import Backend, ended
from tests.transport.test_lifetimes import empty
from vllm_tetri.transport.native import Status, TransferState


def test_what_nobody_took_goes_and_says_why(backend: Backend) -> None:
    receiver, sender = backend.receiver(), backend.sender()
    cache = backend.cache(seed=1)
    for name in ("r/arrived", "r/kept", "r/taken", "s/other"):
        assert ended(backend.push(sender, receiver, name, cache, [1, 2])) == TransferState.DONE
    filling = sender.open(receiver.endpoint, "r/filling", 2, cache.layout.block_bytes)
    eventually(lambda: receiver.find("r/filling"))
    assert receiver.take("r/taken")
    assert (receiver.stats().filling, receiver.stats().unclaimed) == (1, 3)

    receiver.abandon("r/", ["r/kept"], "its router is gone")

    assert ended(filling) == TransferState.FAILED
    assert filling.status == Status.CANCELLED
    for name in ("r/arrived", "r/filling"):
        assert receiver.find(name).error == "its router is gone"
    eventually(lambda: (receiver.stats().filling, receiver.stats().unclaimed) == (0, 2))
    for name in ("r/kept", "s/other"):
        assert backend.arrived(receiver, name, cache) == cache.bytes_of([1, 2])
    receiver.release("r/taken")
    eventually(lambda: empty(receiver))


def test_a_name_that_was_abandoned_may_come_again(backend: Backend) -> None:
    receiver, sender = backend.receiver(), backend.sender()
    cache = backend.cache(seed=1)
    assert ended(backend.push(sender, receiver, "t", cache, [1])) == TransferState.DONE
    receiver.abandon("", [], "its router is gone")
    assert ended(backend.push(sender, receiver, "t", cache, [2])) == TransferState.DONE
    assert backend.arrived(receiver, "t", cache) == cache.bytes_of([2])
