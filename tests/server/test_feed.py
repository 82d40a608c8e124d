"""The feed of a running server: what it reports is what the answers report (docs/feed.md)."""

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from dialects import bearer
from feed_reader import PATH, Reader, reading
from running import PATIENCE
from twinphase.cli import run_app
from twinphase.server.live.recording import read_recording

CHAT = {"messages": [{"role": "user", "content": "one two three four five six"}]}
FIXED = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def step_log(tmp_path_factory):
    return tmp_path_factory.mktemp("log") / "steps.jsonl"


@pytest.fixture(scope="module")
def chunked(start, step_log):
    """Its chunks are small, so that a prompt of some hundred tokens has several."""
    flags = ("--max-num-batched-tokens", "48", "--itl-slo-ms", "off")
    with start(*flags, "--trace-file", str(step_log)) as running:
        yield running


def test_an_answer_is_what_the_feed_reports_digit_for_digit(chunked):
    body = {**FIXED, "prompt": "hello world " * 60}
    with reading(chunked) as reader:
        hello = reader.until("hello")
        status, answer = chunked.post("/v1/completions", body)
        assert status == 200
        reader.until_ended()
    assert hello["format"] == "twinphase-recording" and hello["version"] == 1
    assert hello["lanes"] == [] and hello["workers"][0]["id"] == "engine"
    timings = answer["timings"]
    lane = reader.lane_of(answer["id"])
    number = lane["lane"]
    assert lane["own"] and lane["prompt"] == answer["usage"]["prompt_tokens"]
    assert lane["cached"] == timings["cache_n"] and lane["finish"] == "length"
    shown = {**timings, "prompt_parts": lane["timings"].get("prompt_parts")}
    assert {**lane["timings"], "prompt_parts": shown["prompt_parts"]} == shown
    steps = reader.steps()
    chunks = [(i, c) for i, step in steps.items() for c in step["pre"] if c[0] == number]
    ticks = [(i, d) for i, step in steps.items() for d in step["dec"] if d[0] == number]
    assert len(chunks) > 3 and sum(c[1] for _, c in chunks) == timings["prompt_n"]
    assert [c[3:] for _, c in chunks] == [[]] * (len(chunks) - 1) + [[1]]
    assert 1 + sum(d[1] for _, d in ticks) == answer["usage"]["completion_tokens"]

    status, timeline = chunked.get(f"/v1/requests/{lane['id']}/timeline")
    assert status == 200
    assert [one["step"] for one in timeline["intervals"] if one["kind"] == "prefill"] == [
        index for index, _ in chunks
    ]
    for interval in timeline["intervals"]:
        if interval["kind"] == "prefill":
            step = steps[interval["step"]]
            own = next(c[2] for c in step["pre"] if c[0] == number)
            start = lane["arrival"] + interval["start_ms"]
            assert start == pytest.approx(step["start"], abs=2e-3)
            length = interval["end_ms"] - interval["start_ms"]
            assert length == pytest.approx(own + step["bookkeeping_ms"], abs=3e-3)


def test_a_stall_is_what_the_ledger_says_and_names_the_lane_that_caused_it(chunked):
    with reading(chunked) as reader, ThreadPoolExecutor() as pool:
        reader.until("hello")
        body = {**FIXED, "prompt": "wait", "max_tokens": 600}
        waiter = pool.submit(chunked.post, "/v1/completions", body)
        reader.until("lane", state="running")
        chunked.post("/v1/completions", {**FIXED, "prompt": "why not now " * 100, "max_tokens": 2})
        answer = waiter.result()[1]
        reader.until_ended(2)
    lane = reader.lane_of(answer["id"])
    (other,) = {one["lane"] for one in reader.of("lane")} - {lane["lane"]}
    steps = reader.steps()
    mine = {i: s for i, s in steps.items() if any(d[0] == lane["lane"] for d in s["dec"])}
    stalled = {i: s for i, s in mine.items() if s["pre"]}
    assert len(stalled) > 3
    assert all([chunk[0] for chunk in step["pre"]] == [other] for step in stalled.values())
    _, timeline = chunked.get(f"/v1/requests/{lane['id']}/timeline")
    stalls = {one["step"]: one for one in timeline["intervals"] if one["kind"] == "stall"}
    assert stalls.keys() == stalled.keys()
    for index, stall in stalls.items():
        step = stalled[index]
        assert stall["prefill_tokens"] == sum(chunk[1] for chunk in step["pre"])
        start = step["start"] + step["decode_ms"] - lane["arrival"]
        assert stall["start_ms"] == pytest.approx(start, abs=3e-3)
    spent = sum(s["duration_ms"] - s["decode_ms"] + s["bookkeeping_ms"] for s in stalled.values())
    assert spent == pytest.approx(lane["timings"]["ledger_ms"]["stall"], abs=2e-3 * len(stalled))


