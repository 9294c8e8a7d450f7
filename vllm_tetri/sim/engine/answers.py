"""What an instance expects of the answers that it writes."""

from __future__ import annotations

from collections import deque
from math import inf

from vllm_tetri.policy.admission import Admission, DecodePolicy, Held
from vllm_tetri.policy.lengths import End, Lengths
from vllm_tetri.sim.engine.batch import DecodeBatch
from vllm_tetri.sim.job import Job
from vllm_tetri.sim.setting import Shape
from vllm_tetri.sim.workload import GRANULARITY_TOKENS, NUM_BUCKETS
from vllm_tetri.types import Prediction

# What is expected of an answer changes slowly while it is written.
_LOOK_AGAIN_TOKENS = 16
_PICTURE_PERIOD_S = 0.1
_BUCKETS = [
    *(Prediction(bucket, NUM_BUCKETS, GRANULARITY_TOKENS) for bucket in range(NUM_BUCKETS)),
    None,
]


class Answers:
    """Lengths learnt on one instance."""

    def __init__(self) -> None:
        self._lengths = Lengths(GRANULARITY_TOKENS, NUM_BUCKETS)
        self._bucket_tokens: tuple[int, ...] = ()
        self._has_changed = False

    def remaining_tokens(self, batch: DecodeBatch) -> list[int]:
        """That everybody in the batch is expected to write yet, at least 1, in its order; as
        of a few tokens ago."""
        return [
            self.remaining_of(job, produced)
            for job, produced in zip(batch, batch.produced_tokens(), strict=True)
        ]

    def remaining_of(self, job: Job, produced_tokens: int) -> int:
        """The same of one that has so many tokens."""
        if produced_tokens >= job.known_until:
            total = self._lengths.total_tokens(job.ask.predicted, produced_tokens, End.EXPECTED)
            job.known_end = total
            job.known_until = min(total, produced_tokens + _LOOK_AGAIN_TOKENS)
        return job.known_end - produced_tokens

    def total_tokens(self, batch: DecodeBatch, produced_tokens: list[int]) -> list[int]:
        """Of everybody's whole answer, given that they have so many; in their order."""
        total = self._lengths.total_tokens
        return [
            total(job.ask.predicted, produced, End.EXPECTED)
            for job, produced in zip(batch, produced_tokens, strict=True)
        ]

    def newest_total_tokens(self, job: Job, produced_tokens: int) -> int:
        """Of the whole answer of a job that is not in the batch; more than it has."""
        return self._lengths.total_tokens(job.ask.predicted, produced_tokens, End.EXPECTED)

    def at_start(self, predicted: Prediction | None) -> int:
        """Of an answer of which nothing is written."""
        return self._lengths.total_tokens(predicted, 0, End.EXPECTED)

    def ended(self, job: Job) -> None:
        """An answer is written."""
        self._lengths.observe(job.ask.predicted, job.produced_tokens)
        self._has_changed = True

    def bucket_tokens(self) -> tuple[int, ...]:
        """By predicted bucket, then without a prediction; empty before an answer ended."""
        if self._has_changed:
            self._has_changed = False
            self._bucket_tokens = tuple(map(self.at_start, _BUCKETS))
        return self._bucket_tokens


