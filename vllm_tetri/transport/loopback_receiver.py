"""The receiving half of the loopback transport: slots, their states and lifetimes."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.transport._core import SlotState, Status, TransferState
from vllm_tetri.transport.loopback_memory import HEADER_BYTES, segments

if TYPE_CHECKING:
    from vllm_tetri.transport.loopback import Transfer

GRANULE = 4096
MAX_MESSAGES = 1024
KEY_BYTES = 32
receivers: dict[str, Receiver] = {}
_generations = itertools.count(secrets.randbits(60))
_ports = itertools.count(1)


@dataclass(frozen=True)
class Slot:
    """A snapshot of a transfer's place in the arena."""

    transfer: str
    state: SlotState
    offset: int
    num_blocks: int
    rank_bytes: int
    num_ranks: int
    generation: int
    error: str = ""


@dataclass
class _Record:
    slot: Slot
    deadline: float
    writers: dict[int, Transfer] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        size = self.slot.rank_bytes * self.slot.num_ranks
        return (size + GRANULE - 1) // GRANULE * GRANULE


class Receiver:
    """The decode side; see the native `Receiver`."""

    def __init__(
        self,
        *,
        arena_bytes: int,
        host: str,
        port: int,
        identity: dict[str, str],
        fill_timeout_s: float,
        hold_timeout_s: float,
        max_connections: int = 256,
        key: bytes = b"",
    ) -> None:
        if len(key) not in (0, KEY_BYTES):
            raise ValueError(f"a key has {KEY_BYTES} bytes, or none")
        if arena_bytes < 1 or not 0 <= port < 65536 or max_connections < 1:
            raise ValueError("arena_bytes, port or max_connections is out of range")
        if fill_timeout_s <= 0 or hold_timeout_s <= 0:
            raise ValueError("fill_timeout_s and hold_timeout_s must be positive")
        self.identity, self.key = dict(identity), key
        self.endpoint = f"{host}:{port or next(_ports)}"
        self.segment = f"loopback-{secrets.token_hex(16)}"
        self.lock = threading.Condition()
        self._total = (arena_bytes + GRANULE - 1) // GRANULE * GRANULE
        self._fill_s, self._hold_s = fill_timeout_s, hold_timeout_s
        self._slots: dict[str, _Record] = {}
        self._notes: dict[str, tuple[Slot, float]] = {}
        self._unwanted: dict[str, float] = {}
        self._messages: deque[bytes] = deque()
        self._settled = self._seen = 0
        self._counts = dict.fromkeys(
            (
                "arrived",
                "expired",
                "cancelled",
                "refused_full",
                "refused_identity",
                "refused_strangers",
            ),
            0,
        )
        self._received = 0
        self._closed = False
        segments[self.segment] = np.zeros(HEADER_BYTES + self._total, np.uint8)
        receivers[self.endpoint] = self

    def find(self, transfer: str) -> Slot | None:
        with self.lock:
            self._expire()
            if transfer in self._slots:
                return self._slots[transfer].slot
            return self._notes[transfer][0] if transfer in self._notes else None

    def wait(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        with self.lock:
            while True:
                self._expire()
                left = until - time.monotonic()
                has_news = self._settled != self._seen or bool(self._messages)
                if has_news or left <= 0 or self._closed:
                    break
                self.lock.wait(min(left, self._next_deadline_s()))
            news = has_news
            self._seen = self._settled
            return news

    def take(self, transfer: str) -> Slot | None:
        with self.lock:
            self._expire()
            record = self._slots.get(transfer)
            if record is None or record.slot.state != SlotState.ARRIVED:
                return None
            record.slot = replace(record.slot, state=SlotState.TAKEN)
            return record.slot

    def claim(
        self, name: str, num_blocks: int, block_bytes: int, num_ranks: int = 1
    ) -> Slot | None:
        with self.lock:
            self._expire()
            size = num_blocks * block_bytes
            place = self._place(size * num_ranks)
            if not name or name in self._slots or size * num_ranks <= 0 or place is None:
                return None
            slot = Slot(
                name, SlotState.TAKEN, place, num_blocks, size, num_ranks, next(_generations)
            )
            self._slots[name] = _Record(slot, 0.0)
            self._notes.pop(name, None)
            return slot

    def release(self, transfer: str) -> None:
        with self.lock:
            self._notes.pop(transfer, None)
            record = self._slots.get(transfer)
            if record is not None and record.slot.state == SlotState.TAKEN:
                del self._slots[transfer]

    def cancel(self, transfer: str) -> None:
        with self.lock:
            self._notes.pop(transfer, None)
            self._unwanted[transfer] = time.monotonic() + self._fill_s
            record = self._slots.get(transfer)
            if record is not None and record.slot.state != SlotState.TAKEN:
                self._counts["cancelled"] += 1
                self.end(transfer, Status.REFUSED, "")

    def abandon(self, prefix: str, kept: list[str], reason: str) -> None:
        with self.lock:
            for name, record in list(self._slots.items()):
                is_meant = name.startswith(prefix) and name not in kept
                if is_meant and record.slot.state != SlotState.TAKEN:
                    self._counts["cancelled"] += 1
                    self.end(name, Status.CANCELLED, reason)

    def receive(self, timeout_s: float) -> bytes | None:
        with self.lock:
            self.lock.wait_for(lambda: self._messages or self._closed, timeout_s)
            return self._messages.popleft() if self._messages else None

    def stats(self) -> SimpleNamespace:
        with self.lock:
            self._expire()
            return SimpleNamespace(
                arena_total_bytes=self._total,
                arena_used_bytes=sum(r.num_bytes for r in self._slots.values()),
                quarantined_bytes=0,
                slots=len(self._slots),
                filling=self._num_slots(SlotState.FILLING),
                unclaimed=self._num_slots(SlotState.ARRIVED),
                quarantined=0,
                connections=0,
                threads=0,
                bad_frames=0,
                bytes_received=self._received,
                **self._counts,
            )

    def _num_slots(self, state: SlotState) -> int:
        return sum(record.slot.state == state for record in self._slots.values())

    def close(self) -> None:
        with self.lock:
            if self._closed:
                return
            self._closed = True
            for transfer in list(self._slots):
                self.end(transfer, Status.PEER_LOST, "the receiver was closed")
            receivers.pop(self.endpoint, None)
            segments.pop(self.segment, None)
            self.lock.notify_all()

    def greet(self, identity: dict[str, str], key: bytes) -> tuple[Status, str]:
        """Whether a sender may come in, or why not; `lock` is held."""
        if key != self.key:
            self._counts["refused_strangers"] += 1
            return Status.REFUSED, "the two ends do not hold the same secret"
        difference = self._difference(identity)
        if difference:
            return Status.REFUSED, f"KV identity differs: {difference}"
        return Status.OK, ""

    def _difference(self, identity: dict[str, str]) -> str:
        """What differs from the sender's view, like "key: here 1, there 2"."""
        keys = sorted(identity.keys() | self.identity.keys())
        text = "; ".join(
            f"{key}: here {identity.get(key, 'absent')}, there {self.identity.get(key, 'absent')}"
            for key in keys
            if identity.get(key) != self.identity.get(key)
        )
        self._counts["refused_identity"] += bool(text)
        return text

    def admit(self, transfer: Transfer, rank: int, num_ranks: int) -> tuple[Status, str]:
        """Give a rank its part of a slot; `lock` is held."""
        self._expire()
        name, size = transfer.name, transfer.num_blocks * transfer.block_bytes
        if size * num_ranks > self._total:
            text = f"{size * num_ranks} bytes can never fit an arena of {self._total} bytes"
            return Status.REFUSED, f"transfer {name}: {text}; raise arena_bytes there"
        if self._unwanted.get(name, 0.0) > time.monotonic():
            return Status.REFUSED, f"transfer {name}: the receiver cancelled it before"
        record = self._slots.get(name)
        if record is None:
            place = self._place(size * num_ranks)
            if place is None:
                self._counts["refused_full"] += 1
                return Status.FULL, f"the receive arena has no room for {size * num_ranks} bytes"
            slot = Slot(
                name, SlotState.FILLING, place, transfer.num_blocks, size, num_ranks,
                next(_generations),
            )  # fmt: skip
            record = self._slots[name] = _Record(slot, time.monotonic() + self._fill_s)
            self._notes.pop(name, None)
        elif rank in record.writers or record.slot.rank_bytes != size:
            return Status.REFUSED, f"transfer {name}: rank {rank} of it is open already"
        record.writers[rank] = transfer
        return Status.OK, ""

    def part(self, transfer: Transfer, rank: int) -> NDArray[np.uint8] | None:
        """The bytes that this writer may touch now; `lock` is held."""
        self._expire()
        record = self._slots.get(transfer.name)
        if record is None or record.writers.get(rank) is not transfer:
            return None
        record.deadline = time.monotonic() + self._fill_s
        start = record.slot.offset + rank * record.slot.rank_bytes
        return segments[self.segment][start : start + record.slot.rank_bytes]

    def finished(self, transfer: Transfer, rank: int) -> None:
        """All bytes of a rank are here; `lock` is held."""
        record = self._slots[transfer.name]
        record.finished.add(rank)
        self._received += transfer.bytes_sent
        if len(record.finished) == record.slot.num_ranks:
            record.slot = replace(record.slot, state=SlotState.ARRIVED)
            record.deadline = time.monotonic() + self._hold_s
            self._counts["arrived"] += 1
            self._settled += 1
            self.lock.notify_all()

    def end(self, name: str, status: Status, error: str) -> None:
        """Free a slot and tell its writers; `lock` is held."""
        record = self._slots.pop(name)
        if error:
            note = replace(record.slot, state=SlotState.FAILED, error=error)
            self._notes[name] = (note, time.monotonic() + self._hold_s)
            self._settled += 1
        for rank, writer in record.writers.items():
            if rank not in record.finished:
                writer.settle(TransferState.FAILED, status, error or "the receiver cancelled it")
        self.lock.notify_all()

    def cancelled_by_sender(self, transfer: Transfer, rank: int, reason: str) -> None:
        """A writer gave up; `lock` is held."""
        record = self._slots.get(transfer.name)
        if record is not None and record.writers.get(rank) is transfer:
            self._counts["cancelled"] += 1
            self.end(transfer.name, Status.CANCELLED, f"the sender cancelled it: {reason}")

    def deliver(self, message: bytes) -> Status:
        with self.lock:
            if len(self._messages) >= MAX_MESSAGES:
                return Status.FULL
            self._messages.append(message)
            self.lock.notify_all()
            return Status.OK

    def _place(self, size: int) -> int | None:
        start = HEADER_BYTES
        for record in sorted(self._slots.values(), key=lambda r: r.slot.offset):
            if record.slot.offset - start >= size:
                break
            start = record.slot.offset + record.num_bytes
        return start if start + size <= HEADER_BYTES + self._total else None

    def _next_deadline_s(self) -> float:
        now = time.monotonic()
        waiting = [r.deadline for r in self._slots.values() if r.slot.state != SlotState.TAKEN]
        return max(0.0, min(waiting, default=now + 3600.0) - now)

    def _expire(self) -> None:
        now = time.monotonic()
        for name, record in list(self._slots.items()):
            if record.slot.state == SlotState.TAKEN or record.deadline > now:
                continue
            filling = record.slot.state == SlotState.FILLING
            self._counts["expired"] += 1
            text = f"no progress for {self._fill_s:g} s"
            held = f"arrived but not taken for {self._hold_s:g} s"
            self.end(name, Status.TIMEOUT, text if filling else held)
        self._notes = {k: v for k, v in self._notes.items() if v[1] > now}
        self._unwanted = {k: v for k, v in self._unwanted.items() if v > now}
