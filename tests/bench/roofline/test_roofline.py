from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tiny_gguf import write_tiny_gguf
from twinphase.backends.base import Units
from twinphase.batch import StepWork
from twinphase.cli import run_app
from twinphase.config import EngineConfig, available_cores
from twinphase.engine.stepped import TimedForward
from twinphase.errors import InvalidRequestError
from twinphase.phases.hardware import Ceilings, cache_levels
from twinphase.phases.roofline import PartWork, measured_roofline, parts_of_step, place
from twinphase.phases.work import ModelShape, kv_bytes_per_token
from twinphase_bench.report.report import Status
from twinphase_bench.report.result import result_json
from twinphase_bench.roofline import measure as measuring
from twinphase_bench.roofline.ceilings import CeilingSweep
from twinphase_bench.roofline.findings import MAX_DISAGREEMENT, find
from twinphase_bench.roofline.measure import ModelPoints, RooflinePoint, Sample, Settings, planned
from twinphase_bench.roofline.plots import DrawnPart, roofline_plot
from twinphase_bench.roofline.report import (
    ceilings_table,
    machine_verdict,
    part_table,
    point_table,
    rate_text,
    verdicts,
)
from twinphase_bench.roofline.roofline import roofline, settings_of

MIB = 1 << 20
# Flat bandwidth, so that arithmetic on paper is exact.
CEILINGS = Ceilings(
    "a processor", 2, "generic", ((MIB, 100e9), (64 * MIB, 100e9)), 1000e9, 200e9, None
)
UNITS = Units("int8", "int8", "float32")
SHAPE = ModelShape(
    linear_parameters=10_000_000,
    head_parameters=2_000_000,
    linear_bytes=5_000_000,
    head_bytes=1_000_000,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    kv_token_bytes=1536,
)


# The arithmetic
def test_balance_points_are_peak_over_bandwidth():
    ceilings = replace(CEILINGS, bandwidth=((MIB, 200e9), (16 * MIB, 100e9), (256 * MIB, 50e9)))
    line = measured_roofline(ceilings, (("L2", 2 * MIB), ("L3", 32 * MIB)))
    assert [slope.name for slope in line.slopes] == ["L2, 1 MiB", "L3, 16 MiB", "DRAM, 256 MiB"]
    balances = {(roof.unit, slope.name): balance for roof, slope, balance in line.balances}
    assert balances["int8", "DRAM, 256 MiB"] == pytest.approx(20.0)
    assert balances["float32", "L2, 1 MiB"] == pytest.approx(1.0)
    assert all(roof.unit != "bfloat16" for roof in line.roofs), (
        "a unit that does not exist has no roof"
    )


@pytest.mark.parametrize(
    ("sizes", "caches", "names"),
    [
        ([256], (("L3", 384 * MIB),), ["256 MiB"]),  # a set that fits the cache is not DRAM
        ([1, 4, 8], (), ["1 MiB", "4 MiB", "8 MiB"]),
        ([], (), []),
    ],
)
def test_slopes_are_named_after_what_is_known(sizes, caches, names):
    bandwidth = tuple((size * MIB, 100e9 / size) for size in sizes)
    assert [
        slope.name
        for slope in measured_roofline(replace(CEILINGS, bandwidth=bandwidth), caches).slopes
    ] == names


def test_the_balance_point_is_read_as_a_division():
    ceilings = replace(CEILINGS, bandwidth=((MIB, 200e9), (256 * MIB, 50e9)))
    text = machine_verdict(measured_roofline(ceilings, (("L2", 2 * MIB), ("L3", 32 * MIB)))).text
    assert " / DRAM " in text and " GB/s = balance at 20 FLOP/byte" in text and "MiB" not in text


