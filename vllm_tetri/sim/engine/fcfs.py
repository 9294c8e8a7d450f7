"""What engines without hand-over have in common: first come, first served."""

from __future__ import annotations

from collections import deque

from vllm_tetri.sim.engine.instance import Cluster, Instance, Share
from vllm_tetri.sim.job import Job
from vllm_tetri.sim.loop import Loop
from vllm_tetri.sim.setting import Place


class FcfsInstance(Instance):
    """An engine that does everything for its requests, in the order in which they came. One
    that loses its blocks computes everything again.

    Attributes:
        waiting: Requests of which nothing is computed.
    """

    def __init__(self, place: Place, cluster: Cluster, loop: Loop) -> None:
        super().__init__(place, cluster, loop)
        self.max_requests = place.shape.max_requests
        self.waiting: deque[Job] = deque()

    def submit(self, job: Job, now: float) -> None:
        job.target_tokens = job.ask.prompt_tokens
        self.waiting.append(job)
        self.wake(now)

    def put_back(self, job: Job) -> None:
        job.target_tokens = job.ask.prompt_tokens + job.produced_tokens
        job.computed_tokens = 0
        self.waiting.appendleft(job)

    def note_end(self, job: Job) -> None:
        """Nothing is learnt of it."""

    @property
    def is_full(self) -> bool:
        """Whether as many are in a step as may be."""
        return len(self.batch) + len(self.started) >= self.max_requests

    def begin(self, most_tokens: int, shares: list[Share]) -> int:
        """The next prompt is computed in this step, or so many tokens of it. Returns the
        tokens."""
        job = self.waiting.popleft()
        self.started.append(job)
        tokens = self.take_blocks(job, min(job.missing_tokens, most_tokens))
        shares.append((job, tokens))
        return tokens
