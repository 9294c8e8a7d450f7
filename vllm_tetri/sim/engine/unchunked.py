"""Engines that hand KV over and compute prompts whole: of DistServe and Splitwise.

Prompts go before what wants to be decoded. Where both come together, as on Splitwise's
mixed machines, a prompt that finds no blocks takes those of the newest decodes, so that the
older one is, the safer it is; and nobody loses its place too often.
"""

from __future__ import annotations

from vllm_tetri.sim.engine.instance import Share
from vllm_tetri.sim.engine.tetri import TetriInstance
from vllm_tetri.sim.job import Job

_MOST_PREEMPTIONS = 2  # of one request, for prompts


class UnchunkedInstance(TetriInstance):
    """A simulated engine of that kind."""

    def compose(self, now: float) -> list[Share]:
        self.settle(now)
        self._make_room(now)
        self._begin_step(now)
        preemptions = self.preemptions
        self.grow(now)
        shares: list[Share] = []
        if self.preemptions == preemptions:
            self._start(self.shape.chunk_tokens, shares)
            self._admit(self.shape.max_requests)
        for job, tokens in shares:
            self.prompts.computed(job.name, tokens, 0)
        return shares

    def part_of(self, job: Job, left_tokens: int, *, is_first: bool) -> int:
        is_fit = is_first or job.missing_tokens <= left_tokens
        return job.missing_tokens if is_fit else 0

    def _make_room(self, now: float) -> None:
        """Newest decodes lose their place if that is enough for the next prompt."""
        if not self._waiting or not self._has_place():
            return
        missing = self.blocks(self._next().target_tokens) - self.free_blocks
        losers = list(zip(self.batch, self.batch.held_tokens(), strict=True))
        num = 0
        while missing > 0 and losers and losers[-1][0].num_preemptions < _MOST_PREEMPTIONS:
            missing -= self.blocks(losers.pop()[1])
            num += 1
        if missing <= 0:
            for _ in range(num):
                self._preempt_newest(now)
