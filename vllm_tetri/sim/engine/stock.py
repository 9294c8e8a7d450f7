"""vLLM without this package: one token budget for decodes and prompts, first come first served.

A request enters when its whole prompt finds blocks. When blocks run out later, the newest
request loses its own and computes everything again. With a small budget this is
Sarathi-Serve's stall-free batching.
"""

from __future__ import annotations

from collections import deque

from vllm_tetri.sim.config import InstanceConfig, Stock
from vllm_tetri.sim.engine.instance import Cluster, Instance, Share
from vllm_tetri.sim.request import SimRequest


class StockInstance(Instance):
    """A simulated `vllm serve`; nothing is computed yet of requests that are `waiting`. Others
    without hand-over compose their steps differently."""

    def __init__(self, config: InstanceConfig, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        self.waiting: deque[SimRequest] = deque()

    def submit(self, request: SimRequest, now: float) -> None:
        self.waiting.append(request)
        self.wake(now)

    def put_back(self, request: SimRequest) -> None:
        request.target_tokens = request.num_tokens
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)

    def begin(self, most_tokens: int, shares: list[Share]) -> int:
        """Add the next prompt to the step, at most `most_tokens` of it. Returns the tokens."""
        request = self.waiting.popleft()
        self.started.append(request)
        self.reuse(request, self.find(request)[0])
        tokens = self.take_blocks(request, min(request.missing_tokens, most_tokens))
        shares.append((request, tokens))
        return tokens

    def compose(self, now: float) -> list[Share]:
        assert isinstance(self.engine.kind, Stock)
        budget = self.engine.kind.budget_tokens or self.engine.most_tokens
        preemptions = self.preemptions
        self.grow(now)
        shares: list[Share] = []
        left = self.go_on(budget - len(self.batch), shares, now)
        while self.waiting and left > 0 and self.preemptions == preemptions:
            blocks = self.blocks(self.waiting[0].target_tokens) - self.find(self.waiting[0])[1]
            if not self.has_place() or blocks > self.free_blocks:
                break
            left -= self.begin(left, shares)
        return shares
