"""What the prefix cache of this instance holds, for its routers.

vLLM's block pool tells of every block that enters or leaves its prefix cache by KV events. This
module reads them where vLLM publishes them and passes them on, so that a user's own publisher
(`--kv-events-config`) gets what it would get. Of several groups of a KV cache one is followed: one
with a window, since vLLM keeps of windows only what a repeated prompt needs, and so has no hit
elsewhere (`prefix_cache_retention_interval`); else one that grows with its request.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from vllm_tetri.engine.blocks import PromptBlocks
from vllm_tetri.engine.compat import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    Request,
    Scheduler,
)
from vllm_tetri.handover import Fetch
from vllm_tetri.messages import MAX_CACHE_NAMES, NAME_BYTES, CacheReport, RequestChain
from vllm_tetri.types import InstanceId

_MAX_CHAINS = 1024  # of requests that ended since the last report
_MAX_CHAIN_BYTES = 1 << 20  # of all their names together
_MAX_BATCHES = 256  # of events, of a step each, that wait for the agent's thread


class CacheLog(EventPublisher):
    """Stands before the publisher of a scheduler. The engine thread brings events, the agent's
    thread reads them for its reports, so that steps do not wait; a lock guards what they share."""

    def __init__(self, scheduler: Scheduler, blocks: PromptBlocks) -> None:
        super().__init__()
        self._next = scheduler.kv_event_publisher
        pool = scheduler.kv_cache_manager.block_pool
        # Where others want vLLM's events, it may tell of hits as well.
        self.is_on, self._counts = bool(pool.enable_caching), not pool.enable_kv_cache_events
        pool.enable_kv_cache_events = pool.enable_kv_cache_events or self.is_on
        group, self.block_tokens, self._tail_blocks = blocks.prefix_group
        self._groups = (None, group)  # that events name
        self._scale = max(1, self.block_tokens // scheduler.hash_block_size)
        self._lock = threading.Lock()
        self._unread = deque[Any]()  # batches of events
        self._held: set[bytes] = set()
        self._copies = Counter[bytes]()  # blocks of the prefix cache by name
        self._pooled: set[bytes] = set()  # in host memory as well, or only there
        self._changes: dict[bytes, bool] = {}  # since the last report: whether it came
        self._was_cleared, self._chain_bytes = False, 0
        # Requests that ended: name, prompt tokens, and hashes of their blocks.
        self._ended = deque[tuple[str, int, list[bytes]]](maxlen=_MAX_CHAINS)

    # -- vLLM's publisher, on the engine thread ---------------------------------

    def publish(self, events: Any) -> None:
        if self.is_on:
            self._unread.append(events)
            if len(self._unread) >= _MAX_BATCHES:
                with self._lock:
                    self._read()
        self._next.publish(events)

    def shutdown(self) -> None:
        self._next.shutdown()

    def get_publisher_config(self) -> Any:
        return self._next.get_publisher_config()

    def _read(self) -> None:
        """Record what unread events tell, with the lock held."""
        while self._unread:
            for event in self._unread.popleft().events:
                if event.__class__ is BlockRemoved and event.group_idx in self._groups:
                    self._remove(event.block_hashes)
                else:
                    self._record(event)

    def _remove(self, block_hashes: Sequence[bytes | int]) -> None:
        for name in map(_name, block_hashes):
            self._copies[name] -= 1
            if self._copies[name] <= 0:  # else another block holds the same
                del self._copies[name]
                if name not in self._pooled:
                    self._held.discard(name)
                    self._changes[name] = False

    def _record(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self._held.clear()
            self._copies.clear()
            self._changes.clear()
            self._was_cleared = True
            return
        is_full = len(self._held) >= MAX_CACHE_NAMES
        if isinstance(event, BlockStored) and event.group_idx in self._groups and not is_full:
            names = [_name(each) for each in event.block_hashes]
            self._held.update(names)
            self._copies.update(names if self._counts else {*names} - self._copies.keys())
            self._changes.update(dict.fromkeys(names, True))

    def keep(self, block_hash: bytes) -> None:
        """Record that a block is in the pool of this instance from now on (engine thread)."""
        with self._lock:
            self._read()
            self._pooled.add(_name(block_hash))

    def drop(self, block_hashes: Sequence[bytes], gone: Sequence[bytes]) -> None:
        """Record that blocks left the pool, and which of them are nowhere here (engine thread)."""
        with self._lock:
            self._read()
            self._pooled.difference_update(map(_name, block_hashes))
            names = [each for each in map(_name, gone) if each in self._held]
            self._held.difference_update(names)
            self._changes.update(dict.fromkeys(names, False))

    def record_request(self, request: Request) -> None:
        """Record the blocks of a request that ends here (engine thread)."""
        count = request.num_computed_tokens // self.block_tokens
        hashes = request.block_hashes[self._scale - 1 : count * self._scale : self._scale]
        if not self.is_on or not hashes:
            return
        num_bytes = NAME_BYTES * len(hashes)
        with self._lock:
            if self._chain_bytes + num_bytes <= _MAX_CHAIN_BYTES:
                self._chain_bytes += num_bytes
                self._ended.append((request.request_id, request.num_prompt_tokens, hashes))

    def shared_tokens(self, request: Request, fetch: Fetch) -> int:
        """Return how many tokens of a request's prompt a fetch is of (engine thread)."""
        count = min(fetch.num_tokens, request.num_prompt_tokens) // self.block_tokens
        return count * self.block_tokens or self.known_tokens(request, fetch.marks)

    def known_tokens(self, request: Request, marks: Sequence[tuple[int, int]]) -> int:
        """Return how many tokens a request begins with that also a prefix with these marks does
        (engine thread). As a mark stands for all tokens before it, the longest that fits counts."""
        for tokens, name in marks:
            end = tokens // self.block_tokens * self._scale
            if 0 < end <= len(request.block_hashes):
                found = int.from_bytes(_name(request.block_hashes[end - 1]), "big")
                if found == name and tokens % self.block_tokens == 0:
                    return tokens
        return 0

    def cut(self, request: Request, num_tokens: int) -> None:
        """Leave of the prompt of a new request, which is text, its first blocks (engine thread)."""
        request.prompt_token_ids = (request.prompt_token_ids or [])[:num_tokens]
        del request._all_token_ids[num_tokens:]
        del request.block_hashes[num_tokens // self.block_tokens * self._scale :]
        request.num_prompt_tokens = num_tokens

    # -- reports, on the agent's thread -----------------------------------------

    def report(self, instance: InstanceId, seq: int, *, is_all: bool) -> CacheReport | None:
        """Return what changed since the last such call, under the number `seq`, and None if nothing
        did; or all that is held, as of that report or later."""
        if is_all:
            with self._lock:
                self._read()
                held = b"".join(self._held)
            return CacheReport(
                instance, seq, self.block_tokens, True, held, tail_blocks=self._tail_blocks
            )
        with self._lock:
            self._read()
            changes, self._changes = self._changes, {}
            ended, self._ended = self._ended, deque(maxlen=_MAX_CHAINS)
            was_cleared, self._was_cleared, self._chain_bytes = self._was_cleared, False, 0
        chains = [
            RequestChain(name, num_tokens, b"".join(map(_name, hashes)))
            for name, num_tokens, hashes in ended
        ]
        if not (changes or chains or was_cleared):
            return None
        added = b"".join(name for name, came in changes.items() if came)
        removed = b"".join(name for name, came in changes.items() if not came)
        return CacheReport(
            instance, seq, self.block_tokens, was_cleared, added, removed, chains, self._tail_blocks
        )


def _name(block_hash: bytes | int) -> bytes:
    """Return the name of a block: the end of its hash, which is all of it where vLLM publishes
    hashes as numbers (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES)."""
    if isinstance(block_hash, int):
        return block_hash.to_bytes(NAME_BYTES, "big")
    return block_hash[-NAME_BYTES:]
