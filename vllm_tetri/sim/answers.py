"""What an instance expects of the answers that it writes."""

from __future__ import annotations

from collections import deque

from vllm_tetri.policy.admission import Admission, DecodePolicy, Held
from vllm_tetri.policy.lengths import End, Lengths
from vllm_tetri.sim.batch import DecodeBatch
from vllm_tetri.sim.job import Job
from vllm_tetri.sim.setting import Shape
from vllm_tetri.sim.workload import GRANULARITY_TOKENS, NUM_BUCKETS
from vllm_tetri.types import Prediction

# What is expected of an answer changes slowly while it is written.
_LOOK_AGAIN_TOKENS = 16
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
        """That everybody in the batch is expected to write yet, at least 1, in its order."""
        remaining, steps = [], batch.num_steps
        for job in batch:
            produced = job.produced_tokens + steps - job.joined_step
            if produced >= job.known_until:
                job.known_until = produced + _LOOK_AGAIN_TOKENS
                job.known_end = self._lengths.total_tokens(
                    job.ask.predicted, produced, End.EXPECTED
                )
            left = job.known_end - produced
            remaining.append(left if left > 0 else 1)
        return remaining

    def newest_total_tokens(self, job: Job) -> int:
        """Of the whole answer of a job that is not in the batch; more than it has."""
        produced_tokens = job.produced_tokens
        total = self._lengths.total_tokens(job.ask.predicted, produced_tokens, End.EXPECTED)
        return max(produced_tokens + 1, total)

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
    """When requests enter the batch of one instance; as `engine.admission`."""

    def __init__(self, shape: Shape, answers: Answers) -> None:
        self._admission = Admission(
            shape.admission, block_size=shape.block_size, total_blocks=shape.kv_blocks
        )
        self._is_open = shape.admission is DecodePolicy.GREEDY
        self._shape = shape
        self._answers = answers
        self._missing_tokens = 0
        self._has_picture = False

    def begin_step(self) -> None:
        """What was seen before does not hold any more."""
        self._has_picture = False

    def look(self, batch: DecodeBatch, started: list[Job], free_blocks: int) -> None:
        """Take a picture of what runs, between two steps."""
        if self._has_picture or self._is_open:
            return
        self._has_picture = True
        self._missing_tokens = 0
        size = self._shape.block_size
        running: list[Held] = list(
            zip(batch.held_tokens(), self._answers.remaining_tokens(batch), strict=True)
        )
        for job in started:
            self._missing_tokens += job.missing_tokens
            free_blocks -= -(-job.target_tokens // size) + (-job.computed_tokens // size)
            running.append((job.target_tokens, self._remaining(job)))
        self._admission.begin(max(0, free_blocks), running)

    def lets_in(self, job: Job, tokens: int) -> bool:
        """Whether the next request may enter now; after `look`.

        Args:
            tokens: Whose KV it needs at entry.
        """
        if self._is_open:
            return True
        self._missing_tokens += job.missing_tokens
        return self._admission.admit(tokens, self._remaining(job))

    def _remaining(self, job: Job) -> int:
        """Steps to the end of its answer here: a token each, and what is computed before.
        Of a prompt for somebody else that is its first token."""
        produced = job.produced_tokens
        steps = 0
        if job.missing_tokens:
            steps = -(-self._missing_tokens // self._shape.chunk_tokens)
        if job.is_split and not produced:
            return 1 + steps
        return self._answers.newest_total_tokens(job) - produced + steps

    def ended(self, job: Job) -> None:
        """An answer is written."""
        expected_tokens = self._answers.at_start(job.ask.predicted)
        self._admission.finished(expected_tokens, job.produced_tokens)

    @property
    def reserved_blocks(self) -> int:
        """As of the newest picture."""
        return self._admission.reserved_blocks


class Arena:
    """Memory beside the KV pool, for KV that arrives or waits.

    KV of preempted requests is kept there too, whether it has room or not.
    """

    def __init__(self, total_tokens: int) -> None:
        self.total_tokens = total_tokens
        self.used_tokens = 0
        self._refused: deque[Job] = deque()

    def open(self, job: Job) -> None:
        """A transfer to here; it is granted now or later."""
        self._refused.append(job)
        self.grant()

    def grant(self) -> list[Job]:
        """Whoever waited for room and has it now."""
        granted = []
        while self._refused:
            tokens = self._refused[0].ask.prompt_tokens
            if self.used_tokens and self.used_tokens + tokens > self.total_tokens:
                break
            job = self._refused.popleft()
            self.used_tokens += tokens
            job.is_granted = True
            granted.append(job)
        return granted
