"""ORCA: whole prompts join running decodes at every step.

Every request has blocks for the longest one that there may be, from its first step to its
last, since a prompt's length says nothing of its answer's. So few are in a step, and nobody
ever loses its blocks.
"""

from __future__ import annotations

from vllm_tetri.sim.engine.fcfs import FcfsInstance
from vllm_tetri.sim.engine.instance import Cluster, Share
from vllm_tetri.sim.engine.kinds import Orca, Static
from vllm_tetri.sim.loop import Loop
from vllm_tetri.sim.setting import Place


class ReservingInstance(FcfsInstance):
    """An engine whose requests hold blocks for a whole window."""

    def __init__(self, place: Place, cluster: Cluster, loop: Loop) -> None:
        super().__init__(place, cluster, loop)
        assert isinstance(place.shape.engine, Orca | Static)
        self._window_blocks = super().blocks(place.shape.engine.window_tokens)

    def blocks(self, tokens: int) -> int:
        return self._window_blocks if tokens else 0

    def take_in(self, shares: list[Share]) -> None:
        """Prompts that wait, as many as have room."""
        while self.waiting and not self.is_full and self._window_blocks <= self.free_blocks:
            self.begin(self.waiting[0].target_tokens, shares)


class OrcaInstance(ReservingInstance):
    """A simulated engine of that kind."""

    def compose(self, now: float) -> list[Share]:
        shares: list[Share] = []
        self.take_in(shares)
        return shares
