"""The sweep over a made-up target whose times are a known law of noise: no clock, no machine."""

import random
from dataclasses import replace

import pytest

from twinphase.bench.report.markdown import markdown
from twinphase.bench.report.report import Status
from twinphase.bench.report.result import result_json
from twinphase.bench.run import SweepOptions, bench_report, run_sweep, sweep_parts
from twinphase.bench.sweep.plan import Pace, Place, Plan, make_plan
from twinphase.bench.sweep.report import sweep_metrics, sweep_noise
from twinphase.bench.sweep.run import SweepError, calibrate, sweep
from twinphase.bench.sweep.verdicts import sweep_verdicts
from twinphase.bench.targets.target import DecodeSample, PrefillSample, TargetFacts
from twinphase.errors import ContextLengthError, TwinphaseError


class Made:
    """A target that takes no time, and says what it would have taken."""

    def __init__(self, noise=0.01, context=4096, seed=0, memory_bound=True, refuse=lambda phase, at: False):
        self.facts = TargetFacts(
            "made", "openai", "made 1", "none", "exact", context, "by its law", "by its law", {"threads": "3"}
        )
        self.random, self.noise, self.refuse, self.memory_bound = random.Random(seed), noise, refuse, memory_bound
        self.asked = []

    def _noisy(self, seconds):
        return seconds * self.random.lognormvariate(0, self.noise)

    def prefill(self, num_tokens):
        self.asked.append(("prefill", num_tokens, 1))
        if self.refuse("prefill", num_tokens):
            raise ContextLengthError(f"{num_tokens} are too many.")
        return PrefillSample(num_tokens, self._noisy(2e-3 + 4e-4 * num_tokens + 2e-8 * num_tokens**2))

    def decode(self, position, batch, num_tokens):
        self.asked.append(("decode", position, batch))
        if self.refuse("decode", (position, batch)):
            raise ContextLengthError(f"{batch} of {position} are too many.")
        base, each = (5e-3, 5e-4) if self.memory_bound else (1e-4, 5e-3)
        step = self._noisy(base + each * batch + 1e-6 * position * batch)
        return DecodeSample(position + (num_tokens - 1) / 2, batch, (step,) * num_tokens)

    def close(self):
        pass


def swept(target=None, **options):
    return run_sweep(target or Made(), SweepOptions(**options), lambda what, done, total: None)


def test_plan_reaches_from_ten_tokens_to_the_end_of_the_context():
    plan = make_plan(8192)
    prefill = [place for place in plan.places if place.phase == "prefill"]
    assert prefill[0].length == 10
    assert 8100 < prefill[-1].length < 8192
    decode = [place for place in plan.places if place.phase == "decode"]
    assert max(place.length for place in decode) + plan.decode_tokens < 8192
    assert {place.batch for place in decode if not place.held_out} == {1, 2, 4, 8}
    assert {place.batch for place in decode if place.held_out} == {1, 3, 6}
    ratios = [b.length / a.length for a, b in zip(prefill, prefill[1:], strict=False)]
    assert max(ratios) <= 2  # by ratio, about equally far apart
    assert {96, 384, 1536} <= {place.length for place in prefill if place.held_out}


@pytest.mark.parametrize("context", [64, 512, 2048, None, 131072])
@pytest.mark.parametrize("quick", [False, True])
def test_held_out_places_lie_within_and_enough_are_left_for_a_fit(context, quick):
    plan = make_plan(context, quick=quick)
    for phase in ("prefill", "decode"):
        given = [p for p in plan.places if p.phase == phase and not p.held_out]
        out = [p for p in plan.places if p.phase == phase and p.held_out]
        assert len(given) >= 5
        assert out
        for place in out:
            assert min(p.length for p in given) <= place.length <= max(p.length for p in given)
            assert min(p.batch for p in given) <= place.batch <= max(p.batch for p in given)
    assert len({(p.phase, p.length, p.batch) for p in plan.places}) == len(plan.places)


def test_sweeps_of_other_lengths_share_places():
    """So that engines of other paces can be compared."""
    one, other = ({(p.phase, p.length, p.batch) for p in make_plan(n).places} for n in (8192, 3000))
    assert len(one & other) >= 0.6 * len(other)
    quick = {(p.phase, p.length, p.batch) for p in make_plan(8192, quick=True).places}
    assert len(quick & one) >= 0.6 * len(quick)


