import re
from dataclasses import replace
from itertools import cycle

import pytest
from typer.main import get_command

from made_up import KV_BYTES, PRICES
from made_up import made_up_machine as make_machine
from twinphase.backends.cpu.backend import CpuBackend
from twinphase.backends.reference import ReferenceBackend
from twinphase.batch import StepWork
from twinphase.cli import app
from twinphase.explain.explanation import explain
from twinphase.outcome import MissReason, PrefixMiss
from twinphase.phases.cost import CostModel
from twinphase.phases.timeline import IntervalKind, RequestTimeline, StepRecord
from twinphase.phases.work import Cost
from twinphase.request import RequestCounts

NONE = Cost()


def make_request(**fields):
    return RequestCounts(**{"request_id": "me", "num_prompt_tokens": 100, **fields})


def step(index, start, end, prefill_tokens=0, ids=(), decode=NONE, prefill=NONE):
    return StepRecord(index, start, end, prefill_tokens, 1, prefill, decode, ids, 1)


def lived(
    *,
    queue=0.0,
    reason="",
    decode_steps=10,
    own=0.004,
    decodes=0.004,
    length=0.004,
    tokens=0,
    ids=(),
    read=0,
):
    """A request that queued, prefilled 10 ms, then decoded beside `tokens` others; `read` bytes."""
    timeline = RequestTimeline(arrival=0.0)
    timeline.extend(IntervalKind.QUEUE, queue, reason)
    at = queue
    timeline.add_prefill(step(0, at, at + 0.01), 100, 0.01, again=False)
    at += 0.01
    timeline.hand_over_tokens(1, at)
    for index in range(decode_steps):
        record = step(index + 1, at, at + length, tokens, ids, Cost(10, 0, read))
        timeline.add_decode(record, 1, own, decodes)
        at += length
        timeline.hand_over_tokens(1, at)
    return timeline


def test_seats_are_named_with_what_more_of_them_would_cost():
    found = explain(make_request(), lived(queue=1.0, reason="seats"), make_machine(max_num_seqs=8))
    assert found.dominant is IntervalKind.QUEUE
    lever = found.levers[0]
    assert lever.flag == "--max-num-seqs" and "--max-num-seqs 16" in lever.advice
    model = CostModel(PRICES)
    then = model.seconds(StepWork(16, 0, 16 * 100, 16, 16))
    assert f"{1e3 * then:.1f} ms" in lever.advice
    assert "all 8 seats" in found.sentences[1]


@pytest.mark.parametrize(("tokens", "named"), [(1000, True), (20, False)])
def test_a_path_that_computes_long_prompts_faster_is_named_for_those(tokens, named):
    machine = replace(make_machine(), prompt_isa="avx512-amx-bf16")
    found = explain(make_request(num_prompt_tokens=tokens), lived(decode_steps=0), machine)
    assert found.levers[0].flag == "prompt"
    assert ("--isa avx512-amx-bf16" in found.levers[0].advice) is named


def test_the_way_of_blocks_to_another_worker_is_told_and_slows_tokens():
    timeline = RequestTimeline(arrival=0.0)
    timeline.mark(IntervalKind.ROUTE, 0.001, reason="prefill-0, then decode-0")
    timeline.add_prefill(step(0, 0.001, 0.011), 100, 0.01)
    timeline.hand_over_tokens(1, timeline.end)
    timeline.mark(IntervalKind.TRANSFER, 1.0, reason="decode-0: 5 of 6 blocks there")
    timeline.hand_over_tokens(1, timeline.end)
    found = explain(make_request(), timeline, make_machine())
    assert "Continued at decode-0: 5 of 6 blocks there." in found.sentences
    assert "transfer" in [one.cause for one in found.diagnoses if one.seconds]


def test_the_way_to_a_worker_is_told_with_its_reason_however_short_it_was():
    for seconds, cause in ((1.0, "route"), (1e-6, "prompt_length")):
        timeline = RequestTimeline(arrival=0.0)
        timeline.mark(IntervalKind.ROUTE, seconds, reason="worker 1: it died")
        timeline.mark(IntervalKind.ROUTE, 2 * seconds, reason="worker 0: 64 of 100 tokens cached")
        timeline.add_prefill(step(0, 2 * seconds, 2 * seconds + 0.01), 100, 0.01)
        timeline.hand_over_tokens(1, timeline.end)
        found = explain(make_request(), timeline, make_machine())
        assert (
            "Routed to worker 1: it died; then worker 0: 64 of 100 tokens cached."
            in found.sentences
        )
        assert [one.cause for one in found.diagnoses if one.seconds] == [cause]


@pytest.mark.parametrize(
    ("reason", "flag"), [("blocks", "--num-kv-blocks"), ("budget", "--max-num-batched-tokens")]
)
def test_what_kept_it_waiting_names_the_flag(reason, flag):
    found = explain(make_request(), lived(queue=1.0, reason=reason), make_machine())
    assert found.levers[0].flag == flag


