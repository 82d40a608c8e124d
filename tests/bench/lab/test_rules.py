"""The verdict rules of the lab on made-up measurements: every rule can hold, fail and be unknown."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from twinphase.bench.lab import phase_bound
from twinphase.bench.lab.experiment import (
    Estimate,
    Rule,
    decide,
    exactly,
    judge,
    median_of,
    overall,
    ratio_of,
    tempered,
    undisturbed,
    unknown,
)
from twinphase.bench.lab.experiments import (
    batching,
    bounds,
    chunked_prefill,
    cores,
    decode_position,
    kv_int8,
    kv_size,
    phase_ratio,
    prefill_length,
    prompt_cache,
    queue,
    request_shapes,
    same_tokens,
    short_prompts,
)
from twinphase.bench.lab.figures import shown
from twinphase.bench.lab.lab import EXPERIMENTS, choose
from twinphase.bench.lab.workbench import MOST_ROUNDS, ROUNDS, Speed, Workbench, fitted
from twinphase.bench.report.report import Status
from twinphase.errors import InvalidRequestError
from twinphase.phases.hardware import Ceilings
from twinphase.phases.report import Units
from twinphase.phases.timeline import StepRecord
from twinphase.phases.work import Cost

HOLDS, FAILS, UNKNOWN = Status.HOLDS, Status.FAILS, Status.UNKNOWN
STEADY = (0.99, 1.0, 1.0, 1.005, 1.01, 1.0, 0.995, 1.0)  # eight repetitions of a quiet machine
WILD = (0.1, 5.0, 0.3, 3.0, 0.2, 4.0, 0.15, 6.0)


def times(seconds, noise=STEADY):
    return [seconds * factor for factor in noise]


@pytest.mark.parametrize(
    ("values", "expected"),
    [(times(2.0), HOLDS), (times(0.5), FAILS), ([0.5, 2.0] * 4, UNKNOWN), ([], UNKNOWN), ([2.0, 2.0], UNKNOWN)],
)
def test_a_verdict_needs_the_whole_interval_on_one_side(values, expected):
    assert decide(Rule("x", "", at_least=1), median_of(values)).status is expected


@pytest.mark.parametrize("share", [0.43, 0.45, 0.499, 0.501, 0.53, 0.57])
def test_what_another_run_could_turn_around_is_not_decided(share):
    """MFU and MBU of one machine came out at 43 to 55 % and 45 to 77 % in different runs, each sure of its own."""
    found = both(prefill=0.7 / share, decode=0.7 / share)
    status, judged = found.evaluate()
    assert status is UNKNOWN
    for one in judged:
        if one.rule in (bounds.MFU, bounds.MBU):
            assert one.reason.startswith(("Too close to tell", "Too noisy to tell"))
            assert one.rule.number(one.estimate.low) in one.reason and "at least 50 %" in one.reason


@pytest.mark.parametrize(("share", "mfu", "mbu"), [(0.4, FAILS, UNKNOWN), (0.62, HOLDS, UNKNOWN), (0.7, HOLDS, HOLDS)])
def test_bandwidth_differs_more_between_runs_than_arithmetic(share, mfu, mbu):
    """Reading the same weights was 38 GB/s in one run and 55 GB/s in the next."""
    judged = {one.rule: one.status for one in both(prefill=0.7 / share, decode=0.7 / share).evaluate()[1]}
    assert (judged[bounds.MFU], judged[bounds.MBU]) == (mfu, mbu)
    assert all(rule.margin >= 0.3 for rule in (bounds.MBU, bounds.DECODE_SIDE, decode_position.SLOPE))


def test_a_margin_widens_both_limits():
    rule = Rule("x", "", 1, 2, margin=0.1)
    for value, expected in (
        (0.85, FAILS),
        (0.95, UNKNOWN),
        (1.05, UNKNOWN),
        (1.5, HOLDS),
        (1.9, UNKNOWN),
        (2.3, FAILS),
    ):
        assert decide(rule, exactly(value)).status is expected
    assert rule.scope == "undecided within 10 % of the limit"


@pytest.mark.parametrize(
    ("low", "high", "close"),
    [
        (1.05, 1.5, "the lower end of 1.05x to 1.5x is within 10 %"),
        (0.5, 0.95, "the upper end of 0.5x to 0.95x is within 10 %"),
        (1.05, 1.9, "1.05x to 1.9x is within 10 %"),
        (1.5, 1.85, "the upper end of 1.5x to 1.85x is within 10 %"),
        (1.05, 1.05, ": 1.05x is within 10 %"),
    ],
)
def test_the_reason_says_which_end_is_close_to_a_limit(low, high, close):
    found = decide(Rule("x", "", 1, 2, margin=0.1), Estimate((low + high) / 2, low, high, 0.95, 8))
    assert found.status is UNKNOWN and close in found.reason


def test_a_limit_from_above_and_an_exact_one():
    assert decide(Rule("x", "", at_most=1), exactly(1)).status is HOLDS
    assert decide(Rule("x", "", at_most=1), exactly(1.01)).status is FAILS
    assert decide(Rule("x", "", 0, 0), exactly(0)).status is HOLDS
    assert decide(Rule("x", "", 0, 0), exactly(1)).status is FAILS
    assert decide(Rule("x", "", 1, 2), Estimate(1.5, 0.9, 1.6, 0.95, 8)).status is UNKNOWN


def test_what_is_not_measured_is_unknown_and_says_why():
    found = decide(Rule("x", "", at_least=1), unknown("no ceilings"))
    assert (found.status, found.reason, found.line) == (UNKNOWN, "no ceilings", "x unknown")
    assert decide(Rule("x", "", at_least=1), exactly(math.nan)).status is UNKNOWN
    assert judge([Rule("x", "", at_least=1)], {})[0].status is UNKNOWN


def test_few_repetitions_decide_nothing():
    found = decide(Rule("x", "", at_least=1), median_of([2.0] * 4))
    assert found.status is UNKNOWN
    assert "4 repetitions" in found.reason
    assert decide(Rule("x", "", at_least=1), median_of([2.0] * 5)).status is HOLDS


def test_a_claim_holds_only_if_every_rule_does():
    rule = Rule("x", "", at_least=1)
    good, bad, unclear = (decide(rule, one) for one in (exactly(2), exactly(0), unknown("?")))
    assert overall([good, good]) is HOLDS
    assert overall([good, unclear]) is UNKNOWN
    assert overall([bad, unclear]) is FAILS
    assert overall([]) is UNKNOWN


def test_ratios_are_taken_within_a_repetition():
    slow_minute = [1.0, 1.0, 10.0, 1.0, 1.0]
    estimate = ratio_of([2 * one for one in slow_minute], slow_minute)
    assert (estimate.low, estimate.value, estimate.high) == (2, 2, 2)
    assert ratio_of([1.0], [0.0]).note


def test_numbers_as_text():
    rule = Rule("share", "", at_least=0.05, unit="%")
    assert rule.text == "at least 5 %"
    assert decide(rule, Estimate(0.312, 0.3, 0.33, 0.95, 8)).line == "share 31.2 % (30 % to 33 %)"
    assert Rule("n", "", 0, 0, "").text == "exactly 0"
    assert Rule("n", "", 0.8, 1.2).text == "0.8x to 1.2x"
    assert shown(times(0.012), 1e3) == "12 (11.9 to 12.1)"
    assert shown([]) == "unknown"


def test_a_fit_finds_its_coefficients():
    a, b, c = fitted([64, 128, 256, 512, 1024], [0.01 + 2e-4 * n + 3e-8 * n * n for n in (64, 128, 256, 512, 1024)], 2)
    assert (a, b, c) == (pytest.approx(0.01), pytest.approx(2e-4), pytest.approx(3e-8))


def prefills(law, noise=STEADY, longest=4096):
    lengths = tuple(longest >> i for i in range(5, -1, -1))
    seconds = {n: times(law(n), noise) for n in lengths}
    return prefill_length.PrefillLength(seconds, {n: 1000 * n for n in lengths}, {n: n * n for n in lengths})


def phase(tokens, seconds, compute, memory, noise=STEADY):
    return phase_bound.PhaseBound(tokens, times(seconds, noise), {"int8": 10**9}, 10**7, 1, compute, memory, 0.01)


def both(prefill=1.0, decode=1.0, compute=0.7, memory=0.01, others=None, prompt=512):
    return bounds.Bounds(phase(prompt, prefill, compute, memory), phase(24, decode, 0.1, 0.7), others=others)


def positions(slope=1e-6, noise=STEADY, late=1.0, bandwidth=1e10, furthest=4096):
    gaps = [[0.004 * factor] * 64 + [0.004 * late * factor] * 64 for factor in noise]
    seconds = {p: times(0.004 + slope * p, noise) for p in (16, furthest // 4, furthest // 2, furthest)}
    return decode_position.DecodePosition(seconds, gaps, 10_000, bandwidth, 69_120, 10**8)


def batches(each, noise=STEADY, largest=32):
    sizes = tuple(b for b in (1, 2, 4, 8, 16, 32) if b <= largest)
    steps = {b: times(0.003 + each * b, noise) for b in sizes}
    known = {b: 0.001 * b for b in sizes}
    return batching.Batching(steps, dict.fromkeys(sizes, 2.0), known, dict.fromkeys(sizes, 0.002))


def visits(warm, same=True, noise=STEADY, longest=1024):
    def visit(factor):
        return prompt_cache.Visit((1.0 * factor, 0.004), (warm * factor**2, 0.004), 16, same)

    return prompt_cache.PromptCache(
        {n: [visit(factor) for factor in noise] for n in (longest // 4, longest // 2, longest)}
    )


def interruptions(worst, price, noise=STEADY, prompt=1024):
    def one(gap, ttft, factor):
        return chunked_prefill.Interruption(gap * factor, 0.004, ttft, [(-0.1, 0.004), (gap, gap), (gap + 1, 0.004)], 4)

    found = {64: [one(0.05, price, 1.0) for _ in noise], 1028: [one(worst, 1.0, factor) for factor in noise]}
    return chunked_prefill.ChunkedPrefill(prompt, {**found, 256: found[64]})


def bursts(ttft, tpot, noise=STEADY, requests=8):
    def burst(ttft, tpot):
        return [queue.Burst(ttft * f, tpot * f**0.5, dict.fromkeys(queue.KINDS, 0.01)) for f in noise]

    calm = [queue.Burst(0.1, 0.004, dict.fromkeys(queue.KINDS, 0.01)) for _ in noise]
    return queue.Queue(
        requests, {queue.ALONE: calm, queue.SEATED: burst(ttft, 0.004), queue.TOGETHER: burst(ttft, tpot)}
    )


def shorts(apart, together, noise=STEADY, total=256):
    lengths = (8, 16, 32)
    whole = dict.fromkeys(lengths, [1.0] * len(noise))
    joined = {n: [together] * len(noise) for n in lengths}
    return short_prompts.ShortPrompts(total, {n: times(apart, noise) for n in lengths}, joined, whole[8], 10**8, None)


def held(extra=0, token_bytes=17_640, seen=True):
    tokens = list(range(64, 1024, 8))
    blocks = [-(-n // 16) + extra for n in tokens]
    written = [(n, token_bytes * n) for n in tokens if n % 16 == 0] if seen else []
    return kv_size.KVSize(tokens, blocks, written, 16, 17_640, 30, 9, 3, 64, 10**9)


def int8(size, seconds, noise=STEADY, context=2048):
    names = (kv_int8.AUTO, kv_int8.INT8)
    measured = {names[0]: [0.006] * len(noise), names[1]: times(seconds, noise)}
    return kv_int8.KVInt8(context, {names[0]: 17_640, names[1]: size}, 23_040, measured)


def threads(prefill, decode, noise=STEADY):
    one = [100.0] * len(noise)
    return cores.Cores({1: one, 2: times(100 * prefill, noise)}, {1: one, 2: [100.0 * decode] * len(noise)})


def answers(tokens, bits, **happened):
    counts = dict.fromkeys(same_tokens.WAYS, 4)
    none = dict.fromkeys(same_tokens.WAYS, 0)
    return same_tokens.SameTokens(counts, none | {"cached": tokens}, none | {"cached": bits}, 16, counts | happened)


def shapes(prompt, answer, noise=STEADY, long=512):
    reading = [(prompt * f, prompt * f + 0.1) for f in noise]
    return request_shapes.RequestShapes(long, 16, reading, [(0.02, answer)] * len(noise))


def rates(prefill, noise=STEADY, prompt=1000):
    return phase_ratio.PhaseRatio(phase(prompt, prefill, 0.01, 0.001, noise), phase(10, 1.0, 0.01, 0.5))


CASES = [
    (prefills(lambda n: 0.001 + 4e-4 * n + 1e-7 * n * n), HOLDS),
    (prefills(lambda n: 4e-4 * n), FAILS),  # no quadratic part
    (prefills(lambda n: 1e-6 * n * n), FAILS),  # not linear anywhere
    (prefills(lambda n: 0.001 + 4e-4 * n + 1e-7 * n * n, STEADY[:3]), UNKNOWN),
    (positions(), HOLDS),
    (positions(slope=5e-6), FAILS),
    (replace(positions(slope=5e-6), others=1.0), UNKNOWN),  # the bandwidth is the whole machine's
    (replace(positions(), others=1.0), UNKNOWN),
    (positions(slope=0.0), FAILS),
    (positions(late=1.5), FAILS),
    (positions(bandwidth=None), UNKNOWN),
    (rates(5.0), HOLDS),
    (rates(50.0), FAILS),
    (rates(9.0, WILD), UNKNOWN),
    (replace(rates(50.0), others=1.0), UNKNOWN),  # prefill had not the cores, decode had the memory
    (replace(rates(5.0), others=1.0), UNKNOWN),  # prefill had the cores, decode had not the memory
    (replace(rates(5.0), others=0.1), HOLDS),
    (both(), HOLDS),
    (both(prefill=2.0), FAILS),
    (both(decode=2.5), FAILS),
    (both(decode=2.0), UNKNOWN),  # another run's bandwidth may make it hold
    (both(prefill=2.0, others=1.0), UNKNOWN),  # the ceiling is the whole machine's
    (both(others=1.0), HOLDS),  # others can only lower what is left of a ceiling
    (both(prefill=0.5), UNKNOWN),  # above a ceiling: a count or the ceiling is wrong
    (both(compute=None), UNKNOWN),
    (both(compute=0.01, memory=0.7), FAILS),
    (shapes(0.5, 2.0), HOLDS),
    (shapes(0.03, 2.0), FAILS),
    (shapes(0.5, 0.3), FAILS),
    (shapes(0.5, 2.0, WILD), UNKNOWN),
    (batches(0.0003), HOLDS),
    (batches(0.003), FAILS),
    (batches(0.0), FAILS),  # each request as fast as before
    (batches(0.0003, STEADY[:4]), UNKNOWN),
    (shorts(2.0, 1.0), HOLDS),
    (shorts(1.1, 1.0), FAILS),
    (shorts(4.0, 1.5), FAILS),
    (shorts(1.3, 1.0, WILD), UNKNOWN),
    (visits(0.02), HOLDS),
    (visits(0.5), FAILS),
    (visits(0.02, same=False), FAILS),
    (visits(0.2, noise=WILD), UNKNOWN),
    (interruptions(1.0, 1.1), HOLDS),
    (interruptions(0.06, 1.1), FAILS),
    (interruptions(1.0, 2.0), FAILS),
    (interruptions(0.15, 1.1, WILD), UNKNOWN),
    (bursts(1.0, 0.004), HOLDS),
    (bursts(1.0, 0.02), FAILS),
    (bursts(0.1, 0.004), FAILS),
    (bursts(0.2, 0.004, WILD), UNKNOWN),
    (held(), HOLDS),
    (held(extra=3), FAILS),
    (held(token_bytes=23_040), FAILS),  # memory has more in it than was reckoned
    (held(seen=False), UNKNOWN),
    (int8(12_240, 0.004), HOLDS),
    (int8(12_240, 0.006), FAILS),
    (int8(17_640, 0.004), FAILS),
    (int8(0.8 * 17_640, 0.004), FAILS),  # an eighth less than 16 bits would be, and too much
    (int8(12_240, 0.006, WILD), UNKNOWN),
    (threads(1.9, 1.2), HOLDS),
    (threads(1.9, 1.9), FAILS),
    (threads(1.0, 0.5), FAILS),
    (replace(threads(1.0, 0.5), others=1.0), UNKNOWN),  # the cores were not free
    (replace(threads(1.9, 1.2), others=1.0), UNKNOWN),
    (threads(1.3, 1.0, WILD), UNKNOWN),
    (cores.Cores({1: [1.0] * 8}, {1: [1.0] * 8}), UNKNOWN),
    (answers(0, 0), HOLDS),
    (answers(0, 1), FAILS),
    (answers(1, 1), FAILS),
    (answers(0, 0, cached=0), UNKNOWN),  # nothing was in the cache: nothing was shown
    (answers(0, 0, batched=3), UNKNOWN),
    (answers(0, 0, chunked=0), UNKNOWN),
    (answers(1, 0, batched=0), FAILS),
]  # fmt: skip


@pytest.mark.parametrize(("found", "expected"), CASES, ids=[f"{found.name}-{i}" for i, (found, _) in enumerate(CASES)])
def test_the_verdict_on_made_up_measurements(found, expected):
    status, judged = found.evaluate()
    assert status is expected, [(one.line, one.status, one.reason) for one in judged]
    assert [one.rule for one in judged] == list(found.rules)
    assert set(found.rules) == set(found.estimates())
    assert all(one.reason for one in judged if one.status is UNKNOWN)
    assert all(sentence.strip() for sentence in found.why(judged))
    assert all(len(row) == len(table.columns) for table in found.tables() for row in table.rows)
    assert found.plots()


TOO_SHORT = [  # what fails at the size that the rule asks for
    prefills(lambda n: 4e-4 * n, longest=2048),
    positions(slope=2e-8, furthest=2048, bandwidth=5e11),
    rates(5.0, prompt=64),
    both(prefill=2.0, prompt=128),
    both(compute=0.6, memory=0.95, prompt=128),
    shapes(0.03, 2.0, long=256),
    shapes(0.5, 0.3, long=256),
    batches(0.0005, largest=4),  # 4 together cannot be much above 3 times as fast as one
    batches(0.0, largest=16),
    shorts(1.1, 1.0, total=128),
    visits(0.5, longest=256),
    interruptions(0.06, 1.1, prompt=512),
    bursts(0.15, 0.004, requests=4),
    int8(12_240, 0.006, context=512),
]  # fmt: skip


@pytest.mark.parametrize("found", TOO_SHORT)
def test_a_size_that_shrank_makes_no_failure(found):
    status, judged = found.evaluate()
    reasons = [one.reason for one in judged if one.status is UNKNOWN]
    assert status is UNKNOWN, [(one.line, one.status, one.reason) for one in judged]
    assert reasons and all(reason.startswith(("Too short to see", "Too small to see")) for reason in reasons)
    assert FAILS not in {one.status for one in judged}


def test_every_rule_that_depends_on_a_size_is_told_the_size():
    for found, _ in CASES:
        for rule, estimate in found.estimates().items():
            assert (rule.fails_from is None) == (estimate.size is None), rule.name


def test_a_size_that_shrank_can_hold_all_the_same():
    rule = Rule("x", "", at_least=1, fails_from=100, sized_in="prompt tokens")
    assert decide(rule, exactly(2).at(10)).status is HOLDS
    assert decide(rule, exactly(0).at(100)).status is FAILS
    assert decide(rule, exactly(0).at(99)).status is UNKNOWN
    assert decide(rule, exactly(0)).status is UNKNOWN  # the size was forgotten


@pytest.mark.parametrize("share", [0.0, 0.27])
def test_a_quadratic_part_says_nothing_in_a_short_prompt(share):
    rule = prefill_length.QUADRATIC
    short, long = (decide(rule, exactly(share).at(size)) for size in (256, 4096))
    assert short.status is UNKNOWN and short.reason.startswith("Too short to see: 256 prompt tokens")
    assert long.status is (HOLDS if share else FAILS)


def test_every_claim_can_hold_and_fail_and_is_tried_once():
    for experiment in EXPERIMENTS:
        statuses = {expected for found, expected in CASES if type(found) is experiment}
        assert {HOLDS, FAILS} <= statuses, experiment.name
    assert len({one.name for one in EXPERIMENTS}) == len(EXPERIMENTS)


def test_experiments_are_chosen_by_number_or_name():
    assert choose([]) == EXPERIMENTS
    assert [one.name for one in choose(["bounds", "1", "1"])] == ["prefill-length", "bounds"]
    for wrong in ("0", "99", "nonsense", ""):
        with pytest.raises(InvalidRequestError):
            choose([wrong])


def bench_of(seconds):
    return Workbench(None, None, Speed(0.0, 0.001, 0.0, 0.01, 0.001), seconds, open=lambda: None)


def test_rounds_are_in_turn_and_five_at_least():
    bench, order = bench_of(100.0), []
    bench._quiet = lambda others: list(range(len(others)))  # whatever else runs on this machine
    found = bench.interleave({name: (lambda name=name: order.append(name) or name) for name in "ab"})
    assert ["".join(order[i : i + 2]) for i in (0, 2, 4)] == ["ab", "ba", "ab"]
    assert found == {"a": ["a"] * MOST_ROUNDS, "b": ["b"] * MOST_ROUNDS}


def test_too_little_time_is_said_and_decides_nothing():
    bench = bench_of(1e-6)
    found = bench.interleave({"a": lambda: 1.0})
    assert len(found["a"]) < ROUNDS
    assert "for want of time" in bench.reduced[0]
    assert decide(Rule("x", "", at_least=0), median_of(found["a"])).status is UNKNOWN


def test_rounds_with_others_are_left_out_where_enough_quiet_ones_remain():
    bench = bench_of(1.0)
    assert bench._quiet([0.0, 1.0, 0.1, 0.0, 0.2, None, 0.9]) == [0, 2, 3, 4, 5]
    assert "2 of 7 repetitions left out" in bench.reduced[0]
    assert bench_of(1.0)._quiet([0.0, 1.0, 1.0, 0.0, 0.0]) == [0, 1, 2, 3, 4]


def test_sizes_shrink_to_the_time_and_to_the_context():
    bench = bench_of(8.0)
    assert bench.size("prompt", (4096, 2048, 512), bench.speed.prefill, 10_000) == 512
    assert "for want of the time" in bench.reduced[0]
    assert bench_of(1e6).size("prompt", (4096, 2048, 512), bench.speed.prefill, 2500) == 2048
    assert bench_of(1e6).size("prompt", (4096, 2048, 512), bench.speed.prefill, 10_000) == 4096
    assert bench_of(1e6).size("prompt", (4096,), bench.speed.prefill, 100) == 100


def records_of(seconds, prefill=0, decode=0):
    clock, found = 0.0, []
    for index, one in enumerate(seconds):
        work = Cost(10**6, 0, 10**6)
        found.append(StepRecord(index, clock, clock + one, prefill, decode, work if prefill else Cost(),
                                work if decode else Cost(), executed=one / 2))  # fmt: skip
        clock += one
    return found


def test_one_decode_step_that_was_held_up_does_not_count():
    bench = SimpleNamespace(ceilings=None, workshop=SimpleNamespace(units=Units("int8", "int8", "float32")))
    held_up = [records_of([0.01] * 23 + [1.0], decode=1)]
    decode = phase_bound.phase_bound(bench, held_up)
    assert decode.seconds == [pytest.approx(0.24)]
    assert decode.outside == pytest.approx(0.5)
    chunks = [records_of([0.2, 0.3, 0.1], prefill=64)]  # chunks of a prompt differ: all of them count
    assert phase_bound.phase_bound(bench, chunks).seconds == [pytest.approx(0.6)]


def test_both_phases_of_a_kept_repetition_stay_together():
    """Every third round is left out; round i's prefill takes i seconds a step, and its decode likewise."""

    class Engine:
        def __init__(self):
            self.records, self.round = [], 0

        def submit(self, prompt, max_tokens):
            self.round += 1
            return SimpleNamespace(times=[])

        def run_until(self, done):
            self.records = records_of([self.round * 1.0], prefill=64)

        def run(self):
            return records_of([self.round * 1.0] * 24, decode=1)

        def clear(self):
            self.records = []

    workshop = SimpleNamespace(prompt=lambda n: [1] * n, max_model_len=4096, units=Units("int8", "int8", "float32"))
    bench = bench_of(1e6)
    bench.workshop, bench.engine = workshop, Engine
    bench._quiet = lambda others: [i for i in range(len(others)) if i % 3]
    found = phase_ratio.PhaseRatio.measure(bench)
    assert len(found.prefill.seconds) == len(found.decode.seconds) < MOST_ROUNDS
    pairs = list(zip(found.prefill.seconds, found.decode.seconds, strict=True))
    assert all(decode == pytest.approx(24 * prefill) for prefill, decode in pairs)


