"""What a load reports against what a stub server did; a client that cannot keep up says so."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import math
import os
import resource
import socket
import time

import pytest

from bench.attempts import check_errors, moment_errors
from bench.load.made_load import FACTS, Instant, opened, requests, stream, text, usage
from twinphase.errors import InvalidRequestError
from twinphase.phases.slo import Slos
from twinphase.workload.distributions import Closed, Lengths, Paced, Traced
from twinphase_bench.client.client import Address, Reply, exchange, run
from twinphase_bench.client.health import ClientHealth, lags_of_stamps
from twinphase_bench.client.sse import failure_kind, observe
from twinphase_bench.load.plan import LoadOptions, load_parts
from twinphase_bench.load.report import load_data
from twinphase_bench.load.run import LoadFailedError, LoadResult, run_load
from twinphase_bench.load.workload import LoadRequest, Sizing, Workload, make_workload
from twinphase_bench.targets.target import Prompt

SLOW = {"first": 0.05, "gaps": [0.004] * 5, "tokens": [1, 1, 2, 1, 1, 1]}
STALLED = {"first": 0.02, "gaps": [0.004, 0.06, 0.004]}
QUICK = {"first": 0.02, "gaps": [0.004] * 4}


def load(stub, scripts, arrivals, workload=None, beside=None, **options):
    """The result, and the stub's log."""

    target = opened(stub, *scripts, timeout=60.0)

    async def work():
        other = asyncio.ensure_future(beside()) if beside else None
        result = await run_load(target, workload or requests(len(scripts)), arrivals, **options)
        if other:
            other.cancel()
        return result

    return run(work()), stub.log()


# What is counted and not measured is wrong by this much, or right: no limit above lies closer to
# what the stub does.
MARGIN = 0.006


@pytest.mark.slow
def test_every_figure_of_a_load_is_right_within_a_millisecond(stub):
    scripts = [
        SLOW,
        STALLED,
        QUICK,
        QUICK,
        {"status": 429},
        SLOW,
        {"end": "truncated", "gaps": [0.004]},
        QUICK,
    ]
    slos = Slos.parse(["ttft:40", "tpot:10"])
    tokens = [7, 4, 5, 5, 7, 5]  # of those that succeed

    def errors(number):
        result, log = load(stub, scripts, Paced(60, even=True), slos=slos)
        assert result.num_output_tokens == sum(tokens) and result.failures == {
            "http 429": 1,
            "truncated": 1,
        }
        assert len(result.observations) == len(log) == 8
        wrong = {}
        for seen in result.succeeded:
            found = moment_errors(seen, log[int(seen.request_id.removeprefix("stub-"))])
            wrong |= {f"{name} of {seen.request_id}": seconds for name, seconds in found.items()}
        seconds = (
            max(entry.get("closed", entry["received"]) for entry in log)
            - result.observations[0].intended
        )
        wrong["seconds"] = abs(result.seconds - seconds)
        wrong["requests/s"] = abs(len(result.succeeded) / result.request_rate - seconds)
        wrong["tokens/s"] = abs(sum(tokens) / result.output_rate - seconds)
        wrong["not void"] = MARGIN * bool(result.void)
        # By the stub's own delays: SLOW misses TTFT, STALLED misses TPOT, QUICK meets both.
        missed = {"ttft": 2, "tpot": 1, "failed": 2}
        wrong["goodput"] = MARGIN * (result.goodput.missed != missed or result.goodput.good != 3)
        return wrong

    check_errors(errors, stub.process.pid)


