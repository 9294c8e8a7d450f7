"""vLLM as of 2023: prompts before decodes, never in one step with them.

Prompts that wait and find blocks make up a step, whole; everybody else's tokens wait for
it. Only then decodes go on. Nothing is kept free for what decodes will need: when blocks run
out, the newest one loses its own and computes everything again.
"""

from __future__ import annotations

from vllm_tetri.sim.engine.fcfs import FcfsInstance
from vllm_tetri.sim.engine.instance import Cluster, Share
from vllm_tetri.sim.engine.kinds import PromptsFirst
from vllm_tetri.sim.loop import Loop
from vllm_tetri.sim.setting import Place


class PromptsFirstInstance(FcfsInstance):
    """A simulated engine of that kind."""

    def __init__(self, place: Place, cluster: Cluster, loop: Loop) -> None:
        super().__init__(place, cluster, loop)
        assert isinstance(place.shape.engine, PromptsFirst)
        self._limits = place.shape.engine

    def compose(self, now: float) -> list[Share]:
        shares = self._prompts()
        self.is_batch_paused = bool(shares)
        if not shares:
            self.grow(now)
        return shares

    def _prompts(self) -> list[Share]:
        shares: list[Share] = []
        left = self._limits.most_tokens
        while self.waiting and len(shares) < self._limits.most_prompts and not self.is_full:
            tokens = self.waiting[0].target_tokens
            if self.blocks(tokens) > self.free_blocks or (shares and tokens > left):
                break
            left -= self.begin(tokens, shares)
        return shares
