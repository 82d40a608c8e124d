import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from twinphase.batch import StepTimes
from twinphase.engine.process.messages import StepStats
from twinphase.outcome import FinishReason
from twinphase.phases.record import RequestRecord, RequestState
from twinphase.phases.timeline import Interval, IntervalKind, RequestTimeline
from twinphase.request import RequestCounts
from twinphase.server.metrics import GAP_BUCKETS, VLLM_NAMES, Metrics

ROOT = Path(__file__).parents[2]


def make_stats(**changes):
    fields = dict(
        start=1.0,
        end=2.0,
        prefill_seconds=0.75,
        decode_seconds=0.25,
        prefill_tokens=64,
        decode_tokens=3,
        prefill_flops=1000,
        decode_flops=30,
        prefill_bytes=200,
        decode_bytes=500,
        num_running=4,
        num_waiting=2,
        kv_cache_usage=0.5,
        prefix_queries=100,
        prefix_hits=40,
        num_preemptions=1,
    )
    return StepStats(**{**fields, **changes})


def make_timeline():
    kinds = {
        "tokenize": 0.5,
        "queue": 1.0,
        "prefill": 2.0,
        "prefill_wait": 0.25,
        "decode": 4.0,
        "batching": 0.5,
        "stall": 0.125,
        "detokenize": 0.0625,
        "send": 0.03125,
        "unattributed": 0.25,
    }
    timeline = RequestTimeline(arrival=10.0)
    for kind, seconds in kinds.items():
        timeline.mark(IntervalKind(kind), timeline.end + seconds)
    timeline.token_times = [14.0, 15.0, 17.0]
    return timeline, kinds


def finish(metrics, timeline, reason=FinishReason.STOP, num_output_tokens=3):
    counts = RequestCounts("id", 30, num_output_tokens, 16)
    state = RequestState.ENDED
    record = RequestRecord(counts, timeline, state=state, finish_reason=reason)
    metrics.ended(record, num_reasoning_tokens=2)


