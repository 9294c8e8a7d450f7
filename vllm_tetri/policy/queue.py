"""Prompts that wait for their first chunk, and those that share the chunks. Pure.

It works on requests of an engine or of the simulator, by `RequestView`. How raw, scheduled and
started prompts follow each other is told in `policy.order`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice
from operator import attrgetter
from typing import Generic, TypeVar

from vllm_tetri.policy.lengths import RequestView
from vllm_tetri.policy.order import SRTF_BOUND, Order, Prompt
from vllm_tetri.policy.step_cost import context_sum

R = TypeVar("R", bound=RequestView)
_key = attrgetter("key")


class PromptQueue(Generic[R]):
    """Prompts that are not computed to their end; `sched_batch` of them are ordered together.
    `remaining_tokens` counts what is to be computed: the prefix cache does not hold it. `waiting`
    has those without a chunk so far; `unfinished_context` is the `context_sum` of what is left.

    Its length and items are those that wait. Owner: the engine thread; calls come in the order
    of events. `free_blocks` is what prompts started in this step may need of KV until they are
    done; None if the engine's own check is enough.
    """

    def __init__(
        self, order: Order, sched_batch: int, block_size: int, remaining_tokens: Callable[[R], int]
    ) -> None:
        self.order = order
        self.sched_batch = sched_batch
        self.free_blocks: int | None = None
        self.unfinished_tokens, self.unfinished_context = 0, 0.0
        self._block_size = block_size
        self._remaining_tokens = remaining_tokens
        self.waiting: dict[str, R] = {}
        self._raw: dict[str, Prompt] = {}
        self._scheduled: list[Prompt] = []  # in order
        self.started: dict[str, Prompt] = {}  # some, but not all, is computed
        self._arrivals = 0
        self._next_check_tokens = 0  # no prompt becomes due before so many are computed
        self._computed_tokens = 0

    # -- waiting prompts ------------------------------------------------------

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[R]:
        """Yield those that wait, the next one first as far as it is known."""
        return (self.waiting[each.id] for each in chain(self._scheduled, self._raw.values()))

    def __contains__(self, request_id: str) -> bool:
        """Whether a prompt waits or is started."""
        return request_id in self.waiting or request_id in self.started

    def add(self, request: R) -> None:
        """Append a new prompt. What the prefix cache holds of it is looked up now, for reports, and
        again when it is ordered."""
        name = request.request_id
        self.discard(name)  # of an aborted request that the last step still knew
        remaining_tokens, self._arrivals = self._remaining_tokens(request), self._arrivals + 1
        self._raw[name] = Prompt(
            name, self._arrivals, remaining_tokens, request.num_tokens, request.priority,
            fcfs_tokens=self.unfinished_tokens + request.num_tokens,
            computed_before_tokens=self._computed_tokens,
        )  # fmt: skip
        self.unfinished_tokens += remaining_tokens
        self.unfinished_context += context_sum(remaining_tokens, request.num_tokens)
        self.waiting[name] = request

    def discard(self, request_id: str) -> bool:
        """Remove a finished or aborted prompt, if it is known; False if it did not wait here."""
        entry = self.started.pop(request_id, None) or self._raw.pop(request_id, None)
        if entry is None and request_id in self.waiting:
            entry = next(each for each in self._scheduled if each.id == request_id)
            self._scheduled.remove(entry)
        if entry is not None:
            self.unfinished_tokens -= entry.remaining_tokens
            self.unfinished_context -= context_sum(entry.remaining_tokens, entry.num_tokens)
        return self.waiting.pop(request_id, None) is not None

    def order_waiting(self, *, is_chunk_open: bool = False) -> None:
        """Fill up the set of prompts that are ordered together. A chunk that has room after
        everything started and scheduled (`is_chunk_open`) is filled whatever the batch says."""
        room = self.sched_batch
        if self.order.is_preemptive:
            room -= len(self._scheduled) + len(self.started)
            if is_chunk_open and not self._scheduled:
                room = max(room, 1)
        elif self._scheduled:
            room = 0
        batch = list(islice(self._raw.values(), max(room, 0)))
        for entry in batch:
            del self._raw[entry.id]
            self._set_remaining(entry, self._remaining_tokens(self.waiting[entry.id]))
            # Nothing has overtaken it in the raw queue.
            due_tokens = self._computed_tokens + (SRTF_BOUND - 1) * entry.fcfs_tokens
            self._next_check_tokens = min(self._next_check_tokens, due_tokens)
            insort(self._scheduled, entry, key=_key)

    def head(self) -> R:
        """Return the next prompt; there must be one."""
        if not self._scheduled:
            self.order_waiting(is_chunk_open=True)
        return self.waiting[self._scheduled[0].id]

    def first_tokens(self, *, has_place: bool) -> int:
        """Return the tokens left of the prompt that goes first, 0 without any; of started ones only
        unless there is a place for another one, whose order is not settled before."""
        if has_place and (self.order.is_preemptive or not self.started):
            self.order_waiting(is_chunk_open=not self.started)
        entries = [*self.started.values(), *self._scheduled[:has_place]]
        if self.order.is_preemptive:
            entries.sort(key=_key)
        return entries[0].remaining_tokens if entries else 0

    def may_start(self) -> bool:
        """Whether the next prompt may start in this step."""
        if not self.waiting or self.free_blocks is None:
            return bool(self.waiting)
        return 0 < self.free_blocks >= self._blocks(self.head().num_tokens)

    def start(self) -> R:
        """Take the next prompt out: it is about to be computed."""
        request = self.head()
        if self.free_blocks is not None:
            self.free_blocks -= self._blocks(request.num_tokens)
        entry = self._scheduled.pop(0)
        self.started[entry.id] = entry
        return self.waiting.pop(entry.id)

    def put_back(self, request: R, *, is_lost: bool) -> None:
        """Let a started prompt wait again, without its KV if `is_lost`: as the first scheduled
        one unless `srtf` says otherwise."""
        name = request.request_id
        entry = self.started.pop(name)
        self.waiting[name] = request
        if is_lost:
            self._set_remaining(entry, self._remaining_tokens(request))
            self._next_check_tokens = 0
        if self.order.is_preemptive:
            insort(self._scheduled, entry, key=_key)
        else:
            self._scheduled.insert(0, entry)

    # -- progress ---------------------------------------------------------------

    def computed(self, request_id: str, num_tokens: int, remaining_tokens: int) -> None:
        """Record that a step computes `num_tokens` of a started prompt, which is removed when
        nothing remains."""
        self._computed_tokens += num_tokens
        self._set_remaining(self.started[request_id], remaining_tokens)
        if remaining_tokens <= 0:
            self.discard(request_id)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _set_remaining(self, entry: Prompt, remaining_tokens: int) -> None:
        self.unfinished_tokens += remaining_tokens - entry.remaining_tokens
        self.unfinished_context += context_sum(remaining_tokens, entry.num_tokens) - context_sum(
            entry.remaining_tokens, entry.num_tokens
        )
        entry.remaining_tokens = remaining_tokens
        entry.key = self.order.key(entry)

    # -- shortest remaining first -------------------------------------------------

    def share_out(
        self,
        chunk_tokens: int,
        *,
        free_blocks: int,
        was_refused: bool = False,
        absent: Collection[str] = (),
        may_run: Callable[[R], bool] = lambda request: True,
    ) -> dict[str, int]:
        """Share out the prompt tokens of a step under a preemptive order: return tokens per started
        prompt, 0 to pause it, as those that are `absent`; the rest is for those that wait, if they
        `may_run`. Paused prompts keep their blocks, so new ones leave them enough of `free_blocks`
        (0 if the engine may run no other request) to be finished. If the gate refused a request in
        the last step (`was_refused`), it most likely does so again."""
        started_blocks = sum(self._blocks(each.remaining_tokens) for each in self.started.values())
        self.free_blocks = max(0, free_blocks - started_blocks)
        self.order_waiting()
        if self._computed_tokens >= self._next_check_tokens:
            self._check_due(chunk_tokens)
        scheduled = [*self._scheduled]  # `may_start` may add one beyond the batch
        may_start = not was_refused and self.may_start()
        started = [each for each in self.started.values() if each.id not in absent]
        able = self._able(scheduled, may_run) if may_start else iter(())
        return self._plan(chunk_tokens, started, able)

    def _able(self, scheduled: list[Prompt], may_run: Callable[[R], bool]) -> Iterator[Prompt]:
        """Yield the prompts that may run, asked for one by one: mypyc makes a list of a generator
        expression."""
        for entry in scheduled:
            if may_run(self.waiting[entry.id]):
                yield entry

    def _plan(
        self, chunk_tokens: int, started: list[Prompt], waiting: Iterator[Prompt]
    ) -> dict[str, int]:
        """Share out a chunk among started prompts and those of `waiting` that go before them."""
        shares = dict.fromkeys(self.started, 0)
        started.sort(key=_key, reverse=True)
        first = next(waiting, None) if started else None
        while chunk_tokens > 0 and started:
            entry = started[-1]
            if first is not None and first.key < entry.key:
                chunk_tokens -= first.remaining_tokens
                first = next(waiting, None)
            else:
                shares[entry.id] = min(entry.remaining_tokens, chunk_tokens)
                chunk_tokens -= shares[entry.id]
                started.pop()
        return shares

    def _check_due(self, chunk_tokens: int) -> None:
        """Find out which prompts are due, and when to check again.

        What overtook a prompt is all that was computed since it came, less what was computed of
        it and of those before it: `fcfs_tokens` less what of them is left. Nothing in the raw
        queue came before a prompt outside it.
        """
        left_tokens, slack_tokens = 0, chunk_tokens * self.sched_batch
        for entry in sorted(
            chain(self._scheduled, self.started.values()), key=attrgetter("arrival")
        ):
            left_tokens += entry.remaining_tokens
            since_tokens = self._computed_tokens - entry.computed_before_tokens
            overtaken_tokens = since_tokens - (entry.fcfs_tokens - left_tokens)
            allowed_tokens = (SRTF_BOUND - 1) * entry.fcfs_tokens + self.sched_batch * chunk_tokens
            if entry.is_due != (overtaken_tokens >= allowed_tokens):
                entry.is_due = not entry.is_due
                entry.key = self.order.key(entry)
            if not entry.is_due:
                slack_tokens = min(slack_tokens, allowed_tokens - overtaken_tokens)
        self._scheduled.sort(key=_key)
        # A step overtakes no prompt by more than it computes.
        self._next_check_tokens = self._computed_tokens + slack_tokens