def test_repetitions_without_a_partner_are_no_ratio():
    with pytest.raises(ValueError, match="zip"):
        ratio_of([1.0, 2.0], [1.0])


@pytest.mark.parametrize("way", same_tokens.WAYS)
def test_a_way_must_have_happened(way):
    request = SimpleNamespace(request_id="r", num_cached_tokens=0)
    ticket = SimpleNamespace(request=request, steps=[1, 2])
    alone = replace(records_of([0.1], prefill=8)[0], prefill_ids=("r",))
    others = [replace(alone, index=i, num_decodes=4, prefill_ids=("x",)) for i in (0, 9)]  # while it was not there
    assert not same_tokens._happened(way, ticket, [alone, *others])
    if way == "cached":
        request.num_cached_tokens = 16
        assert same_tokens._happened(way, ticket, [alone])
    else:
        seen = replace(alone, index=2, num_decodes=2) if way == "batched" else replace(alone, index=1)
        assert same_tokens._happened(way, ticket, [alone, *others, seen])


def ceilings(bandwidth, int8=1e12):
    return Ceilings("a processor", 2, "generic", ((2**20, bandwidth), (2**30, bandwidth)), int8, 2e11, None)


def test_what_fails_only_against_a_ceiling_of_another_time_is_unknown():
    rule = Rule("x", "", at_least=1)
    good, bad, unclear = (decide(rule, one) for one in (exactly(2), exactly(0), unknown("?")))
    assert tempered([bad], [bad]) == [bad]
    assert tempered([good, unclear], [good, bad]) == [good, unclear]
    for near, says in ((good, "after it is 2x."), (unclear, "after it: ?")):
        found = tempered([bad], [near])[0]
        assert found.status is UNKNOWN and found.estimate == bad.estimate
        assert found.reason.startswith("It fails only against a ceiling of another time") and found.reason.endswith(
            says
        )


