"""One snapshot of the cluster from the polls of several routers. No clock, no socket."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

from vllm_tetri.errors import ProtocolError
from vllm_tetri.messages import LoadRow, Poll, Row
from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    InstanceView,
)

GONE_AFTER_S = 60.0
_STALE_S = 1.0  # merge again after this time without a poll: silent instances must leave
_OLD_VIEW_S = 2.0  # what a router told before counts only if no other one told anything since
_SAME_AGE_S = 1.0  # routers hear an instance within one report period of each other
# One router may know more than another: first that an instance is ready, then that it ends.
_CERTAINTY = {InstanceState.READY: 1, InstanceState.FLIPPING: 2, InstanceState.DRAINING: 3}
_load_fields = attrgetter(*(field.name for field in fields(InstanceLoad)))


def row_of(each: InstanceView) -> Row:
    """Reduce an instance's view to what changes from report to report."""
    return Row(each.state, each.age_s, each.seq, LoadRow(*_load_fields(each.load)))


class Snapshot(NamedTuple):
    """A view of the cluster, and the monotonic time at which its ages were right."""

    view: ClusterView
    at_s: float


class _Received(NamedTuple):
    """A router's newest poll, and the instances that its rows are about."""

    poll: Poll
    infos: tuple[InstanceInfo, ...]
    at_s: float


class ViewStore:
    """The newest view of each router, by the router's number.

    One thread calls `observe`, any thread may call `snapshot`: values are replaced, never changed.
    """

    def __init__(self) -> None:
        self._received: dict[int, _Received] = {}
        self._merged = (self._received, Snapshot(ClusterView(), float("-inf")))

    def observe(self, router: int, poll: Poll, now: float) -> bool:
        """Store what a poll carries; False if the instances of its rows are not known.
        ProtocolError if these are not as many."""
        if poll.rows is None:
            return True
        infos, known = poll.infos, self._received.get(router)
        if infos is None:
            rows_of = poll.router, poll.roster
            if known is None or (known.poll.router, known.poll.roster) != rows_of:
                return False
            infos = known.infos
        if len(poll.rows) != len(infos):
            raise ProtocolError(f"{len(poll.rows)} loads of {len(infos)} instances")
        self._received = {**self._received, router: _Received(poll, infos, now)}
        return True

    def snapshot(self, now: float) -> Snapshot:
        """Merge all views, aged to `now`; the same object until something new comes."""
        received = self._received
        merged_from, snapshot = self._merged
        if merged_from is not received or now - snapshot.at_s >= _STALE_S:
            snapshot = Snapshot(_merge(received.values(), now), now)
            self._merged = received, snapshot
        return snapshot


def _merge(received: Collection[_Received], now: float) -> ClusterView:
    """Every instance once, as the best-informed router describes it."""
    best: dict[InstanceId, InstanceView] = {}
    newest = max(received, key=attrgetter("at_s"), default=None)
    if newest is None:
        return ClusterView()
    for one in received:
        if newest.at_s - one.at_s > _OLD_VIEW_S:
            continue  # its router is gone: the others know more
        since_s = max(0.0, now - one.at_s)
        for info, row in zip(one.infos, one.poll.rows or (), strict=True):
            aged = InstanceView(info, row.state, row.load, row.age_s + since_s, row.seq)
            other = best.get(info.id)
            if aged.age_s < GONE_AFTER_S and (other is None or _supersedes(aged, other)):
                best[info.id] = aged
    return ClusterView(newest.poll.router, newest.poll.seq, tuple(best.values()))


def _supersedes(one: InstanceView, other: InstanceView) -> bool:
    if abs(one.age_s - other.age_s) < _SAME_AGE_S and one.state is not other.state:
        return _CERTAINTY.get(one.state, 0) > _CERTAINTY.get(other.state, 0)
    return one.age_s < other.age_s
