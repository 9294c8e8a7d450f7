"""KV over real NIXL and UCX, in host memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.eventually import eventually
from tests.footprint import footprint
from tests.needed import needed
from tests.transport.children import ROOT, stop
from tests.transport.conftest import IDENTITY, Backend, empty, ended, make_backend
from vllm_tetri.errors import TransferError
from vllm_tetri.transport.native import Status, TransferState
from vllm_tetri.transport.nixl import KIND, NixlReceiver, NixlWire, offer_nixl
from vllm_tetri.transport.push import Push

needed("nixl._api")

# It prints what arrived, name by name, as it is asked for.
RECEIVER = f"""
import ctypes, sys
from hashlib import sha256
import numpy as np
from vllm_tetri.transport.native import Arena, Receiver
from vllm_tetri.transport.nixl import NixlReceiver
receiver = Receiver(arena_bytes=64 << 20, identity={IDENTITY})
offer = NixlReceiver(receiver)
arena = Arena(receiver.segment)
print(receiver.endpoint, flush=True)
for line in sys.stdin:
    slot = receiver.take(line.strip())
    place = ctypes.c_uint8 * slot.rank_bytes
    memory = np.ctypeslib.as_array(place.from_address(arena.address + slot.offset))
    print(sha256(memory).hexdigest(), flush=True)
offer.close()
receiver.close()
"""


@contextmanager
def receiving() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen(
        [sys.executable, "-c", RECEIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            assert process.stdout is not None
            yield process, endpoint_of(process)
        finally:
            process.kill()


def endpoint_of(process: subprocess.Popen[str]) -> str:
    """The line that looks like one; NIXL logs to the same stream."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("127.0.0.1:"):
            return line.strip()
    raise AssertionError("the receiver ended")


@pytest.fixture
def nixl() -> Iterator[Backend]:
    yield from make_backend(KIND)


def sending(backend: Backend, *links: str, timeout_s: float = 30.0) -> Any:
    """A sender whose orders NIXL carries out."""
    sender = backend.sender(links=[*links] or [KIND])
    push = Push(sender, {KIND: NixlWire(timeout_s)}, timeout_s)
    backend.closing[-1:] = [push, sender]  # closed in the other order
    return sender


def offering(backend: Backend, **options: Any) -> Any:
    receiver = backend.receiver(**options)
    backend.closing.append(NixlReceiver(receiver))
    return receiver


def test_bytes_reach_another_process(nixl: Backend) -> None:
    sender, cache = sending(nixl), nixl.cache(3, 64, 4096, gap=512, seed=1)
    ids = np.random.default_rng(2).permutation(64).astype(np.int32)[:50]
    with receiving() as (process, endpoint):
        for name in ("first", "second"):
            transfer = sender.open(endpoint, name, len(ids), cache.layout.block_bytes)
            transfer.write(cache.layout, 20, ids[20:])
            transfer.write(cache.layout, 0, ids[:20])
            transfer.finish()
            assert ended(transfer) == TransferState.DONE, transfer.error
            assert transfer.link == KIND
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(name + "\n")
            process.stdin.flush()
            assert process.stdout.readline().strip() == sha256(cache.bytes_of(ids)).hexdigest()


def test_blocks_leave_when_their_event_fires_and_not_before(nixl: Backend) -> None:
    receiver, sender = offering(nixl), sending(nixl)
    push, cache, fired = nixl.closing[-2], nixl.cache(seed=1), threading.Event()
    assert isinstance(push, Push)
    num_bytes, ids = cache.layout.block_bytes, np.arange(8, dtype=np.int32)

    def send(name: str, tag: int) -> Any:
        transfer = sender.open(receiver.endpoint, name, 8, num_bytes)
        transfer.write(cache.layout, 0, ids, tag)
        transfer.finish()
        return transfer

    assert ended(send("connects", 0)) == TransferState.DONE
    waits = send("waits", push.mark(SimpleNamespace(query=fired.is_set)))  # type: ignore[arg-type]
    assert ended(send("overtakes", 0)) == TransferState.DONE
    assert not waits.bytes_sent
    fired.set()
    assert ended(waits) == TransferState.DONE


def test_a_cancelled_transfer_frees_its_slot(nixl: Backend) -> None:
    receiver, sender = offering(nixl), sending(nixl)
    cache = nixl.cache(seed=1)
    transfer = sender.open(receiver.endpoint, "t", 8, cache.layout.block_bytes)
    transfer.write(cache.layout, 0, np.arange(4, dtype=np.int32))
    eventually(lambda: transfer.bytes_sent == 4 * cache.layout.block_bytes)
    transfer.cancel()
    assert ended(transfer) == TransferState.CANCELLED
    eventually(lambda: transfer.quiesced)
    eventually(lambda: empty(receiver))
    nixl.pushed(sender, receiver, "next", cache, [5, 6])
    assert nixl.arrived(receiver, "next", cache) == cache.bytes_of([5, 6])


