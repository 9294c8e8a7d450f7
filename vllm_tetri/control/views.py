"""One picture of the cluster out of what several routers say. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

from vllm_tetri.errors import ProtocolError
from vllm_tetri.messages import LoadRow, Loads, Row
from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceLoad,
    InstanceState,
    InstanceView,
)

GONE_AFTER_S = 60.0
_STALE_S = 1.0  # without a new view, look at the old one again: what is gone leaves it
_SAME_AGE_S = 1.0  # routers hear an instance within one report period of each other
# Of two routers one knows more: that it answers, and after that, that it drains or leaves.
_CERTAINTY = {InstanceState.READY: 1, InstanceState.FLIPPING: 2, InstanceState.LEAVING: 3}


class Received(NamedTuple):
    """A view, what is new of its instances, and the local monotonic time of the newest."""

    view: ClusterView
    at_s: float
    rows: Sequence[Row] | None = None

    def instances(self) -> Iterable[InstanceView]:
        """The instances as of `at_s`."""
        if self.rows is None:
            return self.view.instances
        pairs = zip(self.view.instances, self.rows, strict=True)
        return (
            InstanceView(each.info, row.state, row.load, row.age_s, row.seq) for each, row in pairs
        )


_load_fields = attrgetter(*(field.name for field in fields(InstanceLoad)))


def row_of(each: InstanceView) -> Row:
    """What is new of an instance."""
    return Row(each.state, each.age_s, each.seq, LoadRow(*_load_fields(each.load)))


def merge_views(received: tuple[Received, ...], now: float) -> ClusterView:
    """Every instance once, as its best-informed router sees it, aged to `now`."""
    if not received:
        return ClusterView()
    best: dict[InstanceId, InstanceView] = {}
    for one in received:
        since_s = max(0.0, now - one.at_s)
        for seen in one.instances():
            age_s, name = seen.age_s + since_s, seen.info.id
            if age_s >= GONE_AFTER_S:
                continue
            aged = InstanceView(seen.info, seen.state, seen.load, age_s, seen.seq)
            if name not in best or _supersedes(aged, best[name]):
                best[name] = aged
    newest = max(received, key=lambda each: each.at_s).view
    return ClusterView(newest.router, newest.seq, tuple(best.values()))


def _supersedes(one: InstanceView, other: InstanceView) -> bool:
    alike = abs(one.age_s - other.age_s) < _SAME_AGE_S
    if alike and one.state is not other.state:
        return _CERTAINTY.get(one.state, 0) > _CERTAINTY.get(other.state, 0)
    return one.age_s < other.age_s


class Picture(NamedTuple):
    """A view, and the monotonic time at which its ages were right."""

    view: ClusterView
    at_s: float


class _Merged(NamedTuple):
    received: dict[int, Received]
    picture: Picture


class Sights:
    """What an instance's routers, by number, say of the cluster.

    One thread tells, any may ask: what is asked for is replaced, never changed.
    """

    def __init__(self) -> None:
        self._rosters: dict[int, int] = {}
        self._received: dict[int, Received] = {}
        self._merged = _Merged(self._received, Picture(ClusterView(), float("-inf")))

    def see(self, router: int, view: ClusterView, roster: int, now: float) -> None:
        """A router sent a view."""
        self._rosters[router] = roster
        self._received = {**self._received, router: Received(view, now)}

    def refresh(self, router: int, loads: Loads, now: float) -> bool:
        """A router sent what is new; False if the view that it belongs to is not here.

        Raises:
            ProtocolError: It does not fit the view.
        """
        base = self._received.get(router)
        if base is None or self._rosters[router] != loads.roster:
            return False
        instances = base.view.instances
        if len(loads.rows) != len(instances):
            raise ProtocolError(f"{len(loads.rows)} loads of {len(instances)} instances")
        view = ClusterView(base.view.router, loads.seq, instances)
        self._received = {**self._received, router: Received(view, now, loads.rows)}
        return True

    def view(self, now: float) -> ClusterView:
        """Every instance, aged to `now`."""
        return merge_views(tuple(self._received.values()), now)

    def picture(self, now: float) -> Picture:
        """The same, but the same object until something new comes."""
        received, merged = self._received, self._merged
        if merged.received is not received or now - merged.picture.at_s >= _STALE_S:
            picture = Picture(merge_views(tuple(received.values()), now), now)
            self._merged = merged = _Merged(received, picture)
        return merged.picture
