"""An engine with this package: ordered prompts in chunks, KV that arrives, admission."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from vllm_tetri.policy.lengths import HEAVY_TOKENS
from vllm_tetri.policy.order import PrefillPolicy, PrefillQueues
from vllm_tetri.sim.cost.step_cost import linear
from vllm_tetri.sim.engine.answers import Answers, Arena, Gate
from vllm_tetri.sim.engine.instance import Cluster, Instance, Share
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


_arrival = attrgetter("ask.arrival_s")


@dataclass(slots=True)
class _Kept:
    """A prompt that lost its blocks.

    Attributes:
        tokens: Whose KV is kept.
        left_tokens: To be computed yet, without counting those.
    """

    tokens: int
    left_tokens: int


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
        self.arena = Arena(shape.arena_tokens, shape.block_size)
        self.held: deque[Job] = deque()
        self.coming: dict[Job, None] = {}
        self.gate = Gate(shape, self.answers)
        self._waiting: dict[str, Job] = {}
        self._is_stuck = False
        self._room_blocks: int | None = None  # for prompts that start; None: all that is free
        self._news: deque[Callable[[], None]] = deque()  # heard of between two steps
        # Of the newest step: who was let in, prompts that it began, and what left the arena.
        self._admitted: list[Job] = []
        self._begun: list[Job] = []
        self._loaded: list[int] = []
        self._kept: dict[Job, _Kept] = {}

    # -- work that comes -------------------------------------------------------------

    def submit(self, job: Job, now: float) -> None:
        self._news.append(partial(self._enter, job))
        self.wake(now)

    def _enter(self, job: Job) -> None:
        job.target_tokens = job.ask.prompt_tokens
        self.prompts.add(job.name, job.target_tokens)
        self._waiting[job.name] = job

    def open(self, job: Job) -> None:
        """Its KV is to come here."""
        self.has_changed = True
        self.arena.open(job)

    def expect(self, job: Job, now: float) -> None:
        """Its prompt is done, and all its KV on its way."""
        self._news.append(partial(self.coming.setdefault, job))
        self.wake(now)

    def receive(self, job: Job, now: float) -> None:
        """All its KV is here."""
        self._news.append(partial(self._hold, job))
        self.wake(now)

    def _hold(self, job: Job) -> None:
        del self.coming[job]
        job.computed_tokens = job.target_tokens
        self.held.append(job)

    def drop(self, job: Job, now: float) -> None:
        """Its KV is not to come after all."""
        self.has_changed = True
        self.arena.drop(job)
        self._grant(now)

    def put_back(self, job: Job) -> None:
        """What it has is kept, but not of a prompt for somebody else."""
        if job.name not in self.prompts:
            self.arena.take(job.held_tokens)
            self.held.appendleft(job)
            return
        if not job.is_split:
            self.arena.take(job.computed_tokens)
            self._kept[job] = _Kept(job.computed_tokens, job.target_tokens)
        job.computed_tokens = 0
        self.prompts.put_back(job.name, job.target_tokens)
        self._waiting[job.name] = job

    def note_end(self, job: Job) -> None:
        self.gate.ended(job)
        self.answers.ended(job)

    # -- a step ------------------------------------------------------------------------

    def compose(self, now: float) -> list[Share]:
        self.settle(now)
        chunk_tokens = self._begin_step(now)
        if not self.held and not self.started and not self._waiting:
            self._is_stuck = False
            self.grow(now)
            return []
        is_srtf = self.prompts.policy is PrefillPolicy.SRTF
        parts = self._parts(chunk_tokens) if is_srtf else None
        preemptions = self.preemptions
        self.grow(now)
        shares: list[Share] = []
        left = self.go_on(chunk_tokens, shares, now, parts)
        # vLLM lets nobody in while it takes blocks away.
        if self.preemptions == preemptions:
            self._start(self._admit(left + len(self.held)), shares)
        self._tell_computed(shares, now)
        for job, tokens in shares:
            remaining_tokens = job.missing_tokens - tokens
            if not remaining_tokens:
                job.hidden_tokens = job.computed_tokens if job.is_granted else 0
            if job in self._kept:
                self._kept[job].left_tokens = remaining_tokens
            self.prompts.computed(job.name, tokens, remaining_tokens)
        # Whatever kept the next prompt back, started ones must go on.
        self._is_stuck = not shares and bool(self.started)
        return shares

    def _tell_computed(self, shares: list[Share], now: float) -> None:
        """Prompts for others that go on: what they have may leave."""
        going_on = [job for job, _ in shares if job.is_split and job.computed_tokens]
        if len(going_on) > 1:
            going_on.sort(key=_arrival)
        for job in going_on:
            self.cluster.computed(job, now)

    def _begin_step(self, now: float) -> int:
        """Before anything is allocated. Returns how many prompt tokens it may take."""
        chunk_tokens = self._chunk_tokens()
        self.gate.begin_step(now, self.batch, self.started, self.free_blocks, chunk_tokens)
        return chunk_tokens

    def _admit(self, left_tokens: int) -> int:
        """Let held requests in, first come first served. Each takes a token of the step; there
        is one for everyone on top of the chunk, as for who was in the batch before.

        Returns:
            What is left of the step; 0 if somebody must wait.
        """
        while self.held:
            job = self.held[0]
            if left_tokens <= 0 or not self._has_place():
                return 0
            if not self.gate.lets_in(job, job.held_tokens, missing_tokens=0):
                return 0
            blocks = self.blocks(job.held_tokens + 1)
            if blocks > self.free_blocks:
                return 0
            self.held.popleft()
            self.free_blocks -= blocks
            self._loaded.append(job.held_tokens)
            self._admitted.append(job)
            self.batch.join(job)
            left_tokens -= 1
        return left_tokens

    def settle(self, now: float) -> None:
        """Between two steps: hear what came meanwhile, and what the last one left behind."""
        while self._news:
            self._news.popleft()()
        if not self._loaded:
            return
        # In the batch they are behind those whose prompts it ended, and before those it began.
        for job in (*self._admitted, *self._begun):
            self.batch.put_last(job)
            self._kept.pop(job, None)
        for tokens in self._loaded:
            self.arena.give_back(tokens)
        self._admitted.clear()
        self._loaded.clear()
        self._grant(now)

    def _grant(self, now: float) -> None:
        for granted in self.arena.grant():
            self.cluster.granted(granted, now)

    def _has_place(self) -> bool:
        """Whether one more may be in a step."""
        return len(self.batch) + len(self.started) < self.shape.max_requests

    def _chunk_tokens(self) -> int:
        """Most prompt tokens of the next step."""
        shape = self.shape
        num_decodes = len(self.batch)
        if shape.tbt_slo_s is None or not num_decodes:
            return shape.chunk_tokens
        context = self.started[0].computed_tokens if self.started else 0
        cost = linear(shape.cost)
        left_s = shape.tbt_slo_s - cost.step_s(num_decodes, self.batch.context_tokens, 0, 0)
        token_s = cost.prompt_s + context * cost.context_s
        tokens = int(left_s / token_s) if token_s else shape.chunk_tokens
        return min(shape.chunk_tokens, max(shape.least_tokens, tokens))

    def _start(self, left_tokens: int, shares: list[Share]) -> None:
        """Begin prompts with what is left of a step."""
        self._begun.clear()
        while left_tokens > 0 and self._may_start() and self._has_place():
            job = self._next()
            kept_tokens = self._kept[job].tokens if job in self._kept else 0
            tokens = job.target_tokens - 1
            if not self.gate.lets_in(job, tokens, missing_tokens=tokens - kept_tokens):
                return
            blocks = self.blocks(job.target_tokens)
            if blocks > self.free_blocks:
                return
            job.computed_tokens = kept_tokens
            tokens = self.part_of(job, left_tokens, is_first=not shares)
            if not tokens:
                return
            if self._room_blocks is not None:
                self._room_blocks -= blocks
            self.prompts.start()
            del self._waiting[job.name]
            self.started.append(job)
            self._begun.append(job)
            if kept_tokens:
                self._loaded.append(kept_tokens)
                self.free_blocks -= self.blocks(kept_tokens)
            shares.append((job, self.take_blocks(job, tokens)))
            left_tokens -= tokens

    def part_of(self, job: Job, left_tokens: int, *, is_first: bool) -> int:
        """Tokens of a prompt that begins in a step with room for so many; 0: not in this one.

        Args:
            is_first: Whether nothing else is computed in it.
        """
        return min(job.missing_tokens, left_tokens)

    def _may_start(self) -> bool:
        if not self._waiting or self._room_blocks is None:
            return bool(self._waiting)
        return 0 < self._room_blocks >= self.blocks(self._next().target_tokens)

    def _next(self) -> Job:
        """Of those of which nothing is computed; there must be one."""
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

    def _parts(self, chunk_tokens: int) -> dict[str, int] | None:
        """What `srtf` gives started prompts of a step: it interrupts them, and they keep their
        blocks, so that those that start beside them must leave them room. None: what they can
        take."""
        if self._is_stuck:
            self._room_blocks = 0
            return None
        prompts = self.prompts
        room_blocks = self.free_blocks - sum(map(self.blocks, prompts.started_tokens()))
        self._room_blocks = max(0, room_blocks) if self._has_place() else 0
        self._refill(is_chunk_open=False)
        parts = prompts.plan(chunk_tokens)
        # Who was refused in the last step most likely is again.
        if self._waiting and (self.gate.was_shut or not self._may_start()):
            parts = prompts.plan(chunk_tokens, only_started=True)
        return parts

    # -- what is reported ----------------------------------------------------------------

    def queued_tokens(self) -> int:
        """Of prompts, not computed yet; those whose KV is kept do not count."""
        kept_tokens = sum(each.left_tokens for each in self._kept.values())
        return self.prompts.unfinished_tokens - kept_tokens

    def num_waiting(self) -> int:
        """Requests here that are in no step, and that will be."""
        return len(self.held) + len(self.coming) + len(self._waiting)

    def decodes(self) -> Decodes:
        """Requests that are to write their answers here."""
        batch = self.batch
        produced_tokens = batch.produced_tokens()
        totals = self.answers.total_tokens(batch, produced_tokens)
        heavy = sum(total > HEAVY_TOKENS for total in totals)
        light = len(batch) - heavy
        remaining, context = sum(totals) - sum(produced_tokens), batch.context_tokens
        for jobs in (self.held, self.coming, self._waiting.values(), self.started):
            for job in jobs:
                if not (job.is_split and job.prefill == self.place.id):
                    # The first token comes with the KV.
                    produced = 0 if jobs is self.coming else job.produced_tokens
                    total = self.answers.newest_total_tokens(job, produced)
                    heavy += total > HEAVY_TOKENS
                    light += total <= HEAVY_TOKENS
                    remaining += total - produced
                    context += job.computed_tokens
        return Decodes(heavy, light, remaining, context)
