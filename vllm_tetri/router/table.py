"""The request table of the global scheduler (paper section 3.2), and limits on what is in it."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from itertools import islice
from math import inf
from typing import Any, NamedTuple, Protocol

from vllm_tetri.handover import prefix_of
from vllm_tetri.messages import Dispatched, Moved, Moving, Served
from vllm_tetri.policy.mirrors import LongOutput, Mirror
from vllm_tetri.policy.moves import RunningOutput
from vllm_tetri.policy.overload import SoftLimit, may_begin, may_queue
from vllm_tetri.policy.route import ENDED, Event, Phase, advance
from vllm_tetri.router._core import Flow
from vllm_tetri.router.request import ApiRequest
from vllm_tetri.types import InstanceId, InstanceInfo, RequestId, TransferId

_NONE = InstanceId("")
_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")  # traceparent
_SHOWN = (
    "id", "phase", "prefill", "decode", "prompt_tokens", "predicted", "generated", "reason",
)  # fmt: skip


class Movable(Protocol):
    """The output of a request, which may move to another instance (`router.moves`)."""

    @property
    def is_moving(self) -> bool: ...
    def movable(self, usual_left_tokens: float, now: float) -> RunningOutput | None: ...
    def order(self, target: InstanceInfo, reason: str) -> TransferId | None: ...
    def on_message(self, message: Moving | Moved) -> None: ...
    def avoid(self, leaving: Set[InstanceId]) -> None: ...
    def growing(self) -> LongOutput | None: ...
    def copied(self) -> ApiRequest: ...


class Trace:
    """The ids of one request's spans."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        given = [each for name, each in headers.items() if name.lower() == "traceparent"]
        found = _PARENT.fullmatch(given[0]) if given else None
        self.trace_id = int(found[1], 16) if found else random.getrandbits(128)
        self.parent_id = int(found[2], 16) if found else 0
        self.is_sampled = not found or bool(int(found[3], 16) & 1)
        self.span_id = random.getrandbits(64)
        self.legs: dict[InstanceId, tuple[int, float]] = {}  # span and monotonic start

    def headers_to(self, instance: InstanceId, headers: dict[str, str]) -> dict[str, str]:
        """Return the headers of a request to an instance, whose span is the parent there."""
        if not self.is_sampled:
            return headers
        span_id, _ = self.legs.setdefault(instance, (random.getrandbits(64), time.monotonic()))
        own = f"00-{self.trace_id:032x}-{span_id:016x}-01"
        kept = {name: each for name, each in headers.items() if name.lower() != "traceparent"}
        return {**kept, "traceparent": own}


class Mark(NamedTuple):
    """What happened to a request when (monotonic seconds), and at which instance."""

    event: Event
    instance: InstanceId
    at_s: float


