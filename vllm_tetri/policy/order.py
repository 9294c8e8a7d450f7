"""In which order a prefill instance computes its prompts (paper section 3.3.1).

Two queues: *raw* holds prompts as they came, *scheduled* those that were taken
from it, at most a batch at a time (PrefillSchedBatch), and ordered. A prompt is
*started* once some of it was computed. `fcfs`, `sjf` and `ljf` never interrupt a
started prompt, and take the next batch when the last one has been started: a
prompt waits for at most one batch besides what came before it.

`srtf` orders again at every chunk border what is scheduled and what is started,
shortest remaining prompt first, and keeps that set filled up to a batch. Ageing
keeps long prompts from starving. Measure time by the prompt tokens that the
instance computes. Let A be the tokens that first come first served would compute
until a prompt is done: what was unfinished when it came, and itself. The prompt
is *due* as soon as later ones overtook it by (`SRTF_BOUND` - 1) * A tokens and a
batch of chunks. Due prompts go first, in order of arrival, so nothing that came
later overtakes them any more: among prompts of the same priority, every one is
done after at most SRTF_BOUND * A tokens and `sched_batch` + 2 chunks (one in which
it becomes due, and the last one, which it may share).
`tests/policy/test_order.py` checks it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter

SRTF_BOUND = 2


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that is not computed to its end."""

    id: str  # that of its request
    arrival: int  # grows by one with every prompt
    remaining_tokens: int  # to be computed; prefix-cache hits do not count
    priority: int  # the smaller goes first within a batch, as in vLLM
    fcfs_tokens: int  # tokens until it would be done under first come first served
    computed_before_tokens: int  # what the instance had computed when it came
    is_due: bool = False  # whether nothing that came later may go before it any more


@dataclass(frozen=True, slots=True)
class Order:
    """An order of prompts: the smallest key goes first. If it is preemptive, prompts are ordered
    again at every chunk border, started ones included, which may pause these; its key must then
    put prompts with `is_due` first."""

    key: Callable[[Prompt], tuple[float, ...]]
    is_preemptive: bool = False


