"""Pick the decode instance that takes over a prefilled request (paper section 3.3.4). Pure.

Every prefill instance decides alone, on loads that are a report period old.

- An instance has *capacity* (the paper's α) if its free blocks, less those that it keeps for
  running requests, hold the prompt and the predicted output, and its arena the KV.
- Two of those are drawn at random, and the one with fewer decodes of the request's own kind,
  heavy or light, takes it; ties go by the output that all decodes are expected to write yet,
  then by free blocks. That evens out heavy decodes, which is what the paper is after. Its own
  measure, the lowest heavy:light ratio, does not see how many there are: 10:10 looks better
  than 5:4, so requests pile up where light ones are. It is `power-of-two-ratio`.
- If none has capacity the choice is the one with the most free arena, and it says so. The
  caller may hold the request for a report period first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from types import MappingProxyType

from vllm_tetri.policy.adaptive import price_decode
from vllm_tetri.policy.cluster import ClusterTable, InstanceRow, Need, Takers
from vllm_tetri.policy.ledger import ClusterState
from vllm_tetri.policy.lengths import HEAVY_TOKENS, End, Lengths
from vllm_tetri.types import InstanceId, InstanceInfo, Prediction, Role

# A decode instance has KV at once, but knows the request only when its prompt is done.
GRACE_S = 0.5
AVOID_S = 10.0  # an endpoint that was not reached is left alone for this long
_MAX_ENDPOINTS = 1024
_DRAWS = 8  # for one probe; with fewer hits all that may have capacity are looked at
_PRICED = 8  # instances that are priced for one request


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where a request's KV goes."""

    instance: InstanceId
    kv_endpoint: str
    reason: str  # for the decision log; never parsed
    has_capacity: bool = True  # for the whole request as far as is known; else none has
    # Whether what is cached there will be: requests that wait for memory take blocks of the cache.
    keeps_cache: bool = True


