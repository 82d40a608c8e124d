import sys
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from twinphase.errors import InvalidRequestError
from twinphase.outcome import FinishReason, MissReason, PrefixMiss
from twinphase.phases.record import RequestRecord, RequestState
from twinphase.phases.timeline import IntervalKind, RequestTimeline, StepRecord
from twinphase.phases.work import Cost
from twinphase.request import RequestCounts
from twinphase.server.tracing import RequestTracer, make_tracer, phase_spans

OFFSET = 1_790_000_000.125  # time of day - clock


def make_step(start, end, **fields):
    return StepRecord(
        fields.pop("index", 0),
        start,
        end,
        fields.pop("prefill_tokens", 0),
        0,
        Cost(),
        Cost(),
        **fields,
    )


def make_timeline():
    """Preempted after its first token, computed again, held up once by another's chunk."""
    timeline = RequestTimeline(arrival=100.0)
    timeline.mark(IntervalKind.TOKENIZE, 100.25)
    timeline.queue_until(101.0, "seats")
    timeline.queue_until(101.5, "kv_cache")
    timeline.reach_step(101.75)
    timeline.add_prefill(make_step(101.75, 103.0), 30, own=1.0)
    timeline.mark(IntervalKind.SEND, 103.25)
    timeline.hand_over_tokens(1, 103.25)
    timeline.queue_until(104.0, "kv_cache")
    timeline.add_prefill(make_step(104.0, 105.0), 31, own=0.0, again=0.75)
    timeline.mark(IntervalKind.DETOKENIZE, 105.0625)
    timeline.reach_step(105.125)
    step = make_step(105.125, 106.0, index=7, prefill_tokens=64, prefill_ids=("long",))
    timeline.add_decode(step, 1, own=0.25, decodes=0.375)
    timeline.mark(IntervalKind.SEND, 106.000001)
    timeline.hand_over_tokens(1, 106.000001)
    return timeline


EXPECTED = [
    ("tokenize", 100.0, 100.25),
    ("queue", 100.25, 101.5),
    ("prefill", 101.75, 103.0),
    ("queue", 103.25, 104.0),
    ("recompute", 104.0, 105.0),
    ("decode", 105.0, 106.000001),
]


def make_record(reason=FinishReason.STOP, **counts):
    counts = RequestCounts("chatcmpl-1", 30, 2, 16, **counts)
    state = RequestState.ENDED
    return RequestRecord(counts, make_timeline(), state=state, finish_reason=reason)


def trace(record, operation="chat", num_reasoning_tokens=0, headers=None):
    """The root span, the others, and the histograms by name."""
    exporter = InMemorySpanExporter()
    reader = InMemoryMetricReader()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = RequestTracer(tracers, MeterProvider([reader], shutdown_on_exit=False))
    tracer.trace(
        record,
        operation,
        "some/model",
        num_reasoning_tokens,
        wall_clock_offset=OFFSET,
        headers=headers or {},
    )
    scopes = [
        scope
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
    ]
    histograms = {
        metric.name: metric.data.data_points[0] for scope in scopes for metric in scope.metrics
    }
    tracer.close()
    *children, root = exporter.get_finished_spans()
    return root, children, histograms


def clock(nanoseconds):
    """A time of day as the timeline's seconds, to the microsecond."""
    return round((nanoseconds - 1_790_000_000_125_000_000) / 1000) / 1e6


@pytest.mark.parametrize("compact", [False, True])
def test_phases_nest_in_the_request_and_keep_its_times(compact):
    record = make_record()
    if compact:
        record.timeline.compact()
    root, children, _ = trace(record)
    assert (root.name, root.kind, root.parent) == ("chat some/model", SpanKind.SERVER, None)
    assert (clock(root.start_time), clock(root.end_time)) == (100.0, 106.000001)
    assert [
        (span.name, clock(span.start_time), clock(span.end_time)) for span in children
    ] == EXPECTED
    for span in children:
        assert span.parent == root.context
        assert sum(
            value for key, value in span.attributes.items() if "seconds" in key
        ) == pytest.approx((span.end_time - span.start_time) / 1e9)