class Entry:
    """One request in flight. Only its methods change it; times are monotonic seconds."""

    def __init__(
        self, request_id: RequestId, table: RequestTable, *, now: float, client: str
    ) -> None:
        self.id = request_id
        self.arrival_s, self.client = now, client
        self.phase = Phase.ARRIVED
        self.prefill = _NONE  # instance that computes the prompt; empty before it is sent
        self.decode = _NONE  # instance that writes the output; empty before it is known
        self.transfer: TransferId | None = None  # KV transfer that may have to be cancelled
        self.dispatched: set[InstanceId] = set()  # decode instances that prefill named
        # Resolved when the last chunk of the prompt begins.
        self.last_chunk: asyncio.Future[Dispatched] | None = None
        self.prompt_tokens: int | None = None
        self.predicted: int | None = None  # output tokens, the median
        self._num_events = 0
        self.reason = ""  # why the prompt went where it went
        self.expected_s = 0.0  # to the first token, when it was placed; 0: not priced
        self.marks: list[Mark] = []  # from the first time it was sent
        self.served: list[tuple[InstanceId, Served]] = []  # what instances say of their parts
        self.has_output = False  # the client has received something, or is about to
        self.first_byte_s: float | None = None
        self._event_s = now
        self.flow: Flow | None = None  # passes its events on
        self.mover: Movable | None = None  # while it is served
        self.mirror: Mirror | None = None  # a copy of it, to go on with
        self.trace: Trace | None = None
        self.model = ""  # of a request that is served, as its client calls it
        self._table = table
        self._counted_at = _NONE

    @property
    def is_over(self) -> bool:
        """Whether it finished, failed or was cancelled."""
        return self.phase in ENDED

    @property
    def generated(self) -> int:
        """The number of streamed events, an early first token included."""
        return self._num_events + (self.flow.num_events if self.flow is not None else 0)

    @property
    def event_s(self) -> float:
        """When events came last."""
        return max(self._event_s, self.flow.last_s) if self.flow is not None else self._event_s

    @property
    def worker(self) -> InstanceId:
        """The instance that has the request now; empty before it is sent."""
        return self.prefill if self.phase is Phase.PREFILLING else self.decode

    def on(self, event: Event) -> None:
        """Move to the next phase; raises `ValueError` if the event cannot happen now."""
        self.phase = advance(self.phase, event)
        worker = self._count()
        self.marks.append(Mark(event, worker, time.monotonic()))

    def send_prefill(
        self, instance: InstanceId, reason: str
    ) -> tuple[TransferId, asyncio.Future[Dispatched]]:
        """The prefill request goes to an instance; returns the name of its transfer, and the
        future that resolves when the last chunk of the prompt begins."""
        self.prefill, self.decode, self.reason = instance, _NONE, reason
        self.on(Event.PREFILL_SENT)
        self.dispatched.clear()
        self.transfer = self.new_transfer()
        self.last_chunk = asyncio.get_running_loop().create_future()
        return self.transfer, self.last_chunk

    def new_transfer(self) -> TransferId:
        """Name a KV transfer as no other."""
        return TransferId(prefix_of(self._table.router) + os.urandom(16).hex())

    def hand_over(self, decode: InstanceId) -> None:
        """A decode instance has or gets the KV of the prompt."""
        self.decode = decode
        self.dispatched.add(decode)
        self.on(Event.PREFILLED)

    def send_aggregated(self, instance: InstanceId, reason: str | None = None) -> None:
        """The request goes to one instance, for both phases; without a reason if it
        continues an output that began elsewhere."""
        if reason is not None:
            self.prefill, self.reason = instance, reason
        self.decode, self.last_chunk = instance, None
        self.on(Event.WHOLE_SENT)

    def take_transfer(self) -> TransferId | None:
        """Return the transfer; the caller sees to it from here on."""
        taken, self.transfer = self.transfer, None
        return taken

    def begin_output(self) -> None:
        """The first bytes of an instance's output are there."""
        self.on(Event.ANSWERING)
        self.record_events(0)

    def record_events(self, num_events: int) -> None:
        """The client gets events of a stream."""
        self._event_s = time.monotonic()
        self.first_byte_s = self.first_byte_s or self._event_s
        self._num_events += num_events

    def count_flow(self, flow: Flow | None) -> None:
        """Count what flows from now on, and no more what flowed until now."""
        self._num_events, self._event_s, self.flow = self.generated, self.event_s, flow

    def on_dispatched(self, message: Dispatched) -> None:
        """The prefill instance named a decode instance."""
        self.decode = message.decode
        self.dispatched.add(message.decode)
        self._count()
        if message.predicted is not None:
            self.predicted = round(message.predicted.median_tokens)
        waiting = self.last_chunk
        if message.ending is not None and waiting is not None and not waiting.done():
            waiting.set_result(message)

    def _count(self) -> InstanceId:
        before, self._counted_at = self._counted_at, self.worker
        self._table.move(self, before, self._counted_at)
        return self._counted_at