def test_parts_of_a_step_by_hand():
    work = StepWork(rows=4, decode_contexts=400, logits=4, sequences=4, kv_tokens=400)
    linear, attention = parts_of_step(SHAPE, UNITS, work)
    assert linear.flops == {"int8": 2 * 4 * 12_000_000}
    assert linear.bytes == 6_000_000
    assert attention.flops == {
        "int8": 4 * 4 * 8 * 64 * 400 // 2,
        "float32": 4 * 4 * 8 * 64 * 400 // 2,
    }
    assert attention.bytes == 400 * kv_bytes_per_token(SHAPE) == 400 * 1536
    assert linear.working_set == attention.working_set == 6_000_000 + 400 * 1536
    both = linear.plus(attention)
    assert (both.total_flops, both.bytes) == (
        linear.total_flops + attention.total_flops,
        linear.bytes + attention.bytes,
    )
    assert place(linear, 1.0, None).intensity == pytest.approx(16.0)


def test_caches_grow_with_the_threads_that_have_their_own():
    one = dict(cache_levels(1))
    many = dict(cache_levels(1024))
    assert one.keys() == many.keys() and all(many[name] >= size > 0 for name, size in one.items())


# Placing
def test_a_part_is_placed_by_its_time():
    part = PartWork({"int8": 500_000_000}, 10_000_000, 64 * MIB)  # 0.5 ms of FLOP, 0.1 ms of bytes
    placed = place(part, 1e-3, CEILINGS)
    assert (placed.intensity, placed.rate, placed.byte_rate) == pytest.approx((50, 500e9, 10e9))
    assert (placed.mfu, placed.mbu, placed.bound) == (
        pytest.approx(0.5),
        pytest.approx(0.1),
        "compute",
    )
    over = place(part, 0.25e-3, CEILINGS)
    assert over.mfu == pytest.approx(2.0), "not clamped"
    assert over.over_ceiling and not placed.over_ceiling
    unknown = place(PartWork({"bfloat16": 1000}, 10, MIB), 1.0, CEILINGS)
    assert (unknown.mfu, unknown.bound, unknown.over_ceiling) == (None, "unknown", False)
    assert place(part, 1.0, None).mbu is None


def sample(
    linear: float, attention: float, *, whole: float = 2.0, forward: float = 1.0, split: float = 1.0
) -> Sample:
    parts = {"linear": linear, "attention": attention, "other": 0.1}
    work = PartWork({"int8": 500_000_000}, 10_000_000, 64 * MIB)
    kv = PartWork({"int8": 1_000_000, "float32": 1_000_000}, 1_000_000, 64 * MIB)
    return Sample(whole, forward, whole + split - forward, split, parts, 4, work, kv)


def test_a_finding_takes_medians_and_its_parts_add_up():
    samples = [sample(0.5, 0.2), sample(0.6, 0.1), sample(0.9, 0.3, whole=9.0)]
    found = find(RooflinePoint("decode", 256, 4), samples, CEILINGS)
    assert found.seconds == 2.0
    assert found.tokens_per_second == (2.0, 2.0, pytest.approx(4 / 9))
    assert sum(found.parts.values()) == pytest.approx(2.0)
    assert found.linear.rate == pytest.approx(500_000_000 / 0.6)
    assert found.adds_up


def test_parts_that_do_not_add_up_are_void():
    off = 1 + 2 * MAX_DISAGREEMENT
    found = [find(RooflinePoint("decode", 256, 4), [sample(0.5, 0.2, split=off)] * 3, CEILINGS)]
    assert not found[0].adds_up
    assert all("void" in cell for cell in part_table(found, "decode").rows[0][3:])
    assert "void" in point_table(found, "decode").rows[0]
    verdict = verdicts(measured_roofline(CEILINGS), found)[0]
    assert verdict.status is Status.FAILS and "0 of 1" in verdict.text
    disturbed = verdicts(measured_roofline(CEILINGS), found, "other programs used 1.54 cores")
    assert not {Status.HOLDS, Status.FAILS} & {one.status for one in disturbed}
    assert disturbed[0].status is Status.UNKNOWN and "1.54 cores" in disturbed[0].reason


