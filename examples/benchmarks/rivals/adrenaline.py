"""Adrenaline (section 3 of its paper): prefill devices compute a part of the decodes' attention.

Attention of decodes reads KV and computes little, prompts compute and read little. So a part of
every prefill device, `part` of its arithmetic, is given to an executor that holds KV of decodes and
reads it with `bandwidth_part` of the device's bandwidth. In a step a decode instance hands over the
attention of as many tokens of context as makes both sides end at once, as far as the executors have
memory for them; in every layer queries go there and results come back, at a cost per layer and per
request. Where that costs more than it saves, nothing is handed over, unless memory is short.

Simplified: context is divided by tokens, not by requests; an executor serves all decode instances
in equal parts; KV of what stays on prefill devices travels nevertheless.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cluster import ENGINES
from vllm_tetri.sim.config import EngineConfig, EngineKind, InstanceConfig
from vllm_tetri.sim.cost.hardware import Gpu, Model
from vllm_tetri.sim.cost.step_cost import Roofline, StepCost, linear
from vllm_tetri.sim.engine.instance import Share
from vllm_tetri.sim.engine.tetri import TetriInstance
from vllm_tetri.types import Role

PART, BANDWIDTH_PART = 0.2, 0.6  # guesses: a fifth of the cores reads with more than a fifth
LAYER_S = 1e-5  # a message there and back, without its bytes: a guess
MEMORY_PART = 0.5  # of a prefill instance's KV pool, for decodes


@dataclass(frozen=True)
class Attended(EngineKind):
    """A decode instance with executors on prefill devices.

    Attributes:
        executors: Devices' worth of bandwidth that serve this instance: prefill instances by decode
            instance, times the part of their bandwidth.
        remote_tokens: KV that fits there.
        sync_s: Messages of a step.
        request_s: In addition per request whose attention is computed there, for its bytes.
    """

    executors: float = 1.0
    remote_tokens: int = 0
    sync_s: float = 0.0
    request_s: float = 0.0


class AttendedInstance(TetriInstance):
    """A simulated `Attended`."""

    def duration_s(self, shares: list[Share]) -> float:
        full_s, context = super().duration_s(shares), self.batch.context_tokens
        kind = self.engine.kind
        assert isinstance(kind, Attended)
        if self.is_batch_paused or not context:
            return full_s
        token_s = context_s(self.engine.cost)
        here, there = divided(
            kind, len(self.batch), context, token_s, self.engine.pool_tokens - kind.remote_tokens
        )
        return full_s - context * token_s + max(here, there)


def divided(
    kind: Attended, num: int, context: int, token_s: float, own_tokens: int
) -> tuple[float, float]:
    """Return the seconds of attention here and there: as equal as they may be, or all here if that
    is quicker and memory suffices."""
    # Both end at once: (context - x) token_s = sync + x / context num request + x token_s / speed.
    each_s = token_s / kind.executors + num * kind.request_s / context
    moved = max(0.0, context * token_s - kind.sync_s) / (token_s + each_s)
    moved = max(min(moved, kind.remote_tokens), context - own_tokens, 0.0)
    there = kind.sync_s + moved * each_s if moved else 0.0
    return (context - moved) * token_s, there


def context_s(cost: StepCost) -> float:
    """Return the seconds of attention of a decode per token of its context."""
    return cost.kv_s if isinstance(cost, Roofline) else linear(cost).token_s


def slower(cost: StepCost, part: float) -> StepCost:
    """Return the steps of a prefill device without a part of its arithmetic: all but what no
    arithmetic takes is longer, memory that the executor reads included."""
    if isinstance(cost, Roofline):
        return replace(
            cost,
            weights_s=cost.weights_s / (1 - part),
            token_s=cost.token_s / (1 - part),
            attention_s=cost.attention_s / (1 - part),
        )
    longer = {"prompt_s": cost.prompt_s / (1 - part), "context_s": cost.context_s / (1 - part)}
    return replace(cost, base_s=cost.base_s / (1 - part), **longer)


def synchronised(model: Model, device: Gpu) -> tuple[float, float]:
    """Return the seconds of messages a step, and those per request for its queries, new KV and
    results over the link of the device."""
    width = 2 * (model.heads + model.kv_heads) * model.head_dim
    return LAYER_S * model.layers, 2 * width * model.layers / device.link


def attended(
    places: tuple[InstanceConfig, ...],
    sync_s: float,
    request_s: float,
    *,
    part: float = PART,
    bandwidth_part: float = BANDWIDTH_PART,
    memory_part: float = MEMORY_PART,
) -> tuple[InstanceConfig, ...]:
    """Give decode instances executors on the prefill instances; raises ConfigError if there is
    none, or a part is not between 0 and 1."""
    prefill = sum(each.role is Role.PREFILL for each in places)
    if not 0 < prefill < len(places) or not all(
        0 < each < 1 for each in (part, bandwidth_part, memory_part)
    ):
        raise ConfigError("executors need prefill and decode instances, and parts between 0 and 1")
    ratio = prefill / (len(places) - prefill)

    def changed(engine: EngineConfig, role: Role) -> EngineConfig:
        lent = int(engine.kv_blocks * memory_part)
        if role is Role.PREFILL:
            return replace(
                engine, kv_blocks=engine.kv_blocks - lent, cost=slower(engine.cost, part)
            )
        more = int(lent * ratio)
        kind = Attended(ratio * bandwidth_part, more * engine.block_size, sync_s, request_s)
        return replace(engine, kv_blocks=engine.kv_blocks + more, kind=kind)

    return tuple(replace(each, engine=changed(each.engine, each.role)) for each in places)


ENGINES[Attended] = AttendedInstance
