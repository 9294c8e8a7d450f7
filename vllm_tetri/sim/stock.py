"""vLLM as it comes: one token budget for decodes and prompts, first come first served.

Decodes go first because they came first. Several prompts may share a step. A request
enters when its whole prompt finds blocks; when blocks run out later, the newest one loses
its own and computes everything again.
"""

from __future__ import annotations

from collections import deque

from vllm_tetri.sim.instance import Cluster, Instance, Share
from vllm_tetri.sim.job import Job
from vllm_tetri.sim.loop import Loop
from vllm_tetri.sim.setting import Place


class StockInstance(Instance):
    """A simulated engine without this package."""

    def __init__(self, place: Place, cluster: Cluster, loop: Loop) -> None:
        super().__init__(place, cluster, loop)
        assert place.shape.stock_budget is not None
        self._budget = place.shape.stock_budget
        # vLLM refuses to start with more requests than tokens in a step.
        self._max_requests = min(place.shape.max_requests, self._budget)
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

    def compose(self, now: float) -> list[Share]:
        preemptions = self.preemptions
        self.grow(now)
        shares: list[Share] = []
        left = self.go_on(self._budget - len(self.batch), shares, now)
        waiting = self.waiting
        while waiting and left > 0 and self.preemptions == preemptions:
            job = waiting[0]
            num_running = len(self.batch) + len(self.started)
            is_full = num_running >= self._max_requests
            if is_full or self.blocks(job.target_tokens) > self.free_blocks:
                break
            waiting.popleft()
            self.started.append(job)
            tokens = self.take_blocks(job, min(job.missing_tokens, left))
            shares.append((job, tokens))
            left -= tokens
        return shares
