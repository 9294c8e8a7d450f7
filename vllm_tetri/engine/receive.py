"""Decode side of KV transfer, scheduler half: KV received for requests of this instance.

Owner: the engine thread. Methods that may be called from another thread say so; they use
only the receiver, which is thread-safe, and what is remembered of transfers under a lock.

A request waits (vLLM asks again every step) until its KV has arrived. The KV is loaded in
the step that admits the request, or in the background if it is large and other requests
are decoding. The arena slot is released when every rank reports the load. On any failure
`match` returns 0 tokens: vLLM then computes the prompt here, which is slower, never wrong.
What the prefix cache had of a prompt whose transfer begins behind it is pinned meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from threading import Lock

from cachetools import TTLCache

from vllm_tetri.config import TetriConfig
from vllm_tetri.engine.blocks import Pins, PromptBlocks
from vllm_tetri.engine.compat import Request
from vllm_tetri.engine.pool import Pool
from vllm_tetri.engine.step import KVLayout, Load, Lost, WorkerReport, decode_note
from vllm_tetri.engine.transfers import Receive, State
from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import DecodeParams, Fetch, PriorOutput, attempt_names, prefix_of
from vllm_tetri.transport.native import Receiver, Slot, SlotState
from vllm_tetri.types import TransferId

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 4096


class ReceiveSide:
    """Requests of this instance of whose prompt another one computed all, or a prefix, or more."""

    def __init__(
        self,
        receiver: Receiver,
        layout: KVLayout,
        blocks: PromptBlocks,
        pins: Pins,
        pool: Pool,
        config: TetriConfig,
    ) -> None:
        self._receiver, self._layout = receiver, layout
        self._blocks, self._pins, self._pool = blocks, pins, pool
        self._timeout_s = timeout_s = config.transfer_timeout_s
        self._entries: dict[str, Receive] = {}
        self._users: dict[str, set[str]] = {}  # transfer → requests that may load from it
        self._slots: dict[str, Slot] = {}  # pinned
        self._lock = Lock()  # guards the next fields, by transfer
        self.outputs = TTLCache[str, PriorOutput](MAX_REMEMBERED, timeout_s)  # not taken yet
        self._lost = TTLCache[str, None](MAX_REMEMBERED, timeout_s)
        self._consumed = TTLCache[str, None](MAX_REMEMBERED, timeout_s)
        self._unwanted = TTLCache[str, None](MAX_REMEMBERED, timeout_s)
        self._loads, self.is_closed = list[Load](), False
        self.unmoved: set[str] = set()  # requests that are to end, since they did not move here
        self.loads_done = self.loads_failed = self.loaded_bytes = self.num_gone = 0
        self.fetched_tokens = self.fetches_failed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, params: DecodeParams | Fetch, num_tokens: int) -> None:
        """Add a request that entered the engine. The KV comes of so many tokens of its prompt: all,
        or the prefix that it fetches, 0 if it has no such prefix."""
        if self.is_closed:
            return
        name, wait_s = request.request_id, self._timeout_s
        if isinstance(params, Fetch):
            wait_s = min(wait_s, params.wait_s)
        is_early, deadline = getattr(params, "is_early", False), time.monotonic() + wait_s
        self._entries[name] = Receive(name, params, num_tokens, wait_s, deadline, is_early)
        self._users.setdefault(params.transfer, set()).add(name)
        if params.held_tokens:
            self._pool.reach(request, self._pins.hold(request), params.held_tokens, num_tokens)

    def refuse(self, request: Request, params: DecodeParams) -> None:
        """Drop what was handed over for a decode request that enters the engine with another
        prompt than the prefill instance had: tokens or media differ."""
        logger.warning(
            "KV transfer %s belongs to another prompt than request %s (%d tokens), which this "
            "instance computes itself. If it repeats, check that media addresses always return "
            "the same bytes and that all instances run the same version of vllm-tetri.",
            params.transfer or "(none)", request.request_id, request.num_prompt_tokens,
        )  # fmt: skip
        self.loads_failed += 1
        self._receiver.cancel(params.transfer)
        self._ignore(params.transfer)

    def knows(self, request_id: str) -> bool:
        """Whether all KV of a request's prompt was to come from another instance."""
        entry = self._entries.get(request_id)
        return entry is not None and not entry.is_fetch

    def is_fetching(self, request_id: str) -> bool:
        """Whether a prompt has to wait for the prefix that it fetches."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.is_fetch and entry.state is State.WAITING

    def arriving_tokens(self, request_id: str) -> int:
        """Return of how many tokens of a prompt the KV is on its way, or here but not loaded."""
        entry = self._entries.get(request_id)  # the agent's thread asks, too
        return entry.num_tokens if entry is not None and entry.state is not State.DONE else 0

    def is_here(self, request_id: str) -> bool:
        """Whether a request's KV has arrived and is pinned (`pin_arrived`)."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.state is State.TAKEN

    @property
    def num_waiting(self) -> int:
        """Requests whose KV has not arrived."""
        return sum(entry.state is State.WAITING for entry in self._entries.values())

    def wait(self, timeout_s: float) -> None:
        """Sleep until KV, a note or a failure comes (GIL released), at most `timeout_s`."""
        self._receiver.wait(timeout_s)

    def pin_arrived(self, requests: Mapping[str, Request]) -> None:
        """Pin KV that has arrived, so that it does not expire while its request waits."""
        for entry in self._entries.values():
            if entry.state is State.WAITING:
                self._try_take(requests[entry.request_id], entry)

    def take_outputs(self) -> list[tuple[str, PriorOutput]]:
        """Return first tokens that arrived after their request, by request id, each once."""
        self._drain_notes()
        found = []
        for entry in self._entries.values():
            if entry.awaits_output and entry.params.transfer in self.outputs:
                entry.awaits_output = False
                with self._lock:
                    prior_output = self.outputs.pop(entry.params.transfer, None)
                if prior_output is not None:
                    found.append((entry.request_id, prior_output))
        return found

    def match(
        self, request: Request, num_local_tokens: int, *, is_busy: bool
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond the local prefix hit can be loaded (None: not known
        yet, ask again), and whether in the background: a large load while others decode.

        Without a first token from the prefill instance, the last prompt token is left to this
        engine, which samples the first token from it.
        """
        entry = self._entries.get(request.request_id)
        if entry is None or entry.state is State.DONE:
            return 0, False
        if entry.state is State.LOADING:
            return None, False  # preempted before its load was reported
        if entry.state is State.WAITING and not self._try_take(request, entry):
            return (None if entry.state is State.WAITING else 0), False
        total_tokens = min(request.num_tokens - 1, entry.num_tokens)
        num_tokens = total_tokens - num_local_tokens
        held_tokens = entry.params.held_tokens
        held_tokens = self._pool.reach(request, num_local_tokens, held_tokens, total_tokens)
        if is_gone := held_tokens < entry.params.held_tokens:
            self.num_gone += 1
            self.fetches_failed += entry.is_fetch
            logger.info(
                "request %s: of %d prompt tokens that were not sent, since this instance held "
                "their KV, its caches have %d left. It computes the others and all that "
                "follows. If it repeats, give it more memory for KV.",
                request.request_id, entry.params.held_tokens, held_tokens,
            )  # fmt: skip
        if is_gone or num_tokens <= 0 or not self._blocks.holds(entry.num_tokens, total_tokens):
            self._give_back(entry)
            return 0, False
        entry.local_tokens = num_local_tokens
        num_blocks = self._blocks.count(entry.num_tokens, num_local_tokens)
        entry.is_background = self._pool.budget.is_background(num_blocks, is_busy=is_busy)
        return num_tokens, entry.is_background

    def _try_take(self, request: Request, entry: Receive) -> bool:
        name = entry.params.transfer
        is_due = not entry.awaits_output
        slot = (self._slots.get(name) or self._receiver.take(name)) if is_due else None
        if slot is None:
            self._check_lost(name, entry)
            return False
        self._slots[name] = slot
        entry.slot, entry.state = slot, State.TAKEN
        num_blocks = self._blocks.count(entry.num_tokens, entry.params.held_tokens)
        sizes = slot.num_blocks, slot.rank_bytes * slot.num_ranks
        is_ours = sizes == (num_blocks, num_blocks * self._layout.block_bytes)
        if not (is_ours and self._layout.shards.can_read(slot.num_ranks)):
            logger.warning(
                "KV transfer %s (%d blocks) holds another prompt than request %s (%d tokens). "
                "This instance computes the prompt itself. If it repeats, check that all "
                "instances and routers run the same version of vllm-tetri.",
                name, slot.num_blocks, request.request_id, entry.num_tokens,
            )  # fmt: skip
            self._fail(entry)
            return False
        return True

    def _check_lost(self, name: str, entry: Receive) -> None:
        self._drain_notes()
        found = self._receiver.find(name)
        if name in self._consumed:
            # Another choice of the same request loaded it; all but the last block is in the
            # prefix cache.
            self._give_back(entry)
            return
        if not entry.num_tokens:
            reason = "the prompt has no such prefix"
        elif name in self._lost:
            reason = "its sender gave up or is unresponsive"
        elif found is not None and found.state is SlotState.FAILED:
            reason = found.error or "failed"
        elif time.monotonic() > entry.deadline:
            option = "" if entry.is_fetch else " (--tetri-transfer-timeout)"
            reason = f"no KV arrived within {entry.wait_s:g} s{option}"
        else:
            return
        if entry.is_move:  # it goes on where it was
            self.unmoved.add(entry.request_id)
            return
        logger.log(
            logging.INFO if entry.is_fetch else logging.WARNING,
            "KV transfer %s: %s. This instance computes the prompt of request %s itself.",
            name, reason, entry.request_id,
        )  # fmt: skip
        self._receiver.cancel(name)
        self._fail(entry)

    def _fail(self, entry: Receive) -> None:
        self.fetches_failed += entry.is_fetch
        self.loads_failed += not entry.is_fetch
        self._give_back(entry)

    def _drain_notes(self) -> None:
        while (message := self._receiver.receive()) is not None:
            try:
                note = decode_note(message)
            except ProtocolError as error:
                logger.warning(
                    "dropped a malformed message of the KV transport: %s. If it repeats, check "
                    "that all instances run the same version of vllm-tetri.",
                    error,
                )
                continue
            with self._lock:
                if isinstance(note, Lost):
                    self._lost[note.transfer] = None
                elif note.transfer not in self._unwanted:
                    self.outputs[note.transfer] = note.prior_output

    def admitted(
        self, request: Request, block_ids: tuple[list[int], ...], num_external: int
    ) -> None:
        """Order the load into the blocks that vLLM allocated, or release the slot."""
        self._pins.release(request.request_id)
        entry = self._entries.get(request.request_id)
        params, stats = entry.params if entry is not None else None, request.prefill_stats
        if isinstance(params, DecodeParams) and stats is not None:
            stats.num_cached_tokens = params.cached_tokens  # KV that came is no cache hit
        if entry is None or entry.slot is None or entry.state is not State.TAKEN:
            return
        if num_external == 0:
            self._give_back(entry)
            return
        slot, where = entry.slot, {"first": entry.params.held_tokens, "since": entry.local_tokens}
        self._loads.append(
            Load(
                request_id=request.request_id,
                segment=self._receiver.segment,
                offset=slot.offset,
                part_bytes=slot.rank_bytes,
                num_parts=slot.num_ranks,
                runs=self._blocks.runs(entry.num_tokens, block_ids, **where),
                is_background=entry.is_background,
                pool=self._pool.take(request.request_id, block_ids),
            )
        )
        entry.state = State.LOADING

    def take_loads(self) -> list[Load]:
        """Return the loads ordered since the last call."""
        loads, self._loads = self._loads, []
        return loads

    def report(self, report: WorkerReport) -> None:
        """Release the slots of loads that all workers executed."""
        self.loaded_bytes += report.loaded_bytes
        if report.failed_loads:
            ours = {name for name, each in self._entries.items() if each.state is State.LOADING}
            self.loads_failed += len(report.failed_loads - ours)  # of the pool
        for request_id, num_ranks in report.loaded.items():
            entry = self._entries.get(request_id)
            if entry is None or entry.state is not State.LOADING:
                continue
            entry.num_loaded += num_ranks
            entry.has_failed |= request_id in report.failed_loads
            if entry.num_loaded < self._layout.shards.num_ranks:
                continue  # another rank still reads the slot
            self._give_back(entry)
            if entry.has_failed:
                self.fetches_failed += entry.is_fetch
                self.loads_failed += not entry.is_fetch
            else:
                self.loads_done += 1
                self.fetched_tokens += (entry.num_tokens - entry.local_tokens) * entry.is_fetch
            if entry.gone:
                del self._entries[request_id]

    def finish(self, request: Request) -> None:
        """Forget a request that ended in any way."""
        self.unmoved.discard(request.request_id)
        entry = self._entries.get(request.request_id)
        if entry is None:
            return
        if entry.state is State.LOADING:
            entry.gone = True
            return
        del self._entries[request.request_id]
        name = entry.params.transfer
        if self._users.get(name, set()) <= {request.request_id}:
            if entry.state is State.WAITING:
                self._receiver.cancel(name)
            self._ignore(name)
        self._give_back(entry)

    def cancel(self, transfer: TransferId) -> None:
        """Drop a transfer whose request was cancelled (any thread)."""
        for name in attempt_names(transfer):
            self._receiver.cancel(name)
            self._ignore(name)
        self._receiver.abandon(f"{transfer}+", list(self._users), "its request was cancelled")

    def _ignore(self, name: str) -> None:
        """Drop the first token of a transfer, also if it comes later (any thread)."""
        with self._lock:
            self._unwanted[name] = None
            self.outputs.pop(name, None)

    def lose(self, transfer: TransferId) -> None:
        """Record that the sender of a transfer is unresponsive (any thread): a request that
        still waits for it computes its prompt here."""
        with self._lock:
            self._lost.update(dict.fromkeys(attempt_names(transfer)))

    def abandon(self, router: str) -> None:
        """Drop KV whose request would have come from a router that is gone (any thread)."""
        kept = list(self._users)
        self._receiver.abandon(prefix_of(router), kept, "the router of its request is gone")

    def tidy(self) -> None:
        """Read messages and evict old entries of an engine without requests (any thread)."""
        self._drain_notes()
        with self._lock:
            for each in (self.outputs, self._lost, self._consumed, self._unwanted):
                each.expire()

    def close(self) -> None:
        """Drop all KV that no worker is loading, and take none any more: requests of now and later
        compute their prompts here."""
        self.is_closed = True
        for entry in self._entries.values():
            if entry.state in (State.WAITING, State.TAKEN):
                self._give_back(entry)
        self._receiver.close()

    def _give_back(self, entry: Receive) -> None:
        """End a request's use of its transfer; the last user releases the slot."""
        self._pins.release(entry.request_id)
        entry.slot, entry.state = None, State.DONE
        entry.awaits_output = False  # too late for it
        name = entry.params.transfer
        users = self._users.get(name)
        if users is None or entry.request_id not in users:
            return
        users.remove(entry.request_id)
        if users:
            return
        del self._users[name]
        if self._slots.pop(name, None) is not None:
            self._receiver.release(name)
            with self._lock:
                self._consumed[name] = None
