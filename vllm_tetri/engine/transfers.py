"""Transfers of KV as the scheduler half knows them, and requests that exist only for one.

A fetch has two requests. That of the instance which computes a prompt waits for the KV of its
prefix. That of the holder comes with the same prompt, is cut to the prefix, and finds all of it but
the last block in the prefix cache; if it does not, it ends at once and nothing is computed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from vllm_tetri.engine.blocks import IdsByGroup, PromptBlocks
from vllm_tetri.engine.compat import (
    EngineCoreOutput,
    EngineCoreOutputs,
    KVCacheManager,
    KVConnectorOutput,
    Request,
    RequestStatus,
    Scheduler,
)
from vllm_tetri.engine.continuation import Continuations
from vllm_tetri.engine.pacing import StepClock
from vllm_tetri.engine.step import FREED
from vllm_tetri.engine.times import RequestTimes
from vllm_tetri.handover import DecodeParams, Fetch, PrefillParams, attempt_name
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.transport.native import Slot
from vllm_tetri.types import InstanceId, TransferId


class Sending(Protocol):
    """What those that send KV read of the scheduler."""

    requests: dict[str, Request]
    kv_cache_manager: KVCacheManager
    blocks: PromptBlocks
    continuations: Continuations
    clock: StepClock
    num_spec_tokens: int  # most drafts of a decode


@dataclass(slots=True)
class Send:
    """A prompt that is computed here for another instance, or a prefix that one fetches."""

    request: Request
    params: PrefillParams
    num_blocks: int  # of the prompt
    least_cached_tokens: int | None = None  # of a prefix that is fetched; else None
    held_tokens: int = 0  # of the prompt, by the chosen instance: they are not sent
    done_s: float = 0.0  # when the prompt was done
    dispatch: Dispatch | None = None
    attempt: int = 0
    round: int = FREED  # of the newest order to open a transfer; FREED before the first
    num_ended: int = 0  # shards that are done with this round, or with the request if it is freed
    is_open: bool = False
    is_read: bool = False  # workers may read its blocks
    digest: str = ""  # of the prompt, once the router may open the decode request
    pushed_tokens: int = 0  # of which all complete blocks were pushed
    ready_tokens: int = 0  # of which the KV is complete before the step that is scheduled
    num_chunks: int = 0
    cached_tokens: int = 0  # of the prompt, in the prefix cache when it was scheduled first
    last_tokens: int = 0  # of its newest chunk
    by_layer: bool = False  # its last chunk leaves while it is computed
    pushed_s: float = 0.0  # when it was pushed last
    retry_at: float = 0.0
    gave_up: bool = False
    refused: set[InstanceId] = field(default_factory=set)
    full: set[InstanceId] = field(default_factory=set)  # of those tried in this round
    block_ids: IdsByGroup | None = None  # set when the prompt is done
    all_pushed: bool = False
    is_sent: bool = False
    freeing: bool = False

    @property
    def name(self) -> TransferId:
        return attempt_name(self.params.transfer, self.attempt)

    @property
    def awaited_round(self) -> int | None:
        """The round of which reports count; None between two."""
        return FREED if self.freeing else self.round if self.is_open else None

    def restart(self, retry_at: float) -> None:
        """Open the transfer again at the next push, not before a time."""
        self.is_open = self.all_pushed = self.is_sent = False
        self.pushed_tokens, self.retry_at = 0, retry_at

    @property
    def is_fetch(self) -> bool:
        """Whether it is a prefix that another instance fetches."""
        return self.least_cached_tokens is not None


class State(Enum):
    """How far that KV is."""

    WAITING = auto()  # no KV here yet
    TAKEN = auto()  # slot pinned, request not admitted yet
    LOADING = auto()  # ordered from the workers
    DONE = auto()  # loaded, or given up: vLLM computes the rest


@dataclass(slots=True)
class Receive:
    """A request of which KV comes from another instance."""

    request_id: str
    params: DecodeParams | Fetch
    num_tokens: int  # that the transfer is for: of the prompt, or more of an output that moves
    wait_s: float  # until the deadline
    deadline: float
    awaits_output: bool
    state: State = State.WAITING
    slot: Slot | None = None
    local_tokens: int = 0
    is_background: bool = False
    num_loaded: int = 0  # ranks that have executed the load
    has_failed: bool = False  # on a rank
    gone: bool = False  # the request ended while workers were loading

    @property
    def is_move(self) -> bool:
        """Whether an output goes on here that began elsewhere."""
        return isinstance(self.params, DecodeParams) and bool(self.params.kv_tokens)

    @property
    def is_fetch(self) -> bool:
        """Whether the rest of the prompt is computed here."""
        return isinstance(self.params, Fetch)


def end_requests(scheduler: Scheduler, names: Collection[str], outputs: dict[int, Any]) -> None:
    """End waiting requests without output, if any, and add that to the outputs of a step."""
    ended = scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED) if names else ()
    for each in ended:
        output = EngineCoreOutput(each.request_id, [], finish_reason=each.get_finished_reason())
        outputs.setdefault(each.client_index, EngineCoreOutputs()).outputs.append(output)


@contextmanager
def unfenced(scheduler: Scheduler) -> Iterator[None]:
    """Let blocks be free at once that a step under way may still write: loads are ordered behind
    it, and vLLM resets its prefix cache only while none is used."""
    fence, scheduler.processed_step_seq = scheduler.processed_step_seq, scheduler.sched_step_seq
    scheduler._drain_deferred_frees()
    try:
        yield
    finally:
        scheduler.processed_step_seq = fence


def compute_again(
    scheduler: Scheduler, times: RequestTimes, found: KVConnectorOutput | None
) -> None:
    """Preempt running requests with blocks that could not be loaded, and drop their outputs of
    steps under way. vLLM only lowers `num_computed_tokens`, of which its V2 runner takes no notice,
    and goes on with outputs that were computed from these blocks (vLLM's issue 49250). No cache has
    them any more (`Pool.distrust`)."""
    if found is None or not (invalid_ids := found.invalid_block_ids):
        return
    now, ids_of = time.monotonic(), scheduler.kv_cache_manager.get_block_ids
    for request in scheduler.running[::-1]:
        name = request.request_id
        if not invalid_ids.isdisjoint(ids_of(name)[0]):
            scheduler.running.remove(request)
            scheduler._preempt_request(request, now, drop_stale_output=True)
            scheduler.prev_step_scheduled_req_ids.discard(name)  # it may resume at once
            times.begin_anew(name)
            if request.prefill_stats is not None:  # as told when it was first scheduled
                request.prefill_stats.set(request.num_prompt_tokens, 0, 0)
    for request in scheduler.kv_holding_waiting:  # of several with a block vLLM resets the first
        if not invalid_ids.isdisjoint(ids_of(request.request_id)[0]):
            request.num_computed_tokens = 0
