"""Blocks that left the prefix cache of this instance and stay in host memory (`--tetri-kv-pool`).

vLLM's block pool gives cached blocks to other tokens when it lacks room. Their bytes are there
until the step writes, so the workers first copy them to places of the pool. A request whose prefix
cache hit ends where blocks of the pool go on gets these loaded, as KV of other instances is; until
the workers report that, their places are pinned. Every rank keeps its part of a block, under the
same number of a place. Routers are told that this instance holds what either cache does.

Owner: the engine thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_tetri.config import TetriConfig, parse_pool
from vllm_tetri.engine.blocks import IdsByGroup, PromptBlocks
from vllm_tetri.engine.compat import (
    BlockPool,
    KVCacheBlock,
    KVCacheConfig,
    Request,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from vllm_tetri.engine.identity import specs_of
from vllm_tetri.engine.residency import CacheLog
from vllm_tetri.engine.step import KVLayout, Load, LoadBudget, Pooled, StepMeta, WorkerReport
from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.pool import PoolIndex
from vllm_tetri.transport.blocks import BlockMover, Rows
from vllm_tetri.transport.segments import map_memory

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_KINDS = {
    "FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec",
}  # fmt: skip
_MAX_ENDS = 64  # of a hit that are tried where windows lack blocks


def pool_places(
    config: TetriConfig, vllm_config: VllmConfig, kv_cache: KVCacheConfig, layout: KVLayout
) -> tuple[int, str]:
    """Return how many blocks the pool of an instance holds, and why it has none although one was
    asked for."""
    num_bytes, folder = parse_pool(config.kv_pool)
    shards, groups = layout.shards, kv_cache.kv_cache_groups
    kinds = {type(spec).__name__ for group in groups for spec in specs_of(group)}
    sizes = {group.kv_cache_spec.block_size for group in groups}
    # vLLM clears new blocks of layers whose KV has different types before they can be copied.
    is_cleared = getattr(kv_cache, "needs_kv_cache_zeroing", False)
    found = {
        "it has no prefix cache": not vllm_config.cache_config.enable_prefix_caching,
        # vLLM then preempts requests of the same step, whose new blocks it has named already.
        "requests have priorities": vllm_config.scheduler_config.policy == "priority",
        "some layers of its model keep a state, or are of a kind that it does not know": is_cleared
        or not kinds <= _KINDS,
        "layers of its model have blocks of different sizes": len(sizes) > 1,
        "a GPU does not reach a file": bool(folder) and layout.is_device,
    }
    why = next((reason for reason, applies in found.items() if applies), "")
    num_places = num_bytes // (layout.block_bytes // shards.num_parts * shards.num_ranks)
    return (0, why) if why else (num_places, "" if num_places else "not one block fits")


def open_rows(mover: BlockMover, num_places: int, text: str) -> Rows:
    """Return a rank's memory of the pool that `--tetri-kv-pool` asks for. ConfigError if there is
    none."""
    try:
        mapped = map_memory(num_places * mover.layout.block_bytes, parse_pool(text)[1])
        memory = np.frombuffer(mapped, dtype=np.uint8)
        mover.adopt(memory)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"--tetri-kv-pool {text}: {error}") from error
    return memory


Block = tuple[int, int]  # a group, and the number of a request's block in it


@dataclass(slots=True)
class _Use:
    """What is pinned for a request."""

    first: int  # tokens of the prefix cache hit
    tokens: int  # those that are here from the first one on
    blocks: list[Block]
    places: list[int]  # of these blocks, pinned
    is_background: bool = False
    num_loaded: int = 0  # ranks that have executed the load


class Pool:
    """What an instance keeps beyond its prefix cache; of `size` blocks, 0 for nothing."""

    def __init__(
        self,
        size: int,
        config: TetriConfig,
        layout: KVLayout,
        blocks: PromptBlocks,
        block_pool: BlockPool,
        log: CacheLog,
    ) -> None:
        self.index = PoolIndex(size)
        self._layout, self._blocks, self._block_pool, self._log = layout, blocks, block_pool, log
        # The group that routers are told of.
        self._group, self._block_tokens, _ = blocks.prefix_group
        self.budget = LoadBudget(config.load_budget_bytes, layout, is_uniform=blocks.is_uniform)
        self._uses: dict[str, _Use] = {}  # by request that is not admitted yet
        self._asking: set[str] = set()  # those that may be admitted in this step
        self.loading: dict[str, _Use] = {}  # by request
        self._loads, self._early_loads = list[Load](), list[Load]()
        self._saves: dict[int, int] = {}  # by place: the block that is copied there
        self.hit_tokens = self.num_evicted = self.bytes_saved = self.bytes_loaded = 0
        self._evict_stock = block_pool._maybe_evict_cached_block
        if size:
            block_pool._maybe_evict_cached_block = self._evict

    # -- blocks that leave the prefix cache -------------------------------------

    def _evict(self, block: KVCacheBlock) -> bool:
        """Do what vLLM does to a block that gets other tokens, and keep what it held."""
        key, block_id = block.block_hash, block.block_id
        was_cached = self._evict_stock(block)
        if was_cached and key is not None:
            self._keep(key, block_id)
        return was_cached

    def _keep(self, key: bytes, block_id: int) -> None:
        """Put a block of the prefix cache in the pool, if there is a place."""
        place, dropped = self.index.put(key)
        if dropped is not None:
            self.num_evicted += 1
            self._forget([dropped])
        if place is not None:
            self._saves[place] = block_id
            self.bytes_saved += self._layout.block_bytes
        if key in self.index and get_group_id(key) == self._group:
            self._log.keep(get_block_hash(key))

    def _forget(self, keys: list[bytes]) -> None:
        cached = self._block_pool.get_cached_block
        names = [get_block_hash(key) for key in keys if get_group_id(key) == self._group]
        self._log.drop(names, [each for each in names if cached(each, [self._group]) is None])

    def distrust(self, block_ids: set[int]) -> None:
        """Forget what both caches hold: some may be computed from blocks whose load failed."""
        if block_ids:
            self.clear()
            for block in self._block_pool.blocks:
                self._evict_stock(block)

    def clear(self) -> None:
        """Forget all blocks: the weights may change. Loads under way end as ordered."""
        for request_id in list(self._uses):
            self.release(request_id)
        self._saves.clear()
        self._forget(self.index.clear())

    def numbers(self) -> dict[str, Any]:
        """Return what load reports tell of the pool (any thread)."""
        return {
            "kv_pool_blocks": len(self.index),
            "kv_pool_total_blocks": self.index.size,
            "kv_pool_hit_tokens": self.hit_tokens,
            "kv_pool_evictions": self.num_evicted,
            "kv_pool_bytes_saved": self.bytes_saved,
            "kv_pool_bytes_loaded": self.bytes_loaded,
        }

    # -- requests ---------------------------------------------------------------

    def reach(self, request: Request, num_local: int, until: int, total: int = 0) -> int:
        """Return how many tokens of a request, up to `until`, where a hit may end, are here if its
        prefix cache hit has the first `num_local`. The others are pinned until `release`, or `take`
        and the report. Of windows only what the token after `total` ones needs has to be here, at
        least what the one after those that are returned does."""
        until -= until % self._block_tokens
        self.release(request.request_id)
        if num_local >= until or not len(self.index) or request.skip_reading_prefix_cache:
            return num_local
        tokens, blocks = self._find(request, num_local, until, total)
        places = self._pin([*blocks.values()])
        if len(places) < len(blocks):
            return num_local
        if places:
            self._uses[request.request_id] = _Use(num_local, tokens, [*blocks], places)
        return tokens

    def _find(
        self, request: Request, num_local: int, until: int, total: int
    ) -> tuple[int, dict[Block, bytes]]:
        """Return how many tokens are here, and the blocks of those behind the prefix cache hit."""
        size, hashes, end = self._block_tokens, request.block_hashes, until

        @cache
        def key_of(block: Block) -> bytes | None:
            key = make_block_hash_with_group_id(hashes[block[1]], block[0])
            return key if key in self.index or self._idle_block(key) is not None else None

        def end_before(number: int) -> int:
            return self._blocks.hit_tokens(request.num_tokens, number * size)

        if end // size > len(hashes):
            end = end_before(len(hashes))
        growing, taken_back = self._blocks.growing, 0 if total else self._blocks.num_taken_back
        for group in growing:
            numbers = range(num_local // size, min(end // size + taken_back, len(hashes)))
            gone = next((each for each in numbers if key_of((group, each)) is None), None)
            end = end if gone is None else end_before(gone)
        for _ in range(_MAX_ENDS):
            if end <= num_local:
                break
            spans = [*enumerate(self._blocks.spans(max(end, total), num_local))]
            last = end // size
            windows = ((group, each) for group, span in spans if group not in growing
                       for each in reversed(span) if each < last)  # fmt: skip
            gone = next((each for group, each in windows if key_of((group, each)) is None), None)
            if gone is None:
                blocks = ((group, each) for group, span in spans for each in span if each < last)
                return end, {each: key for each in blocks if (key := key_of(each)) is not None}
            end = end_before(gone)
        return num_local, {}

    def _idle_block(self, key: bytes) -> KVCacheBlock | None:
        """Return a block of the prefix cache that no request uses: it is surely computed."""
        found = self._block_pool.get_cached_block(get_block_hash(key), [get_group_id(key)])
        block = found[0] if found else None
        return block if block is not None and not block.ref_cnt else None

    def _pin(self, keys: list[bytes]) -> list[int]:
        """Pin blocks, of the prefix cache, too, and return their places; none if one has none."""
        here = [key for key in keys if key in self.index]
        if len(keys) - len(here) > self.index.size - self.index.num_pinned:
            return []
        places = dict(zip(here, self.index.pin(here), strict=True))
        for key in keys:
            if key not in places and (block := self._idle_block(key)) is not None:
                self._keep(key, block.block_id)
                places |= zip([key], self.index.pin([key]), strict=False)
        if len(places) == len(keys):
            return [places[key] for key in keys]
        self.index.unpin([*places.values()])
        return []

    def match(self, request: Request, num_local: int, *, is_busy: bool) -> tuple[int | None, bool]:
        """Return how many tokens beyond the prefix cache hit can be loaded (None: ask again), and
        whether in the background."""
        if not self.index.size:
            return 0, False
        if request.request_id in self.loading:
            return None, False  # preempted before its load was reported
        until = self._blocks.hit_tokens(request.num_tokens, request.num_tokens)
        num_tokens = self.reach(request, num_local, until) - num_local
        use = self._uses.get(request.request_id)
        if num_tokens <= 0 or use is None:
            return 0, False
        use.is_background = self.budget.is_background(len(use.places), is_busy=is_busy)
        return num_tokens, use.is_background

    def ask(self, request_id: str) -> None:
        """Record that a request may be admitted in this step; else its pins go."""
        if self.index.size:
            self._asking.add(request_id)

    def release(self, request_id: str) -> None:
        """Let go of what is pinned for a request that is not admitted, if anything."""
        if (use := self._uses.pop(request_id, None)) is not None:
            self.index.unpin(use.places)

    def take(self, request_id: str, block_ids: IdsByGroup) -> Pooled | None:
        """Return what is loaded for an admitted request, into its blocks."""
        if (use := self._uses.pop(request_id, None)) is None:
            return None
        self.loading[request_id] = use
        self.hit_tokens += use.tokens - use.first
        ids = [block_ids[group][number] for group, number in use.blocks]
        return np.asarray(use.places, dtype=np.int32), np.asarray(ids, dtype=np.int32)

    def admitted(self, request_id: str, block_ids: IdsByGroup, num_external: int) -> None:
        """Order the load of a request to which `match` gave so many tokens, or end its pins."""
        use = self._uses.get(request_id)
        if use is None or not num_external:
            self.release(request_id)
            return
        pool = self.take(request_id, block_ids)
        load = Load(request_id, "", 0, 0, 0, [], use.is_background, pool)
        (self._loads if use.is_background else self._early_loads).append(load)

    def fill(self, meta: StepMeta) -> None:
        """Add this step's orders to `meta`, after scheduling."""
        if not (self._asking or self._saves or self._early_loads or self._loads):
            return
        for request_id in self._asking:
            self.release(request_id)
        self._asking.clear()
        if self._saves:
            places, ids = np.asarray([*self._saves.items()], dtype=np.int32).T.copy()
            meta.saves, self._saves = (places, ids), {}
        meta.early_loads, self._early_loads = self._early_loads, []
        meta.loads += self._loads
        self._loads = []

    def report(self, report: WorkerReport) -> None:
        """Let go of places that all workers have loaded. After a load that failed nothing is tried
        again: that would fail as well."""
        if report.failed_loads and self.loading:
            self.clear()
        for request_id, num_ranks in report.loaded.items():
            use = self.loading.get(request_id)
            if use is None:
                continue
            use.num_loaded += num_ranks
            if use.num_loaded >= self._layout.shards.num_ranks:
                del self.loading[request_id]
                self.index.unpin(use.places)
                self.bytes_loaded += len(use.places) * self._layout.block_bytes
