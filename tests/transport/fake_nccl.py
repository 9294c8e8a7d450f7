"""NCCL for the fake device: communicators of two ranks whose kernels are work on fake streams.

A kernel runs until its peer's has come, or its own communicator is aborted; a receive comes later
than its send is over, and writes poison all that time, and some time after an abort.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.transport.fake_device import POISON, streams

LATE_S = 0.05  # from an abort to the end of its kernels
_numbers = itertools.count(1)
_meetings: dict[bytes, _Meeting] = {}


@dataclass
class _Meeting:
    """What two ranks have in common: sends and receives that have come, by number."""

    both: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))
    sent: dict[int, bytes] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)


@dataclass
class _Communicator:
    meeting: _Meeting
    rank: int
    is_aborted: bool = False
    count: int = 0  # of calls

    def until(self, check: Callable[[], Any], also: Callable[[], None]) -> bool:
        """Run as a kernel; False if the communicator was aborted."""
        while not check():
            also()
            if self.is_aborted:
                return False
            time.sleep(0.0002)
        return True


class FakeNccl:
    """As much of vLLM's `NCCLLibrary` as the link uses. `hangs`: what never returns."""

    def __init__(self, version: int = 22703) -> None:
        self.version, self.hangs = version, ""
        self.num_made = self.num_aborted = 0
        self.num_receives = 0  # that write, without those of first bytes
        self.calls: list[tuple[str, int]] = []  # and their bytes

    def ncclGetRawVersion(self) -> int:
        return self.version

    def ncclGetUniqueId(self) -> Any:
        unique = next(_numbers).to_bytes(128, "little")
        _meetings[unique] = _Meeting()
        return SimpleNamespace(internal=(ctypes.c_byte * 128).from_buffer_copy(unique))

    def unique_id_from_bytes(self, data: bytes) -> bytes:
        assert len(data) == 128
        return data

    def ncclCommInitRank(self, size: int, unique: bytes, rank: int) -> _Communicator:
        assert size == 2
        self._hang("init")
        if unique not in _meetings:
            raise RuntimeError("NCCL error: unhandled system error")
        _meetings[unique].both.wait(20.0)
        self.num_made += 1
        return _Communicator(_meetings[unique], rank)

    def ncclSend(
        self, address: int, size: int, kind: int, peer: int, made: _Communicator, stream: int
    ) -> None:
        def work() -> None:
            owner.device.require(address, size)
            made.meeting.sent[number] = ctypes.string_at(address, size)
            made.until(lambda: number in made.meeting.begun, lambda: None)

        owner, number = self._begin("send", size, kind, peer, made, stream)
        owner.submit(work)

    def ncclRecv(
        self, address: int, size: int, kind: int, peer: int, made: _Communicator, stream: int
    ) -> None:
        def poison() -> None:
            owner.device.require(address, size)
            ctypes.memset(address, POISON, size)

        def work() -> None:
            self.num_receives += size > 1
            poison()
            made.meeting.begun.add(number)
            if made.until(lambda: number in made.meeting.sent, poison):
                data = made.meeting.sent.pop(number)
                assert len(data) == size
                time.sleep(0.001)
                ctypes.memmove(address, data, size)
            else:
                end = time.monotonic() + LATE_S
                while time.monotonic() < end:
                    poison()
            self.num_receives -= size > 1

        owner, number = self._begin("recv", size, kind, peer, made, stream)
        owner.submit(work)

    def ncclCommAbort(self, made: _Communicator) -> None:
        assert not made.is_aborted
        self._hang("abort")
        self.num_aborted += 1
        made.is_aborted = True

    def _begin(
        self, name: str, size: int, kind: int, peer: int, made: _Communicator, stream: int
    ) -> tuple[Any, int]:
        assert (kind, peer, made.is_aborted) == (1, 1 - made.rank, False)
        self._hang(name)
        self.calls.append((name, size))
        made.count += 1
        return streams[stream], made.count

    def _hang(self, name: str) -> None:
        while self.hangs == name:
            time.sleep(0.001)
