"""How requests find instances: one object per mode, made for every simulation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from heapq import nlargest
from operator import itemgetter
from random import Random

from vllm_tetri.plugins import load_policy
from vllm_tetri.policy.adaptive import NO_OBJECTIVE, PriceCandidates, price_route
from vllm_tetri.policy.cluster import ClusterTable, InstanceRow, Need
from vllm_tetri.policy.dispatch import DecodeDispatcher, Dispatch
from vllm_tetri.policy.fetch import FetchPlan, Prefix
from vllm_tetri.policy.ledger import ClusterState
from vllm_tetri.policy.lengths import Lengths
from vllm_tetri.policy.overload import Late, expected_late
from vllm_tetri.policy.residency import Chain, Residency
from vllm_tetri.policy.route import Route, RouteCandidates, choose_route
from vllm_tetri.sim.config import MODEL, ClusterConfig
from vllm_tetri.sim.request import MAX_TOKENS, SimRequest
from vllm_tetri.sim.workload import NAME_TOKENS, RequestSpec
from vllm_tetri.types import InstanceId

_USUAL_PROMPT_TOKENS = 512
_GRACE_S = 0.1  # as the router's, as are both numbers of holders
_MAX_ASKED, _MAX_HOLDERS = 8, 4


class SimMode(ABC):
    """What a router decides, and by default, that every request stays on its first instance. It
    may look at no request's `output_tokens`. A new mode is given as `ClusterConfig.mode`. Tables
    show the reports of all instances, up to a period ago at the router."""

    reads_reports = True
    moves_outputs = False  # by `policy.moves`; to any instance if it `is_anywhere`
    is_anywhere = False
    spares_outputs = False  # alike instances, by `policy.spare`

    @cached_property
    def residency(self) -> Residency:
        """The block names that instances have reported with their loads. Names are known with the
        request; a router knows them once a request that begins alike has ended."""
        return Residency()

    def held_tokens(self, spec: RequestSpec, rows: Iterable[InstanceRow]) -> dict[InstanceId, int]:
        """Return how much of a prompt's start instances have reported, without those with none."""
        chain = Chain(spec.prompt_names, NAME_TOKENS)
        tokens = {row.id: self.residency.held_tokens(row.id, chain) for row in rows if chain.names}
        return {name: held for name, held in tokens.items() if held}

    @abstractmethod
    def route(self, table: ClusterTable, spec: RequestSpec, now: float) -> Route | Late:
        """Choose the instance of a new request, or refuse it with `Late`."""

    def plan_fetch(self, spec: RequestSpec, instance: InstanceId) -> FetchPlan | None:
        """Return what the instance to which a request was routed just now fetches before it
        computes the prompt."""
        return None

    def dispatch(
        self, request: SimRequest, table: ClusterTable, now: float, *, may_wait: bool
    ) -> Dispatch | None:
        """Choose the decode instance of a split request, by the table that its prefill instance
        has, which is up to two report periods old.

        Returns:
            The decode instance (that with the prompt keeps the request); None to be asked again
            after the next chunk, if there is one (`may_wait`), and else to keep it too.
        """
        return None

    def prefilled(self, spec: RequestSpec, now: float) -> Late | None:
        """A request has its first token, and further ones to come. One that another instance is to
        decode may still be refused; then nothing further is told of it."""
        return None

    def ended(self, spec: RequestSpec, now: float) -> None:  # noqa: B027
        """A request that was not refused has its last token."""


