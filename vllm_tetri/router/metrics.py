"""Prometheus metrics of the router, all named ``tetri_...``, and the page that lists them.

`python -m vllm_tetri.router.metrics` prints docs/metrics.md.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_type_hints

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vllm_tetri.types import Flip, FlipStage, InstanceLoad, Number

if TYPE_CHECKING:
    from vllm_tetri.control.monitor import Monitor
    from vllm_tetri.router.table import Entry, RequestTable

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_COMMIT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1)
_GAP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family. `name` is without the `_total` that counters get when scraped."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    unit: str
    labels: tuple[str, ...] = ()

    @property
    def scraped_name(self) -> str:
        return self.name + ("_total" if self.kind == "counter" else "")


# fmt: off
# State that is read when it is scraped; `_StateCollector.collect` has the values, in this order.
_STATE = (
    Family("gauge", "tetri_requests_in_flight", "Requests being served.", "requests"),
    Family("gauge", "tetri_instances", "Instances that this router knows.", "instances",
           ("role", "state")),
    Family("gauge", "tetri_instance_in_flight", "Requests of this router at the instance.",
           "requests", ("instance",)),
    Family("counter", "tetri_control_messages_received", "Control messages from instances.",
           "messages", ("message",)),
    Family("counter", "tetri_control_messages_sent", "Control messages to instances.", "messages"),
    Family("counter", "tetri_control_frames_dropped",
           "Malformed or foreign frames and connections on the control port.", "frames"),
    Family("counter", "tetri_control_messages_undelivered",
           "Control messages to instances that were gone or did not read.", "messages"),
)
# fmt: on


@dataclass(frozen=True, slots=True)
class LoadNumber:
    """One documented field of `InstanceLoad`."""

    field: str
    about: Number

    @property
    def family(self) -> Family | None:
        """Its metric family; None for a value that is no metric."""
        if self.about.kind == "value":
            return None
        is_time = self.field.endswith("_s")
        name = f"tetri_instance_{self.field}" + "econds" * is_time
        return Family(self.about.kind, name, self.about.help, self.about.unit, ("instance",))

    def value(self, load: InstanceLoad) -> float:
        """Return the number itself, or how many entries a list has."""
        value = getattr(load, self.field)
        return float(value) if isinstance(value, int | float) else float(len(value))


LOAD_NUMBERS = tuple(
    LoadNumber(name, each)
    for name, hint in get_type_hints(InstanceLoad, include_extras=True).items()
    for each in getattr(hint, "__metadata__", ())
    if isinstance(each, Number)
)


class Metrics:
    """What the router counts, and what it reads when it is scraped.

    Public counters are called with `.inc()`, or `.labels(...).inc()`.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.families: list[Family] = []
        # fmt: off
        self.requests = self._counter(
            "requests", "Requests that ended, by how they were served (split, whole, fallback: "
            "split and then whole, passed: a route that is not split, none) and how they ended "
            "(ok, error, rejected, busy, late, cancelled, poison).", "requests", "route", "outcome")
        self._ttft = self._histogram(
            "time_to_first_token", "Arrival to the first byte of a streamed response.", _SECONDS)
        self._total = self._histogram(
            "request", "Arrival to the end of the response.", _SECONDS)
        self.cancelled = self._counter(
            "transfers_cancelled", "KV transfers that the router cancelled.", "transfers")
        self.busy = self._counter(
            "instance_busy_responses", "Responses of an instance that its queue is full.",
            "responses", "instance")
        self.fallbacks = self._counter(
            "fallbacks", "Prefill or decode requests that were repeated.", "requests", "reason")
        self.first_tokens = self._counter(
            "first_tokens", "First tokens from prefill, by how they reached the client: early, "
            "with_second, last (there was no second); mismatch: the decode instance continued "
            "differently.", "tokens", "how")
        self.retries = self._counter(
            "retries", "Requests sent to another instance because one failed before the client had "
            "a byte.", "requests")
        self.streams_broken = self._counter(
            "streams_broken", "Streams that broke: resumed; unprovable: no instance could continue "
            "them exactly; mismatch: another instance continued differently; failed: no instance "
            "was left.", "streams", "outcome")
        self.resume_gap = self._histogram(
            "resume_gap", "Detection of a broken stream to its next event.", _GAP_SECONDS)
        self.crashes = self._counter(
            "crashes_with_request", "Engines that crashed or hung, once for every request that "
            "they had.", "requests")
        self.poison_requests = self._counter(
            "poison_requests", "Poison requests: two engines crashed with them.", "requests")
        self.poison_refused = self._counter(
            "poison_requests_refused", "Requests refused because they equal a poison request.",
            "requests")
        self._flips = self._counter(
            "flips", "Flips that ended: done, or rolled_back.", "flips",
            "source", "target", "outcome")
        self._flip_drain = self._histogram(
            "flip_drain", "Order to the end of the old role's work; not observed for flips with "
            "--now.", _SECONDS)
        self._flip_commit = self._histogram(
            "flip_commit", "End of the drain, or the step boundary with --now, until the router "
            "knew the new role.", _COMMIT_SECONDS)
        # fmt: on

    def add_state(self, monitor: Monitor, table: RequestTable) -> None:
        """Include the state of these whenever the metrics are scraped."""
        self._registry.register(_StateCollector(monitor, table))

    def record_request(self, route: str, outcome: str, entry: Entry) -> None:
        """Count a request that ends now."""
        self.requests.labels(route, outcome).inc()
        self._total.observe(time.monotonic() - entry.arrival_s)
        if entry.generated and entry.first_byte_s is not None:  # it was streamed
            self._ttft.observe(entry.first_byte_s - entry.arrival_s)

    def record_flip(self, flip: Flip) -> None:
        """Count a flip that has ended."""
        self._flips.labels(flip.source.value, flip.target.value, flip.stage.value).inc()
        if flip.stage is FlipStage.DONE:
            self._flip_commit.observe(flip.commit_s)
            if flip.drain_s:
                self._flip_drain.observe(flip.drain_s)

    def render(self) -> bytes:
        """Render the text that Prometheus reads."""
        return generate_latest(self._registry)

    def _counter(self, name: str, about: str, unit: str, *labels: str) -> Counter:
        self.families.append(Family("counter", f"tetri_{name}", about, unit, labels))
        return Counter(f"tetri_{name}", about, labels, registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        name = f"tetri_{name}_seconds"
        self.families.append(Family("histogram", name, about, "seconds"))
        return Histogram(name, about, registry=self._registry, buckets=buckets)


class _StateCollector(Collector):
    def __init__(self, monitor: Monitor, table: RequestTable) -> None:
        self._monitor = monitor
        self._table = table

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        view, counters = self._monitor.view(), self._monitor.counters
        workers = self._table.workers()
        instances = Tally((each.info.role.value, each.state.value) for each in view.instances)
        values: tuple[dict[tuple[str, ...], float], ...] = (
            {(): len(self._table)},
            dict(sorted(instances.items())),
            {(each.info.id,): workers.get(each.info.id, 0) for each in view.instances},
            {(name,): number for name, number in sorted(counters.received.items())},
            {(): counters.sent},
            {(): counters.dropped},
            {(): counters.undelivered},
        )
        yield from map(_sampled, _STATE, values)
        for number in LOAD_NUMBERS:
            if (about := number.family) is not None:
                yield _sampled(
                    about, {(each.info.id,): number.value(each.load) for each in view.instances}
                )


def _sampled(about: Family, samples: dict[tuple[str, ...], float]) -> Metric:
    kind = CounterMetricFamily if about.kind == "counter" else GaugeMetricFamily
    family = kind(about.name, about.help, labels=about.labels)
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family


def reference() -> str:
    """Render docs/metrics.md."""
    loads = [(each.field, each.family) for each in LOAD_NUMBERS if each.family is not None]
    fields, families = zip(*loads, strict=True)
    values = (each for each in LOAD_NUMBERS if each.family is None)
    return "\n".join([
        "# Metrics\n",
        "Generated by `python -m vllm_tetri.router.metrics > docs/metrics.md`.\n",
        "The router serves these at `GET /metrics` in Prometheus' text format. Engines have",
        "vLLM's own metrics at their own `/metrics`.\n",
        "## Requests and routing\n",
        *_table(Metrics().families),
        "\n## State of the router\n",
        *_table(_STATE),
        "\n## Load of the instances\n",
        "Every instance reports these each report period (100 ms). `GET /tetri/v1/instances` has",
        "the same numbers under the names in the last column.\n",
        *_table(families, fields),
        "\nOnly in `GET /tetri/v1/instances`:\n",
        *(f"- `{each.field}` ({each.about.unit}): {each.about.help}" for each in values),
        "",
    ])  # fmt: skip


def _table(families: Sequence[Family], fields: Sequence[str] = ()) -> list[str]:
    rows = [["metric", "type", "labels", "unit", "help", "field"], ["---"] * 6]
    for each in families:
        labels = ", ".join(f"`{label}`" for label in each.labels) or "–"
        rows.append([f"`{each.scraped_name}`", each.kind, labels, each.unit, each.help])
    for row, name in zip(rows[2:], fields, strict=False):
        row.append(f"`{name}`")
    return [f"| {' | '.join(row[: 6 if fields else 5])} |" for row in rows]


if __name__ == "__main__":
    print(reference(), end="")