def test_what_holds_only_against_a_ceiling_of_another_time_is_unknown_where_that_can_raise_it():
    either, lowered = Rule("x", "", at_least=1), Rule("x", "", at_least=1, disturbed="lowers")
    for rule, expected in ((either, UNKNOWN), (lowered, HOLDS)):
        found = tempered([decide(rule, exactly(2))], [decide(rule, exactly(0))])[0]
        assert found.status is expected
        assert (expected is UNKNOWN) is found.reason.startswith("It holds only against a ceiling of another time")


@pytest.mark.parametrize(("disturbed", "good", "bad"),
                         [("", HOLDS, FAILS), ("lowers", HOLDS, UNKNOWN), ("moves", UNKNOWN, UNKNOWN)])  # fmt: skip
def test_what_others_may_have_brought_about_is_unknown_and_keeps_its_number(disturbed, good, bad):
    rule = Rule("x", "", at_least=1, disturbed=disturbed)
    judged = [decide(rule, one) for one in (exactly(2), exactly(0), unknown("?"))]
    assert undisturbed(judged, None) == undisturbed(judged, 0.1) == judged
    found = undisturbed(judged, 0.44)
    assert [one.status for one in found] == [good, bad, UNKNOWN]
    assert [one.line for one in found] == ["x 2x", "x 0x", "x unknown"]
    assert all("other programs used 0.4 cores" in one.reason for one in found[:2] if one.status is UNKNOWN)


def test_others_only_lower_what_has_a_lower_limit_only():
    for rule in (rule for experiment in EXPERIMENTS for rule in experiment.rules):
        assert rule.disturbed != "lowers" or (rule.at_least is not None and rule.at_most is None), rule.name


def test_a_measurement_is_put_against_other_ceilings():
    found = both().under(ceilings(1e9, int8=2e9))
    assert (found.prefill.compute, found.decode.memory) == (pytest.approx(0.5), pytest.approx(0.01))
    assert both().under(None).decode.memory is None
    assert positions().under(ceilings(5e9)).bandwidth == pytest.approx(5e9)
    compared = {one.name for one in EXPERIMENTS if one.uses_ceilings}
    assert compared == {"bounds", "decode-position"}
    assert compared == {one.name for one in EXPERIMENTS if any(rule.margin for rule in one.rules)}