def test_a_stall_names_who_caused_it_when_and_the_flag():
    timeline = lived(length=0.05, tokens=400, ids=("secret",))
    found = explain(make_request(), timeline, make_machine(), names=True)
    assert found.dominant is IntervalKind.STALL
    assert "4000 prompt tokens of 1 other request (secret)" in found.sentences[1]
    told = explain(
        make_request(), timeline, make_machine()
    )  # to somebody who may not know whose they were
    assert "4000 prompt tokens of 1 other request held up" in told.sentences[
        1
    ] and "secret" not in str(told.as_dict())
    (lever,) = (lever for lever in found.levers if lever.flag == "--itl-slo-ms")
    assert "46.0 ms" in lever.advice  # the longest stall
    assert "shortens the longest gap, not their sum" in lever.advice
    model = CostModel(PRICES)
    slo = model.slo_seconds(
        model.seconds(StepWork(1, 0, 100, 1, 1)) + model.seconds(StepWork.of_chunk(400, 64, False))
    )
    advised = float(lever.advice.split()[1])
    assert advised == pytest.approx(1e3 * slo, abs=4)  # a whole step's price is in both
    assert model.step_limit(model.slo_seconds(0.1)) == pytest.approx(0.1)


def test_an_slo_that_is_tight_already_is_not_loosened():
    found = explain(
        make_request(), lived(length=0.05, tokens=400, ids=("secret",)), make_machine(itl_slo_ms=5)
    )
    (lever,) = (lever for lever in found.levers if "--itl-slo-ms 5" in lever.advice)
    assert lever.flag == "--max-num-seqs"


def test_batching_names_the_seats_and_what_a_step_would_take():
    timeline = lived(own=0.001, decodes=0.02, length=0.02)
    timeline.decode.decodes = 10 * 8  # eight together
    found = explain(make_request(), timeline, make_machine())
    assert found.dominant is IntervalKind.BATCHING
    (lever,) = (lever for lever in found.levers if lever.flag == "--max-num-seqs")
    model = CostModel(PRICES)
    now, then = (1e3 * model.seconds(StepWork(n, 0, n * 100, n, n)) for n in (8, 4))
    assert f"from {now:.1f} ms to {then:.1f} ms" in lever.advice
    assert lever.saved_seconds is None and lever.addressed_seconds == pytest.approx(
        0.19
    )  # others would wait


def test_the_lever_of_most_of_the_time_stands_before_that_of_less():
    timeline = lived(own=0.002, decodes=0.01, length=0.05, tokens=400, ids=("secret",))
    timeline.decode.decodes = 10 * 4
    found = explain(make_request(), timeline, make_machine())
    unpredicted = [lever.flag for lever in found.levers if lever.saved_seconds is None]
    assert unpredicted == ["--itl-slo-ms", "--max-num-seqs"]  # 400 ms of stalls, 80 ms of batching


def test_a_lone_decode_with_a_long_context_is_told_of_the_small_cache():
    found = explain(make_request(num_prompt_tokens=5000), lived(read=3600), make_machine())
    (lever,) = (lever for lever in found.levers if lever.flag == "--kv-cache-dtype")
    assert "69 %" in lever.advice  # (64 + 4) * 2 of 64 + 4 + 128 bytes
    spent = found.waterfall.bars[-1].seconds
    assert lever.saved_seconds == pytest.approx(
        (1 - 136 / 196) * spent, rel=0.001
    )  # the weights are next to nothing
    found = explain(
        make_request(num_prompt_tokens=5000), lived(read=3600), make_machine(kv_cache_dtype="int8")
    )
    assert "--kv-cache-dtype" not in [lever.flag for lever in found.levers]


@pytest.mark.parametrize(
    ("reason", "words", "flags"),
    [
        (MissReason.DIVERGED, "at token 32 the prompt departs from the cached ones", ["prompt"]),
        (MissReason.BLOCK_GRANULARITY, "less than a block", ["prompt", "--block-size"]),
        (MissReason.SALT, "cache_salt", ["prompt"]),
        (MissReason.EVICTED, "has been evicted", ["prompt", "--num-kv-blocks"]),
        (MissReason.NEVER_SEEN, "what follows token 32 is new", ["prompt"]),
        (MissReason.DISABLED, "prefix cache is off", ["prompt", "--enable-prefix-caching"]),
    ],
)
def test_a_missed_prefix_says_why_and_claims_nothing_that_is_not_known(reason, words, flags):
    request = make_request(prefix_miss=PrefixMiss(reason, 32), num_cached_tokens=32)
    found = explain(request, lived(decode_steps=0), make_machine())
    assert any(words in sentence for sentence in found.sentences)
    assert [lever.flag for lever in found.levers] == flags
    assert [lever.saved_seconds for lever in found.levers[1:]] == [None] * (len(flags) - 1)
    shares = {one.cause: one.share for one in found.diagnoses}
    assert shares["prompt_length"] == pytest.approx(1) and shares.get("missed_prefix") is None


