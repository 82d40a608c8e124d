"""What a load reports against what a stub server did, and that a client which cannot keep up says so."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import time

import pytest

from bench.stub_server import RunningStub
from twinphase.bench.arrivals import Closed, Constant, Poisson, Traced
from twinphase.bench.client import run
from twinphase.bench.load import LoadFailedError, LoadLimits, run_load
from twinphase.bench.observation import Observation
from twinphase.bench.slo import Slos
from twinphase.bench.statistics import percentile
from twinphase.bench.target import Prompt, TargetFacts
from twinphase.bench.targets.openai import OpenAITarget
from twinphase.bench.workload import Lengths, LoadRequest, Sizing, Workload, make_workload
from twinphase.errors import InvalidRequestError

SLOW = {"first": 0.05, "gaps": [0.004] * 5, "tokens": [1, 1, 2, 1, 1, 1]}
STALLED = {"first": 0.02, "gaps": [0.004, 0.06, 0.004]}
QUICK = {"first": 0.02, "gaps": [0.004] * 4}


@pytest.fixture(scope="module")
def stub():
    running = RunningStub()
    yield running
    running.stop()


def requests(number, words=10):
    return make_workload(Lengths((words, words), (8, 8)), number, Sizing(), num_warm_up=0)


def load(stub, scripts, arrivals, slos=None, workload=None, limits=None, beside=None, timeout=5.0):
    """The result, and the stub's log."""

    async def work():
        stub.script({})
        target = await OpenAITarget.open(stub.url, timeout=timeout)
        stub.script(*scripts)
        other = asyncio.ensure_future(beside()) if beside else None
        result = await run_load(target, workload or requests(len(scripts)), arrivals, limits, slos)
        if other:
            other.cancel()
        return result

    result = run(work())
    return result, stub.log()


def near(shown, true, limit=1e-3):
    return abs(shown - true) < limit


def test_every_figure_of_a_load_is_right_within_a_millisecond(stub):
    scripts = [SLOW, STALLED, QUICK, QUICK, {"status": 429}, SLOW, {"end": "truncated", "gaps": [0.004]}, QUICK] * 3
    slos = Slos.parse(["ttft:40", "tpot:10"])
    held: set[str] = set()
    for _ in range(8):  # a machine that does other things too disturbs now this figure, now that one
        result, log = load(stub, scripts, Constant(60), slos)
        kinds = [
            ("SLOW", "STALLED", "QUICK")[[SLOW, STALLED, QUICK].index(s)]
            if "status" not in s and "end" not in s
            else ""
            for s in scripts
        ]
        good = [entry for entry, kind in zip(log, kinds, strict=True) if kind]
        seen = {o.request_id: o for o in result.succeeded}
        intended = [seen[f"stub-{i}"].intended for i, kind in enumerate(kinds) if kind]
        firsts = [entry["sent"][0] - moment for entry, moment in zip(good, intended, strict=True)]
        ends = [entry["sent"][-1] - moment for entry, moment in zip(good, intended, strict=True)]
        gaps = [b - a for entry in good for a, b in itertools.pairwise(entry["sent"])]
        tokens = [7 if kind == "SLOW" else 4 if kind == "STALLED" else 5 for kind in kinds if kind]
        tpots = [(e["sent"][-1] - e["sent"][0]) / (n - 1) for e, n in zip(good, tokens, strict=True)]
        assert result.num_output_tokens == sum(tokens)
        assert result.failures == {"http 429": 3, "truncated": 3}
        assert len(result.observations) == len(log) == 24 and len(result.itl) == len(gaps)
        pairs = {"ttft": (result.ttft, firsts), "tpot": (result.tpot, tpots), "itl": (result.itl, gaps)}
        pairs["e2e"] = (result.e2e, ends)
        checks = {
            f"{name} p{q}": near(percentile(shown, q), percentile(true, q))
            for name, (shown, true) in pairs.items()
            for q in (10, 50, 90, 95, 99)
        }
        seconds = max(entry.get("closed", entry["received"]) for entry in log) - result.observations[0].intended
        checks["seconds"] = near(result.seconds, seconds)
        checks["requests/s"] = near(result.request_rate, len(good) / seconds, 0.005 * len(good) / seconds)
        checks["tokens/s"] = near(result.output_rate, sum(tokens) / seconds, 0.005 * sum(tokens) / seconds)
        checks["not void"] = not result.void
        # By the stub's own delays: SLOW misses TTFT, STALLED misses TPOT, QUICK meets both.
        checks["goodput"] = result.goodput.missed == {"ttft": 6, "tpot": 3, "failed": 6} and result.goodput.good == 9
        held |= {name for name, holds in checks.items() if holds}
        if held == checks.keys():
            return
    raise AssertionError((checks.keys() - held, result.goodput, result.void, result.ttft, firsts))


def test_a_slow_server_slows_no_open_loop_down(stub):
    """Requests go out when they are due though none was answered: no coordinated omission."""
    result, log = load(stub, [{"first": 0.5}] * 10, Constant(100))
    sent = [one.sent for one in result.observations]
    assert sent[-1] - sent[0] < 0.3 < min(result.ttft)
    assert [one.intended - result.observations[0].intended for one in result.observations] == pytest.approx(
        [0.01 * i for i in range(10)]
    )