def test_a_disturbed_measurement_is_not_kept(cache):
    disturbed = CeilingSweep([replace(CEILINGS, provisional=True)], None)
    assert "disturbed" in disturbed.save() and not list(cache.rglob("*.json"))
    assert CeilingSweep([CEILINGS], None).save() == "" and list(cache.rglob("*.json"))


def test_above_100_percent_is_the_first_verdict():
    found = [find(RooflinePoint("prefill", 16), [sample(0.4e-3, 0.2)], CEILINGS)]
    verdict = verdicts(measured_roofline(CEILINGS), found)[0]
    assert verdict.status is Status.VOID
    assert "125.0%" in verdict.text and "count or the ceiling is wrong" in verdict.reason
    assert any("(!)" in cell for cell in part_table(found, "prefill").rows[0])


def test_unknown_ceilings_are_unknown_in_tables():
    found = [find(RooflinePoint("decode", 256), [sample(0.5, 0.2)], None)]
    assert part_table(found, "decode").rows[0][-3:] == ("unknown",) * 3
    nothing = replace(CEILINGS, bandwidth=(), int8_ops=None, float32_flops=None)
    assert machine_verdict(measured_roofline(nothing)).status is Status.UNKNOWN


def test_what_a_quiet_run_measured_replaces_earlier_ceilings_and_a_busy_one_only_adds():
    run = replace(CEILINGS, int8_ops=800e9)
    busy = replace(run, provisional=True)
    assert ("int8, GFLOP/s", "800", "800") in ceilings_table(
        CeilingSweep([run, busy], CEILINGS)
    ).rows
    table = ceilings_table(CeilingSweep([busy, busy], CEILINGS))
    assert ("int8, GFLOP/s", "1,000", "800") in table.rows
    assert not any("bfloat16" in row[0] for row in table.rows)


@pytest.mark.parametrize(
    ("rate", "text"),
    [(911e9, "911 GFLOP/s"), (55.8e9, "55.8 GFLOP/s"), (312e12, "312 TFLOP/s"), (None, "unknown")],
)
def test_rates_have_prefixes(rate, text):
    assert rate_text(rate, "FLOP/s") == text


# What is measured
def test_points_that_do_not_fit_are_named():
    settings = Settings(
        prompt_lengths=(16, 600), batches=(1, 4), batch_context=64, contexts=(64, 5000), steps=2
    )
    points, left_out, room = planned(settings, 1024, None)
    assert RooflinePoint("prefill", 600) in points and RooflinePoint("decode", 64, 4) in points
    assert len(left_out) == 1 and "decode[batch=1,context=5000]" in left_out[0]
    points, left_out, capped = planned(settings, 1024, 700)
    assert RooflinePoint("decode", 64, 4) in points and capped == 700 < room
    assert planned(settings, 1024, 200)[1]


@pytest.mark.parametrize(
    "given", [{"batches": "1,x"}, {"batches": "0,1"}, {"contexts": "4,4"}, {"repetitions": 0}]
)
def test_settings_out_of_range_are_refused(given):
    with pytest.raises(InvalidRequestError):
        settings_of(given, {})


# Drawings
def marks() -> list[DrawnPart]:
    return [
        DrawnPart("prefill", "linear", "prefill linear", "n = 16", 40.0, 400e9, {}),
        DrawnPart("decode", "linear", "batch linear", "batch 1", 2.5, 90e9, {}),
        DrawnPart("decode", "attention", "context attention", "context 64", 4.0, 40e9, {}),
    ]


def test_the_plot_has_every_roof_slope_and_mark():
    plot = roofline_plot(measured_roofline(CEILINGS), marks(), "")
    data = [row for layer in plot.spec["layer"] for row in layer["data"]["values"]]
    assert {row["line"] for row in data if "line" in row} >= {"int8", "float32"}
    assert sum("FLOP / byte" in row for row in data) >= len(marks())
    json.dumps(plot.spec)


