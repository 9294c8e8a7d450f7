"""Paged KV tensors as blocks of bytes. Needs torch and the native core, never vllm.

A `BlockMover` stands between vLLM's KV tensors and a transfer. The native core reads host memory
straight from the paged blocks and scatters straight into them. Memory of a device is moved by the
device's own copies (`device`, `push`).

Tensors are opaque: dimension 0 is the block, all other dimensions are bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_tetri.transport.device import (
    Copies,
    CopyBatch,
    CudaDevice,
    DeviceArena,
    DeviceEvent,
    places_of,
)
from vllm_tetri.transport.native import Arena, Layout

BlockIds = NDArray[np.int32]
Words = NDArray[np.uint64]
Rows = NDArray[np.uint8]  # host memory, in rows as long as a block
PIECE_BYTES = 16 << 20  # of a device's memory, moved at once
PAGE_GROUPS = 16  # parts in which blocks leave layer by layer


def pieces(block_ids: BlockIds, block_bytes: int) -> Iterator[tuple[int, BlockIds]]:
    """Split into runs of about `PIECE_BYTES`, each with the position of its first block."""
    step = max(1, PIECE_BYTES // block_bytes)
    yield from ((at, block_ids[at : at + step]) for at in range(0, len(block_ids), step))


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Pieces of a part's block that a rank's block has: ``sizes[i]`` bytes at ``starts[i]`` of the
    part's ``block_bytes`` belong into page ``pages[i]`` at ``offsets[i]``."""

    pages: Words
    offsets: Words
    starts: Words
    sizes: Words
    block_bytes: int

    def layout(self, whole: Layout) -> Layout:
        """Describe to the native core where these pieces belong, by where the pages are. It keeps
        the layout of whole blocks alive, and so the tensors."""
        places = whole.bases[self.pages] + self.offsets
        at = places, whole.block_strides[self.pages], self.sizes, whole.num_blocks
        return Layout(*at, whole, self.starts, self.block_bytes, whole.is_device)


# Parts of a slot: where each starts in the arena, and what of its blocks is read (None: all).
Sources = Sequence[tuple[int, Cut | None]]


class LayerProgress:
    """What a forward pass has completed of blocks, page by page in their order. `pages` has the
    page of each layer, or of several; `num_given` of `num_pages` were given out."""

    def __init__(self, pages: dict[str, int], whole: Layout) -> None:
        self._pages, self._whole, self.num_pages = pages, whole, len(whole.starts)
        self._layers = np.bincount(list(pages.values()), minlength=self.num_pages)
        self.begin()

    def begin(self) -> None:
        """Begin a forward pass."""
        self._missing, self.num_given = self._layers.copy(), 0

    def record(self, layer: str | None) -> Layout | None:
        """Record that a layer is done (None: all); return complete pages, in about `PAGE_GROUPS`
        parts. Those of layers that vLLM does not tell of, and all after them, wait for the end."""
        if layer is None:
            self._missing[:] = 0
        elif layer in self._pages:
            self._missing[self._pages[layer]] -= 1
        first, end = self.num_given, int(np.flatnonzero(np.append(self._missing, 1))[0])
        if end <= first or (layer is not None and PAGE_GROUPS * (end - first) < self.num_pages):
            return None
        self.num_given = end
        return self._whole.part(first, end - first)


def distinct(tensors: Sequence[torch.Tensor], num_blocks: int) -> list[torch.Tensor]:
    """Leave out tensors whose blocks lie in those of another one: layers of several KV cache
    groups share memory, since a block belongs to one group at a time. ValueError if blocks of two
    tensors overlap in another way."""
    kept: list[tuple[int, int, int]] = []  # of the first block: its begin, its end, the stride
    found = []
    by_size = sorted(enumerate(tensors), key=lambda each: -block_pages(each[1], num_blocks)[1])
    for index, tensor in by_size:
        stride, size = block_pages(tensor, num_blocks)
        begin = tensor.data_ptr()
        near = [each for each in kept if each[0] < begin + size and begin < each[1]]
        if any(each[2] != stride or begin < each[0] or begin + size > each[1] for each in near):
            raise ValueError("KV blocks of two layers overlap in this cache layout")
        if not near:
            kept.append((begin, begin + size, stride))
            found.append(index)
    return [tensors[index] for index in sorted(found)]


def block_pages(tensor: torch.Tensor, num_blocks: int) -> tuple[int, int]:
    """Stride and size in bytes of one block of a layer's tensor."""
    rows, remainder = divmod(tensor.shape[0], num_blocks)
    if remainder or rows == 0:
        raise ValueError(f"{tensor.shape[0]} rows do not divide into {num_blocks} blocks")
    itemsize = tensor.element_size()
    row_bytes = tensor[0].numel() * itemsize
    row_stride = tensor.stride(0) * itemsize
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor[0])
    if not is_dense or (rows > 1 and row_stride != row_bytes):
        raise ValueError("a KV block is not one dense run of bytes in this cache layout")
    return row_stride * rows, row_bytes * rows


def _layout_of(
    tensors: Sequence[torch.Tensor], num_blocks: int, *, is_device: bool = False
) -> Layout:
    own = distinct(tensors, num_blocks)
    pages = [block_pages(tensor, num_blocks) for tensor in own]
    strides, sizes = np.asarray(pages, dtype=np.uint64).T.copy()
    bases = np.asarray([tensor.data_ptr() for tensor in own], dtype=np.uint64)
    return Layout(bases, strides, sizes, num_blocks, own, is_device=is_device)


