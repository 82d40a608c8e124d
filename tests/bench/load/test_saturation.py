"""The search for saturation, against a server on a virtual clock whose speed is known."""

from __future__ import annotations

import heapq
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from bench.load.made_load import Instant, check_sections, every, made
from twinphase.bench.client.client import run
from twinphase.bench.client.observation import Observation
from twinphase.bench.load import plan, saturation
from twinphase.bench.load.plan import LoadOptions, load_parts
from twinphase.bench.load.run import ClientHealth, LoadResult
from twinphase.bench.load.saturation import (
    SaturationSearch,
    SearchPlan,
    cannot_tell,
    find_saturation,
    saturation_reason,
)
from twinphase.bench.load.saturation_report import (
    saturation_data,
    saturation_metrics,
    saturation_section,
    saturation_verdicts,
)
from twinphase.bench.load.slo import Slos
from twinphase.bench.load.workload import Lengths, Sizing, Workload, make_workload
from twinphase.bench.report.report import Status


class Served:
    """Loads on a virtual clock, in place of `run_load`: `slots` requests at once, `seconds` each.

    Above the rate `void_above` the client is the limit; in load number `hiccup` requests take 20 times as long.
    """

    def __init__(self, slots: int, seconds: float, void_above: float = math.inf, hiccup: int = -1) -> None:
        self.slots, self.seconds, self.void_above, self.hiccup = slots, seconds, void_above, hiccup
        self.loads: list[tuple[Any, int, int, int]] = []  # arrivals, requests, warm-up requests, these at once
        self.prompts: list[str] = []

    async def __call__(self, workload: Any, arrivals: Any, warm_up_at_once: int = 1) -> LoadResult:
        seconds = self.seconds * (20 if len(self.loads) == self.hiccup else 1)
        self.loads.append((arrivals, len(workload.requests), len(workload.warm_up), warm_up_at_once))
        self.prompts += [r.prompt.text for r in (*workload.warm_up, *workload.requests)]
        free, rows = [0.0] * self.slots, []
        users = [0.0] * getattr(arrivals, "concurrency", 0)
        for offset in arrivals.offsets(workload.requests) or [None] * len(workload.requests):
            at = heapq.heappop(users) if offset is None else offset
            begin = max(at, heapq.heappop(free))
            heapq.heappush(free, begin + seconds)
            if offset is None:
                heapq.heappush(users, begin + seconds)
            rows.append((at, [begin + seconds / 2 - at, begin + seconds - at], ""))
        rate, concurrency = getattr(arrivals, "rate", None), getattr(arrivals, "concurrency", None)
        client = ClientHealth([0.0], [0.0], cpu=0.99 if (rate or 0) > self.void_above else 0.1)
        return made(rows, rate=rate, concurrency=concurrency, slos=Slos(ttft=0.06), client=client)


def make(number: int, seed: int) -> Workload:
    return make_workload(Lengths((5, 5), (2, 2)), number, Sizing(), seed=seed, num_warm_up=0)


def find(served: Any, closed: bool = False, seconds: float = 4.0) -> SaturationSearch:
    return run(find_saturation(served, make, SearchPlan(closed, seconds)))


def values(search: SaturationSearch) -> list[float]:
    return [point.value for point in search.points]


def test_a_search_stops_at_saturation_and_finds_the_capacity():
    served = Served(4, 0.04)  # 100 requests per second
    search = find(served)
    assert search.stopped.startswith("saturated at rate"), search.stopped
    assert search.capacity is not None and search.saturated_at is not None
    assert values(search)[:4] == [12.5, 25, 50, 100]
    assert 70 < search.capacity < search.saturated_at and 100 <= search.saturated_at <= 200
    assert values(search).count(search.saturated_at) == 2, "measured twice"
    check_sections((saturation_section(search),))
    assert "saturated at" in saturation_verdicts(search)[0].text and "goodput" in saturation_verdicts(search)[1].text
    names = [metric.name for metric in saturation_metrics(search)]
    assert "capacity_rate" in names and len(set(names)) == len(names)
    json.dumps(saturation_data(search), allow_nan=False)
    for arrivals, _, warm, at_once in served.loads[1:]:
        assert warm == at_once == max(1, min(64, round(arrivals.rate * 0.04))), "warm at its own concurrency"
    assert len(set(served.prompts)) == len(served.prompts), "no prompt is sent twice"


def test_a_client_that_is_the_limit_saturates_no_server():
    """Void loads look saturated; they are neither served nor saturated."""
    search = find(Served(4, 0.04, void_above=30), seconds=2.0)
    assert "rate 50 cannot be told: the client was the limit" in search.stopped
    assert search.saturated_at is None and search.capacity == 25
    verdicts = saturation_verdicts(search)
    assert verdicts[0].status is Status.UNKNOWN and verdicts[-1].status is Status.VOID
    assert saturation_section(search).tables[0].rows[-1][-1] == "void"
    assert not [metric for metric in saturation_metrics(search) if metric.name.startswith("capacity")]


