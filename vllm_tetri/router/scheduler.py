"""The global scheduler: requests, instances and the control channel meet here."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from dataclasses import dataclass, replace
from math import inf

from vllm_tetri.control.monitor import Monitor
from vllm_tetri.handover import find_named
from vllm_tetri.messages import CancelTransfer, Dispatched, OfRequest, Placed, Served
from vllm_tetri.policy.adaptive import NO_OBJECTIVE, Objective
from vllm_tetri.policy.role import why_needed
from vllm_tetri.policy.route import Event, Phase, Route
from vllm_tetri.policy.watcher import Watcher
from vllm_tetri.router.adapters import SERVING, Adapters
from vllm_tetri.router.errors import NoCapacity, Refusal, is_failure
from vllm_tetri.router.fetching import Fetches
from vllm_tetri.router.flips import Flips, Lease
from vllm_tetri.router.history import MOST, Ended, History
from vllm_tetri.router.incoming import ClientRequest
from vllm_tetri.router.liveness import Liveness
from vllm_tetri.router.metrics import Metrics
from vllm_tetri.router.mirrors import Mirrors
from vllm_tetri.router.moves import Moves
from vllm_tetri.router.placement import LATE, Placer
from vllm_tetri.router.relay import Relay
from vllm_tetri.router.replies import Reply, refused
from vllm_tetri.router.request import ApiRequest
from vllm_tetri.router.retry import POISON, PoisonFilter
from vllm_tetri.router.table import Entry, RequestTable, Shares, Trace
from vllm_tetri.router.tracing import Tracing
from vllm_tetri.router.upstream import Upstream
from vllm_tetri.security import Secret
from vllm_tetri.types import Flip, InstanceId, InstanceInfo, InstanceState, Mode, RequestId

# Multiple of `silent_after_s` after which the requests of a silent instance fail.
GIVE_UP_AFTER = 3
_LOOK_AGAIN_S = 0.05  # while all instances are silent

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of a router; times in seconds."""

    control: str  # address to bind for instances
    first_byte_s: float = 300.0  # longest wait for the next byte of an instance without progress
    period_s: float = 0.1  # between two broadcasts
    silent_after_s: float = 1.0  # without a report an instance gets no new requests after this
    max_in_flight_each: float = inf  # requests at one instance
    max_flows: float = inf  # streams whose events the C++ core passes on
    num_clients: int = 1  # clients (API keys) that share this limit
    max_queue_delay_s: float = 0.0  # longest wait in a persistent queue; 0 sets no limit
    authorization: str | None = None  # header for instances; "": none, None: the client's
    watcher: Watcher | None = None  # decides flips; None leaves them to operators
    is_watcher_dry: bool = False  # only log the watcher's decisions
    mode: Mode = Mode.SPLIT  # how requests are served that two instances could share
    objective: Objective = NO_OBJECTIVE  # promised latencies
    refuses_late: bool = False  # refuse requests that are expected to miss them
    secret: Secret | None = None  # shared by routers and instances
    lease: Lease | None = None  # elects the one router whose watcher orders flips
    resumes_anywhere: bool = False  # a broken stream may resume where its text may differ
    moves: bool = True  # running outputs move by policy, not only by order
    mirror_every: int = 0  # tokens by which outputs grow between two copies; 0: no copies
    tracing: Tracing | None = None  # closed with the scheduler


