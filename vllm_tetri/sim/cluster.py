"""A cluster in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.cluster import ClusterTable
from vllm_tetri.policy.fetch import FetchPlan
from vllm_tetri.policy.moves import RunningOutput, Source, choose_moves, usual_left, why_leave
from vllm_tetri.policy.overload import Late
from vllm_tetri.policy.tables import TableMaker
from vllm_tetri.sim.config import ClusterConfig, EngineKind, Stock
from vllm_tetri.sim.engine.instance import Instance
from vllm_tetri.sim.engine.stock import StockInstance
from vllm_tetri.sim.engine.tetri import TetriInstance
from vllm_tetri.sim.links import Links, Transfer
from vllm_tetri.sim.loop import Loop
from vllm_tetri.sim.modes import MODES, SimMode
from vllm_tetri.sim.request import SimRequest
from vllm_tetri.sim.workload import NAME_TOKENS, RequestSpec
from vllm_tetri.types import ClusterView, InstanceId, InstanceState, InstanceView, RequestId

# The class that simulates each kind of engine. Add a line for an own kind.
ENGINES: dict[type[EngineKind], type[Instance]] = {EngineKind: TetriInstance, Stock: StockInstance}
TRANSFER_TIMEOUT_S = 30.0  # the default of `--tetri-transfer-timeout`


class RefusedRequest(NamedTuple):
    """A request that was refused, and why; its client does not retry."""

    spec: RequestSpec
    reason: str
    computed_tokens: int = 0  # of its prompt, in vain


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a simulation."""

    served: list[SimRequest]  # that were not refused, in the order in which they were given
    refused: list[RefusedRequest]
    busy: dict[InstanceId, float]  # part of the time, from 0 s to the end, spent in steps
    preemptions: int
    end_s: float  # time of the last token or refusal


def simulate(config: ClusterConfig, specs: Sequence[RequestSpec]) -> list[SimRequest]:
    """Return every request that was not refused, in the order of `specs`; raises as `run`."""
    return run(config, specs).served


def run(
    config: ClusterConfig,
    specs: Sequence[RequestSpec],
    *,
    on_end: Callable[[], object] = lambda: None,
) -> Outcome:
    """Simulate, with a call of `on_end` after every request; raises ConfigError if there is no such
    mode, no request, or one does not fit into an instance."""
    if not specs:
        raise ConfigError("no requests to simulate")
    longest = max(spec.prompt_tokens + spec.output_tokens for spec in specs)
    for each in config.instances:
        if longest > each.engine.pool_tokens:
            raise ConfigError(
                f"a request of {longest} tokens does not fit into the KV pool of {each.id}: "
                f"{each.engine.kv_blocks} blocks of {each.engine.block_size} tokens"
            )
    make_mode = MODES.get(config.mode) if isinstance(config.mode, str) else config.mode
    if make_mode is None:
        raise ConfigError(f"no mode {config.mode!r}; there are {', '.join(MODES)}")
    return _Simulation(config, make_mode(config), specs, on_end).run()


def _output_of(request: SimRequest, usual_left_tokens: float, now: float) -> RunningOutput:
    """Return what a router knows of an output that could move."""
    predicted, done = request.spec.predicted, request.num_output_tokens
    left_tokens = max((predicted.median_tokens if predicted else 0) - done, usual_left_tokens)
    name, here_s = RequestId(request.request_id), now - request.here_s
    return RunningOutput(name, request.num_tokens, left_tokens, request.num_moves, here_s)


