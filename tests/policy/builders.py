"""Short ways to write a cluster down."""

from __future__ import annotations

from typing import Any

from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    InstanceView,
    Role,
)


def info(name: str, role: str = "both", *, layout: str = "a", model: str = "tiny") -> InstanceInfo:
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
        version="0",
    )


def instance(
    name: str,
    role: str = "both",
    *,
    state: str = "ready",
    layout: str = "a",
    model: str = "tiny",
    age_s: float = 0.0,
    **load: Any,
) -> InstanceView:
    load = {"blocks_total": 100, "arena_total_bytes": 10_000, **load}
    return InstanceView(
        info(name, role, layout=layout, model=model),
        InstanceState(state),
        InstanceLoad(**load),
        age_s,
    )


def view(*instances: InstanceView) -> ClusterView:
    return ClusterView("router", 1, instances)
