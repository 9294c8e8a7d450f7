"""Prefill side, scheduler half: KV that leaves for other instances.

Owner: the engine thread. Only `cancel` and `abandon` may be called from another thread;
they put a name into a queue that the next step drains.

Blocks that a step completes are pushed at the start of the next one, so they
travel while the next chunk is computed; those of the last chunk right behind its
forward pass, while the first token is sampled. The decode instance is chosen after
the first chunk (paper section 3.3.4), when a predicted length may be known.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vllm_tetri.config import TetriConfig
from vllm_tetri.engine import notes
from vllm_tetri.engine.compat import Request, RequestStatus, SchedulerOutput
from vllm_tetri.engine.step import Open, StepMeta, WorkerReport, Write
from vllm_tetri.handover import (
    MAX_ATTEMPTS,
    Given,
    Prefilled,
    PrefillLeg,
    attempt_name,
    digest_of,
    prefix_of,
)
from vllm_tetri.messages import Opening
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.handover_fit import HandoverFit
from vllm_tetri.types import InstanceId, Prediction, TransferId

logger = logging.getLogger(__name__)

FULL_RETRY_S = 0.02
_NOBODY_ANSWERED = ("TIMEOUT", "PEER_LOST")  # statuses of the transport
# A longer prompt takes so long that opening its second leg early gains nothing.
MAX_EARLY_TOKENS = 16_384

Dispatcher = Callable[[Request, PrefillLeg, int, frozenset[InstanceId], bool], Dispatch | None]
"""(request, leg, bytes, refused, may wait) → the decode instance, or None when nobody can
take it, or nobody has room and it may wait."""


@dataclass(slots=True)
class _Outbound:
    request: Request
    leg: PrefillLeg
    done_s: float = 0.0  # when the prompt was done
    deadline: float = 0.0  # of the whole hand-over, once the prompt is done
    dispatch: Dispatch | None = None
    attempt: int = 0
    is_open: bool = False
    digest: str = ""  # of the prompt, once its router may open the second leg
    pushed_blocks: int = 0
    num_chunks: int = 0
    last_tokens: int = 0  # of its newest chunk
    retry_at: float = 0.0
    gave_up: bool = False
    refused: set[InstanceId] = field(default_factory=set)
    full: set[InstanceId] = field(default_factory=set)  # of those asked in this round
    block_ids: list[int] | None = None  # set when the prompt is done
    all_pushed: bool = False
    is_sent: bool = False
    freeing: bool = False

    @property
    def name(self) -> TransferId:
        return attempt_name(self.leg.transfer, self.attempt)


class Outbox:
    """Requests whose prompt is computed here for another instance."""

    def __init__(
        self,
        *,
        config: TetriConfig,
        block_size: int,
        bytes_per_block: int,
        max_model_len: int,
        block_ids_of: Callable[[str], list[int]],
        dispatch: Dispatcher,
        announce: Callable[[Request, PrefillLeg, Dispatch, Opening | None], None],
        prediction_of: Callable[[Request], Prediction | None],
        note_sent: Callable[[str, bool], None],
    ) -> None:
        self._config = config
        self._block_size = block_size
        self._bytes_per_block = bytes_per_block
        self._max_model_len = max_model_len
        self._block_ids_of = block_ids_of
        self._dispatch = dispatch
        self._announce = announce
        self._prediction_of = prediction_of
        self._note_sent = note_sent
        self._entries: dict[str, _Outbound] = {}
        self._stops: list[str] = []
        self._frees: list[str] = []
        self._notes: list[tuple[str, bytes]] = []
        self._cancelled: queue.SimpleQueue[TransferId] = queue.SimpleQueue()
        self.prefills_done = 0
        self.chunks_done = 0
        self.sent_bytes = 0
        self.handovers = HandoverFit()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def add(self, request: Request, leg: PrefillLeg) -> None:
        """A request with a prefill leg entered the engine: it stops after its
        first token, whatever the client asked for."""
        request.max_tokens = 1
        self._entries[request.request_id] = _Outbound(request, leg)

    def cancel(self, transfer: TransferId) -> None:
        """Nobody waits for this transfer any more (any thread)."""
        if self._entries:  # else no step may come that drains the queue
            self._cancelled.put(transfer)

    def abandon(self, router: str) -> None:
        """A router is gone that could have asked for what is handed over (any thread). A
        prompt that is not done yet ends with its connection."""
        prefix = prefix_of(router)
        for entry in list(self._entries.values()):
            if entry.leg.transfer.startswith(prefix):
                self.cancel(entry.leg.transfer)

    # -- one step ---------------------------------------------------------

    def fill(self, meta: StepMeta, output: SchedulerOutput) -> None:
        """Add this step's orders to `meta`.

        Called after scheduling: `num_computed_tokens` of a request still
        counts only what earlier steps completed.
        """
        self._drain_cancelled()
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id)
        now = time.monotonic()
        for entry in list(self._entries.values()):
            if entry.block_ids is not None:
                self._push_finished(meta, entry, now)
            elif num_tokens := output.num_scheduled_tokens.get(entry.request.request_id):
                entry.last_tokens = num_tokens
                self._push_chunk(meta, entry, now)
                if entry.request.num_computed_tokens + num_tokens >= entry.request.num_tokens:
                    self._push_tail(meta, entry)
                    self._tell_router(entry)
        meta.stops, self._stops = self._stops, []
        meta.frees, self._frees = self._frees, []
        meta.notes = self.take_notes()

    def _push_chunk(self, meta: StepMeta, entry: _Outbound, now: float) -> None:
        is_due = entry.num_chunks > 0 and now >= entry.retry_at
        if is_due and self._choose(entry) and self._config.push == "chunk":
            num_full = entry.request.num_computed_tokens // self._block_size
            if num_full > entry.pushed_blocks:
                block_ids = self._block_ids_of(entry.request.request_id)[:num_full]
                self._push(meta, meta.writes, entry, block_ids, is_last=False)
        entry.num_chunks += 1
        self.chunks_done += 1

    def _push_tail(self, meta: StepMeta, entry: _Outbound) -> None:
        """The last chunk is being computed: the rest leaves behind its forward pass."""
        if entry.dispatch is None or self._config.push != "chunk" or _is_short(entry.request):
            return
        block_ids = self._block_ids_of(entry.request.request_id)
        num_blocks = self._num_blocks(entry.request)
        self._push(meta, meta.tails, entry, block_ids[:num_blocks], is_last=True)
        entry.all_pushed = True

    def _push_finished(self, meta: StepMeta, entry: _Outbound, now: float) -> None:
        if entry.freeing or entry.all_pushed or now < entry.retry_at:
            return
        assert entry.block_ids is not None
        self._push(meta, meta.writes, entry, entry.block_ids, is_last=True)
        entry.all_pushed = True

    def _push(
        self,
        meta: StepMeta,
        writes: list[Write],
        entry: _Outbound,
        block_ids: list[int],
        *,
        is_last: bool,
    ) -> None:
        assert entry.dispatch is not None
        request_id = entry.request.request_id
        if not entry.is_open:
            num_blocks = self._num_blocks(entry.request)
            meta.opens.append(Open(request_id, entry.dispatch.kv_endpoint, entry.name, num_blocks))
            entry.is_open = True
        first = entry.pushed_blocks
        ids = np.asarray(block_ids[first:], dtype=np.int32)
        writes.append(Write(request_id, first, ids, is_last))
        entry.pushed_blocks = len(block_ids)

    def _choose(self, entry: _Outbound) -> bool:
        """Make sure that a decode instance is chosen; False when nobody can."""
        if entry.dispatch is None and not entry.gave_up:
            num_bytes = self._num_blocks(entry.request) * self._bytes_per_block
            refused, may_wait = frozenset(entry.refused), not entry.request.is_finished()
            request, leg = entry.request, entry.leg
            without = refused | entry.full
            entry.dispatch = self._dispatch(request, leg, num_bytes, without, may_wait)
            if entry.dispatch is None and entry.full:
                entry.full.clear()  # all said so: begin again
                entry.dispatch = self._dispatch(request, leg, num_bytes, refused, may_wait)
            if entry.dispatch is not None:
                self._announce(request, leg, entry.dispatch, None)
        return entry.dispatch is not None

    def _tell_router(self, entry: _Outbound) -> None:
        """The last chunk begins: the second leg may find its way meanwhile."""
        token_ids = entry.request.prompt_token_ids or []
        is_worth = len(token_ids) <= MAX_EARLY_TOKENS and not _is_short(entry.request)
        if entry.dispatch is not None and is_worth:
            entry.digest = digest_of(token_ids)
            opening = Opening(entry.name, entry.digest, list(token_ids))
            self._announce(entry.request, entry.leg, entry.dispatch, opening)

    def _num_blocks(self, request: Request) -> int:
        return -(-request.num_prompt_tokens // self._block_size)

    # -- the end of a request ---------------------------------------------

    def finished(self, request: Request, block_ids: list[int]) -> tuple[bool, Prefilled | None]:
        """The request ended. Returns whether its blocks must stay, and what to
        tell the router."""
        entry = self._entries.get(request.request_id)
        if entry is None:
            return False, None
        handed_over = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        is_final = handed_over and _is_final(request, self._max_model_len)
        if handed_over:
            self.prefills_done += 1
            if not is_final and self._choose(entry):
                entry.block_ids = block_ids[: self._num_blocks(request)]
                entry.done_s = time.monotonic()
                entry.deadline = entry.done_s + self._config.transfer_timeout_s
                prefilled = self._prefilled(entry)
                self._tell_decode(entry, prefilled.given)
                if entry.is_sent:
                    self._learn(entry, 0.0)
                    del self._entries[request.request_id]
                return not entry.is_sent, prefilled
        if entry.is_open and not entry.is_sent:
            self._free(entry, lost=False)
            return True, self._prefilled(entry, is_final=True) if is_final else None
        del self._entries[request.request_id]
        return False, self._prefilled(entry, is_final=is_final) if handed_over else None

    def _tell_decode(self, entry: _Outbound, given: Given | None) -> None:
        """The first token follows a second leg that was opened before it existed."""
        if entry.digest and entry.dispatch is not None and given is not None:
            note = notes.encode(notes.FirstTokens(entry.name, given))
            self._notes.append((entry.dispatch.kv_endpoint, note))

    def _prefilled(self, entry: _Outbound, *, is_final: bool = False) -> Prefilled:
        request = entry.request
        dispatch = None if is_final else entry.dispatch
        token_ids = request.prompt_token_ids or ()
        return Prefilled(
            transfer=entry.name,
            decode=dispatch.instance if dispatch else InstanceId(""),
            num_tokens=request.num_prompt_tokens,
            digest=entry.digest or digest_of(token_ids),
            num_chunks=entry.num_chunks,
            num_bytes=self._num_blocks(request) * self._bytes_per_block,
            reason=dispatch.reason if dispatch else "no decode instance can take the KV",
            given=Given(list(request.output_token_ids)) if request.output_token_ids else None,
            is_final=is_final,
            # Long lists are slow in vLLM's answers; the announcement had them already.
            prompt_token_ids=[] if is_final or entry.digest else list(token_ids),
            predicted=self._prediction_of(request),
        )

    def take_notes(self) -> list[tuple[str, bytes]]:
        """(endpoint, note) pairs since the last call."""
        taken, self._notes = self._notes, []
        return taken

    def freeable(self, sent: set[str]) -> set[str]:
        """Nothing reads the blocks of these requests any more; vLLM keeps those of the
        returned ones for us, who need them no longer."""
        found = set()
        now = time.monotonic()
        for request_id in sent & self._entries.keys():
            entry = self._entries[request_id]
            if entry.done_s and not entry.freeing:
                self._learn(entry, now - entry.done_s)
            if entry.dispatch is not None and not entry.freeing:
                self._note_sent(entry.dispatch.kv_endpoint, True)
            if entry.block_ids is None and not entry.freeing:
                entry.is_sent = True  # before vLLM said that it ended
            elif self._notes:
                self._frees.append(request_id)  # an engine without requests leaves no notes
            else:
                found.add(request_id)
        return found

    def _learn(self, entry: _Outbound, seconds: float) -> None:
        if not entry.retry_at:  # else it includes waiting for room
            last_tokens = min(entry.request.num_prompt_tokens, entry.last_tokens)
            self.handovers.learn(last_tokens, seconds)

    def sent(self, request_id: str) -> None:
        """Workers reported that nothing reads the blocks of this request."""
        self._entries.pop(request_id, None)

    # -- what can go wrong --------------------------------------------------

    def report(self, report: WorkerReport) -> None:
        """Transfers failed: try again, elsewhere, or give up."""
        self.sent_bytes += report.sent_bytes
        for request_id, (status, text) in report.failed.items():
            entry = self._entries.get(request_id)
            if entry is not None and not entry.freeing:
                self._failed(entry, status, text)

    def _failed(self, entry: _Outbound, status: str, text: str) -> None:
        now = time.monotonic()
        is_full = status == "FULL"
        if not is_full:
            logger.warning("transfer %s: %s %s", entry.name, status, text)
        if entry.dispatch is not None and status in _NOBODY_ANSWERED:
            self._note_sent(entry.dispatch.kv_endpoint, False)
        if entry.block_ids is not None:
            # Its router already knows the decode instance: there, or nowhere.
            if is_full and now < entry.deadline:
                self._restart(entry, now + FULL_RETRY_S)
            else:
                self._free(entry, lost=True)
            return
        if entry.dispatch is not None:
            (entry.full if is_full else entry.refused).add(entry.dispatch.instance)
            if not is_full:
                entry.gave_up = entry.attempt + 1 >= MAX_ATTEMPTS
                entry.attempt = min(entry.attempt + 1, MAX_ATTEMPTS - 1)
        entry.dispatch = None
        self._restart(entry, now + FULL_RETRY_S)

    def _restart(self, entry: _Outbound, retry_at: float) -> None:
        entry.is_open = entry.all_pushed = entry.is_sent = False
        entry.pushed_blocks = 0
        entry.retry_at = retry_at

    def _preempted(self, request_id: str) -> None:
        """vLLM took the blocks away; the prompt will be computed again."""
        entry = self._entries.get(request_id)
        if entry is None or entry.block_ids is not None:
            return
        if entry.is_open:
            self._stops.append(request_id)
            entry.attempt = min(entry.attempt + 1, MAX_ATTEMPTS - 1)
        entry.dispatch = None
        self._restart(entry, 0.0)

    def _drain_cancelled(self) -> None:
        while not self._cancelled.empty():
            transfer = self._cancelled.get()
            for entry in list(self._entries.values()):
                if entry.leg.transfer == transfer and entry.block_ids is not None:
                    self._free(entry, lost=False)

    def _free(self, entry: _Outbound, *, lost: bool) -> None:
        if entry.freeing:
            return
        entry.freeing = True
        request_id = entry.request.request_id
        if lost and entry.dispatch is not None:
            note = notes.encode(notes.Lost(entry.name))
            self._notes.append((entry.dispatch.kv_endpoint, note))
        self._stops.append(request_id)
        self._frees.append(request_id)


def _is_short(request: Request) -> bool:
    """Whether the client asked for one token only."""
    return request.sampling_params is not None and request.sampling_params.max_tokens == 1


def _is_final(request: Request, max_model_len: int) -> bool:
    """Whether the first token would have ended the answer on one instance, too."""
    return (
        request.status is RequestStatus.FINISHED_STOPPED
        or _is_short(request)
        or request.num_tokens >= max_model_len
    )
