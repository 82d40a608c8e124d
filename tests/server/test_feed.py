"""The feed of a running server: what it reports is what the answers report (docs/feed.md)."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from feed_reader import reading

CHAT = {"messages": [{"role": "user", "content": "one two three four five six"}]}
FIXED = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def chunked(start):
    """Its chunks are small, so that a prompt of some hundred tokens has several."""
    with start("--max-num-batched-tokens", "48", "--itl-slo-ms", "off") as running:
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
