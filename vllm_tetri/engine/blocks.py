"""Which KV blocks a prompt has, and where each lies in a slot of a receive arena.

vLLM keeps KV by groups of layers. A group of full attention keeps every block of a prompt, one
of sliding windows or chunks only those that later tokens attend to, and a recurrent one keeps
its state in one block. All groups take blocks from one pool, so a block has the same bytes in
each. A slot holds, group after group, the blocks that the token after the prompt needs, less
those before its `first` token, which the receiver has in its prefix cache.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from math import lcm

import numpy as np

from vllm_tetri.engine.compat import KVCacheBlock, KVCacheManager, MambaSpec, Request
from vllm_tetri.transport.blocks import BlockIds

# Neighbours in a slot: the first one's position, and the paged blocks that are copied there.
Run = tuple[int, BlockIds]
IdsByGroup = tuple[list[int], ...]  # a request's blocks
_MANY_TOKENS = 1 << 40
_COUNTED_S = 0.05  # for so long a count of pinned blocks is good


class PromptBlocks:
    """The groups of one KV cache. ``block_tokens`` is how many tokens one more block of each
    group that grows with its request holds, and ``growing`` has the numbers of such groups."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._groups = kv_cache.coordinator.single_type_managers
        self.has_state = any(isinstance(each.kv_cache_spec, MambaSpec) for each in self._groups)
        growing = [each for each in self._groups if not each.get_num_skipped_tokens(_MANY_TOKENS)]
        self.growing = [self._groups.index(each) for each in growing]
        sizes = [each.block_size for each in growing or self._groups]
        self.block_tokens = min(sizes, default=1)
        # A prefix hit ends with a block of every group; for EAGLE and MTP vLLM takes back one.
        self._hit_tokens, self.num_taken_back = lcm(*sizes), int(kv_cache.use_eagle)
        self.num_groups = len(self._groups)
        # vLLM takes the blocks of a load within a step that failed only without other groups.
        self.is_uniform = self.num_groups == len(self.growing) == 1
        # The group that tells where a prefix hit may end, how many tokens its blocks have, and how
        # many of them a hit needs, the last ones: the group with the largest window, else one that
        # needs all (0).
        windows = {
            index: max(1, _MANY_TOKENS - each.get_num_skipped_tokens(_MANY_TOKENS))
            for index, each in enumerate(self._groups)
            if index not in self.growing and not self.has_state
        }
        index = max(windows, key=windows.__getitem__, default=[*self.growing, 0][0])
        size = self._groups[index].block_size if self._groups else 1
        self.prefix_group = index, size, -(-windows.get(index, 0) // size)

    def spans(self, tokens: int, first: int = 0) -> list[range]:
        """Return by group which of a request's blocks the token after `tokens` ones needs, less
        those before the `first` token. A state is one of them in any case."""
        return [
            range(
                max(each.get_num_skipped_tokens(tokens), first) // each.block_size,
                -(-tokens // each.block_size),
            )
            for each in self._groups
        ]

    def count(self, tokens: int, first: int = 0) -> int:
        """Return how many blocks a slot has for a prompt of so many tokens."""
        return sum(map(len, self.spans(tokens, first)))

    def hit_tokens(self, tokens: int, held: int) -> int:
        """Return how many tokens of a prompt an instance that holds so many surely has a prefix hit
        on, such that its last block is left to be sent in any case. Where layers have a state there
        is none: a state is cached where a step ended, if at all, and reports do not tell."""
        if self.has_state:
            return 0
        num_hits = min(held, tokens - 1) // self._hit_tokens - self.num_taken_back
        return max(0, num_hits) * self._hit_tokens

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
        return not self.has_state and all(needed.start >= held.start for needed, held in both)

    def runs(
        self,
        prompt_tokens: int,
        block_ids: IdsByGroup,
        *,
        first: int = 0,
        since: int = 0,
        until: int | None = None,
    ) -> list[Run]:
        """Return the blocks of a slot, which begins at the `first` token, that are complete once
        `until` tokens are computed (None: all of the prompt) and were not when `since` were.
        `block_ids` has a request's blocks by group."""
        found, num_before = [], 0
        for group, span, ids in zip(
            self._groups, self.spans(prompt_tokens, first), block_ids, strict=True
        ):
            start = max(span.start, since // group.block_size)
            stop = span.stop if until is None else min(span.stop, until // group.block_size)
            if start < stop:
                position = num_before + start - span.start
                found.append((position, np.asarray(ids[start:stop], dtype=np.int32)))
            num_before += len(span)
        return found


class Pins:
    """Blocks of a prefix cache that are kept for requests on whose prompts they are, until these
    have them by themselves. vLLM counts them as used, so they go as soon as anything else lacks
    room; then they are evicted last. Owner: the engine thread."""

    def __init__(self, kv_cache: KVCacheManager, blocks: PromptBlocks) -> None:
        self._cache, self._blocks, self._pool = kv_cache, blocks, kv_cache.block_pool
        self._groups: dict[str, tuple[Sequence[KVCacheBlock], ...]] = {}  # by request
        self._asking: set[str] = set()
        self._num_blocks: int | None = None  # as counted last; None: a pin has changed
        self._counted_s = 0.0

    @property
    def num_blocks(self) -> int:
        """How many blocks are kept for nothing else, of the group with the most, about."""
        now = time.monotonic()
        # Requests that share some of them end without a word to this object.
        if self._num_blocks is None or now - self._counted_s > _COUNTED_S:
            self._num_blocks, self._counted_s = self._count(), now
        return self._num_blocks

    def _count(self) -> int:
        most = 0
        for group in zip(*self._groups.values(), strict=True):  # of all requests
            held = Counter(block.block_id for blocks in group for block in blocks)
            every = {block.block_id: block for blocks in group for block in blocks}
            most = max(most, sum(every[each].ref_cnt == held[each] for each in held))
        return most

    def num_shared(self, request: Request) -> int:
        """Return how many of the blocks that are cached of a request are in use, of one group."""
        found, *_ = self._cache.get_computed_blocks(request)
        groups = [found.blocks[index] for index in self._blocks.growing]
        return max((sum(each.ref_cnt > 0 for each in group) for group in groups), default=0)

    def hold(self, request: Request) -> int:
        """Keep what is cached of a request that waits, and return how many tokens that are."""
        found, num_tokens, *_ = self._cache.get_computed_blocks(request)
        self._groups[request.request_id], self._num_blocks = found.blocks, None
        for blocks in found.blocks:
            self._pool.touch(blocks)
        return int(num_tokens)

    def release(self, request_id: str) -> None:
        """Let the blocks of a request go, if any; the end of its prompt is evicted first."""
        self._asking.discard(request_id)
        for blocks in self._groups.pop(request_id, ()):
            self._pool.free_blocks(reversed(blocks))
            self._num_blocks = None

    def release_all(self) -> None:
        """Let all blocks go."""
        for request_id in list(self._groups):
            self.release(request_id)

    def leave_room(self, started: Iterable[Request]) -> None:
        """Let all blocks go if these requests may lack them: none is preempted for a pin."""
        if not self._groups:
            return
        size = self._blocks.block_tokens
        due = (each.num_tokens_with_spec - each.num_computed_tokens for each in started)
        num_blocks = self._blocks.num_groups * sum(1 + max(0, tokens) // size for tokens in due)
        if num_blocks > self._pool.get_num_free_blocks():
            self.release_all()

    def ask(self, request_id: str) -> None:
        """Record that a request may be admitted in this step; `release` says that it was."""
        self._asking.add(request_id)

    def end_step(self) -> None:
        """Let all blocks go if a request was not admitted: it may have lacked them."""
        if self._asking:
            self._asking.clear()
            self.release_all()