def test_attributes_tell_usage_and_what_the_time_went_to():
    miss = PrefixMiss(MissReason.DIVERGED, 16)
    record = make_record(FinishReason.LENGTH, prefix_miss=miss)
    root, children, _ = trace(record, "text_completion", num_reasoning_tokens=1)
    assert root.name == "text_completion some/model"
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "twinphase",
        "gen_ai.request.model": "some/model",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.usage.reasoning.output_tokens": 1,
        "twinphase.prefix_miss.reason": "diverged",
        "twinphase.prefix_miss.token_index": 16,
        "twinphase.seconds.stall": 0.5,
    }
    assert {key: root.attributes[key] for key in expected} == expected
    assert [(event.name, clock(event.timestamp)) for event in root.events] == [
        ("first_token", 103.25)
    ]
    assert children[1].attributes["twinphase.held_back_by"] == ("seats", "kv_cache")
    decode = children[-1]
    assert decode.attributes["twinphase.seconds.decode"] == 0.25
    assert decode.attributes["twinphase.seconds.batching"] == 0.125
    (stall,) = decode.events
    assert (stall.name, clock(stall.timestamp)) == ("stall", 105.5)
    assert dict(stall.attributes) == {
        "twinphase.seconds.stall": 0.5,
        "twinphase.step": 7,
        "twinphase.prefill_tokens": 64,
        "twinphase.caused_by": ("long",),
    }


def test_a_trace_goes_on_from_the_caller():
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    span_id = "b7ad6b7169203331"
    headers = {b"traceparent": f"00-{trace_id}-{span_id}-01".encode(), b"tracestate": b"vendor=1"}
    root, children, _ = trace(make_record(), headers=headers)
    assert root.context.trace_id == children[0].context.trace_id == int(trace_id, 16)
    assert root.parent.span_id == int(span_id, 16)
    assert root.context.trace_state["vendor"] == "1"
    broken = {b"traceparent": b"00-not-a-parent", b"tracestate": b"\xff"}
    assert trace(make_record(), headers=broken)[0].parent is None


def test_a_failed_request_says_so_and_gives_no_token_times():
    root, _, histograms = trace(make_record(FinishReason.ERROR, error="NaN."))
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "NaN.")
    assert root.attributes["error.type"] == "_OTHER"
    assert set(histograms) == {"gen_ai.server.request.duration"}


def test_histograms_are_those_of_the_conventions():
    _, _, histograms = trace(make_record())
    sums = {name.removeprefix("gen_ai.server."): point.sum for name, point in histograms.items()}
    expected = {
        "request.duration": 6.000001,
        "time_to_first_token": 3.25,
        "time_per_output_token": 2.750001,
    }
    assert sums == pytest.approx(expected)
    duration = histograms["gen_ai.server.request.duration"]
    assert duration.explicit_bounds == pytest.approx(
        (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
    )
    assert set(duration.attributes) == {
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.model",
    }


def test_text_without_a_decode_is_a_span_of_its_own():
    timeline = RequestTimeline(0.0)
    timeline.add_prefill(make_step(0.0, 1.0), 8, own=1.0)
    timeline.mark(IntervalKind.SEND, 1.5)
    timeline.mark(IntervalKind.UNATTRIBUTED, 1.75)
    assert [(span.name, span.start, span.end) for span in phase_spans(timeline)] == [
        ("prefill", 0.0, 1.0),
        ("send", 1.0, 1.5),
    ]
    assert phase_spans(RequestTimeline(0.0)) == []


def test_a_tracer_is_made_only_where_it_can_send(monkeypatch):
    with pytest.raises(InvalidRequestError, match=r"'localhost:4318' is not a URL"):
        make_tracer("localhost:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    with pytest.raises(InvalidRequestError, match=r"pip install .*\[otel\]'"):
        make_tracer("http://localhost:4318")


@pytest.mark.parametrize("endpoint", ["http://localhost:4318", "http://localhost:4318/v1/traces"])
def test_an_endpoint_is_a_collectors_base(monkeypatch, endpoint):
    asked = []

    def make_exporter(url):
        asked.append(url)
        return InMemorySpanExporter()

    http = "opentelemetry.exporter.otlp.proto.http"
    for name, exporter in (
        ("metric_exporter", "OTLPMetricExporter"),
        ("trace_exporter", "OTLPSpanExporter"),
    ):
        monkeypatch.setitem(
            sys.modules, f"{http}.{name}", SimpleNamespace(**{exporter: make_exporter})
        )
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    make_tracer(endpoint).close()
    assert asked == ["http://localhost:4318/v1/traces"]
