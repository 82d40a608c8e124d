"""The report of a load: verdicts, tables, metrics."""

from __future__ import annotations

import json

import pytest

from bench.load.made_load import LATE, check_sections, every, made
from twinphase.phases.slo import Slos
from twinphase_bench.client.health import ClientHealth
from twinphase_bench.load.plots import timeline_plot
from twinphase_bench.load.report import (
    load_data,
    load_metrics,
    load_sections,
    load_verdicts,
    runs_section,
    runs_verdicts,
    shown,
)
from twinphase_bench.report.report import Status


def test_a_void_load_says_so_first_and_has_no_metrics():
    result = made([(0.0, [0.1, 0.2], "")] * 3, client=LATE)
    verdicts = load_verdicts(result)
    assert [v.status for v in verdicts[:3]] == [Status.VOID] * 3
    assert (
        "500.0 ms" in verdicts[0].reason
        and "300.0 ms" in verdicts[1].reason
        and "0.95" in verdicts[2].reason
    )
    assert load_metrics([result]) == []
    assert verdicts[3].text.startswith("VOID: 15 req/s served")  # right where the figures are
    section = load_sections(result)[0]
    assert section.title.startswith("VOID: ")
    assert [table.title for table in section.tables[:2]] == [
        "VOID: Latencies of requests that succeeded",
        "VOID: Throughput",
    ]


def test_lag_that_changes_nothing_voids_nothing():
    """50 ms late matters if the first token takes 100 ms, not if it takes seconds."""
    client = ClientHealth([0.05] * 10, [0.0])
    assert not made([(0.0, [2.0, 2.1], "")] * 3, client=client).void
    assert made([(0.0, [0.1, 0.2], "")] * 3, client=client).void


def test_several_runs():
    """Requests of a run depend on each other: a metric has one value per run."""
    runs = [made(every(0.1, 30, 0.05 + 0.01 * run, 0.2)) for run in range(5)]
    void = made([(0.0, [0.1, 0.2], "")] * 3, client=LATE)
    metrics = {metric.name: metric.values for metric in load_metrics([*runs, void])}
    assert metrics["ttft_p50_seconds"] == pytest.approx((0.05, 0.06, 0.07, 0.08, 0.09))
    assert {len(values) for values in metrics.values()} == {5}
    assert {"requests_per_second", "tpot_p50_seconds", "e2e_p99_seconds"} < set(metrics)
    first, ranges = runs_verdicts([*runs, void])
    assert first.status is Status.VOID and "run 6 of 6 is void" in first.text
    assert "Over 5 runs" in ranges.text and "TTFT p50 70 ms (50 .. 90)" in ranges.text
    assert "TTFT p99 unknown" in ranges.text, "of 30 requests it would be the highest"
    section = runs_section([*runs, void])
    check_sections((section,))
    assert [row[-1] for row in section.tables[0].rows] == ["counts"] * 5 + ["void"]


def test_sections_of_a_load():
    rows = every(0.1, 30, 0.05, 0.06, 0.08)
    rows += [
        (3.0, [], "http 429: slow down"),
        (3.1, [], "timeout: too long"),
        (3.2, [], "http 429: again"),
    ]
    result = made(rows, slos=Slos.parse(["ttft:40", "tpot:20"]))
    sections = load_sections(result)
    check_sections(sections)
    told = " ".join(f"{v.text} {v.reason}" for v in sections[0].verdicts)
    assert "3 of 33 requests failed" in told and "2 x http 429, 1 x timeout" in told
    assert "30 of 33 requests missed ttft (prefill" in told and "requests missed tpot" not in told
    failures = next(table for table in sections[0].tables if table.title == "Failures")
    assert failures.rows == [("http 429", "2", "slow down"), ("timeout", "1", "too long")]
    ttft, tpot, itl = (row[:3] for row in sections[0].tables[0].rows[:3])
    assert (ttft, tpot, itl[:2]) == (
        ("TTFT", "30", "50.00"),
        ("TPOT", "30", "15.00"),
        ("ITL", "60"),
    )
    metrics = {metric.name: metric for metric in load_metrics([result])}
    assert metrics["ttft_p50_seconds"].values == pytest.approx((0.05,))
    assert metrics["goodput"].values == (0.0,)
    json.dumps(load_data(result), allow_nan=False)


def test_doubts_are_told():
    result = made([(0.0, [0.1, 0.2], "")] * 2 + [(0.0, [], "broken off: x")])
    result.client.connected_late = 1
    for one in result.observations[:2]:
        one.num_cached_tokens = 8
        one.finish_reason = "stop"
        one.num_output_tokens = 8
    told = " ".join(verdict.text for verdict in load_verdicts(result))
    assert "80% of the prompt tokens came out of the server's prefix cache" in told
    assert "2 of 2 outputs ended before" in told and "4.00 tokens on average" in told
    assert "1 requests waited for their connection" in told and "broke off are failures" in told
    check_sections(load_sections(result))


def test_outputs_that_reason_first():
    result = made([(0.0, [0.1, 0.2, 0.3], "")] * 2)
    for one in result.observations:
        one.first_answer = 0.2
        one.num_reasoning_tokens = 2
    latencies, throughput = load_sections(result)[0].tables[:2]
    assert latencies.rows[-1][:3] == ("TTFO", "2", "200")
    assert ("reasoning", "4") in [row[:2] for row in throughput.rows]


def test_nothing_is_known_of_a_load_without_counts():
    result = made([(0.0, [0.1, 0.2], "")] * 3, slos=Slos(tpot=0.05))
    for one in result.observations:
        one.num_output_tokens = one.num_prompt_tokens = None
    assert result.output_rate is None and result.total_rate is None and result.tpot == []
    check_sections(load_sections(result))
    assert any(v.status is Status.UNKNOWN for v in load_verdicts(result))


def test_a_load_in_which_nothing_succeeded():
    result = made([(0.0, [], "http 503: x")] * 2, slos=Slos(ttft=0.01))
    check_sections(load_sections(result))
    assert load_metrics([result]) == []
    assert result.failures == {"http 503": 2} and not result.ttft and result.output_rate is None
    assert (
        result.request_rate == 0
        and result.goodput.rate == 0
        and result.goodput.missed == {"failed": 2}
    )


def test_the_timeline_has_the_queue_where_the_server_tells_it():
    result = made([(0.0, [0.1, 0.2], "")])
    result.observations[0].claims["timings"] = {"ledger_ms": {"queue": 40.0, "tokenize": 10.0}}
    rows = timeline_plot(result).spec["data"]["values"]
    assert [(row["from"], row["to"]) for row in rows] == [(0.0, 0.05), (0.05, 0.1), (0.1, 0.2)]


def test_few_requests_have_no_far_percentiles_and_the_rate_is_the_one_asked_for():
    result = made(every(0.001, 3, 0.05, 0.06), rate=50.0)
    told = load_verdicts(result)[0].text
    assert "req/s served, 50 asked for" in told and "p99" not in told and "(of 3 requests)" in told
    ttft = load_sections(result)[0].tables[0].rows[0]
    assert ttft[:6] == ("TTFT", "3", "50.00", "-", "-", "-")
    many = load_sections(made(every(0.1, 100, 0.05, 0.06)))[0].tables[0].rows[0]
    assert many[:6] == ("TTFT", "100", "50.00", "50.00", "50.00", "50.00")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "unknown"), (float("nan"), "unknown"), (0.12345, "0.1235"), (12345.6, "12,346")],
)
def test_numbers(value, text):
    assert shown(value) == text
