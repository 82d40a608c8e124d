"""Saturation, and what is told of loads, against a server in this process whose speed is known."""

from __future__ import annotations

import heapq
import json
import math
import time
from typing import Any

import pytest

from twinphase.bench.client.client import run
from twinphase.bench.client.observation import Observation
from twinphase.bench.load import saturation
from twinphase.bench.load.arrivals import Closed, Constant
from twinphase.bench.load.plots import timeline_plot
from twinphase.bench.load.report import (
    load_data,
    load_metrics,
    load_sections,
    load_verdicts,
    sweep_data,
    sweep_metrics,
    sweep_sections,
    sweep_verdicts,
)
from twinphase.bench.load.run import ClientHealth, LoadResult, run_load
from twinphase.bench.load.saturation import SweepPlan, cannot_tell, find_saturation, rank_sum_p, saturation_reason
from twinphase.bench.load.slo import Slos
from twinphase.bench.load.workload import Lengths, Sizing, make_workload
from twinphase.bench.report.report import Section, Status
from twinphase.bench.targets.target import TargetFacts
from twinphase.errors import InvalidRequestError

FACTS = TargetFacts("made up", "test", "none", "m", "unknown", None, "", "")


class Served:
    """Loads on a virtual clock, in place of `run_load`: `slots` requests at once, `seconds` each.

    Attributes:
        loads: (arrivals, number of requests, warm-up requests, how many of them at once) of each.
        void_above: rates above it, the client is the limit.
        hiccup: of this load by number, a request takes 20 times as long.
    """

    def __init__(self, slots: int, seconds: float, void_above: float = math.inf, hiccup: int = -1) -> None:
        self.slots, self.seconds, self.void_above, self.hiccup = slots, seconds, void_above, hiccup
        self.loads: list[tuple[Any, int, int, int]] = []
        self.prompts: list[str] = []

    async def __call__(
        self,
        target: Any,
        workload: Any,
        arrivals: Any,
        limits: Any,
        slos: Any,
        progress: Any,
        claims: Any = None,
        warm_up_at_once: int = 1,
    ) -> LoadResult:
        seconds = self.seconds * (20 if len(self.loads) == self.hiccup else 1)
        self.loads.append((arrivals, len(workload.requests), len(workload.warm_up), warm_up_at_once))
        self.prompts += [r.prompt.text for r in (*workload.warm_up, *workload.requests)]
        free, rows = [0.0] * self.slots, []
        users = [0.0] * getattr(arrivals, "concurrency", 0)
        offsets = arrivals.offsets(workload.requests) or [None] * len(workload.requests)
        for offset in offsets:
            at = heapq.heappop(users) if offset is None else offset
            begin = max(at, heapq.heappop(free))
            heapq.heappush(free, begin + seconds)
            if offset is None:
                heapq.heappush(users, begin + seconds)
            rows.append((at, [begin + seconds / 2 - at, begin + seconds - at], ""))
        rate, concurrency = getattr(arrivals, "rate", None), getattr(arrivals, "concurrency", None)
        client = ClientHealth([0.0], [0.0], cpu=0.99 if (rate or 0) > self.void_above else 0.1)
        return made(rows, rate=rate, concurrency=concurrency, slos=slos or Slos(), client=client)


def find(served: Served, plan: SweepPlan, monkeypatch: Any, *slos: str) -> Any:
    """A sweep on it."""
    monkeypatch.setattr(saturation, "run_load", served)
    return run(find_saturation(Server, make, plan, Slos.parse(slos)))


class Server:
    facts = FACTS


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


