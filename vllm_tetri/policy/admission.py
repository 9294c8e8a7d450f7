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
refused while the batch is empty, no request is overtaken, and blocks that several requests
share count once for each of them when they come back, but not when they are needed.

Reserving for more than outputs turn out to need holds requests back for nothing. So what
is reserved is multiplied by a *trust*: 1 while predictions are too long by at most
`_TRUSTED` in the mean over recent outputs, 0 from `_DISTRUSTED` on, where both are greedy.
Predictions that are too short reserve too little and come close to greedy by themselves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from typing import Protocol

_TRUSTED = 1.05
_DISTRUSTED = 1.3
_MEMORY_OUTPUTS = 64
_ANY_BLOCKS = float(1 << 40)  # where trust is nearly 0
_CREDIT_TOKENS = 256.0  # counted as predicted rightly before the first output

Held = tuple[int, int]  # tokens whose KV a request holds, and those it is predicted to write


@dataclass(frozen=True, slots=True)
class Pool:
    """A KV pool at the moment at which a request wants to enter the decode batch."""

    batch: Occupancy
    free_blocks: int  # once the request has its own; more where predictions have been too long
    limit_blocks: int  # what batch and request may hold together at any later step
    is_shared: bool  # whether requests share blocks, which `batch` counts once for each

    def holds_all(self, tokens: int, remaining_tokens: int) -> bool:
        """Whether everything in the batch and the request fit if no block comes back."""
        growth_blocks = self.batch.growth_of(tokens, remaining_tokens)
        return growth_blocks + self.batch.growth_blocks <= self.free_blocks


class AdmissionPolicy(Protocol):
    """When a request may enter the decode batch."""

    def fits(self, pool: Pool, tokens: int, remaining_tokens: int) -> bool:
        """Whether a request may enter that holds `tokens` and will write `remaining_tokens`.
        Asked only if its tokens have blocks and the batch is not empty."""

    def growth_blocks(self, batch: Occupancy) -> int:
        """Blocks to keep for the batch beyond what it holds; reported to prefill instances."""


class Greedy:
    """Let a request in as soon as vLLM has blocks for it."""

    def fits(self, pool: Pool, tokens: int, remaining_tokens: int) -> bool:
        return True

    def growth_blocks(self, batch: Occupancy) -> int:
        return 0


class ReserveStatic:
    """Let a request in if it and the batch fit to their ends without a block coming back."""

    def fits(self, pool: Pool, tokens: int, remaining_tokens: int) -> bool:
        return pool.holds_all(tokens, remaining_tokens)

    def growth_blocks(self, batch: Occupancy) -> int:
        return batch.growth_blocks


class ReserveDynamic:
    """Let a request in if everything fits just before every end that it lives to see."""

    def fits(self, pool: Pool, tokens: int, remaining_tokens: int) -> bool:
        if pool.free_blocks < 0:
            return False
        if pool.is_shared and pool.holds_all(tokens, remaining_tokens):
            return True
        return pool.batch.fits(tokens, remaining_tokens, pool.limit_blocks)

    def growth_blocks(self, batch: Occupancy) -> int:
        return batch.most_growth_blocks


ADMISSIONS: dict[str, AdmissionPolicy] = {
    "greedy": Greedy(),
    "reserve-static": ReserveStatic(),
    "reserve-dynamic": ReserveDynamic(),
}


