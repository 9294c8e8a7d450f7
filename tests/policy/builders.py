"""Short ways to write a cluster down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

from vllm_tetri.policy.cluster import InstanceRow, Need
from vllm_tetri.policy.ledger import ClusterState
from vllm_tetri.policy.tables import TableMaker
from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    InstanceView,
    Role,
    StepCoefficients,
)

# A small model on one core, measured.
COST = StepCoefficients(0.013, 0.0006, 2.9e-6, 0.00055, 3.5e-7, confidence=1.0)


def times(cost: StepCoefficients, factor: float) -> StepCoefficients:
    """What steps cost that take so many times as long."""
    *seconds, confidence = astuple(cost)
    return StepCoefficients(*[each * factor for each in seconds], confidence=confidence)


def info(
    name: str, role: str = "both", *, layout: str = "a", model: str = "tiny", device: str = ""
) -> InstanceInfo:
    return InstanceInfo(
        id=InstanceId(name),
        url=f"http://{name}",
        role=Role(role),
        models=(model,),
        kv_endpoint=f"{name}:1",
        identity={"layout": layout},
        max_model_len=1000,
        block_size=16,
        pid=1,
        root="tiny",
        device=device,
    )


def instance(
    name: str,
    role: str = "both",
    *,
    state: str = "ready",
    layout: str = "a",
    model: str = "tiny",
    device: str = "",
    age_s: float = 0.0,
    seq: int = 0,
    **load: Any,
) -> InstanceView:
    load = {"blocks_total": 100, "arena_total_bytes": 10_000, **load}
    return InstanceView(
        info(name, role, layout=layout, model=model, device=device),
        InstanceState(state),
        InstanceLoad(**load),
        age_s,
        seq,
    )


def alone(name: str, role: str, **load: Any) -> InstanceView:
    """An instance whose KV cannot be handed over."""
    made = instance(name, role, layout=name, **load)
    return replace(made, info=replace(made.info, alone="it is multimodal"))


def serving(
    name: str,
    role: str = "both",
    *,
    decodes: int = 0,
    left_tokens: float = 100,
    context_tokens: float = 300,
    queued_tokens: float = 0,
    cost: StepCoefficients = COST,
    **options: Any,
) -> InstanceView:
    """An instance that has taken steps, with plenty of room; `left_tokens` and
    `context_tokens` are those of each decode."""
    load = {
        "light": decodes,
        "remaining_tokens": decodes * left_tokens,
        "context_tokens": decodes * context_tokens,
        "queued_prefill_tokens": queued_tokens,
        "chunk_tokens": 512,
        "blocks_total": 100_000,
        "handover_s": 0.011,
        "handover_token_s": 1e-6,
        "cost": cost,
    }
    return instance(name, role, **{**load, **options})


def view(*instances: InstanceView) -> ClusterView:
    return ClusterView("router", 1, instances)


class Known:
    """What one instance or router knows of a cluster, renewed view by view."""

    def __init__(self, grace_s: float = 0.1) -> None:
        self.state = ClusterState(grace_s)
        self._tables = TableMaker()

    def renew(self, view: ClusterView, now: float) -> None:
        self.state.observe(self._tables.make(view, now))

    @property
    def by_id(self) -> Mapping[InstanceId, InstanceRow]:
        return {name: self.state.row(row) for name, row in self.state.table.by_id.items()}

    @property
    def by_model(self) -> Mapping[str, list[InstanceRow]]:
        return self.state.table.by_model

    @property
    def bases(self) -> list[InstanceRow]:
        return list(self.state.table.by_id.values())

    def send(
        self,
        prefill: InstanceId | None,
        decode: InstanceId | None,
        need: Need,
        now: float,
        *,
        after_s: float = 0.0,
    ) -> None:
        self.state.record_sent(prefill, decode, need, now, decode_after_s=after_s)


def known(*instances: InstanceView, grace_s: float = 0.1, now: float = 100.0) -> Known:
    """Everything that one view shows."""
    made = Known(grace_s)
    made.renew(view(*instances), now)
    return made
