"""The sweep over a made-up target whose times are a known law of noise: no clock, no machine."""

import itertools
from dataclasses import replace

import pytest
from tests.bench.made_target import MadeTarget

from twinphase.errors import TwinphaseError
from twinphase_bench.report.markdown import markdown
from twinphase_bench.report.report import Status
from twinphase_bench.report.result import result_json
from twinphase_bench.run import bench_report, run_sweep, sweep_parts
from twinphase_bench.sweep.plan import Pace, Place, Plan, SweepOptions, make_plan
from twinphase_bench.sweep.report import sweep_metrics, sweep_noise
from twinphase_bench.sweep.run import SweepError, calibrate, sweep
from twinphase_bench.sweep.verdicts import sweep_verdicts

PHASES = ("prefill", "decode")


def plan_for(context, pace=None, max_seconds=None, **options):
    return make_plan(context, SweepOptions(max_seconds=max_seconds, **options), pace)


def swept(target=None, **options):
    return run_sweep(
        target or MadeTarget(), SweepOptions(**options), lambda what, done, total: None
    )


@pytest.fixture(scope="module")
def usual():
    """A sweep of a typical machine."""
    return swept()


@pytest.fixture
def watch(monkeypatch):
    """Other programs use the numbers of cores in the fixture's list; the last one repeats."""
    cores = [0.0]

    class Watch:
        def __enter__(self):
            return self

        def __exit__(self, *exit):
            self.cores = cores.pop(0) if len(cores) > 1 else cores[0]

    monkeypatch.setattr("twinphase_bench.sweep.run.Bystanders", Watch)
    return cores


def ticking():
    """A clock that advances by a second per reading, so that the kernel's ticks count."""
    return itertools.count(1.0).__next__


def test_plan_reaches_from_ten_tokens_to_the_end_of_the_context():
    plan = plan_for(8192)
    prefill, decode = ([place for place in plan.places if place.phase == phase] for phase in PHASES)
    assert prefill[0].length == 10 and 8100 < prefill[-1].length < 8192
    assert max(place.length for place in decode) + plan.decode_tokens < 8192
    assert {place.batch for place in decode} == {1, 2, 4, 8}
    assert all(b.length <= 2 * a.length for a, b in itertools.pairwise(prefill))


@pytest.mark.parametrize("context", [64, 512, 2048, None, 131072])
@pytest.mark.parametrize("quick", [False, True])
def test_every_context_has_places_enough_and_each_once(context, quick):
    places = plan_for(context, quick=quick).places
    assert all(sum(place.phase == phase for place in places) >= 5 for phase in PHASES)
    assert len(set(places)) == len(places) and min(place.length for place in places) > 0


def test_sweeps_of_other_lengths_share_places():
    """This allows comparing engines of different speeds."""
    one, other = ({(p.phase, p.length, p.batch) for p in plan_for(n).places} for n in (8192, 3000))
    assert len(one & other) >= 0.6 * len(other)
    quick = {(p.phase, p.length, p.batch) for p in plan_for(8192, quick=True).places}
    assert len(quick & one) >= 0.6 * len(quick)


def test_time_limit_shortens_prompts_and_says_so():
    pace = Pace(token=1e-3, step=0.01)
    long = plan_for(8192, pace)
    short = plan_for(8192, pace, max_seconds=60)
    assert short.longest < long.longest
    assert pace.estimate(short) <= 60 < pace.estimate(long)
    assert len(short.places) > 0.6 * len(long.places)
    result = sweep(MadeTarget(), short, watch_others=False)
    assert any("--max-seconds" in line for line in sweep_noise(result))


