"""Wires that move a device's KV by its own copies: into the receiver's arena (`dma`, `ipc`), or
into registered buffers from which the C++ core sends (`tcp`).
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_tetri.errors import TransferError
from vllm_tetri.transport.blocks import PIECE_BYTES, BlockMover
from vllm_tetri.transport.device import (
    Copies,
    CudaDevice,
    DeviceEvent,
    has_passed,
    places_of,
    read_offer,
    span_of,
)
from vllm_tetri.transport.native import Arena, Layout, Order
from vllm_tetri.transport.nccl import NcclWire
from vllm_tetri.transport.nixl import NixlWire
from vllm_tetri.transport.push import Wire

MAX_ORDERS = 16  # queued on the device at once: what is behind them can still be cancelled
NUM_BUFFERS = 8


class _Segment:
    """A receiver's arena in host memory, mapped and registered."""

    def __init__(self, device: CudaDevice, offer: bytes) -> None:
        self._device, self.segment = device, offer.decode()
        try:
            self._arena = Arena(self.segment)
        except (RuntimeError, ValueError, OSError) as error:
            raise TransferError(
                f"cannot map the receiver's arena {self.segment}: {error}"
            ) from error
        self.address, self.num_bytes = self._arena.address, self._arena.num_bytes
        try:
            device.register(self.address, self.num_bytes)
        except RuntimeError as error:
            self._arena.close()
            raise TransferError(
                f"the device cannot reach the receiver's arena {self.segment}: {error}. Allow "
                "locked memory (ulimit -l unlimited), or set --tetri-link tcp"
            ) from error

    def close(self) -> None:
        self._device.unregister(self.address)
        self._arena.close()


class _Opened:
    """A receiver's arena in a device's memory, mapped by its handle."""

    def __init__(self, device: CudaDevice, offer: bytes) -> None:
        self._device = device
        self.segment, self.num_bytes, handle = read_offer(offer)
        try:
            self.address = device.open_shared(handle, self.num_bytes)
        except (RuntimeError, ValueError, OverflowError) as error:
            raise TransferError(
                f"the device cannot reach the receiver's memory: {error}. Both GPUs need peer "
                "access (nvidia-smi topo -p2p r); or set --tetri-link auto on both"
            ) from error

    def close(self) -> None:
        self._device.close_shared(self.address)


class DmaWire:
    """Copies into receivers' arenas in host memory (`dma`) or in a device's (`ipc`), which are made
    reachable once per receiver."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self.stream = device, device.make_stream()
        self._arenas: dict[bytes, _Segment | _Opened] = {}  # by offer
        self._under_way: deque[tuple[bytes, DeviceEvent]] = deque()  # of one stream: first first

    def has_room(self, order: Order) -> bool:
        while self._under_way and has_passed(self._under_way[0][1]):
            self._under_way.popleft()
        return len(self._under_way) < MAX_ORDERS

    def submit(self, order: Order, after: DeviceEvent | None) -> DeviceEvent:
        offer, layout = order.offer, order.layout
        arena = self._arenas.get(offer) or self._open(order.kind, offer)
        span_of(order, arena.num_bytes)
        pages, places, sizes = places_of(layout, order.block_ids, arena.address + order.offset)
        event = self._device.copy(self.stream, Copies(pages, places, sizes), after)
        self._under_way.append((offer, event))
        return event

    def _open(self, kind: str, offer: bytes) -> _Segment | _Opened:
        in_use = {each for each, _ in self._under_way}
        for old, arena in list(self._arenas.items()):
            if old not in in_use and not Path(arena.segment).exists():
                self._arenas.pop(old).close()
        self._arenas[offer] = (_Opened if kind == "ipc" else _Segment)(self._device, offer)
        return self._arenas[offer]

    def close(self) -> None:
        """Let go of all arenas. No order may be under way. Idempotent."""
        while self._arenas:
            self._arenas.popitem()[1].close()


@dataclass(slots=True)
class _Staged:
    """An order in a buffer, which is free again when the core has sent it."""

    order: Order
    event: DeviceEvent
    layout: Layout
    is_staged: bool = False

    def query(self) -> bool:
        if not self.is_staged:
            if not self.event.query():
                return False
            self.order.staged(self.layout)
            self.is_staged = True
        return self.order.is_done()


@dataclass(slots=True)
class _Buffer:
    memory: mmap.mmap
    address: int
    user: _Staged | None = field(default=None)

    @property
    def is_free(self) -> bool:
        """Whether neither the device nor the core uses it."""
        if self.user is None:
            return True
        return self.user.order.is_done() and has_passed(self.user.event)


class StagedWire:
    """Copies into a ring of registered buffers of host memory, each of one order."""

    def __init__(self, device: CudaDevice, buffer_bytes: int) -> None:
        self._device, self.stream = device, device.make_stream()
        self._buffer_bytes = buffer_bytes
        self.buffers: list[_Buffer] = []  # made when first needed

    def has_room(self, order: Order) -> bool:
        """Whether the order's receiver uses fewer buffers than are free: what a slow one holds up
        leaves some to the others (dynamic thresholds, as of the buffers of a switch)."""
        used = [each.user.order for each in self.buffers if each.user and not each.is_free]
        num_here = sum(each.endpoint == order.endpoint for each in used)
        return num_here < NUM_BUFFERS - len(used)

    def submit(self, order: Order, after: DeviceEvent | None) -> _Staged:
        layout, num_blocks = order.layout, len(order.block_ids)
        if num_blocks * layout.block_bytes > self._buffer_bytes:
            raise ValueError(f"{num_blocks} blocks do not fit into a staging buffer")
        buffer = next((each for each in self.buffers if each.is_free), None) or self._make()
        pages, places, sizes = places_of(layout, order.block_ids, buffer.address)
        event = self._device.copy(self.stream, Copies(pages, places, sizes), after)
        buffer.user = _Staged(order, event, _dense(layout, num_blocks, buffer))
        return buffer.user

    def _make(self) -> _Buffer:
        memory = mmap.mmap(-1, self._buffer_bytes)
        address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        self._device.register(address, self._buffer_bytes)
        self.buffers.append(_Buffer(memory, address))
        return self.buffers[-1]

    def close(self) -> None:
        """Let go of all buffers. No order may be under way."""
        for buffer in self.buffers:
            self._device.unregister(buffer.address)
        self.buffers.clear()


def _dense(layout: Layout, num_blocks: int, owner: Any) -> Layout:
    """Describe rows of host memory that have the bytes of `layout` where its slot has them."""
    starts, strides = layout.starts, np.full(len(layout.starts), layout.block_bytes, np.uint64)
    bases = np.uint64(owner.address) + starts
    return Layout(bases, strides, layout.page_bytes, num_blocks, owner, starts, layout.block_bytes)


def make_wires(
    mover: BlockMover, links: list[str], timeout_s: float, load_nccl: Callable[[], Any]
) -> dict[str, Wire]:
    """Make what moves KV that the C++ core cannot move, by the kind of link."""
    device, wires = mover.device, dict[str, Wire]()
    if "nixl" in links:
        wires["nixl"] = NixlWire(timeout_s, 0 if device is None else device.index)
    if device is not None:
        buffer_bytes = max(PIECE_BYTES, mover.layout.block_bytes)
        copies = DmaWire(device)
        wires |= {"dma": copies, "ipc": copies, "tcp": StagedWire(device, buffer_bytes)}
        if "nccl" in links:  # it says what was late before the core does
            wires["nccl"] = NcclWire(device, load_nccl(), timeout_s / 2, buffer_bytes)
    return wires
