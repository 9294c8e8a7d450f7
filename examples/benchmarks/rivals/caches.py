"""How routers of others use prefix caches, by their published rules. All serve a request on one
instance. What instances hold is known to all as to ours: as of the last report. Loads that a router
counts by itself are exact. Equal choices are drawn at random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from random import Random

from vllm_tetri.policy.cluster import ClusterTable
from vllm_tetri.policy.route import Route
from vllm_tetri.sim.config import MODEL, ClusterConfig
from vllm_tetri.sim.modes import SimMode, WholeMode
from vllm_tetri.sim.workload import RequestSpec
from vllm_tetri.types import InstanceId


class BlindMode(WholeMode):
    """Ours, with instances that do not tell what they hold."""

    def held_tokens(self, *_: object) -> dict[InstanceId, int]:
        return {}


class _Scored(SimMode):
    """Base of modes that take the instance with the highest score, and count what is in flight."""

    def __init__(self, config: ClusterConfig) -> None:
        self._rng = Random(f"{config.seed} {type(self).__name__}")
        self._block_size = config.instances[0].engine.block_size
        self._where: dict[int, InstanceId] = {}
        self.in_flight = Counter({each.id: 0 for each in config.instances})

    def scores(self, table: ClusterTable, spec: RequestSpec) -> Mapping[InstanceId, float]:
        """Return a number per instance that may be chosen; the highest wins."""
        raise NotImplementedError

    def route(self, table: ClusterTable, spec: RequestSpec, now: float) -> Route:
        scores = self.scores(table, spec)
        best = max(scores.values())
        chosen = self._rng.choice([name for name, score in scores.items() if score == best])
        self._where[spec.id] = chosen
        self.in_flight[chosen] += 1
        return Route(chosen, chosen, "highest score")

    def ended(self, spec: RequestSpec, now: float) -> None:
        self.in_flight[self._where.pop(spec.id)] -= 1


class LlmdMode(_Scored):
    """The scorers of the Gateway API inference extension with the weights of llm-d's guide to
    inference scheduling and of the extension's default: prefix cache 3 (the share of the prompt's
    blocks that is cached), queue 2 (1 for the fewest waiting requests, 0 for the most) and KV cache
    utilisation 2 (the free share), from metrics (llm-d.ai/docs, architecture, router, scheduling).
    The extension reads metrics every 50 ms, here they come every 100 ms."""

    PREFIX, QUEUE, MEMORY = 3.0, 2.0, 2.0

    def scores(self, table: ClusterTable, spec: RequestSpec) -> Mapping[InstanceId, float]:
        rows = table.by_model[MODEL]
        held = self.held_tokens(spec, rows)
        loads = {row.id: row.view.load for row in rows}
        queues = [load.waiting for load in loads.values()]
        most, spread = max(queues), max(queues) - min(queues)
        return {
            name: self.PREFIX * held.get(name, 0) / spec.prompt_tokens
            + self.QUEUE * ((most - load.waiting) / spread if spread else 1.0)
            + self.MEMORY * (1 - load.blocks_used / load.blocks_total)
            for name, load in loads.items()
        }


class DynamoMode(_Scored):
    """Dynamo's KV router: the lowest `overlap_score_weight * prefill_blocks + decode_blocks`, with
    its default weight of 1 and temperature of 0 (docs.nvidia.com/dynamo, router, routing concepts).
    Prefill blocks are those of prompts without a first token and of this one, less what was cached
    when they were routed; decode blocks are those of the prompts of all active requests."""

    WEIGHT = 1.0

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        self._waiting: Counter[InstanceId] = Counter()  # prompt tokens to compute
        self._active: Counter[InstanceId] = Counter()  # prompt tokens
        self._new_tokens: dict[int, int] = {}  # of prompts without a first token

    def scores(self, table: ClusterTable, spec: RequestSpec) -> Mapping[InstanceId, float]:
        self._held = self.held_tokens(spec, table.by_model[MODEL])
        tokens = {
            name: self.WEIGHT * (self._waiting[name] + spec.prompt_tokens - self._held.get(name, 0))
            + self._active[name]
            for name in self.in_flight
        }
        return {name: -each / self._block_size for name, each in tokens.items()}

    def route(self, table: ClusterTable, spec: RequestSpec, now: float) -> Route:
        route = super().route(table, spec, now)
        name = self._where[spec.id]
        self._new_tokens[spec.id] = spec.prompt_tokens - self._held.get(name, 0)
        self._waiting[name] += self._new_tokens[spec.id]
        self._active[name] += spec.prompt_tokens
        return route

    def prefilled(self, spec: RequestSpec, now: float) -> None:
        self._waiting[self._where[spec.id]] -= self._new_tokens.pop(spec.id)

    def ended(self, spec: RequestSpec, now: float) -> None:
        if spec.id in self._new_tokens:  # its first token was the last one
            self.prefilled(spec, now)
        self._active[self._where[spec.id]] -= spec.prompt_tokens
        super().ended(spec, now)


class ThresholdMode(_Scored):
    """`cache_aware` of vllm-router 0.1.17 and SGLang's router, with their defaults. The instance
    with the longest match in what was sent to it takes a request if that is more than 0.3 of the
    prompt, else the one that was sent the least so far. If the most requests in flight are over 64
    more than the fewest and over 1.5 times as many, the shortest queue takes it (`--help` of
    vllm-router; docs of SGLang's router). Its trees have room for all that is sent here."""

    MATCH, MOST_MORE, MOST_TIMES = 0.3, 64, 1.5

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        self._sent: dict[InstanceId, set[int]] = {each.id: set() for each in config.instances}

    def scores(self, table: ClusterTable, spec: RequestSpec) -> Mapping[InstanceId, float]:
        fewest, most = min(self.in_flight.values()), max(self.in_flight.values())
        if most - fewest > self.MOST_MORE and most > self.MOST_TIMES * fewest:
            return {name: -count for name, count in self.in_flight.items()}
        names = spec.prompt_names
        matches = {each: sum(name in sent for name in names) for each, sent in self._sent.items()}
        if names and max(matches.values()) > self.MATCH * len(names):
            return matches
        return {each: -len(sent) for each, sent in self._sent.items()}

    def route(self, table: ClusterTable, spec: RequestSpec, now: float) -> Route:
        route = super().route(table, spec, now)
        self._sent[self._where[spec.id]].update(spec.prompt_names)
        return route


MODES = {
    "ours, blind": BlindMode,
    "llm-d": LlmdMode,
    "dynamo": DynamoMode,
    "cache_aware": ThresholdMode,
}
