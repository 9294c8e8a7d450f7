"""Systems that papers compare, each on the same instances: how its engines compute, and how
requests find them. A new one is a function and a line in `SYSTEMS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NamedTuple

from examples.benchmarks.rivals.adrenaline import attended, synchronised
from examples.benchmarks.rivals.engines import (
    USUAL_WINDOW_TOKENS,
    Cadence,
    Orca,
    PromptsFirst,
    Static,
    Unchunked,
)
from examples.benchmarks.rivals.fastserve import FastServe
from examples.benchmarks.rivals.modes import MooncakeMode, SplitwiseMode
from examples.benchmarks.rivals.pipelines import Group
from examples.benchmarks.rivals.rejection import RejectingMode, Rule
from examples.benchmarks.rivals.tgi import Tgi
from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.adaptive import NO_OBJECTIVE, Objective
from vllm_tetri.policy.cluster import InstanceRow, Need
from vllm_tetri.policy.dispatch import DecodeCandidates
from vllm_tetri.policy.lengths import End
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, EngineKind, Stock, make_instances
from vllm_tetri.sim.cost.hardware import GPUS, MODELS
from vllm_tetri.sim.links import LINKS
from vllm_tetri.types import Role

SARATHI_BUDGET_TOKENS = 512  # Sarathi-Serve's under a strict SLO, section 5
SPLITWISE_BATCH_TOKENS = 2048
# Mooncake: chunks of more than 1000 tokens saturate the device. Those of its decode instances
# are for prompts that disturb no decode; the paper names no number.
MOONCAKE_CHUNK_TOKENS, MOONCAKE_INLINE_TOKENS = 1024, 128
# TetriInfer, section 5.2.2: right predictions with buckets of 200 tokens, and by how much longer
# prompts take beside the predictor.
PAPER_ACCURACY, PAPER_PREDICTOR_COST = 0.749, 1.1
_USUAL, _WHOLE_PROMPTS = EngineConfig(), Unchunked()


@dataclass(frozen=True, slots=True)
class Parts:
    """What a system is built of.

    Attributes:
        instances: All of them.
        engine: Steps, memory and chunk of each; a system sets what is particular to it.
        prefill: Prefill instances of a system with roles; None for half.
        window_tokens: Longest prompt and output, for engines that reserve memory for it.
        objective: SLOs, for systems that refuse.
        seed: Random seed of probes.

    Raises:
        ConfigError: There is no instance, or none is left for one of the roles.
    """

    instances: int
    engine: EngineConfig = _USUAL
    prefill: int | None = None
    window_tokens: int = USUAL_WINDOW_TOKENS
    objective: Objective = NO_OBJECTIVE
    seed: int = 0

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise ConfigError(f"{self.instances} instances: must be at least 1")
        if self.prefill is not None and not 1 <= self.prefill < self.instances:
            raise ConfigError(
                f"{self.prefill} of {self.instances} instances for prompts: must be at least 1, "
                "and leave one for decoding"
            )

    def divided(self) -> tuple[int, int]:
        """Prefill and decode instances.

        Raises:
            ConfigError: There is only one instance.
        """
        if self.instances < 2:
            raise ConfigError("a system with prefill and decode instances needs at least 2")
        prefill = self.instances // 2 if self.prefill is None else self.prefill
        return prefill, self.instances - prefill


def least_loaded(candidates: DecodeCandidates, need: Need) -> InstanceRow | None:
    """Dispatch policy: the candidate with the fewest decodes (DistServe)."""

    def decodes(row: InstanceRow) -> tuple[int, int]:
        return row.decodes, -row.free_blocks

    return min(candidates.with_capacity(), key=decodes, default=None)


def _replicas(parts: Parts, kind: EngineKind) -> ClusterConfig:
    """Engines that share nothing; each request goes to the one with fewest."""
    engine = replace(parts.engine, kind=kind, tbt_slo_s=None)
    return ClusterConfig(
        make_instances(both=parts.instances, engine=engine), "least-in-flight", parts.seed
    )


def _unchunked(parts: Parts, chunk_tokens: int, kind: Unchunked = _WHOLE_PROMPTS) -> EngineConfig:
    return replace(
        parts.engine,
        kind=kind,
        chunk_tokens=chunk_tokens,
        order="fcfs",
        admission="greedy",
        tbt_slo_s=None,
    )


def _distserve(parts: Parts) -> ClusterConfig:
    return ClusterConfig(
        make_instances(*parts.divided(), engine=_unchunked(parts, parts.engine.chunk_tokens)),
        "split",
        parts.seed,
        dispatch=f"{__name__}:least_loaded",
    )


def splitwise(parts: Parts, kind: Unchunked = _WHOLE_PROMPTS) -> ClusterConfig:
    """Build Splitwise, with these bounds of preemption."""
    engine = _unchunked(parts, SPLITWISE_BATCH_TOKENS, kind)
    return ClusterConfig(make_instances(*parts.divided(), engine=engine), SplitwiseMode, parts.seed)


def mooncake(parts: Parts, rule: Rule | None = None, nodes: int = 1) -> ClusterConfig:
    """Build Mooncake with one of its rules of refusing, or the one that counts what was sent, and
    groups of prefill instances that compute prompts together."""
    engine = replace(
        parts.engine,
        chunk_tokens=MOONCAKE_CHUNK_TOKENS,
        order="fcfs",
        admission="greedy",
        tbt_slo_s=None,
    )
    inline = replace(engine, chunk_tokens=MOONCAKE_INLINE_TOKENS)
    prefill, decode = parts.divided()
    if nodes > 1:
        prefill //= nodes
        group = Group(nodes, (engine.kv_token_bytes or 0) / LINKS["roce"])
        engine = replace(engine, kind=group)
    instances = tuple(
        replace(place, engine=inline) if place.role is Role.DECODE else place
        for place in make_instances(prefill, decode, engine=engine)
    )
    mode: Callable[[ClusterConfig], MooncakeMode]
    mode = partial(MooncakeMode, objective=parts.objective)
    if rule is not None:
        mode = partial(RejectingMode, rule=rule, objective=parts.objective)
    return ClusterConfig(instances, mode, parts.seed)


def adrenaline(parts: Parts, model: str = "llama-2-13b", gpu: str = "a100-80g") -> ClusterConfig:
    """Build DistServe with executors of attention on its prefill instances; the model and the
    device tell what messages cost."""
    plain = _distserve(parts)
    places = attended(plain.instances, *synchronised(MODELS[model], GPUS[gpu]))
    return replace(plain, instances=places)


def _tetri(parts: Parts) -> ClusterConfig:
    engine = replace(parts.engine, order="sjf", sched_batch=16, admission="reserve-dynamic")
    return ClusterConfig(
        make_instances(*parts.divided(), engine=engine),
        "split",
        parts.seed,
        dispatch="power-of-two",
    )


def _paper(parts: Parts) -> ClusterConfig:
    """TetriInfer with its paper's own settings instead of ours. Requests should be predicted with
    `PAPER_ACCURACY`. The padding of chunks is left out."""
    ours = _tetri(parts)
    cost = parts.engine.cost
    slower = {
        each.name: PAPER_PREDICTOR_COST * getattr(cost, each.name)
        for each in fields(cost)
        if each.name.endswith("_s")
    }
    instances = tuple(
        replace(
            place,
            engine=replace(
                place.engine,
                end=End.LOWER,
                cost=replace(cost, **slower) if place.role is Role.PREFILL else cost,
            ),
        )
        for place in ours.instances
    )
    return replace(ours, instances=instances, sends_chunks=False, dispatch="power-of-two-ratio")


def _adaptive(parts: Parts) -> ClusterConfig:
    parts.divided()  # one instance has nothing to decide
    return _mode("adaptive")(parts)


def _mode(name: str) -> Callable[[Parts], ClusterConfig]:
    return lambda parts: ClusterConfig(
        make_instances(both=parts.instances, engine=parts.engine), name, parts.seed
    )


class System(NamedTuple):
    """A row of a comparison. `build` raises ConfigError if it cannot be built of the parts."""

    words: str
    build: Callable[[Parts], ClusterConfig]


SYSTEMS: dict[str, System] = {
    "static": System(
        "one batch after the other, padded (FasterTransformer)",
        lambda parts: _replicas(parts, Static(parts.window_tokens)),
    ),
    "orca": System(
        "whole prompts join decodes, memory for the longest request",
        lambda parts: _replicas(parts, Orca(parts.window_tokens)),
    ),
    "vllm-2023": System(
        "steps of whole prompts before steps of decodes",
        lambda parts: _replicas(parts, PromptsFirst()),
    ),
    "vllm": System("vLLM, its default tokens a step", lambda parts: _replicas(parts, Stock())),
    "sarathi": System(
        "vLLM with 512 tokens a step (Sarathi-Serve)",
        lambda parts: _replicas(parts, Stock(SARATHI_BUDGET_TOKENS)),
    ),
    "cadence": System(
        "vLLM, prompts in every fourth step beside decodes (EcoServe)",
        lambda parts: _replicas(parts, Cadence(interval=4)),
    ),
    "fastserve": System(
        "steps of the highest levels of a feedback queue, whole prompts",
        lambda parts: _replicas(parts, FastServe()),
    ),
    "tgi": System(
        "prompts enter by the ratio of waiting to decoded ones (TGI)",
        lambda parts: _replicas(parts, Tgi()),
    ),
    "distserve": System("prefill instances with whole prompts, decode instances", _distserve),
    "splitwise": System("the same, and a mixed pool for what is too much", splitwise),
    "adrenaline": System("distserve, prefill devices share the attention of decodes", adrenaline),
    "mooncake": System("refuses late requests, short prompts on decode instances", mooncake),
    "tetri": System("TetriInfer: chunks, shortest first, expected output lengths", _tetri),
    "tetri-paper": System("the same with the settings of its paper", _paper),
    "adaptive": System("split or aggregated, the one with the lower cost", _adaptive),
    "whole": System("one instance per request, the one with the lowest delay", _mode("whole")),
}
WITH_ROLES = "distserve", "splitwise", "adrenaline", "mooncake", "tetri", "tetri-paper"


def system_of(name: str, parts: Parts) -> ClusterConfig:
    """Build a named system.

    Raises:
        ConfigError: There is none of that name, or it cannot be built of the parts.
    """
    if name not in SYSTEMS:
        raise ConfigError(f"no system {name!r}; there are {', '.join(SYSTEMS)}")
    return SYSTEMS[name].build(parts)
