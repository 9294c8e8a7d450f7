"""May the next held request enter the decode batch (paper section 3.4)?

Every request in the batch writes one token's KV per step until it ends and gives all its
blocks back, so what is held at any later step follows from what each holds and has left.
Between two ends it only grows: it is largest just before a request ends.

- `greedy` is vLLM: enter as soon as there are blocks for what the request holds itself.
- `reserve-static`: as soon as what is free, less what those in the batch will still take
  until they end, holds the request to its own end. Blocks that come back do not count.
- `reserve-dynamic`: as soon as everything fits just before every end that the request
  lives to see, its own included. The paper looks at one of these ends, the next, at which
  the remaining growth of all others is not visible yet.

If predictions are right neither of the two ever admits into a preemption, and
`reserve-dynamic` refuses only what would be preempted unless an older one was. Nothing is
refused while the batch is empty, none that waits behind a refused one enters, and blocks that
several requests share count once for each of them when they come back, but not when they are
needed.

Reserving for more than outputs turn out to need holds requests back for nothing. So what
is reserved is multiplied by a *trust*: 1 while predictions are too long by at most
`_TRUSTED` in the mean over recent outputs, 0 from `_DISTRUSTED` on, where both are greedy.
Predictions that are too short reserve too little and come close to greedy by themselves.

Which request is next is a second question (`ENTRY_ORDERS`). `fcfs`: the one that came first.
`shortest`: the one that is expected to write least, which makes the mean wait short. None starves:
once outputs of 16 E expected tokens have entered since a request came of which E are expected, no
request that comes later is placed before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from vllm_tetri.policy.lengths import End, OutputLengths, RequestView

_TRUSTED = 1.05
_DISTRUSTED = 1.3
_MEMORY_OUTPUTS = 64
_ANY_BLOCKS = float(1 << 40)  # where trust is nearly 0
_CREDIT_TOKENS = 256.0  # counted as predicted rightly before the first output
# As often as loads are reported (paper section 3.4).
_SNAPSHOT_PERIOD_S = 0.1
# The expected end of an output changes slowly while it is written.
_ESTIMATE_TOKENS = 16
_UNKNOWN = (0, 0, 0)

Held = tuple[int, int]  # tokens whose KV a request holds, and those it is predicted to write


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """When a request may enter the decode batch. Any class with these two methods is one."""

    # Whether a request may enter that holds so many tokens and will write so many; asked only if
    # its tokens have blocks and the batch is not empty.
    fits: Callable[[Admission, int, int], bool]
    # Blocks to keep for the batch beyond what it holds; reported to prefill instances.
    growth_blocks: Callable[[Admission], int]


class Admission:
    """The KV pool of one instance, and its decisions, one after another. Owner: the engine
    thread.

    Per step: `begin`, then `admit` for the next held request until one is refused. How many are
    held does not matter. `trust`, 0 to 1, is the part of the predicted growth that is reserved;
    with less of it there are more free blocks for a policy.
    """

    def __init__(self, policy: Any, *, block_size: int, total_blocks: int) -> None:
        self.policy = policy
        self.trust = 1.0
        self._size = block_size
        self._total_blocks = total_blocks
        self._used_blocks = 0
        self._shared_blocks = 0  # below 0: held by others than the batch
        self._given_blocks = 0  # that the request which would enter need not be given
        self._batch: list[Held] = []  # the last to end first
        self._expected_tokens = self._actual_tokens = _CREDIT_TOKENS

    def begin(self, free_blocks: int, running: list[Held]) -> None:
        """Begin a step, before anything is allocated in it. `running` is what the requests of the
        batch hold (all of a prompt that is being computed) and are predicted to write on top, at
        least 1; `free_blocks` what vLLM could hand out, less what those prompts still have to be
        given."""
        self._used_blocks = self._total_blocks - free_blocks
        self._batch = sorted(running, key=_by_end)
        self._shared_blocks = self._held_blocks - self._used_blocks

    def admit(self, tokens: int, remaining_tokens: int, shared_blocks: int = 0) -> bool:
        """Whether the next held request may enter now; if so it counts as running. It needs KV of
        `tokens` at entry, of which others hold `shared_blocks`."""
        self._given_blocks = shared_blocks
        # In an empty batch vLLM checks whether it fits now.
        if self._batch and self.trust and not self.policy.fits(self, tokens, remaining_tokens):
            return False
        insort(self._batch, (tokens, remaining_tokens), key=_by_end)
        self._used_blocks += -(-tokens // self._size) - shared_blocks
        self._shared_blocks += shared_blocks
        return True

    def finished(self, expected_tokens: int, actual_tokens: int) -> None:
        """Learn from an output that ended by itself: what was predicted for it when it had
        nothing yet, and its length."""
        kept = 1 - 1 / _MEMORY_OUTPUTS
        self._expected_tokens = self._expected_tokens * kept + expected_tokens
        self._actual_tokens = self._actual_tokens * kept + actual_tokens
        excess = self._expected_tokens / self._actual_tokens
        self.trust = min(1.0, max(0.0, (_DISTRUSTED - excess) / (_DISTRUSTED - _TRUSTED)))

    @property
    def reserved_blocks(self) -> int:
        """Blocks kept for the batch beyond what it holds, as of `begin` (any thread)."""
        return max(0, round(self.trust * float(self.policy.growth_blocks(self))))

    # -- what policies ask --------------------------------------------------------

    def all_growth_blocks(self) -> int:
        """Blocks that the batch takes on top if none is given back."""
        size = self._size
        return sum([-(-(held + rest) // size) + -held // size for held, rest in self._batch])

    def most_growth_blocks(self) -> int:
        """Blocks that the batch holds on top at the end at which it holds most; at least 0."""
        held_blocks = self._held_blocks
        return max(self._peaks(self._batch, held_blocks, inf), default=held_blocks) - held_blocks

    def holds_all(self, tokens: int, remaining_tokens: int) -> bool:
        """Whether the batch and a request that enters fit if no block comes back."""
        own_blocks = -(-(tokens + remaining_tokens) // self._size) + -tokens // self._size
        return own_blocks + self.all_growth_blocks() <= self._free_blocks(tokens)

    def holds_until_ends(self, tokens: int, remaining_tokens: int) -> bool:
        """Whether the batch and a request that enters fit just before every end up to its own."""
        # Blocks that several requests share count once for each when they come back.
        has_shared = self._shared_blocks + self._given_blocks > 0
        if has_shared and self.holds_all(tokens, remaining_tokens):
            return True
        free_blocks = self._free_blocks(tokens)
        used_blocks = self._used_blocks - (-tokens // self._size) - self._given_blocks
        limit_blocks = used_blocks + free_blocks + min(0, self._shared_blocks + self._given_blocks)
        batch = sorted([*self._batch, (tokens, remaining_tokens)], key=_by_end)
        return free_blocks >= 0 and not any(self._peaks(batch, limit_blocks, remaining_tokens))

    def _free_blocks(self, tokens: int) -> int:
        """Blocks that are free once a request has those of its `tokens`."""
        free_blocks = self._total_blocks - self._used_blocks + -tokens // self._size
        free_blocks += self._given_blocks
        return int(min(free_blocks / self.trust, _ANY_BLOCKS))

    @property
    def _held_blocks(self) -> int:
        """Blocks that the batch holds now, as if no block were shared."""
        size = self._size
        return sum([-(-tokens // size) for tokens, _ in self._batch])

    def _peaks(self, batch: list[Held], above_blocks: int, last_tokens: float) -> Iterator[int]:
        """Yield the blocks held just before each end, where that is more than `above_blocks`; the
        last end first. Ends after `last_tokens` steps do not matter."""
        size = self._size
        blocks = 0  # held now by those that are still in the batch
        last_used: list[int] = []  # sorted, per request: tokens in its last block, less 1
        for count, (tokens, remaining_tokens) in enumerate(batch, 1):
            full = (tokens - 1) // size
            blocks += full + 1
            insort(last_used, tokens - 1 - full * size)
            rounds = remaining_tokens // size
            at_most = blocks + count * (rounds + 1)
            if at_most <= above_blocks or remaining_tokens > last_tokens:
                continue
            # A request whose last block has room for the rest of a round starts no other one.
            exact = at_most - bisect_left(last_used, size - (remaining_tokens - rounds * size))
            if exact > above_blocks:
                yield exact


def _by_end(held: Held) -> int:
    return -held[1]


ADMISSIONS: dict[str, AdmissionPolicy] = {
    "greedy": AdmissionPolicy(lambda pool, tokens, rest: True, lambda pool: 0),
    "reserve-static": AdmissionPolicy(Admission.holds_all, Admission.all_growth_blocks),
    "reserve-dynamic": AdmissionPolicy(Admission.holds_until_ends, Admission.most_growth_blocks),
}


ENTRY_ORDERS = {"fcfs": 0.0, "shortest": 16.0}
"""What an expected token of one's own weighs against one of outputs that entered before one came.
More than 16 made p99 of completion times worse than the mean better (simulated, with the head)."""

ReadRunning = Callable[[], Collection[RequestView]]


class DecodeGate:
    """Decides which waiting requests enter the decode batch of one engine. `end` of a predicted
    length is reserved, and room for `draft_tokens` after it. The first request that is refused
    shuts the gate for the step (`is_shut`): requests after it stay in the queue, and received KV
    stays in the arena. Owner: the engine thread."""

    def __init__(
        self,
        policy: Any,
        end: End,
        *,
        lengths: OutputLengths,
        block_size: int,
        total_blocks: int,
        draft_tokens: int = 0,
        entry_weight: float = 0.0,
    ) -> None:
        self.admission = Admission(policy, block_size=block_size, total_blocks=total_blocks)
        self._draft_tokens = draft_tokens
        self._end = end
        self._lengths = lengths
        self._block_size = block_size
        self._now = self._snapshot_s = float("-inf")
        self._read_running: ReadRunning | None = None  # while the step has no snapshot
        self._free_blocks = total_blocks
        self._entry_weight, self._entered_tokens = entry_weight, 0.0
        self.places: dict[str, float] = {}  # in line for the batch, the next one first
        self._expected: dict[str, int] = {}  # tokens of outputs in line
        self._tokens_per_step = 1
        self._missing_tokens = 0  # prompt tokens that are to be computed before
        # Per request that decodes: from how many tokens held until how many its expected end,
        # in tokens held, stays as it is.
        self.ends: dict[str, tuple[int, int, int]] = {}
        self.is_shut = self.was_shut = False

    def begin_step(
        self, read_running: ReadRunning, now: float, *, free_blocks: int, tokens_per_step: int
    ) -> None:
        """Open the gate, before anything is allocated in this step: of what the engine could hand
        out now, and for a step that computes at most `tokens_per_step`. All requests that hold
        blocks and grow are read in this step, if at all."""
        self.was_shut, self.is_shut = self.is_shut, False
        self._now, self._read_running = now, read_running
        self._free_blocks, self._tokens_per_step = free_blocks, tokens_per_step
        if now - self._snapshot_s >= _SNAPSHOT_PERIOD_S:
            self._take_snapshot(read_running)

    def _take_snapshot(self, read_running: ReadRunning) -> None:
        """Read what runs, as it was when the step began: vLLM counts what a step computes
        only when it has scheduled all of it."""
        running, free_blocks = read_running(), self._free_blocks
        self._read_running, self._snapshot_s = None, self._now
        self._missing_tokens = 0
        self._tokens_per_step = max(1, self._tokens_per_step - len(running))
        size, snapshot, ends = self._block_size, [], self.ends
        for request in running:
            computed_tokens = request.num_computed_tokens
            since, until, end = ends.get(request.request_id, _UNKNOWN)
            if since <= computed_tokens < until:
                snapshot.append((computed_tokens, end - computed_tokens))
                continue
            tokens = max(computed_tokens, request.num_tokens - 1)
            missing_tokens = tokens - computed_tokens
            self._missing_tokens += missing_tokens
            remaining_tokens = self._remaining_tokens(request, missing_tokens > 0)
            snapshot.append((tokens, remaining_tokens))
            if missing_tokens:  # blocks that its prompt will take count as taken
                free_blocks -= -(-tokens // size) + (-computed_tokens // size)
            else:
                until = tokens + min(_ESTIMATE_TOKENS, remaining_tokens)
                ends[request.request_id] = (tokens, until, tokens + remaining_tokens)
        self.admission.begin(max(0, free_blocks), snapshot)

    def _remaining_tokens(self, request: RequestView, has_missing: bool) -> int:
        """Steps to the end of its output: a token each, what is computed before, and drafts."""
        produced_tokens = request.num_output_tokens + request.num_output_placeholders
        total = self._lengths.total_tokens(request, self._end, produced_tokens=produced_tokens)
        steps = -(-self._missing_tokens // self._tokens_per_step) if has_missing else 0
        return total - produced_tokens + steps + self._draft_tokens

    def join(self, line: deque[Any], request: RequestView) -> None:
        """Put a request that has come into the line for the batch, of which the first is next: by
        its place, and behind those of the same place."""
        name = request.request_id
        self.places.pop(name, None)  # of another request of that name
        if self._entry_weight:
            tokens = self._lengths.total_tokens(request, End.EXPECTED, produced_tokens=0)
            self._expected[name] = tokens
            self.places[name] = self._entry_weight * tokens + self._entered_tokens
        line.insert(bisect_right(line, self._place_of(request), key=self._place_of), request)

    def rejoin(self, line: deque[Any], request: RequestView, *, was_running: bool) -> None:
        """Put a request back before all others of its line. One that was running stays there; so
        does one whose place is not the smallest, for the line to stay sorted."""
        if was_running or (line and self._place_of(request) > self._place_of(line[0])):
            self.places[request.request_id] = -inf
        line.appendleft(request)

    def _place_of(self, request: RequestView) -> float:
        return self.places.get(request.request_id, 0.0)

    def admit(
        self,
        request: RequestView,
        missing_tokens: int,
        count_shared: Callable[[], int] = int,  # int() is 0
    ) -> bool:
        """Whether the next request may enter now. Its `missing_tokens` are neither computed nor
        loaded, except for the one from which the next token is sampled. `count_shared` says how
        many of its blocks others hold; it is asked only if that may let the request in."""
        if self.is_shut:
            return False
        if self._read_running is not None:
            self._take_snapshot(self._read_running)
        self._missing_tokens += missing_tokens
        remaining_tokens = self._remaining_tokens(request, missing_tokens > 0)
        tokens, admission = request.num_tokens - 1, self.admission
        self.is_shut = not admission.admit(tokens, remaining_tokens)
        if self.is_shut and (shared_blocks := count_shared()):
            self.is_shut = not admission.admit(tokens, remaining_tokens, shared_blocks)
        if not self.is_shut:
            self._entered_tokens += self._expected.pop(request.request_id, 0)
        return not self.is_shut

    def forget(self, request_id: str) -> None:
        """Drop a request that ended."""
        for table in (self.ends, self.places, self._expected):
            table.pop(request_id, None)

    def record_output(self, request: RequestView) -> None:
        """Learn from an output that ended by itself: what was expected, and its length."""
        expected = self._lengths.total_tokens(request, self._end, produced_tokens=0)
        self.admission.finished(expected, request.num_output_tokens)