class SplitMode(SimMode):
    """The router of mode `split`; prefill instances choose decode instances, as in
    `engine.dispatcher`."""

    may_fetch = moves_outputs = spares_outputs = True

    def __init__(self, config: ClusterConfig) -> None:
        self._state = ClusterState(_GRACE_S)
        self._routes: RouteCandidates | None = None
        self._lengths = Lengths()  # as before any output
        self._dispatchers = {
            each.id: DecodeDispatcher(
                each.info,
                load_policy("dispatch", config.dispatch),
                lengths=self._lengths,
                end=each.engine.end,
                patience_s=config.report_period_s,
                rng=Random(f"{config.seed} {each.id}"),
            )
            for each in config.instances
        }
        self._held: dict[int, dict[InstanceId, int]] = {}  # when it was routed, by request
        self._prefix = Prefix(0)  # of the request that was routed last

    def look_up(self, spec: RequestSpec, rows: Sequence[InstanceRow]) -> Prefix:
        """Find out what instances hold of a prompt. Of many a router asks only those that served
        its start last; here they are those that hold most, of equal ones other ones every time."""
        first = spec.id % len(rows) if len(rows) > _MAX_ASKED else 0
        held = self.held_tokens(spec, [*rows[first:], *rows[:first]])
        if len(rows) > _MAX_ASKED:
            held = dict(nlargest(_MAX_HOLDERS, held.items(), key=itemgetter(1)))
        self._held[spec.id] = held
        holders = [self._state.row(row) for row in rows if row.id in held and self.may_fetch]
        self._prefix = Prefix(spec.prompt_tokens, held, holders)
        return self._prefix

    def plan_fetch(self, spec: RequestSpec, instance: InstanceId) -> FetchPlan | None:
        row = self._state.table.by_id.get(instance)
        return self._prefix.plan(self._state.row(row)) if row is not None else None

    def need(self, spec: RequestSpec, instance: InstanceId, output_tokens: float = 0.0) -> Need:
        """Return what a request needs at the instance that computes its prompt."""
        plan = self.plan_fetch(spec, instance)
        cached_tokens = self._prefix.cached.get(instance, 0) if plan is None else plan.tokens
        return Need(spec.prompt_tokens, output_tokens, cached_tokens=cached_tokens)

    def dispatch(
        self, request: SimRequest, table: ClusterTable, now: float, *, may_wait: bool
    ) -> Dispatch | None:
        chooser, spec = self._dispatchers[request.prefill], request.spec
        chooser.observe(table)
        tokens, block_size = spec.prompt_tokens, chooser.me.block_size
        num_bytes = -(-tokens // block_size) * block_size  # a byte of the arena is a token
        need = chooser.need(tokens, spec.predicted, num_bytes=num_bytes, max_tokens=MAX_TOKENS)
        held, anywhere = self._held.get(spec.id, {}), self.is_anywhere
        chosen = chooser.choose(
            request.request_id, need, frozenset(), now, may_wait=may_wait, anywhere=anywhere,
            cached=held,
        )  # fmt: skip
        if chosen is not None and chosen.keeps_cache:
            request.held_tokens = held.get(chosen.instance, 0)
        return chosen

    def ended(self, spec: RequestSpec, now: float) -> None:
        self._held.pop(spec.id, None)
        for each in self._dispatchers.values():
            each.forget(str(spec.id))

    def route(self, table: ClusterTable, spec: RequestSpec, now: float) -> Route | Late:
        rows = table.by_model[MODEL]
        if self._routes is None or table is not self._state.table:
            self._state.observe(table)
            self._routes = RouteCandidates(self._state, rows)
        self._state.advance(now)
        prefix = self.look_up(spec, rows)
        route = choose_route(self._routes, may_split=True, cached=prefix.cached, reach=prefix.reach)
        assert isinstance(route, Route), "there is an instance"
        first = route.prefill
        self._state.record_sent(first, None, self.need(spec, first), now)
        return route


class AdaptiveMode(SplitMode):
    """Prices candidates, as `router.placement`: aggregated or split for every request."""

    is_anywhere = may_split = True
    objective, refuses_late = NO_OBJECTIVE, False

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        self._candidates: PriceCandidates | None = None

    def route(self, table: ClusterTable, spec: RequestSpec, now: float) -> Route | Late:
        prompt_tokens, expected = table.usual(MODEL)
        expected = expected or self._lengths.outlook(None, 0)[0]
        if self._candidates is None or table is not self._state.table:
            self._state.observe(table)
            usual = Need(prompt_tokens or _USUAL_PROMPT_TOKENS, expected)
            rows = table.by_model[MODEL]
            self._candidates = PriceCandidates(
                self._state, rows, usual, spares_prefill=self.may_split
            )
        need = Need(spec.prompt_tokens, expected)
        self._state.advance(now)
        prefix = self.look_up(spec, table.by_model[MODEL])
        priced = price_route(
            self._candidates, need, may_split=self.may_split, cached=prefix.cached,
            reach=prefix.reach, objective=self.objective,
        )  # fmt: skip
        assert priced is not None, "there is an instance"
        if self.refuses_late and (late := expected_late(priced, self.objective, expected)):
            return late
        need = self.need(spec, priced.prefill, expected)
        after_s = priced.ttft_s if priced.is_split else 0.0
        self._state.record_sent(priced.prefill, priced.decode, need, now, decode_after_s=after_s)
        return Route(
            priced.prefill, priced.decode, priced.reason, anywhere=True, ttft_s=priced.ttft_s
        )


class WholeMode(AdaptiveMode):
    """Adaptive mode without splitting: the instance with the lowest delay."""

    may_split = is_anywhere = spares_outputs = False


class LeastInFlight(SimMode):
    """The instance with fewest requests that have not ended; the first of equals."""

    reads_reports = False

    def __init__(self, config: ClusterConfig) -> None:
        self._in_flight = {each.id: 0 for each in config.instances}
        self._where: dict[int, InstanceId] = {}

    def route(self, table: ClusterTable, spec: RequestSpec, now: float) -> Route:
        chosen = min(self._in_flight, key=self._in_flight.__getitem__)
        self._in_flight[chosen] += 1
        self._where[spec.id] = chosen
        return Route(chosen, chosen, "fewest in flight")

    def ended(self, spec: RequestSpec, now: float) -> None:
        self._in_flight[self._where.pop(spec.id)] -= 1


MODES: dict[str, Callable[[ClusterConfig], SimMode]] = {
    "split": SplitMode,
    "adaptive": AdaptiveMode,
    "whole": WholeMode,
    "least-in-flight": LeastInFlight,
}
