"""OpenTelemetry traces: a span per request, per instance that had it, and per part of its time.

Spans are made when a request has ended, from what `explain` shows of it. Only their ids exist
before, since vLLM's own spans name them as parents (`traceparent`).
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator

from vllm_tetri.errors import ConfigError
from vllm_tetri.router.explain import parts
from vllm_tetri.router.history import Ended
from vllm_tetri.router.table import Trace

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_CLOSE_S = 5.0


class Tracing:
    """Sends the spans of requests to a collector, in batches and from its own thread."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.sdk import trace
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import export
            from opentelemetry.trace import SpanContext, TraceFlags

            match os.environ.get(PROTOCOL, "grpc"):
                case "grpc":
                    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
                        OTLPSpanExporter,
                    )
                case "http/protobuf":
                    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # type: ignore[assignment]
                        OTLPSpanExporter,
                    )
                case other:
                    raise ConfigError(f"{PROTOCOL} is {other!r}; it may be grpc or http/protobuf")
        except ImportError as error:
            hint = "pip install '.[otel]' in the clone"
            raise ConfigError(f"--otlp-traces-endpoint needs OpenTelemetry: {hint}") from error
        self._span, self._context, self._sampled = trace.ReadableSpan, SpanContext, TraceFlags(1)
        name = os.environ.get("OTEL_SERVICE_NAME", "vllm-tetri-router")
        self._resource = Resource.create({SERVICE_NAME: name})
        self._processor = export.BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))

    def end(self, trace: Trace, row: Ended) -> None:
        """Send the spans of a request that ended."""
        if not trace.is_sampled:
            return
        offset_s = time.time() - time.monotonic()
        for span_id, parent_id, name, begin_s, end_s, about in _spans(trace, row):
            context, parent = (
                self._context(trace.trace_id, each, is_remote=False, trace_flags=self._sampled)
                for each in (span_id, parent_id)
            )
            span = self._span(
                name,
                context=context,
                parent=parent if parent_id else None,
                resource=self._resource,
                attributes=about,
                start_time=int((begin_s + offset_s) * 1e9),
                end_time=int((end_s + offset_s) * 1e9),
            )
            self._processor.on_end(span)

    def close(self) -> None:
        """Send what is left, unless the collector takes too long for it."""
        # It may wait for minutes, whatever it is told.
        ending = threading.Thread(target=self._processor.shutdown, daemon=True)
        ending.start()
        ending.join(_CLOSE_S)


def _spans(
    trace: Trace, row: Ended
) -> Iterator[tuple[int, int, str, float, float, dict[str, str | int | float]]]:
    """Yield id, parent, name, begin and end (monotonic seconds) and attributes of all spans."""
    about: dict[str, str | int | float] = {
        "gen_ai.request.id": row.id,
        "tetri.route": row.route,
        "tetri.outcome": row.outcome,
        "tetri.reason": row.reason,
    }
    yield trace.span_id, trace.parent_id, "request", row.arrival_s, row.ended_s, about
    divided = parts(row)
    for instance, (span_id, sent_s) in trace.legs.items():
        ends = [each.end_s for each in divided if each.instance == instance]
        end_s = row.arrival_s + max(ends) if ends else row.ended_s
        about = {"tetri.instance": instance}
        yield span_id, trace.span_id, f"at {instance}", sent_s, max(sent_s, end_s), about
    for each in divided:
        parent_id, _ = trace.legs.get(each.instance, (trace.span_id, 0.0))
        begin_s, end_s = (row.arrival_s + at_s for at_s in (each.begin_s, each.end_s))
        yield random.getrandbits(64), parent_id, each.what, begin_s, end_s, {}