class RequestTable:
    """Every request of one router that is in flight, by id. Owned by the event loop.

    `workers` counts the requests of every instance that has any. What happens to requests of
    instances that are `leaving` sets `changed`.
    """

    def __init__(self, router: str = "") -> None:
        self.router = router
        self.workers: Counter[InstanceId] = Counter()
        self.leaving, self.changed = set[InstanceId](), asyncio.Event()
        self._entries: dict[RequestId, Entry] = {}
        self._clients_at: dict[InstanceId, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def get(self, request: RequestId) -> Entry | None:
        """Return a request in flight, if it is."""
        return self._entries.get(request)

    def enter(
        self, wanted_id: str, *, now: float, client: str = "", is_counted: bool = True
    ) -> Entry:
        """Begin a request; it gets the wanted id unless that is taken or empty.

        One that is not counted occupies no engine.
        """
        request = RequestId(wanted_id)
        if not request or request in self._entries:
            request = RequestId(os.urandom(16).hex())
        entry = Entry(request, self, now=now, client=client)
        if is_counted:
            self._entries[request] = entry
        return entry

    def leave(self, entry: Entry) -> None:
        """Forget a request. Idempotent."""
        if self._entries.get(entry.id) is entry:
            self.move(entry, entry.worker, _NONE)
            del self._entries[entry.id]

    def move(self, entry: Entry, before: InstanceId, after: InstanceId) -> None:
        """Count a request at another instance, or where it was; called by entries."""
        if self._entries.get(entry.id) is not entry:
            return
        if not self.leaving.isdisjoint((before, after)):
            self.changed.set()
        if before == after:
            return
        for instance, change in ((before, -1), (after, 1)):
            if not instance:
                continue
            clients = self._clients_at.setdefault(instance, {})
            _count(self.workers, instance, change)
            _count(clients, entry.client, change)
            if not clients:
                del self._clients_at[instance]

    def clients_at(self, instance: InstanceId) -> Counter[str]:
        """Return the number of an instance's requests by client."""
        return Counter(self._clients_at.get(instance, {}))

    def num_reaching(self, instance: InstanceId) -> int:
        """Return how many requests an instance has or may still get the rest of."""
        phases = (Phase.PREFILLING, Phase.HANDING_OVER)  # it may have KV, and so get the rest
        return sum(
            instance == each.worker or (each.phase in phases and instance in each.dispatched)
            for each in self._entries.values()
        )

    def handed_over_by(self, prefill: InstanceId) -> list[tuple[InstanceId, TransferId]]:
        """Return the decode instances that wait for KV of a prefill instance, and by which
        transfer; the router does not know whether the KV has arrived."""
        return [
            (entry.decode, entry.transfer)
            for entry in self._entries.values()
            if entry.prefill == prefill
            and entry.transfer is not None
            and entry.decode not in ("", prefill)
            and entry.phase is not Phase.PREFILLING
        ]

    def on_dispatched(self, message: Dispatched) -> bool:
        """A prefill instance named a decode instance; returns False if the transfer is of
        this router and its request is gone."""
        entry = self._entries.get(message.request)
        if entry is not None and entry.transfer is None and entry.phase is Phase.DECODING:
            return True  # it comes late: the KV is consumed
        if entry is None or entry.transfer != message.transfer:
            return not message.transfer.startswith(prefix_of(self.router))
        entry.on_dispatched(message)
        return True

    def plain(self, now: float, most: int | None = None) -> dict[str, Any]:
        """Return the table as `GET /tetri/v1/requests` shows it, or only the oldest requests."""
        requests = [
            {name: getattr(entry, name) for name in _SHOWN}
            | {"mirror": entry.mirror and entry.mirror._asdict()}
            | {"age_s": round(now - entry.arrival_s, 3)}
            for entry in islice(self._entries.values(), most)
        ]
        return {"in_flight": len(self), "requests": requests}


def _count(counts: dict[Any, int], key: str, change: int) -> None:
    if (count := counts.get(key, 0) + change) == 0:
        del counts[key]
    else:
        counts[key] = count


class Shares:
    """Limits of requests in flight at one instance (`limit_each`, which may be infinite): of all,
    and of one of the clients that can be told apart. Owned by the event loop."""

    def __init__(self, table: RequestTable, *, limit_each: float, num_clients: int) -> None:
        self._table, self._num_clients, self._limit_each = table, num_clients, limit_each
        self._soft_limits: dict[InstanceId, SoftLimit] = {}

    def at_limit(self, client: str) -> frozenset[InstanceId]:
        """Return the instances that have as many requests as allowed, or as many of a client."""
        if self._limit_each == inf and not self._soft_limits:
            return frozenset()
        now = time.monotonic()
        self._expire(now)
        return frozenset(
            instance
            for instance, taken in self._table.workers.items()
            if not self._has_capacity(instance, client, taken, now)
        )

    def over_share(self, client: str, overloaded: Set[InstanceId]) -> frozenset[InstanceId]:
        """Return the overloaded instances where a client has its fair share of the queue."""
        if self._num_clients <= 1:
            return frozenset(overloaded)
        at = {instance: self._table.clients_at(instance) for instance in overloaded}
        return frozenset(
            instance
            for instance, clients in at.items()
            if not may_queue(clients[client], clients.total(), len(clients.keys() | {client}))
        )

    def record_at_limit(self, instance: InstanceId) -> None:
        """An instance refused a request, which the table counts there: sets a soft limit for
        the clients there."""
        if self._num_clients > 1:  # a single client shares with no other
            now = time.monotonic()
            self._expire(now)
            self._soft_limits[instance] = SoftLimit(self._table.workers[instance] - 1, now)

    def _has_capacity(self, instance: InstanceId, client: str, taken: int, now: float) -> bool:
        own = self._table.clients_at(instance)[client]
        # A client with no requests there is exempt from the soft limit.
        soft = self._soft_limits.get(instance) if own else None
        limit = self._limit_each if soft is None else soft.limit(self._limit_each, now)
        return may_begin(own, taken, limit, num_clients=self._num_clients)

    def _expire(self, now: float) -> None:
        limits = self._soft_limits.items()
        self._soft_limits = {name: soft for name, soft in limits if not soft.is_over(now)}