class PrefillQueues:
    """Raw and scheduled queue, and what is started; `sched_batch` prompts are ordered together.

    One caller; calls come in the order of events. An unknown id is an error of the caller
    (KeyError), except for `remove`.
    """

    def __init__(self, order: Order, sched_batch: int) -> None:
        if sched_batch < 1:
            raise ValueError(f"a batch holds at least 1 prompt, not {sched_batch}")
        self.order = order
        self.sched_batch = sched_batch
        self._raw: dict[str, Prompt] = {}
        self._scheduled: list[Prompt] = []  # in order
        self._started: dict[str, Prompt] = {}
        self._all: dict[str, Prompt] = {}
        self._arrivals = 0
        self._next_check_tokens = 0  # no prompt becomes due before so many are computed
        self._computed_tokens = 0
        self.unfinished_tokens = 0

    # -- waiting prompts ------------------------------------------------------

    def __len__(self) -> int:
        """Count prompts of which nothing is computed."""
        return len(self._raw) + len(self._scheduled)

    def __iter__(self) -> Iterator[str]:
        """Yield their ids, the next one first as far as it is known."""
        return (prompt.id for prompt in chain(self._scheduled, self._raw.values()))

    def __contains__(self, prompt: str) -> bool:
        return prompt in self._all

    @property
    def num_started(self) -> int:
        """Prompts of which some, but not all, was computed."""
        return len(self._started)

    def started_tokens(self) -> Iterator[int]:
        """Yield what remains of each started prompt."""
        return (entry.remaining_tokens for entry in self._started.values())

    def is_started(self, prompt: str) -> bool:
        """Whether some of it was computed, but not all."""
        return prompt in self._started

    def add(self, prompt: str, num_tokens: int, priority: int = 0) -> None:
        """Append a prompt with so many tokens to compute."""
        self.unfinished_tokens += num_tokens
        self._arrivals += 1
        self._raw[prompt] = self._all[prompt] = Prompt(
            prompt, self._arrivals, num_tokens, priority,
            fcfs_tokens=self.unfinished_tokens, computed_before_tokens=self._computed_tokens,
        )  # fmt: skip

    def pull(self, *, is_chunk_open: bool = False) -> list[str]:
        """Return the prompts to pass to `enter` now. A chunk that has room after everything
        started and scheduled (`is_chunk_open`) is filled whatever the batch says."""
        room = self.sched_batch
        if self.order.is_preemptive:
            room -= len(self._scheduled) + len(self._started)
            if is_chunk_open and not self._scheduled:
                room = max(room, 1)
        elif self._scheduled:
            room = 0
        return list(islice(self._raw, max(room, 0)))

    def enter(self, batch: Iterable[tuple[str, int]]) -> None:
        """Order a batch and append it to the scheduled queue: ids that `pull` named, each with
        the tokens that remain to be computed, which may be fewer than when it came."""
        entries = []
        for prompt, remaining_tokens in batch:
            entry = self._raw.pop(prompt)
            self._set_remaining(entry, remaining_tokens)
            entries.append(entry)
        if not self.order.is_preemptive:
            self._scheduled += sorted(entries, key=self.order.key)
            return
        for entry in entries:
            insort(self._scheduled, entry, key=self.order.key)
            # Nothing has overtaken it in the raw queue.
            due_tokens = self._computed_tokens + (SRTF_BOUND - 1) * entry.fcfs_tokens
            self._next_check_tokens = min(self._next_check_tokens, due_tokens)

    def head(self) -> str | None:
        """Return the next prompt to start, if one is scheduled."""
        return self._scheduled[0].id if self._scheduled else None

    def start(self) -> str:
        """Take the head out, since it is about to be computed; IndexError if there is none."""
        entry = self._scheduled.pop(0)
        self._started[entry.id] = entry
        return entry.id

    def put_back(self, prompt: str, remaining_tokens: int | None = None) -> None:
        """Let a started prompt wait again, as the first scheduled one unless `srtf` says
        otherwise. `remaining_tokens` is what is left if its KV was lost; None if nothing was
        computed since it was started."""
        entry = self._started.pop(prompt)
        if remaining_tokens is not None:
            self._set_remaining(entry, remaining_tokens)
            self._next_check_tokens = 0
        if self.order.is_preemptive:
            insort(self._scheduled, entry, key=self.order.key)
        else:
            self._scheduled.insert(0, entry)

    # -- progress ---------------------------------------------------------------

    def computed(self, prompt: str, num_tokens: int, remaining_tokens: int) -> None:
        """Record that a step computes `num_tokens` of a started prompt, which is removed when
        nothing remains."""
        self._computed_tokens += num_tokens
        self._set_remaining(self._started[prompt], remaining_tokens)
        if remaining_tokens <= 0:
            self.remove(prompt)

    def remove(self, prompt: str) -> None:
        """Remove a finished or aborted prompt. No-op if unknown."""
        entry = self._all.pop(prompt, None)
        if entry is None:
            return
        self.unfinished_tokens -= entry.remaining_tokens
        if self._started.pop(prompt, None) is None and self._raw.pop(prompt, None) is None:
            self._scheduled.remove(entry)

    def _set_remaining(self, entry: Prompt, remaining_tokens: int) -> None:
        self.unfinished_tokens += remaining_tokens - entry.remaining_tokens
        entry.remaining_tokens = remaining_tokens

    # -- shortest remaining first -------------------------------------------------

    def plan(
        self, chunk_tokens: int, *, only_started: bool = False, unable: Collection[str] = ()
    ) -> dict[str, int]:
        """Order again at a chunk border and share out the coming chunk.

        Nothing scheduled can start in it if `only_started`, and the prompts in `unable` cannot.

        Returns:
            Tokens per started prompt; 0 pauses it. What is not shared out is for the scheduled
            queue. Empty under the other policies, which let started prompts go on.
        """
        if not self.order.is_preemptive:
            return {}
        if self._computed_tokens >= self._next_check_tokens:
            self._check_due(chunk_tokens)
        shares = dict.fromkeys(self._started, 0)
        started = sorted(self._started.values(), key=self.order.key, reverse=True)
        waiting = [] if only_started else self._scheduled
        if unable and waiting:
            waiting = [entry for entry in waiting if entry.id not in unable]
        passed = 0  # of those that wait
        while chunk_tokens > 0 and started:
            entry, is_next = started[-1], passed < len(waiting)
            if is_next and self.order.key(waiting[passed]) < self.order.key(entry):
                chunk_tokens -= waiting[passed].remaining_tokens
                passed += 1
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
        left_tokens, slack_tokens, has_changed = 0, chunk_tokens * self.sched_batch, False
        for entry in sorted(
            chain(self._scheduled, self._started.values()), key=attrgetter("arrival")
        ):
            left_tokens += entry.remaining_tokens
            since_tokens = self._computed_tokens - entry.computed_before_tokens
            overtaken_tokens = since_tokens - (entry.fcfs_tokens - left_tokens)
            allowed_tokens = (SRTF_BOUND - 1) * entry.fcfs_tokens + self.sched_batch * chunk_tokens
            is_due = overtaken_tokens >= allowed_tokens
            has_changed |= is_due is not entry.is_due
            entry.is_due = is_due
            if not is_due:
                slack_tokens = min(slack_tokens, allowed_tokens - overtaken_tokens)
        if has_changed:
            self._scheduled.sort(key=self.order.key)
        # A step overtakes no prompt by more than it computes.
        self._next_check_tokens = self._computed_tokens + slack_tokens


def _srtf(entry: Prompt) -> tuple[int, ...]:
    if entry.is_due:
        return (entry.priority, 0, entry.arrival)
    return (entry.priority, 1, entry.remaining_tokens, entry.arrival)


ORDERS: dict[str, Order] = {
    "fcfs": Order(lambda entry: (entry.priority, entry.arrival)),
    "sjf": Order(lambda entry: (entry.priority, entry.remaining_tokens, entry.arrival)),
    "ljf": Order(lambda entry: (entry.priority, -entry.remaining_tokens, entry.arrival)),
    "srtf": Order(_srtf, is_preemptive=True),
}
