"""A device for CPU hosts: streams are threads with random delays, its memory is the host's.

What is read or written in the wrong order shows: a copy fills its target with poison first, long
before the bytes come, and copies to or from memory that is neither the device's nor registered
fail. `faults` has what went wrong on a stream; tests expect it to be empty.
"""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from vllm_tetri.transport.device import Copies, DeviceEvent

POISON = 0xEE
streams: WeakValueDictionary[int, FakeStream] = WeakValueDictionary()  # of all, by handle
_handles = count(1)
_shared: dict[bytes, tuple[int, int]] = {}  # memory of all devices, by handle: address and size


class FakeEvent:
    """A point of a stream."""

    def __init__(self, device: FakeDevice) -> None:
        self._device, self._passed = device, threading.Event()

    def query(self) -> bool:
        self._device.check()
        return self._passed.is_set()

    def synchronize(self) -> None:
        while not self._passed.wait(0.001):
            self._device.check()
        self._device.check()

    def fire(self) -> None:
        self._passed.set()

    def wait_on_stream(self) -> None:
        self._passed.wait()


class FakeStream:
    """Work that is done in its order by a thread, not before the gate is open."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.gate = device, threading.Event()
        self.handle = next(_handles)
        streams[self.handle] = self
        self.gate.set()
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> FakeEvent:
        event = FakeEvent(self.device)
        self._work.put(work)
        self._work.put(event.fire)
        return event

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self.gate.wait()
            try:
                work()
            except RuntimeError as error:
                self.device.faults.append(str(error))

    def close(self) -> None:
        self.gate.set()
        self._work.put(None)
        self._thread.join(10.0)


class FakeDevice:
    """In place of a `CudaDevice`, with a compute stream. `close` it."""

    def __init__(self, seed: int = 0, delay_s: float = 0.0003) -> None:
        self._random, self._delay_s, self.index = random.Random(seed), delay_s, 0
        self.is_lost = False
        self.faults: list[str] = []
        self._owned: list[torch.Tensor] = []
        self.registered: dict[int, int] = {}  # sizes by address
        self.opened: dict[int, int] = {}  # of other devices, likewise
        self.streams: list[FakeStream] = []
        self.compute: FakeStream = self.make_stream()
        self.num_copies = 0  # calls

    def zeros(self, *shape: int) -> torch.Tensor:
        """Memory of the device."""
        self._owned.append(torch.zeros(shape, dtype=torch.uint8))
        return self._owned[-1]

    def own(self, *tensors: torch.Tensor) -> None:
        """Take memory for the device's."""
        self._owned.extend(tensors)

    def check(self) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: unspecified launch failure")

    def run(self, work: Callable[[], None]) -> None:
        """Queue work of a forward pass, which takes a while."""
        delay_s = self._delay()

        def late() -> None:
            time.sleep(delay_s)
            work()

        self.compute.submit(late)

    @contextmanager
    def held(self, *streams: FakeStream) -> Iterator[None]:
        """Let nothing happen on streams for a while."""
        for each in streams:
            each.gate.clear()
        try:
            yield
        finally:
            for each in streams:
                each.gate.set()

    def mark(self) -> DeviceEvent:
        self.check()
        return self.compute.submit(lambda: None)

    def make_stream(self) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def copy(self, stream: Any, copies: Copies, after: DeviceEvent | None) -> DeviceEvent:
        self.check()
        self.num_copies += 1
        runs = list(zip(*(each.tolist() for each in vars_of(copies)), strict=True))
        for source, target, size in runs:
            self.require(source, size)
            self.require(target, size)
        delay_s = self._delay()

        def work() -> None:
            if isinstance(after, FakeEvent):
                after.wait_on_stream()
            for _, target, size in runs:
                self.require(target, size)
                ctypes.memset(target, POISON, size)
            time.sleep(delay_s)
            for source, target, size in runs:
                self.require(source, size)
                self.require(target, size)
                ctypes.memmove(target, source, size)

        return (stream or self.compute).submit(work)

    def queue(self, stream: Any, work: Callable[[int], None]) -> DeviceEvent:
        self.check()
        work(stream.handle)
        return stream.submit(lambda: None)

    def reserve(self, num_bytes: int) -> int:
        self.check()
        return self.zeros(num_bytes).data_ptr()

    def register(self, address: int, num_bytes: int) -> None:
        self.check()
        if address in self.registered:
            raise RuntimeError("CUDA error: part or all of the memory is already mapped")
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def share(self, num_bytes: int) -> tuple[int, bytes]:
        self.check()
        address = self.zeros(num_bytes).data_ptr()
        handle = f"fake {address:x}".encode()
        _shared[handle] = address, num_bytes
        return address, handle

    def open_shared(self, handle: bytes, num_bytes: int) -> int:
        self.check()
        if handle not in _shared:
            raise RuntimeError("CUDA error: invalid resource handle")
        address, size = _shared[handle]
        self.opened[address] = size
        return address

    def close_shared(self, address: int) -> None:
        del self.opened[address]

    def free_bytes(self) -> int:
        return 1 << 20

    def synchronize(self) -> None:
        """Wait until all work is done."""
        for stream in self.streams:
            stream.submit(lambda: None).synchronize()

    def close(self) -> None:
        self.is_lost = False
        for each in self.streams:
            each.gate.set()
        for each in self.streams:
            each.close()

    def _delay(self) -> float:
        return self._random.uniform(0.0, self._delay_s)

    def require(self, address: int, size: int) -> None:
        storages = [each.untyped_storage() for each in self._owned]
        own = ((each.data_ptr(), each.nbytes()) for each in storages)
        others = *list(self.registered.items()), *list(self.opened.items())
        for begin, length in (*own, *others):
            if begin <= address and address + size <= begin + length:
                return
        raise RuntimeError("a copy of memory that is not registered")


def vars_of(copies: Copies) -> tuple[Any, ...]:
    return copies.sources, copies.targets, copies.sizes