class HostMover:
    """Blocks in host memory for sending, and where blocks that arrive go: nothing to stage.

    `tensors` has one per layer, which may share memory; dimension 0 counts blocks (or a multiple,
    where a kernel block is smaller), the rest is dense, else there is a ValueError. `layout` is of
    all blocks, and keeps the tensors alive.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], num_blocks: int) -> None:
        self.layout = _layout_of(tensors, num_blocks)
        self.device = None
        self._layouts: dict[Cut | None, Layout] = {None: self.layout}

    def scatter(
        self,
        arena: Arena | DeviceArena,
        sources: Sources,
        first_block: int,
        block_ids: BlockIds,
        after: DeviceEvent | None,
    ) -> None:
        """Fill blocks from parts of a slot; ValueError if it does not have them."""
        assert isinstance(arena, Arena)
        for offset, cut in sources:
            if cut is not None and cut not in self._layouts:
                self._layouts[cut] = cut.layout(self.layout)
            arena.load(offset, first_block, self._layouts[cut], block_ids)

    def adopt(self, memory: Rows) -> None:
        """Do nothing: the native core reaches all host memory."""

    def save_rows(self, memory: Rows, rows: BlockIds, block_ids: BlockIds) -> None:
        """Copy blocks to rows."""
        self.layout.copy_rows(block_ids, memory, rows, to_blocks=False)

    def load_rows(
        self, memory: Rows, rows: BlockIds, block_ids: BlockIds, after: DeviceEvent | None
    ) -> None:
        """Fill blocks from rows."""
        self.layout.copy_rows(block_ids, memory, rows, to_blocks=True)

    def progress(self, tensors: dict[str, torch.Tensor]) -> LayerProgress:
        """Return that of forward passes over these layers, whose tensors are this mover's."""
        begins, ends = self.layout.bases, self.layout.bases + self.layout.page_bytes
        at = {name: each.data_ptr() for name, each in tensors.items()}
        pages = {name: int(((begins <= ptr) & (ptr < ends)).argmax()) for name, ptr in at.items()}
        return LayerProgress(pages, self.layout)

    def close(self) -> None:
        """Do nothing: host memory needs no registration."""


class DeviceMover:
    """As `HostMover`, of a device's KV: blocks of a slot come by DMA from the registered arena,
    or from one in the device's own memory. What leaves is moved by orders (`push`). RuntimeError
    from any call: the device failed, or refused it."""

    def __init__(
        self, device: CudaDevice, tensors: Sequence[torch.Tensor], num_blocks: int
    ) -> None:
        self.layout = _layout_of(tensors, num_blocks, is_device=True)
        self.device = device
        self.stream = device.make_stream()
        self._registered = set[int]()  # addresses of mappings
        self._lock = threading.Lock()  # a copier thread loads, and `close` is the engine's

    def scatter(
        self,
        arena: Arena | DeviceArena,
        sources: Sources,
        first_block: int,
        block_ids: BlockIds,
        after: DeviceEvent | None,
    ) -> None:
        """Copy into blocks what a slot has for them, behind `after`, and wait until it is there."""
        if isinstance(arena, Arena):
            self._reach(arena.address, arena.num_bytes)
        events = []
        try:
            for offset, cut in sources:
                layout = self.layout if cut is None else cut.layout(self.layout)
                num_bytes = len(block_ids) * layout.block_bytes
                begin = offset + first_block * layout.block_bytes
                if begin + num_bytes > arena.num_bytes:
                    raise ValueError(f"bytes {begin} to {begin + num_bytes} are not in the arena")
                pages, places, sizes = places_of(layout, block_ids, arena.address + begin)
                events.append(self.device.copy(self.stream, Copies(places, pages, sizes), after))
        finally:  # also if a later part failed: the blocks may be given to others then
            for event in events:
                event.synchronize()

    def _reach(self, address: int, num_bytes: int) -> None:
        with self._lock:
            if address not in self._registered:
                self.device.register(address, num_bytes)
                self._registered.add(address)

    def settle(self) -> None:
        """Wait until no row is written any more."""
        with suppress(RuntimeError):  # the device failed
            self.device.mark().synchronize()

    def adopt(self, memory: Rows) -> None:
        """Make host memory reachable for the next two."""
        self._reach(memory.ctypes.data, memory.nbytes)

    def save_rows(self, memory: Rows, rows: BlockIds, block_ids: BlockIds) -> None:
        """Copy blocks to rows, behind all work that was submitted so far, before what follows."""
        pages, places, sizes = places_of(self.layout, block_ids, memory.ctypes.data, rows)
        self.device.copy(None, Copies(pages, places, sizes), None)

    def load_rows(
        self, memory: Rows, rows: BlockIds, block_ids: BlockIds, after: DeviceEvent | None
    ) -> None:
        pages, places, sizes = places_of(self.layout, block_ids, memory.ctypes.data, rows)
        self.device.copy(self.stream, Copies(places, pages, sizes), after).synchronize()

    def close(self) -> None:
        """Let go of host memory. No load may be under way."""
        self.settle()
        with self._lock:
            for address in self._registered:
                self.device.unregister(address)
            self._registered.clear()


BlockMover = HostMover | DeviceMover


def mover_for(
    tensors: Sequence[torch.Tensor], num_blocks: int, copy_batch: CopyBatch | None = None
) -> BlockMover:
    """Make the mover for the device of the KV tensors; raises ValueError where there is none."""
    devices = {tensor.device for tensor in tensors}
    kinds = {device.type for device in devices}
    if kinds == {"cpu"}:
        return HostMover(tensors, num_blocks)
    if kinds == {"cuda"} and len(devices) == 1:
        return DeviceMover(CudaDevice(devices.pop(), copy_batch), tensors, num_blocks)
    raise ValueError(f"KV tensors on {sorted(kinds)} cannot be moved; cpu and cuda can")