def test_a_search_stops_at_saturation_and_finds_the_capacity(monkeypatch):
    served = Served(4, 0.04)  # 100 requests a second
    sweep = find(served, SweepPlan(seconds=4, refine=2), monkeypatch, "ttft:60")
    assert sweep.stopped.startswith("saturated at rate"), sweep.stopped
    assert sweep.capacity is not None and sweep.saturated_at is not None
    assert [point.value for point in sweep.points][:4] == [12.5, 25, 50, 100]
    assert 70 < sweep.capacity < sweep.saturated_at and 100 <= sweep.saturated_at <= 200
    assert all(len(runs) == 2 for value, runs in sweep.runs.items() if value == sweep.saturated_at), "measured twice"
    assert sweep.best_goodput is not None
    check(sweep_sections(sweep))
    assert "saturated at" in sweep_verdicts(sweep)[0].text and "goodput" in sweep_verdicts(sweep)[1].text
    names = [metric.name for metric in sweep_metrics(sweep)]
    assert "capacity_rate" in names and len(set(names)) == len(names)
    json.dumps(sweep_data(sweep), allow_nan=False)
    for arrivals, _, warm, at_once in served.loads[1:]:
        assert warm == at_once == max(1, min(64, round(arrivals.rate * 0.04))), "warm at its own concurrency"
    assert len(set(served.prompts)) == len(served.prompts), "no prompt is sent twice"


def test_a_client_that_is_the_limit_saturates_no_server(monkeypatch):
    """Void loads look saturated; they are neither served nor saturated."""
    sweep = find(Served(4, 0.04, void_above=30), SweepPlan(seconds=2), monkeypatch)
    assert "the client was the limit at rate 50" in sweep.stopped
    assert sweep.saturated_at is None and sweep.capacity == 25
    assert sweep_verdicts(sweep)[0].status is Status.UNKNOWN
    assert not [metric for metric in sweep_metrics(sweep) if metric.name.startswith("capacity")]
    late = [(i * 0.1, [], "timeout: x") for i in range(60)]
    assert saturation_reason(made(late, client=ClientHealth(cpu=0.99))) == ""
    assert "100% of the requests failed" in saturation_reason(made(late))


def test_a_load_that_seems_saturated_once_is_not(monkeypatch):
    steady, disturbed = Served(4, 0.04), Served(4, 0.04, hiccup=2)  # loads: alone, 12.5, 25 (disturbed), 25, 50, ...
    plan = SweepPlan(seconds=4, refine=0)
    found, other = find(steady, plan, monkeypatch), find(disturbed, plan, monkeypatch)
    assert other.saturated_at == found.saturated_at and [p.value for p in other.points][:4] == [12.5, 25, 25, 50]
    first, second = other.points[1:3]
    assert "was not when measured again" in first.untold and not first.bad and second.good
    assert any(row[-1].startswith("unknown: it seemed") for row in sweep_sections(other)[0].tables[0].rows)


def test_concurrency_stops_when_nothing_is_gained(monkeypatch):
    sweep = find(Served(4, 0.04), SweepPlan("concurrency", seconds=4.0), monkeypatch)
    assert (sweep.capacity, sweep.saturated_at) == (4, 8), [(p.value, p.saturated) for p in sweep.points]
    assert "tokens/s, no more than" in sweep.stopped
    check(sweep_sections(sweep))

    class Uncounted(Served):
        async def __call__(self, *given: Any, **more: Any) -> LoadResult:
            result = await super().__call__(*given, **more)
            for one in result.observations:
                one.num_output_tokens = None
            return result

    sweep = find(Uncounted(4, 0.04), SweepPlan("concurrency", seconds=4.0), monkeypatch)
    assert sweep.saturated_at == 8 and "requests/s, no more than" in sweep.stopped


def test_given_values_that_saturate_nothing(monkeypatch):
    sweep = find(Served(8, 0.04), SweepPlan(values=(5, 10), seconds=0.5, min_requests=5), monkeypatch)
    assert [point.value for point in sweep.points] == [5, 10] and sweep.saturated_at is None
    assert sweep_verdicts(sweep)[0].status is Status.UNKNOWN and "none was saturated" in sweep.stopped
    with pytest.raises(InvalidRequestError):
        SweepPlan("tokens")
    with pytest.raises(InvalidRequestError):
        SweepPlan(values=(0,))


