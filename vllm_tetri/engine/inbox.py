"""Decode side, scheduler half: KV that arrives for requests of this instance.

Owner: the engine thread. What may be called from another thread says so; it touches
nothing but the receiver and what is remembered by name, which are thread-safe.

A request waits (vLLM asks again every step) until its KV has arrived, is then
loaded in the very step that admits it (beside the steps when it is large and
others are decoding), and gives its arena slot back when every rank reports the
load. Whatever goes wrong, the answer is "0 tokens": vLLM then
computes the prompt here, which is slower and never wrong.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from vllm_tetri.engine import notes
from vllm_tetri.engine.compat import Request
from vllm_tetri.engine.remembered import Remembered
from vllm_tetri.engine.step import Load, WorkerReport
from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import DecodeLeg, Given, attempt_names, digest_of, prefix_of
from vllm_tetri.transport.native import Receiver, Slot, SlotState
from vllm_tetri.types import TransferId

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 4096


class _State(Enum):
    WAITING = auto()  # nothing here yet
    TAKEN = auto()  # slot pinned, request not admitted yet
    LOADING = auto()  # handed to the workers
    DONE = auto()  # loaded, or given up: vLLM computes what is missing


@dataclass(slots=True)
class _Inbound:
    request_id: str
    leg: DecodeLeg
    deadline: float
    awaits_given: bool
    state: _State = _State.WAITING
    slot: Slot | None = None
    local_tokens: int = 0
    is_background: bool = False
    num_loaded: int = 0  # ranks that have executed the load
    gone: bool = False  # the request ended while workers were loading


class Inbox:
    """Requests of this instance whose prompt was computed elsewhere."""

    def __init__(
        self,
        *,
        receiver: Receiver,
        block_size: int,
        bytes_per_block: int,
        num_ranks: int,
        timeout_s: float,
        load_budget_bytes: int,
    ) -> None:
        self._receiver = receiver
        self._block_size = block_size
        self._bytes_per_block = bytes_per_block
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._load_budget_bytes = load_budget_bytes
        self._entries: dict[str, _Inbound] = {}
        self._users: dict[str, set[str]] = {}  # transfer → requests that may load from it
        self._slots: dict[str, Slot] = {}  # pinned
        # By transfer; thread-safe.
        most = MAX_REMEMBERED
        self._given = Remembered[Given](most=most, keep_s=timeout_s)  # nobody asked for it yet
        self._lost = Remembered[None](most=most, keep_s=timeout_s)
        self._consumed = Remembered[None](most=most, keep_s=timeout_s)
        self._unwanted = Remembered[None](most=most, keep_s=timeout_s)
        self._loads: list[Load] = []
        self.loads_done = 0
        self.loads_failed = 0
        self.loaded_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, leg: DecodeLeg) -> None:
        """A request with a decode leg entered the engine."""
        request_id, deadline = request.request_id, time.monotonic() + self._timeout_s
        self._entries[request_id] = _Inbound(request_id, leg, deadline, leg.is_early)
        self._users.setdefault(leg.transfer, set()).add(request_id)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request's KV is here or on its way."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.state is not _State.DONE

    def is_here(self, request_id: str) -> bool:
        """Whether a request's KV has arrived, was taken (`pin_arrived`) and waits for it."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.state is _State.TAKEN

    @property
    def num_waiting(self) -> int:
        """Requests whose KV has not arrived."""
        return sum(entry.state is _State.WAITING for entry in self._entries.values())

    def wait(self, timeout_s: float) -> None:
        """Sleep until a waiting request may go on (GIL released), at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._has_arrived() and (left_s := deadline - time.monotonic()) > 0:
            self._receiver.wait(left_s)

    def _has_arrived(self) -> bool:
        self._drain_notes()
        for entry in self._entries.values():
            name = entry.leg.transfer
            if entry.state is not _State.WAITING:
                continue
            if name in self._lost:
                return True
            if entry.awaits_given and name not in self._given:
                continue
            seen = self._receiver.find(name)
            if seen is not None and seen.state is not SlotState.FILLING:
                return True
        return False

    def pin_arrived(self, requests: Mapping[str, Request]) -> None:
        """Take what has arrived for requests that nobody may ask about for long, so that
        it stays for as long as they wait."""
        waiting = [each for each in self._entries.values() if each.state is _State.WAITING]
        for entry in waiting:
            self._try_take(requests[entry.request_id], entry)

    def take_given(self) -> list[tuple[str, Given]]:
        """Requests that came before their first token, and that token, each once."""
        self._drain_notes()
        awaiting = [entry for entry in self._entries.values() if entry.awaits_given]
        found = []
        for entry in awaiting:
            given = self._given.pop(entry.leg.transfer)
            if given is not None:
                entry.awaits_given = False
                found.append((entry.request_id, given))
        return found

    def match(
        self, request: Request, num_local_tokens: int, *, is_busy: bool
    ) -> tuple[int | None, bool]:
        """How many tokens beyond the local prefix hit can be loaded, and whether
        the load runs beside the steps instead of inside one.

        None: not known yet, ask again. Where the first token is not given, the last
        prompt token is left to this engine, which samples the first token from it.

        Args:
            request: A request of vLLM's waiting queue.
            num_local_tokens: Length of its local prefix hit, whole blocks.
            is_busy: Whether other requests wait for the next step.
        """
        entry = self._entries.get(request.request_id)
        if entry is None or entry.state is _State.DONE:
            return 0, False
        if entry.state is _State.LOADING:
            return None, False  # preempted before its load was reported
        if entry.state is _State.WAITING and not self._try_take(request, entry):
            return (None if entry.state is _State.WAITING else 0), False
        num_tokens = min(request.num_tokens - 1, request.num_prompt_tokens) - num_local_tokens
        if num_tokens <= 0:
            self._give_back(entry)
            return 0, False
        entry.local_tokens = num_local_tokens
        num_blocks = -(-num_tokens // self._block_size)
        entry.is_background = is_busy and (
            num_blocks * self._bytes_per_block > self._load_budget_bytes
        )
        return num_tokens, entry.is_background

    def _try_take(self, request: Request, entry: _Inbound) -> bool:
        name = entry.leg.transfer
        slot = None
        if not entry.awaits_given:
            slot = self._slots.get(name) or self._receiver.take(name)
        if slot is None:
            self._check_lost(name, entry)
            return False
        self._slots[name] = slot
        entry.slot, entry.state = slot, _State.TAKEN
        num_blocks = -(-request.num_prompt_tokens // self._block_size)
        num_bytes = num_blocks * self._bytes_per_block
        is_ours = (
            (slot.num_blocks, slot.num_ranks) == (num_blocks, self._num_ranks)
            and slot.rank_bytes * slot.num_ranks == num_bytes
            and entry.leg.digest == digest_of(request.prompt_token_ids or ())
        )
        if not is_ours:
            logger.warning(
                "transfer %s (%d blocks) holds the KV of another prompt than request %s "
                "(%d tokens); computing it here",
                name, slot.num_blocks, request.request_id, request.num_prompt_tokens,
            )  # fmt: skip
            self.loads_failed += 1
            self._give_back(entry)
            return False
        return True

    def _check_lost(self, name: str, entry: _Inbound) -> None:
        self._drain_notes()
        seen = self._receiver.find(name)
        reason = ""
        if name in self._consumed:
            # Another choice of the same request was faster; what it loaded is in
            # the prefix cache, except for the last block.
            self._give_back(entry)
            return
        if name in self._lost:
            reason = "its prefill instance gave up or is silent"
        elif seen is not None and seen.state is SlotState.FAILED:
            reason = seen.error or "failed"
        elif time.monotonic() > entry.deadline:
            reason = f"nothing arrived for {self._timeout_s:g} s"
        if reason:
            logger.warning("transfer %s: %s; computing the prompt here", name, reason)
            self.loads_failed += 1
            self._receiver.cancel(name)
            self._give_back(entry)

    def _drain_notes(self) -> None:
        while (message := self._receiver.receive(0.0)) is not None:
            try:
                note = notes.decode(message)
            except ProtocolError as error:
                logger.warning("dropped a message: %s", error)
                continue
            match note:
                case notes.Lost(transfer=transfer):
                    self._lost[transfer] = None
                case notes.FirstTokens(transfer=transfer, given=given):
                    if transfer not in self._unwanted:
                        self._given[transfer] = given

    def admitted(self, request: Request, block_ids: list[int], num_external: int) -> None:
        """vLLM gave the request its blocks; order the load, or free the slot."""
        entry = self._entries.get(request.request_id)
        if entry is None or entry.slot is None or entry.state is not _State.TAKEN:
            return
        if num_external == 0:
            self._give_back(entry)
            return
        load = Load.of(
            entry.slot,
            self._receiver.segment,
            request.request_id,
            block_ids,
            first_block=entry.local_tokens // self._block_size,
            is_background=entry.is_background,
        )
        self._loads.append(load)
        entry.state = _State.LOADING

    def take_loads(self) -> list[Load]:
        """Loads ordered since the last call."""
        loads, self._loads = self._loads, []
        return loads

    def report(self, report: WorkerReport) -> None:
        """Workers executed loads: give the slots back."""
        self.loaded_bytes += report.loaded_bytes
        self.loads_failed += report.load_errors
        for request_id, num_ranks in report.loaded.items():
            entry = self._entries.get(request_id)
            if entry is None or entry.state is not _State.LOADING:
                continue
            entry.num_loaded += num_ranks
            if entry.num_loaded < self._num_ranks:
                continue  # another rank still reads the slot
            self._give_back(entry)
            self.loads_done += 1
            if entry.gone:
                del self._entries[request_id]

    def finished(self, request: Request) -> None:
        """The request ended, however it ended."""
        entry = self._entries.get(request.request_id)
        if entry is None:
            return
        if entry.state is _State.LOADING:
            entry.gone = True
            return
        del self._entries[request.request_id]
        name = entry.leg.transfer
        if self._users.get(name, set()) <= {request.request_id}:
            if entry.state is _State.WAITING:
                self._receiver.cancel(name)
            self._ignore(name)
        self._give_back(entry)

    def cancel(self, transfer: TransferId) -> None:
        """Nobody waits for this transfer any more (any thread)."""
        for name in attempt_names(transfer):
            self._receiver.cancel(name)
            self._ignore(name)

    def _ignore(self, name: str) -> None:
        """A first token that came, or comes yet, is for nobody (any thread)."""
        self._unwanted[name] = None
        self._given.pop(name)

    def lose(self, transfer: TransferId) -> None:
        """Whoever sends this transfer is silent (any thread): a request that still waits for
        it computes its prompt."""
        for name in attempt_names(transfer):
            self._lost[name] = None

    def abandon(self, router: str) -> None:
        """A router is gone that could have sent requests for what arrives (any thread)."""
        kept = list(self._users)
        self._receiver.abandon(prefix_of(router), kept, "the router of its request is gone")

    def tidy(self) -> None:
        """Take in what peers said to an engine that takes no steps, and forget what is old
        (any thread, while no request is here)."""
        self._drain_notes()
        for each in (self._given, self._lost, self._consumed, self._unwanted):
            each.expire()

    def _give_back(self, entry: _Inbound) -> None:
        """This request needs the transfer no more; the last one frees its slot."""
        entry.slot, entry.state = None, _State.DONE
        entry.awaits_given = False  # whatever comes now comes too late
        name = entry.leg.transfer
        users = self._users.get(name)
        if users is None or entry.request_id not in users:
            return
        users.remove(entry.request_id)
        if users:
            return
        del self._users[name]
        if self._slots.pop(name, None) is not None:
            self._receiver.release(name)
            self._consumed[name] = None
