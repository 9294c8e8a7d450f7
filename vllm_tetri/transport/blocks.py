"""Paged KV tensors as blocks of bytes. Needs torch and the native core, never vllm.

A `BlockMover` stands between vLLM's KV tensors and a transfer. Host memory needs no staging:
the native core gathers straight from the paged blocks and scatters straight into them. Device
memory is staged through pinned host buffers on a stream of its own (`cuda`).

Tensors are opaque: dimension 0 is the block, all other dimensions are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_tetri.transport.native import Arena, Layout

BlockIds = NDArray[np.int32]
PIECE_BYTES = 64 << 20  # staged at once, where staging is needed


def pieces(block_ids: BlockIds, block_bytes: int) -> Iterator[tuple[int, BlockIds]]:
    """Split into runs of about `PIECE_BYTES`, each with the position of its first block."""
    step = max(1, PIECE_BYTES // block_bytes)
    yield from ((at, block_ids[at : at + step]) for at in range(0, len(block_ids), step))


@dataclass(slots=True)
class Gathered:
    """Rows `block_ids` of `layout`, to be sent once `is_ready()` is true. Keep it until the
    transfer is done: `layout` may own the memory."""

    layout: Layout
    block_ids: BlockIds
    is_ready: Callable[[], bool] = lambda: True


class BlockMover(Protocol):
    """Gathers blocks for sending and scatters blocks that arrived.

    `gather` sees blocks as they are after all work submitted so far. `scatter` fills blocks from a
    slot of an arena before any work submitted later; `settle` waits until every `scatter` of the
    calling thread has reached them.
    """

    @property
    def block_bytes(self) -> int: ...  # one block over all layers
    def gather(self, block_ids: BlockIds) -> Gathered: ...
    def scatter(self, arena: Arena, offset: int, first_block: int, block_ids: BlockIds) -> None: ...
    def settle(self) -> None: ...


def layout_of(tensors: Sequence[torch.Tensor], num_blocks: int) -> Layout:
    """Describe host tensors to the native core.

    `tensors` has one per layer; dimension 0 counts blocks (or a multiple, where a kernel block
    is smaller), the rest is dense, else there is a ValueError. The paged cache has `num_blocks`.
    """
    pages = [block_pages(tensor, num_blocks) for tensor in tensors]
    return Layout(
        np.asarray([tensor.data_ptr() for tensor in tensors], dtype=np.uint64),
        np.asarray([stride for stride, _ in pages], dtype=np.uint64),
        np.asarray([size for _, size in pages], dtype=np.uint64),
        num_blocks,
        list(tensors),
    )


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


class HostMover:
    """KV in host memory: nothing to stage."""

    def __init__(self, tensors: Sequence[torch.Tensor], num_blocks: int) -> None:
        self._layout = layout_of(tensors, num_blocks)

    @property
    def block_bytes(self) -> int:
        return self._layout.block_bytes

    def gather(self, block_ids: BlockIds) -> Gathered:
        return Gathered(self._layout, block_ids)

    def scatter(self, arena: Arena, offset: int, first_block: int, block_ids: BlockIds) -> None:
        arena.load(offset, first_block, self._layout, block_ids)

    def settle(self) -> None:
        """Do nothing: host copies are done when `scatter` returns."""