def test_figures_of_recorded_replies_are_exact():
    """No clock is involved: given times have exactly one right result."""

    def recorded(sent, after, tokens, ended):
        moments = [sent + seconds for seconds in itertools.accumulate(after)]
        words = [text(" word" * number) for number in tokens]
        end = [text("", "length"), usage(sum(tokens))]
        reply = stream(*words, *end, sent=sent, moments=[*moments, moments[-1], moments[-1]])
        return observe(dataclasses.replace(reply, ended=ended))

    seen = [
        recorded(10.0, [0.5, 0.25, 0.25], [1, 1, 1], 11.0),
        recorded(10.25, [0.25, 0.5], [1, 3], 11.0),
        recorded(10.5, [1.0, *[0.125] * 4], [1] * 5, 12.0),
        observe(Reply(11.0, sent=11.0, ended=11.5, error="connection refused: x")),
    ]
    result = LoadResult(
        FACTS, "", "", 4.0, None, seen, 4, ClientHealth(), Slos.parse(["ttft:600", "tpot:200"])
    )
    assert result.ttft == [0.5, 0.25, 1.0] and result.e2e == [1.0, 0.75, 1.5]
    assert result.tpot == [0.25, 0.5 / 3, 0.125] and result.itl == [0.25, 0.25, 0.5, *[0.125] * 4]
    assert result.seconds == 2.0 and result.request_rate == 1.5 and result.output_rate == 6.0
    assert (
        result.total_rate == 13.5
        and result.offered == 3.0
        and result.failures == {"connection refused": 1}
    )
    assert result.goodput.good == 1 and result.goodput.missed == {"tpot": 1, "ttft": 1, "failed": 1}


def test_what_voids_a_run_depends_on_what_is_measured():
    lags = [0.009] * 100
    assert "sent late: 100 of 100" in ClientHealth(lags).faults(0.02, 0.05)[0], (
        "9 ms of a TTFT of 20 ms"
    )
    assert "stamped late" in ClientHealth([], lags).faults(0.5, 0.002)[0], (
        "9 ms between tokens of 2 ms"
    )
    assert not ClientHealth(lags, lags).faults(0.5, 0.05) and ClientHealth(lags, lags).faults(
        math.nan, math.nan
    )
    assert not ClientHealth([0.0009] * 9, [0.0019] * 9).faults(1e-4, 1e-4), "what a timer does"
    assert not ClientHealth([0.3] + [0.0] * 30, [0.3] * 4 + [0.0] * 96).faults(0.02, 0.002), (
        "one hiccup"
    )
    assert ClientHealth([0.3] * 3 + [0.0] * 27).faults(0.02, 0.002) and ClientHealth(
        [0.3] * 2
    ).faults(0.02, 0.002)
    assert (
        "no more open files" in ClientHealth(refused={"no more open files": 3}).faults(1.0, 1.0)[0]
    )


def test_a_stamp_counts_with_the_heartbeat_of_its_time():
    beats = [(1.0, 1.0), (1.01, 1.045), (1.055, 1.055)]  # blocked for 35 ms
    stamps = [0.5, 1.005, 1.045, 1.045, 1.045, 1.045, 1.06]
    lags = lags_of_stamps(beats, stamps)
    assert (
        lags == pytest.approx([0, 0, 0.035, 0.025, 0.015, 0.005, 0])
        and lags_of_stamps([], stamps) == []
    )


def test_a_connection_that_the_server_takes_late_is_no_lag_of_the_client():
    class SlowToConnect(Instant):
        async def send(self, prompt, max_tokens, intended):
            seen = await super().send(prompt, max_tokens, intended)
            late = len(self.asked) % 2 == 0
            sent = intended + (0.5 if late else 0.0)
            return dataclasses.replace(
                seen, sent=sent, token_times=[intended + 0.6], connected_late=late
            )

    result = run(run_load(SlowToConnect(), requests(10), Paced(200, even=True)))
    assert (
        not any("sent late" in fault for fault in result.void) and result.client.connected_late == 5
    )
    assert max(result.ttft) == pytest.approx(0.6), "it is in the latency all the same"


def test_connecting_late_is_told_from_asking_late(stub):
    def ask(address, lead):
        async def work():
            due = time.perf_counter() + lead
            return await exchange(
                address, address.head("GET", "/v1/models", {}, 0), intended=due, timeout=0.4
            )

        return run(work())

    address = Address.parse(stub.url)
    in_time = (not ask(address, 0.2).connected_late for _ in range(20))
    assert any(in_time), "unless the machine does other things for all that time"
    assert not ask(address, -0.1).connected_late, (
        "the client asked for the connection too late itself"
    )
    with contextlib.ExitStack() as sockets:
        full = sockets.enter_context(
            socket.create_server(("127.0.0.1", 0), backlog=0)
        )  # nobody takes what waits there
        for _ in range(4):
            one = sockets.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        reply = ask(Address.parse(f"127.0.0.1:{full.getsockname()[1]}"), 0.1)
    assert (
        reply.connected_late
        and failure_kind(reply.error) == "timeout"
        and observe(reply).connected_late
    )