class Admission:
    """One instance's decisions, in order of arrival. Owner: the engine thread.

    Per step: `begin`, then `admit` for the next held request until one is refused. How many are
    held does not matter. `trust`, 0 to 1, is the part of the predicted growth that is reserved.
    """

    def __init__(self, policy: AdmissionPolicy, *, block_size: int, total_blocks: int) -> None:
        if block_size < 1 or total_blocks < 1:
            raise ValueError(f"no pool: {total_blocks} blocks of {block_size} tokens")
        self.policy = policy
        self.trust = 1.0
        self._block_size = block_size
        self._total_blocks = total_blocks
        self._used_blocks = 0
        self._shared_blocks = 0  # below 0: held by others than the batch
        self._batch = Occupancy(block_size, [])
        self._expected_tokens = self._actual_tokens = _CREDIT_TOKENS

    def begin(self, free_blocks: int, running: list[Held]) -> None:
        """Begin a step, before anything is allocated in it.

        Args:
            free_blocks: What vLLM could hand out, less what prompts among `running` still have
                to be given.
            running: What the requests of the batch hold (all of a prompt that is being
                computed) and are predicted to write on top, at least 1.
        """
        self._used_blocks = self._total_blocks - free_blocks
        self._batch = Occupancy(self._block_size, running)
        self._shared_blocks = self._batch.held_blocks - self._used_blocks

    def admit(self, tokens: int, remaining_tokens: int) -> bool:
        """Whether the next held request may enter now; if so it counts as running. It needs KV of
        `tokens` at entry."""
        if not self._may_enter(tokens, remaining_tokens):
            return False
        self._batch.add(tokens, remaining_tokens)
        self._used_blocks += self._blocks(tokens)
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
        return max(0, round(self.trust * self.policy.growth_blocks(self._batch)))

    def _may_enter(self, tokens: int, remaining_tokens: int) -> bool:
        if not len(self._batch) or not self.trust:
            return True  # vLLM checks whether it fits now
        used_blocks = self._used_blocks + self._blocks(tokens)
        free_blocks = self._total_blocks - used_blocks
        free_blocks = int(min(free_blocks / self.trust, _ANY_BLOCKS))
        limit_blocks = used_blocks + free_blocks + min(0, self._shared_blocks)
        pool = Pool(self._batch, free_blocks, limit_blocks, self._shared_blocks > 0)
        return self.policy.fits(pool, tokens, remaining_tokens)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


_remaining = itemgetter(1)


class Occupancy:
    """KV blocks of a decode batch, now and just before each of its requests ends. Every request
    writes one token a step and then gives all its blocks back."""

    def __init__(self, block_size: int, batch: Iterable[Held]) -> None:
        self._size = block_size
        self._batch = sorted(batch, key=_remaining, reverse=True)  # the last to end first

    def __len__(self) -> int:
        return len(self._batch)

    def add(self, tokens: int, remaining_tokens: int) -> None:
        """Count one more request."""
        insort(self._batch, (tokens, remaining_tokens), key=lambda held: -held[1])

    @property
    def held_blocks(self) -> int:
        """Blocks held now, as if no block were shared."""
        size = self._size
        return sum([-(-tokens // size) for tokens, _ in self._batch])

    def growth_of(self, tokens: int, remaining_tokens: int) -> int:
        """Return the blocks that one request takes on top until its end."""
        size = self._size
        return -(-(tokens + remaining_tokens) // size) + -tokens // size

    @property
    def growth_blocks(self) -> int:
        """Blocks that all requests take on top if none is given back."""
        size = self._size
        return sum([-(-(held + rest) // size) + -held // size for held, rest in self._batch])

    @property
    def most_growth_blocks(self) -> int:
        """Blocks held on top at the end at which most are held; at least 0."""
        held_blocks = self.held_blocks
        most_blocks = max(self._peaks(self._batch, 0, inf), default=held_blocks)
        return max(0, most_blocks - held_blocks)

    def fits(self, tokens: int, remaining_tokens: int, limit_blocks: int) -> bool:
        """Whether with one more request at most `limit_blocks` are held just before every end
        up to its own."""
        batch = sorted([*self._batch, (tokens, remaining_tokens)], key=_remaining, reverse=True)
        return next(self._peaks(batch, limit_blocks, remaining_tokens), None) is None

    def _peaks(self, batch: list[Held], above_blocks: int, last_tokens: float) -> Iterator[int]:
        """Yield the blocks held just before each end, where that is more than `above_blocks`; the
        last end first. Ends after `last_tokens` steps do not matter. `batch` is sorted as
        `_batch`."""
        size = self._size
        blocks = 0  # held now by those that are still in the batch
        last_used: list[int] = []  # per request: tokens in its last block, less 1
        is_sorted = False
        for count, (tokens, remaining_tokens) in enumerate(batch, 1):
            full = (tokens - 1) // size
            blocks += full + 1
            rounds = remaining_tokens // size
            at_most = blocks + count * (rounds + 1)
            if not is_sorted:
                last_used.append(tokens - 1 - full * size)
                if at_most <= above_blocks or remaining_tokens > last_tokens:
                    continue
                last_used.sort()
                is_sorted = True
            else:
                insort(last_used, tokens - 1 - full * size)
            # A request whose last block has room for the rest of a round starts no other one.
            exact = at_most - bisect_left(last_used, size - (remaining_tokens - rounds * size))
            if exact > above_blocks:
                yield exact
