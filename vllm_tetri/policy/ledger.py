"""The newest view, and what was sent since: one state of the cluster for every decision. Pure.

A view is up to two report periods old, so what a router or instance sent somewhere counts there
until a report shows it; two requests do not both take the last free blocks. A prompt counts until
it should be computed, which on a GPU is long before the next report, unless reports are missing:
an instance that hangs does not look idle.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, NamedTuple

from vllm_tetri.policy.cluster import ClusterTable, InstanceRow, Need, count_neighbours
from vllm_tetri.types import ClusterView, InstanceId

_MAX_ENTRIES = 1 << 14
_TRUSTED_S = 0.5  # for so long after a report an instance is expected to compute


class Sent(NamedTuple):
    """A request that was sent. Its prompt should be computed at `computed_s`; its decode instance
    may know of it from `decode_s` on."""

    at_s: float
    prefill: InstanceId | None
    decode: InstanceId | None
    need: Need
    decode_s: float
    computed_s: float


class ClusterState:
    """What one router or instance knows of the cluster: the newest table, and what it sent to
    others since their last reports. A request also counts for `grace_s` after it was sent,
    whatever was reported: an engine knows it only some time after its bytes arrived. Owner: one
    thread; calls come in order of time."""

    def __init__(self, grace_s: float) -> None:
        self.table = ClusterTable(ClusterView(), -inf, ())
        self._grace_s = grace_s
        self._sent: deque[Sent] = deque(maxlen=_MAX_ENTRIES)
        self._changed: dict[InstanceId, InstanceRow] = {}  # rows with something sent on top
        # A heap: when prompts should be computed, where they are, their tokens and context.
        self._computed: list[tuple[float, InstanceId, int, float]] = []
        self._listed = self.table  # whose queues are in it

    def observe(self, table: ClusterTable) -> None:
        """Take over the table of a newer view. What it shows, or was sent to instances that are
        gone, does not count any more."""
        if table is self.table:
            return
        self.table, self._changed, self._computed = table, {}, []
        before, self._sent = self._sent, deque(maxlen=_MAX_ENTRIES)
        for sent in before:
            prefill = sent.prefill if self._is_new(sent.prefill, sent.at_s) else None
            if prefill and self._is_computed(prefill, sent.computed_s, table.at_s):
                prefill = None
            decode = sent.decode if self._is_new(sent.decode, sent.decode_s) else None
            if (prefill, decode) != (sent.prefill, sent.decode):
                sent = sent._replace(prefill=prefill, decode=decode)
            if prefill or decode:
                self._count(sent, is_read=False)

    def advance(self, now: float) -> None:
        """Stop counting prompts that should be computed by now."""
        computed = self._computed
        if self._listed is not self.table:
            self._listed = self.table
            busy = (row for row in self.table.by_id.values() if row.queued_tokens > 0)
            computed += [
                (row.computed_s(row.reported_s), row.id, row.queued_tokens, row.queued_context)
                for row in busy
            ]
            heapify(computed)
        while computed and computed[0][0] <= now:
            computed_s, name, tokens, context = heappop(computed)
            if self._is_computed(name, computed_s, now):
                row = self.own(name, is_read=True)
                row.queued_tokens = max(0, row.queued_tokens - tokens)
                row.queued_context = max(0.0, row.queued_context - context)
                self._recount(row, is_read=True)

    def _is_computed(self, name: InstanceId, computed_s: float, now: float) -> bool:
        return computed_s <= min(now, self.table.by_id[name].reported_s + _TRUSTED_S)

    def _is_new(self, name: InstanceId | None, sent_s: float) -> bool:
        row = self.table.by_id.get(name) if name else None
        return row is not None and sent_s >= row.reported_s - self._grace_s

    def row(self, base: InstanceRow) -> InstanceRow:
        """Return a row of the table with what was sent to it since."""
        return self._changed.get(base.id, base)

    def record_sent(
        self,
        prefill: InstanceId | None,
        decode: InstanceId | None,
        need: Need,
        now: float,
        *,
        decode_after_s: float = 0.0,
    ) -> None:
        """Record a request: which instance computes its prompt, if that is to be done, and which
        one writes its output, if that is known, and knows of it `decode_after_s` from now."""
        row = self.table.by_id.get(prefill) if prefill else None
        computed_s = self.row(row).computed_s(now, *need.work) if row is not None else now
        self._count(Sent(now, prefill, decode, need, now + decode_after_s, computed_s))

    def _count(self, sent: Sent, *, is_read: bool = True) -> None:
        """Count a request. Rows that were read do not change: they are copied."""
        self._sent.append(sent)
        for name in {sent.prefill, sent.decode}:
            if name is None or name not in self.table.by_id:
                continue
            row = self.own(name, is_read=is_read)
            if name == sent.prefill:
                new_tokens, context = sent.need.work
                row.queued_tokens += new_tokens
                row.queued_context += context
                heappush(self._computed, (sent.computed_s, name, new_tokens, context))
            if name == sent.decode:
                row.add_decode(sent.need)
            self._recount(row, is_read=is_read)

    def _recount(self, row: InstanceRow, *, is_read: bool) -> None:
        """Count what instances do on the device of a row that has changed."""
        if row.device:
            near = self.table.devices[row.device]
            count_neighbours([self.own(each.id, is_read=is_read) for each in near])

    def own(self, name: InstanceId, *, is_read: bool = False) -> InstanceRow:
        """Return a row that may be changed."""
        row = self._changed.get(name)
        if row is None or is_read:
            row = self._changed[name] = (row or self.table.by_id[name]).copy()
        return row


class Ranked:
    """Instances by a cost that grows with what is sent to them: ordered once per view, when first
    asked for. A row that was sent something since moves back when it is met; one whose prompts
    should be computed since moves forward with the next view."""

    def __init__(
        self, state: ClusterState, rows: Iterable[InstanceRow], cost: Callable[[InstanceRow], Any]
    ) -> None:
        self._state, self._cost = state, cost
        self.by_id = {row.id: row for row in rows}
        self._order: list[tuple[Any, int, InstanceRow]] | None = None

    def _ordered(self) -> list[tuple[Any, int, InstanceRow]]:
        """Return costs as last looked at, a number that is another one for every row, and rows."""
        if self._order is None:
            rows = enumerate(self.by_id.values())
            self._order = sorted(
                (self._cost(self._state.row(row)), number, row) for number, row in rows
            )
        return self._order

    def least(self, count: int, taken: Collection[InstanceId] = ()) -> list[InstanceRow]:
        """Return the cheapest that are not `taken`, the first of equals first."""
        order, row_of, at = self._ordered(), self._state.row, 0
        found: list[InstanceRow] = []
        while at < len(order) and len(found) < count:
            _, number, before = order[at]
            row = row_of(before)
            if row is not before:
                del order[at]
                insort(order, (self._cost(row), number, row), at)
                continue
            at += 1
            if row.id not in taken:
                found.append(row)
        return found

    def named(
        self, names: Iterable[InstanceId], taken: Collection[InstanceId] = ()
    ) -> list[InstanceRow]:
        """Return those of the named that are among them and not `taken`."""
        rows, row_of = self.by_id, self._state.row
        return [row_of(rows[name]) for name in names if name in rows and name not in taken]
