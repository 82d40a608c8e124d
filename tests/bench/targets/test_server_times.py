"""What servers say of their own time, beside what the client saw of the same requests."""

import json

import pytest

from twinphase.bench.client.client import Reply, run
from twinphase.bench.load.arrivals import Closed
from twinphase.bench.load.run import run_load
from twinphase.bench.load.workload import Lengths, PromptMaker, Sizing, make_workload
from twinphase.bench.targets.openai import OpenAITarget
from twinphase.bench.targets.server_times import (
    MetricsReader,
    OllamaReader,
    claims_of,
    claims_reader,
    claims_section,
    read_counters,
    read_ollama,
)

METRICS = """# HELP vllm:time_to_first_token_seconds Histogram of time to first token.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{le="0.1",model_name="a b"}} 3.0
vllm:time_to_first_token_seconds_sum{{model_name="a",engine="0"}} {ttft}
vllm:time_to_first_token_seconds_count{{model_name="a",engine="0"}} {count}
vllm:time_to_first_token_seconds_sum{{model_name="b"}} 1.5
vllm:time_to_first_token_seconds_count{{model_name="b"}} 1
vllm:num_requests_running 3
vllm:request_queue_time_seconds_sum {queue}
vllm:request_queue_time_seconds_count {count}
vllm:e2e_request_latency_seconds_sum 4.0
vllm:e2e_request_latency_seconds_count 4
sglang:time_to_first_token_seconds_sum 99
"""
BEFORE, AFTER = METRICS.format(ttft=2.5, queue=0.25, count=3), METRICS.format(ttft=2.9, queue=0.35, count=13)
DECODE = "vllm:request_decode_time_seconds_sum {total}\nvllm:request_decode_time_seconds_count {count}\n"
LLAMA = {"prompt_n": 10, "prompt_ms": 15.0, "predicted_n": 5, "predicted_ms": 20.0, "predicted_per_token_ms": 4.0}
VLLM = {"v1__models": {"data": [{"id": "m", "owned_by": "vllm"}]}, "version": {"version": "1"}}
OLLAMA = {"v1__models": {"data": [{"id": "m", "owned_by": "library"}]}, "api__version": {"version": "0.12.1"}}


def load(stub, scripts, reader=None, **pages):
    async def work():
        stub.script({}, **pages)
        target = await OpenAITarget.open(stub.url)
        stub.script(*scripts, **pages)
        workload = make_workload(Lengths((10, 10), (5, 5)), len(scripts), Sizing(), num_warm_up=0)
        return await run_load(target, workload, Closed(1), claims=reader(target) if reader else None), target

    return run(work())


def counted(stub, before, after, scripts):
    """A load of a server whose counters stand at `before` when it begins, and at `after` when it ends."""

    class Counted(MetricsReader):
        async def after(self):
            stub.script({}, metrics=after)
            await super().after()

    pages = {**VLLM, **({"metrics": before} if before else {})}
    return load(stub, scripts, lambda target: Counted(target, "vllm"), **pages)


def told(result):
    return claims_section(result).paragraphs[0]


def test_llama_cpp_timings_stand_beside_ours(stub):
    result, _ = load(stub, [{"first": 0.03, "gaps": [0.005] * 4, "timings": LLAMA}] * 4)
    ttft, tpot = claims_of(result)
    assert (ttft.figure, ttft.theirs, ttft.source) == ("TTFT", 0.015, "timings.prompt_ms")
    assert ttft.ours >= 0.03 and ttft.difference == pytest.approx(ttft.ours - 0.015)
    assert (tpot.figure, tpot.theirs, tpot.statistic) == ("TPOT", 0.004, "median of 4")
    assert tpot.ours >= 0.005 and "divided by n" in tpot.definition
    (table,) = claims_section(result).tables
    assert table.rows[0][2] == "15.00" and all(len(row) == len(table.columns) for row in table.rows)


@pytest.mark.parametrize(
    ("where", "said", "figures"),
    [
        # Ours has llama.cpp's fields, too: they are not taken for llama.cpp's claims.
        (
            "timings",
            {"prompt_ms": 9.0, "predicted_per_token_ms": 9.0, "ttft_ms": 10.0, "tpot_ms": None, "e2e_ms": 20.0},
            [("TTFT", 10.0), ("E2E", 20.0)],
        ),
        (
            "metrics",
            {"queue_time_ms": 3.0, "time_to_first_token_ms": 11.0, "mean_itl_ms": 5.0, "generation_time_ms": 40.0},
            [("queue", 3.0), ("TTFT", 11.0), ("TPOT", 5.0), ("decode time", 40.0)],
        ),
    ],
)
def test_claims_in_replies_of_twinphase_and_vllm(stub, where, said, figures):
    result, _ = load(stub, [{"gaps": [0.001]}] * 2)
    for one in result.observations:
        one.claims[where] = said
    claims = claims_of(result)
    assert [(claim.figure, round(1e3 * claim.theirs, 6)) for claim in claims] == figures
    assert all((claim.ours is None) == (claim.figure == "queue") for claim in claims)


