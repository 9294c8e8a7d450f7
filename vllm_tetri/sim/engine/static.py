"""Static batching (FasterTransformer): one batch after the other.

A batch is fixed when it begins and computed until its longest answer ends. Shorter prompts
are padded to the longest one, and whoever has ended keeps its place and its blocks, and is
computed along.
"""

from __future__ import annotations

from vllm_tetri.sim.engine.instance import Cluster, Share
from vllm_tetri.sim.engine.orca import ReservingInstance
from vllm_tetri.sim.job import Job
from vllm_tetri.sim.loop import Loop
from vllm_tetri.sim.setting import Place


class StaticInstance(ReservingInstance):
    """A simulated engine of that kind."""

    def __init__(self, place: Place, cluster: Cluster, loop: Loop) -> None:
        super().__init__(place, cluster, loop)
        self._num_padded = 0  # have ended before their batch
        self._longest_tokens = 0  # prompt of the batch
        self._first_step = 0

    def compose(self, now: float) -> list[Share]:
        shares: list[Share] = []
        if not len(self.batch):
            self.take_in(shares)
            self._longest_tokens = max((tokens for _, tokens in shares), default=0)
            self._first_step = self.batch.num_steps
        return shares

    def duration_s(self, shares: list[Share]) -> float:
        longest = self._longest_tokens
        if shares:
            tokens = len(shares) * longest
            return self.shape.cost.step_s(0, 0, tokens, (longest - 1) / 2)
        num = len(self.batch) + self._num_padded
        context = longest + self.batch.num_steps - self._first_step
        return self.shape.cost.step_s(num, num * context, 0, 0)

    def note_end(self, job: Job) -> None:
        """It gave its blocks back, and takes them again until its batch is done."""
        window_blocks = self.blocks(job.held_tokens)
        if len(self.batch) or self.started:
            self._num_padded += 1
            self.free_blocks -= window_blocks
        else:
            self.free_blocks += self._num_padded * window_blocks
            self._num_padded = 0
