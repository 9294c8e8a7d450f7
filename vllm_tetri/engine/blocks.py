"""Which KV blocks a prompt has, and where each lies in a slot of a receive arena.

vLLM keeps KV by groups of layers. A group of full attention keeps every block of a prompt, one
of sliding windows or chunks only those that later tokens attend to, and a recurrent one keeps
its state in one block. All groups take blocks from one pool, so a block has the same bytes in
each. A slot holds, group after group, the blocks that the token after the prompt needs.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from vllm_tetri.engine.compat import KVCacheManager, MambaSpec
from vllm_tetri.transport.blocks import BlockIds

# Neighbours in a slot: the first one's position, and the paged blocks that are copied there.
Run = tuple[int, BlockIds]
IdsByGroup = tuple[list[int], ...]  # a request's blocks
_MANY_TOKENS = 1 << 40


class PromptBlocks:
    """The groups of one KV cache. ``block_tokens`` is how many tokens one more block of each
    group that grows with its request holds, and ``num_growing`` how many such groups there are."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._groups = kv_cache.coordinator.single_type_managers
        self._has_state = any(isinstance(each.kv_cache_spec, MambaSpec) for each in self._groups)
        growing = [each for each in self._groups if not each.get_num_skipped_tokens(_MANY_TOKENS)]
        self.num_growing = len(growing)
        self.block_tokens = min((each.block_size for each in growing or self._groups), default=1)
        self.num_groups = len(self._groups)

    def spans(self, tokens: int) -> list[range]:
        """Return by group which of a request's blocks the token after `tokens` ones needs."""
        return [
            range(
                each.get_num_skipped_tokens(tokens) // each.block_size,
                -(-tokens // each.block_size),
            )
            for each in self._groups
        ]

    def count(self, tokens: int) -> int:
        """Return how many blocks a slot has for a prompt of so many tokens."""
        return sum(map(len, self.spans(tokens)))

    def most_tokens(self, num_blocks: int) -> int:
        """Return the longest prompt whose KV so many blocks hold, as a multiple of whole blocks
        of full attention at most."""
        return bisect_right(
            range(1, num_blocks * self.block_tokens + 1), num_blocks, key=self.count
        )

    def holds(self, prompt_tokens: int, tokens: int) -> bool:
        """Whether a slot of a prompt has what the token after its first `tokens` ones needs: the
        state of a recurrent layer is that of the whole prompt, and a window moves on."""
        if tokens == prompt_tokens:
            return True
        both = zip(self.spans(tokens), self.spans(prompt_tokens), strict=True)
        return not self._has_state and all(needed.start >= held.start for needed, held in both)

    def runs(
        self, prompt_tokens: int, block_ids: IdsByGroup, *, since: int = 0, until: int | None = None
    ) -> list[Run]:
        """Return the slot's blocks that are complete once `until` tokens are computed (None: all of
        the prompt) and were not when `since` were. `block_ids` has a request's blocks by group."""
        found, first = [], 0
        for group, span, ids in zip(
            self._groups, self.spans(prompt_tokens), block_ids, strict=True
        ):
            start = max(span.start, since // group.block_size)
            stop = span.stop if until is None else min(span.stop, until // group.block_size)
            if start < stop:
                position = first + start - span.start
                found.append((position, np.asarray(ids[start:stop], dtype=np.int32)))
            first += len(span)
        return found
