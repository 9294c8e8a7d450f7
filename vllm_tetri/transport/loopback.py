"""The transport without threads, sockets or C++: for tests of what lies above.

Receiver and sender live in one process and every call does its work at once;
deadlines are looked at whenever somebody calls. It passes the same tests as the
native core, so it cannot drift from it.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.transport._core import SlotState, Status, TransferState
from vllm_tetri.transport.loopback_memory import Arena, Layout, copy_blocks
from vllm_tetri.transport.loopback_receiver import KEY_BYTES, Receiver, Slot, receivers

__all__ = [
    "Arena",
    "Layout",
    "Receiver",
    "Sender",
    "Slot",
    "SlotState",
    "Status",
    "Transfer",
    "TransferState",
    "copy_blocks",
]

_MAX_MESSAGE_BYTES = 64 << 10


class Transfer:
    """One request's blocks on their way; see the native `Transfer`."""

    link = "loopback"

    def __init__(self, sender: Sender, name: str, num_blocks: int, block_bytes: int) -> None:
        self.name, self.num_blocks, self.block_bytes = name, num_blocks, block_bytes
        self.state, self.status, self.error = TransferState.OPENING, Status.PENDING, ""
        self.bytes_sent = 0
        self._sender = sender
        self._covered: set[int] = set()
        self._receiver: Receiver | None = None

    @property
    def quiesced(self) -> bool:
        return self._over

    @property
    def _over(self) -> bool:
        return self.state not in (TransferState.OPENING, TransferState.SENDING)

    def write(self, layout: Layout, first_block: int, block_ids: NDArray[np.int32]) -> Status:
        self._check(layout, first_block, block_ids)
        if self._over:
            return Status.INVALID if self.state == TransferState.DONE else self.status
        if len(block_ids) > self._sender.max_queued_blocks:
            self._give_up(TransferState.FAILED, Status.FULL, "too many blocks are queued")
            return Status.FULL
        part = self._part()
        if part is not None:
            data = layout.gather(block_ids)
            start = first_block * self.block_bytes
            part[start : start + data.size] = data
            self.bytes_sent += data.size
            self._sender.bytes_sent += data.size
            self._covered.update(range(first_block, first_block + len(block_ids)))
        return Status.OK if part is not None else self.status

    def read(
        self, layout: Layout, first_block: int, block_ids: NDArray[np.int32], timeout_s: float
    ) -> Status:
        self._check(layout, first_block, block_ids)
        if self._over:
            return Status.STALE if self.state == TransferState.DONE else self.status
        part = self._part()
        if part is None:
            return Status.STALE
        layout.scatter(block_ids, part[first_block * self.block_bytes :])
        return Status.OK

    def finish(self) -> None:
        if self._over or self._part() is None or self._receiver is None:
            return
        for block in range(self.num_blocks):
            if block not in self._covered:
                text = f"finished although block {block} of {self.num_blocks} was never written"
                self._give_up(TransferState.FAILED, Status.INVALID, text)
                return
        with self._receiver.lock:
            self._receiver.finished(self, self._sender.rank)
        self.settle(TransferState.DONE, Status.OK, "")

    def cancel(self) -> None:
        if not self._over:
            self._give_up(TransferState.CANCELLED, Status.CANCELLED, "cancelled")

    def start(self, receiver: Receiver | None) -> None:
        """Ask the receiver for a slot."""
        if receiver is None:
            self.settle(TransferState.FAILED, Status.PEER_LOST, "cannot connect")
            return
        with receiver.lock:
            status, error = receiver.greet(self._sender.identity, self._sender.key)
            if status == Status.OK:
                status, error = receiver.admit(self, self._sender.rank, self._sender.num_ranks)
        if status != Status.OK:
            self.settle(TransferState.FAILED, status, error)
            return
        self._receiver = receiver
        self.state = TransferState.SENDING

    def settle(self, state: TransferState, status: Status, error: str) -> None:
        """Reach a last state, once."""
        if not self._over:
            self.state, self.status, self.error = state, status, error
            self._sender.settled(state)

    def sender_closed(self) -> None:
        if not self._over:
            self._give_up(TransferState.CANCELLED, Status.CLOSED, "the sender was closed")

    def _give_up(self, state: TransferState, status: Status, error: str) -> None:
        self.settle(state, status, error)
        if self._receiver is not None:
            with self._receiver.lock:
                self._receiver.cancelled_by_sender(self, self._sender.rank, error)

    def _part(self) -> NDArray[np.uint8] | None:
        if self._receiver is None:
            return None
        with self._receiver.lock:
            return self._receiver.part(self, self._sender.rank)

    def _check(self, layout: Layout, first_block: int, block_ids: NDArray[np.int32]) -> None:
        if layout.block_bytes != self.block_bytes:
            raise ValueError(f"transfer {self.name} has blocks of {self.block_bytes} bytes")
        if first_block < 0 or first_block + len(block_ids) > self.num_blocks:
            raise ValueError(f"transfer {self.name}: outside its {self.num_blocks} blocks")
        layout.check_ids(block_ids)


