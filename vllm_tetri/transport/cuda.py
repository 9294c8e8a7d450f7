"""KV in device memory: staged through pinned host buffers on a side stream.

Gather: the side stream waits for an event of the compute stream, so it sees every block that
was complete at the call; it copies the blocks together and down to pinned memory. Scatter:
arena to pinned memory on the host, up to the device on the side stream; the compute stream
waits for the event of the last copy, so the next forward pass reads the blocks.

Threads: the worker's main thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_tetri.transport.blocks import (
    BlockIds,
    BlockMover,
    Cut,
    Gathered,
    HostMover,
    Sources,
    block_pages,
    distinct,
    pieces,
)
from vllm_tetri.transport.native import Arena, Layout


class CudaMover:
    """The `BlockMover` of CUDA tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor], num_blocks: int) -> None:
        own = distinct(tensors, num_blocks)
        self._pages = [_block_rows(tensor, num_blocks) for tensor in own]
        self._sizes = [page.shape[1] for page in self._pages]
        self._device = tensors[0].device
        self._stream = torch.cuda.Stream(device=self._device)

    @property
    def block_bytes(self) -> int:
        return sum(self._sizes)

    def gather(self, block_ids: BlockIds) -> Gathered:
        pinned = self._pinned(len(block_ids))
        ready = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            rows = self._rows(block_ids)
            staged = torch.cat([page.index_select(0, rows) for page in self._pages], dim=1)
            pinned.copy_(staged, non_blocking=True)
            done = self._stream.record_event()
        return Gathered(*staged_rows(pinned, self._sizes), is_ready=done.query)

    def scatter(
        self, arena: Arena, sources: Sources, first_block: int, block_ids: BlockIds
    ) -> None:
        for start, piece in pieces(block_ids, self.block_bytes):
            pinned = self._pinned(len(piece))
            for offset, cut in sources:
                arena.load(offset, first_block + start, *staged_rows(pinned, self._sizes, cut))
            with torch.cuda.stream(self._stream):
                rows = self._rows(piece)
                staged = pinned.to(self._device, non_blocking=True)
                for page, part in zip(self._pages, staged.split(self._sizes, dim=1), strict=True):
                    page.index_copy_(0, rows, part)
                done = self._stream.record_event()
            torch.cuda.current_stream(self._device).wait_event(done)

    def settle(self) -> None:
        self._stream.synchronize()

    def _pinned(self, num_blocks: int) -> torch.Tensor:
        # PyTorch's pinned allocator hands a buffer out again only when the
        # streams that used it have passed.
        return torch.empty((num_blocks, self.block_bytes), dtype=torch.uint8, pin_memory=True)

    def _rows(self, block_ids: BlockIds) -> torch.Tensor:
        host = torch.from_numpy(block_ids.astype(np.int64)).pin_memory()
        return host.to(self._device, non_blocking=True)


def staged_rows(
    buffer: torch.Tensor, page_bytes: Sequence[int], cut: Cut | None = None
) -> tuple[Layout, BlockIds]:
    """Describe a dense `[blocks, block_bytes]` host buffer, or pieces of it, and all its rows."""
    num_blocks, block_bytes = buffer.shape
    ids = np.arange(num_blocks, dtype=np.int32)
    base, size = (np.asarray([each], dtype=np.uint64) for each in (buffer.data_ptr(), block_bytes))
    if cut is None:
        return Layout(base, size, size, num_blocks, buffer), ids
    places = base + np.cumsum([0, *page_bytes[:-1]], dtype=np.uint64)
    return cut.layout(places, size.repeat(len(places)), num_blocks, buffer), ids


def _block_rows(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """View a layer as `[blocks, page bytes]` of uint8, sharing its memory."""
    stride, size = block_pages(tensor, num_blocks)
    span = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset = tensor.storage_offset() * tensor.element_size()
    return span.set_(tensor.untyped_storage(), offset, (num_blocks, size), (stride, 1))


def mover_for(tensors: Sequence[torch.Tensor], num_blocks: int) -> BlockMover:
    """Make the mover for the device of the KV tensors; raises ValueError where there is none."""
    devices = {tensor.device.type for tensor in tensors}
    if devices == {"cpu"}:
        return HostMover(tensors, num_blocks)
    if devices == {"cuda"}:
        return CudaMover(tensors, num_blocks)
    raise ValueError(f"KV tensors on {sorted(devices)} cannot be moved; cpu and cuda can")
