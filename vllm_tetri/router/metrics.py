"""Prometheus metrics of the router, all named ``tetri_...``; docs/metrics.md lists them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate, product
from math import inf
from typing import Any, NamedTuple, get_type_hints
from urllib.parse import urlsplit

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from vllm_tetri.control.monitor import Monitor
from vllm_tetri.router.table import Entry, RequestTable
from vllm_tetri.types import (
    Flip,
    FlipStage,
    InstanceId,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    Number,
    RequestId,
    Role,
    server_name,
)

disable_created_metrics()  # series that nothing here reads, one for each of the others

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_COMMIT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1)
_GAP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
_ROUTES = ("split", "whole", "fallback", "passed", "none")
_OUTCOMES = ("ok", "error", "rejected", "busy", "late", "cancelled", "poison")
_REASONS = (
    "decode_failed", "no_decode_instance", "no_transfer", "choices_that_end_at_once",
    "structured_and_ends_at_once",
)  # fmt: skip

_ROLES = tuple(role.value for role in Role)
_STATES = tuple(state.value for state in InstanceState)

# The documented fields of `InstanceLoad`; a `value` is no metric.
LOAD_NUMBERS = {
    name: each
    for name, hint in get_type_hints(InstanceLoad, include_extras=True).items()
    for each in getattr(hint, "__metadata__", ())
    if isinstance(each, Number)
}


class Happening(NamedTuple):
    """Something that operators want to know of: when (monotonic seconds), and what in words."""

    at_s: float
    kind: str
    words: str


class Metrics(Collector):
    """What the router counts, and what it reads when it is scraped; `happened` has the newest flips
    and moves that ended, the newest last.

    Public counters are called with `.inc()`, or `.labels(...).inc()`; `busy` is a tally.
    """

    def __init__(self, monitor: Monitor, table: RequestTable) -> None:
        self._monitor, self._table, self.happened = monitor, table, deque[Happening](maxlen=100)
        self.busy: Tally[InstanceId] = Tally()  # responses of instances that their queues are full
        self.requests: Tally[tuple[str, str]] = Tally()  # that ended, by route and outcome
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._histogram = partial(Histogram, namespace="tetri", registry=self._registry)
        self._declare_requests()
        self._declare_changes()

    def _counter(self, name: str, about: str, **labels: Collection[str]) -> Counter:
        """Make a counter with all its series: to Prometheus, a first one is no increase."""
        made = Counter(f"tetri_{name}", about, labels, registry=self._registry)
        for values in product(*labels.values()) if labels else ():
            made.labels(*values)
        return made

    # fmt: off
    def _declare_requests(self) -> None:
        self._ttft = _Seconds(
            "tetri_time_to_first_token_seconds",
            "Seconds from a request's arrival to the first byte of its streamed response.",
            self._registry)
        self._total = _Seconds(
            "tetri_request_seconds",
            "Seconds from a request's arrival to the end of its response.", self._registry)
        self.cancelled = self._counter(
            "transfers_cancelled", "KV transfers that the router cancelled.")
        self.fallbacks = self._counter(
            "fallbacks", "Times that one instance went on alone, by why: decode_failed: a stream "
            "broke; no_decode_instance or no_transfer: the prefill instance found none, or did not "
            "hand over; ..._at_once: the first token ended a choice or a structured output.",
            reason=_REASONS)
        hows = "early", "with_second", "last", "mismatch"
        first_tokens = self._counter(
            "first_tokens", "First tokens from prefill, by how they reached the client: early, "
            "with_second, last (there was no second); mismatch: the decode instance continued "
            "differently.", how=hows)
        self.first_tokens = {how: first_tokens.labels(how) for how in hows}
        self.cached_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens that were expected in the prefix cache of the "
            "instance that computes the prompt, or to be fetched.")
        self.fetches = self._counter(
            "fetches", "Prefixes to be fetched, by what their holder did: sent; refused (lost it); "
            "failed; late.", outcome=("sent", "refused", "failed", "late"))
        self.retries = self._counter(
            "retries", "Requests sent to another instance because one failed before the client had "
            "a byte.")
        self.streams_broken = self._counter(
            "streams_broken", "Streams that broke: resumed; unprovable: no instance could continue "
            "them exactly; mismatch: another instance continued differently; failed: no instance "
            "was left.", outcome=("resumed", "unprovable", "mismatch", "failed"))
        self.resume_gap = self._histogram(
            "resume_gap_seconds", "Seconds from finding a stream broken to its next event.",
            buckets=_GAP_SECONDS)
        self.crashes = self._counter(
            "crashes_with_request", "Requests that an engine had when it crashed or hung.")
        self.poison_requests = self._counter(
            "poison_requests", "Poison requests: two engines crashed with them.")
        self.poison_refused = self._counter(
            "poison_requests_refused", "Requests refused because they equal a poison request.")

    def _declare_changes(self) -> None:
        self.moves = self._counter(
            "moves", "Running outputs that were to move, by why (order, drain, flip, memory, "
            "balance) and what came of it (moved; refused, failed, late: it stayed; ended: it "
            "ended before).", reason=("order", "drain", "flip", "memory", "balance"),
            outcome=("moved", "refused", "failed", "late", "ended"))
        self.move_seconds = self._histogram(
            "move_seconds", "Seconds of moves: whole, from the order to the take-over; gap, in "
            "which the client's stream waited.", ("part",), buckets=_GAP_SECONDS)
        for part in ("whole", "gap"):
            self.move_seconds.labels(part)
        self.mirrors = self._counter(
            "mirrors", "Copies of what running outputs have grown by: copied; failed; used: the "
            "output went on there after its instance died.", outcome=("copied", "failed", "used"))
        self._flips = self._counter(
            "flips", "Flips that ended: done, or rolled_back.", source=_ROLES, target=_ROLES,
            outcome=("done", "rolled_back"))
        self._flip_drain = self._histogram(
            "flip_drain_seconds", "Seconds from an order to flip to the end of the old role's "
            "work; not observed for flips with --now.", buckets=_SECONDS)
        self._flip_commit = self._histogram(
            "flip_commit_seconds", "Seconds from the end of the drain, or the step boundary with "
            "--now, until the router knew the new role.", buckets=_COMMIT_SECONDS)
        self.regret = Gauge(
            "tetri_regret_ratio", "Part by which the way the router serves, simulated, cost more "
            "than the best one: as `vllm-tetri regret --every` said last.",
            registry=self._registry)
        self.regret_error = Gauge(
            "tetri_regret_error_ratio", "How far that simulation was from what was measured; "
            "beyond 0.25 the regret is not to be believed.", registry=self._registry)
    # fmt: on

    def record_request(self, route: str, outcome: str, entry: Entry) -> None:
        """Count a request that ends now."""
        self.requests[route, outcome] += 1
        self._total.observe(time.monotonic() - entry.arrival_s)
        if entry.generated and entry.first_byte_s is not None:  # it was streamed
            self._ttft.observe(entry.first_byte_s - entry.arrival_s)

    def record_flip(self, instance: InstanceId, flip: Flip) -> None:
        """Count a flip that has ended."""
        self._flips.labels(flip.source.value, flip.target.value, flip.stage.value).inc()
        if flip.stage is FlipStage.DONE:
            self._flip_commit.observe(flip.commit_s)
            if flip.drain_s:
                self._flip_drain.observe(flip.drain_s)
        words = f"{instance} {flip.source} → {flip.target}: {flip.reason}"
        words += f"; rolled back: {flip.problem}" if flip.problem else ""
        self.happened.append(Happening(time.monotonic(), "flip", words))

    def record_move(self, request: RequestId, to: InstanceId, reason: str, outcome: str) -> None:
        """Count a move that has ended."""
        self.moves.labels(reason, outcome).inc()
        words = f"{request} to {to} ({reason}): {outcome}"
        self.happened.append(Happening(time.monotonic(), "move", words))

    def render(self) -> bytes:
        """Render the text that Prometheus reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the state that is read when it is scraped."""
        views, counters = self._monitor.view().instances, self._monitor.counters
        gauge, counter = partial(_family, "gauge"), partial(_family, "counter")
        each_id = ("instance",)
        # fmt: off
        yield counter("requests",
                      "Requests that ended, by how they were served (split, whole, fallback: "
                      "by one instance after another way failed, passed: a route that is not "
                      "split, none) and how they ended (ok, error, rejected, busy, late, "
                      "cancelled, poison).",
                      {each: self.requests[each] for each in product(_ROUTES, _OUTCOMES)},
                      ("route", "outcome"))
        yield gauge("requests_in_flight", "Requests being served.", {(): len(self._table)})
        tally = Tally((each.info.role.value, each.state.value) for each in views)
        yield gauge("instances", "Instances that this router knows, by role and state.",
                    {each: tally[each] for each in product(_ROLES, _STATES)}, ("role", "state"))
        yield gauge("instance_state", "1 for the state that an instance is in, else 0.",
                    {(each.info.id, each.info.role.value, state): each.state.value == state
                     for each in views for state in _STATES}, ("instance", "role", "state"))
        yield gauge("instance_in_flight", "Requests of this router at the instance.",
                    {(each.info.id,): self._table.workers[each.info.id] for each in views}, each_id)
        yield counter("instance_busy_responses",
                      "Responses of an instance that its queue is full.",
                      {(each.info.id,): self.busy[each.info.id] for each in views}, each_id)
        yield counter("control_messages_received", "Control messages from instances.",
                      {(name,): number for name, number in counters.received.items()}, ("message",))
        yield counter("control_messages_sent", "Control messages to instances.",
                      {(): counters.sent})
        yield counter("control_frames_dropped",
                      "Malformed or foreign frames and connections on the control port.",
                      {(): counters.dropped})
        yield counter("control_messages_undelivered",
                      "Control messages to instances that were gone or did not read.",
                      {(): counters.undelivered})
        # fmt: on
        for field, number in LOAD_NUMBERS.items():
            if number.kind != "value":
                values: dict[tuple[str, ...], float | tuple[object, ...]]
                values = {(each.info.id,): getattr(each.load, field) for each in views}
                unit = "econds" if field.endswith("_s") else ""
                yield _family(number.kind, f"instance_{field}{unit}", number.help, values, each_id)


class _Seconds(Collector):
    """A histogram of what every request is observed in: the library's takes three locks."""

    def __init__(self, name: str, about: str, registry: CollectorRegistry) -> None:
        self._about = name, about
        self._sum, self._counts = 0.0, [0] * (len(_SECONDS) + 1)
        registry.register(self)

    def observe(self, seconds: float) -> None:
        self._sum += seconds
        self._counts[bisect_left(_SECONDS, seconds)] += 1

    def collect(self) -> Iterator[Metric]:
        bounds = map(floatToGoString, (*_SECONDS, inf))
        buckets = [*zip(bounds, map(float, accumulate(self._counts)), strict=True)]
        yield HistogramMetricFamily(*self._about, buckets=buckets, sum_value=self._sum)


def _family(
    kind: str,
    name: str,
    about: str,
    samples: Mapping[tuple[str, ...], float | tuple[object, ...]],
    labels: tuple[str, ...] = (),
) -> Metric:
    family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(
        f"tetri_{name}", about, labels=labels
    )
    for key, value in sorted(samples.items()):
        family.add_metric(key, len(value) if isinstance(value, tuple) else value)
    return family


def targets(instances: Iterable[InstanceInfo]) -> list[dict[str, Any]]:
    """Return the servers of instances as Prometheus' HTTP service discovery reads them. Ranks of a
    data-parallel server are one target: they share its `/metrics`."""
    servers: dict[str, list[InstanceInfo]] = {}
    for each in sorted(instances, key=lambda info: info.id):
        servers.setdefault(urlsplit(each.url).netloc, []).append(each)
    return [
        {
            "targets": [address],
            "labels": {
                "instance": first.id if first.rank is None else server_name(first.id),
                "role": "+".join(sorted({each.role.value for each in ranks})),
                "model": first.models[0],
            },
        }
        for address, ranks in servers.items()
        for first in ranks[:1]
    ]
