"""An engine with this package: ordered prompts in chunks, KV that arrives, admission."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from vllm_tetri.policy.lengths import HEAVY_TOKENS
from vllm_tetri.policy.order import PrefillPolicy, PrefillQueues
from vllm_tetri.sim.answers import Answers, Arena, Gate
from vllm_tetri.sim.instance import Cluster, Instance, Share
from vllm_tetri.sim.job import Job
from vllm_tetri.sim.loop import Loop
from vllm_tetri.sim.setting import Place


class Decodes(NamedTuple):
    """Of one instance: decodes of either kind, tokens that they are expected to write yet,
    and tokens of their context."""

    heavy: int
    light: int
    remaining_tokens: int
    context_tokens: int


class TetriInstance(Instance):
    """A simulated `vllm serve --role ...`.

    Attributes:
        held: Requests whose KV is here and waits for the batch.
        coming: Requests whose KV is on its way from a prompt that is done.
    """

    def __init__(self, place: Place, cluster: Cluster, loop: Loop) -> None:
        super().__init__(place, cluster, loop)
        shape = place.shape
        self.prompts = PrefillQueues(shape.order, shape.sched_batch)
        self.answers = Answers()
        self.arena = Arena(shape.arena_tokens)
        self.held: deque[Job] = deque()
        self.coming: dict[Job, None] = {}
        self.gate = Gate(shape, self.answers)
        self._waiting: dict[str, Job] = {}
        self._was_shut = False

    # -- work that comes -------------------------------------------------------------

    def submit(self, job: Job, now: float) -> None:
        job.target_tokens = job.ask.prompt_tokens
        self.prompts.add(job.name, job.target_tokens)
        self._waiting[job.name] = job
        self.wake(now)

    def open(self, job: Job) -> None:
        """Its KV is to come here."""
        self.has_changed = True
        self.arena.open(job)

    def expect(self, job: Job) -> None:
        """Its prompt is done, and all its KV on its way."""
        self.has_changed = True
        self.coming[job] = None

    def receive(self, job: Job, now: float) -> None:
        """All its KV is here."""
        del self.coming[job]
        job.computed_tokens = job.target_tokens
        self.held.append(job)
        self.wake(now)

    def put_back(self, job: Job) -> None:
        if job.name in self.prompts:
            job.computed_tokens = 0
            self.prompts.put_back(job.name, job.target_tokens)
            self._waiting[job.name] = job
        else:
            self.arena.used_tokens += job.held_tokens
            self.held.appendleft(job)

    def note_end(self, job: Job) -> None:
        self.gate.ended(job)
        self.answers.ended(job)

    # -- a step ------------------------------------------------------------------------

    def compose(self, now: float) -> list[Share]:
        if not self.held and not self.started and not self._waiting:
            self.grow(now)
            return []
        self.gate.begin_step()
        # What runs is looked at before anything is allocated in this step.
        if self.held or self._waiting:
            self.gate.look(self.batch, self.started, self.free_blocks)
        preemptions = self.preemptions
        self.grow(now)
        shares: list[Share] = []
        left = self._chunk_tokens()
        parts = self._parts(left) if self.prompts.policy is PrefillPolicy.SRTF else None
        left = self.go_on(left, shares, now, parts)
        # vLLM lets nobody in while it takes blocks away.
        self._was_shut = self.preemptions > preemptions or not self._admit(now)
        if not self._was_shut:
            self._start(left, shares)
        for job, tokens in shares:
            remaining_tokens = job.missing_tokens - tokens
            if not remaining_tokens:
                job.hidden_tokens = job.computed_tokens if job.is_granted else 0
            self.prompts.computed(job.name, tokens, remaining_tokens)
        return shares

    def _admit(self, now: float) -> bool:
        """Let held requests in, first come first served. Returns whether all are."""
        while self.held:
            job = self.held[0]
            blocks = self.blocks(job.held_tokens + 1)
            if blocks > self.free_blocks or not self._has_place():
                return False
            if not self.gate.lets_in(job, job.held_tokens):
                return False
            self.held.popleft()
            self.free_blocks -= blocks
            self.arena.used_tokens -= job.held_tokens
            self.batch.join(job)
            for granted in self.arena.grant():
                self.cluster.granted(granted, now)
        return True

    def _has_place(self) -> bool:
        return len(self.batch) + len(self.started) < self.shape.max_requests

    def _chunk_tokens(self) -> int:
        """Most prompt tokens of the next step."""
        shape = self.shape
        num_decodes = len(self.batch)
        if shape.tbt_slo_s is None or not num_decodes:
            return shape.chunk_tokens
        context = self.started[0].computed_tokens if self.started else 0
        cost = shape.cost
        left_s = shape.tbt_slo_s - cost.step_s(num_decodes, self.batch.context_tokens, 0, 0)
        token_s = cost.prompt_s + context * cost.context_s
        tokens = int(left_s / token_s) if token_s else shape.chunk_tokens
        return min(shape.chunk_tokens, max(shape.least_tokens, tokens))

    def _start(self, left: int, shares: list[Share]) -> None:
        """Begin prompts with what is left of a step."""
        while left > 0 and self._waiting and self._has_place():
            job = self._next()
            blocks = self.blocks(job.target_tokens)
            if blocks > self._room_blocks():
                return
            if not self.gate.lets_in(job, job.target_tokens):
                self._was_shut = True
                return
            self.prompts.start()
            del self._waiting[job.name]
            self.started.append(job)
            tokens = self.take_blocks(job, min(job.missing_tokens, left))
            shares.append((job, tokens))
            left -= tokens

    def _room_blocks(self) -> int:
        """Free blocks that started prompts do not need to their ends."""
        return self.free_blocks - sum(
            self.blocks(job.target_tokens) - self.blocks(job.computed_tokens)
            for job in self.started
        )

    def _next(self) -> Job:
        name = self.prompts.head()
        if name is None:
            self._refill(is_chunk_open=True)
            name = self.prompts.head()
        assert name is not None, "every prompt that waits can be ordered"
        return self._waiting[name]

    def _refill(self, *, is_chunk_open: bool) -> None:
        batch = self.prompts.pull(is_chunk_open=is_chunk_open)
        if batch:
            self.prompts.enter((name, self._waiting[name].missing_tokens) for name in batch)

    def _parts(self, left: int) -> dict[str, int]:
        """What `srtf` gives started prompts of a step: it interrupts them."""
        self._refill(is_chunk_open=False)
        has_room = self._has_place() and bool(self._waiting)
        if has_room:
            has_room = self.blocks(self._next().target_tokens) <= self._room_blocks()
        # Who was refused in the last step most likely is again.
        return self.prompts.plan(left, only_started=self._was_shut or not has_room)

    # -- what is reported ----------------------------------------------------------------

    def num_waiting(self) -> int:
        """Requests here that are in no step, and that will be."""
        return len(self.held) + len(self.coming) + len(self._waiting)

    def decodes(self) -> Decodes:
        """Requests that are to write their answers here."""
        batch = self.batch
        lefts = self.answers.remaining_tokens(batch)
        pairs = zip(lefts, batch.produced_tokens(), strict=True)
        heavy = sum(left + produced > HEAVY_TOKENS for left, produced in pairs)
        light = len(batch) - heavy
        remaining, context = sum(lefts), batch.context_tokens
        for jobs in (self.held, self.coming, self._waiting.values(), self.started):
            for job in jobs:
                if not (job.is_split and job.prefill == self.place.id):
                    total = self.answers.newest_total_tokens(job)
                    heavy += total > HEAVY_TOKENS
                    light += total <= HEAVY_TOKENS
                    remaining += total - job.produced_tokens
                    context += job.computed_tokens
        return Decodes(heavy, light, remaining, context)