class Gate:
    """When requests enter the batch of one instance; as `engine.admission`.

    Attributes:
        was_shut: Whether somebody was refused in the step before.
    """

    def __init__(self, shape: Shape, answers: Answers) -> None:
        self._admission = Admission(
            shape.admission, block_size=shape.block_size, total_blocks=shape.kv_blocks
        )
        self._is_open = shape.admission is DecodePolicy.GREEDY
        self._size = shape.block_size
        self._answers = answers
        self._batch, self._started = DecodeBatch(shape.block_size), list[Job]()
        self._free_blocks = shape.kv_blocks
        self._tokens_per_step = 1
        self._missing_tokens = 0
        self._now = self._picture_s = -inf
        self._has_picture = False
        self._is_shut = self.was_shut = False

    def begin_step(
        self,
        now: float,
        batch: DecodeBatch,
        started: list[Job],
        free_blocks: int,
        chunk_tokens: int,
    ) -> None:
        """Before anything is allocated in this step; what was seen before does not hold any
        more.

        Args:
            batch, started: What runs, not to be changed before the first is let in.
            chunk_tokens: Most prompt tokens of a step.
        """
        if self._is_open:
            return
        self.was_shut, self._is_shut = self._is_shut, False
        self._now, self._batch, self._started = now, batch, started
        self._free_blocks, self._tokens_per_step = free_blocks, chunk_tokens
        self._has_picture = False
        if now - self._picture_s >= _PICTURE_PERIOD_S:
            self._look()

    def _look(self) -> None:
        """Take a picture of what runs, as it was when the step began."""
        self._has_picture, self._picture_s = True, self._now
        batch, answers, free_blocks = self._batch, self._answers, self._free_blocks
        self._missing_tokens = 0
        self._tokens_per_step = max(1, self._tokens_per_step - len(self._started))
        running: list[Held] = list(
            zip(batch.held_tokens(), answers.remaining_tokens(batch), strict=True)
        )
        for job in self._started:
            # The next token is sampled from the last one, so that one is not there before.
            tokens = job.target_tokens - 1
            missing_tokens = tokens - job.computed_tokens
            if not missing_tokens and not job.is_split:
                running.append((tokens, answers.remaining_of(job, 0)))
                continue
            self._missing_tokens += missing_tokens
            free_blocks -= -(-tokens // self._size) + (-job.computed_tokens // self._size)
            running.append((tokens, self._remaining(job, missing_tokens)))
        self._admission.begin(max(0, free_blocks), running)

    def lets_in(self, job: Job, tokens: int, *, missing_tokens: int) -> bool:
        """Whether the next request may enter now.

        Args:
            tokens: Whose KV it has before its next token is sampled from one more.
            missing_tokens: Those of them that are to be computed first.
        """
        if self._is_open:
            return True
        if not self._has_picture:
            self._look()
        self._missing_tokens += missing_tokens
        self._is_shut = not self._admission.admit(tokens, self._remaining(job, missing_tokens))
        return not self._is_shut

    def _remaining(self, job: Job, missing_tokens: int) -> int:
        """Steps to the end of its answer here: a token each, and what is computed before.
        Of a prompt for somebody else that is its first token."""
        produced = job.produced_tokens
        steps = -(-self._missing_tokens // self._tokens_per_step) if missing_tokens else 0
        if job.is_split and not produced:
            return 1 + steps
        return self._answers.newest_total_tokens(job, produced) - produced + steps

    def ended(self, job: Job) -> None:
        """An answer is written."""
        expected_tokens = self._answers.at_start(job.ask.predicted)
        self._admission.finished(expected_tokens, job.produced_tokens)

    @property
    def reserved_blocks(self) -> int:
        """As of the newest picture, which is taken every 0.1 s at least."""
        return self._admission.reserved_blocks


class Arena:
    """Memory beside the KV pool, for KV that arrives or waits, in whole blocks.

    KV of preempted requests is kept there too, whether it has room or not.
    """

    def __init__(self, total_tokens: int, block_size: int) -> None:
        self.total_tokens = total_tokens
        self._block_size = block_size
        self.used_tokens = 0
        self._refused: deque[Job] = deque()

    def open(self, job: Job) -> None:
        """A transfer to here; it is granted now or later."""
        self._refused.append(job)
        self.grant()

    def drop(self, job: Job) -> None:
        """A transfer that was opened does not come."""
        if job.is_granted:
            self.give_back(job.ask.prompt_tokens)
        else:
            self._refused.remove(job)

    def take(self, tokens: int) -> None:
        """For KV of so many tokens."""
        self.used_tokens += self._rounded(tokens)

    def give_back(self, tokens: int) -> None:
        """What that took."""
        self.used_tokens -= self._rounded(tokens)

    def _rounded(self, tokens: int) -> int:
        return -(-tokens // self._block_size) * self._block_size

    def grant(self) -> list[Job]:
        """Whoever waited for room and has it now."""
        granted = []
        while self._refused:
            tokens = self._rounded(self._refused[0].ask.prompt_tokens)
            if self.used_tokens and self.used_tokens + tokens > self.total_tokens:
                break
            job = self._refused.popleft()
            self.used_tokens += tokens
            job.is_granted = True
            granted.append(job)
        return granted
