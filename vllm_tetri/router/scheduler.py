"""The global scheduler: requests, instances and the control channel meet here."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from dataclasses import replace
from random import Random

from aiohttp import web

from vllm_tetri.control.monitor import Monitor
from vllm_tetri.messages import CancelTransfer, Dispatched, TransferLost
from vllm_tetri.policy.adaptive import NO_OBJECTIVE, Objective
from vllm_tetri.policy.backpressure import PrefillSpeeds, retry_after_s
from vllm_tetri.policy.leaving import why_needed
from vllm_tetri.policy.lifecycle import Event, Phase
from vllm_tetri.policy.route import Full, Route, Split, Submissions, Whole, choose_route
from vllm_tetri.policy.standing import MOST_S, StandingQueues
from vllm_tetri.policy.watcher import Watcher
from vllm_tetri.router.answers import NoRoom, Refusal
from vllm_tetri.router.call import Call
from vllm_tetri.router.deaths import Deaths
from vllm_tetri.router.flips import Flips
from vllm_tetri.router.hooks import Hooks
from vllm_tetri.router.job import Job
from vllm_tetri.router.lease import Lease
from vllm_tetri.router.metrics import Metrics
from vllm_tetri.router.placing import Placing
from vllm_tetri.router.probe import Probes
from vllm_tetri.router.quarantine import Quarantine
from vllm_tetri.router.shares import Shares
from vllm_tetri.router.table import Entry, RequestTable
from vllm_tetri.router.upstream import Upstream
from vllm_tetri.secret import Secret
from vllm_tetri.types import (
    Flip,
    InstanceId,
    InstanceInfo,
    InstanceState,
    Mode,
    TransferId,
)

MAX_IN_FLIGHT = 4096
# Several times what a GPU decodes at once; what waits beyond that is better refused.
MAX_IN_FLIGHT_EACH = 1024
# An instance that is silent for so many times `silent_after_s` is given up: what it has goes
# on elsewhere.
GIVE_UP_AFTER = 3
# May answer what it has.
_IN_USE = (InstanceState.READY, InstanceState.FLIPPING, InstanceState.LEAVING)

_log = logging.getLogger(__name__)


class GlobalScheduler:
    """Owns the control socket, the connections to instances and the request table.

    Args:
        control: Address to bind for instances.
        first_byte_s: Longest wait for an instance's answer to begin, in seconds.
        period_s: Seconds between two broadcasts.
        silent_after_s: An instance that says nothing for so long is not used.
        max_in_flight: Most requests at a time.
        max_in_flight_each: Most requests that one instance gets at a time.
        num_parties: How many clients there can be, to share both between.
        max_standing_wait_s: Longest wait in a queue that stands; 0 bounds it by nothing.
        authorization: Header for instances; empty for none, None for the client's own.
        watcher: Decides when instances change role; None leaves it to operators.
        is_watcher_dry: Only say what it would do.
        mode: How requests are served that two instances could share.
        objective: What clients are promised.
        refuses_late: Refuse requests that are expected to miss it.
        secret: What routers and instances share.
        lease: Makes this router's watcher the only one that orders flips.
        resumes_anywhere: A stream that broke may go on where its text may differ.
    """

    def __init__(
        self,
        control: str,
        *,
        first_byte_s: float = 300.0,
        period_s: float = 0.1,
        silent_after_s: float = 1.0,
        max_in_flight: int = MAX_IN_FLIGHT,
        max_in_flight_each: int = MAX_IN_FLIGHT_EACH,
        num_parties: int = 1,
        max_standing_wait_s: float = MOST_S,
        authorization: str | None = None,
        watcher: Watcher | None = None,
        is_watcher_dry: bool = False,
        mode: Mode = Mode.SPLIT,
        objective: Objective = NO_OBJECTIVE,
        refuses_late: bool = False,
        secret: Secret | None = None,
        lease: Lease | None = None,
        resumes_anywhere: bool = False,
    ) -> None:
        # Another one with every start: instances give up what a router leaves behind.
        name = f"router-{os.getpid()}-{secrets.token_hex(4)}"
        self.table = RequestTable(name)
        self.shares = Shares(
            self.table,
            most=max_in_flight,
            most_each=max_in_flight_each,
            num_parties=num_parties,
        )
        self._authorization = authorization
        self.monitor = Monitor(
            control,
            name,
            period_s=period_s,
            silent_after_s=silent_after_s,
            on_hello=self._on_hello,
            on_dispatched=self._on_dispatched,
            on_cut_off=self._on_cut_off,
            on_flip=self._on_flip,
            in_flight=self.table.num_reaching,
            secret=secret,
        )
        self.metrics = Metrics(
            view=self.monitor.view,
            counters=self.monitor.counters,
            in_flight=self.table.__len__,
            workers=self.table.workers,
        )
        self.flips = Flips(self.monitor, watcher, is_dry=is_watcher_dry, lease=lease)
        self._placing = Placing(
            self.monitor.view, objective=objective, refuses_late=refuses_late, rng=Random()
        )
        self.set_mode(mode)
        self._first_byte_s = first_byte_s
        self._give_up_s = GIVE_UP_AFTER * silent_after_s
        self._quarantine = Quarantine(self._has_crashed, self.metrics.faults)
        self._submissions = Submissions()
        self._speeds = PrefillSpeeds()
        self._standing = StandingQueues(max_standing_wait_s)
        self._hooks = Hooks(
            route=self._route,
            info=self._info,
            submitted=self._submitted,
            prefilled=self._prefilled,
            busy=self.note_busy,
            no_room=self.no_room,
            cancel=self._cancel,
            fell_back=self.metrics.fell_back,
            first_token=self.metrics.first_token,
            faults=self.metrics.faults,
            quarantine=self._quarantine,
            resumes_anywhere=resumes_anywhere,
        )
        self._upstream: Upstream | None = None
        self._deaths: Deaths | None = None
        self._probes: Probes | None = None

    async def start(self) -> None:
        """Bind the control port.

        Raises:
            ConfigError: It cannot be bound.
        """
        self._upstream = Upstream(self._first_byte_s, self._authorization)
        self._probes = Probes(self.monitor, self._upstream)
        self._deaths = Deaths(
            self.monitor,
            self._upstream,
            self.table.workers,
            self._on_silent,
            after_s=self._give_up_s,
        )
        try:
            self.monitor.start()
            self.flips.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Release every socket and task. Idempotent."""
        await self.flips.close()
        await self._quarantine.close()
        if self._deaths is not None:
            await self._deaths.close()
        self.monitor.close()
        if self._probes is not None:
            await self._probes.close()
        if self._upstream is not None:
            self._upstream.close()

    @property
    def mode(self) -> Mode:
        """How requests are served that two instances could share."""
        return self._placing.mode

    def set_mode(self, mode: Mode) -> None:
        """Serve requests in another way from now on; those under way go on as they are."""
        self._placing.use(mode)
        self.monitor.mix(mode is Mode.ADAPTIVE)
        self.flips.are_roles_needed = mode is Mode.SPLIT

    @property
    def upstream(self) -> Upstream:
        """Connections to the instances; there once started."""
        assert self._upstream is not None
        return self._upstream

    def models(self) -> dict[str, InstanceInfo]:
        """Every model name that a ready instance serves, and one such instance."""
        names: dict[str, InstanceInfo] = {}
        for each in self.monitor.view().instances:
            if each.state is InstanceState.READY:
                for name in each.info.models:
                    names.setdefault(name, each.info)
        return names

    def leave(self, instance: InstanceId, *, force: bool, deadline_s: float | None) -> None:
        """Tell an instance to finish what it has and go.

        Raises:
            Refusal: 404 if there is no such instance; 409 if the cluster needs it and
                `force` is not set.
        """
        one = self.monitor.view_of(instance)
        if one is None:
            raise Refusal(404, f"there is no instance {instance!r}")
        why = why_needed(self.monitor.view(), one, are_roles_needed=self.flips.are_roles_needed)
        if why and not force and one.state is not InstanceState.LEAVING:
            raise Refusal(409, f'{why}; {{"force": true}} lets it go all the same')
        self.monitor.ask_to_leave(instance, deadline_s)

    def note_busy(self, instance: InstanceId) -> None:
        """An instance had no room."""
        self.metrics.busy(instance)
        self.shares.was_full(instance, is_counted=True)

    async def serve(self, call: Call, request: web.Request) -> web.StreamResponse:
        """Answer a request.

        Raises:
            Refusal: It cannot be served; nothing was sent to the client.
        """
        call = self._with_model(call)
        assert self._upstream is not None
        now = time.monotonic()
        self._refuse_quarantined(call)
        self._refuse_late(call, now)
        entry = self.table.enter(call.request_id, now=now, sla=call.sla, party=call.party)
        job = Job(
            call=call, entry=entry, request=request, upstream=self._upstream, hooks=self._hooks
        )
        outcome = "error"
        try:
            answer = await job.run()
            outcome = _conclude(entry, answer.status)
            if outcome == "ok":
                self._quarantine.acquit(call)
            return answer
        except Refusal as refusal:
            entry.on(Event.FAIL)
            outcome = "busy" if isinstance(refusal, NoRoom) else "error"
            return refusal.response({"x-request-id": entry.id})
        except (asyncio.CancelledError, ConnectionResetError):
            outcome = "cancelled"
            if not entry.is_over:
                entry.on(Event.CANCEL)
            raise
        finally:
            self.table.leave(entry)
            self._count(job.route_kind, outcome, entry)

    def _refuse_quarantined(self, call: Call) -> None:
        try:
            self._quarantine.check(call)
        except Refusal:
            self.metrics.ended("none", "quarantined", ttft_s=None, total_s=0.0)
            raise

    def _refuse_late(self, call: Call, now: float) -> None:
        late = self._placing.late(call, now)
        if late is not None:
            self.metrics.ended("none", "late", ttft_s=None, total_s=0.0)
            raise Refusal(
                429,
                f"{late.reason}; try again in {late.retry_after_s} s",
                code="expected_late",
                retry_after_s=late.retry_after_s,
            )

    def _count(self, route: str, outcome: str, entry: Entry) -> None:
        is_streamed = entry.generated > 0 and entry.first_byte_s is not None
        self.metrics.ended(
            route,
            outcome,
            ttft_s=(entry.first_byte_s or 0.0) - entry.arrival_s if is_streamed else None,
            total_s=time.monotonic() - entry.arrival_s,
        )

    def _with_model(self, call: Call) -> Call:
        self.shares.check_room(call.party)
        names = self.models()
        if not names:
            raise Refusal(503, "no instance is ready; try again")
        if call.model in names:
            return call
        if call.model:
            known = ", ".join(sorted(names))
            raise Refusal(
                404,
                f"the model {call.model!r} does not exist; there is: {known}",
                param="model",
                code="model_not_found",
            )
        canonical = {info.models[0] for info in names.values()}
        if len(canonical) > 1 and call.body.get("model") is None:
            known = ", ".join(sorted(names))
            raise Refusal(400, f"the body names no model; choose one of {known}", param="model")
        return replace(call, model=next(iter(canonical)))

    def _route(
        self,
        call: Call,
        is_splittable: bool,
        excluded: frozenset[InstanceId],
        full: frozenset[InstanceId],
        is_new: bool,
    ) -> Route | Full | None:
        now = time.monotonic()
        crowded = self.crowded(call.party, now, is_new=is_new)
        if self.mode is not Mode.SPLIT:
            placed = self._placing.route(
                call,
                is_splittable=is_splittable,
                excluded=excluded,
                full=full | crowded,
                now=now,
            )
            if isinstance(placed, Full):
                for instance in self._placing.swamped:
                    self.shares.was_full(instance, is_counted=False)
            return placed
        view = self.monitor.view()
        route = choose_route(
            view,
            model=call.model,
            splittable=is_splittable,
            own_tokens=self._submissions.unreported(view, now),
            excluded=excluded,
            full=full,
            crowded=crowded,
        )
        if isinstance(route, Split | Whole):
            first = route.prefill if isinstance(route, Split) else route.instance
            self._placing.sent(first, call, now)
        return route

    def crowded(self, party: str, now: float, *, is_new: bool) -> frozenset[InstanceId]:
        """Instances that should get nothing more of a client; nothing new, that is, where
        prompts wait for too long."""
        crowded = self.shares.crowded(party)
        return crowded | self.shares.crowding(party, self._full(now)) if is_new else crowded

    def no_room(self, full: Full) -> NoRoom:
        """What a client is told when all are full."""
        view = self.monitor.view()
        standing = self._full(time.monotonic())
        wait_s = retry_after_s(view, full.instances, self._speeds, standing=standing)
        return NoRoom(full.who, len(full.instances), wait_s)

    def _full(self, now: float) -> frozenset[InstanceId]:
        return self._standing.full(self.monitor.view, self._speeds, now)

    def _info(self, instance: InstanceId) -> InstanceInfo | None:
        one = self.monitor.view_of(instance)
        return one.info if one is not None and one.state in _IN_USE else None

    def _submitted(self, instance: InstanceId, num_tokens: int) -> None:
        if self.mode is Mode.SPLIT:  # the others count what they sent themselves
            self._submissions.add(instance, num_tokens, time.monotonic())

    def _prefilled(self, instance: InstanceId, num_tokens: int, sent_s: float) -> None:
        self._speeds.answered(instance, num_tokens, sent_s=sent_s, now=time.monotonic())

    def _cancel(
        self, transfer: TransferId, prefill: InstanceId, decodes: frozenset[InstanceId]
    ) -> None:
        self.metrics.cancelled()
        # In other modes than split, now or when it was sent, any instance may have it.
        targets = set(decodes) or {each.info.id for each in self.monitor.view().instances}
        for instance in targets | {prefill}:
            self.monitor.send(instance, CancelTransfer(transfer))

    def _on_dispatched(self, message: Dispatched) -> None:
        if not self.table.note_dispatch(message):
            # Chosen while it was called off, or after: this one has not been told.
            self.monitor.send(message.decode, CancelTransfer(message.transfer))

    def _on_silent(self, instance: InstanceId) -> None:
        """What it has computed for others may not have left it."""
        for decode, transfer in self.table.handed_over_by(instance):
            self.monitor.send(decode, TransferLost(transfer))

    def _on_cut_off(self, instance: InstanceId) -> None:
        if self._upstream is not None:
            self._upstream.hang_up(instance, "has left")

    async def _has_crashed(self, instance: InstanceInfo) -> bool:
        return self._deaths is not None and await self._deaths.has_crashed(instance)

    def _on_flip(self, instance: InstanceId, flip: Flip) -> None:
        self.metrics.flipped(flip)
        if flip.problem:
            _log.warning("%s keeps its role %s: %s", instance, flip.source, flip.problem)

    def _on_hello(self, info: InstanceInfo) -> None:
        if self._probes is not None:
            self._probes.begin(info)


def _conclude(entry: Entry, status: int) -> str:
    if entry.is_over:  # broke off in the middle
        return "error"
    if status < 400 and entry.phase in (Phase.DECODING, Phase.SERVING):
        entry.on(Event.FINISH)
        return "ok"
    entry.on(Event.FAIL)
    return "rejected"
