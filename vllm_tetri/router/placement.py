"""Where requests go: all calls of the placement policies, and the limits that bound them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from math import inf
from typing import NamedTuple

from vllm_tetri.handover import MAX_HOLDERS, MAX_MARKS, Fetch, PrefillParams
from vllm_tetri.logs import LimitLog
from vllm_tetri.messages import CacheReport, Placed
from vllm_tetri.policy.adaptive import Objective, PriceCandidates, PricedRoute, price_route
from vllm_tetri.policy.cluster import ClusterTable, Need
from vllm_tetri.policy.fetch import FetchPlan, Prefix
from vllm_tetri.policy.ledger import ClusterState
from vllm_tetri.policy.overload import Backlogs, expected_late
from vllm_tetri.policy.residency import Chain, Residency, names_of
from vllm_tetri.policy.route import AllAtLimit, Route, RouteCandidates, choose_keeper, choose_route
from vllm_tetri.policy.tables import TableMaker
from vllm_tetri.router.errors import NoCapacity, Refusal
from vllm_tetri.router.prefixes import Known, PrefixIndex
from vllm_tetri.router.request import ApiRequest
from vllm_tetri.router.table import Shares
from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceInfo,
    InstanceState,
    Mode,
    RequestId,
    TransferId,
)

# Age at which a snapshot is renewed: instances report every 100 ms. Renewing takes 4 µs an
# instance, so with many instances a snapshot is used for longer.
_FRESH_S = 0.02
_FRESH_EACH_S = 1e-4
_UNKNOWN_OUTPUT_TOKENS = 200.0  # before any instance has finished an output
_USUAL_PROMPT_TOKENS = 512
_GRACE_S = 0.1  # an engine knows a request only some time after its bytes
_MAX_CHOICES = 16
# A text may have fewer tokens than its bytes let expect; the prefill instance knows them.
_ARENA_SLACK = 1.25
_MAX_NAMED = 5
_MAX_ASKED = 8  # of more instances, only those that served a prompt's start are asked for it
_UNKNOWN = Prefix(0)
_PER_INSTANCE = "the limit of requests per instance (--max-in-flight, or its own)"
LATE = "expected_late"

_log = logging.getLogger(__name__)


class Lookup(NamedTuple):
    """What is known of a prompt, and how many of its tokens lie in prefix caches."""

    known: Known | None
    held: dict[InstanceId, int]  # tokens of the chain that is known, by instance
    cached: dict[InstanceId, int]  # at most as many as the prompt has of it
    prefix: Prefix
    size: Need
    sizes: dict[InstanceId, Need]  # at instances that may compute it, with what is cached there


class Placer:
    """Chooses instances for requests in every mode. Owned by the event loop.

    `view` returns the newest snapshot of the cluster; the rest is as in `RouterConfig`.
    `mode` may be changed at any time.
    """

    def __init__(
        self,
        view: Callable[[], ClusterView],
        shares: Shares,
        *,
        objective: Objective,
        refuses_late: bool,
        max_queue_delay_s: float,
    ) -> None:
        self.mode = Mode.SPLIT
        self._view, self._shares = view, shares
        self._objective, self._refuses_late = objective, refuses_late
        self._tables = TableMaker()
        self._state = ClusterState(_GRACE_S)
        self._fresh_until_s = -inf
        # The mode and the reports of the last look.
        self._seen: tuple[Mode | None, list[tuple[InstanceInfo, InstanceState, int]]] = None, []
        self.backlogs = Backlogs(max_queue_delay_s)
        self._limit_log = LimitLog()
        self._routes: dict[str, RouteCandidates] = {}
        self._candidates: dict[str, PriceCandidates] = {}
        self._models: dict[str, InstanceInfo] = {}  # empty if not asked for
        self._residency, self._prefixes = Residency(), PrefixIndex()
        self._cache_seqs: dict[InstanceId, int] = {}  # of the newest cache reports
        # What was looked up last.
        self._asked: tuple[ApiRequest | None, ClusterTable | None] = None, None
        self._found = Lookup(None, {}, {}, _UNKNOWN, Need(1, 0), {})

    @property
    def spared(self) -> Collection[InstanceId]:
        """The instances with role both that computed prompts alone, at the last decision."""
        return self._state.table.spared

    def models(self, wanted: str = "") -> dict[str, InstanceInfo]:
        """Return a ready instance by model name: as of a moment ago if `wanted` has one, or now."""
        self.table(time.monotonic())
        if wanted not in self._models:
            self._models = {}
            for each in self._view().instances:
                for name in each.info.names if each.state is InstanceState.READY else ():
                    self._models.setdefault(name, each.info)
        return self._models

    def place(
        self,
        request: ApiRequest,
        *,
        may_split: bool,
        excluded: frozenset[InstanceId],  # they failed it, or lack what it asks for
        at_limit: frozenset[InstanceId],  # they refused it because they are at their limits
        is_new: bool,  # it has not been sent to any instance yet
    ) -> Route | None:
        """Choose where a request goes; None when no ready instance serves the model. Raises
        `NoCapacity`: all instances that could serve it are at their limits."""
        now = time.monotonic()
        self.table(now, request.model)
        most_tokens = self._state.table.most_arena_tokens.get(request.model, inf)
        may_split = may_split and request.approx_tokens <= _ARENA_SLACK * most_tokens
        limited: frozenset[InstanceId] = frozenset()
        if request.generates:
            limited = self._shares.at_limit(request.client)
            if limited:
                self._log_limit(_PER_INSTANCE, f"{_named(limited)} cannot take more")
            if is_new and (long := self.backlogs.at_limit):
                self._log_limit("--max-queue-delay", f"prompts wait too long at {_named(long)}")
                limited |= self._shares.over_share(request.client, long)

        def choose(model: str, *, may_split: bool = False) -> Route | AllAtLimit | None:
            if request.is_stored:
                full = at_limit | limited
                return choose_keeper(self._view(), model, excluded=excluded, at_limit=full)
            self.table(now, model)
            candidates = self._routes.get(model)
            if candidates is None:
                rows = self._state.table.by_model.get(model, ())
                candidates = self._routes[model] = RouteCandidates(self._state, rows)
            found = self.look_up(request)
            return choose_route(
                candidates,
                may_split=may_split,
                excluded=excluded,
                refused=at_limit,
                at_limit=limited,
                cached=found.cached,
                reach=found.prefix.reach if found.cached else None,
            )

        if request.rules is not None:
            choices = map(choose, self._models_of(request))
            found = next((each for each in choices if each is not None), None)
        elif self.mode is Mode.SPLIT:
            found = choose(request.model, may_split=may_split)
        else:
            found = self._place_by_cost(request, may_split, excluded, at_limit | limited, now)
        if isinstance(found, AllAtLimit):
            wait_s = self.backlogs.retry_after_s(self._state.table, found.instances)
            words = f"all {found.who} ({len(found.instances)}) are at their limits"
            message = f"{words}; try again in {wait_s} s"
            raise NoCapacity(503, message, kind="queue_full", retry_after_s=wait_s)
        return found

    def record_sent(self, entry: RequestId, request: ApiRequest, route: Route) -> Placed:
        """A request goes where `place` said: count it there. Returns what other routers are told,
        and how many tokens of its prompt are expected to be cached there."""
        self._prefixes.expect(entry, request.starts)
        size = self._size_at(route.prefill, request) if request.generates else Need(1, 0)
        sent = Placed(
            route.prefill, size.prompt_tokens, size.cached_tokens, size.output_tokens,
            # Requests that are only passed on may write no output.
            decode=route.decode if request.rules is None else InstanceId(""),
            decode_after_s=route.ttft_s if route.is_split else 0.0,
        )  # fmt: skip
        self.count(sent)
        return sent

    def count(self, sent: Placed) -> None:
        """A request is on its way to instances, by this router or another one."""
        need = Need(sent.prompt_tokens, sent.output_tokens, cached_tokens=sent.cached_tokens)
        where, after_s = (sent.prefill, sent.decode or None), sent.decode_after_s
        self.table(now := time.monotonic())  # a router without requests forgets what ended, too
        self._state.record_sent(*where, need, now, decode_after_s=after_s)

    def record_cache(self, report: CacheReport) -> bool:
        """An instance tells what came into its prefix cache or left it; False if the report before
        this one is missing."""
        seq = self._cache_seqs.get(report.instance)
        if not report.is_all and (seq is None or report.seq != seq + 1):
            return False
        self._cache_seqs[report.instance] = report.seq
        added, removed = names_of(report.added), names_of(report.removed)
        self._residency.update(
            report.instance, added, removed, is_all=report.is_all, tail_blocks=report.tail_blocks
        )
        for each in report.chains:
            chain = Chain(names_of(each.names), report.block_tokens)
            self._prefixes.learn(report.instance, each.request, chain, each.prompt_tokens)
        return True

    def cached_blocks(self) -> dict[InstanceId, int]:
        """Return how many prefix blocks each instance has reported."""
        return {name: self._residency.count(name) for name in self._cache_seqs}

    def look_up(self, request: ApiRequest) -> Lookup:
        """Find out what instances hold of a prompt; once per request and snapshot."""
        table = self._state.table
        if request is self._asked[0] and table is self._asked[1]:
            return self._found
        known = self._prefixes.find(request.starts)
        tokens = request.approx_tokens if known is None else known.prompt_tokens
        size = self._size_of(request, tokens)
        self._asked = request, table
        if known is None:
            self._found = Lookup(None, {}, {}, _UNKNOWN, size, {})
            return self._found
        rows = table.by_model.get(request.model, ())
        names = [row.id for row in rows] if len(rows) <= _MAX_ASKED else known.holders
        held: dict[InstanceId, int] = {}
        cached: dict[InstanceId, int] = {}
        holders, model, common = [], request.model, known.common_tokens
        for name in names:
            if found := self._residency.held_tokens(name, known.chain):
                held[name], cached[name] = found, found if found < common else common
                row = table.by_id.get(name)
                # Of an adapter, block hashes have only the name.
                if request.may_fetch and row and model not in row.view.info.adapters:
                    holders.append(self._state.row(row))
        self._found = Lookup(known, held, cached, Prefix(tokens, cached, holders), size, {})
        return self._found

    def plan_fetch(self, instance: InstanceId, request: ApiRequest) -> FetchPlan | None:
        """Return what an instance that computes a prompt fetches before, if that is cheaper."""
        found, row = self.look_up(request), self._state.table.by_id.get(instance)
        return found.prefix.plan(self._state.row(row)) if row is not None else None

    def prefill_params(
        self,
        transfer: TransferId,
        entry: RequestId,
        route: Route,
        request: ApiRequest,
        fetch: Fetch | None,
    ) -> PrefillParams:
        """Return what a prefill request says of the hand-over."""
        found = self.look_up(request)
        most = sorted(found.held, key=found.held.__getitem__, reverse=True)[:MAX_HOLDERS]
        return PrefillParams(
            transfer,
            entry,
            anywhere=route.anywhere,
            held={name: found.held[name] for name in most},
            marks=found.known.chain.marks(MAX_MARKS) if most and found.known else [],
            fetch=fetch,
        )

    def _size_at(self, instance: InstanceId, request: ApiRequest) -> Need:
        """Return what a request needs at the instance that computes its prompt."""
        found = self.look_up(request)
        if instance not in found.sizes:
            plan = self.plan_fetch(instance, request)
            cached_tokens = found.cached.get(instance, 0) if plan is None else plan.tokens
            cached_tokens = min(cached_tokens, found.size.prompt_tokens - 1)
            found.sizes[instance] = Need(*found.size[:4], cached_tokens)
        return found.sizes[instance]

    def refuse_late(self, request: ApiRequest) -> None:
        """Raise `Refusal` 429 for a new request that is expected to miss its promises."""
        if not self._refuses_late:
            return
        place = self._cheapest(request, (), request.is_splittable, time.monotonic())
        tokens = self.look_up(request).size.output_tokens
        late = expected_late(place, self._objective, tokens) if place is not None else None
        if late is not None:
            self._limit_log.record("--refuse-late", f"{late.reason}; such requests get 429")
            message = f"{late.reason}; try again in {late.retry_after_s} s"
            raise Refusal(429, message, kind=LATE, retry_after_s=late.retry_after_s)

    def _place_by_cost(
        self,
        request: ApiRequest,
        may_split: bool,
        excluded: frozenset[InstanceId],
        at_limit: frozenset[InstanceId],
        now: float,
    ) -> Route | AllAtLimit | None:
        place = self._cheapest(request, excluded | at_limit, may_split, now)
        if place is None:
            names = [row.id for row in self._state.table.by_model.get(request.model, ())]
            refused = tuple(name for name in names if name not in excluded)
            return AllAtLimit(refused, "instances") if refused else None
        _log.debug("request %s: %s", request.request_id, place.reason)
        return Route(place.prefill, place.decode, place.reason, anywhere=True, ttft_s=place.ttft_s)

    def _models_of(self, request: ApiRequest) -> Iterator[str]:
        """The model that a proxied request names. About an unknown one, or none, an instance
        complains best itself."""
        names = self.models(request.model)
        known = (each.info.names for each in self._view().instances)  # ready or not
        if request.model in names or any(request.model in each for each in known):
            yield request.model
        else:
            yield from sorted({info.models[0] for info in names.values()})

    def _log_limit(self, limit: str, words: str) -> None:
        self._limit_log.record(limit, f"{words}; new requests go elsewhere or get 503")

    def _cheapest(
        self, request: ApiRequest, taken: Collection[InstanceId], may_split: bool, now: float
    ) -> PricedRoute | None:
        self.table(now, request.model)
        found = self.look_up(request)
        candidates = self._candidates.get(request.model)
        if candidates is None:
            prompt_tokens, output_tokens = self._state.table.usual(request.model)
            candidates = self._candidates[request.model] = PriceCandidates(
                self._state,
                self._state.table.by_model.get(request.model, ()),
                Need(
                    prompt_tokens or _USUAL_PROMPT_TOKENS, output_tokens or _UNKNOWN_OUTPUT_TOKENS
                ),
                spares_prefill=self.mode is not Mode.WHOLE,
                spares_decode=self.mode is Mode.SPLIT,
            )
        return price_route(
            candidates,
            found.size,
            may_split=may_split and self.mode is not Mode.WHOLE,
            prefers_split=self.mode is Mode.SPLIT,
            objective=self._objective,
            taken=taken,
            cached=found.cached,
            reach=found.prefix.reach if found.cached else None,
        )

    def _size_of(self, request: ApiRequest, prompt_tokens: int) -> Need:
        table = self._state.table
        tokens = float(table.usual(request.model).output_tokens or _UNKNOWN_OUTPUT_TOKENS)
        rows = table.by_model.get(request.model)
        bound, num = request.max_tokens, request.num_choices
        if bound is not None and (bound < tokens or request.ignores_eos):
            tokens = float(bound)
        if rows:  # an estimate may be wrong; vLLM refuses what is longer
            most = rows[0].view.info.max_model_len
            tokens = tokens if tokens < most else float(most)
            prompt_tokens = prompt_tokens if prompt_tokens < most else most
        prompt_tokens = prompt_tokens if prompt_tokens > 1 else 1  # a body may be empty
        return Need(prompt_tokens, tokens * (num if num < _MAX_CHOICES else _MAX_CHOICES))

    def renew(self) -> None:
        """Look at the cluster again for the next decision: what instances may get has changed."""
        self._fresh_until_s, self._seen = -inf, (None, [])

    def table(self, now: float, model: str = "") -> ClusterTable:
        """Return the cluster as it is now, or was a moment ago; now if no instance serves `model`,
        of which the first one may have just joined."""
        is_missing = bool(model) and model not in self._state.table.by_model
        if is_missing or now >= self._fresh_until_s or self._seen[0] is not self.mode:
            self._look(now)
        self._state.advance(now)
        return self._state.table

    def _look(self, now: float) -> None:
        view, spared = self._view(), self._state.table.spared
        seen = self.mode, [(each.info, each.state, each.seq) for each in view.instances]
        self._fresh_until_s = now + max(_FRESH_S, _FRESH_EACH_S * len(view.instances))
        self._routes.clear()
        self._candidates.clear()
        if seen == self._seen:
            return  # what was sent since counts on top of it already
        self._seen = seen
        table = self._tables.make(view, now, spares=self.mode is not Mode.WHOLE)
        self._state.observe(table)
        self.backlogs.observe(table, now)
        self._models = {}
        known = {each.info.id for each in view.instances}
        self._residency.retain(known)
        self._cache_seqs = {name: seq for name, seq in self._cache_seqs.items() if name in known}
        if table.spared != spared:
            _log.info(
                "instances that compute prompts only, at the present load: %s",
                _named(table.spared) or "none",
            )


def _named(instances: Collection[InstanceId]) -> str:
    names, more = sorted(instances)[:_MAX_NAMED], len(instances) - _MAX_NAMED
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