def test_time_limit_shortens_prompts_and_says_so():
    pace = Pace(token=1e-3, step=0.01)
    long, short = make_plan(8192, pace=pace), make_plan(8192, pace=pace, max_seconds=60)
    assert short.longest < long.longest
    assert pace.estimate(short) <= 60 < pace.estimate(long)
    assert len(short.places) > 0.6 * len(long.places)
    result = sweep(Made(), short, watch_others=False)
    assert any("--max-seconds" in line for line in sweep_noise(result))


def test_every_place_is_measured_in_every_round_in_another_order():
    target = Made()
    plan = make_plan(512, repetitions=3)
    result = sweep(target, plan, watch_others=False)
    orders = [[one.place for one in result.visits if one.round == number] for number in range(3)]
    assert all(sorted(order, key=str) == sorted(plan.places, key=str) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert all(len(point.values) == 3 for phase in ("prefill", "decode") for _, point in result.points(phase))


def test_short_prefills_are_measured_several_times_in_a_row():
    result = sweep(Made(), Plan((Place("prefill", 10), Place("prefill", 1000)), 1), watch_others=False)
    by_length = {one.place.length: len(one.samples) for one in result.visits}
    assert by_length == {10: 8, 1000: 1}  # 6 ms each, at most eight; 420 ms


def test_held_out_points_are_predicted_and_never_fitted():
    result = swept()
    for phase in ("prefill", "decode"):
        found = result.fit(phase)
        held = result.held_out(phase, found)
        assert held and not {one.x for one in held} & {point.x for point in found.points}
        assert all(one.place.held_out and abs(one.error) < 0.05 for one in held)


def test_verdicts_of_a_machine_like_most():
    verdicts = {v.text.split(".")[0]: v.status for v in sweep_verdicts(swept())}
    assert verdicts["Prefill does not wait for reading the weights"] is Status.HOLDS
    assert verdicts["Decode of one request is not compute-bound: a batch shares what it waits for"] is Status.HOLDS
    assert Status.FAILS not in verdicts.values()


def prefill_verdict(kind="openai", chunk=None):
    target = Made()
    details = {} if chunk is None else {"max_num_batched_tokens": str(chunk)}
    target.facts = replace(target.facts, kind=kind, details=details)
    return next(v for v in sweep_verdicts(swept(target)) if v.text.startswith("Prefill does not wait"))


def test_prefill_is_told_only_what_was_shown():
    """512 tokens take 212 ms, a step 5.5 ms: 38 steps, and each chunk reads the weights once."""
    alone = prefill_verdict()
    assert alone.status is Status.HOLDS and "assuming that it was read in one chunk" in alone.reason
    assert "38" in alone.reason and "at most 2.6 % of the time" in alone.reason
    assert "cannot be told from outside" in alone.reason and "compute-bound" not in alone.text
    assert "read in 1 chunk;" in prefill_verdict(kind="transformers").reason
    chunked = prefill_verdict(chunk=128)
    assert (
        chunked.status is Status.HOLDS and "read in 4 chunks" in chunked.reason and "10 % of the time" in chunked.reason
    )
    many = prefill_verdict(chunk=32)
    assert many.status is Status.UNKNOWN and "as much as 42 % of the time" in many.reason


class Kinked(Made):
    """What is no power of two takes longer: a stair that no law of ours follows."""

    def prefill(self, num_tokens):
        return PrefillSample(num_tokens, self._noisy(4e-4 * num_tokens * (1 if num_tokens % 3 else 1.4)))

    def decode(self, position, batch, num_tokens):
        step = self._noisy(5e-3 if batch in (1, 2, 4, 8) else 2e-2)
        return DecodeSample(position + (num_tokens - 1) / 2, batch, (step,) * num_tokens)


def test_a_law_holds_where_it_predicts_and_fails_where_it_does_not():
    for target, status in ((Made(), Status.HOLDS), (Kinked(), Status.FAILS)):
        told = [v for v in sweep_verdicts(swept(target)) if v.text.startswith("The law of")]
        assert [v.status for v in told] == [status, status]
        assert all("held-out points its median error is" in v.reason for v in told)


def test_a_law_is_printed_with_its_range_and_what_theory_has_for_it():
    result = swept()
    law = next(v.text for v in sweep_verdicts(result) if v.text.startswith("Decode time per step"))
    assert "fitted from" in law and "at batch 8" in law
    tables = {table.title: table for section in sweep_parts(result).sections for table in section.tables}
    assert all("in theory" in row[3] for row in tables["Prefill: t = a + b n + c n^2"].rows)
    held = result.held_out("decode", result.fit("decode"))
    rows = tables["Decode: held-out points"].rows
    assert [row[0] for row in rows] == [f"{one.x[0]:,.0f} × {one.place.batch}" for one in held]


def test_a_machine_whose_batches_bring_nothing_is_told():
    verdicts = sweep_verdicts(swept(Made(memory_bound=False)))
    decode = next(v for v in verdicts if v.text.startswith("Decode of one request is not compute-bound"))
    assert decode.status is Status.FAILS
    assert "8 times the arithmetic" in decode.reason


def test_a_refused_place_is_a_failure_with_its_reason_and_the_rest_goes_on():
    result = swept(Made(refuse=lambda phase, at: phase == "decode" and at[1] > 4))
    assert {place.batch for place in result.failures} == {6, 8}
    assert all("too many" in why for why in result.failures.values())
    assert result.fit("decode") is not None
    text = markdown(bench_report(result.facts, [sweep_parts(result)]))
    assert "Not measured: decode of 8 behind" in text


def test_nothing_measured_is_an_error():
    target = Made(refuse=lambda phase, at: True)
    with pytest.raises(SweepError, match="too many"):
        sweep(target, make_plan(512), watch_others=False)
    with pytest.raises(TwinphaseError):
        calibrate(target)


def test_interrupted_sweep_keeps_what_it_has():
    target, count = Made(), 40

    def refuse(phase, at):
        if len(target.asked) > count:
            raise KeyboardInterrupt
        return False

    target.refuse = refuse
    result = sweep(target, make_plan(512), watch_others=False)
    assert result.stopped == "interrupted"
    assert result.visits
    assert any("interrupted" in line for line in sweep_noise(result))


def test_time_limit_ends_the_rounds():
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    plan = Plan(make_plan(512).places, 5, 8, max_seconds=30.0)
    result = sweep(Made(), plan, watch_others=False, clock=clock)
    assert "limit of 30 s" in result.stopped
    assert 0 < len(result.visits) < 5 * len(plan.places)


def test_disturbed_measurements_are_repeated_and_the_quietest_kept(monkeypatch):
    cores = iter([1.0, 0.5, 0.0] + [0.0] * 1000)

    class Watch:
        cores = None

        def __enter__(self):
            return self

        def __exit__(self, *exit):
            self.cores = next(cores)

    monkeypatch.setattr("twinphase.bench.sweep.run.Bystanders", Watch)
    now = [0.0]

    def clock():
        now[0] += 1.0  # long enough for the kernel's ticks to count
        return now[0]

    result = sweep(Made(), Plan((Place("prefill", 500),), 2), clock=clock)
    assert [(m.foreign_cores, m.disturbed, m.kept) for m in result.visits] == [
        (1.0, True, False),
        (0.5, True, False),
        (0.0, False, True),
        (0.0, False, True),
    ]
    assert len(result.points("prefill")[0][1].values) == 2
    assert any("2 measurements were replaced" in line for line in sweep_noise(result))


def test_report_is_whole_and_its_json_has_everything_raw():
    result = swept(quick=True)
    report = bench_report(result.facts, [sweep_parts(result)])
    assert [section.title for section in report.sections] == ["Both phases", "Prefill", "Decode"]
    assert report.conditions["threads"] == "3"
    names = [plot.name for section in report.sections for plot in section.plots]
    assert len(names) == len(set(names)) == 6
    assert all(len(row) == len(t.columns) for s in report.sections for t in s.tables for row in t.rows)
    text = result_json(report)
    assert '"measurements"' in text and '"gaps"' in text
    assert {m.name for m in sweep_metrics(result)} == {m.name for m in report.metrics}
    assert {len(metric.values) for metric in report.metrics} == {3}  # one value per round


def test_retries_end_where_the_machine_is_always_busy(monkeypatch):
    class Watch:
        cores = None

        def __enter__(self):
            return self

        def __exit__(self, *exit):
            self.cores = 1.0

    monkeypatch.setattr("twinphase.bench.sweep.run.Bystanders", Watch)
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    plan = make_plan(512, repetitions=2)
    result = sweep(Made(), plan, clock=clock)
    assert len(result.visits) == 10 * 3 + 2 * len(plan.places) - 10
    assert result.disturbed_share == 1.0
    assert sweep_verdicts(result)[0].text.startswith("The machine was busy")


def test_one_repetition_tells_nothing_of_noise():
    bound = [
        v for v in sweep_verdicts(swept(repetitions=1)) if "compute-bound" in v.text or "wait for reading" in v.text
    ]
    assert [v.status for v in bound] == [Status.UNKNOWN, Status.UNKNOWN]