def test_a_load_that_seems_saturated_once_is_not():
    steady, disturbed = find(Served(4, 0.04)), find(Served(4, 0.04, hiccup=2))  # alone, 12.5, 25 (disturbed), 25, ...
    assert disturbed.saturated_at == steady.saturated_at and values(disturbed)[:4] == [12.5, 25, 25, 50]
    first, second = disturbed.points[1:3]
    assert "was not when measured again" in first.undecided and not first.saturated and second.served
    rows = saturation_section(disturbed).tables[0].rows
    assert any(row[-1].startswith("undecided: it seemed") for row in rows)


def test_a_closed_loop_stops_when_nothing_is_gained():
    search = find(Served(4, 0.04), closed=True)
    assert (search.capacity, search.saturated_at) == (4, 8), [(p.value, p.saturated) for p in search.points]
    assert "tokens/s, less than" in search.stopped
    check_sections((saturation_section(search),))

    class Uncounted(Served):
        async def __call__(self, *given: Any, **more: Any) -> LoadResult:
            result = await super().__call__(*given, **more)
            for one in result.observations:
                one.num_output_tokens = None
            return result

    search = find(Uncounted(4, 0.04), closed=True)
    assert search.saturated_at == 8 and "requests/s, less than" in search.stopped


def test_a_search_that_saturates_nothing_ends(monkeypatch):
    monkeypatch.setattr(saturation, "MAX_POINTS", 2)
    search = find(Served(8, 0.04), seconds=2.0)
    assert values(search) == [12.5, 25] and search.saturated_at is None and "none was saturated" in search.stopped
    assert saturation_verdicts(search)[0].status is Status.UNKNOWN

    async def fails(workload: Any, arrivals: Any) -> LoadResult:
        return made([(0.0, [], "http 500: x")])

    assert "no request succeeded alone (http 500)" in find(fails).stopped


def test_long_outputs_are_no_saturation(monkeypatch):
    """A server of endless slots whose requests take longer than the time asked for: sending goes on for longer."""
    monkeypatch.setattr(saturation, "MAX_POINTS", 3)
    served = Served(10_000, 60.0)
    search = find(served, seconds=10.0)
    assert "none was saturated" in search.stopped
    sent = [(arrivals.rate, number) for arrivals, number, _, _ in served.loads[1:]]
    assert all(number >= 300 * rate for rate, number in sent), "for five times a request's time"
    monkeypatch.setattr(saturation, "MAX_POINTS", 8)
    monkeypatch.setattr(saturation, "MAX_REQUESTS", 20)
    search = find(Served(10_000, 60.0), seconds=10.0)
    assert "cannot be told" in search.stopped and "less than 5 times" in search.stopped
    assert search.saturated_at is None


def test_the_search_of_the_command_on_the_real_clock(monkeypatch):
    class Steady(Instant):
        async def send(self, prompt: Any, max_tokens: int, intended: float) -> Observation:
            seen = await super().send(prompt, max_tokens, intended)
            return replace(seen, token_times=[intended + 0.01])

    monkeypatch.setattr(saturation, "MAX_POINTS", 1)
    monkeypatch.setattr(plan, "QUICK_SECONDS", 0.295)
    monkeypatch.setattr(ClientHealth, "faults", lambda *_: ())  # whatever else this machine is busy with
    parts = load_parts(Steady(), LoadOptions(saturate=True, max_concurrency=1, quick=True), lambda *_: None)
    (point,) = parts.data["points"]
    assert len(point["observations"]) == 30 and point["conditions"]["warm-up requests"].startswith("1 at once")
    assert parts.name == "saturation" and "none was saturated" in parts.verdicts[0].reason and parts.metrics


STEADY = every(0.1, 60, 0.05, 0.1)


def delayed(seconds: float) -> list[tuple[float, list[float], str]]:
    """Ten requests per second, each of which waits so much longer than the one before."""
    return [(i * 0.1, [0.05 + seconds * i, 0.1 + seconds * i], "") for i in range(60)]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (STEADY, ""),
        ([(at, times if i % 5 else [], "" if i % 5 else "http 429: full") for i, (at, times, _) in enumerate(STEADY)],
         "20% of the requests failed (12 x http 429)"),
        (delayed(0.007), "TTFT grows by 70 ms or more per second"),
        (delayed(0.001), ""),  # 10 ms more each second are no queue
        (delayed(0.1), "in the last two thirds, only"),
        ([(i * 0.1, [0.05 + 0.001 * min(i, 20), 0.5], "") for i in range(60)], ""),  # the first third fills the server
        ([(i * 0.1, [0.05 + 0.4 * (i % 7 == 0), 0.5], "") for i in range(60)], ""),  # outliers are no growth
    ],
)  # fmt: skip
def test_reasons_of_saturation(rows, reason):
    found = saturation_reason(made(rows))
    assert reason in found and bool(found) == bool(reason)


def test_when_nothing_can_be_told():
    assert "nothing was sent" in cannot_tell(made([]), 1.0)
    assert "less than 5 times" in cannot_tell(made(every(0.1, 60, 0.05, 4.0)), 4.0)
    assert not cannot_tell(made(STEADY), 0.1)
    failing = [(i * 0.1, [], "timeout: x") for i in range(60)]
    assert not cannot_tell(made(failing), 100.0), "failures tell, however short the time"
    assert cannot_tell(made(failing, client=ClientHealth(cpu=0.99)), 0.1) == "the client was the limit"
