"""Both sides of links that carry KV of devices: over fake devices and the real C++ core."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.eventually import eventually
from tests.transport.conftest import Backend
from tests.transport.fake_device import FakeDevice
from tests.transport.fake_nccl import FakeNccl
from vllm_tetri.transport.blocks import DeviceMover
from vllm_tetri.transport.device import DeviceArena
from vllm_tetri.transport.native import Arena, Status
from vllm_tetri.transport.nccl import NcclReceiver, NcclWire
from vllm_tetri.transport.push import Push
from vllm_tetri.transport.wires import DmaWire, StagedWire

BLOCKS, PAGE = 16, 256
ARENA = 1 << 16
BUFFER = 4 * 2 * PAGE  # bytes of four blocks
STILL_S = 0.05  # what a missing wait would need to show


@dataclass
class Side:
    """An instance's KV on a device, what sends it and what receives."""

    core: Backend
    device: FakeDevice
    link: str
    options: dict[str, Any] = field(default_factory=dict)
    library: FakeNccl = field(default_factory=FakeNccl)
    end: NcclReceiver | None = None

    def __post_init__(self) -> None:
        self.pages = [self.device.zeros(BLOCKS, PAGE) for _ in range(2)]
        self.mover = DeviceMover(self.device, self.pages, BLOCKS)
        timeout_s = self.options.get("io_timeout_s", 5.0)
        options = {"links": [self.link]} | self.options
        self.sender = self.core.sender(**options)
        self.wire: Any = DmaWire(self.device)
        if self.link == "tcp":
            self.wire = StagedWire(self.device, BUFFER)
        if self.link == "nccl":
            self.wire = NcclWire(self.device, self.library, timeout_s / 2, BUFFER)
        wires = dict.fromkeys(options["links"], self.wire)
        self.push = Push(self.sender, wires, timeout_s)
        self.arena: Any
        if self.link in ("ipc", "nccl"):
            self.arena = device_arena(self.device)
            if self.link == "nccl":
                memory = self.arena.address, ARENA
                self.end = NcclReceiver(
                    self.device, self.library, memory, "127.0.0.1", timeout_s / 2
                )
                self.arena = DeviceArena(*memory, self.end.handle, "nccl")
            self.receiver = self.core.receiver(arena_bytes=ARENA, has_host_memory=False)
            self.receiver.offer(self.link, self.arena.offer(self.receiver.segment))
        else:
            self.receiver = self.core.receiver()
            self.arena = Arena(self.receiver.segment)

    def compute(self, ids: list[int], value: int) -> None:
        """A forward pass that writes blocks."""

        def work() -> None:
            for page in self.pages:
                page[ids] = value

        self.device.run(work)

    def write(self, transfer: Any, first: int, ids: list[int]) -> Any:
        tag = self.push.mark(self.mover.device.mark())  # type: ignore[union-attr]
        return transfer.write(self.mover.layout, first, np.asarray(ids, np.int32), tag)

    def send(self, other: Side, name: str, ids: list[int]) -> Any:
        transfer = self.open(other, name, len(ids))
        assert self.write(transfer, 0, ids) in (Status.OK, Status.PENDING)
        transfer.finish()
        return transfer

    def open(self, other: Side, name: str, num_blocks: int) -> Any:
        num_bytes = self.mover.layout.block_bytes
        return self.sender.open(other.receiver.endpoint, name, num_blocks, num_bytes)

    def load(self, name: str, ids: list[int], after: Any = None) -> None:
        slot = eventually(lambda: self.receiver.take(name))
        sources = [(slot.offset, None)]
        self.mover.scatter(self.arena, sources, 0, np.asarray(ids, np.int32), after)
        self.receiver.release(name)

    def holds(self, ids: list[int], value: int) -> bool:
        return all(bool((page[ids] == value).all()) for page in self.pages)

    def close(self) -> None:
        self.device.is_lost = False
        for stream in self.device.streams:
            stream.gate.set()
        self.device.synchronize()
        self.push.stop()
        self.sender.close()
        self.push.close()
        if self.end is not None:
            self.end.close()
        self.mover.close()
        if isinstance(self.arena, Arena):
            self.arena.close()


@dataclass
class Two:
    """A sender's and a receiver's side, on devices of their own."""

    link: str
    core: Backend
    made: list[Side] = field(default_factory=list)

    def side(self, seed: int, **options: Any) -> Side:
        self.made.append(Side(self.core, FakeDevice(seed), self.link, options))
        return self.made[-1]


def device_arena(device: FakeDevice) -> DeviceArena:
    address, handle = device.share(ARENA)
    return DeviceArena(address, ARENA, handle)


def make_two(link: str, core: Backend) -> Iterator[Two]:
    two, before = Two(link, core), set(threading.enumerate())
    yield two
    for side in two.made:
        side.library.hangs = ""
    for side in two.made:
        side.close()
        assert side.library.num_made == side.library.num_aborted
    for side in two.made:
        side.device.close()
        assert side.device.faults == []
        assert side.device.registered == {}
        assert side.device.opened == {}
    left = set(threading.enumerate()) - before
    eventually(lambda: not any(each.is_alive() for each in left), what=f"{left} end")


def still(check: Any) -> bool:
    """Whether something stays so for a moment."""
    end = time.monotonic() + STILL_S
    while time.monotonic() < end:
        if not check():
            return False
        time.sleep(0.002)
    return True
