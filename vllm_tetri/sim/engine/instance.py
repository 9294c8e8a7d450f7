"""What all simulated engines have in common: steps, a KV pool, and their end.

An engine is idle or in a step. At the start of a step it decides what the step computes,
and gets the blocks for it; at its end everybody in the batch has a token more, and
prompts are further. Blocks are exact, without a prefix cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from vllm_tetri.sim.engine.batch import DecodeBatch
from vllm_tetri.sim.job import Job
from vllm_tetri.sim.log import Log, Step
from vllm_tetri.sim.loop import Loop
from vllm_tetri.sim.setting import Place

Share = tuple[Job, int]
"""Prompt tokens that a step computes of a request."""


class Cluster(Protocol):
    """What an instance says to whoever connects it with others."""

    def computed(self, job: Job, now: float) -> None:
        """A chunk of its prompt is done, and another one begins."""

    def prefilled(self, job: Job, now: float) -> bool:
        """Its first token is there. Returns whether another instance goes on with it."""

    def granted(self, job: Job, now: float) -> None:
        """There is memory for its KV now, for which it had to wait."""

    def ended(self, job: Job, now: float) -> None:
        """Its last token is there."""


class Instance(ABC):
    """A simulated engine.

    Attributes:
        busy_s: Time in steps so far.
        num_steps: So far.
        step_s: Duration of the newest step.
        is_batch_paused: Whether the step that is put together leaves decodes out.
    """

    def __init__(self, place: Place, cluster: Cluster, loop: Loop) -> None:
        self.place = place
        self.shape = place.shape
        self.cluster = cluster
        self.free_blocks = self.shape.kv_blocks
        self.batch = DecodeBatch(self.shape.block_size)
        self.started: list[Job] = []  # prompts of which some is computed
        self.busy_s = self.step_s = 0.0
        self.num_steps = self.prompt_tokens_done = self.answer_tokens_done = 0
        self.prefills_done = self.decodes_done = self.preemptions = 0
        self.has_changed = True  # since the last report
        self.log: Log | None = None
        self._lost: list[int] = []  # for the log
        self.is_batch_paused = False
        self._paused_s = 0.0  # since the last step with decodes
        self._loop = loop
        self._is_busy = False
        self._shares: list[Share] = []

    # -- what differs --------------------------------------------------------------

    @abstractmethod
    def submit(self, job: Job, now: float) -> None:
        """Compute its prompt."""

    @abstractmethod
    def compose(self, now: float) -> list[Share]:
        """Put together the next step: who joins the batch, and which prompts go on."""

    @abstractmethod
    def put_back(self, job: Job) -> None:
        """It lost its blocks and is to come again before all others that wait."""

    @abstractmethod
    def note_end(self, job: Job) -> None:
        """An answer ended here."""

    # -- steps ---------------------------------------------------------------------

    def wake(self, now: float) -> None:
        """There may be something to do."""
        self.has_changed = True
        if self._is_busy:
            return
        self._is_busy = True  # who is told of something meanwhile may call again
        shares = self._compose_something(now)
        num_decodes = 0 if self.is_batch_paused else len(self.batch)
        if not shares and not num_decodes:
            self._is_busy = False
            return
        seconds = self.duration_s(shares)
        self.prompt_tokens_done += sum(num for _, num in shares)
        self.answer_tokens_done += num_decodes
        self.num_steps += 1
        self.busy_s += seconds
        self.step_s = seconds
        self._shares = shares
        for job, _ in shares:
            if not job.computed_tokens and not job.produced_tokens:
                job.begun_s = now
        if self.log is not None:
            self._tell(self.log)
        self._loop.at(now + seconds, self._end_step)

    def duration_s(self, shares: list[Share]) -> float:
        """Of the step that was put together."""
        tokens, context = 0, 0.0
        for job, num in shares:
            tokens += num
            context += num * (job.computed_tokens + (num - 1) / 2)
        mean_context = context / tokens if tokens else 0.0
        if self.is_batch_paused:
            return self.shape.cost.step_s(0, 0, tokens, mean_context)
        return self.shape.cost.step_s(
            len(self.batch), self.batch.context_tokens, tokens, mean_context
        )

    def _tell(self, log: Log) -> None:
        prompts = tuple((job.ask.id, tokens) for job, tokens in self._shares)
        decodes = () if self.is_batch_paused else tuple(job.ask.id for job in self.batch)
        log(Step(self.place.id, self.num_steps, prompts, decodes, tuple(self._lost)))
        self._lost.clear()

    def _compose_something(self, now: float) -> list[Share]:
        """Nothing may be left of a step that lost somebody, or in which started prompts
        made way for one that was refused: the next one makes up for it."""
        while True:
            preemptions = self.preemptions
            shares = self.compose(now)
            has_lost = self.preemptions > preemptions
            if shares or len(self.batch) or not (has_lost or self.started):
                return shares

    def _end_step(self, now: float) -> None:
        if self.is_batch_paused:
            self._paused_s += self.step_s
        elif len(self.batch):
            seconds, self._paused_s = self._paused_s + self.step_s, 0.0
            for job in self.batch.step(seconds, now):
                self._end(job, now)
        for job, num in self._shares:
            job.computed_tokens += num
            if job.computed_tokens >= job.target_tokens:
                self.started.remove(job)
                self._sample(job, now)
        self._is_busy = False
        self.wake(now)

    def _sample(self, job: Job, now: float) -> None:
        """Everything it has is computed: it gets its next token."""
        if job.produced_tokens:
            job.gaps.append(now - job.last_token_s)
        else:
            job.first_token_s = now
            self.prefills_done += 1
        job.last_token_s = now
        job.produced_tokens += 1
        job.held_tokens = job.target_tokens
        if job.produced_tokens == job.ask.output_tokens:
            self._end(job, now)
        elif job.produced_tokens > 1 or not self.cluster.prefilled(job, now):
            self.batch.join(job)

    def _end(self, job: Job, now: float) -> None:
        self.free_blocks += self.blocks(job.held_tokens)
        # One token for somebody else is no answer.
        if not (job.is_split and job.prefill == self.place.id):
            self.decodes_done += 1
            self.note_end(job)
        self.cluster.ended(job, now)

    def release(self, job: Job, now: float) -> None:
        """Another instance has its KV."""
        self.free_blocks += self.blocks(job.target_tokens)
        self.wake(now)

    # -- blocks ----------------------------------------------------------------------

    def blocks(self, tokens: int) -> int:
        """That hold so many tokens."""
        return -(-tokens // self.shape.block_size)

    def grow(self, now: float) -> None:
        """Blocks for a token of everybody in the batch. When there are too few, whoever
        came last loses all of its own."""
        while self.batch.growth_blocks > self.free_blocks:
            self._preempt_newest(now)
        self.free_blocks -= self.batch.growth_blocks

    def _preempt_newest(self, now: float) -> Job:
        """Prompts come behind decodes in vLLM's list, so they go first."""
        self.preemptions += 1
        if self.started:
            job = self.started.pop()
            self.free_blocks += self.blocks(job.computed_tokens)
        else:
            job = self.batch.newest
            self.batch.leave(job, now - self._paused_s)
            self.free_blocks += self.blocks(job.held_tokens)
        job.num_preemptions += 1
        if self.log is not None:
            self._lost.append(job.ask.id)
        self.put_back(job)
        return job

    def go_on(
        self, left_tokens: int, shares: list[Share], now: float, parts: dict[str, int] | None = None
    ) -> int:
        """Give started prompts their part of a step. One without blocks takes those of who
        was started last, which may be its own.

        Args:
            parts: Most tokens for each of them.

        Returns:
            What is left of the step.
        """
        for job in tuple(self.started):
            tokens = min(job.missing_tokens if parts is None else parts[job.name], left_tokens)
            if tokens <= 0 or job not in self.started:
                continue
            taken = self.take_blocks(job, tokens)
            while not taken and self._preempt_newest(now) is not job:
                taken = self.take_blocks(job, tokens)
            if taken:
                shares.append((job, taken))
                left_tokens -= taken
        return left_tokens

    def take_blocks(self, job: Job, tokens: int) -> int:
        """Blocks for the next tokens of a prompt, all or none. Returns the tokens."""
        more_blocks = self.blocks(job.computed_tokens + tokens) - self.blocks(job.computed_tokens)
        if more_blocks > self.free_blocks:
            return 0
        self.free_blocks -= more_blocks
        return tokens
