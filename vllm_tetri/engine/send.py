"""Prefill side of KV transfer, scheduler half: prompts computed here for another instance.

Owner: the engine thread. Only `cancel` and `abandon` may be called from another thread;
they put a name into a queue that the next step drains.

Blocks that a step completes are pushed at the start of the next one, so they travel while
the next chunk is computed; those of the last chunk right after its forward pass, while the
first token is sampled, or with --tetri-push layer during it, each layer as it is done (Splitwise).
The decode instance is chosen after the first chunk (paper section 3.3.4), when a predicted length
may be known, or during it for layers. What that one holds of the prompt already, in its prefix
cache, is not sent.
"""

from __future__ import annotations

import logging
import queue
import time
from itertools import chain

from vllm_tetri.config import TetriConfig
from vllm_tetri.engine.blocks import IdsByGroup
from vllm_tetri.engine.compat import COMPLETE, Request, SchedulerOutput
from vllm_tetri.engine.dispatcher import Dispatcher, is_short
from vllm_tetri.engine.identity import prompt_digest
from vllm_tetri.engine.step import (
    FirstTokens,
    KVLayout,
    Lost,
    Open,
    StepMeta,
    WorkerReport,
    Write,
    encode_note,
)
from vllm_tetri.engine.transfers import Send, Sending
from vllm_tetri.handover import (
    MAX_ATTEMPTS,
    Fetch,
    Prefilled,
    PrefillParams,
    PriorOutput,
    prefix_of,
)
from vllm_tetri.messages import PrefillEnding
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.step_cost import HandoverFit
from vllm_tetri.types import InstanceId, RequestId, TransferId

logger = logging.getLogger(__name__)

FULL_RETRY_S = 0.02
_UNREACHABLE = ("TIMEOUT", "PEER_LOST")  # statuses of the transport
# A longer prompt takes so much time that opening its decode request early gains nothing.
MAX_EARLY_TOKENS = 16_384


