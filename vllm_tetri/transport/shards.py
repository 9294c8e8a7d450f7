"""How KV is spread over the ranks of an instance, and what a rank reads of another spread.

A slot has one part for each distinct shard of its sender. Ranks that hold the same bytes (more
ranks than KV heads, or latents of MLA) are replicas, of which the first one sends. A rank reads
from the parts that have heads of its own, and each byte is copied once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from vllm_tetri.transport.blocks import Cut, block_pages, distinct


@dataclass(frozen=True, slots=True)
class HeadPage:
    """What a block of one layer consists of, for every head: `repeats` runs of `head_bytes`. One
    run if heads are outermost in memory, one per token if tokens are."""

    repeats: int
    head_bytes: int


@dataclass(frozen=True, slots=True)
class Shards:
    """The KV shards of an instance, each held by as many consecutive ranks as any other.
    ``num_heads`` is 0 where heads cannot be told apart: then only as many shards can be read."""

    num_ranks: int = 1
    num_parts: int = 1  # distinct shards
    num_heads: int = 0  # KV heads of the whole model
    pages: tuple[HeadPage, ...] = ()

    def part_of(self, rank: int) -> int:
        """Return the shard that a rank holds."""
        return rank * self.num_parts // self.num_ranks

    def sends(self, rank: int) -> bool:
        """Whether a rank is the first one that holds its shard."""
        return rank == 0 or self.part_of(rank) != self.part_of(rank - 1)

    def can_read(self, num_parts: int) -> bool:
        """Whether a slot of so many parts can be read."""
        is_cut = self.num_heads > 0 and num_parts > 0 and self.num_heads % num_parts == 0
        return is_cut or num_parts == self.num_parts

    def sources(self, rank: int, num_parts: int) -> list[tuple[int, Cut | None]]:
        """Return which parts of a slot a rank reads, and what of each; None: all, as it is."""
        own = self.part_of(rank)
        if num_parts == self.num_parts:
            return [(own, None)]
        if not self.can_read(num_parts):
            raise ValueError(f"{num_parts} shards of KV cannot be cut into {self.num_parts}")
        mine, theirs = self.num_heads // self.num_parts, self.num_heads // num_parts
        heads = range(own * mine, (own + 1) * mine)
        return [
            (part, self._cut(heads, range(part * theirs, (part + 1) * theirs)))
            for part in range(heads.start // theirs, -(-heads.stop // theirs))
        ]

    def _cut(self, mine: range, theirs: range) -> Cut:
        first, last = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
        pieces = []  # (page, offset in it, start in the part's block, size)
        block_bytes = 0
        for number, page in enumerate(self.pages):
            for run in range(page.repeats):
                offset = (run * len(mine) + first - mine.start) * page.head_bytes
                start = block_bytes + (first - theirs.start) * page.head_bytes
                pieces.append((number, offset, start, (last - first) * page.head_bytes))
                block_bytes += len(theirs) * page.head_bytes
        pages, offsets, starts, sizes = np.asarray(pieces, dtype=np.uint64).T.copy()
        return Cut(pages, offsets, starts, sizes, block_bytes)


def head_pages(
    tensors: Sequence[torch.Tensor], num_blocks: int, num_heads: int
) -> tuple[HeadPage, ...]:
    """Find the heads, of which a rank has `num_heads`, in layers' tensors of the shape [block,
    head, token, content]; empty if that is not their shape, or if layers with different pages
    share memory."""
    kinds = {(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in tensors}
    kept = distinct(tensors, num_blocks)
    shapes = {(each.dim(), *each.shape[1:2]) for each in kept}
    if len(kinds) != len(kept) or shapes != {(4, num_heads)}:
        return ()
    return tuple(_head_page(each, num_blocks) for each in kept)


def _head_page(tensor: torch.Tensor, num_blocks: int) -> HeadPage:
    outer = [dim for dim in (2, 3) if tensor.stride(dim) >= tensor.stride(1)]
    repeats = tensor.shape[0] // num_blocks * prod(tensor.shape[dim] for dim in outer)
    return HeadPage(repeats, block_pages(tensor, num_blocks)[1] // repeats // tensor.shape[1])
