"""One state of the cluster for every decision: the newest view, and what was sent since. Pure.

A view is up to two report periods old, so what a router or instance sent somewhere counts there
until a report shows it; two requests do not both take the last free blocks. A `ClusterTable` is
made once per view and never changes, so all who decide by the same view share it. `ClusterState`
shows it together with what one of them sent.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from math import exp, inf
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple

from vllm_tetri.policy.step_cost import GUESS
from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceInfo,
    InstanceState,
    InstanceView,
    Role,
    StepCoefficients,
)

_MAX_ENTRIES = 1 << 14
_SHARE_S = 2.0  # memory of the part of an instance's time that prompts take
_MAX_SHARE = 0.9
_DEFAULT_CHUNK_TOKENS = 512


class Need(NamedTuple):
    """What a request needs."""

    prompt_tokens: int  # to be computed, or handed over
    output_tokens: float  # expected to be written
    num_bytes: int = 0  # size of its KV in a receive arena
    reserved_tokens: float | None = None  # output to reserve for; None for the expected output
    cached_tokens: int = 0  # of the prompt, in the prefix cache where it is computed
    heavy_part: float = 1.0  # the probability of a heavy output (paper section 5.1.1)

    @property
    def total_tokens(self) -> float:
        """Prompt and reserved output."""
        reserved = self.output_tokens if self.reserved_tokens is None else self.reserved_tokens
        return self.prompt_tokens + reserved


class InstanceRow:
    """A ready instance: its last report, and in a `ClusterState` what was sent to it since."""

    __slots__ = (
        "alone", "arena_tokens", "base_blocks", "block_size", "busy_others", "chunk_tokens", "cost",
        "decodes", "device", "free_bytes", "free_tokens", "heavy", "id", "key", "kv_endpoint",
        "left_tokens", "light", "num_requests", "others", "prompt_share", "queued_tokens",
        "remaining_tokens", "reported_s", "request_s", "role", "sent_tokens", "step_s", "view",
    )  # fmt: skip
    _values = attrgetter(*__slots__)

    def __init__(
        self, view: InstanceView, cost: StepCoefficients, key: int, share: float, now: float
    ) -> None:
        load, info = view.load, view.info
        self.view = view
        self.id: InstanceId = info.id
        self.role: Role = info.role
        self.device = info.device
        self.kv_endpoint = info.kv_endpoint
        self.block_size = max(1, info.block_size)
        self.arena_tokens = info.arena_tokens
        self.alone = info.alone  # why it exchanges no KV with others; its role means nothing then
        self.key = key  # a small number, equal where KV may travel
        self.cost, self.prompt_share = cost, share  # the share of its time that prompts take
        self.reported_s = now - view.age_s
        self.chunk_tokens = load.chunk_tokens or _DEFAULT_CHUNK_TOKENS
        self.queued_tokens = load.queued_prefill_tokens
        self.heavy, self.light = load.heavy, load.light
        self.decodes = round(load.heavy + load.light)  # requests that decode there, or will
        self.num_requests = load.running + load.waiting  # as reported
        self.remaining_tokens: float = load.remaining_tokens
        self.base_blocks = load.blocks_total - load.blocks_used - load.reserved_blocks
        self.free_bytes = load.arena_total_bytes - load.arena_used_bytes
        self.sent_tokens = 0.0  # prompt and output of requests that its report does not show yet
        self.others = self.busy_others = 0  # on its device: decodes, and instances with work
        decodes = max(1, self.decodes)
        self.left_tokens = load.remaining_tokens / decodes  # mean output that a decode has left
        self.free_tokens: float = self.block_size * self.base_blocks  # KV for which it has blocks
        context = load.context_tokens / decodes
        self.request_s = cost.request_s + context * cost.token_s  # a decode of usual context
        self.step_s = cost.base_s + self.decodes * self.request_s  # without prompts

    @property
    def free_blocks(self) -> int:
        """Blocks that are neither held nor reserved."""
        return int(self.base_blocks - -(-self.sent_tokens // self.block_size))

    def has_capacity(self, need: Need) -> bool:
        """Whether it can hold the whole request (the paper's α), as far as is known."""
        num_blocks = -(-need.total_tokens // self.block_size)
        return self.free_blocks >= num_blocks and self.free_bytes >= need.num_bytes

    def copy(self) -> InstanceRow:
        """Return a row that can be changed; as `copy.copy`, in a tenth of its time."""
        row = InstanceRow.__new__(InstanceRow)
        (
            row.alone, row.arena_tokens, row.base_blocks, row.block_size, row.busy_others,
            row.chunk_tokens, row.cost, row.decodes, row.device, row.free_bytes, row.free_tokens,
            row.heavy, row.id, row.key, row.kv_endpoint, row.left_tokens, row.light,
            row.num_requests, row.others, row.prompt_share, row.queued_tokens, row.remaining_tokens,
            row.reported_s, row.request_s, row.role, row.sent_tokens, row.step_s, row.view,
        ) = self._values(self)  # fmt: skip
        return row

    def add_decode(self, need: Need) -> None:
        """Count one more request that will decode there."""
        self.heavy += need.heavy_part
        self.light += 1 - need.heavy_part
        self.decodes += 1
        self.step_s += self.request_s
        self.remaining_tokens += need.output_tokens
        self.left_tokens = self.remaining_tokens / max(1, self.decodes)
        self.sent_tokens += need.total_tokens
        self.free_tokens = self.block_size * self.base_blocks - self.sent_tokens
        self.free_bytes -= need.num_bytes


class Takers(NamedTuple):
    """Instances that may take KV over, in three orders."""

    by_name: list[InstanceRow]
    by_blocks: list[InstanceRow]  # by free blocks
    by_bytes: list[InstanceRow]  # by free arena


class ClusterTable:
    """The ready instances of one view. Never changed, and so shared by all who read the view."""

    def __init__(self, view: ClusterView, at_s: float, rows: Sequence[InstanceRow]) -> None:
        self.view, self.at_s = view, at_s
        self.by_id = {row.id: row for row in rows}
        self.least_arena_tokens = min((row.arena_tokens for row in rows), default=0)
        self.by_model: dict[str, list[InstanceRow]] = {}
        self.devices: dict[str, list[InstanceRow]] = {}
        self._takers: dict[tuple[int, bool], Takers] = {}
        self._kinds = {row.key: row.view.info.identity for row in rows}
        for row in rows:
            if row.device:
                self.devices.setdefault(row.device, []).append(row)
            for model in row.view.info.names:
                self.by_model.setdefault(model, []).append(row)
        for together in self.devices.values():
            _count_neighbours(together)

    def usual_tokens(self) -> int | None:
        """Return the output tokens that instances report, a mean over those that have seen outputs
        end; None if none has."""
        reported = [each.load.usual_tokens for each in self.view.instances]
        return round(fmean(known)) if (known := [*filter(None, reported)]) else None

    def takers(self, me: InstanceInfo, *, any_role: bool = False) -> Takers:
        """Return the instances that can take KV from one: those that decode, or of `any_role`."""
        key = next((key for key, kind in self._kinds.items() if kind == me.identity), -1)
        found = self._takers.get((key, any_role))
        if found is None:
            kin = [row for row in self.by_id.values() if row.key == key and row.kv_endpoint]
            rows = [row for row in kin if any_role or row.role is not Role.PREFILL]
            orders = map(attrgetter, ("id", "base_blocks", "free_bytes"))
            found = self._takers[key, any_role] = Takers(*(sorted(rows, key=key) for key in orders))
        return found


def _count_neighbours(together: Sequence[InstanceRow]) -> None:
    """Set in the rows of one device what the others there do."""
    decodes = sum(row.decodes for row in together)
    busy = {row.id for row in together if row.decodes > 0 or row.queued_tokens > 0}
    for row in together:
        row.others, row.busy_others = decodes - row.decodes, len(busy - {row.id})


class TableMaker:
    """Makes a table of every view, and keeps what one view does not tell. Owner: one thread."""

    def __init__(self) -> None:
        self._shares: dict[InstanceId, _Share] = {}

    def make(self, view: ClusterView, now: float) -> ClusterTable:
        """Make the table of a view whose ages are right at `now`."""
        ready = [each for each in view.instances if each.state is InstanceState.READY]
        kinds: dict[frozenset[tuple[str, str]], int] = {}
        keys = {
            each.info.id: kinds.setdefault(frozenset(each.info.identity.items()), len(kinds))
            for each in ready
        }
        # An instance that has taken no steps yet is as fast as another one of its kind.
        known = {keys[each.info.id]: each.load.cost for each in ready if each.load.cost.is_known}
        shares, rows = {}, []
        for each in ready:
            name, cost = each.info.id, each.load.cost
            cost = cost if cost.is_known else known.get(keys[name], GUESS)
            shares[name] = share = _share(each, cost, self._shares.get(name), now - each.age_s)
            rows.append(InstanceRow(each, cost, keys[name], share.part, now))
        self._shares = shares
        return ClusterTable(view, now, rows)


class _Share(NamedTuple):
    """The part of an instance's time that prompts take: its last report, and weighted sums
    over the last seconds."""

    seq: int
    tokens_done: int
    reported_s: float
    taken_s: float = 0.0
    passed_s: float = 0.0

    @property
    def part(self) -> float:
        return min(_MAX_SHARE, self.taken_s / self.passed_s) if self.passed_s > 0 else 0.0


def _share(
    one: InstanceView, cost: StepCoefficients, before: _Share | None, reported_s: float
) -> _Share:
    done = one.load.prompt_tokens_done
    if before is None or one.seq < before.seq or done < before.tokens_done:  # a new instance
        return _Share(one.seq, done, reported_s)
    passed_s = reported_s - before.reported_s
    if one.seq == before.seq or passed_s <= 0:
        return before
    kept = exp(-passed_s / _SHARE_S)
    taken_s = kept * before.taken_s + (done - before.tokens_done) * cost.prompt_s
    return _Share(one.seq, done, reported_s, taken_s, kept * before.passed_s + passed_s)


class Sent(NamedTuple):
    """A request that was sent; its decode instance may know of it from `decode_s` on."""

    at_s: float
    prefill: InstanceId | None
    decode: InstanceId | None
    need: Need
    decode_s: float


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

    def observe(self, table: ClusterTable) -> None:
        """Take over the table of a newer view. What it shows, or was sent to instances that are
        gone, does not count any more."""
        if table is self.table:
            return
        self.table, self._changed = table, {}
        before, self._sent = self._sent, deque(maxlen=_MAX_ENTRIES)
        for sent in before:
            prefill = sent.prefill if self._is_new(sent.prefill, sent.at_s) else None
            decode = sent.decode if self._is_new(sent.decode, sent.decode_s) else None
            if (prefill, decode) != (sent.prefill, sent.decode):
                sent = sent._replace(prefill=prefill, decode=decode)
            if prefill or decode:
                self._count(sent, is_read=False)

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
        self._count(Sent(now, prefill, decode, need, now + decode_after_s))

    def _count(self, sent: Sent, *, is_read: bool = True) -> None:
        """Count a request. Rows that were read do not change: they are copied."""
        self._sent.append(sent)
        for name in {sent.prefill, sent.decode}:
            if name is None or name not in self.table.by_id:
                continue
            row = self._own(name, is_read)
            if name == sent.prefill:
                row.queued_tokens += sent.need.prompt_tokens - sent.need.cached_tokens
            if name == sent.decode:
                row.add_decode(sent.need)
            if row.device:
                near = self.table.devices[row.device]
                _count_neighbours([self._own(each.id, is_read) for each in near])

    def _own(self, name: InstanceId, is_read: bool) -> InstanceRow:
        """Return a row that may be changed."""
        row = self._changed.get(name)
        if row is None or is_read:
            row = self._changed[name] = (row or self.table.by_id[name]).copy()
        return row


class Ranked:
    """Instances by a cost that only grows with what is sent to them: ordered once per view, when
    first asked for. A row that was sent something since moves back when it is met."""

    def __init__(
        self, state: ClusterState, rows: Iterable[InstanceRow], cost: Callable[[InstanceRow], Any]
    ) -> None:
        self._state, self._cost = state, cost
        self.by_id = {row.id: row for row in rows}

    @cached_property
    def _order(self) -> list[tuple[Any, int, InstanceRow]]:
        """Costs as last looked at, a number that is another one for every row, and the rows."""
        rows = enumerate(self.by_id.values())
        return sorted((self._cost(self._state.row(row)), number, row) for number, row in rows)

    def least(self, count: int, taken: Collection[InstanceId] = ()) -> list[InstanceRow]:
        """Return the cheapest that are not `taken`, the first of equals first."""
        order, row_of, at = self._order, self._state.row, 0
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
