"""Paged KV tensors as blocks of bytes.

A `BlockMover` is what stands between vLLM's KV tensors and a transfer. Host
memory needs no staging: the native core gathers straight from the paged blocks
and scatters straight into them. Device memory is staged through pinned host
buffers on a stream of its own, so the compute stream never waits for a copy
out, and waits for a copy in only by an event.

Tensors are opaque: dimension 0 is the block, everything behind it is bytes.
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
    """Runs of blocks of about `PIECE_BYTES`, each with the position of its first."""
    step = max(1, PIECE_BYTES // block_bytes)
    for start in range(0, len(block_ids), step):
        yield start, block_ids[start : start + step]


def _always() -> bool:
    return True


@dataclass(slots=True)
class Gathered:
    """Rows `block_ids` of `layout`, to be sent once `is_ready` says so.

    The holder keeps it until the transfer is done: `layout` may own the memory.
    """

    layout: Layout
    block_ids: BlockIds
    is_ready: Callable[[], bool] = _always


class BlockMover(Protocol):
    """Gathers blocks for sending and scatters blocks that arrived."""

    @property
    def block_bytes(self) -> int:
        """One block over all layers, in bytes."""

    def gather(self, block_ids: BlockIds) -> Gathered:
        """Blocks as they are after all work submitted so far."""

    def scatter(self, arena: Arena, offset: int, first_block: int, block_ids: BlockIds) -> None:
        """Fill blocks from an arena slot before any work submitted later."""

    def save(self, arena: Arena, offset: int, block_ids: BlockIds) -> Callable[[], None] | None:
        """Copy blocks, as they are after all work submitted so far, to the start of an
        arena slot; work submitted later may write them.

        Returns:
            The rest of it, for any thread; None when nothing is left to do.
        """

    def settle(self) -> None:
        """Wait until every `scatter` of the calling thread has reached the blocks."""


def layout_of(tensors: Sequence[torch.Tensor], num_blocks: int) -> Layout:
    """Describe host tensors to the native core.

    Args:
        tensors: One per layer; dimension 0 counts blocks (or a multiple of
            them, where a kernel block is smaller), the rest is dense.
        num_blocks: Blocks of the paged cache.

    Raises:
        ValueError: A tensor's block is not one dense run of bytes.
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
    """(stride, size) in bytes of one block of a layer's tensor."""
    rows, remainder = divmod(tensor.shape[0], num_blocks)
    if remainder or rows == 0:
        raise ValueError(f"{tensor.shape[0]} rows do not divide into {num_blocks} blocks")
    itemsize = tensor.element_size()
    row_bytes = tensor[0].numel() * itemsize
    row_stride = tensor.stride(0) * itemsize
    if not _is_dense(tensor[0]) or (rows > 1 and row_stride != row_bytes):
        raise ValueError("a KV block is not one dense run of bytes in this cache layout")
    return row_stride * rows, row_bytes * rows


def _is_dense(page: torch.Tensor) -> bool:
    """Whether the page covers its span without holes, in any order of dimensions."""
    dims = sorted((d for d in range(page.dim()) if page.shape[d] > 1), key=page.stride)
    expected = 1
    for dim in dims:
        if page.stride(dim) != expected:
            return False
        expected *= page.shape[dim]
    return True


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

    def save(self, arena: Arena, offset: int, block_ids: BlockIds) -> None:
        arena.save(offset, 0, self._layout, block_ids)

    def settle(self) -> None:
        """Host copies are done when `scatter` returns."""


def mover_for(tensors: Sequence[torch.Tensor], num_blocks: int) -> BlockMover:
    """The mover that fits the device of the KV tensors.

    Raises:
        ValueError: The tensors lie on different devices, or on one that has no
            mover.
    """
    devices = {tensor.device.type for tensor in tensors}
    if devices == {"cpu"}:
        return HostMover(tensors, num_blocks)
    if devices == {"cuda"}:
        from vllm_tetri.kv.cuda import CudaMover

        return CudaMover(tensors, num_blocks)
    raise ValueError(f"KV tensors on {sorted(devices)} cannot be moved; cpu and cuda can")
