"""The memory half of the loopback transport: layouts and arenas in plain Python."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 4096
segments: dict[str, NDArray[np.uint8]] = {}


class Layout:
    """Where page (layer, block) lives in memory; see the native `Layout`."""

    def __init__(
        self,
        bases: NDArray[np.uint64],
        block_strides: NDArray[np.uint64],
        page_bytes: NDArray[np.uint64],
        num_blocks: int,
        owner: object,
    ) -> None:
        if not len(bases) == len(block_strides) == len(page_bytes) > 0 or num_blocks < 1:
            raise ValueError("a layout needs at least one layer and one block")
        if any(p == 0 for p in page_bytes) or any(b == 0 for b in bases):
            raise ValueError("pages of zero bytes or at address zero do not describe blocks")
        self.num_layers = len(bases)
        self.num_blocks = num_blocks
        self.block_bytes = int(sum(page_bytes))
        self._pages = [
            (int(base), int(stride), int(size))
            for base, stride, size in zip(bases, block_strides, page_bytes, strict=True)
        ]
        self._owner = owner

    def pages_of(self, block: int) -> list[NDArray[np.uint8]]:
        """Views of one block's pages, layer by layer."""
        return [
            np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base + block * stride))
            for base, stride, size in self._pages
        ]

    def gather(self, block_ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        """The bytes of a run of blocks, block-major."""
        pages = [page for block in block_ids for page in self.pages_of(int(block))]
        return np.concatenate(pages) if pages else np.empty(0, np.uint8)

    def scatter(self, block_ids: NDArray[np.int32], source: NDArray[np.uint8]) -> None:
        """The opposite of `gather`."""
        start = 0
        for block in block_ids:
            for page in self.pages_of(int(block)):
                page[:] = source[start : start + page.size]
                start += page.size

    def check_ids(self, block_ids: NDArray[np.int32]) -> None:
        """Raises ValueError for ids outside of the layout."""
        for block in block_ids:
            if not 0 <= block < self.num_blocks:
                raise ValueError(
                    f"block id {block} is outside the layout's {self.num_blocks} blocks"
                )


def copy_blocks(
    destination: Layout,
    destination_ids: NDArray[np.int32],
    source: Layout,
    source_ids: NDArray[np.int32],
) -> None:
    """Copy blocks between two layouts of the same page shape."""
    if [p[2] for p in destination._pages] != [p[2] for p in source._pages]:
        raise ValueError("copy_blocks needs two layouts of the same page shape")
    if len(destination_ids) != len(source_ids):
        raise ValueError("copy_blocks needs as many destination ids as source ids")
    destination.check_ids(destination_ids)
    source.check_ids(source_ids)
    destination.scatter(destination_ids, source.gather(source_ids))


class Arena:
    """A receiver's memory."""

    def __init__(self, segment: str) -> None:
        if segment not in segments:
            raise RuntimeError(f"cannot open the receive arena {segment}")
        self._memory: NDArray[np.uint8] | None = segments[segment]

    def load(
        self,
        slot_offset: int,
        first_block: int,
        layout: Layout,
        block_ids: NDArray[np.int32],
        threads: int = 1,
    ) -> None:
        if threads < 1:
            raise ValueError("threads is out of range")
        layout.scatter(block_ids, self._blocks_at(slot_offset, first_block, layout, block_ids))

    def save(
        self, slot_offset: int, first_block: int, layout: Layout, block_ids: NDArray[np.int32]
    ) -> None:
        self._blocks_at(slot_offset, first_block, layout, block_ids)[:] = layout.gather(block_ids)

    def _blocks_at(
        self, slot_offset: int, first_block: int, layout: Layout, block_ids: NDArray[np.int32]
    ) -> NDArray[np.uint8]:
        layout.check_ids(block_ids)
        begin = slot_offset + first_block * layout.block_bytes
        end = begin + len(block_ids) * layout.block_bytes
        if self._memory is None or first_block < 0:
            raise ValueError("the arena is closed, or first_block is out of range")
        if slot_offset < HEADER_BYTES or end > self._memory.size:
            raise ValueError(f"bytes {begin} to {end} are outside the arena")
        return self._memory[begin:end]

    def close(self) -> None:
        self._memory = None