def read(metrics):
    """Values by (name, labels except the model's name)."""
    values = {}
    for family in parse(metrics.expose(None)[0].decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "some/model"
            key = (sample.name.removeprefix("twinphase:"), *labels.values())
            assert key not in values
            values[key] = sample.value
    return values


def test_a_step_sets_gauges_and_adds_to_both_phases():
    metrics = Metrics("some/model")
    metrics.step(make_stats())
    metrics.step(
        make_stats(
            num_running=1, num_waiting=0, prefix_queries=130, prefix_hits=40, prefill_tokens=0
        )
    )
    values = read(metrics)
    assert [values[name,] for name in ("num_requests_running", "num_requests_waiting")] == [1, 0]
    assert values["kv_cache_usage_perc",] == 0.5
    assert (values["prefix_cache_queries_total",], values["prefix_cache_hits_total",]) == (130, 40)
    assert values["num_preemptions_total",] == 1
    expected = {"tokens": (64, 6), "seconds": (1.5, 0.5), "flops": (2000, 60), "bytes": (400, 1000)}
    for what, by_phase in expected.items():
        assert (
            tuple(values[f"step_{what}_total", phase] for phase in ("prefill", "decode"))
            == by_phase
        )


def test_the_pace_is_that_of_the_last_step_and_stays_while_the_engine_is_idle():
    metrics = Metrics("some/model")
    for seconds in (0.8, 0.05):
        metrics.step(make_stats(itl_slo_seconds=seconds))
    metrics.idle()
    assert read(metrics)["itl_slo_seconds",] == 0.05


def test_every_measured_part_of_a_step_is_counted():
    metrics = Metrics("some/model")
    parts = {part.name: float(number) for number, part in enumerate(fields(StepTimes), start=1)}
    for _ in range(2):
        metrics.step(make_stats(times=StepTimes(**parts)))
    values = read(metrics)
    assert {part: values["step_part_seconds_total", part] / 2 for part in parts} == parts
    assert values["rank_wait_seconds_total",] == 2 * parts["rank_wait"]


@pytest.mark.parametrize("announced", [True, False])
def test_counters_go_on_when_the_engine_is_started_again(announced):
    metrics = Metrics("some/model")
    metrics.engine_up(True)
    metrics.step(make_stats(prefix_queries=100, prefix_hits=40, num_preemptions=7))
    metrics.engine_up(False)
    down = read(metrics)
    if announced:
        metrics.engine_restarted()
    # With the restart announced, a total that is already above the dead engine's counts whole as
    # well.
    metrics.step(
        make_stats(prefix_queries=150 if announced else 50, prefix_hits=10, num_preemptions=0)
    )
    values = read(metrics)
    assert values["prefix_cache_queries_total",] == (250 if announced else 150)
    assert values["prefix_cache_hits_total",] == 50
    assert values["num_preemptions_total",] == 7
    assert (down["engine_up",], down["num_requests_running",], down["kv_cache_usage_perc",]) == (
        0,
        0,
        0,
    )
    assert (values["engine_up",], values["engine_restarts_total",]) == (announced, announced)


def test_a_finished_request_leaves_its_timeline_in_the_histograms():
    metrics = Metrics("some/model")
    timeline, kinds = make_timeline()
    finish(metrics, timeline)
    values = read(metrics)
    assert {
        key[1]: value
        for key, value in values.items()
        if key[0] == "request_seconds_total" and value
    } == kinds
    assert (
        values["e2e_request_latency_seconds_sum",]
        == sum(kinds.values())
        == timeline.end - timeline.arrival
    )
    sums = {"queue": 1.0, "prefill": 2.25, "decode": 4.625}
    for phase, seconds in sums.items():
        assert values[f"request_{phase}_time_seconds_sum",] == seconds
    assert values["request_time_per_output_token_seconds_sum",] == 1.5
    apart = [values[f"{kind}_seconds_total",] for kind in ("stall", "batching", "unattributed")]
    assert apart == [0.125, 0.5, 0.25]
    assert values["request_success_total", "stop"] == 1
    assert values["request_success_total", "length"] == 0
    assert (values["prompt_tokens_total",], values["prompt_tokens_cached_total",]) == (30, 16)
    assert values["reasoning_tokens_total",] == 2
    assert (
        values["request_prompt_tokens_bucket", "50.0"]
        - values["request_prompt_tokens_bucket", "20.0"]
        == 1
    )
    assert values["request_generation_tokens_sum",] == 3


def test_a_request_that_never_ran_is_in_no_histogram_of_a_phase():
    metrics = Metrics("some/model")
    timeline = RequestTimeline(0.0, [Interval(IntervalKind.QUEUE, 0.0, 3.0)])
    finish(metrics, timeline, FinishReason.ABORT, num_output_tokens=0)
    values = read(metrics)
    assert values["request_success_total", "abort"] == 1
    assert (
        values["request_queue_time_seconds_sum",]
        == values["e2e_request_latency_seconds_sum",]
        == 3.0
    )
    for name in ("request_prefill_time", "request_decode_time", "request_time_per_output_token"):
        assert values[f"{name}_seconds_count",] == 0


def test_tokens_are_observed_as_they_are_handed_over():
    metrics = Metrics("some/model")
    timeline = RequestTimeline(10.0)
    for count, now in ((1, 10.5), (1, 10.75), (3, 11.0)):
        timeline.hand_over_tokens(count, now)
    metrics.first_token(timeline.ttft)
    metrics.token_gap(0.25)
    metrics.token_gap(0.25, 3)
    metrics.delivered(0.0004)
    values = read(metrics)
    assert values["time_to_first_token_seconds_sum",] == 0.5
    assert values["generation_tokens_total",] == 5
    for bound in GAP_BUCKETS:
        expected = sum(gap <= bound for gap in timeline.itl)
        assert values["inter_token_latency_seconds_bucket", str(bound)] == expected
    assert values["token_delivery_seconds_bucket", "0.0005"] == 1
    assert values["token_delivery_seconds_bucket", "0.0002"] == 0


def test_vllm_names_carry_the_same_samples():
    metrics = Metrics("some/model", vllm_aliases=True)
    timeline, _ = make_timeline()
    metrics.step(make_stats(num_drafts=3, num_draft_tokens=9, accepted=[3, 1]))
    metrics.first_token(0.5)
    finish(metrics, timeline)
    ours = {}
    aliases = {}
    for family in parse(metrics.expose(None)[0].decode()):
        for sample in family.samples:
            prefix, name = sample.name.split(":")
            labels = dict(sample.labels)
            if prefix == "vllm":
                assert labels.pop("engine") == "0"
            (aliases if prefix == "vllm" else ours)[(name, *sorted(labels.items()))] = sample.value
    families = {name for name, *_ in aliases}
    assert {re.sub("_(total|bucket|count|sum)$", "", name) for name in families} == VLLM_NAMES
    assert aliases == {key: ours[key] for key in aliases}
    assert not any("vllm" in key[0] for key in read(Metrics("some/model")))


def test_both_text_formats_parse_and_hold_the_same():
    metrics = Metrics("some/model", vllm_aliases=True)
    metrics.step(make_stats())
    metrics.refused(429, "queue_full")
    text, text_type = metrics.expose("text/plain;version=nonsense")
    openmetrics, openmetrics_type = metrics.expose(
        "application/openmetrics-text;version=nonsense,*/*;q=0.1"
    )
    assert (text_type.split(";")[0], openmetrics_type.split(";")[0]) == (
        "text/plain",
        "application/openmetrics-text",
    )
    as_set = [
        {
            (s.name, *sorted(s.labels.items()), s.value)
            for family in families
            for s in family.samples
        }
        for families in (parse(text.decode()), parse_openmetrics(openmetrics.decode()))
    ]
    assert as_set[0] == as_set[1]
    assert (
        "twinphase:requests_refused_total",
        ("model_name", "some/model"),
        ("reason", "queue_full"),
        ("status", "429"),
        1.0,
    ) in as_set[0]
    assert not any(name.endswith("_created") for name, *_ in as_set[0])


def exposed():
    """Sample names and label names."""
    metrics = Metrics("some/model")
    metrics.refused(429, "queue_full")
    samples = [
        sample for family in parse(metrics.expose(None)[0].decode()) for sample in family.samples
    ]
    return {sample.name for sample in samples}, {
        label for sample in samples for label in sample.labels
    }


def queries(node):
    if isinstance(node, dict):
        yield from (node[key] for key in ("expr", "definition") if isinstance(node.get(key), str))
        yield from (query for value in node.values() for query in queries(value))
    elif isinstance(node, list):
        yield from (query for value in node for query in queries(value))


def test_the_dashboard_asks_only_for_what_is_exposed():
    dashboard = json.loads((ROOT / "examples/grafana/twinphase.json").read_text())
    names, labels = exposed()
    expressions = list(queries(dashboard))
    asked = {name for text in expressions for name in re.findall(r"twinphase:\w+", text)}
    assert asked
    assert asked <= names
    for text in expressions:
        grouped = {
            label
            for group in re.findall(r"by \(([^)]*)\)", text)
            for label in re.split(r",\s*", group)
        }
        matched = set(re.findall(r"[{,]\s*(\w+)=", text))
        assert grouped | matched <= labels, text
        assert text.count("(") == text.count(")"), text
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(panel["targets"] and panel["description"] for panel in panels)


def test_the_table_of_metrics_is_complete():
    rows = re.findall(
        r"^\| `([\w:]+)` \| (\w+) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE
    )
    metrics = Metrics("some/model", tenants={"key1": 1.0})
    families = {
        family.name.removeprefix("twinphase:")
        + ("_total" if family.type == "counter" else ""): family.type
        for family in metrics.registry.collect()
    }
    assert dict(rows) == families
    assert len(rows) == len(families)


def test_guesses_are_counted_by_position():
    metrics = Metrics("some/model")
    for accepted in ([3, 1], [], [2, 2, 1]):
        metrics.step(
            make_stats(num_drafts=3, num_draft_tokens=9, accepted=accepted, num_draft_failures=2)
        )
    values = read(metrics)
    assert values["spec_decode_num_failures_total",] == 2
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    assert (
        values["spec_decode_num_drafts_total",],
        values["spec_decode_num_draft_tokens_total",],
    ) == (9, 27)
    assert values["spec_decode_num_accepted_tokens_total",] == 9
    assert [values[name, str(position)] for position in range(3)] == [5, 3, 1]