class Sender:
    """The prefill side; see the native `Sender`."""

    def __init__(
        self,
        *,
        identity: dict[str, str],
        rank: int = 0,
        num_ranks: int = 1,
        link: str = "auto",
        streams: int = 2,
        open_timeout_s: float = 5.0,
        io_timeout_s: float = 30.0,
        max_queued_blocks: int = 1 << 20,
        key: bytes = b"",
    ) -> None:
        if len(key) not in (0, KEY_BYTES):
            raise ValueError(f"a key has {KEY_BYTES} bytes, or none")
        if not 0 <= rank < num_ranks or link not in ("auto", "shm", "tcp"):
            raise ValueError("rank must be below num_ranks, link 'auto', 'shm' or 'tcp'")
        if not 1 <= streams <= 16 or min(open_timeout_s, io_timeout_s) <= 0:
            raise ValueError("streams must be between 1 and 16, timeouts positive")
        self.identity, self.rank, self.num_ranks = dict(identity), rank, num_ranks
        self.max_queued_blocks = max_queued_blocks
        self.key = key
        self.bytes_sent = 0
        self._lock = threading.Condition()
        self._counts = dict.fromkeys(TransferState, 0)
        self._active: list[Transfer] = []
        self._seen = 0
        self._closed = False

    def open(self, endpoint: str, transfer: str, num_blocks: int, block_bytes: int) -> Transfer:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"'{endpoint}' is no KV endpoint; write HOST:PORT")
        if num_blocks < 1 or block_bytes < 1:
            raise ValueError(f"transfer {transfer}: no size for a slot")
        opened = Transfer(self, transfer, num_blocks, block_bytes)
        self._active = [t for t in self._active if not t.quiesced] + [opened]
        if self._closed:
            opened.sender_closed()
        else:
            opened.start(receivers.get(endpoint))
        return opened

    def send(self, endpoint: str, message: bytes, timeout_s: float) -> Status:
        if len(message) > _MAX_MESSAGE_BYTES:
            raise ValueError(f"a message has at most {_MAX_MESSAGE_BYTES} bytes")
        receiver = receivers.get(endpoint)
        if self._closed or receiver is None:
            return Status.CLOSED if self._closed else Status.PEER_LOST
        with receiver.lock:
            if receiver.greet(self.identity, self.key)[0] != Status.OK:
                return Status.REFUSED
        return receiver.deliver(bytes(message))

    def wait(self, timeout_s: float) -> bool:
        with self._lock:
            self._lock.wait_for(lambda: self._total() != self._seen or self._closed, timeout_s)
            news = self._total() != self._seen
            self._seen = self._total()
            return news

    def stats(self) -> SimpleNamespace:
        active = sum(not t.quiesced for t in self._active)
        return SimpleNamespace(
            transfers=active,
            peers=0,
            threads=0,
            done=self._counts[TransferState.DONE],
            failed=self._counts[TransferState.FAILED],
            cancelled=self._counts[TransferState.CANCELLED],
            bytes_sent=self.bytes_sent,
        )

    def close(self) -> None:
        self._closed = True
        for transfer in self._active:
            transfer.sender_closed()
        self._active = []
        with self._lock:
            self._lock.notify_all()

    def settled(self, state: TransferState) -> None:
        with self._lock:
            self._counts[state] += 1
            self._lock.notify_all()

    def _total(self) -> int:
        return sum(self._counts.values())