def test_a_server_without_claims_is_said_to_have_none(stub):
    result, target = load(stub, [{}])
    assert claims_of(result) == [] and claims_reader(target) is None and "makes none" in told(result)


def test_counters_are_summed_over_their_labels_and_must_be_numbers():
    found = read_counters(BEFORE, "vllm")
    assert found["time_to_first_token_seconds"] == (4.0, 4.0) and found["request_queue_time_seconds"] == (0.25, 3.0)
    assert "num_requests_running" not in found and read_counters("", "vllm") == {}
    assert read_counters("vllm:b_sum NaN\nvllm:b_count 1\nvllm:c_sum 1\nvllm:c_count 0\n", "vllm") == {"c": (1.0, 0.0)}


def test_means_come_from_what_was_counted_in_between(stub):
    result, target = counted(stub, BEFORE, AFTER, [{"first": 0.03}] * 3)
    ttft, queue = claims_of(result)
    assert ttft.theirs == pytest.approx(0.04) and ttft.statistic == "mean of 10 (ours of 3)"
    assert ttft.ours == pytest.approx(sum(result.ttft) / 3) and ttft.difference is None, "other requests"
    assert queue.figure == "queue" and queue.theirs == pytest.approx(0.01) and queue.ours is queue.difference is None
    assert isinstance(claims_reader(target), MetricsReader), "chosen by the server's kind"
    assert "cannot see" in claims_section(result).tables[0].rows[1][1]


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("", AFTER, "before the load"),  # they would be means over the server's whole life
        (BEFORE, "vllm:a_seconds_sum x\n", "cannot be read"),
    ],
)
def test_counters_that_cannot_be_compared_claim_nothing(stub, before, after, problem):
    result, _ = counted(stub, before, after, [{}])
    assert claims_of(result) == [] and problem in told(result)


def test_metrics_that_are_not_there_are_said_to_be_missing(stub):
    result, _ = load(stub, [{}], lambda target: MetricsReader(target, "sglang"))
    assert "http 404" in told(result)


@pytest.mark.parametrize(("count", "same"), [(2, True), (3, False), (7, False)])
def test_decode_time_is_averaged_over_requests_that_decode(stub, count, same):
    """As vLLM counts it: a request of one token has none; with its zero ours would be of another population."""
    scripts = [{"gaps": [0.01] * 4}, {"gaps": [0.01] * 4}, {"gaps": []}]
    result, _ = counted(stub, DECODE.format(total=0, count=0), DECODE.format(total=0.08, count=count), scripts)
    [found] = claims_of(result)
    times = [one.token_times[-1] - one.token_times[0] for one in result.succeeded]
    assert found.figure == "decode time" and found.ours == pytest.approx(sum(times) / 2)
    assert found.statistic == f"mean of {count}" + ("" if same else " (ours of 2)")
    assert found.difference == (pytest.approx(found.ours - 0.04) if same else None)


@pytest.mark.parametrize("page", ["<html>", '{"response": "a"}\n{"bro', "[1]\n", '{"error": "no memory"}\n', None])
def test_an_answer_of_ollama_that_is_none_loses_no_load(stub, page):
    """It is read when the load was measured: an error of it is told, and nothing is raised."""
    prompts, pages = PromptMaker(Sizing(), seed=9), {} if page is None else {"api__generate": page}
    result, _ = load(stub, [{}], lambda target: OllamaReader(target, prompts), **pages)
    assert len(result.succeeded) == 1 and claims_of(result) == []
    assert ("fails: http 404" if page is None else "cannot be read") in told(result)


def test_ollama_is_asked_by_its_own_api(stub):
    lines = [
        {"response": "a", "done": False},
        {"response": "b", "done": False},
        {"response": "", "done": True, "prompt_eval_count": 9, "eval_count": 2, "prompt_eval_duration": 7_000_000}
        | {"eval_duration": 6_000_000, "total_duration": 20_000_000, "load_duration": 1},
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    reply = Reply(1.0, sent=1.0, ended=1.5, status=200, pieces=[(1.2, data[:30]), (1.3, data[30:60]), (1.5, data[60:])])
    seen = read_ollama(reply)
    assert len(seen.token_times) == 2 and (seen.num_prompt_tokens, seen.num_output_tokens) == (9, 2)
    assert seen.claims["ollama"] == {
        **{"prompt_eval_ms": 7.0, "eval_ms": 6.0, "total_ms": 20.0, "load_ms": 1e-6, "eval_per_token_ms": 3.0}
    }
    prompts = PromptMaker(Sizing(), seed=9)
    pages = {**OLLAMA, "api__generate": data.decode()}
    result, _ = load(stub, [{}], lambda target: claims_reader(target, prompts), **pages)
    ttft, tpot, e2e = claims_of(result)
    assert (ttft.theirs, tpot.theirs, e2e.theirs) == pytest.approx((0.007, 0.003, 0.02))
    assert "native API" in ttft.source and ttft.statistic == "median of 3" and ttft.ours > 0
