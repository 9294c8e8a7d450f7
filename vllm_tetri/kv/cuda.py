"""KV in device memory: staged through pinned host buffers on a side stream.

Gather: the side stream waits for an event that the compute stream recorded, so
it sees every block that was complete when `gather` was called; a helper stream
copies the blocks together and down to pinned memory. Scatter: arena to pinned
memory on the host, up to the device on the side stream; the compute stream
waits for the event of the last copy, so the next forward pass reads the blocks.
Save: as gather, but the compute stream waits until the blocks were copied together.

Threads: the worker's main thread only. Buffers are owned here and reused when
the event of their last use has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from vllm_tetri.kv.mover import BlockIds, Gathered, block_pages, pieces
from vllm_tetri.transport.native import Arena, Layout


class CudaMover:
    """Block mover for CUDA tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor], num_blocks: int) -> None:
        self._pages = [_block_rows(tensor, num_blocks) for tensor in tensors]
        self._sizes = [page.shape[1] for page in self._pages]
        self._device = tensors[0].device
        self._stream = torch.cuda.Stream(device=self._device)

    @property
    def block_bytes(self) -> int:
        return sum(self._sizes)

    def gather(self, block_ids: BlockIds) -> Gathered:
        pinned, _, done = self._stage(block_ids)
        order = np.arange(len(block_ids), dtype=np.int32)
        return Gathered(staging_layout(pinned), order, is_ready=done.query)

    def scatter(self, arena: Arena, offset: int, first_block: int, block_ids: BlockIds) -> None:
        for start, piece in pieces(block_ids, self.block_bytes):
            self._scatter_piece(arena, offset, first_block + start, piece)

    def _scatter_piece(
        self, arena: Arena, offset: int, first_block: int, block_ids: BlockIds
    ) -> None:
        pinned = self._pinned(len(block_ids))
        order = np.arange(len(block_ids), dtype=np.int32)
        arena.load(offset, first_block, staging_layout(pinned), order)
        with torch.cuda.stream(self._stream):
            rows = self._rows(block_ids)
            staged = pinned.to(self._device, non_blocking=True)
            for page, part in zip(self._pages, staged.split(self._sizes, dim=1), strict=True):
                page.index_copy_(0, rows, part)
            done = self._stream.record_event()
        torch.cuda.current_stream(self._device).wait_event(done)

    def save(self, arena: Arena, offset: int, block_ids: BlockIds) -> Callable[[], None]:
        pinned, is_read, done = self._stage(block_ids)
        torch.cuda.current_stream(self._device).wait_event(is_read)

        def rest() -> None:
            done.synchronize()
            order = np.arange(len(block_ids), dtype=np.int32)
            arena.save(offset, 0, staging_layout(pinned), order)

        return rest

    def _stage(
        self, block_ids: BlockIds
    ) -> tuple[torch.Tensor, torch.cuda.Event, torch.cuda.Event]:
        """Blocks on their way to a pinned buffer; when they were read, when they are there."""
        pinned = self._pinned(len(block_ids))
        ready = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            rows = self._rows(block_ids)
            staged = torch.cat([page.index_select(0, rows) for page in self._pages], dim=1)
            is_read = self._stream.record_event()
            pinned.copy_(staged, non_blocking=True)
            return pinned, is_read, self._stream.record_event()

    def settle(self) -> None:
        self._stream.synchronize()

    def _pinned(self, num_blocks: int) -> torch.Tensor:
        # PyTorch's pinned allocator hands a buffer out again only when the
        # streams that used it have passed.
        return torch.empty((num_blocks, self.block_bytes), dtype=torch.uint8, pin_memory=True)

    def _rows(self, block_ids: BlockIds) -> torch.Tensor:
        host = torch.from_numpy(block_ids.astype(np.int64)).pin_memory()
        return host.to(self._device, non_blocking=True)


def staging_layout(buffer: torch.Tensor) -> Layout:
    """A dense `[blocks, block_bytes]` host buffer in wire order."""
    num_blocks, block_bytes = buffer.shape
    return Layout(
        np.asarray([buffer.data_ptr()], dtype=np.uint64),
        np.asarray([block_bytes], dtype=np.uint64),
        np.asarray([block_bytes], dtype=np.uint64),
        num_blocks,
        buffer,
    )


def _block_rows(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A layer as `[blocks, page bytes]` of uint8, sharing its memory."""
    stride, size = block_pages(tensor, num_blocks)
    span = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset = tensor.storage_offset() * tensor.element_size()
    return span.set_(tensor.untyped_storage(), offset, (num_blocks, size), (stride, 1))
