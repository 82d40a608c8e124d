"""Verdicts of the lab on made-up measurements: every claim can hold, fail and stay undecided."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest

from tiny_gguf import write_tiny_gguf
from twinphase.engine.stepped import Workshop
from twinphase.errors import InvalidRequestError, TwinphaseError
from twinphase.phases.hardware import Ceilings
from twinphase.phases.timeline import StepRecord
from twinphase.phases.work import Cost
from twinphase_bench.lab.experiment import Figure, Rule, decide, overall, ratios
from twinphase_bench.lab.experiments import same_tokens as same_file
from twinphase_bench.lab.experiments import separate_pools
from twinphase_bench.lab.lab import EXPERIMENTS, _choose_size, choose
from twinphase_bench.lab.presentation import cell, plot, table
from twinphase_bench.lab.workbench import (
    DECODE,
    E2E,
    LEDGER,
    MAX_ROUNDS,
    MIN_ROUNDS,
    PREFILL,
    STEPS,
    TPOT,
    TTFT,
    Workbench,
    fits,
    growth,
    serve,
)
from twinphase_bench.report.report import Status

HOLDS = Status.HOLDS
FAILS = Status.FAILS
UNDECIDED = Status.UNKNOWN
STEADY = (0.99, 1.0, 1.0, 1.005, 1.01, 1.0, 0.995, 1.0)  # eight repetitions of a quiet machine
CEILINGS = Ceilings("a processor", 2, "generic", ((2**20, 1e10), (2**30, 1e10)), 1e12, 2e11, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("lab") / "tiny.gguf"
    return str(write_tiny_gguf(path, heads=1, kv_heads=1, layers=1, context=8192))


@pytest.fixture(scope="module")
def workshop(model):
    return Workshop(model, threads=2, num_kv_blocks=1024, max_num_batched_tokens=4096)


class MadeUp(Workbench):
    """Sets everything up as usual, but gives made-up values instead of measuring."""

    def of(self, experiment, values):
        """`values(variant, number)` returns values by quantity, or in the order of the columns."""
        self.values = values
        self.columns = (*experiment.figure.quantities, *experiment.also)
        return self

    def interleave(self, variants):
        runs = {}
        for number, variant in enumerate(variants):
            made = self.values(variant, number)
            made = made if isinstance(made, dict) else dict(zip(self.columns, made, strict=True))
            runs[variant] = {
                name: [value * factor for factor in STEADY] for name, value in made.items()
            }
        return runs


def bench_of(workshop, size=0, ceilings=CEILINGS, kind=MadeUp):
    path = str(workshop.path)
    sizes = {"num_kv_blocks": 256, "max_num_batched_tokens": 4096}
    return kind(
        workshop, ceilings, 100.0, lambda **config: Workshop(path, **sizes | config), size=size
    )


def verdict(experiment, trial, size):
    judged = [
        decide(rule, one, size) for rule, one in zip(experiment.rules, trial.measured, strict=True)
    ]
    return overall(judged), judged


def prefills(law):
    return lambda n, _: (law(n),)


def request(prefill, decode):
    return lambda *_: {PREFILL: prefill, DECODE: decode}


def first_then(first, other):
    return lambda _, number: other if number else first


def interruptions(worst, price):  # longest gap, TTFT, usual gap, steps; the whole prompt comes last
    return lambda step, _: (
        (worst, 1000, 4, 1) if step.startswith("whole") else (50, 1000 * price, 4, 8)
    )


def bursts(ttft, tpot):  # alone, seated, together
    return lambda _, number: (*[10] * len(LEDGER), *((ttft, tpot) if number else (100, 4)))


def drafts(right, wrong, other=0):
    return lambda _, number: ((100, 63, 0), (right, 8, other), (wrong, 63, 0))[number]


def threads(prefill, decode):
    return first_then({PREFILL: 100, DECODE: 10}, {PREFILL: 100 / prefill, DECODE: 10 / decode})


def caches(per_token=0.5, decode=5.0, slope=1e-3, other=0):
    return lambda n, _: (decode + slope * n, 3 + per_token * n, other)


QUADRATIC = prefills(lambda n: 1 + 0.4 * n + 1e-4 * n * n)
CASES = [  # claim, size, made-up values, verdict; a size that shrank makes no failure
    ("prefill-length", 4096, QUADRATIC, HOLDS),
    ("prefill-length", 4096, prefills(lambda n: 0.4 * n), FAILS),  # no quadratic part
    ("prefill-length", 4096, prefills(lambda n: 1e-3 * n * n), FAILS),  # not linear anywhere
    (
        "prefill-length",
        512,
        prefills(lambda n: 1 + 0.4 * n + 1e-3 * n * n),
        UNDECIDED,
    ),  # not attention
    ("prefill-length", 2048, prefills(lambda n: 0.4 * n), UNDECIDED),
    ("phase-ratio", 512, request(200, 5), HOLDS),
    ("phase-ratio", 512, request(2000, 5), FAILS),
    ("phase-ratio", 64, request(2000, 5), UNDECIDED),
    ("bounds", 512, first_then((60, 2), (20, 70)), HOLDS),
    ("bounds", 512, first_then((30, 2), (20, 70)), FAILS),
    ("bounds", 512, first_then((60, 2), (20, 40)), FAILS),
    (
        "bounds",
        512,
        first_then((60, 80), (20, 70)),
        FAILS,
    ),  # memory is the nearer ceiling of prefill
    (
        "bounds",
        512,
        first_then((60, 2), (80, 70)),
        FAILS,
    ),  # arithmetic is the nearer ceiling of decode
    ("bounds", 512, first_then((50, 2), (20, 70)), UNDECIDED),
    ("bounds", 128, first_then((30, 40), (20, 70)), UNDECIDED),
    (
        "bounds",
        512,
        first_then((120, 2), (20, 70)),
        UNDECIDED,
    ),  # above a ceiling: a count or it is wrong
    ("bounds", 512, first_then((math.nan, 2), (math.nan, 70)), UNDECIDED),
    ("batching", 32, lambda b, _: {DECODE: 3 + 0.3 * b}, HOLDS),
    ("batching", 32, lambda b, _: {DECODE: 3 + 3.0 * b}, FAILS),
    ("batching", 32, lambda b, _: {DECODE: 3 + 0.0 * b}, FAILS),  # each request as fast as before
    (
        "batching",
        4,
        lambda b, _: {DECODE: 3 + 0.5 * b},
        UNDECIDED,
    ),  # 4 cannot be much above 3 times as fast as one
    ("prompt-cache", 1024, lambda *_: (1000, 20, 4, 4, 16, 0), HOLDS),
    ("prompt-cache", 1024, lambda *_: (1000, 500, 4, 4, 16, 0), FAILS),
    ("prompt-cache", 1024, lambda *_: (1000, 20, 4, 4, 16, 1), FAILS),
    ("prompt-cache", 1024, lambda *_: (1000, 20, 4, 6.0, 16, 0), FAILS),
    ("prompt-cache", 256, lambda *_: (1000, 500, 4, 4, 16, 0), UNDECIDED),
    ("chunked-prefill", 1024, interruptions(1000, 1.1), HOLDS),
    ("chunked-prefill", 1024, interruptions(60, 1.1), FAILS),
    ("chunked-prefill", 1024, interruptions(1000, 2.0), FAILS),
    ("chunked-prefill", 512, interruptions(60, 1.1), UNDECIDED),
    ("queue", 8, bursts(1000, 4), HOLDS),
    ("queue", 8, bursts(1000, 20), FAILS),
    ("queue", 8, bursts(100, 4), FAILS),
    ("queue", 4, bursts(150, 4), UNDECIDED),
    ("cores", 256, threads(1.9, 1.2), HOLDS),
    ("cores", 256, threads(1.9, 1.9), FAILS),
    ("cores", 256, threads(1.0, 0.5), FAILS),
    ("no-kv-cache", 1024, caches(), HOLDS),
    ("no-kv-cache", 1024, caches(per_token=0.0), FAILS),  # a token costs the same without
    ("no-kv-cache", 1024, caches(slope=0.5), FAILS),  # decode costs the whole sequence too
    ("no-kv-cache", 1024, caches(decode=100.0), FAILS),
    ("no-kv-cache", 1024, caches(other=1), FAILS),
    ("no-kv-cache", 256, caches(per_token=0.2, decode=12.0), UNDECIDED),
    ("static-batching", 32, first_then((150, 100), (100, 180)), HOLDS),
    ("static-batching", 32, first_then((100, 100), (100, 180)), FAILS),
    ("static-batching", 32, first_then((150, 100), (100, 100)), FAILS),
    ("static-batching", 8, first_then((100, 100), (100, 100)), UNDECIDED),
    ("separate-pools", 1024, first_then((100, 300, 6), (20, 500, 6)), HOLDS),
    ("separate-pools", 1024, first_then((25, 300, 6), (20, 500, 6)), FAILS),
    ("separate-pools", 512, first_then((25, 300, 6), (20, 500, 6)), UNDECIDED),
    ("speculation", 64, drafts(400, 60), HOLDS),
    ("speculation", 64, drafts(150, 60), FAILS),
    ("speculation", 64, drafts(400, 110), FAILS),
    ("speculation", 64, drafts(400, 60, other=1), FAILS),
    ("speculation", 32, drafts(150, 60), UNDECIDED),
]


@pytest.mark.parametrize(
    ("name", "size", "values", "expected"),
    CASES,
    ids=[f"{case[0]}-{number}" for number, case in enumerate(CASES)],
)
def test_the_verdict_on_made_up_measurements(workshop, monkeypatch, name, size, values, expected):
    # The engines of `separate-pools` are processes, which test_lab.py starts.
    engines = {separate_pools.ONE: Mock(), separate_pools.POOLS: Mock()}
    monkeypatch.setattr(separate_pools, "_start", AsyncMock(return_value=engines))
    monkeypatch.setattr(separate_pools, "_interrupt", AsyncMock())
    (experiment,) = choose([name])
    trial = experiment.measure(bench_of(workshop, size).of(experiment, values))
    status, judged = verdict(experiment, trial, size)
    assert status is expected, [(one.line, one.status, one.reason) for one in judged]
    assert all(bool(one.reason) is (one.status is UNDECIDED) for one in judged)
    assert trial.why.strip() and "{" not in trial.why
    assert table(experiment, trial).rows
    assert plot(experiment, trial).name == name.replace("-", "_")


def test_every_claim_can_hold_and_fail_and_is_tried_once():
    names = {name for name, *_ in CASES}
    for name in names:
        verdicts = {case[-1] for case in CASES if case[0] == name}
        assert verdicts >= ({HOLDS, FAILS} if name == "cores" else {HOLDS, FAILS, UNDECIDED}), name
    # Other tests try what `same-tokens` counts.
    assert sorted(names | {"same-tokens"}) == sorted(one.name for one in EXPERIMENTS)
    assert all(one.rules for one in EXPERIMENTS)


def test_what_cannot_be_measured_says_why(workshop, model):
    bounds, cores = choose(["bounds", "cores"])
    with pytest.raises(TwinphaseError, match="ceilings are unknown"):
        bounds.measure(bench_of(workshop, 512, ceilings=None))
    with pytest.raises(TwinphaseError, match="one core only"):
        cores.measure(bench_of(Workshop(model, threads=1, num_kv_blocks=64), 256))


def test_ideal_times_count_what_the_engine_counts(workshop):
    bench = bench_of(
        workshop, ceilings=replace(CEILINGS, int8_ops=1e12, float32_flops=1e12, bfloat16_flops=1e12)
    )
    engine = workshop.engine()
    engine.submit(bench.prompt(64), 2)
    for record, start, tokens in zip(engine.run(), (0, 64), (64, 1), strict=True):
        cost = record.prefill + record.decode
        ideal = (cost.flops / 1e12 * 1e3, cost.bytes / 1e10 * 1e3)
        assert bench.ideal_milliseconds(start, tokens) == pytest.approx(ideal)
    assert all(map(math.isnan, bench_of(workshop, ceilings=None).ideal_milliseconds(0, 64)))


def measured(experiment, workshop, size):
    trial = experiment.measure(bench_of(workshop, size, kind=Workbench))
    return verdict(experiment, trial, size)


@pytest.mark.parametrize(
    ("tokens", "bits", "happened", "expected"),
    [
        (0, 0, True, HOLDS),
        (0, 1, True, FAILS),
        (1, 1, True, FAILS),
        (0, 0, False, UNDECIDED),
        (1, 0, False, FAILS),
    ],
)
def test_the_same_answer_is_the_same_bits_in_ways_that_happened(
    workshop, monkeypatch, tokens, bits, happened, expected
):
    answer = same_file._answer

    def other(bench, way, prompt):
        ticket, records = answer(bench, way, prompt)
        if way is same_file.CACHED:
            ticket.tokens[-1] += tokens
            ticket.logprobs[-1] = math.nextafter(ticket.logprobs[-1], bits)
        return ticket, records

    if not bits:
        monkeypatch.setattr(math, "nextafter", lambda value, towards: value)
    monkeypatch.setattr(same_file, "_answer", other)
    if not happened:
        monkeypatch.setattr(same_file, "_happened", lambda *_: False)
    (experiment,) = choose(["same-tokens"])
    assert measured(experiment, workshop, 48)[0] is expected


def records_of(seconds, prefill=0, decode=0):
    clock = 0.0
    found = []
    for index, one in enumerate(seconds):
        work = Cost(10**6, 0, 10**6)
        found.append(
            StepRecord(
                index,
                clock,
                clock + one,
                prefill,
                decode,
                work if prefill else Cost(),
                work if decode else Cost(),
                num_decodes=decode,
            )
        )
        clock += one
    return found


@pytest.mark.parametrize("way", [same_file.BATCHED, same_file.CHUNKED, same_file.CACHED])
def test_a_way_must_have_happened(way):
    asked = SimpleNamespace(request_id="r", counts=SimpleNamespace(num_cached_tokens=0))
    ticket = SimpleNamespace(request=asked, steps=[1, 2])
    alone = replace(records_of([0.1], prefill=8)[0], prefill_ids=("r",))
    others = [
        replace(alone, index=i, num_decodes=4, prefill_ids=("x",)) for i in (0, 9)
    ]  # while it was not there
    assert not same_file._happened(way, ticket, [alone, *others])
    if way is same_file.CACHED:
        asked.counts.num_cached_tokens = 16
        assert same_file._happened(way, ticket, [alone])
    else:
        seen = (
            replace(alone, index=2, num_decodes=2)
            if way is same_file.BATCHED
            else replace(alone, index=1)
        )
        assert same_file._happened(way, ticket, [alone, *others, seen])


AT_LEAST_1 = Rule("x", at_least=1)


@pytest.mark.parametrize(
    ("rule", "measured", "expected"),
    [
        (AT_LEAST_1, [2.0] * 5, HOLDS),
        (AT_LEAST_1, [0.5] * 5, FAILS),
        (AT_LEAST_1, [0.5, 2.0] * 4, UNDECIDED),
        (AT_LEAST_1, [2.0] * 4, UNDECIDED),  # too few
        (AT_LEAST_1, [], UNDECIDED),
        (AT_LEAST_1, [2.0] * 7 + [math.nan], UNDECIDED),
        (AT_LEAST_1, math.nan, UNDECIDED),
        (AT_LEAST_1, "no ceilings", UNDECIDED),
        (Rule("x", at_most=1), 1, HOLDS),
        (Rule("x", at_most=1), 1.01, FAILS),
        (Rule("x", 0, 0), 0, HOLDS),
        (Rule("x", 0, 0), 1, FAILS),
        (Rule("x", 1, 2), [1.5] * 5, HOLDS),
        (Rule("x", 1, 2), [0.9, 1.5, 1.5, 1.5, 1.6], UNDECIDED),
        (Rule("x", 1, 2), [2.1] * 5, FAILS),
        (Rule("x", 0.5, unit="%"), [0.6] * 5, HOLDS),
        (Rule("x", 0.5, unit="%"), [1.1] * 5, UNDECIDED),  # more than all of it
        (Rule("x", at_least=1, fails_from=100), [0.5] * 5, UNDECIDED),  # measured at 99
        (Rule("x", at_least=1, fails_from=99), [0.5] * 5, FAILS),
        (Rule("x", at_least=1, fails_from=100), [2.0] * 5, HOLDS),
    ],
)
def test_a_verdict_needs_the_whole_interval_on_one_side(rule, measured, expected):
    judged = decide(rule, measured, size=99)
    assert judged.status is expected
    assert bool(judged.reason) is (expected is UNDECIDED)


def test_a_time_measured_beside_other_programs_makes_nothing_fail_and_a_count_does():
    assert decide(AT_LEAST_1, [0.5] * 5, others=0.2).status is FAILS
    busy = decide(AT_LEAST_1, [0.5] * 5, others=0.44)
    assert (
        busy.status is UNDECIDED
        and "other programs used 0.4 cores" in busy.reason
        and busy.line == "x 0.5x"
    )
    assert decide(AT_LEAST_1, [2.0] * 5, others=0.44).status is HOLDS
    assert decide(AT_LEAST_1, 0, others=0.44).status is FAILS


def test_a_claim_holds_only_if_every_rule_does():
    good, bad, unclear = (decide(AT_LEAST_1, one) for one in (2, 0, "?"))
    assert overall([good, good]) is HOLDS
    assert overall([good, unclear]) is UNDECIDED
    assert overall([bad, unclear]) is FAILS
    assert overall([]) is UNDECIDED


def test_ratios_are_taken_within_a_repetition():
    slow_minute = [1.0, 1.0, 10.0, 1.0, 1.0]
    assert ratios([2 * one for one in slow_minute], slow_minute) == [2.0] * 5
    assert math.isnan(ratios([1.0], [0.0])[0])
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0, 2.0], [1.0])


def test_numbers_as_text():
    rule = Rule("share", at_least=0.05, unit="%")
    assert (
        rule.text,
        Rule("n", 0, 0, "").text,
        Rule("n", 0.8, 1.2).text,
        Rule("n", at_most=2).text,
    ) == ("at least 5 %", "exactly 0", "0.8x to 1.2x", "at most 2x")
    assert decide(rule, [0.3, 0.31, 0.312, 0.32, 0.33]).line == "share 31.2 % (30 % to 33 %)"
    assert decide(rule, "?").line == "share unknown"
    assert cell([12 * one for one in STEADY]) == "12 (11.9 to 12.1)"
    assert (cell([]), cell([4]), cell([1234.5])) == ("unknown", "4", "1,234")


def test_fits_find_their_coefficients_and_growth_its_exponent():
    law = {n: [1 + 0.2 * n + 3e-5 * n * n] for n in (64, 128, 256, 512, 1024)}
    assert [one[0] for one in fits(law, 2)] == [
        pytest.approx(1),
        pytest.approx(0.2),
        pytest.approx(3e-5),
    ]
    assert growth({n: [5.0, 2.0 * n, 3.0 * n**2] for n in (1, 4, 16)}) == pytest.approx([0, 1, 2])


def test_one_decode_step_that_was_held_up_does_not_count():
    class Engine:
        def submit(self, prompt, output):
            totals = dict.fromkeys((name[:-4] for name in LEDGER), 0.5)
            return SimpleNamespace(
                ttft=1.0, tpot=2.0, e2e=3.0, timeline=SimpleNamespace(totals=lambda: totals)
            )

        def run(self):
            return (
                records_of([0.2, 0.3], prefill=64)
                + records_of([9.0], prefill=64, decode=1)
                + records_of([0.01] * 23 + [1.0], decode=2)
            )

        def clear(self):
            self.cleared = True

    engine = Engine()
    found = serve(engine, [[1], [2]], 4)
    assert found[DECODE] == pytest.approx(10) and found[PREFILL] == pytest.approx(
        9500
    )  # every chunk of a prompt counts
    assert (found[TTFT], found[TPOT], found[E2E], found[STEPS], found["stall, ms"]) == (
        1000,
        2000,
        3000,
        27,
        500,
    )
    assert engine.cleared


def timed_bench(seconds):
    """A bench whose clock the variants move."""
    clock = SimpleNamespace(now=0.0)
    config = SimpleNamespace(max_num_seqs=16)
    workshop = SimpleNamespace(config=config, max_model_len=4096, capacity=160 * 64)
    bench = Workbench(workshop, None, seconds, open=lambda: None, clock=lambda: clock.now)
    return bench, clock


def taking(clock, seconds, log=None):
    def variant():
        clock.now += seconds
        if log is not None:
            log.append(seconds)
        return {"x": seconds}

    return variant


def test_rounds_are_in_turn_and_fill_the_time():
    bench, clock = timed_bench(100.0)
    order = []
    found = bench.interleave({"a": taking(clock, 1.0, order), "b": taking(clock, 2.0, order)})
    assert order[:6] == [1.0, 2.0, 2.0, 1.0, 1.0, 2.0]
    assert found == {"a": {"x": [1.0] * MAX_ROUNDS}, "b": {"x": [2.0] * MAX_ROUNDS}}
    for seconds, rounds in (
        (10.0, 10),
        (4.0, MIN_ROUNDS),
        (1.0, 3),
    ):  # five at least, but not beyond three times the share
        bench, clock = timed_bench(seconds)
        assert len(bench.interleave({"a": taking(clock, 1.0)})["a"]["x"]) == rounds == bench.rounds


@pytest.mark.parametrize(
    ("seconds", "sizes", "sized_in", "chosen", "why"),
    [
        (1000.0, (2048, 1024, 512), "tokens", 2048, ""),
        (100.0, (2048, 1024, 512), "tokens", 1024, "to fit the time limit"),
        (1.0, (2048, 1024, 512), "tokens", 512, "to fit the time limit"),
        (1000.0, (8192, 2048, 512), "tokens", 2048, "because no more fit the context"),
        (1e6, (32, 16, 8), "requests", 16, "because no more fit the context"),
        (1e6, (8192,), "tokens", 4032, "because no more fit the context"),
    ],
)
def test_sizes_shrink_to_the_time_and_to_the_context(seconds, sizes, sized_in, chosen, why):
    bench, clock = timed_bench(seconds)

    def measure(bench):
        clock.now += 0.5  # before the first round
        return bench.interleave({"a": taking(clock, 0.001 + bench.size / 128)})

    experiment = replace(
        EXPERIMENTS[0], sizes=sizes, sized_in=sized_in, measure=measure, figure=Figure("", "", ())
    )
    reduced = _choose_size(experiment, bench)
    assert bench.size == chosen
    assert reduced == ([f"{chosen:,} {sized_in} instead of {sizes[0]:,} {why}"] if why else [])


def test_experiments_are_chosen_by_number_or_name():
    assert choose() == EXPERIMENTS
    assert [one.name for one in choose(["bounds", "1", "1"], quick=True)] == [
        "prefill-length",
        "bounds",
    ]
    assert 0 < len(choose(quick=True)) < len(EXPERIMENTS)
    for wrong in ("0", "99", "nonsense", ""):
        with pytest.raises(InvalidRequestError):
            choose([wrong])