def test_the_command_refuses_a_list_that_is_none():
    assert run_app(["roofline", "--batches", "one"]) == 2


def test_what_a_report_will_lack_is_noted_before_anything_is_measured(
    capsys, monkeypatch, tmp_path
):
    def measure(*given: object) -> None:
        assert "no plots and no HTML page" in capsys.readouterr().err
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "vl_convert", None)
    monkeypatch.setattr("twinphase_bench.roofline.roofline.roofline", measure)
    assert run_app(["roofline", "--out", str(tmp_path)]) == 130


# End to end
@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=512)


SMALL = Settings(
    prompt_lengths=(8, 100),
    batches=(1, 2, 4),
    batch_context=32,
    contexts=(16, 1000),
    repetitions=2,
    steps=3,
    config=EngineConfig(max_num_batched_tokens=64),
)


@pytest.fixture(scope="module")
def measured(tiny) -> ModelPoints:
    return measuring.measure_model(str(tiny), SMALL)


def test_every_point_is_measured_with_its_own_work(measured):
    assert {str(point) for point in measured.samples} == {
        "prefill[n=8]",
        "prefill[n=100]",
        "decode[batch=1,context=32]",
        "decode[batch=2,context=32]",
        "decode[batch=4,context=32]",
        "decode[batch=1,context=16]",
    }
    assert len(measured.left_out) == 1
    for point, samples in measured.samples.items():
        assert len(samples) == SMALL.repetitions
        for one in samples:
            assert 0 < one.forward < one.seconds
            assert sum(one.parts.values()) <= one.split_forward * 1.0001
            assert all(spent > 0 for spent in one.parts.values())
        if point.phase == "decode":
            assert (
                samples[0].linear.bytes
                == measured.workshop.shape.linear_bytes + measured.workshop.shape.head_bytes
            )
            contexts = (
                samples[0].attention.bytes
                / kv_bytes_per_token(measured.workshop.shape)
                / point.batch
            )
            assert point.tokens < contexts < point.tokens + 40
    chunks = measured.samples[RooflinePoint("prefill", 100)][0]
    # Two chunks of 64 and 36 tokens: weights twice, the last with the head, KV of 64 and of 100
    # tokens.
    shape = measured.workshop.shape
    assert chunks.linear.bytes == 2 * shape.linear_bytes + shape.head_bytes
    assert chunks.attention.bytes == 164 * kv_bytes_per_token(shape)
    assert (
        chunks.attention.total_flops
        == 4 * shape.num_layers * shape.num_heads * shape.head_dim * 100 * 101 // 2
    )


def test_ctrl_c_leaves_the_complete_repetitions(tiny):
    told: list[str] = []

    def interrupt(what: str, done: int, total: int) -> None:
        told.append(what)
        if total and done == total // 2 + 1:
            raise KeyboardInterrupt

    found = measuring.measure_model(
        str(tiny), replace(SMALL, batches=(1,), contexts=(16,)), interrupt
    )
    assert all(len(many) == 1 for many in found.samples.values())
    assert "interrupted after 1 of 2" in found.left_out[-1]


@pytest.mark.parametrize(
    "recurrent", [{}, {"convolutions": (0,)}, {"deltas": (0,)}, {"spaces": (0,)}]
)
def test_steps_in_parts_compute_the_same(recurrent, tmp_path):
    from twinphase import LLM, SamplingParams

    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", heads=2, kv_heads=1, **recurrent)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    tokens = []
    for in_parts in (False, True):
        llm = LLM(tiny, max_model_len=256)
        if in_parts:
            backend = llm.engine.executor.backend
            llm.engine.executor.backend = watched = TimedForward(backend)
            watched.in_parts = True
        tokens.append(
            llm.generate([list(range(5, 90))], params, use_tqdm=False)[0].outputs[0].token_ids
        )
    assert tokens[0] == tokens[1]
    assert all(seconds > 0 for seconds in watched.parts.values())
    assert ("scan" in watched.parts) == bool(recurrent) and "attention" in watched.parts


