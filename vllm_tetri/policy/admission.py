"""May the next held request enter the decode batch (paper section 3.4)?

Every request in the batch writes one token's KV per step until it ends and gives all its
blocks back, so what is held at any later step follows from what each holds and has left.
Between two ends it only grows: it is largest just before a request ends.

- `greedy` is vLLM: enter as soon as there are blocks for what the request holds itself.
- `reserve-static`: as soon as what is free, less what those in the batch will still take
  until they end, holds the request to its own end. Blocks that come back do not count.
- `reserve-dynamic`: as soon as everybody fits just before every end that the request
  lives to see, its own included. The paper looks at one of these ends, the next, at which
  the remaining growth of everybody else is not visible yet.

If predictions are right neither of the two ever admits into a preemption, and
`reserve-dynamic` refuses only what would be preempted unless an older one was. Nothing is
refused while the batch is empty, nobody is overtaken, and blocks that several requests
share count once for each of them when they come back, but not when they are needed.

Reserving for more than answers turn out to need holds requests back for nothing. So what
is reserved is multiplied by a *trust*: 1 while predictions are too long by at most
`_TRUSTED` in the mean over recent answers, 0 from `_DISTRUSTED` on, where both are greedy.
Predictions that are too short reserve too little and come close to greedy by themselves.
"""

from __future__ import annotations

from enum import StrEnum

from vllm_tetri.policy._occupancy import Occupancy

_TRUSTED = 1.05
_DISTRUSTED = 1.3
_MEMORY_ANSWERS = 64
_ANY_BLOCKS = float(1 << 40)  # where trust is nearly 0
_CREDIT_TOKENS = 256.0  # as if so many had been predicted rightly before

Held = tuple[int, int]
"""Tokens whose KV a request holds, and tokens that it is predicted to write on top."""


class DecodePolicy(StrEnum):
    """When a request may enter the decode batch."""

    GREEDY = "greedy"
    RESERVE_STATIC = "reserve-static"
    RESERVE_DYNAMIC = "reserve-dynamic"


class Admission:
    """One instance's decisions, in order of arrival.

    Owner: the engine thread. Per step: `begin`, then `admit` for the next held request
    until it says no. How many are held does not matter.

    Args:
        block_size: Tokens per KV block.
        total_blocks: All that requests can use.

    Attributes:
        trust: Part of the predicted growth that is reserved, 0 to 1.
    """

    def __init__(self, policy: DecodePolicy, *, block_size: int, total_blocks: int) -> None:
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
        """One step: the batch as it is before anything is allocated in it.

        Args:
            free_blocks: What vLLM could hand out, less what prompts among `running`
                still have to be given.
            running: Per request in the batch the tokens whose KV it holds (a prompt that
                is being computed: all of it) and those predicted on top, at least 1.
        """
        self._used_blocks = self._total_blocks - free_blocks
        self._batch = Occupancy(self._block_size, running)
        self._shared_blocks = self._batch.held_blocks - self._used_blocks

    def admit(self, tokens: int, remaining_tokens: int) -> bool:
        """Whether the next held request may enter now; if so it counts as running.

        Args:
            tokens: Whose KV it needs at entry.
            remaining_tokens: Predicted to be written on top, at least 1.
        """
        if not self._may_enter(tokens, remaining_tokens):
            return False
        self._batch.add(tokens, remaining_tokens)
        self._used_blocks += self._blocks(tokens)
        return True

    def finished(self, expected_tokens: int, actual_tokens: int) -> None:
        """An answer ended by itself.

        Args:
            expected_tokens: What was predicted for it when it had nothing yet.
            actual_tokens: What it came to.
        """
        kept = 1 - 1 / _MEMORY_ANSWERS
        self._expected_tokens = self._expected_tokens * kept + expected_tokens
        self._actual_tokens = self._actual_tokens * kept + actual_tokens
        excess = self._expected_tokens / self._actual_tokens
        self.trust = min(1.0, max(0.0, (_DISTRUSTED - excess) / (_DISTRUSTED - _TRUSTED)))

    @property
    def reserved_blocks(self) -> int:
        """Blocks kept for those in the batch beyond what they hold, as of `begin`.

        May be asked from any thread.
        """
        batch = self._batch
        if self.policy is DecodePolicy.GREEDY:
            return 0
        if self.policy is DecodePolicy.RESERVE_STATIC:
            growth = batch.growth_blocks
        else:
            growth = batch.most_growth_blocks
        return max(0, round(self.trust * growth))

    # -- rules ------------------------------------------------------------------

    def _may_enter(self, tokens: int, remaining_tokens: int) -> bool:
        if self.policy is DecodePolicy.GREEDY or not len(self._batch) or not self.trust:
            return True  # vLLM looks whether it fits now
        entry_blocks = self._blocks(tokens)
        used_blocks = self._used_blocks + entry_blocks
        room_blocks = self._total_blocks - used_blocks
        if room_blocks < 0:
            return False
        room_blocks = int(min(room_blocks / self.trust, _ANY_BLOCKS))
        if self.policy is DecodePolicy.RESERVE_STATIC or self._shared_blocks > 0:
            growth = self._blocks(tokens + remaining_tokens) - entry_blocks
            if growth + self._batch.growth_blocks <= room_blocks:
                return True
            if self.policy is DecodePolicy.RESERVE_STATIC:
                return False
        limit_blocks = used_blocks + room_blocks + min(0, self._shared_blocks)
        return self._batch.fits(tokens, remaining_tokens, limit_blocks)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
