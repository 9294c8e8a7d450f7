"""Prometheus metrics of the router, all named ``tetri_...``."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vllm_tetri.control.monitor import MonitorCounters
from vllm_tetri.router.fault_metrics import FaultMetrics
from vllm_tetri.types import ClusterView, Flip, FlipStage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_COMMIT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1)
LOAD_GAUGES = (
    "running",
    "waiting",
    "held",
    "queued_prefill_tokens",
    "blocks_used",
    "blocks_total",
    "arena_used_bytes",
    "arena_total_bytes",
    "heavy",
    "light",
)
LOAD_COUNTERS = (
    "swapped_out",
    "swapped_in",
    "preemptions_recomputed",
    "predictions_made",
    "predictions_missed",
    "predictions_refused",
    "predictions_failed",
)


class Metrics:
    """What the router counts itself, and what it reads when it is scraped."""

    def __init__(
        self,
        *,
        view: Callable[[], ClusterView],
        counters: MonitorCounters,
        in_flight: Callable[[], int],
        workers: Callable[[], Mapping[str, int]],
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Scraped(view, counters, in_flight, workers))
        self.faults = FaultMetrics(self._registry)
        self._requests = Counter(
            "tetri_requests",
            "Requests that ended, by how they were served and how they ended.",
            ("route", "outcome"),
            registry=self._registry,
        )
        self._cancels = Counter(
            "tetri_transfers_cancelled",
            "Transfers that the router called off.",
            registry=self._registry,
        )
        self._busy = Counter(
            "tetri_instance_busy_answers",
            "Times that an instance had no room for a prompt.",
            ("instance",),
            registry=self._registry,
        )
        self._fallbacks = Counter(
            "tetri_fallbacks",
            "Times that work of one leg was done again, by reason.",
            ("reason",),
            registry=self._registry,
        )
        self._first_tokens = Counter(
            "tetri_first_tokens",
            "First tokens from prefill, by how they reached the client: early, with the "
            "second, as the last; mismatch: the decode instance went on with another.",
            ("how",),
            registry=self._registry,
        )
        self._flips = Counter(
            "tetri_flips",
            "Flips that ended while this router saw them: done, or rolled_back.",
            ("source", "target", "outcome"),
            registry=self._registry,
        )
        self._drain = Histogram(
            "tetri_flip_drain_seconds",
            "Order to the end of the old role's work; not of flips at once.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._commit = Histogram(
            "tetri_flip_commit_seconds",
            "End of the drain, or step boundary of a flip at once, to the new role known.",
            buckets=_COMMIT_SECONDS,
            registry=self._registry,
        )
        self._ttft = Histogram(
            "tetri_time_to_first_token_seconds",
            "Arrival to the first byte of a streamed answer.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._total = Histogram(
            "tetri_request_seconds",
            "Arrival to the end of the answer.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def ended(self, route: str, outcome: str, *, ttft_s: float | None, total_s: float) -> None:
        """Count a request; `ttft_s` only when its answer was streamed."""
        self._requests.labels(route, outcome).inc()
        self._total.observe(total_s)
        if ttft_s is not None:
            self._ttft.observe(ttft_s)

    def cancelled(self) -> None:
        """Count a transfer that was called off."""
        self._cancels.inc()

    def busy(self, instance: str) -> None:
        """Count an instance's answer that it has no room."""
        self._busy.labels(instance).inc()

    def fell_back(self, reason: str) -> None:
        """Count work that is done again."""
        self._fallbacks.labels(reason).inc()

    def first_token(self, how: str) -> None:
        """Count a first token from prefill."""
        self._first_tokens.labels(how).inc()

    def flipped(self, flip: Flip) -> None:
        """Count a flip that has ended."""
        self._flips.labels(flip.source.value, flip.target.value, flip.stage.value).inc()
        if flip.stage is FlipStage.DONE:
            self._commit.observe(flip.commit_s)
            if flip.drain_s:
                self._drain.observe(flip.drain_s)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)


class _Scraped(Collector):
    def __init__(
        self,
        view: Callable[[], ClusterView],
        counters: MonitorCounters,
        in_flight: Callable[[], int],
        workers: Callable[[], Mapping[str, int]],
    ) -> None:
        self._view = view
        self._counters = counters
        self._in_flight = in_flight
        self._workers = workers

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        yield GaugeMetricFamily(
            "tetri_requests_in_flight", "Requests being served.", value=self._in_flight()
        )
        yield from self._control()
        instances = GaugeMetricFamily(
            "tetri_instances", "Instances that this router knows.", labels=("role", "state")
        )
        tally = Tally((each.info.role.value, each.state.value) for each in view.instances)
        for labels, count in sorted(tally.items()):
            instances.add_metric(labels, count)
        yield instances
        for name in (*LOAD_GAUGES, "remaining_tokens"):
            gauge = GaugeMetricFamily(
                f"tetri_instance_{name}", f"Load report: {name}.", labels=("instance",)
            )
            for each in view.instances:
                gauge.add_metric((each.info.id,), getattr(each.load, name))
            yield gauge
        for name in ("preemptions", "flips", *LOAD_COUNTERS):
            counter = CounterMetricFamily(
                f"tetri_instance_{name}", f"Load report: {name}.", labels=("instance",)
            )
            for each in view.instances:
                counter.add_metric((each.info.id,), getattr(each.load, name))
            yield counter
        yield from self._of_instances(view)

    def _of_instances(self, view: ClusterView) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily(
            "tetri_instance_in_flight", "Requests of this router there.", labels=("instance",)
        )
        reserved = GaugeMetricFamily(
            "tetri_instance_reserved_blocks",
            "Blocks kept for running requests beyond what they hold.",
            labels=("instance",),
        )
        step = GaugeMetricFamily(
            "tetri_instance_step_seconds", "Duration of its last step.", labels=("instance",)
        )
        leftovers = GaugeMetricFamily(
            "tetri_audit_leftovers",
            "Kinds of things that it still has although no request is there; its log and "
            "/tetri/v1/instances name them.",
            labels=("instance",),
        )
        workers = self._workers()
        for each in view.instances:
            in_flight.add_metric((each.info.id,), workers.get(each.info.id, 0))
            reserved.add_metric((each.info.id,), each.load.reserved_blocks)
            step.add_metric((each.info.id,), each.load.step_s)
            leftovers.add_metric((each.info.id,), len(each.load.leftovers))
        yield from (in_flight, reserved, step, leftovers)

    def _control(self) -> Iterator[Metric]:
        counters = self._counters
        received = CounterMetricFamily(
            "tetri_control_messages_received", "Control messages.", labels=("message",)
        )
        for name, count in sorted(counters.received.items()):
            received.add_metric((name,), count)
        yield received
        yield CounterMetricFamily(
            "tetri_control_messages_sent", "Control messages to instances.", value=counters.sent
        )
        yield CounterMetricFamily(
            "tetri_control_frames_dropped",
            "Malformed or foreign frames and connections on the control port.",
            value=counters.dropped,
        )
        yield CounterMetricFamily(
            "tetri_control_messages_undelivered",
            "Control messages to instances that were gone or did not read.",
            value=counters.undelivered,
        )