class SendSide:
    """Requests whose prompt is computed here for another instance."""

    def __init__(
        self, config: TetriConfig, layout: KVLayout, scheduler: Sending, dispatcher: Dispatcher
    ) -> None:
        self._config, self._layout, self._dispatcher = config, layout, dispatcher
        self._blocks, self._kv_cache = scheduler.blocks, scheduler.kv_cache_manager
        self._sends: dict[str, Send] = {}
        self._stops, self._frees = list[str](), list[str]()
        self._notes: list[tuple[str, bytes]] = []
        self._cancelled: queue.SimpleQueue[TransferId] = queue.SimpleQueue()
        self.refused: set[str] = set()  # requests of fetches that are to end, as they wait
        self.prefills_done = self.chunks_done = self.sent_bytes = self.kept_bytes = 0
        self.handovers = HandoverFit()

    def __len__(self) -> int:
        return len(self._sends)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sends

    def add(self, request: Request, params: PrefillParams) -> None:
        """Add a prefill request that entered the engine: it stops after its first token,
        whatever the client wants."""
        request.max_tokens = 1
        num_blocks = self._blocks.count(request.num_prompt_tokens)
        self._sends[request.request_id] = Send(request, params, num_blocks)

    def add_fetch(self, request: Request, params: Fetch, *, is_known: bool) -> None:
        """Add a request for the KV of a prefix, to which its prompt was cut if it `is_known`."""
        own = PrefillParams(params.transfer, RequestId(""))
        self.add(request, own)
        send, tokens = self._sends[request.request_id], request.num_prompt_tokens
        send.dispatch, send.gave_up = Dispatch(params.target, params.kv_endpoint, "fetches"), True
        send.held_tokens = params.held_tokens
        send.least_cached_tokens = self._blocks.hit_tokens(tokens, tokens) if is_known else tokens

    def fetch_tokens(self, request: Request) -> int:
        """Return what a request for the KV of a prefix computes; 0 if it is another request."""
        send = self._sends.get(request.request_id)
        if send is None or send.least_cached_tokens is None:
            return 0
        return max(1, request.num_prompt_tokens - send.least_cached_tokens)

    def refuses(self, request_id: str, cached_tokens: int) -> bool:
        """Whether a request for a prefix cannot have it: this instance holds too little of it."""
        send = self._sends.get(request_id)
        if send is not None and cached_tokens < (send.least_cached_tokens or 0):
            self.refused.add(request_id)
        return request_id in self.refused

    def cancel(self, transfer: TransferId) -> None:
        """Stop a transfer whose request was cancelled (any thread)."""
        if self._sends:  # else no step may come that drains the queue
            self._cancelled.put(transfer)

    def abandon(self, router: str) -> None:
        """Stop the transfers of a router that is gone (any thread). A prompt that is not
        done yet ends with its connection."""
        prefix = prefix_of(router)
        for send in list(self._sends.values()):
            if send.params.transfer.startswith(prefix):
                self.cancel(send.params.transfer)

    # -- one step ---------------------------------------------------------

    def fill(self, meta: StepMeta, output: SchedulerOutput) -> None:
        """Add this step's orders to `meta`, after scheduling: `num_computed_tokens` still counts
        only what earlier steps completed."""
        self._drain_cancelled()
        if not (self._sends or self._stops or self._frees or self._notes):
            return
        for request_id in output.preempted_req_ids or ():
            self._preempt(request_id)
        now = time.monotonic()
        late_s = now - self._config.transfer_timeout_s / 2
        for send in list(self._sends.values()):
            if send.block_ids is not None:
                if not (send.freeing or send.all_pushed) and now >= send.retry_at:
                    self._push(meta, meta.writes, send, send.block_ids)
            elif num_tokens := output.num_scheduled_tokens.get(send.request.request_id):
                self._push_chunk(meta, send, num_tokens, now)
            elif send.is_open and not send.freeing and send.pushed_s < late_s:
                self._start_anew(send)  # it pauses, and its receiver would take it for broken
        meta.stops, meta.frees, self._stops, self._frees = self._stops, self._frees, [], []
        meta.notes = self.take_notes()

    def _push_chunk(self, meta: StepMeta, send: Send, num_tokens: int, now: float) -> None:
        """Push what earlier chunks completed, and after the last one the rest of the prompt."""
        request, push = send.request, self._config.push
        block_ids = self._kv_cache.get_block_ids(request.request_id)
        ends = request.num_computed_tokens + num_tokens >= request.num_tokens
        may_pay = push == "layer" or (push == "auto" and self.handovers.pays_by_layer(num_tokens))
        send.by_layer = ends and may_pay and not is_short(request)
        is_due = (send.ready_tokens > 0 or send.by_layer) and now >= send.retry_at
        if is_due and self._choose(send) and push != "request":
            ready_tokens = min(send.ready_tokens, request.num_computed_tokens)
            self._push(meta, meta.writes, send, block_ids, ready_tokens)
        # Not yet what it found in the prefix cache: this very step may compute or load it.
        send.ready_tokens = request.num_computed_tokens + num_tokens
        if not send.num_chunks and not request.num_preemptions:
            send.cached_tokens = request.num_computed_tokens
        send.num_chunks, send.last_tokens = send.num_chunks + 1, num_tokens
        self.chunks_done += 1
        if ends:
            if send.dispatch is not None and push != "request" and not is_short(request):
                self._push(meta, meta.tails, send, block_ids)
            self._announce_ending(send)

    def _push(
        self,
        meta: StepMeta,
        writes: list[Write],
        send: Send,
        ids: IdsByGroup,
        until: int | None = None,
    ) -> None:
        """Push what was not pushed before of the first `until` tokens, or of the whole prompt."""
        assert send.dispatch is not None
        request_id, num_tokens = send.request.request_id, send.request.num_prompt_tokens
        first, pushed = send.held_tokens, send.pushed_tokens
        runs = self._blocks.runs(num_tokens, ids, first=first, since=pushed, until=until)
        if until is not None and not runs:
            return
        if not send.is_open:
            send.is_open, send.round, send.num_ended = True, send.round + 1, 0
            send.is_read = True
            endpoint = send.dispatch.kv_endpoint
            num_blocks = self._blocks.count(num_tokens, first)
            meta.opens.append(Open(request_id, send.round, endpoint, send.name, num_blocks))
        by_layer = send.by_layer and writes is meta.tails
        writes.append(Write(request_id, runs, is_last=until is None, by_layer=by_layer))
        send.pushed_tokens, send.all_pushed = until or num_tokens, until is None
        send.pushed_s = time.monotonic()

    def _choose(self, send: Send) -> bool:
        """Make sure that a decode instance is chosen; False when no instance can take it."""
        if send.dispatch is None and not send.gave_up:
            request, params = send.request, send.params
            num_bytes, choose = send.num_blocks * self._layout.block_bytes, self._dispatcher.choose
            refused, full = frozenset(send.refused), frozenset(send.full)
            send.dispatch = choose(request, params, num_bytes, refused | full)
            if send.dispatch is None and full:
                send.full.clear()  # all were full: try them again
                send.dispatch = choose(request, params, num_bytes, refused)
            if send.dispatch is not None:
                reads_cache = not request.skip_reading_prefix_cache  # there as here
                is_sure = reads_cache and send.dispatch.keeps_cache
                held = params.held.get(send.dispatch.instance, 0) if is_sure else 0
                send.held_tokens = self._blocks.hit_tokens(request.num_prompt_tokens, held)
                self._dispatcher.announce(request, params, send.dispatch)
        return send.dispatch is not None

    def _announce_ending(self, send: Send) -> None:
        """Let the router open the decode request while the last chunk is computed."""
        token_ids = send.request.prompt_token_ids or []
        is_worth = len(token_ids) <= MAX_EARLY_TOKENS and not is_short(send.request)
        if send.dispatch is not None and is_worth and not send.is_fetch:
            send.digest = prompt_digest(send.request)
            counted = send.cached_tokens, send.held_tokens
            ending = PrefillEnding(send.name, send.digest, list(token_ids), *counted)
            self._dispatcher.announce(send.request, send.params, send.dispatch, ending)

    # -- the end of a request ---------------------------------------------

    def finish(self, request: Request, block_ids: IdsByGroup) -> tuple[bool, Prefilled | None]:
        """Record the end of a request. Return whether vLLM must keep its blocks, and what the
        response tells the router."""
        send = self._sends.get(request.request_id)
        self.refused.discard(request.request_id)
        if send is None:
            return False, None
        handed_over = request.status in COMPLETE
        is_whole = handed_over and not send.is_fetch and self._dispatcher.is_final(request)
        if handed_over:
            self.prefills_done += not send.is_fetch
            if not is_whole and self._choose(send):
                send.block_ids = block_ids
                send.done_s = time.monotonic()
                prefilled = self._prefilled(send)
                if send.digest and send.dispatch is not None and prefilled.prior_output is not None:
                    # To a decode request that was opened before the first token existed.
                    note = encode_note(FirstTokens(send.name, prefilled.prior_output))
                    self._notes.append((send.dispatch.kv_endpoint, note))
                if send.is_sent:
                    self._learn(send, 0.0)
                    del self._sends[request.request_id]
                return not send.is_sent, prefilled
        alone = self._prefilled(send, is_final=is_whole) if handed_over else None
        if send.is_read and not send.is_sent:
            self._free(send, lost=False)
            return True, alone
        del self._sends[request.request_id]
        return False, alone

    def _prefilled(self, send: Send, *, is_final: bool = False) -> Prefilled:
        request = send.request
        dispatch = None if is_final else send.dispatch
        token_ids, output = request.prompt_token_ids or (), list(request.output_token_ids)
        return Prefilled(
            transfer=send.name,
            decode=dispatch.instance if dispatch else InstanceId(""),
            num_tokens=request.num_prompt_tokens,
            digest=send.digest or prompt_digest(request),
            reason=dispatch.reason if dispatch else "no decode instance can take the KV",
            prior_output=PriorOutput(output) if output else None,
            is_final=is_final,
            # Long lists are slow in vLLM's responses; the announcement carried them already.
            prompt_token_ids=[] if is_final or send.digest or send.is_fetch else list(token_ids),
            predicted=self._dispatcher.predictions.get(request.request_id),
            cached_tokens=send.cached_tokens,
            held_tokens=send.held_tokens if dispatch else 0,
        )

    def take_notes(self) -> list[tuple[str, bytes]]:
        """Return the (endpoint, note) pairs since the last call."""
        taken, self._notes = self._notes, []
        return taken

    def take_freeable(self, report: WorkerReport) -> set[str]:
        """Return the requests whose blocks vLLM may free now: every shard is done with them."""
        found, now = set(), time.monotonic()
        for (request_id, ended), num_ranks in report.ended.items():
            send = self._sends.get(request_id)
            if send is None or ended != send.awaited_round:
                continue
            send.num_ended += num_ranks
            if send.num_ended < self._layout.shards.num_parts:
                continue
            if not send.freeing:
                if send.done_s:
                    self._learn(send, now - send.done_s)
                if send.dispatch is not None:
                    self._dispatcher.policy.record_transfer(send.dispatch, now, was_reached=True)
                sent = self._blocks.count(send.request.num_prompt_tokens, send.held_tokens)
                self.kept_bytes += (send.num_blocks - sent) * self._layout.block_bytes
            if send.block_ids is None and not send.freeing:
                send.is_sent = True  # before vLLM reported that it ended
            else:
                found.add(request_id)
                del self._sends[request_id]
        return found

    def _learn(self, send: Send, seconds: float) -> None:
        if not (send.retry_at or send.by_layer):  # else it includes waiting, or not a last chunk
            tokens = send.request.num_prompt_tokens - send.held_tokens
            # With an only chunk, what the prefix cache had travels as well.
            is_all = send.is_fetch or send.num_chunks == 1 or self._config.push == "request"
            self.handovers.learn(tokens if is_all else min(tokens, send.last_tokens), seconds)

    # -- what can go wrong --------------------------------------------------

    def report(self, report: WorkerReport) -> None:
        """Handle failed transfers: try again, try another instance, or give up."""
        self.sent_bytes += report.sent_bytes
        for request_id, (failed, status, text) in report.failed.items():
            send = self._sends.get(request_id)
            # Another rank may have failed before, in the same round.
            if send is not None and not send.freeing and failed == send.awaited_round:
                self._fail(send, status, text)

    def _fail(self, send: Send, status: str, text: str) -> None:
        now = time.monotonic()
        is_full, is_unwanted = status == "FULL", status == "CANCELLED"
        if is_unwanted:  # as of a client that left
            logger.info("KV transfer %s ends: %s", send.name, text)
            send.gave_up = True
        elif not is_full:
            decode = send.dispatch.instance if send.dispatch is not None else "unknown"
            logger.warning(
                "KV transfer %s to %s failed: %s %s. Trying again, else the decode instance "
                "computes the prompt. If it repeats, check that %s is up and reachable.",
                send.name, decode, status, text, decode,
            )  # fmt: skip
        if send.dispatch is not None and status in _UNREACHABLE:
            self._dispatcher.policy.record_transfer(send.dispatch, now, was_reached=False)
        if send.block_ids is not None:
            # Its router already knows the decode instance: that one, or none.
            if is_full and now < send.done_s + self._config.transfer_timeout_s:
                send.restart(now + FULL_RETRY_S)
            else:
                self._free(send, lost=not is_unwanted)
            return
        if send.dispatch is not None:
            (send.full if is_full else send.refused).add(send.dispatch.instance)
            if not is_full:
                send.gave_up |= send.attempt + 1 >= MAX_ATTEMPTS
                send.attempt = min(send.attempt + 1, MAX_ATTEMPTS - 1)
        send.dispatch = None
        send.restart(now + FULL_RETRY_S)

    def _preempt(self, request_id: str) -> None:
        """Start anew with a prompt that lost its blocks and will be computed again."""
        send = self._sends.get(request_id)
        if send is not None and send.block_ids is None and not send.freeing:
            self._start_anew(send)
            send.is_read, send.ready_tokens = False, 0

    def _start_anew(self, send: Send) -> None:
        """Take a transfer back, if there is one; the next chunk chooses an instance again."""
        if send.round:
            self._stops.append(send.request.request_id)
            send.attempt = min(send.attempt + 1, MAX_ATTEMPTS - 1)
        send.dispatch = None
        send.restart(0.0)

    def distrust(self, block_ids: set[int]) -> None:
        """Prepare prompts of which a load failed to be sent anew, once `compute_again` has
        preempted them: what a step computed after it is wrong, and may have been sent."""
        if not block_ids:
            return
        for request_id, send in self._sends.items():
            groups = self._kv_cache.get_block_ids(request_id) if send.block_ids is None else ()
            if not block_ids.isdisjoint(chain.from_iterable(groups)):
                # The last name of an attempt may have wrong KV by now.
                send.gave_up |= send.round > 0 and send.attempt + 1 >= MAX_ATTEMPTS
                send.cached_tokens = 0

    def stop_unfinished(self) -> None:
        """Hand over no prompt that is not done yet: weights may change in the middle of it."""
        for request_id, send in self._sends.items():
            self._preempt(request_id)
            send.gave_up = send.gave_up or send.block_ids is None

    def _drain_cancelled(self) -> None:
        while not self._cancelled.empty():
            transfer = self._cancelled.get()
            for send in list(self._sends.values()):
                if send.params.transfer == transfer and send.block_ids is not None:
                    self._free(send, lost=False)

    def _free(self, send: Send, *, lost: bool) -> None:
        if send.freeing:
            return
        if lost and send.dispatch is not None:
            self._notes.append((send.dispatch.kv_endpoint, encode_note(Lost(send.name))))
        self._stops.append(send.request.request_id)
        send.freeing, send.num_ended = True, 0
        self._frees.append(send.request.request_id)