def test_blocks_add_up_and_belong_to_the_lanes_that_list_them(chunked):
    """Replayed, the changes of blocks give the totals that came with them."""
    with reading(chunked) as reader:
        reader.until("hello")
        for _ in range(2):  # the second one shares cached blocks
            chunked.post("/v1/completions", {**FIXED, "prompt": "as before " * 80})
        reader.until_ended(2)
        reader.until("totals")
    held: dict[int, list[int]] = {}
    cached: set[int] = set()
    for event in reader.of("blocks"):
        if event.get("whole"):
            held.clear()
            cached.clear()
        for lane, kept, spans in event["lanes"]:
            ids = [block for first, count in spans for block in range(first, first + count)]
            held[lane] = held.get(lane, [])[:kept] + ids
        for name in ("cached", "freed"):
            ids = {b for first, count in event[name] for b in range(first, first + count)}
            cached = cached | ids if name == "cached" else cached - ids
        owners = Counter(block for blocks in held.values() for block in blocks)
        cached -= owners.keys()
        assert event["held"] == len(owners) and event["num_cached"] == len(cached)
        assert event["shared"] == sum(count > 1 for count in owners.values())
    assert any(event["lanes"] for event in reader.of("blocks"))
    assert reader.of("totals")[-1]["prefix_hits"] > 0
    assert reader.lane(reader.of("lane")[-1]["lane"])["cached"] > 0


def test_the_step_log_replayed_is_a_recording_of_the_same_steps(chunked, step_log, tmp_path):
    with reading(chunked) as reader:
        reader.until("hello")
        answer = chunked.post("/v1/completions", {**FIXED, "prompt": "over and over " * 50})[1]
        reader.until_ended()
    path = tmp_path / "replayed.jsonl"
    assert run_app(["replay", str(step_log), "--out", str(path)]) == 0
    recorded = Reader.of_lines(path.read_text().splitlines())
    assert read_recording(path).num_steps == len(recorded.steps())
    live, logged = (one.steps_of(answer["id"]) for one in (reader, recorded))
    assert len(live) == len(logged) > 10
    for one, other in zip(live, logged, strict=True):
        assert [c[1:] for c in one["pre"]] == [pytest.approx(c[1:], abs=2e-3) for c in other["pre"]]
        assert [d[1:] for d in one["dec"]] == [d[1:] for d in other["dec"]]
        for name in ("duration_ms", "predicted_ms", "decode_ms"):
            assert one[name] == pytest.approx(other[name], abs=2e-3)
        passed = one["start"] - live[0]["start"]
        assert passed == pytest.approx(other["start"] - logged[0]["start"], abs=3e-3)
    assert recorded.lane_of(answer["id"])["finish"] == "length"
    assert b"over" not in path.read_bytes()


def test_an_answer_that_its_client_leaves_ends_with_its_ledger_so_far(chunked):
    body = {**FIXED, "prompt": "leave", "max_tokens": 3000, "stream": True}
    with reading(chunked) as reader:
        reader.until("hello")
        url = chunked.url + "/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as stream:
            next(stream.iter_lines())
        reader.until("lane", state="ended", finish="abort")
        timings = reader.until("lane")["timings"]
    assert timings["predicted_n"] > 0 and timings["ttft_ms"] > 0
    assert sum(timings["ledger_ms"].values()) == pytest.approx(timings["e2e_ms"], abs=0.1)