def test_a_killed_receiver_fails_the_transfer_and_no_other(nixl: Backend) -> None:
    sender, cache = sending(nixl), nixl.cache(seed=1)
    with receiving() as (process, endpoint):
        transfer = sender.open(endpoint, "t", 8, cache.layout.block_bytes)
        transfer.write(cache.layout, 0, np.arange(4, dtype=np.int32))
        eventually(lambda: transfer.bytes_sent > 0)
        process.send_signal(signal.SIGKILL)
        process.wait()
        transfer.write(cache.layout, 4, np.arange(4, dtype=np.int32))
        transfer.finish()
        assert ended(transfer) == TransferState.FAILED
        assert transfer.status in (Status.PEER_LOST, Status.INVALID), transfer.error
        eventually(lambda: transfer.quiesced)
    other = offering(nixl)
    nixl.pushed(sender, other, "next", cache, [5, 6])
    assert nixl.arrived(other, "next", cache) == cache.bytes_of([5, 6])


@pytest.mark.slow
def test_a_stopped_receiver_fails_the_transfer_in_time(nixl: Backend) -> None:
    sender, cache = sending(nixl, timeout_s=1.0), nixl.cache(seed=1)
    with receiving() as (process, endpoint):
        transfer = sender.open(endpoint, "t", 8, cache.layout.block_bytes)
        eventually(lambda: transfer.state == TransferState.SENDING)
        stop(process)
        transfer.write(cache.layout, 0, np.arange(8, dtype=np.int32))
        transfer.finish()
        transfer.cancel()
        eventually(lambda: transfer.quiesced)
        process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("blob", [b"", b"garbage", bytes(300), b"\xff" * 300])
def test_an_offer_that_cannot_be_opened_excludes_the_kind(nixl: Backend, blob: bytes) -> None:
    receiver = nixl.receiver(offers={KIND: blob})
    sender, cache = sending(nixl, KIND, "tcp"), nixl.cache(seed=1)
    first = nixl.push(sender, receiver, "a", cache, [1, 2])
    assert ended(first) == TransferState.FAILED
    assert first.status in (Status.PEER_LOST, Status.INVALID), first.error

    def by_tcp() -> bool:
        """The next transfer may still meet the session that ends."""
        transfer = nixl.push(sender, receiver, str(next(names)), cache, [1, 2])
        return bool(ended(transfer) == TransferState.DONE and transfer.link == "tcp")

    names = count()
    assert eventually(by_tcp)


def test_an_offer_of_less_memory_than_the_slots_is_not_written_to(nixl: Backend) -> None:
    small, receiver = nixl.receiver(arena_bytes=4096), nixl.receiver()
    offered: list[bytes] = []

    class Kept:
        segment = small.segment

        def offer(self, kind: str, blob: bytes) -> None:
            offered.append(blob)

        def stats(self) -> Any:
            return small.stats()

    nixl.closing.append(NixlReceiver(Kept()))  # type: ignore[arg-type]
    receiver.offer(KIND, offered[0])
    cache = nixl.cache(num_blocks=64, page_bytes=8192, seed=1)
    transfer = nixl.push(sending(nixl), receiver, "t", cache, range(60))
    assert ended(transfer) == TransferState.FAILED
    eventually(lambda: empty(receiver), 20.0)


def test_nothing_is_left_after_close(nixl: Backend) -> None:
    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate()}

    def once() -> None:
        local = Backend(KIND)
        receiver, sender, cache = offering(local), sending(local), local.cache(seed=1)
        local.pushed(sender, receiver, "t", cache, [1, 2])
        for each in reversed(local.closing):
            each.close()

    once()  # NIXL's plugins stay loaded
    before, names_before = footprint(), names()
    once()
    eventually(lambda: footprint().fits(before) and names() <= names_before)


def test_auto_offers_nothing_to_its_own_host(nixl: Backend) -> None:
    receiver = nixl.receiver()
    assert offer_nixl(receiver, "auto", "127.0.0.1") is None
    assert offer_nixl(receiver, "tcp", "10.0.0.1") is None
    made = offer_nixl(receiver, "emulate:1GB/s,1us,nixl", "127.0.0.1")
    assert made is not None
    made.close()


def test_a_missing_package_is_said_in_one_line(
    nixl: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(TransferError, match=r"pip install --no-deps nixl==") as found:
        offer_nixl(nixl.receiver(), "nixl", "127.0.0.1")
    assert "\n" not in str(found.value)