@pytest.fixture
def given_ceilings(monkeypatch) -> tuple[list[int], list[Ceilings]]:
    """Made-up ceilings; returns the threads of each measurement and what is kept."""
    from twinphase_bench.roofline import roofline as module

    counts: list[int] = []
    kept: list[Ceilings] = []

    def ceilings(config: EngineConfig, repetitions: int, _: object) -> list[Ceilings]:
        threads = config.threads or available_cores()
        counts.append(threads)
        # The second measurement, which is the first after the model, is too low.
        rate = 1.0 if len(counts) < 3 and repetitions == 1 else 400e9
        one = replace(
            CEILINGS, threads=threads, int8_ops=rate, float32_flops=rate, bfloat16_flops=rate
        )
        return [one] * repetitions

    monkeypatch.setattr(module, "measure_ceilings", ceilings)
    monkeypatch.setattr("twinphase_bench.roofline.ceilings.save_ceilings", kept.append)
    return counts, kept


def test_a_whole_report(tiny, given_ceilings, tmp_path):
    counts, kept = given_ceilings
    told: list[str] = []
    report = roofline(str(tiny), SMALL, 2, lambda what, done, total: told.append(what))
    names = {metric.name for metric in report.metrics}
    assert {
        "prefill[n=8] tok/s",
        "decode[batch=4,context=32] tok/s",
        f"bandwidth[MiB=1,threads={counts[0]}]",
    } <= names
    assert all(
        len(metric.values) in (2, 4) for metric in report.metrics
    )  # ceilings on both sides of the model
    assert report.conditions["model SHA-256"] != "unknown"
    assert {section.title for section in report.sections} >= {"The machine", "Prefill", "Decode"}
    assert any("left out" in line.lower() for line in report.noise)
    assert any("prefill" in what for what in told)
    assert (
        json.loads(result_json(report))["data"]["samples"]["prefill[n=8]"][0]["parts"]["linear"] > 0
    )
    assert len(counts) == 2 and {one.int8_ops for one in kept} == {400e9}, (
        "measured before and after, and kept"
    )
    from twinphase_bench.report.render import write_report

    written = write_report(report, tmp_path)
    assert written.html.stat().st_size > 10_000 and any(
        "roofline" in path.name for path in written.plots
    )


def test_what_ranks_exchange(tiny, given_ceilings):
    settings = Settings(config=EngineConfig(threads=1, tensor_parallel_size=2))
    report = roofline(None, settings, 1)
    assert report.data["link"]["bandwidth"] > 0 and report.data["link"]["latency"] > 0
    table = report.sections[0].tables[-1]
    assert [row[0] for row in table.rows] == ["512 rows of 8,192 bytes", "1 row of 256 bytes"]
    with pytest.raises(InvalidRequestError, match="without a model"):
        roofline(str(tiny), settings)


def test_ceilings_too_low_are_measured_again(tiny, given_ceilings):
    report = roofline(
        str(tiny),
        replace(SMALL, repetitions=1, config=EngineConfig(max_num_batched_tokens=64, threads=1)),
        1,
    )
    assert given_ceilings[0] == [1, 1, 1], "before the model, after it, and once more"
    assert report.verdicts[0].status is not Status.VOID, "the last measurement was right"


def test_efficiencies_count_from_the_bandwidth_of_this_run_and_the_best_peaks_ever():
    first = replace(
        CEILINGS, int8_ops=800e9, bandwidth=((MIB, 70e9), (64 * MIB, 50e9)), provisional=True
    )
    second = replace(
        CEILINGS, int8_ops=900e9, bandwidth=((MIB, 90e9), (64 * MIB, 40e9)), provisional=True
    )
    sweep = CeilingSweep([first, second], CEILINGS)
    assert (sweep.now.int8_ops, sweep.now.bandwidth) == (1000e9, ((MIB, 90e9), (64 * MIB, 50e9)))
