"""Prometheus metrics of instances that fail, and of the requests that they had."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

_GAP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)


class FaultMetrics:
    """Counts, and the log lines are where they happen."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._retries = Counter(
            "tetri_retries",
            "Requests sent to another instance because one failed before the client had a byte.",
            registry=registry,
        )
        self._streams = Counter(
            "tetri_streams_broken",
            "Streams that broke, by what became of them: resumed; unprovable: nobody could go on "
            "for sure; mismatch: another instance went on otherwise; failed: nobody was left.",
            ("outcome",),
            registry=registry,
        )
        self._gap = Histogram(
            "tetri_resume_gap_seconds",
            "From the moment the router noticed a broken stream to its next event.",
            buckets=_GAP_SECONDS,
            registry=registry,
        )
        self._crashes = Counter(
            "tetri_crashes_with_request",
            "Engines that died or hung, counted for every request that they had.",
            registry=registry,
        )
        self._quarantined = Counter(
            "tetri_requests_quarantined",
            "Requests that two engines died with.",
            registry=registry,
        )
        self._refused = Counter(
            "tetri_quarantine_refusals",
            "Requests answered at once because such a request is in quarantine.",
            registry=registry,
        )

    def retried(self) -> None:
        """Count a request that is sent to another instance."""
        self._retries.inc()

    def resumed(self, gap_s: float) -> None:
        """Count a stream that goes on."""
        self._streams.labels("resumed").inc()
        self._gap.observe(gap_s)

    def broke(self, outcome: str) -> None:
        """Count a stream that does not."""
        self._streams.labels(outcome).inc()

    def crashed(self) -> None:
        """Count an engine that died while it had a request."""
        self._crashes.inc()

    def quarantined(self) -> None:
        """Count a request that is put in quarantine."""
        self._quarantined.inc()

    def refused(self) -> None:
        """Count a request that is in quarantine and came again."""
        self._refused.inc()