class DecodeCandidates:
    """The instances that could decode one request of `me`: others, `me` only if there is none
    and it does both. With `anywhere` `me` as well, and any instance if none decodes."""

    def __init__(
        self,
        state: ClusterState,
        me: InstanceInfo,
        need: Need,
        refused: Collection[InstanceId],
        rng: Random,
        *,
        anywhere: bool = False,
    ) -> None:
        self._state, self._need, self._rng = state, need, rng
        self._refused = {*refused} if anywhere else {*refused, me.id}
        self._takers = state.table.takers(me)
        if all(row.id in self._refused for row in self._takers.by_name):
            self._refused = {*refused}
            if anywhere:
                self._takers = state.table.takers(me, any_role=True)
            else:
                is_able = me.role is Role.BOTH and me.id not in refused
                own = [row for row in self._takers.by_name if is_able and row.id == me.id]
                self._takers = Takers(own, own, own)
        # Instances that can take KV, by name, refused ones included; empty if none is left.
        self.rows: Sequence[InstanceRow] = self._takers.by_name

    def draw(self, num: int) -> list[InstanceRow]:
        """Draw candidates with capacity at random; fewer only if there are fewer."""
        rows, need = self._takers.by_blocks, self._need
        blocks = -(-need.total_tokens // rows[0].block_size) if rows else 0
        start = bisect_left(rows, blocks, key=lambda row: row.base_blocks)
        if len(rows) - start > num * _DRAWS:
            found: dict[InstanceId, InstanceRow] = {}
            for _ in range(num * _DRAWS):
                row = self._able(rows[self._rng.randrange(start, len(rows))])
                if row is not None:
                    found[row.id] = row
                    if len(found) == num:
                        return list(found.values())
        able = self._all_able(rows[start:])
        return self._rng.sample(able, k=min(num, len(able)))

    def with_capacity(self) -> list[InstanceRow]:
        """List all candidates with capacity, by name; slow among many."""
        return self._all_able(self.rows)

    def get(self, name: InstanceId) -> InstanceRow | None:
        """Return an instance if it is a candidate with capacity."""
        return next((self._able(row) for row in self.rows if row.id == name), None)

    def most_arena(self) -> InstanceRow:
        """Return the candidate with the most free arena, whether that is enough or not."""
        best: InstanceRow | None = None
        for base in reversed(self._takers.by_bytes):
            if best is not None and base.free_bytes <= best.free_bytes:
                break  # what was sent only takes from it
            if base.id not in self._refused:
                row = self._state.row(base)
                best = row if best is None or row.free_bytes > best.free_bytes else best
        assert best is not None, "there is a candidate"
        return best

    def _able(self, base: InstanceRow) -> InstanceRow | None:
        row = self._state.row(base)
        return row if row.id not in self._refused and row.has_capacity(self._need) else None

    def _all_able(self, rows: Sequence[InstanceRow]) -> list[InstanceRow]:
        num_bytes = self._need.num_bytes
        roomy = (base for base in rows if base.free_bytes >= num_bytes)
        return [row for base in roomy if (row := self._able(base)) is not None]


DispatchPolicy = Callable[[DecodeCandidates, Need], InstanceRow | None]
"""Returns the candidate with capacity that decodes a request, or None if there is none."""


def power_of_two(candidates: DecodeCandidates, need: Need) -> InstanceRow | None:
    """Take, of two candidates at random, the one with fewer decodes of the request's kind."""

    def decodes(row: InstanceRow) -> tuple[float, float, float]:
        alike = need.heavy_part * row.heavy + (1 - need.heavy_part) * row.light
        return alike, row.remaining_tokens, -row.free_blocks

    return min(candidates.draw(2), key=decodes, default=None)


def power_of_two_ratio(candidates: DecodeCandidates, need: Need) -> InstanceRow | None:
    """Take, of two candidates at random, the one with the lower heavy:light ratio (the paper)."""

    def interference(row: InstanceRow) -> tuple[float, ...]:
        heavy, light = row.heavy + need.heavy_part, row.light + 1 - need.heavy_part
        return (heavy / light if light else inf), heavy, light, -row.free_blocks

    return min(candidates.draw(2), key=interference, default=None)


DISPATCHES: dict[str, DispatchPolicy] = {
    "power-of-two": power_of_two,
    "power-of-two-ratio": power_of_two_ratio,
}


def choose_decode(
    candidates: DecodeCandidates,
    need: Need,
    policy: DispatchPolicy,
    cached: Mapping[InstanceId, int] = MappingProxyType({}),
) -> Dispatch | None:
    """Choose the decode instance for one request; None if no instance could take its KV. The one
    that has most tokens of the prompt `cached` takes it unless it has more decodes. Takes
    microseconds."""
    if not candidates.rows:
        return None
    best = policy(candidates, need)
    if best is not None:
        most = sorted(cached, key=cached.__getitem__, reverse=True)  # prefill instances, too
        holder = next((row for row in map(candidates.get, most) if row is not None), None)
        if holder is not None and holder.decodes <= best.decodes:
            best = holder
        reason = f"{best.heavy:.3g}:{best.light:.3g} heavy:light"
        return Dispatch(best.id, best.kv_endpoint, reason, keeps_cache=_keeps_cache(best, need))
    best = candidates.most_arena()
    reason = f"none of {len(candidates.rows)} has capacity: most free arena"
    return Dispatch(best.id, best.kv_endpoint, reason, has_capacity=False, keeps_cache=False)


def _keeps_cache(row: InstanceRow, need: Need) -> bool:
    # What waits there is taken to be as large as this request.
    return row.free_tokens >= (1 + row.view.load.waiting) * need.total_tokens


class DecodeDispatcher:
    """Chooses decode instances for the prefill instance `me`. Owner: one thread.

    `lengths` is what outputs turned out to be here, used until decode instances report; `end` of a
    predicted length is reserved; a request without a capable instance is held for `patience_s`."""

    def __init__(
        self,
        me: InstanceInfo,
        policy: DispatchPolicy,
        *,
        lengths: Lengths,
        end: End,
        patience_s: float,
        rng: Random,
    ) -> None:
        self.me = me
        self._policy, self._lengths, self._end = policy, lengths, end
        self._patience_s, self._rng = patience_s, rng
        self._state = ClusterState(GRACE_S)
        self._usual_tokens = 0  # as instances of the model report; 0: not known
        self.held: dict[str, float] = {}  # since when, by request without a capable instance
        # A network can be cut between two instances only, which no view shows.
        self._avoid_until_s: dict[str, float] = {}

    def observe(self, table: ClusterTable) -> None:
        """Take over the table of the newest view."""
        if table is not self._state.table:
            self._state.observe(table)
            self._usual_tokens = table.usual(self.me.models[0]).output_tokens

    def choose(
        self,
        request_id: str,
        need: Need,
        refused: frozenset[InstanceId],
        now: float,
        *,
        may_wait: bool,
        anywhere: bool = False,
        adapter: str = "",
        cached: Mapping[InstanceId, int] = MappingProxyType({}),
    ) -> Dispatch | None:
        """Choose where a request's KV goes that the `refused` instances did not take, one of those
        that have its LoRA adapter; with `anywhere` by what it costs, and this instance is a choice,
        too. Tokens of the prompt that are `cached` at an instance are not sent there. If no
        instance has capacity and the caller retries after the next chunk (`may_wait`), returns None
        for up to `patience_s` (paper section 3.3.4 leaves this open)."""
        avoided = {endpoint for endpoint, until in self._avoid_until_s.items() if now < until}
        rows = self._state.table.by_id.items() if avoided else ()
        unreachable = frozenset(name for name, row in rows if row.kv_endpoint in avoided)
        refused |= self._too_small(need) | self._without(adapter)
        dispatch = self._cheapest(need, refused | unreachable, cached) if anywhere else None
        if dispatch is None and anywhere and not may_wait and self.me.id not in refused:
            # The prompt can stay where it is: this instance knows itself.
            reason = "adaptive: no instance has capacity, so it stays"
            return Dispatch(self.me.id, self.me.kv_endpoint, reason, has_capacity=False)
        for without in (refused | unreachable, refused):
            if dispatch is None:
                candidates = DecodeCandidates(self._state, self.me, need, without, self._rng)
                dispatch = choose_decode(candidates, need, self._policy, cached)
        if dispatch is None:
            return None
        may_wait = may_wait and not dispatch.has_capacity
        if may_wait and now - self.held.setdefault(request_id, now) < self._patience_s:
            return None
        self._state.record_sent(None, dispatch.instance, need, now)
        if dispatch.kv_endpoint in self._avoid_until_s:  # the next ones wait for its result
            self._avoid_until_s[dispatch.kv_endpoint] = now + AVOID_S
        return dispatch

    def _too_small(self, need: Need) -> frozenset[InstanceId]:
        """Return the instances whose arena can never hold a prompt."""
        tokens, table = need.prompt_tokens, self._state.table
        rows = table.by_id.values() if tokens > table.least_arena_tokens else ()
        small = {row.id for row in rows if tokens > row.arena_tokens}
        return frozenset(small | {self.me.id} if tokens > self.me.arena_tokens else small)

    def _without(self, adapter: str) -> frozenset[InstanceId]:
        """Return the instances that do not have the adapter that this one has, which is not said
        of itself before a view does."""
        table = self._state.table.by_id if adapter else {}
        found = {name: row.view.info.adapters.get(adapter) for name, row in table.items()}
        if (own := found.get(self.me.id)) is None:
            return frozenset()
        digests = {name: each.digest for name, each in found.items() if each is not None}
        return frozenset(name for name in found if digests.get(name) != own.digest)

    def _cheapest(
        self, need: Need, refused: frozenset[InstanceId], cached: Mapping[InstanceId, int]
    ) -> Dispatch | None:
        candidates = DecodeCandidates(self._state, self.me, need, refused, self._rng, anywhere=True)
        able, here = candidates.draw(_PRICED), candidates.get(self.me.id)
        holders = (candidates.get(name) for name in cached)
        able += [row for row in holders if row is not None and row not in able]
        chosen = price_decode(able, need, at=here, cached=cached)
        if chosen is None:
            return None
        row = self._state.row(self._state.table.by_id[chosen[0]])
        reason = f"adaptive: {chosen[1]}"
        return Dispatch(row.id, row.kv_endpoint, reason, keeps_cache=_keeps_cache(row, need))

    def record_transfer(self, dispatch: Dispatch, now: float, *, was_reached: bool) -> None:
        """Record whether a transfer reached its endpoint; one that it did not is avoided while
        there are others. An instance that is started again has another endpoint."""
        self._avoid_until_s.pop(dispatch.kv_endpoint, None)
        if not was_reached:
            self._avoid_until_s[dispatch.kv_endpoint] = now + AVOID_S
            if len(self._avoid_until_s) > _MAX_ENDPOINTS:
                del self._avoid_until_s[next(iter(self._avoid_until_s))]

    def forget(self, request_id: str) -> None:
        """Drop a request that ended."""
        self.held.pop(request_id, None)

    def need(
        self,
        prompt_tokens: int,
        predicted: Prediction | None,
        *,
        num_bytes: int,
        max_tokens: int,
        route: str = "",
    ) -> Need:
        """Work out what a request will take where it is decoded: `num_bytes` of the receive arena,
        and at most the output that client and window allow (the prefill request's limit is 1)."""
        expected_tokens, heavy = self._lengths.outlook(predicted, 0, route, max_tokens)
        reserved_tokens = expected_tokens
        if self._end is not End.EXPECTED:
            reserved_tokens = self._lengths.total_tokens(predicted, 0, self._end, route, max_tokens)
        if predicted is None and self._usual_tokens:
            expected_tokens = reserved_tokens = self._usual_tokens
            heavy = float(min(expected_tokens, max_tokens) > HEAVY_TOKENS)
        return Need(
            prompt_tokens,
            min(expected_tokens, max_tokens),
            num_bytes,
            min(reserved_tokens, max_tokens),
            heavy_part=heavy,
        )