class GlobalScheduler:
    """Owns the control socket, the connections to instances and the request table.

    Build it on a running event loop; `close` it also if its monitor cannot start.
    """

    def __init__(self, config: RouterConfig) -> None:
        # A new name with every start: instances drop the requests of a router that is gone.
        name = f"router-{os.getpid()}-{secrets.token_hex(4)}"
        self.resumes_anywhere, self.objective = config.resumes_anywhere, config.objective
        self.table = RequestTable(name)
        self.history = History()
        self._tracing = config.tracing
        self._shares = Shares(
            self.table, limit_each=config.max_in_flight_each, num_clients=config.num_clients
        )
        self.monitor = Monitor(
            config.control,
            name,
            self,
            period_s=config.period_s,
            silent_after_s=config.silent_after_s,
            secret=config.secret,
        )
        self.metrics = Metrics(self.monitor, self.table)
        self.upstream = Upstream(config.first_byte_s, config.authorization, config.max_flows)
        self._give_up_s = give_up_s = GIVE_UP_AFTER * config.silent_after_s
        self.adapters = Adapters(self.monitor, self.upstream)
        self._liveness = Liveness(
            self.monitor, self.upstream, self.table, self.adapters.welcome, after_s=give_up_s
        )
        self.on_hello, self.num_reaching = self._liveness.probe, self.table.num_reaching
        self.poison = PoisonFilter(self._liveness, self.metrics)
        self.flips = Flips(
            self.monitor, config.watcher, is_dry=config.is_watcher_dry, lease=config.lease
        )
        self.placer = Placer(
            self.monitor.view,
            self._shares,
            objective=config.objective,
            refuses_late=config.refuses_late,
            max_queue_delay_s=config.max_queue_delay_s,
        )
        self.on_cache = self.placer.record_cache
        self.fetches = Fetches(self.placer, self.monitor, self.upstream, self.metrics)
        self.moves = Moves(self.monitor, self.table, self.placer, is_on=config.moves)
        self._mirrors = Mirrors(self.table, self.placer, self.fetches, config.mirror_every)
        self.mode_since_s = time.monotonic()
        self.set_mode(config.mode)

    async def close(self) -> None:
        """Release every socket and task. Idempotent."""
        await self.moves.close()
        await self._mirrors.close()
        await self.flips.close()
        await self._liveness.close()
        self.monitor.close()
        self.upstream.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def set_mode(self, mode: Mode) -> None:
        """Serve new requests in another mode; requests in flight are not affected."""
        if mode is not self.placer.mode:
            self.mode_since_s = time.monotonic()
        self.placer.mode = mode
        self.monitor.mix(mode is Mode.ADAPTIVE)
        self.moves.any_role = mode is Mode.ADAPTIVE
        self.flips.are_roles_needed = mode is Mode.SPLIT

    def drain(self, instance: InstanceId, *, force: bool, deadline_s: float | None) -> None:
        """Drain an instance: it finishes its requests and ends. Raises `Refusal`: 404, there is no
        such instance; 409, the cluster needs it and `force` is not set."""
        one = self.monitor.view_of(instance)
        if one is None:
            raise Refusal(404, f"there is no instance {instance!r}")
        why = why_needed(self.monitor.view(), one, are_roles_needed=self.flips.are_roles_needed)
        if why and not force and one.state is not InstanceState.DRAINING:
            raise Refusal(409, f'{why}; send {{"force": true}} to drain it nevertheless')
        self.monitor.order_drain(instance, deadline_s)

    async def admit(self, request: ApiRequest) -> ApiRequest:
        """Return a request with the model that serves it; raises `Refusal` if none does, or if it
        is expected to be late or to crash its engine."""
        if not request.generates:
            return request
        try:
            names = self.placer.models(request.model)
            if request.model not in names:
                names = await self._ready_models(request.model)
            if request.rules is None:
                request = self._with_model(request, names)
            self.poison.check(request)
            if request.rules is None:
                self.placer.refuse_late(request)
        except Refusal as refusal:
            self._record_refused(request, refusal)
            raise
        return request

    async def serve(self, request: ApiRequest, http: ClientRequest) -> Reply:
        """Serve a request; raises `Refusal` if it was not begun."""
        request = await self.admit(request)
        entry = self.table.enter(
            request.request_id,
            now=time.monotonic(),
            client=request.client,
            is_counted=request.generates,
        )
        entry.model = request.model
        entry.trace = Trace(request.headers) if self._tracing is not None else None
        relay = Relay(request, entry, http, self)
        outcome, problem = "error", ""
        try:
            response = await relay.serve()
            if not entry.is_over:  # else it broke off in the middle
                is_ok = response.status < 400 and entry.phase in (Phase.DECODING, Phase.SERVING)
                is_error = is_failure(response.status)  # a passed route's
                outcome = "ok" if is_ok else "error" if is_error else "rejected"
                entry.on(Event.FINISH if is_ok else Event.FAIL)
                if is_ok:
                    self.poison.clear(request)
            return response
        except Refusal as refusal:
            entry.on(Event.FAIL)
            problem = str(refusal)
            if isinstance(refusal, NoCapacity) or refusal.status < 500:
                outcome = "busy" if isinstance(refusal, NoCapacity) else "rejected"
            return refused(refusal, {"x-request-id": entry.id})
        except (asyncio.CancelledError, ConnectionResetError):
            is_whole = relay.output.is_complete  # clients may leave after `[DONE]`
            outcome = "ok" if is_whole else "cancelled"
            if is_whole:
                self.poison.clear(request)
            if not entry.is_over:
                entry.on(Event.FINISH if is_whole else Event.CANCEL)
            raise
        finally:
            self.table.leave(entry)
            if request.generates:
                self.metrics.record_request(relay.route, outcome, entry)
                row = self.history.record(entry, relay.route, outcome, problem, time.monotonic())
                if self._tracing is not None and entry.trace is not None:
                    self._tracing.end(entry.trace, row)

    def _told_of(self, request: RequestId) -> list[tuple[InstanceId, Served]] | None:
        found = self.table.get(request) or self.history.get(request)
        return found.served if found is not None else None

    def look_up(self, request: RequestId) -> Ended:
        """Return what is known of a request, also while it is served. Raises `Refusal` 404."""
        if (row := self.history.get(request)) is not None:
            return row
        if (entry := self.table.get(request)) is not None:
            return self.history.row(entry, "", entry.phase, "", time.monotonic())
        raise Refusal(404, f"no request {request!r} is served or among the last {MOST} that ended")

    def info(self, instance: InstanceId) -> InstanceInfo | None:
        """Return what an instance announced, if it is in use."""
        return self.monitor.info_of(instance, SERVING)

    def record_sent(
        self, entry: Entry, request: ApiRequest, route: Route, instance: InstanceInfo
    ) -> None:
        """Count a request where it is sent, here and at other routers of this instance."""
        entry.expected_s = entry.expected_s or route.ttft_s
        sent = self.placer.record_sent(entry.id, request, route)
        if sent.cached_tokens:
            self.metrics.cached_tokens.inc(sent.cached_tokens)
        if instance.num_routers > 1:
            self.monitor.send(instance.id, sent)

    def record_at_limit(self, instance: InstanceId) -> None:
        """An instance refused a request because it is at its limit."""
        self.metrics.busy[instance] += 1
        self._shares.record_at_limit(instance)

    def doubt(self, instance: InstanceInfo) -> None:
        """An instance did not answer: find out whether it can be used."""
        self._liveness.doubt(instance)

    def cancel_transfer(self, entry: Entry) -> None:
        """Tell instances to drop the KV transfer of a request, if it has one; all of them if no
        decode instance is known."""
        if (transfer := entry.take_transfer()) is None:
            return
        self.metrics.cancelled.inc()
        # In adaptive mode, now or when the request was sent, any instance may have it.
        targets = entry.dispatched or {each.info.id for each in self.monitor.view().instances}
        for instance in targets | {entry.prefill}:
            self.monitor.send(instance, CancelTransfer(transfer))

    # Called by the monitor.

    def on_published(self, instance: InstanceId, message: OfRequest) -> None:
        """An instance tells of a request."""
        match message:
            case Dispatched():
                if not self.table.on_dispatched(message):
                    # It was dispatched while the transfer was cancelled: this decode instance does
                    # not know that yet.
                    self.monitor.send(message.decode, CancelTransfer(message.transfer))
            case Served(request=name):
                if (told := find_named(name, self._told_of)) is not None:
                    told.append((instance, message))
            case Placed(prefill=prefill):
                if prefill == instance and message.cached_tokens <= message.prompt_tokens:
                    self.placer.count(message)
            case _:
                self.moves.on_message(message)

    def on_cut_off(self, instance: InstanceId) -> None:
        """An instance has left the cluster with requests that it did not finish: they fail here."""
        self.upstream.http.fail_requests(instance, "it has left the cluster")

    def on_ending(self) -> None:
        """Instances drain or flip: their outputs move at once."""
        self.placer.renew()
        self.table.changed.set()

    def on_flip(self, instance: InstanceId, flip: Flip) -> None:
        """A flip of an instance has ended."""
        self.metrics.record_flip(instance, flip)
        if flip.problem:
            _log.warning("%s keeps its role %s: %s", instance, flip.source, flip.problem)

    async def _ready_models(self, wanted: str) -> dict[str, InstanceInfo]:
        """Return the models that ready instances serve, as `Placer.models` does. While all that
        serve the wanted one are silent, as on a host that is short of CPU time, this waits until
        one is given up."""
        names, has_waited = self.placer.models(wanted), False
        while not names or (wanted and wanted not in names):
            views = self.monitor.view().instances
            silent = [each for each in views if each.state is InstanceState.SILENT]
            awaited = [each for each in silent if not names or wanted in each.info.names]
            if not any(each.age_s < self._give_up_s for each in awaited):
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
            names, has_waited = self.placer.models(), True
        if has_waited:
            await asyncio.sleep(_LOOK_AGAIN_S)  # the table that places may be older than the view
        if wanted and names and wanted not in names:
            await self.adapters.look_again()
            names = self.placer.models()
        return names

    def _with_model(self, request: ApiRequest, names: dict[str, InstanceInfo]) -> ApiRequest:
        if request.model in names:
            return request
        if not names:
            raise Refusal(503, "no instance is ready; try again")
        is_known = any(request.model in each.info.names for each in self.monitor.view().instances)
        if is_known or request.model in self.monitor.members.models_gone:
            raise Refusal(503, f"no instance of {request.model!r} is ready; try again")
        known = ", ".join(sorted(names))
        if request.model:
            raise Refusal(
                404,
                f"the model {request.model!r} does not exist; there is: {known}",
                param="model",
                kind="model_not_found",
            )
        canonical = {info.models[0] for info in names.values()}
        if len(canonical) > 1 and request.body.get("model") in (None, ""):
            raise Refusal(400, f"the body names no model; choose one of {known}", param="model")
        return replace(request, model=min(canonical))

    def _record_refused(self, request: ApiRequest, refusal: Refusal) -> None:
        """Record a request that is not begun."""
        usual = "error" if refusal.status >= 500 else "rejected"
        outcome = {LATE: "late", POISON: "poison"}.get(refusal.kind, usual)
        self.metrics.requests["none", outcome] += 1
        if outcome != usual:  # others may be thousands, instead of those that were served
            now = time.monotonic()
            entry = self.table.enter(request.request_id, now=now, is_counted=False)
            self.history.record(entry, "none", outcome, str(refusal), now)
