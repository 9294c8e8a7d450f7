"""One picture of the cluster out of what several routers say. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from vllm_tetri.types import ClusterView, InstanceId, InstanceState, InstanceView

GONE_AFTER_S = 60.0
_SAME_AGE_S = 1.0  # routers hear an instance within one report period of each other


class Received(NamedTuple):
    """A view, and the local monotonic time at which it arrived."""

    view: ClusterView
    at_s: float


def merge_views(received: tuple[Received, ...], now: float) -> ClusterView:
    """Every instance once, as its best-informed router sees it, aged to `now`."""
    if not received:
        return ClusterView()
    best: dict[InstanceId, InstanceView] = {}
    for view, at_s in received:
        for seen in view.instances:
            aged = replace(seen, age_s=seen.age_s + max(0.0, now - at_s))
            known = best.get(aged.info.id)
            if aged.age_s < GONE_AFTER_S and (known is None or _supersedes(aged, known)):
                best[aged.info.id] = aged
    newest = max(received, key=lambda each: each.at_s).view
    return ClusterView(newest.router, newest.seq, tuple(best.values()))


def _supersedes(one: InstanceView, other: InstanceView) -> bool:
    alike = abs(one.age_s - other.age_s) < _SAME_AGE_S
    if alike and one.state is not other.state:
        return one.state is InstanceState.READY
    return one.age_s < other.age_s
