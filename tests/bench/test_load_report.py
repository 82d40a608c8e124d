"""Saturation, and what is told of loads, against a server in this process whose speed is known."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any

import pytest

from twinphase.bench.arrivals import Closed, Constant
from twinphase.bench.client import run
from twinphase.bench.load import ClientHealth, LoadResult, run_load
from twinphase.bench.load_plots import timeline_plot
from twinphase.bench.load_report import (
    load_data,
    load_metrics,
    load_sections,
    load_verdicts,
    sweep_data,
    sweep_metrics,
    sweep_sections,
    sweep_verdicts,
)
from twinphase.bench.observation import Observation
from twinphase.bench.report import Section, Status
from twinphase.bench.saturation import SweepPlan, find_saturation, rank_sum_p, saturation_reason
from twinphase.bench.slo import Slos
from twinphase.bench.target import TargetFacts
from twinphase.bench.workload import Lengths, Sizing, make_workload
from twinphase.errors import InvalidRequestError

FACTS = TargetFacts("made up", "test", "none", "m", "unknown", None, "", "")


class Server:
    """Serves `slots` requests at once, `seconds` each: its capacity is slots / seconds."""

    facts = FACTS

    def __init__(self, slots: int, seconds: float) -> None:
        self.seconds, self.slots = seconds, asyncio.Semaphore(slots)

    async def send(self, prompt: Any, max_tokens: int, intended: float) -> Observation:
        sent = time.perf_counter()
        async with self.slots:
            await asyncio.sleep(self.seconds / 2)
            times = [time.perf_counter()]
            await asyncio.sleep(self.seconds / 2)
            times.append(time.perf_counter())
        seen = Observation("", intended, sent, times, times[-1], 10, 0, 2, 200, finish_reason="length")
        return seen

    async def close(self) -> None:
        pass


def make(number: int, seed: int) -> Any:
    return make_workload(Lengths((5, 5), (2, 2)), number, Sizing(), seed=seed, num_warm_up=0)


def made(rows: list[tuple[float, list[float], str]], **more: Any) -> LoadResult:
    """A result of requests as (intended, token times after it, error)."""
    seen = [
        Observation(
            str(i), at, at, [at + t for t in times], at + (times[-1] if times else 0.1), 10, 0, len(times), 200, error
        )
        for i, (at, times, error) in enumerate(rows)
    ]
    values: dict[str, Any] = {"rate": 1.0, "concurrency": None, **more}
    client = values.pop("client", ClientHealth([0.0], [0.0]))
    return LoadResult(FACTS, "work", "arrivals", observations=seen, num_requests=len(seen), client=client, **values)


def check(sections: tuple[Section, ...]) -> None:
    """Tables have a cell for each column, plots have data, names are unique, and all of it is JSON."""
    for section in sections:
        for table in section.tables:
            assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
            assert all(isinstance(cell, str) for row in table.rows for cell in row)
        names = [plot.name for plot in section.plots]
        assert len(set(names)) == len(names)
        for plot in section.plots:
            assert "values" in json.dumps(plot.spec, allow_nan=False)


def test_a_search_stops_at_saturation_and_finds_the_capacity():
    async def work():
        # 4 at once, 40 ms each: 100 requests a second.
        return await find_saturation(Server(4, 0.04), make, SweepPlan(seconds=0.8, refine=1), Slos.parse(["ttft:60"]))

    sweep = run(work())
    assert sweep.stopped.startswith("saturated at rate"), sweep.stopped
    assert sweep.capacity is not None and sweep.saturated_at is not None
    assert 40 < sweep.capacity < sweep.saturated_at and 80 < sweep.saturated_at < 260
    values = [point.value for point in sweep.points]
    assert values[1] == 2 * values[0] and len(values) == len(set(values))
    assert sweep.best_goodput is not None
    check(sweep_sections(sweep))
    assert "saturated at" in sweep_verdicts(sweep)[0].text and "goodput" in sweep_verdicts(sweep)[1].text
    assert any(metric.name == "capacity_rate" for metric in sweep_metrics(sweep))
    json.dumps(sweep_data(sweep), allow_nan=False)


def test_concurrency_stops_when_nothing_is_gained():
    sweep = run(find_saturation_of(4, SweepPlan("concurrency", seconds=1.0)))
    # Four at once are all it serves; a machine that is busy elsewhere may make the fourth look slow, and go on to 16.
    assert sweep.saturated_at in (8, 16) and sweep.capacity in (4, 8), [(p.value, p.saturated) for p in sweep.points]
    assert "no more than" in sweep.stopped
    check(sweep_sections(sweep))


async def find_saturation_of(slots: int, plan: SweepPlan) -> Any:
    return await find_saturation(Server(slots, 0.04), make, plan)


def test_given_values_that_saturate_nothing():
    sweep = run(find_saturation_of(8, SweepPlan(values=(5, 10), seconds=0.5, min_requests=5)))
    assert [point.value for point in sweep.points] == [5, 10] and sweep.saturated_at is None
    assert sweep_verdicts(sweep)[0].status is Status.UNKNOWN and "none was saturated" in sweep.stopped
    with pytest.raises(InvalidRequestError):
        SweepPlan("tokens")
    with pytest.raises(InvalidRequestError):
        SweepPlan(values=(0,))


def test_reasons_of_saturation():
    steady = [(i * 0.1, [0.05, 0.1], "") for i in range(60)]
    assert saturation_reason(made(steady)) == ""
    failing = [
        (at, times if i % 5 else [], "" if i % 5 else "http 429: full") for i, (at, times, _) in enumerate(steady)
    ]
    assert "20% of the requests failed (12 x http 429)" in saturation_reason(made(failing))
    growing = [(i * 0.1, [0.05 + 0.007 * i, 0.1 + 0.007 * i], "") for i in range(60)]
    assert "TTFT grows" in saturation_reason(made(growing))
    disturbed = [(i * 0.1, [0.02 + 0.001 * i, 0.1 + 0.001 * i], "") for i in range(60)]
    assert saturation_reason(made(disturbed)) == "", "10 ms more each second are no queue"
    behind = [(i * 0.1, [0.05 + 0.1 * i, 0.1 + 0.1 * i], "") for i in range(60)]
    assert "of the rate offered" in saturation_reason(made(behind))
    assert saturation_reason(made([])) == ""


def test_rank_sum():
    # Exact one-sided chance of 5 against 5 without overlap is 1 / 252 = 0.004; the normal approximation has 0.0045.
    assert rank_sum_p([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(0.0045, abs=0.0005)
    assert rank_sum_p([1, 2, 3], [1, 2, 3]) == 0.5
    assert rank_sum_p([6, 7, 8, 9, 10], [1, 2, 3, 4, 5]) > 0.99


def test_a_void_load_says_so_first_and_has_no_metrics():
    result = made([(0.0, [0.1, 0.2], "")] * 3, client=ClientHealth([0.5] * 3, [0.3] * 100, 0.95))
    verdicts = load_verdicts(result)
    assert [v.status for v in verdicts[:3]] == [Status.VOID] * 3
    assert "500.0 ms" in verdicts[0].reason and "300.0 ms" in verdicts[1].reason and "0.95" in verdicts[2].reason
    assert load_metrics(result) == ()
    assert verdicts[3].text.startswith("VOID: 15 req/s served")  # right where the figures are
    section = load_sections(result)[0]
    assert section.title.startswith("VOID: ")
    assert [table.title for table in section.tables[:2]] == ["VOID: Latencies of requests that succeeded", "VOID: Throughput"]  # fmt: skip  # noqa: E501


def test_metrics_have_one_value_a_run():
    """Requests of a run depend on each other; only runs tell how runs differ."""
    runs = [made([(i * 0.1, [0.05 + 0.01 * run, 0.2], "") for i in range(30)]) for run in range(5)]
    void = made([(0.0, [0.1, 0.2], "")] * 3, client=ClientHealth([0.5] * 3, [0.3] * 100, 0.95))
    metrics = {metric.name: metric.values for metric in load_metrics([*runs, void])}
    assert metrics["ttft_p50_seconds"] == pytest.approx((0.05, 0.06, 0.07, 0.08, 0.09))
    assert {len(values) for values in metrics.values()} == {5}
    assert {"requests_per_second", "tpot_p50_seconds", "e2e_p99_seconds"} < set(metrics)


def test_lag_that_changes_nothing_voids_nothing():
    """50 ms late is nothing where the first token takes seconds, and everything where it takes 100 ms."""
    client = ClientHealth([0.05] * 10, [0.0])
    assert not made([(0.0, [2.0, 2.1], "")] * 3, client=client).void
    assert made([(0.0, [0.1, 0.2], "")] * 3, client=client).void


def test_sections_of_a_load():
    rows = [(i * 0.1, [0.05, 0.06, 0.08], "") for i in range(30)]
    rows += [(3.0, [], "http 429: slow down"), (3.1, [], "timeout: too long"), (3.2, [], "http 429: again")]
    result = made(rows, slos=Slos.parse(["ttft:40", "tpot:20"]))
    sections = load_sections(result)
    check(sections)
    told = " ".join(f"{v.text} {v.reason}" for v in sections[0].verdicts)
    assert "3 of 33 requests failed" in told and "2 x http 429, 1 x timeout" in told
    assert "ttft was missed by 30: prefill" in told and "tpot" in told
    failures = next(table for table in sections[0].tables if table.title == "Failures")
    assert failures.rows == (("http 429", "2", "slow down"), ("timeout", "1", "too long"))
    latencies = sections[0].tables[0]
    assert latencies.rows[0][:3] == ("TTFT", "30", "50.00") and latencies.rows[1][:3] == ("TPOT", "30", "15.00")
    assert latencies.rows[2][:2] == ("ITL", "60")
    metrics = {metric.name: metric for metric in load_metrics(result, "rate=1")}
    assert metrics["ttft_p50_seconds[rate=1]"].values == pytest.approx((0.05,)) and metrics[
        "goodput[rate=1]"
    ].values == (0.0,)
    json.dumps(load_data(result), allow_nan=False)


def test_doubts_are_told():
    result = made([(0.0, [0.1, 0.2], "")] * 2)
    for one in result.observations:
        one.num_cached_tokens, one.finish_reason, one.num_output_tokens = 8, "stop", 8
    told = " ".join(verdict.text for verdict in load_verdicts(result))
    assert "80% of the prompt tokens came out of the server's prefix cache" in told
    assert "2 of 2 outputs ended before" in told and "4.00 tokens on average" in told


def test_nothing_is_known_of_a_load_without_counts():
    result = made([(0.0, [0.1, 0.2], "")] * 3, slos=Slos(tpot=0.05))
    for one in result.observations:
        one.num_output_tokens = one.num_prompt_tokens = None
    assert result.output_rate is None and result.total_rate is None and result.tpot == []
    check(load_sections(result))
    assert any(v.status is Status.UNKNOWN for v in load_verdicts(result))


def test_a_load_in_which_nothing_succeeded_can_be_told():
    result = made([(0.0, [], "http 500: x")] * 2)
    check(load_sections(result))
    assert load_metrics(result) == () and math.isnan(float("nan"))


def test_the_timeline_has_the_queue_where_the_server_tells_it():
    result = made([(0.0, [0.1, 0.2], "")])
    result.observations[0].claims["timings"] = {"ledger_ms": {"queue": 40.0, "tokenize": 10.0}}
    rows = timeline_plot(result).spec["data"]["values"]
    assert [(row["from"], row["to"]) for row in rows] == [(0.0, 0.05), (0.05, 0.1), (0.1, 0.2)]


def test_our_engine_in_this_process_as_a_target(tmp_path):
    from tiny_gguf import write_tiny_gguf
    from twinphase.bench.targets.engine_load import EngineLoadTarget

    path = write_tiny_gguf(tmp_path / "tiny.gguf", tensor_type="Q4_0", context=512)
    target = EngineLoadTarget.open(path, backend="reference")

    async def work():
        sizing = await target.sizing()
        workload = make_workload(Lengths((10, 20), (4, 4)), 6, sizing, num_warm_up=1)
        result = await run_load(target, workload, Constant(50))
        closed = await run_load(target, make_workload(Lengths((8, 8), (3, 3)), 4, sizing, seed=1), Closed(2))
        long = make_workload(Lengths((600, 600), (3, 3)), 1, sizing)
        with pytest.raises(InvalidRequestError, match="context"):
            await run_load(target, long, Closed(1))
        refused = await target.send(long.requests[0].prompt, 3)
        await target.close()
        return workload, result, closed, refused

    workload, result, closed, refused = run(work())
    assert [one.error for one in result.observations] == [""] * 6
    assert [one.num_prompt_tokens for one in result.observations] == [r.prompt.num_tokens for r in workload.requests]
    assert [one.num_output_tokens for one in result.observations] == [4] * 6
    assert all(one.num_cached_tokens == 0 and one.finish_reason == "length" for one in result.observations)
    assert all(a.ttft > 0 and a.sent <= a.token_times[0] <= a.token_times[-1] <= a.ended for a in result.observations)
    assert len(closed.succeeded) == 4 and refused.status == 400 and not refused.succeeded
    check(load_sections(result))