def test_a_reader_needs_a_key_and_sees_its_own_requests(shared):
    assert shared.get(PATH)[0] == 401
    with reading(shared, **bearer("alice")) as reader:
        hello = reader.until("hello")
        assert (hello["tenant"], hello["others"]) == ("key1", "lanes")
        shared.post("/v1/completions", {**FIXED, "prompt": "mine"}, **bearer("bob"))
        reader.until("lane", state="ended")
        shared.post("/v1/completions", {**FIXED, "prompt": "mine"}, **bearer("alice"))
        reader.until_ended()
    theirs, mine = (
        reader.lane(number) for number in sorted({e["lane"] for e in reader.of("lane")})
    )
    assert not theirs["own"] and mine["own"]
    assert not theirs.keys() & {"id", "timings", "arrival", "why", "route"}


def test_replicas_are_workers_on_one_clock(replicas):
    with reading(replicas) as reader, ThreadPoolExecutor() as pool:
        hello = reader.until("hello")
        bodies = [{**FIXED, "prompt": f"{i} is a number", "max_tokens": 60} for i in range(4)]
        list(pool.map(lambda body: replicas.post("/v1/completions", body), bodies))
        reader.until_ended(4)
    assert [worker["id"] for worker in hello["workers"]] == ["worker-0", "worker-1"]
    lanes = [reader.lane(number) for number in {e["lane"] for e in reader.of("lane")}]
    assert {lane["worker"] for lane in lanes} == {0, 1}
    for lane in lanes:
        assert lane["route"] and lane["timings"]["predicted_n"] == 60
        steps = reader.steps(lane["worker"]).values()
        assert sum(d[1] for step in steps for d in step["dec"] if d[0] == lane["lane"]) == 59
        for step in steps:
            if any(d[0] == lane["lane"] for d in step["dec"]):
                assert lane["arrival"] < step["start"] < step["end"] <= lane["at"] + 1e-3


def test_blocks_that_travel_between_pools_are_a_transfer(start):
    flags = ("--prefill-workers", "1", "--decode-workers", "1", "--threads-per-worker", "1")
    path = Path(__file__).parent / "always_moves"
    with start(*flags, path=path) as server, reading(server) as reader:
        hello = reader.until("hello")
        body = {**FIXED, "prompt": "far away " * 300, "max_tokens": 30}
        answer = server.post("/v1/completions", body)[1]
        reader.until_ended()
        lane = reader.lane_of(answer["id"])
        roles = [worker["role"] for worker in hello["workers"]]
        states = [e["state"] for e in reader.of("lane") if "state" in e]
        assert states == ["queued", "running", "transfer", "queued", "running", "ended"]
        assert roles[lane["worker"]] == "decode" and lane["transfer"]["to"] == lane["worker"]
        assert lane["transfer"]["start"] < lane["transfer"]["end"]
        assert lane["transfer"]["stored"] == lane["transfer"]["blocks"] > 10
        first = reader.steps(roles.index("prefill")).values()
        assert sum(p[1] for step in first for p in step["pre"]) == lane["prompt"]


def test_an_engine_that_dies_ends_its_lanes_and_the_stream_begins_again(start):
    with start() as server, reading(server) as reader, ThreadPoolExecutor() as pool:
        first = reader.until("hello")
        body = {**FIXED, "prompt": "last words", "max_tokens": 4000}
        broken = pool.submit(server.post, "/v1/completions", body)
        reader.until("lane", state="running")
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert reader.until("lane", state="ended")["finish"] is None
        assert broken.result()[0] == 503
        again = reader.until("hello")
        assert again["boot"] != first["boot"] and again["lanes"] == []
        assert server.post("/v1/completions", {**FIXED, "prompt": "alive"})[0] == 200
        reader.until_ended()
        assert reader.events[-1]["event_id"].startswith(again["boot"])
        # The server's end is the stream's end.
        os.kill(server.process.pid, signal.SIGTERM)
        assert all(event["event"] in ("totals", "blocks") for event in reader)