def test_long_outputs_are_no_saturation(monkeypatch):
    """A server of endless slots whose requests take longer than the time asked for: sending goes on for longer."""
    served = Served(10_000, 60.0)
    sweep = find(served, SweepPlan(values=(1, 2), seconds=10), monkeypatch)
    assert "none was saturated" in sweep.stopped and served.loads[1][1] >= 300
    sweep = find(Served(10_000, 60.0), SweepPlan(values=(10,), seconds=10, max_requests=500), monkeypatch)
    assert "cannot be told" in sweep.stopped and sweep.saturated_at is None and sweep.capacity is None
    short = [(i * 0.1, [0.05, 4.0], "") for i in range(60)]
    assert "less than 5 times" in cannot_tell(made(short)) and saturation_reason(made(short)) == ""
    filling = [(i * 0.1, [0.05 + 0.001 * min(i, 20), 0.5], "") for i in range(60)]
    assert saturation_reason(made(filling)) == "", "the first third fills the server"


def test_one_load_of_a_server_on_the_real_clock():
    class Real:
        facts = FACTS

        async def send(self, prompt: Any, max_tokens: int, intended: float) -> Observation:
            now = time.perf_counter()
            return Observation("", intended, intended, [intended + 0.01], now, 5, 0, 1, 200, finish_reason="length")

        async def close(self) -> None:
            pass

    sweep = run(find_saturation(Real(), make, SweepPlan(values=(200,), seconds=0.2, min_requests=5)))
    (point,) = sweep.points
    assert len(point.result.observations) == 40 and point.result.conditions["warm-up requests"].startswith("2 at once")


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
    assert "in the last two thirds only" in saturation_reason(made(behind))
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
    assert "30 of 33 requests missed ttft (prefill" in told and "tpot" in told
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
    assert load_metrics(result) == ()


def test_the_timeline_has_the_queue_where_the_server_tells_it():
    result = made([(0.0, [0.1, 0.2], "")])
    result.observations[0].claims["timings"] = {"ledger_ms": {"queue": 40.0, "tokenize": 10.0}}
    rows = timeline_plot(result).spec["data"]["values"]
    assert [(row["from"], row["to"]) for row in rows] == [(0.0, 0.05), (0.05, 0.1), (0.1, 0.2)]


def test_an_engine_that_fails_loses_one_request(tmp_path):
    from tiny_gguf import write_tiny_gguf
    from twinphase.bench.targets.engine_load import EngineLoadTarget

    target = EngineLoadTarget.open(
        write_tiny_gguf(tmp_path / "tiny.gguf", tensor_type="Q4_0", context=512), backend="reference"
    )
    submit = target._engine.submit

    class Empty:
        request_id = "empty"

        async def __aenter__(self) -> Any:
            return self

        async def __aexit__(self, *_: Any) -> None:
            pass

        async def __aiter__(self) -> Any:
            for update in ():
                yield update

    ways = iter(["", "raise", "empty", ""])

    async def broken(asked: Any, params: Any) -> Any:
        way = next(ways)
        if way == "raise":
            raise RuntimeError("of the engine")
        return Empty() if way == "empty" else await submit(asked, params)

    async def work() -> LoadResult:
        target._engine.submit = broken
        sizing = await target.sizing()
        assert sizing.encode is not None and sizing.encode("ab")
        result = await run_load(target, make_workload(Lengths((8, 8), (3, 3)), 4, sizing, num_warm_up=0), Closed(1))
        await target.close()
        return result

    result = run(work())
    assert len(result.succeeded) == 2 and result.failures == {"exception": 1, "no output": 1}
    assert all(one.tpot is not None for one in result.succeeded)


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


def test_few_requests_have_no_far_percentiles_and_the_rate_is_the_one_asked_for():
    result = made([(i * 0.001, [0.05, 0.06], "") for i in range(3)], rate=50.0)
    told = load_verdicts(result)[0].text
    assert "req/s served, 50 asked for" in told and "p99" not in told and "(of 3 requests)" in told
    ttft = load_sections(result)[0].tables[0].rows[0]
    assert ttft[:6] == ("TTFT", "3", "50.00", "-", "-", "-")
    many = load_sections(made([(i * 0.1, [0.05, 0.06], "") for i in range(100)]))[0].tables[0].rows[0]
    assert many[:6] == ("TTFT", "100", "50.00", "50.00", "50.00", "50.00")
