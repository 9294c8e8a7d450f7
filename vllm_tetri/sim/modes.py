"""How requests find instances: one object per mode, made for every simulation.

A new mode is a class with the methods of `SimRouter`, given as `ClusterConfig.mode`. It may keep
what it observes itself and what `SimSnapshot` shows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from random import Random

from vllm_tetri.errors import ConfigError
from vllm_tetri.plugins import load_policy
from vllm_tetri.policy.adaptive import PriceCandidates, price_route
from vllm_tetri.policy.cluster import ClusterState, Need
from vllm_tetri.policy.dispatch import DecodeDispatcher, Dispatch
from vllm_tetri.policy.lengths import End, Lengths
from vllm_tetri.policy.route import Route, Split, Whole, choose_route
from vllm_tetri.sim.config import ClusterConfig
from vllm_tetri.sim.request import MAX_TOKENS
from vllm_tetri.sim.snapshot import MODEL, SimRouter, SimSnapshot
from vllm_tetri.sim.workload import GRANULARITY_TOKENS, NUM_BUCKETS, RequestSpec
from vllm_tetri.types import InstanceId

_USUAL_PROMPT_TOKENS = 512
_GRACE_S = 0.1  # as the router's


class _Dispatching:
    """Base of modes whose prefill instances choose decode instances, as `engine.dispatcher`."""

    is_anywhere = False

    def __init__(self, config: ClusterConfig) -> None:
        self._state = ClusterState(_GRACE_S)
        self._lengths = Lengths(GRANULARITY_TOKENS, NUM_BUCKETS)  # as before any output
        self._dispatchers = {
            each.id: DecodeDispatcher(
                each.info(MODEL),
                load_policy("dispatch", config.dispatch),
                lengths=self._lengths,
                end=End.EXPECTED,
                patience_s=config.report_period_s,
                rng=Random(f"{config.seed} {each.id}"),
            )
            for each in config.instances
        }

    def dispatch(
        self,
        prefill: InstanceId,
        snapshot: SimSnapshot,
        spec: RequestSpec,
        now: float,
        *,
        may_wait: bool,
    ) -> Dispatch | None:
        chooser = self._dispatchers[prefill]
        chooser.observe(snapshot.table)
        tokens, block_size = spec.prompt_tokens, chooser.me.block_size
        num_bytes = -(-tokens // block_size) * block_size  # a byte of the arena is a token
        need = chooser.need(tokens, spec.predicted, num_bytes=num_bytes, max_tokens=MAX_TOKENS)
        return chooser.choose(
            str(spec.id), need, frozenset(), now, may_wait=may_wait, anywhere=self.is_anywhere
        )

    def ended(self, spec: RequestSpec, now: float) -> None:
        for each in self._dispatchers.values():
            each.forget(str(spec.id))


class SplitMode(_Dispatching):
    """The router and prefill instances of mode `split`."""

    def route(self, snapshot: SimSnapshot, spec: RequestSpec, now: float) -> Route:
        self._state.observe(snapshot.table)
        rows = map(self._state.row, self._state.table.by_model[MODEL])
        route = choose_route(rows, may_split=True)
        assert isinstance(route, Split | Whole), "there is an instance"
        first = route.prefill if isinstance(route, Split) else route.instance
        self._state.record_sent(first, None, Need(spec.prompt_tokens, 0), now)
        return route


class AdaptiveMode(_Dispatching):
    """Prices candidates, as `router.placement`: aggregated or split for every request."""

    is_anywhere = may_split = True

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        self._rng = Random(f"{config.seed} adaptive")
        self._candidates: PriceCandidates | None = None

    def route(self, snapshot: SimSnapshot, spec: RequestSpec, now: float) -> Route:
        table = snapshot.table
        known = table.bucket_tokens(NUM_BUCKETS)
        expected = round(known[-1]) if known else self._lengths.total_tokens(None, 0, End.EXPECTED)
        if self._candidates is None or table is not self._state.table:
            self._state.observe(table)
            usual = Need(_USUAL_PROMPT_TOKENS, expected)
            rows = table.by_model[MODEL]
            self._candidates = PriceCandidates(
                self._state, rows, usual, self._rng, spares_prefill=self.may_split
            )
        need = Need(spec.prompt_tokens, expected)
        priced = price_route(self._candidates, need, may_split=self.may_split)
        assert priced is not None, "there is an instance"
        after_s = priced.ttft_s if priced.is_split else 0.0
        self._state.record_sent(priced.prefill, priced.decode, need, now, decode_after_s=after_s)
        if priced.is_split:
            return Split(priced.prefill, priced.reason, anywhere=True)
        return Whole(priced.prefill, priced.reason)


class WholeMode(AdaptiveMode):
    """Adaptive mode without splitting: the instance with the lowest delay."""

    may_split = False


class Aggregated:
    """Base of modes in which every request stays on its first instance."""

    def __init__(self, config: ClusterConfig) -> None:
        self.ids = [each.id for each in config.instances]

    def dispatch(
        self,
        prefill: InstanceId,
        snapshot: SimSnapshot,
        spec: RequestSpec,
        now: float,
        *,
        may_wait: bool,
    ) -> Dispatch | None:
        return None

    def ended(self, spec: RequestSpec, now: float) -> None:
        """Nothing is kept of it."""


class LeastInFlight(Aggregated):
    """The instance with fewest requests that have not ended; the first of equals."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        self._in_flight = dict.fromkeys(self.ids, 0)
        self._where: dict[int, InstanceId] = {}

    def route(self, snapshot: SimSnapshot, spec: RequestSpec, now: float) -> Route:
        chosen = min(self._in_flight, key=self._in_flight.__getitem__)
        self._in_flight[chosen] += 1
        self._where[spec.id] = chosen
        return Whole(chosen, "fewest in flight")

    def ended(self, spec: RequestSpec, now: float) -> None:
        self._in_flight[self._where.pop(spec.id)] -= 1


class RoundRobin(Aggregated):
    """One instance after the other."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        self._turns = cycle(self.ids)

    def route(self, snapshot: SimSnapshot, spec: RequestSpec, now: float) -> Route:
        return Whole(next(self._turns), "round robin")


MODES: dict[str, Callable[[ClusterConfig], SimRouter]] = {
    "split": SplitMode,
    "adaptive": AdaptiveMode,
    "whole": WholeMode,
    "least-in-flight": LeastInFlight,
    "round-robin": RoundRobin,
}


def router_of(config: ClusterConfig) -> SimRouter:
    """Make the router of a cluster; raises ConfigError if there is no such mode."""
    mode = config.mode
    if not isinstance(mode, str):
        return mode(config)
    if mode not in MODES:
        raise ConfigError(f"no mode {mode!r}; there are {', '.join(MODES)}")
    return MODES[mode](config)
