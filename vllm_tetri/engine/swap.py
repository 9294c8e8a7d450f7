"""KV of preempted requests, kept in this instance's own receive arena.

Owner: the engine thread.

vLLM preempts by giving a request's blocks away and computing them again. Here its
leading blocks are copied into an arena slot first, in the step that takes them (their
content is whole until its forward pass), and come back like KV that arrived. A copy
is made only where there is room without evicting anything, within a share of the arena
and within what may be copied in one step; the rest is computed again. Whatever goes
wrong, the answer is "0 tokens", which is what vLLM does by itself.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass

import numpy as np

from vllm_tetri.engine.compat import Request
from vllm_tetri.engine.step import Load, Save, WorkerReport
from vllm_tetri.transport.native import Receiver, Slot

# Of the arena, at most: the rest is for KV that arrives.
ARENA_SHARE = 0.5
# No peer can guess it, so none can take a name of ours.
_PREFIX = f"tetri-swap-{secrets.token_hex(8)}-"


@dataclass(slots=True)
class _Kept:
    request_id: str
    slot: Slot
    num_tokens: int
    num_ranks: int = 0  # that have executed the order under way
    is_saved: bool = False
    is_lost: bool = False  # a rank could not save it
    is_loading: bool = False
    local_tokens: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether workers read or write the slot."""
        return self.is_loading or not self.is_saved


class Swap:
    """Preempted requests of one instance whose KV waits for their return.

    Args:
        receiver: Owner of the arena.
        block_size: Tokens per block.
        block_bytes: One block of one rank, in bytes.
        num_ranks: Workers of this instance.
        arena_bytes: Size of the arena.
        budget_bytes: Most that one step copies out; what comes back is no more.

    Attributes:
        swapped_out: Preempted requests whose KV was kept, at least a part of it.
        swapped_in: Those whose KV was loaded again.
        recomputed: Preempted requests whose KV was not kept, or lost.
    """

    def __init__(
        self,
        *,
        receiver: Receiver,
        block_size: int,
        block_bytes: int,
        num_ranks: int,
        arena_bytes: int,
        budget_bytes: int,
    ) -> None:
        self._receiver = receiver
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._num_ranks = num_ranks
        self._budget_blocks = budget_bytes // (block_bytes * num_ranks)
        self._room_blocks = int(arena_bytes * ARENA_SHARE) // (block_bytes * num_ranks)
        self._kept: dict[str, _Kept] = {}  # request → its newest copy
        self._slots: dict[str, _Kept] = {}  # name of a slot → its content, newest or not
        self._saves: list[Save] = []
        self._loads: list[Load] = []
        self._numbers = itertools.count()
        self.swapped_out = 0
        self.swapped_in = 0
        self.recomputed = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    # -- out ----------------------------------------------------------------------

    def keep(self, request: Request, block_ids: list[int]) -> None:
        """A request is about to lose its blocks; order a copy of what is computed.

        With asynchronous scheduling the last step may still be computing: the copy is
        made behind it. Tokens that are not known yet do not count.
        """
        self.forget(request)  # a copy that it came back from, not yet reported
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        needed_blocks = -(-num_tokens // self._block_size)
        ordered_blocks = sum(len(save.block_ids) for save in self._saves)
        num_blocks = min(needed_blocks, self._budget_blocks - ordered_blocks, self._room_blocks)
        slot = None
        # It would not be loaded where vLLM may not take anything that is there.
        if num_blocks > 0 and not request.skip_reading_prefix_cache:
            name = f"{_PREFIX}{next(self._numbers)}"
            slot = self._receiver.claim(name, num_blocks, self._block_bytes, self._num_ranks)
        if slot is None:
            self.recomputed += 1
            return
        self._room_blocks -= num_blocks
        kept = _Kept(request.request_id, slot, min(num_tokens, num_blocks * self._block_size))
        self._kept[request.request_id] = self._slots[slot.transfer] = kept
        self._saves.append(
            Save(
                slot=slot.transfer,
                segment=self._receiver.segment,
                offset=slot.offset,
                rank_bytes=slot.rank_bytes,
                block_ids=np.asarray(block_ids[:num_blocks], dtype=np.int32),
            )
        )
        self.swapped_out += 1

    def take_saves(self) -> list[Save]:
        """Copies ordered since the last call."""
        saves, self._saves = self._saves, []
        return saves

    # -- in -----------------------------------------------------------------------

    def is_here(self, request: Request) -> bool:
        """Whether all that was computed of a preempted request can be loaded again."""
        kept = self._kept.get(request.request_id)
        return kept is not None and not kept.is_busy and kept.num_tokens >= request.num_tokens - 1

    def match(self, request: Request, num_local_tokens: int) -> int | None:
        """How many tokens beyond the local prefix hit can be loaded; None: not known yet."""
        kept = self._kept[request.request_id]
        if kept.is_busy:
            return None
        kept.local_tokens = num_local_tokens
        return max(0, min(kept.num_tokens, request.num_tokens - 1) - num_local_tokens)

    def admitted(self, request: Request, block_ids: list[int], num_external: int) -> None:
        """vLLM gave the request blocks again; order the load."""
        kept = self._kept.get(request.request_id)
        if kept is None or kept.is_busy:
            return
        if num_external == 0:  # all of it is still in the prefix cache
            self.forget(request)
            return
        load = Load.of(
            kept.slot,
            self._receiver.segment,
            request.request_id,
            block_ids,
            first_block=kept.local_tokens // self._block_size,
            is_swapped=True,
        )
        self._loads.append(load)
        kept.is_loading, kept.num_ranks = True, 0

    def take_loads(self) -> list[Load]:
        """Loads ordered since the last call."""
        loads, self._loads = self._loads, []
        return loads

    # -- the end of a copy --------------------------------------------------------

    def report(self, report: WorkerReport) -> None:
        """Workers executed orders."""
        for name, num_ranks in report.saved.items():
            self._executed(name, num_ranks)
        for name, num_ranks in report.unsaved.items():
            self._slots[name].is_lost = True
            self._executed(name, num_ranks)
        for name, num_ranks in report.restored.items():
            self._executed(name, num_ranks)

    def _executed(self, name: str, num_ranks: int) -> None:
        kept = self._slots[name]
        kept.num_ranks += num_ranks
        if kept.num_ranks < self._num_ranks:
            return
        is_wanted = self._kept.get(kept.request_id) is kept
        if not kept.is_saved and is_wanted and not kept.is_lost:
            kept.is_saved = True
            return
        if kept.is_loading:
            self.swapped_in += 1
        else:
            self.recomputed += is_wanted
        if is_wanted:
            del self._kept[kept.request_id]
        self._release(kept)

    def forget(self, request: Request) -> None:
        """The request needs its copy no more; its slot is free as soon as no worker is
        at it."""
        kept = self._kept.pop(request.request_id, None)
        if kept is not None and not kept.is_busy:
            self._release(kept)

    def forget_all(self) -> None:
        """What is kept is valid no more: the model changed."""
        for kept in list(self._kept.values()):
            del self._kept[kept.request_id]
            self.recomputed += not kept.is_loading
            if not kept.is_busy:
                self._release(kept)

    def _release(self, kept: _Kept) -> None:
        del self._slots[kept.slot.transfer]
        self._room_blocks += kept.slot.num_blocks
        self._receiver.release(kept.slot.transfer)
