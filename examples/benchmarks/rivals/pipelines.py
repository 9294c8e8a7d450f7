"""Mooncake (section 5.1 of its paper): the chunks of a long prompt on several nodes in turn.

A group of nodes computes prompts together. Each chunk is computed by the next node of the group; a
layer of it waits for the layer of the chunk before, whose KV the node there passes on. So chunks
follow each other by a node's time over their number, or by the link's time, whichever is longer,
and each chunk takes as long as on one node. Every node gets the KV of all chunks, so a group holds
no more KV than one of its nodes. Prompts of one chunk are no quicker than on one node, and share
the group as well.

A group is one simulated instance: its steps are the times from one chunk to the next, and what is
computed is there when the rest of its chunk's time has passed. It hands all outputs over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from vllm_tetri.sim.cluster import ENGINES
from vllm_tetri.sim.config import EngineKind, InstanceConfig
from vllm_tetri.sim.cost.step_cost import linear
from vllm_tetri.sim.engine.instance import Cluster, Share
from vllm_tetri.sim.engine.tetri import TetriInstance
from vllm_tetri.sim.request import SimRequest
from vllm_tetri.sim.workload import above_0
from vllm_tetri.types import InstanceLoad


@dataclass(frozen=True)
class Group(EngineKind):
    """Nodes that compute prompts together, and seconds to pass the KV of a token to one other
    node. An engine's configuration is that of a node."""

    nodes: int = 2
    pass_token_s: float = 0.0

    def __post_init__(self) -> None:
        above_0(nodes=self.nodes)


class GroupInstance(TetriInstance):
    """A simulated `Group`."""

    def __init__(self, config: InstanceConfig, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        assert isinstance(config.engine.kind, Group)
        self._kind = config.engine.kind
        self._rest_s = 0.0  # from the end of the newest step to the end of its chunk

    def duration_s(self, shares: list[Share]) -> float:
        assert not len(self.batch), "a group decodes nothing"
        whole_s, nodes = super().duration_s(shares), self._kind.nodes
        # A node gets what the others compute while it computes a chunk of its own.
        passed_s = sum(num for _, num in shares) * self._kind.pass_token_s * (nodes - 1) / nodes
        between_s = max(whole_s / nodes, passed_s)
        self._rest_s = whole_s - between_s
        return between_s

    def _sample(self, request: SimRequest, now: float) -> None:
        if self._rest_s > 0:
            self.cluster.loop.at(now + self._rest_s, partial(self._sample_late, request))
        else:
            super()._sample(request, now)

    def _sample_late(self, request: SimRequest, now: float) -> None:
        super()._sample(request, now)
        self.wake(now)

    def load(self) -> InstanceLoad:
        """Report steps as they follow each other."""
        found, nodes = super().load(), self._kind.nodes
        cost = linear(self.engine.cost)
        quicker = replace(
            cost,
            base_s=cost.base_s / nodes,
            prompt_s=max(cost.prompt_s / nodes, self._kind.pass_token_s * (nodes - 1) / nodes),
            context_s=cost.context_s / nodes,
        )
        return replace(found, cost=quicker)


ENGINES[Group] = GroupInstance
