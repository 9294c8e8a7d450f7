"""Pick the decode instance that takes over a prefilled request (paper section 3.3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceInfo,
    InstanceState,
    InstanceView,
    Role,
)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where a request's KV goes; `reason` is for the decision log and never parsed."""

    instance: InstanceId
    kv_endpoint: str
    reason: str


def choose_decode(
    view: ClusterView,
    *,
    me: InstanceInfo,
    num_tokens: int,
    num_bytes: int,
    refused: frozenset[InstanceId],
    rng: Random,
) -> Dispatch | None:
    """Power of two choices among the instances that have room for the request.

    Args:
        view: The newest picture of the cluster; may be stale.
        me: The prefill instance that asks. It is its own last choice, and only
            when its role is `both`.
        num_tokens: Tokens whose KV moves.
        num_bytes: Bytes that they take in the receive arena.
        refused: Instances that already said no to this request.
        rng: Source of the two probes.

    Returns:
        The choice, or None when no decode instance could take the KV at all.
    """
    if num_tokens < 1 or num_bytes < 0:
        raise ValueError(f"nothing to hand over: {num_tokens} tokens, {num_bytes} bytes")
    able = _able(view, me, refused)
    if not able:
        return None
    roomy = [peer for peer in able if _has_room(peer, num_tokens, num_bytes)]
    if not roomy:
        best = max(able, key=_free_arena_bytes)
        return _to(best, f"none of {len(able)} has room: most free arena")
    probes = rng.sample(roomy, k=min(2, len(roomy)))
    best = min(probes, key=lambda peer: (_heaviness(peer), -_free_blocks(peer)))
    load = best.load
    return _to(best, f"{len(probes)} probes of {len(roomy)}: {load.heavy}:{load.light} heavy:light")


def _able(
    view: ClusterView, me: InstanceInfo, refused: frozenset[InstanceId]
) -> list[InstanceView]:
    able = [
        peer
        for peer in view.instances
        if peer.state is InstanceState.READY
        and peer.info.role is not Role.PREFILL
        and peer.info.identity == me.identity
        and peer.info.kv_endpoint
        and peer.info.id not in refused
    ]
    others = [peer for peer in able if peer.info.id != me.id]
    return others or [peer for peer in able if peer.info.role is Role.BOTH]


def _has_room(peer: InstanceView, num_tokens: int, num_bytes: int) -> bool:
    num_blocks = -(-num_tokens // max(1, peer.info.block_size))
    return _free_blocks(peer) >= num_blocks and _free_arena_bytes(peer) >= num_bytes


def _heaviness(peer: InstanceView) -> float:
    return max(0, peer.load.heavy) / (max(0, peer.load.light) + 1)


def _free_blocks(peer: InstanceView) -> int:
    return peer.load.blocks_total - peer.load.blocks_used


def _free_arena_bytes(peer: InstanceView) -> int:
    return peer.load.arena_total_bytes - peer.load.arena_used_bytes


def _to(peer: InstanceView, reason: str) -> Dispatch:
    return Dispatch(peer.info.id, peer.info.kv_endpoint, reason)