@pytest.mark.parametrize("arrivals", [Paced(500, even=True), Closed(2)])
@pytest.mark.parametrize("step", ["send", "read"])
def test_one_exception_loses_one_request(stub, arrivals, step):
    """The target raises by mistake, or its reply cannot be parsed."""

    target = opened(stub) if step == "read" else Instant()
    original = getattr(target, step)
    calls = itertools.count()

    def fails_once(*given):
        if next(calls) == 2:
            raise ZeroDivisionError("of the target")
        return original(*given)

    setattr(target, step, fails_once)
    result = run(run_load(target, requests(6), arrivals))
    assert len(result.succeeded) == 5 and result.failures == {"exception": 1}
    assert "ZeroDivisionError: of the target" in " ".join(one.error for one in result.observations)


def test_too_few_files_are_the_fault_of_the_client(stub):
    """EMFILE is an error of this process: the server is not blamed, and the run is void."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 80
    scripts = [{"first": 0.8}] * 100
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        assert not load(stub, scripts, Paced(2000, even=True))[0].failures, "the limit was raised"
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                resource, "setrlimit", lambda *_: (_ for _ in ()).throw(ValueError("not allowed"))
            )
            result, _ = load(stub, scripts, Paced(2000, even=True))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert result.failures["client limit"] > 5 and any(
        "ulimit -n" in fault for fault in result.void
    )


def test_repetitions_have_prompts_and_gaps_of_their_own():
    target = Instant()
    options = LoadOptions(
        request_rate=500.0,
        num_prompts=5,
        random_input_len=12,
        random_output_len=8,
        repetitions=3,
        seed=4,
    )
    parts = load_parts(target, options, lambda *_: None)
    runs = [parts.data, *parts.data["further runs"]]
    assert [len(run["observations"]) for run in runs] == [5] * 3
    assert len(dict(target.asked)) == len(target.asked) == 3 * (5 + 3), "warm-up requests included"
    gaps = {run["observations"][1]["intended"] - run["observations"][0]["intended"] for run in runs}
    assert len(gaps) == 3, "the gaps are drawn anew"


def test_a_trace_with_texts_of_its_own_is_not_repeated(tmp_path):
    turns = [{"value": "what is a prefix"}, {"value": "a start"}]
    (tmp_path / "trace.json").write_text(json.dumps([{"conversations": turns}]))
    options = LoadOptions(trace=tmp_path / "trace.json", max_concurrency=1, repetitions=2)
    with pytest.raises(InvalidRequestError, match="--repetitions of a trace"):
        load_parts(Instant(), options, lambda *_: None)


def test_an_infinite_rate_sends_all_at_once():
    result = run(run_load(Instant(), requests(5), Paced(math.inf)))
    assert (
        len({one.intended for one in result.observations}) == 1
        and result.rate is None
        and result.offered is None
    )
    assert (
        result.arrivals == str(Paced(math.inf, even=True)) == "open loop, all at once"
        and len(result.succeeded) == 5
    )
    json.dumps(load_data(result), allow_nan=False)


def test_a_slow_server_slows_no_open_loop_down(stub):
    """Requests go out when they are due though none was answered: no coordinated omission."""
    for seconds in (0.5, 1, 2, 4, 8):  # longer than the machine does other things
        result, log = load(stub, [{"first": seconds}] * 10, Paced(100, even=True))
        sent = [one.sent for one in result.observations]
        if sent[-1] < log[0]["sent"][0]:
            break
    else:
        raise AssertionError((sent, log))
    assert min(result.ttft) > 0.5
    assert [
        one.intended - result.observations[0].intended for one in result.observations
    ] == pytest.approx([0.01 * i for i in range(10)])


def test_a_closed_loop_keeps_so_many_in_flight(stub):
    result, log = load(stub, [{"first": 0.03, "gaps": [0.002] * 5}] * 12, Closed(3))
    moments = sorted([(e["received"], 1) for e in log] + [(e["closed"], -1) for e in log])
    in_flight = list(itertools.accumulate(step for _, step in moments))
    assert max(in_flight) == 3 and len(result.succeeded) == 12
    assert result.rate is None and result.concurrency == 3
    assert all(one.lag == 0 for one in result.observations), (
        "each was sent when its connection was there"
    )


def test_a_trace_is_sent_at_its_times(stub):
    times = [0.0, 0.05, 0.05, 0.2]
    workload = Workload(
        tuple(LoadRequest(Prompt("p" + " p" * n), 4, t) for n, t in enumerate(times, 1))
    )
    scripts = [{}, {"first": 0.04}, {}, {}]  # the second ends after the third
    result, log = load(stub, scripts, Traced(), workload=workload)
    assert [
        o.intended - result.observations[0].intended for o in result.observations
    ] == pytest.approx(times)
    assert all(o.lag >= 0 for o in result.observations)
    sizes = [o.num_prompt_tokens for o in result.observations]
    assert sizes == [2, 3, 4, 5], "in the order of the workload where times are equal"


def test_a_blocked_event_loop_voids_the_run(stub):
    async def block():
        while True:
            time.sleep(0.04)  # what a client does that parses, logs or collects garbage in between
            await asyncio.sleep(0.05)

    result, _ = load(stub, [QUICK] * 20, Paced(50, even=True), beside=block)
    assert any("loop's lag" in fault for fault in result.void)


def test_more_than_the_client_can_send_voids_the_run():
    result = run(run_load(Instant(), requests(5000), Paced(1e6, even=True)))
    assert any("sent late" in fault for fault in result.void)


def test_a_client_that_never_rests_voids_the_run(stub):
    async def compute():
        while True:
            until = time.perf_counter() + 0.01
            while time.perf_counter() < until:
                pass
            await asyncio.sleep(0)

    result, _ = load(stub, [QUICK] * 20, Paced(50, even=True), beside=compute)
    # By its processor time; or, where others left it less than that of a core, by what came late
    # for it.
    assert any("of a core" in fault or "late" in fault for fault in result.void)


def test_too_many_in_flight_voids_the_run(stub, monkeypatch):
    monkeypatch.setattr("twinphase_bench.load.run.MAX_IN_FLIGHT", 4)
    result, _ = load(stub, [{"first": 1.0}] * 10, Paced(200, even=True))
    assert len(result.observations) == 4 and "6 requests were not sent" in result.void[-1]


def test_garbage_collection_is_off_in_the_measurement_and_on_after_it():
    target = Instant()
    run(run_load(target, requests(3), Paced(1000, even=True)))
    assert [collecting for _, collecting in target.asked] == [False] * 3 and gc.isenabled()


def test_warm_up_is_sent_first_and_not_counted(stub):
    workload = make_workload(Lengths((5, 5), (4, 4)), 3, Sizing(), num_warm_up=2)
    result, log = load(stub, [{}] * 5, Paced(100, even=True), workload=workload)
    assert len(log) == 5 and len(result.observations) == 3
    with pytest.raises(LoadFailedError, match="http 500"):
        load(stub, [{"status": 500}], Paced(100, even=True), workload=workload)


def test_poisson_is_seeded_and_has_its_rate():
    many = [None] * 20000
    offsets = Paced(50, seed=3).offsets(many)
    gaps = [b - a for a, b in itertools.pairwise(offsets)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert (
        offsets[0] == 0
        and mean == pytest.approx(0.02, rel=0.03)
        and deviation == pytest.approx(mean, rel=0.05)
    )
    assert offsets == Paced(50, seed=3).offsets(many) != Paced(50, seed=4).offsets(many)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Paced(0), "--request-rate"),
        (lambda: Paced(math.nan, even=True), "--request-rate"),
        (lambda: Paced(-1, even=True), "--request-rate"),
        (lambda: Closed(0), "--max-concurrency"),
        (lambda: Traced().offsets([None]), "no timestamps"),
    ],
)
def test_arrivals_that_make_no_sense(make, told):
    with pytest.raises(InvalidRequestError, match=told):
        make()