@pytest.mark.parametrize(
    ("miss", "cached", "shares", "flags"),
    # of an evicted prefix what was cached is claimed; what every chat begins with is no prefix to
    # move
    [
        (
            PrefixMiss(MissReason.EVICTED, 36, num_known=48),
            36,
            {"missed_prefix": 0.75, "prompt_length": 0.25},
            {"--num-kv-blocks": 0.0075, "prompt": None},
        ),
        (PrefixMiss(MissReason.DIVERGED, 4), 0, {"prompt_length": 1.0}, {"prompt": None}),
    ],
)
def test_what_was_certainly_cached_is_claimed(miss, cached, shares, flags):
    found = explain(
        make_request(prefix_miss=miss, num_cached_tokens=cached),
        lived(decode_steps=0),
        make_machine(),
    )
    assert {one.cause: one.share for one in found.diagnoses} == pytest.approx(shares)
    assert {lever.flag for lever in found.levers} == set(flags)
    assert not any("put what changes" in lever.advice for lever in found.levers)
    for lever in found.levers:
        assert flags[lever.flag] is None or lever.saved_seconds == pytest.approx(flags[lever.flag])


def test_recompute_counts_what_was_lost():
    timeline = lived(decode_steps=0)
    timeline.add_prefill(step(9, 0.01, 0.11), 90, 0.1, again=True)
    found = explain(
        make_request(num_preemptions=2, num_recomputed_tokens=90), timeline, make_machine()
    )
    assert found.dominant is IntervalKind.RECOMPUTE
    assert "2 times" in found.sentences[1] and "90 tokens" in found.sentences[1]


def test_every_kind_of_interval_has_a_sentence():
    for kind in IntervalKind:
        timeline = RequestTimeline(arrival=0.0)
        timeline.mark(kind, 1.0, 0)
        found = explain(make_request(), timeline, make_machine())
        assert found.dominant is kind and len(found.sentences) >= 2 and str(found)


def test_a_cause_of_both_phases_names_the_phase():
    timeline = RequestTimeline(arrival=0.0)
    for end, kind in enumerate((IntervalKind.PREFILL, IntervalKind.DECODE), 1):
        timeline.mark(kind, end - 0.5, end)
        timeline.mark(IntervalKind.SEND, float(end), end)
        timeline.token_times.append(float(end))
    found = explain(make_request(), timeline, make_machine())
    waits = [one for one in found.sentences if "Handing text" in one]
    assert [one.partition(":")[0] for one in waits] == ["Prefill", "Decode"]


def test_nothing_yet():
    assert "Nothing" in str(explain(make_request(), RequestTimeline(arrival=0.0), make_machine()))


FLAGS = {
    flag
    for option in get_command(app).commands["serve"].params
    for flag in (*option.opts, *option.secondary_opts)
}


def advised(found, backend, config):
    """The flags with values in the levers; all exist, and their values are accepted."""
    for lever in found.levers:
        for flag, value in re.findall(
            r"(--[a-z-]+)(?: ([\d.]+|int8|priority)\b)?", f"{lever.flag}: {lever.advice}"
        ):
            assert flag in FLAGS, lever
            if value:
                plain = {"int8": str, "priority": str}.get(
                    value, float if flag == "--itl-slo-ms" else int
                )
                changed = replace(config, **{flag[2:].replace("-", "_"): plain(value)})
                assert changed.block_size % backend.block_multiple == 0, lever
                assert changed.kv_cache_dtype in backend.kv_cache_dtypes, lever
                yield flag


@pytest.mark.parametrize("backend", [CpuBackend, ReferenceBackend])
def test_advice_names_flags_that_exist_and_values_that_the_backend_accepts(backend):
    sizes = {dtype: KV_BYTES[dtype] for dtype in backend.kv_cache_dtypes}
    seen = set()
    lives = ({"read": 3600}, {"length": 0.05, "tokens": 400}, {"own": 0.001, "length": 0.004})
    reasons = ("seats", "blocks", "budget", "prefix", "grammar", "")
    for size in (16, 32, 240):
        machine = make_machine(
            block_size=size, backend=backend.name, block_multiple=backend.block_multiple
        )
        machine = replace(machine, kv_token_bytes=sizes)
        for miss, reason, life in zip(MissReason, reasons, cycle(lives), strict=False):
            request = make_request(
                num_prompt_tokens=5000, num_cached_tokens=size, prefix_miss=PrefixMiss(miss, size)
            )
            found = explain(request, lived(queue=0.02, reason=reason, **life), machine)
            seen |= set(advised(found, backend, machine.config))
    usual = {"--max-num-seqs", "--num-kv-blocks", "--itl-slo-ms", "--block-size"}
    assert seen >= usual | ({"--kv-cache-dtype"} if backend is CpuBackend else set())


def test_seats_beyond_the_token_budget_are_not_advised_alone():
    machine = make_machine(max_num_seqs=8, max_num_batched_tokens=8)
    lever = explain(make_request(), lived(queue=1.0, reason="seats"), machine).levers[0]
    assert lever.flag == "--max-num-batched-tokens" and "--max-num-seqs 16" in lever.advice