def test_a_closed_loop_keeps_so_many_in_flight(stub):
    result, log = load(stub, [{"first": 0.03, "gaps": [0.002] * 5}] * 12, Closed(3))
    moments = sorted([(e["received"], 1) for e in log] + [(e["closed"], -1) for e in log])
    in_flight = list(itertools.accumulate(step for _, step in moments))
    assert max(in_flight) == 3 and len(result.succeeded) == 12
    assert result.rate is None and result.concurrency == 3
    assert all(one.lag == 0 for one in result.observations), "each was sent when its connection was there"


def test_a_trace_is_sent_at_its_times(stub):
    times = [0.0, 0.05, 0.05, 0.2]
    workload = Workload(tuple(LoadRequest(Prompt("p" + " p" * n), 4, t) for n, t in enumerate(times, 1)))
    scripts = [{}, {"first": 0.04}, {}, {}]  # the second ends after the third
    result, log = load(stub, scripts, Traced(), workload=workload)
    assert [o.intended - result.observations[0].intended for o in result.observations] == pytest.approx(times)
    assert all(o.lag >= 0 for o in result.observations)
    sizes = [o.num_prompt_tokens for o in result.observations]
    assert sizes == [2, 3, 4, 5], "in the order of the workload where times are equal"


def test_a_blocked_event_loop_voids_the_run(stub):
    async def block():
        while True:
            time.sleep(0.04)  # what a client does that parses, logs or collects garbage in between
            await asyncio.sleep(0.05)

    result, _ = load(stub, [QUICK] * 20, Constant(50), beside=block)
    assert any("loop's lag" in fault for fault in result.void)


class Instant:
    """Answers at once: whatever is late is the client."""

    facts = TargetFacts("instant", "test", "none", "none", "unknown", None, "", "")

    async def send(self, prompt, max_tokens, intended):
        now = time.perf_counter()
        return Observation("", intended, now, [now], time.perf_counter(), 1, 0, 1, 200)

    async def close(self):
        pass


def test_more_than_the_client_can_send_voids_the_run(stub):
    result = run(run_load(Instant(), requests(5000), Constant(1e6)))
    assert any("sent late" in fault for fault in result.void)
    result, _ = load(stub, [QUICK] * 1500, Constant(20000), timeout=60)
    assert result.void, "neither by lag nor by CPU"


def test_too_many_in_flight_voids_the_run(stub):
    result, _ = load(stub, [{"first": 0.3}] * 10, Constant(200), limits=LoadLimits(max_in_flight=4))
    assert len(result.observations) == 4 and "6 requests were not sent" in result.void[-1]


def test_a_limit_of_time_ends_the_sending(stub):
    result, _ = load(stub, [{}] * 40, Constant(100), limits=LoadLimits(send_seconds=0.1))
    assert 8 <= len(result.observations) <= 12 and result.num_requests == 40 and not result.client.not_sent


def test_garbage_collection_is_off_in_the_measurement_and_on_after_it():
    seen = []

    class Watch(Instant):
        async def send(self, prompt, max_tokens, intended):
            seen.append(gc.isenabled())
            return await super().send(prompt, max_tokens, intended)

    assert gc.isenabled()
    run(run_load(Watch(), requests(3), Constant(1000)))
    assert seen == [False] * 3 and gc.isenabled()


def test_warm_up_is_sent_first_and_not_counted(stub):
    workload = make_workload(Lengths((5, 5), (4, 4)), 3, Sizing(), num_warm_up=2)
    result, log = load(stub, [{}] * 5, Constant(100), workload=workload)
    assert len(log) == 5 and len(result.observations) == 3
    with pytest.raises(LoadFailedError, match="http 500"):
        load(stub, [{"status": 500}], Constant(100), workload=workload)


def test_a_load_in_which_everything_fails(stub):
    result, _ = load(stub, [{"status": 503}] * 3, Constant(100), Slos.parse(["ttft:10"]))
    assert result.failures == {"http 503": 3} and not result.ttft and result.output_rate is None
    assert result.request_rate == 0 and result.goodput.rate == 0 and result.goodput.missed == {"failed": 3}


def test_poisson_is_seeded_and_has_its_rate():
    many = [LoadRequest(Prompt(""), 1)] * 20000
    offsets = Poisson(50, seed=3).offsets(many)
    gaps = [b - a for a, b in itertools.pairwise(offsets)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert offsets[0] == 0 and mean == pytest.approx(0.02, rel=0.03) and deviation == pytest.approx(mean, rel=0.05)
    assert offsets == Poisson(50, seed=3).offsets(many) != Poisson(50, seed=4).offsets(many)


@pytest.mark.parametrize(
    "make", [lambda: Poisson(0), lambda: Constant(math.inf), lambda: Constant(-1), lambda: Closed(0)]
)
def test_arrivals_that_make_no_sense(make):
    with pytest.raises(InvalidRequestError):
        make()


def test_a_workload_without_times_is_no_trace():
    with pytest.raises(InvalidRequestError, match="no timestamps"):
        Traced().offsets([LoadRequest(Prompt(""), 1)])
