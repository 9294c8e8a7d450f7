"""A decode instance as far as admission goes: vLLM's rules, a block pool, times of steps.

Every request in the batch writes one token per step. When blocks run out the one that was
admitted last loses its KV, waits in front, and its tokens are computed again when it
comes back; nobody enters in such a step. A step takes a base time, more per request, per
token of context and per token that is computed again: SmolLM2's costs on one core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean

from vllm_tetri.policy.admission import Admission, AdmissionPolicy

STEP_S = 0.013
REQUEST_S = 0.0006
CONTEXT_TOKEN_S = 2.9e-6
RECOMPUTED_TOKEN_S = 0.00065


@dataclass(slots=True)
class Job:
    """A request whose prompt is computed and whose first token is there."""

    arrival_s: float
    prompt_tokens: int
    answer_tokens: int
    produced_tokens: int = 1
    held_tokens: int = 0
    is_lost: bool = False
    end_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Whose KV it needs to write its next token."""
        return self.prompt_tokens + self.produced_tokens - 1


Foresight = Callable[[Job], int]
"""How many tokens the answer of a job is believed to have, now that it has some."""


@dataclass
class Run:
    """What came of it."""

    jobs: Sequence[Job]
    preemptions: int = 0
    refusals_when_empty: int = 0
    order: list[Job] = field(default_factory=list)  # of first admission
    settled_s: float = 0.0  # when a few answers had ended

    @property
    def mean_jct_s(self) -> float:
        return fmean(job.end_s - job.arrival_s for job in self.jobs)


def decode(
    jobs: Sequence[Job],
    policy: AdmissionPolicy,
    believed: Foresight,
    *,
    total_blocks: int,
    block_size: int = 16,
    on_end: Callable[[Job], None] = lambda job: None,
) -> Run:
    """Decode all of `jobs`, which are in order of arrival, and return when each was done."""
    pool = _Pool(total_blocks, block_size)
    admission = Admission(policy, block_size=block_size, total_blocks=total_blocks)
    run, coming = Run(jobs), deque(jobs)
    waiting: deque[Job] = deque()
    batch: list[Job] = []
    now = num_ended = 0.0

    def rest_tokens(job: Job) -> int:
        return max(1, believed(job) - job.produced_tokens)

    while coming or waiting or batch:
        if not batch and not waiting:
            now = max(now, coming[0].arrival_s)
        while coming and coming[0].arrival_s <= now:
            waiting.append(coming.popleft())
        if waiting:
            admission.begin(pool.free, [(job.held_tokens, rest_tokens(job)) for job in batch])
        lost = list(pool.grow(batch))
        run.preemptions += len(lost)
        waiting.extendleft(lost)
        recomputed_tokens = 0
        while waiting and not lost:
            job = waiting[0]
            if not admission.admit(job.tokens, rest_tokens(job)):
                run.refusals_when_empty += not batch
                break
            if not pool.take(job, job.tokens + 1):
                break
            batch.append(waiting.popleft())
            recomputed_tokens += job.tokens if job.is_lost else 0
            if not job.is_lost:
                run.order.append(job)
        assert batch, "nobody runs"
        context_tokens = sum(job.held_tokens for job in batch)
        now += STEP_S + REQUEST_S * len(batch) + CONTEXT_TOKEN_S * context_tokens
        now += RECOMPUTED_TOKEN_S * recomputed_tokens
        for job in batch:
            job.produced_tokens += 1
            if job.produced_tokens >= job.answer_tokens:
                job.end_s = now
                pool.give_back(job)
                num_ended += 1
                if num_ended == 3:
                    run.settled_s = now - jobs[0].arrival_s
                was_tokens, job.produced_tokens = job.produced_tokens, 0
                admission.finished(believed(job), job.answer_tokens)
                job.produced_tokens = was_tokens
                on_end(job)
        batch = [job for job in batch if not job.end_s]
    return run


class _Pool:
    def __init__(self, total_blocks: int, block_size: int) -> None:
        self.free = total_blocks
        self._size = block_size

    def take(self, job: Job, tokens: int) -> bool:
        """Let a job hold so many tokens if there are blocks for it."""
        blocks = -(-tokens // self._size) - -(-job.held_tokens // self._size)
        if blocks > self.free:
            return False
        self.free -= blocks
        job.held_tokens = tokens
        return True

    def give_back(self, job: Job) -> None:
        self.free += -(-job.held_tokens // self._size)
        job.held_tokens = 0

    def grow(self, batch: list[Job]) -> Iterator[Job]:
        """A token for each; yields whoever is taken out of the batch for it, the first
        of them first."""
        index = 0
        while index < len(batch):
            job = batch[index]
            if self.take(job, job.held_tokens + 1):
                index += 1
                continue
            victim = batch.pop()
            self.give_back(victim)
            victim.is_lost = True
            yield victim


def draw_jobs(rng: Random, count: int, kind: str, *, per_s: float | None) -> list[Job]:
    """Jobs of one kind that come at once, or so many per second."""
    now, jobs = 0.0, []
    for _ in range(count):
        now += rng.expovariate(per_s) if per_s else 0.0
        prompt_tokens = min(1000, max(4, int(rng.lognormvariate(4.6, 1.0))))
        jobs.append(Job(now, prompt_tokens, _ANSWERS[kind](rng)))
    return jobs


_ANSWERS: dict[str, Callable[[Random], int]] = {
    "mixed": lambda rng: min(1500, max(2, int(rng.lognormvariate(5.2, 0.9)))),
    "long": lambda rng: rng.randint(500, 1000),
    "short": lambda rng: rng.randint(5, 100),
    "two kinds": lambda rng: rng.choice([20, 800]) + rng.randint(0, 40),
}
