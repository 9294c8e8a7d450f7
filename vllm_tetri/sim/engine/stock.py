"""vLLM as it comes: one token budget for decodes and prompts, first come first served.

Decodes go first because they came first. Several prompts may share a step. A request
enters when its whole prompt finds blocks; when blocks run out later, the newest one loses
its own and computes everything again. With a small budget this is Sarathi-Serve's
stall-free batching.
"""

from __future__ import annotations

from vllm_tetri.sim.engine.fcfs import FcfsInstance
from vllm_tetri.sim.engine.instance import Cluster, Share
from vllm_tetri.sim.engine.kinds import Stock
from vllm_tetri.sim.loop import Loop
from vllm_tetri.sim.setting import Place


class StockInstance(FcfsInstance):
    """A simulated engine without this package."""

    def __init__(self, place: Place, cluster: Cluster, loop: Loop) -> None:
        super().__init__(place, cluster, loop)
        assert isinstance(place.shape.engine, Stock)
        self._budget = place.shape.engine.budget_tokens
        # vLLM refuses to start with more requests than tokens in a step.
        self.max_requests = min(self.max_requests, self._budget)

    def compose(self, now: float) -> list[Share]:
        preemptions = self.preemptions
        self.grow(now)
        shares: list[Share] = []
        left = self.go_on(self._budget - len(self.batch), shares, now)
        while self.waiting and left > 0 and self.preemptions == preemptions:
            if self.is_full or self.blocks(self.waiting[0].target_tokens) > self.free_blocks:
                break
            left -= self.begin(left, shares)
        return shares
