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
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_tetri.config import TetriConfig, parse_pool
from vllm_tetri.engine.blocks import IdsByGroup, PromptBlocks
from vllm_tetri.engine.compat import BlockPool, KVCacheBlock, KVCacheConfig, Request, get_block_hash
from vllm_tetri.engine.identity import specs_of
from vllm_tetri.engine.residency import CacheLog
from vllm_tetri.engine.step import KVLayout, Load, Pooled, StepMeta, WorkerReport, load_budget
from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.pool import PoolIndex
from vllm_tetri.transport.blocks import BlockMover, Rows
from vllm_tetri.transport.segments import map_memory

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_FULL_ATTENTION = {"FullAttentionSpec", "MLAAttentionSpec"}


def pool_places(
    config: TetriConfig, vllm_config: VllmConfig, kv_cache: KVCacheConfig, layout: KVLayout
) -> tuple[int, str]:
    """Return how many blocks the pool of an instance holds, and why it has none although one was
    asked for."""
    num_bytes, folder = parse_pool(config.kv_pool)
    shards, groups = layout.shards, kv_cache.kv_cache_groups
    kinds = {type(spec).__name__ for group in groups for spec in specs_of(group)}
    # vLLM clears new blocks of layers whose KV has different types before they can be copied.
    is_cleared = getattr(kv_cache, "needs_kv_cache_zeroing", False)
    found = {
        "it has no prefix cache": not vllm_config.cache_config.enable_prefix_caching,
        "not all layers of its model have full attention alike": len(groups) != 1
        or not kinds <= _FULL_ATTENTION
        or is_cleared,
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


@dataclass(slots=True)
class _Use:
    first: int  # the request's block that the first place holds
    places: list[int]  # pinned
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
        self._block_tokens = blocks.block_tokens
        self._load_bytes = load_budget(config.load_budget_bytes, layout)
        self._uses: dict[str, _Use] = {}  # by request that is not admitted yet
        self._asking: set[str] = set()  # those that may be admitted in this step
        self.loading: dict[str, _Use] = {}  # by request
        self._loads, self._early_loads = list[Load](), list[Load]()
        self._saves: dict[int, int] = {}  # by place: the block that is copied there
        self._invalid: set[int] = set()  # blocks whose load failed
        self.hit_tokens = self.num_evicted = self.bytes_saved = self.bytes_loaded = 0
        if size:
            self._evict_stock = block_pool._maybe_evict_cached_block
            block_pool._maybe_evict_cached_block = self._evict

    # -- blocks that leave the prefix cache -------------------------------------

    def _evict(self, block: KVCacheBlock) -> bool:
        """Do what vLLM does to a block that gets other tokens, and keep what it held."""
        key, block_id = block.block_hash, block.block_id
        was_cached = self._evict_stock(block)
        is_valid = block_id not in self._invalid
        self._invalid.discard(block_id)
        if was_cached and key is not None and is_valid:
            name = get_block_hash(key)
            place, dropped = self.index.put(name)
            if dropped is not None:
                self.num_evicted += 1
                self._forget([dropped])
            if place is not None:
                self._saves[place] = block_id
                self.bytes_saved += self._layout.block_bytes
            if name in self.index:
                self._log.keep(name)
        return was_cached

    def _forget(self, names: list[bytes]) -> None:
        cached = self._block_pool.get_cached_block
        self._log.drop(names, [each for each in names if cached(each, [0]) is None])

    def distrust(self, block_ids: set[int]) -> None:
        """Keep nothing that blocks held whose load failed, nor what may be computed from it."""
        if block_ids and self.index.size:
            self._invalid |= block_ids
            self.clear()

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

    def reach(self, request: Request, num_local: int, until: int) -> int:
        """Return how many tokens of a request, up to `until`, are here if its prefix cache hit has
        the first `num_local`. The others are pinned until `release`, or `take` and the report."""
        first, stop = num_local // self._block_tokens, until // self._block_tokens
        self.release(request.request_id)
        if first >= stop or not len(self.index) or request.skip_reading_prefix_cache:
            return num_local
        places = self.index.pin(islice(request.block_hashes, first, stop))
        if places:
            self._uses[request.request_id] = _Use(first, places)
        return num_local + len(places) * self._block_tokens

    def match(self, request: Request, num_local: int, *, is_busy: bool) -> tuple[int | None, bool]:
        """Return how many tokens beyond the prefix cache hit can be loaded (None: ask again), and
        whether in the background."""
        if request.request_id in self.loading:
            return None, False  # preempted before its load was reported
        reach = self.reach(request, num_local, request.num_tokens)
        num_tokens = self._blocks.hit_tokens(request.num_tokens, reach) - num_local
        if num_tokens <= 0:
            self.release(request.request_id)
            return 0, False
        num_bytes = num_tokens // self._block_tokens * self._layout.block_bytes
        is_background = (is_busy and num_bytes > self._load_bytes) or self._layout.is_device
        self._uses[request.request_id].is_background = is_background
        return num_tokens, is_background

    def ask(self, request_id: str) -> None:
        """Record that a request may be admitted in this step; else its pins go."""
        self._asking.add(request_id)

    def release(self, request_id: str) -> None:
        """Let go of what is pinned for a request that is not admitted, if anything."""
        if (use := self._uses.pop(request_id, None)) is not None:
            self.index.unpin(use.places)

    def take(self, request_id: str, block_ids: IdsByGroup, until: int) -> Pooled | None:
        """Return what is loaded for an admitted request: its blocks here up to `until` tokens."""
        if (use := self._uses.pop(request_id, None)) is None:
            return None
        count = max(0, until // self._block_tokens - use.first)
        self.index.unpin(use.places[count:])
        del use.places[count:]
        if not use.places:
            return None
        self.loading[request_id] = use
        self.hit_tokens += len(use.places) * self._block_tokens
        ids = block_ids[0][use.first : use.first + len(use.places)]
        return np.asarray(use.places, dtype=np.int32), np.asarray(ids, dtype=np.int32)

    def admitted(self, request_id: str, block_ids: IdsByGroup, num_external: int) -> None:
        """Order the load of a request to which `match` gave so many tokens, or end its pins."""
        use = self._uses.get(request_id)
        if use is None or not num_external:
            self.release(request_id)
            return
        pool = self.take(request_id, block_ids, use.first * self._block_tokens + num_external)
        load = Load(request_id, "", 0, 0, 0, [], use.is_background, pool)
        (self._loads if use.is_background else self._early_loads).append(load)

    def fill(self, meta: StepMeta) -> None:
        """Add this step's orders to `meta`, after scheduling."""
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
        """Let go of places that all workers have loaded."""
        for request_id, num_ranks in report.loaded.items():
            use = self.loading.get(request_id)
            if use is None:
                continue
            use.num_loaded += num_ranks
            if use.num_loaded >= self._layout.shards.num_ranks:
                del self.loading[request_id]
                self.index.unpin(use.places)
                self.bytes_loaded += len(use.places) * self._layout.block_bytes