class _Simulation:
    """Owner of everything in it. Implements `instance.Cluster`."""

    def __init__(
        self,
        config: ClusterConfig,
        mode: SimMode,
        specs: Sequence[RequestSpec],
        on_end: Callable[[], object],
    ) -> None:
        self.loop, self.config = Loop(), config
        self._mode, self._specs, self._on_end = mode, specs, on_end
        self._instances: dict[InstanceId, Instance] = {
            each.id: ENGINES[type(each.engine.kind)](each, self) for each in config.instances
        }
        self._num_tables, self._maker = 0, TableMaker()
        self._views: dict[InstanceId, InstanceView] = {}
        self._table = self._broadcast_table = self._take_table(0.0)
        # The front counts before the router, so that what the router has sent has arrived.
        self._front_s = max(each.engine.front_s for each in config.instances)
        self._links = None if config.link is None else Links(config.link, self.loop)
        self._on_way: dict[SimRequest, InstanceId] = {}  # that move, and where they were decoded
        self._served: dict[int, SimRequest] = {}
        self._refused: list[RefusedRequest] = []
        self._end_s = 0.0

    def run(self) -> Outcome:
        for spec in sorted(self._specs, key=attrgetter("arrival_s")):
            self.loop.at(spec.arrival_s + self._front_s, partial(self._route, spec))
        if self._mode.reads_reports:
            self.loop.at(self.config.report_period_s, self._report)
        self.loop.run()
        assert self._is_done(), f"{self._served.keys()} only: others wait for nothing"
        for each in self._instances.values():
            each.check_end()
        instances = self._instances.values()
        return Outcome(
            served=[self._served[spec.id] for spec in self._specs if spec.id in self._served],
            refused=self._refused,
            busy={each.config.id: each.busy_s / (self._end_s or 1.0) for each in instances},
            preemptions=sum(each.preemptions for each in instances),
            end_s=self._end_s,
        )

    # -- router --------------------------------------------------------------------

    def _route(self, spec: RequestSpec, now: float) -> None:
        route = self._mode.route(self._table, spec, now)
        if isinstance(route, Late):
            self._refused.append(RefusedRequest(spec, route.reason))
            self._done(now)
            return
        first = route.prefill
        request = SimRequest(spec, str(spec.id), first, route.is_split, None, spec.prompt_tokens)
        request.here_s = now
        plan = self._mode.plan_fetch(spec, first)
        if plan is None:
            self._instances[first].submit(request, now)
        else:
            self._fetch(request, plan, now)

    def _report(self, now: float) -> None:
        if self._is_done() or not self.loop.due:
            return
        self._table = self._take_table(now)
        if self.config.moves and self._mode.moves_outputs:
            self._move(now)
        period_s = self.config.report_period_s
        # Instances get it with the router's next broadcast, half a period later on average.
        self.loop.at(now + period_s / 2, self._broadcast)
        self.loop.at(now + period_s, self._report)

    def _move(self, now: float) -> None:
        """Let outputs move as a router does."""
        if not (reasons := why_leave(self._table)):
            return
        views = {each.info.id: each for each in self._table.view.instances}
        requests: dict[RequestId, SimRequest] = {}
        sources, on_way = [], Counter(self._on_way.values())
        for source, reason in reasons.items():
            batch, usual = self._receiver(source).batch, usual_left(views[source])
            batch.settle()
            requests |= {RequestId(each.request_id): each for each in batch}
            outputs = [_output_of(each, usual, now) for each in batch]
            sources.append(Source(views[source], reason, outputs, on_way[source]))
        coming = [(each.decode, _output_of(each, 0.0, now)) for each in self._on_way if each.decode]
        for order in choose_moves(
            sources, self._table, coming=coming, any_role=self._mode.is_anywhere
        ):
            self._receiver(order.source).let_go(requests[order.request], order.target, now)

    def moving(self, request: SimRequest, target: InstanceId, now: float) -> None:
        """An output pauses as long as the hand-over of a prompt of that length takes when its KV
        was sent before, but for two steps; its KV takes no room of the arena."""
        source = request.decode or request.prefill
        self._on_way[request] = source
        request.decode, request.num_moves = target, request.num_moves + 1
        request.is_split = target != request.prefill
        seconds = self.config.handover_base_s + 2 * self._table.by_id[source].step_s
        self.loop.at(now + seconds, partial(self._moved, request))

    def _moved(self, request: SimRequest, now: float) -> None:
        del self._on_way[request]
        self._receiver(request.decode).take_over(request, now)

    def _take_table(self, now: float) -> ClusterTable:
        """Read all reports; instances that did nothing since the last one report the same."""
        self._num_tables = number = self._num_tables + 1
        for each in self._instances.values():
            load = each.load() if each.has_changed else self._views[each.config.id].load
            each.has_changed = False
            self._views[each.config.id] = InstanceView(
                each.config.info, InstanceState.READY, load, 0.0, number
            )
            if changes := each.cache.changes:
                added = [name for name, is_here in changes.items() if is_here]
                removed = [name for name, is_here in changes.items() if not is_here]
                self._mode.residency.update(each.config.id, added, removed, is_all=False)
                each.cache.changes = {}
        view = ClusterView("sim", number, tuple(self._views.values()))
        return self._maker.make(view, now, spares=self._mode.spares_outputs)

    def _broadcast(self, now: float) -> None:
        self._broadcast_table = self._table

    # -- between instances -----------------------------------------------------------

    def _fetch(self, request: SimRequest, plan: FetchPlan, now: float) -> None:
        """Ask an instance for a prefix of a prompt that waits for it where it will be computed."""
        target, holder = self._receiver(request.prefill), self._receiver(plan.holder)
        names, size = request.spec.names[: plan.tokens // NAME_TOKENS], holder.engine.block_size
        spec = replace(request.spec, prompt_tokens=plan.tokens, output_tokens=2, names=names)
        held_tokens = target.cache.find(names)[0] * NAME_TOKENS
        asked = SimRequest(
            spec, f"{spec.id} fetches", plan.holder, True, request.prefill, plan.tokens + size,
            sent_tokens=held_tokens + size, held_tokens=held_tokens, is_granted=True,
            waiting=request,
        )  # fmt: skip
        target.fetching[request] = plan.tokens
        target.has_changed = True
        self.loop.at(now + plan.wait_s, partial(self.refused, asked))
        holder.ask(asked, now)

    def refused(self, request: SimRequest, now: float) -> None:
        """A prompt waits no longer for a prefix."""
        target, waiting = self._receiver(request.decode), request.waiting
        if waiting in target.fetching:
            target.submit(waiting, now)

    def computed(self, request: SimRequest, now: float) -> None:
        if request.is_split and request.decode is None:
            self._dispatch(request, now, may_wait=True)
        if request.is_granted and self.config.sends_chunks:
            self._send(request, now, is_last=False)

    def prefilled(self, request: SimRequest, now: float) -> bool:
        late = None if request.waiting is not None else self._mode.prefilled(request.spec, now)
        if late is not None and request.is_split:
            self._give_up(request, late, now)
            return True
        if request.is_split and request.decode is None:
            self._dispatch(request, now, may_wait=False)  # it hands over what is granted at once
        elif request.is_split and request.is_granted:
            self._hand_over(request, now)
        has_timeout = self._instances[request.prefill].engine.kind.has_timeout
        if request.is_split and not request.is_granted and has_timeout:
            self.loop.at(now + TRANSFER_TIMEOUT_S, partial(self._lose, request))
        return request.is_split

    def _lose(self, request: SimRequest, now: float) -> None:
        """Compute a prompt again where it is decoded, if there was no room for its KV so far: two
        instances may wait for room at each other."""
        if not request.is_granted:
            receiver = self._receiver(request.decode)
            receiver.drop(request, now)
            self._instances[request.prefill].release(request, now)
            request.num_computed_tokens = request.held_tokens = 0
            receiver.take_over(request, now)

    def _give_up(self, request: SimRequest, late: Late, now: float) -> None:
        """Refuse a request whose prompt is computed."""
        if request.decode is not None:
            self._receiver(request.decode).drop(request, now)
        self._instances[request.prefill].release(request, now)
        self._refused.append(RefusedRequest(request.spec, late.reason, request.spec.prompt_tokens))
        self._done(now)

    def granted(self, request: SimRequest, now: float) -> None:
        if request.num_output_tokens:
            self._hand_over(request, now)
        elif self.config.sends_chunks:
            self._send(request, now, is_last=False)

    def _dispatch(self, request: SimRequest, now: float, *, may_wait: bool) -> None:
        table = self._broadcast_table
        chosen = self._mode.dispatch(request, table, now, may_wait=may_wait)
        if chosen is None and may_wait:
            return
        if chosen is None or chosen.instance == request.prefill:
            request.is_split = False
            return
        request.decode, request.sent_tokens = chosen.instance, request.held_tokens
        self._receiver(request.decode).open(request, now)

    def _hand_over(self, request: SimRequest, now: float) -> None:
        if request.waiting is None:
            self._receiver(request.decode).expect(request, now)
        if self._links is not None:
            self._send(request, now, is_last=True)
            return
        hidden_tokens = request.hidden_tokens if self.config.sends_chunks else 0
        exposed_tokens = request.spec.prompt_tokens - max(hidden_tokens, request.held_tokens)
        seconds = self.config.handover_base_s + exposed_tokens * self.config.handover_token_s
        self.loop.at(now + seconds, partial(self._handed_over, request))

    def _send(self, request: SimRequest, now: float, *, is_last: bool) -> None:
        """Give the links the computed KV that was not sent yet. A preempted prompt computes KV
        again that was sent."""
        tokens = request.num_computed_tokens - request.sent_tokens
        if self._links is None or tokens <= 0:
            return
        assert request.decode is not None
        if request.transfer is None:
            on_end = partial(self._arrived, request)
            request.transfer = Transfer(request.prefill, request.decode, on_end)
        request.sent_tokens += tokens
        bytes_each = self._instances[request.prefill].engine.kv_token_bytes
        assert bytes_each is not None, "checked by ClusterConfig"
        self._links.send(request.transfer, tokens * bytes_each, now, is_last=is_last)

    def _arrived(self, request: SimRequest, now: float) -> None:
        self.loop.at(now + self.config.handover_base_s, partial(self._handed_over, request))

    def _handed_over(self, request: SimRequest, now: float) -> None:
        self._instances[request.prefill].release(request, now)
        request.here_s = now
        self._receiver(request.decode).receive(request, now)

    def _receiver(self, name: InstanceId | None) -> TetriInstance:
        assert name is not None
        found = self._instances[name]
        assert isinstance(found, TetriInstance), f"{name} takes no KV"
        return found

    def ended(self, request: SimRequest, now: float) -> None:
        if request.is_split and request.decode is not None and request.num_output_tokens == 1:
            self._receiver(request.decode).drop(request, now)  # the first token was the last one
            request.decode = None
        request.decode = request.decode or request.prefill
        request.is_split = request.decode != request.prefill
        self._served[request.spec.id] = request
        self._mode.ended(request.spec, now)
        self._done(now)

    def _is_done(self) -> bool:
        return len(self._served) + len(self._refused) == len(self._specs)

    def _done(self, now: float) -> None:
        self._end_s = max(self._end_s, now)
        self._on_end()
