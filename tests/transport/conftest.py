"""The C++ core over each of its links, and small makers of blocks, receivers and senders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.eventually import eventually
from vllm_tetri.transport import native
from vllm_tetri.transport.native import Status, TransferState

IDENTITY = {"model": "tiny", "block_size": "16"}
KEY = bytes(range(32))
ENDED = (TransferState.DONE, TransferState.FAILED, TransferState.CANCELLED)


def ended(transfer: Any, timeout_s: float = 10.0) -> Any:
    """Wait for the last state of a transfer."""
    return eventually(lambda: transfer.state in ENDED and transfer.state, timeout_s)


def fails(transfer: Any, status: Status, words: str = "", timeout_s: float = 10.0) -> None:
    """Check that a transfer fails, how and why."""
    assert ended(transfer, timeout_s) == TransferState.FAILED
    assert transfer.status == status, transfer.error
    assert words in transfer.error


def empty(receiver: Any) -> bool:
    """Whether the arena holds nothing."""
    stats = receiver.stats()
    return (stats.arena_used_bytes, stats.quarantined_bytes, stats.slots) == (0, 0, 0)


@dataclass
class Cache:
    """Paged blocks and the layout that describes them."""

    layout: Any
    layers: list[Any]
    page_bytes: int

    def bytes_of(self, ids: Any) -> bytes:
        pages = [layer[block, : self.page_bytes] for block in ids for layer in self.layers]
        return b"".join(page.tobytes() for page in pages)


@dataclass
class Backend:
    """The transport over one link."""

    link: str
    closing: list[Any] = field(default_factory=list)

    def receiver(self, offers: Mapping[str, bytes] | None = None, **options: Any) -> Any:
        wanted = {
            "arena_bytes": 1 << 20,
            "host": "127.0.0.1",
            "port": 0,
            "identity": IDENTITY,
            "fill_timeout_s": 20.0,
            "hold_timeout_s": 20.0,
        } | options
        receiver = native.Receiver(**wanted)
        for kind, blob in (offers or {}).items():
            receiver.offer(kind, blob)
        self.closing.append(receiver)
        return receiver

    def sender(self, **options: Any) -> Any:
        sender = native.Sender(**({"identity": IDENTITY, "links": [self.link]} | options))
        self.closing.append(sender)
        return sender

    def cache(
        self,
        num_layers: int = 2,
        num_blocks: int = 16,
        page_bytes: int = 512,
        gap: int = 0,
        seed: int | None = None,
    ) -> Cache:
        shape = (num_blocks, page_bytes + gap)
        layers = [np.zeros(shape, np.uint8) for _ in range(num_layers)]
        if seed is not None:
            random = np.random.default_rng(seed)
            layers = [random.integers(0, 256, shape, dtype=np.uint8) for _ in range(num_layers)]
        layout = native.Layout(
            np.array([layer.ctypes.data for layer in layers], np.uint64),
            np.full(num_layers, page_bytes + gap, np.uint64),
            np.full(num_layers, page_bytes, np.uint64),
            num_blocks,
            layers,
        )
        return Cache(layout, layers, page_bytes)

    def push(self, sender: Any, receiver: Any, name: str, cache: Cache, ids: Any) -> Any:
        """Open, write all and finish; not yet done."""
        ids = np.asarray(ids, np.int32)
        transfer = sender.open(receiver.endpoint, name, len(ids), cache.layout.block_bytes)
        transfer.write(cache.layout, 0, ids)
        transfer.finish()
        return transfer

    def pushed(self, sender: Any, receiver: Any, name: str, cache: Cache, ids: Any) -> Any:
        """Send all, to the end."""
        transfer = self.push(sender, receiver, name, cache, ids)
        assert ended(transfer) == TransferState.DONE, transfer.error
        return transfer

    def ends(self, **options: Any) -> tuple[Any, Any, Cache]:
        """A receiver, a sender, and blocks to send."""
        return self.receiver(**options), self.sender(), self.cache(seed=1)

    def begun(self, num_blocks: int, **options: Any) -> tuple[Any, Any, Cache, Any]:
        """A sender and a receiver, and a transfer `t` of which the first block was written."""
        receiver, sender, cache = self.ends(**options)
        transfer = sender.open(receiver.endpoint, "t", num_blocks, cache.layout.block_bytes)
        transfer.write(cache.layout, 0, np.array([0], np.int32))
        eventually(lambda: receiver.find("t"))
        return receiver, sender, cache, transfer

    def arrived(self, receiver: Any, name: str, cache: Cache) -> bytes:
        """Take a slot, copy it out, release it; its bytes."""
        slot = receiver.take(name)
        assert slot is not None
        arena = native.Arena(receiver.segment)
        target = self.cache(len(cache.layers), slot.num_blocks, cache.page_bytes)
        ids = np.arange(slot.num_blocks, dtype=np.int32)
        arena.load(slot.offset, 0, target.layout, ids)
        arena.close()
        receiver.release(name)
        return target.bytes_of(ids)

    def still_works(self, receiver: Any, name: str = "still-works", **options: Any) -> None:
        """A new sender reaches the receiver: mistakes of other peers left no trace."""
        sender = self.sender(**options)
        cache = self.cache(seed=1)
        transfer = self.push(sender, receiver, name, cache, [1, 2])
        assert ended(transfer) == TransferState.DONE, transfer.error
        assert self.arrived(receiver, name, cache) == cache.bytes_of([1, 2])
        sender.close()


def make_backend(link: str) -> Iterator[Backend]:
    made = Backend(link)
    yield made
    for each in reversed(made.closing):
        each.close()


@pytest.fixture(params=["shm", "tcp"])
def core(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each of the links."""
    yield from make_backend(request.param)


@pytest.fixture
def shm() -> Iterator[Backend]:
    yield from make_backend("shm")


@pytest.fixture
def tcp() -> Iterator[Backend]:
    yield from make_backend("tcp")