def test_every_place_is_measured_in_every_round_in_another_order():
    plan = plan_for(512, repetitions=3)
    result = sweep(MadeTarget(), plan, watch_others=False)
    orders = [[one.place for one in result.visits if one.round == number] for number in range(3)]
    assert all(sorted(order, key=str) == sorted(plan.places, key=str) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert all(len(point.values) == 3 for phase in PHASES for point in result.points(phase))


def test_short_prefills_are_measured_several_times_in_a_row():
    result = sweep(
        MadeTarget(), Plan((Place("prefill", 10), Place("prefill", 1000)), 1), watch_others=False
    )
    by_length = {one.place.length: len(one.samples) for one in result.visits}
    assert by_length == {10: 8, 1000: 1}  # 6 ms each, at most eight; 420 ms


def verdict(result, beginning):
    return next(verdict for verdict in sweep_verdicts(result) if verdict.text.startswith(beginning))


def test_verdicts_of_a_machine_like_most(usual):
    assert verdict(usual, "Prefill does not wait for reading the weights.").status is Status.HOLDS
    assert verdict(usual, "Decode of one request is not compute-bound").status is Status.HOLDS
    assert Status.FAILS not in {verdict.status for verdict in sweep_verdicts(usual)}


@pytest.mark.parametrize(
    ("kind", "chunk", "status", "reasons"),
    [
        (
            "openai",
            "",
            Status.HOLDS,
            ("38", "assuming that it was one chunk", "at most 2.6 % of the time"),
        ),
        ("openai", "", Status.HOLDS, ("cannot be seen from outside",)),
        ("transformers", "", Status.HOLDS, (", in 1 chunk;",)),
        ("openai", "128", Status.HOLDS, (", in 4 chunks", "10 % of the time")),
        ("openai", "32", Status.UNKNOWN, ("as much as 42 % of the time",)),
    ],
)
def test_prefill_is_told_only_what_was_shown(kind, chunk, status, reasons):
    """512 tokens take 212 ms, a step 5.5 ms: 38 steps, and each chunk reads the weights once."""
    target = MadeTarget()
    target.facts = replace(target.facts, kind=kind, details={"max_num_batched_tokens": chunk})
    found = verdict(swept(target), "Prefill does not wait")
    assert found.status is status and all(reason in found.reason for reason in reasons)


def test_growth_is_told_from_measured_points(usual):
    prefill = verdict(usual, "A prompt token takes").text
    decode = verdict(usual, "A decode step of one request").text
    assert " ms at 10," in prefill and " ms at position 44 and" in decode and "+" in decode


def test_a_machine_whose_batches_bring_nothing_is_told():
    decode = verdict(
        swept(MadeTarget(memory_bound=False)), "Decode of one request is not compute-bound"
    )
    assert decode.status is Status.FAILS and "8 times the arithmetic" in decode.reason


def test_one_repetition_tells_nothing_of_noise():
    result = swept(repetitions=1)
    for claim in (
        "Prefill does not wait for reading",
        "Decode of one request is not compute-bound",
    ):
        assert verdict(result, claim).status is Status.UNKNOWN


def test_a_refused_place_is_a_failure_with_its_reason_and_the_rest_goes_on():
    result = swept(MadeTarget(refuse=lambda phase, length, batch: batch > 4))
    assert {place.batch for place in result.failures} == {8}
    assert all("too many" in why for why in result.failures.values())
    text = markdown(bench_report(result.facts, [sweep_parts(result)]))
    assert "Not measured: decode at batch 8 after" in text


def test_nothing_measured_is_an_error():
    target = MadeTarget(refuse=lambda *_: True)
    with pytest.raises(SweepError, match="too many"):
        sweep(target, plan_for(512), watch_others=False)
    with pytest.raises(TwinphaseError):
        calibrate(target)


def test_interrupted_sweep_keeps_what_it_has():
    target = MadeTarget()

    def refuse(*_):
        if target.num_asked > 40:
            raise KeyboardInterrupt
        return False

    target.refuse = refuse
    result = sweep(target, plan_for(512), watch_others=False)
    assert result.stopped == "interrupted" and result.visits
    assert any("interrupted" in line for line in sweep_noise(result))


def test_time_limit_ends_the_rounds():
    plan = Plan(plan_for(512).places, 5, 8, max_seconds=30.0)
    result = sweep(MadeTarget(), plan, watch_others=False, clock=ticking())
    assert "limit of 30 s" in result.stopped
    assert 0 < len(result.visits) < 5 * len(plan.places)


def test_disturbed_measurements_are_repeated_and_the_quietest_kept(watch):
    watch[:] = [1.0, 0.5, 0.0]
    result = sweep(MadeTarget(), Plan((Place("prefill", 500),), 2), clock=ticking())
    assert [(m.foreign_cores, m.disturbed, m.kept) for m in result.visits] == [
        (1.0, True, False),
        (0.5, True, False),
        (0.0, False, True),
        (0.0, False, True),
    ]
    assert len(result.points("prefill")[0].values) == 2
    assert any("2 measurements were replaced" in line for line in sweep_noise(result))


def test_retries_end_where_the_machine_is_always_busy(watch):
    watch[:] = [1.0]
    plan = plan_for(512, repetitions=2)
    result = sweep(MadeTarget(), plan, clock=ticking())
    assert len(result.visits) == 10 * 3 + 2 * len(plan.places) - 10
    assert result.disturbed_share == 1.0
    assert sweep_verdicts(result)[0].text.startswith("The machine was busy")


def test_report_is_whole_and_its_json_has_everything_raw():
    result = swept(quick=True)
    report = bench_report(result.facts, [sweep_parts(result)])
    assert [section.title for section in report.sections] == ["Both phases", "Prefill", "Decode"]
    assert report.conditions["threads"] == "3"
    names = [plot.name for section in report.sections for plot in section.plots]
    assert len(names) == len(set(names)) == 4
    text = result_json(report)
    assert '"measurements"' in text and '"times"' in text
    assert {m.name for m in sweep_metrics(result)} == {m.name for m in report.metrics}
    assert {len(metric.values) for metric in report.metrics} == {3}  # one value per round
