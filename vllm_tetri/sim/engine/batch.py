"""The requests that an instance decodes, in time that does not depend on how many.

Every step gives each of them a token, so what each has follows from how many steps were
taken since it came. Kept are only sums: their context, who ends at which step, and how
many need another KV block at a step (those whose tokens fill a block then).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from vllm_tetri.sim.job import Job


class DecodeBatch:
    """Owner: its instance.

    Attributes:
        durations: Seconds of every step so far in which somebody was decoded, and of pauses
            before it.
        num_steps: How many those are.
        context_tokens: Whose KV all of them hold together.
    """

    def __init__(self, block_size: int) -> None:
        self.durations: array[float] = array("d")
        self.context_tokens = 0
        self._block_size = block_size
        self._members: dict[Job, None] = {}  # in order of arrival
        self.num_steps = 0
        self._ends: dict[int, list[Job]] = {}
        self._borders = [0] * block_size  # how many fill a block at steps ≡ index
        self._new: list[Job] = []  # took part in no step yet

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._members)

    @property
    def newest(self) -> Job:
        """Who came last."""
        return next(reversed(self._members))

    @property
    def growth_blocks(self) -> int:
        """That the next step needs on top of what they have."""
        return self._borders[self.num_steps % self._block_size]

    def join(self, job: Job) -> None:
        """From the next step on it gets a token."""
        job.joined_step = self.num_steps
        self._members[job] = None
        self._new.append(job)
        self.context_tokens += job.held_tokens
        self._ends.setdefault(self._end_of(job), []).append(job)
        self._borders[(job.joined_step - job.held_tokens) % self._block_size] += 1

    def put_last(self, job: Job) -> None:
        """As if it had come last, if it is here."""
        if job in self._members:
            del self._members[job]
            self._members[job] = None

    def leave(self, job: Job, now: float) -> None:
        """It gets no more tokens here. What it has is written to it.

        Args:
            now: End of the newest step.
        """
        if job.joined_step < self.num_steps:
            job.last_token_s = now
        self._ends[self._end_of(job)].remove(job)
        self._drop(job)

    def step(self, seconds: float, now: float) -> list[Job]:
        """A step is done; those who got their last token leave and are returned."""
        self.durations.append(seconds)
        self.num_steps += 1
        self.context_tokens += len(self._members)
        if self._new:
            for job in self._new:
                job.gaps.append(now - job.last_token_s)
            self._new.clear()
        ended = self._ends.pop(self.num_steps, None)
        if ended is None:
            return []
        for job in ended:
            self._drop(job)
            job.last_token_s = now
        return ended

    def held_tokens(self) -> list[int]:
        """Whose KV everybody holds now, in their order."""
        steps = self.num_steps
        return [job.held_tokens + steps - job.joined_step for job in self._members]

    def produced_tokens(self) -> list[int]:
        """What everybody has of its answer, in their order."""
        steps = self.num_steps
        return [job.produced_tokens + steps - job.joined_step for job in self._members]

    def _end_of(self, job: Job) -> int:
        return job.joined_step + job.ask.output_tokens - job.produced_tokens

    def _drop(self, job: Job) -> None:
        del self._members[job]
        self._borders[(job.joined_step - job.held_tokens) % self._block_size] -= 1
        steps = self.num_steps - job.joined_step
        job.held_tokens += steps
        job.produced_tokens += steps
        self.context_tokens -= job.held_tokens
        if not steps:
            self._new.remove(job)
        elif steps > 1:  # the gap before its first token here is its own
            job.stretches.append((self.durations, job.joined_step + 1, self.num_steps))
