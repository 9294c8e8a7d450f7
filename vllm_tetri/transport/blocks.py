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
Words = NDArray[np.uint64]
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


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Pieces of a part's block that a rank's block has: ``sizes[i]`` bytes at ``starts[i]`` of the
    part's ``block_bytes`` belong into page ``pages[i]`` at ``offsets[i]``."""

    pages: Words
    offsets: Words
    starts: Words
    sizes: Words
    block_bytes: int

    def layout(self, bases: Words, strides: Words, num_blocks: int, owner: object) -> Layout:
        """Describe to the native core where these pieces belong, by where the pages are."""
        places, steps = bases[self.pages] + self.offsets, strides[self.pages]
        return Layout(places, steps, self.sizes, num_blocks, owner, self.starts, self.block_bytes)


# Parts of a slot: where each starts in the arena, and what of its blocks is read (None: all).
Sources = Sequence[tuple[int, Cut | None]]


class BlockMover(Protocol):
    """Gathers blocks for sending and scatters blocks that arrived.

    `gather` sees blocks as they are after all work submitted so far. `scatter` fills blocks from
    parts of a slot before any work submitted later; `settle` waits until every `scatter` of the
    calling thread has reached them.
    """

    @property
    def block_bytes(self) -> int: ...  # one block over all layers
    def gather(self, block_ids: BlockIds) -> Gathered: ...
    def scatter(
        self, arena: Arena, sources: Sources, first_block: int, block_ids: BlockIds
    ) -> None: ...
    def settle(self) -> None: ...


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


class HostMover:
    """KV in host memory: nothing to stage.

    `tensors` has one per layer, which may share memory; dimension 0 counts blocks (or a multiple,
    where a kernel block is smaller), the rest is dense, else there is a ValueError.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], num_blocks: int) -> None:
        self._tensors = distinct(tensors, num_blocks)
        pages = [block_pages(tensor, num_blocks) for tensor in self._tensors]
        self._strides, sizes = np.asarray(pages, dtype=np.uint64).T.copy()
        pointers = [tensor.data_ptr() for tensor in self._tensors]
        self._bases = np.asarray(pointers, dtype=np.uint64)
        whole = Layout(self._bases, self._strides, sizes, num_blocks, self._tensors)
        self._layouts: dict[Cut | None, Layout] = {None: whole}

    @property
    def block_bytes(self) -> int:
        return self._layouts[None].block_bytes

    def gather(self, block_ids: BlockIds) -> Gathered:
        return Gathered(self._layouts[None], block_ids)

    def scatter(
        self, arena: Arena, sources: Sources, first_block: int, block_ids: BlockIds
    ) -> None:
        for offset, cut in sources:
            if cut is not None and cut not in self._layouts:
                num_blocks = self._layouts[None].num_blocks
                at = self._bases, self._strides
                self._layouts[cut] = cut.layout(*at, num_blocks, self._tensors)
            arena.load(offset, first_block, self._layouts[cut], block_ids)

    def settle(self) -> None:
        """Do nothing: host copies are done when `scatter` returns."""
