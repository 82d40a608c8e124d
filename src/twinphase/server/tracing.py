"""Exports a finished request as an OpenTelemetry trace, with a span for it and one per phase.

Attribute names are those of the GenAI semantic conventions, whose status is Development; ours begin
with `twinphase.`. OpenTelemetry is an extra, imported only if configured. Traces do not contain
prompts or answers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinphase.errors import InvalidRequestError
from twinphase.installed import install_command
from twinphase.phases.record import RequestRecord
from twinphase.phases.report import DECODE_KINDS, PREFILL_KINDS
from twinphase.phases.timeline import Interval, IntervalKind, RequestTimeline

if TYPE_CHECKING:
    from opentelemetry.metrics import Histogram
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

SPAN_NAMES = {
    IntervalKind.TOKENIZE: "tokenize",
    IntervalKind.ROUTE: "route",
    IntervalKind.TRANSFER: "transfer",
    IntervalKind.QUEUE: "queue",
    **dict.fromkeys(PREFILL_KINDS, "prefill"),
    **dict.fromkeys(DECODE_KINDS, "decode"),
}
# Bucket bounds in seconds of the conventions' histograms, by name after `gen_ai.server.`.
BUCKETS = {
    "request.duration": [0.01 * 2**power for power in range(14)],
    "time_to_first_token": [
        0.001,
        0.005,
        0.01,
        0.02,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
        1.0,
        2.5,
        5.0,
        7.5,
        10.0,
    ],
    "time_per_output_token": [
        0.01,
        0.025,
        0.05,
        0.075,
        0.1,
        0.15,
        0.2,
        0.3,
        0.4,
        0.5,
        0.75,
        1.0,
        2.5,
    ],
}


@dataclass
class PhaseSpan:
    """Consecutive intervals of one phase.

    Attributes:
        name: "tokenize", "queue", "prefill", "recompute", "decode" or "send".
        intervals: consecutive intervals, at least one.
    """

    name: str
    intervals: list[Interval]

    @property
    def start(self) -> float:
        return self.intervals[0].start

    @property
    def end(self) -> float:
        return self.intervals[-1].end


def phase_spans(timeline: RequestTimeline) -> list[PhaseSpan]:
    """The phases of a request in order of time; a preempted request repeats some of them.

    Detokenizing and sending belong to the adjacent decode, because a compact timeline does not
    order them; without a decode they have their own span. Unattributed time is a gap.
    """
    spans: list[PhaseSpan] = []
    between: list[Interval] = []  # Intervals since the last span.
    for interval in timeline.intervals:
        last = spans[-1].name if spans else ""
        name = SPAN_NAMES.get(interval.kind, "")
        if not name and last != "decode":
            between.append(interval)
        elif not name or name == last:
            spans[-1].intervals += [*between, interval]
            between = []
        else:
            spans.append(PhaseSpan(name, [*between, interval] if name == "decode" else [interval]))
            between = []
    text = [interval for interval in between if interval.kind is not IntervalKind.UNATTRIBUTED]
    if text:
        spans.append(PhaseSpan("send", text))
    for span in spans:
        if any(interval.kind is IntervalKind.RECOMPUTE for interval in span.intervals):
            span.name = "recompute"
    return spans


class RequestTracer:
    """Passes finished requests to OpenTelemetry; any thread may call it.

    The providers' own threads send the data.
    """

    def __init__(
        self, tracer_provider: TracerProvider, meter_provider: MeterProvider | None = None
    ) -> None:
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider
        self._tracer = tracer_provider.get_tracer("twinphase")
        self._histograms: list[Histogram] = []
        if meter_provider is not None:
            meter = meter_provider.get_meter("twinphase")
            self._histograms = [
                meter.create_histogram(
                    f"gen_ai.server.{name}", "s", explicit_bucket_boundaries_advisory=buckets
                )
                for name, buckets in BUCKETS.items()
            ]

    def trace(
        self,
        record: RequestRecord,
        operation: str,
        model: str,
        num_reasoning_tokens: int = 0,
        *,
        wall_clock_offset: float,
        headers: Mapping[bytes, bytes],
    ) -> None:
        """Make the trace of a request that has ended.

        Args:
            record: record of the request.
            operation: "chat" or "text_completion".
            model: name of the model in the API.
            num_reasoning_tokens: number of output tokens that were reasoning.
            wall_clock_offset: the time of day minus the timeline's clock, in seconds.
            headers: headers of the request; an invalid `traceparent` or `tracestate` is ignored.
        """
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        def ns(seconds: float) -> int:
            # They are rounded separately, because one float is too coarse for a date in
            # nanoseconds.
            return round(seconds * 1e9) + round(wall_clock_offset * 1e9)

        timeline = record.timeline
        error = record.counts.error
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "twinphase",
            "gen_ai.request.model": model,
        }
        values = [timeline.end - timeline.arrival, timeline.ttft, timeline.tpot]
        if error is not None:
            attributes["error.type"] = "_OTHER"
            values = values[:1]
        for histogram, value in zip(self._histograms, values, strict=False):
            if value is not None:
                histogram.record(value, attributes)
        parent = TraceContextTextMapPropagator().extract(
            {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        )
        attributes |= _usage(record) | _seconds(timeline.intervals)
        attributes["gen_ai.usage.reasoning.output_tokens"] = num_reasoning_tokens
        root = self._tracer.start_span(
            f"{operation} {model}",
            parent,
            trace.SpanKind.SERVER,
            attributes,
            start_time=ns(timeline.arrival),
        )
        if error is not None:
            root.set_status(trace.Status(trace.StatusCode.ERROR, error))
        if timeline.token_times:
            root.add_event("first_token", timestamp=ns(timeline.token_times[0]))
        inside = trace.set_span_in_context(root, parent)
        for phase in phase_spans(timeline):
            span = self._tracer.start_span(
                phase.name, inside, attributes=_phase_attributes(phase), start_time=ns(phase.start)
            )
            for interval in phase.intervals:
                if interval.kind is IntervalKind.STALL:
                    span.add_event("stall", _stall_attributes(interval), ns(interval.start))
            span.end(ns(phase.end))
        root.end(ns(timeline.end))

    def close(self) -> None:
        """Send the remaining data, and end the sending threads."""
        self._tracer_provider.shutdown()
        if self._meter_provider is not None:
            self._meter_provider.shutdown()


def _usage(record: RequestRecord) -> dict[str, Any]:
    counts = record.counts
    attributes: dict[str, Any] = {
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.finish_reasons": (str(record.finish_reason),),
        "gen_ai.usage.input_tokens": counts.num_prompt_tokens,
        "gen_ai.usage.output_tokens": counts.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": counts.num_cached_tokens,
    }
    if (miss := counts.prefix_miss) is not None:
        attributes["twinphase.prefix_miss.reason"] = miss.reason.value
        attributes["twinphase.prefix_miss.token_index"] = miss.token_index
    return attributes


def _seconds(intervals: Iterable[Interval]) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for interval in intervals:
        name = f"twinphase.seconds.{interval.kind.value}"
        sums[name] = sums.get(name, 0.0) + interval.end - interval.start
    return sums


def _phase_attributes(phase: PhaseSpan) -> dict[str, Any]:
    reasons = list(
        dict.fromkeys(interval.reason for interval in phase.intervals if interval.reason)
    )
    return {**_seconds(phase.intervals), **({"twinphase.held_back_by": reasons} if reasons else {})}


def _stall_attributes(stall: Interval) -> dict[str, Any]:
    return {
        "twinphase.seconds.stall": stall.end - stall.start,
        "twinphase.step": stall.step,
        "twinphase.prefill_tokens": stall.prefill_tokens,
        "twinphase.caused_by": stall.caused_by,
    }


def make_tracer(endpoint: str) -> RequestTracer:
    """A tracer that sends data by OTLP over HTTP to an endpoint, a URL without a path.

    Raises:
        InvalidRequestError: OpenTelemetry is not installed, or the endpoint is not a URL.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidRequestError(
            f"The OTLP endpoint {endpoint!r} is not a URL.",
            "Use http:// or https://, as in http://localhost:4318.",
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidRequestError(
            f"Traces to {endpoint} need OpenTelemetry, which is not installed ({error}).",
            f"Run `{install_command('otel')}`, or start without an OTLP endpoint.",
        ) from error
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "twinphase")})
    base = endpoint.rstrip("/").removesuffix("/v1/traces")
    spans = TracerProvider(resource=resource)
    spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{base}/v1/traces")))
    if os.environ.get("OTEL_METRICS_EXPORTER") == "none":
        return RequestTracer(spans)
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{base}/v1/metrics"))
    return RequestTracer(spans, MeterProvider([reader], resource))
