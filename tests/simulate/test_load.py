"""Loads of a simulated fleet: ledgers, users, speculation, prices, calibration and recordings."""

import json
from dataclasses import replace

import pytest

from schedules import SHAPE
from twinphase.config import EngineConfig
from twinphase.errors import InvalidRequestError
from twinphase.phases.cost import FEATURES, CostModel
from twinphase.server.live.recording import read_recording
from twinphase.simulate.calibration import Calibration, calibration_of, read_calibration
from twinphase.simulate.deployment import Deployment, Machine, roles_of
from twinphase.simulate.prices import token_prices
from twinphase.simulate.recording import SimulationRecorder
from twinphase.simulate.run import run_requests
from twinphase.simulate.spec import FleetSpec, Front, TraceRequest, WorkerSpec
from twinphase.simulate.users import Users
from twinphase.workload.lengths import Distribution

# A step costs 5 ms, and a row 1 ms.
PRICES = [{"step": 5e-3, "few_rows": 1e-3, "many_rows": 1e-3}.get(name, 0.0) for name in FEATURES]
CONFIG = EngineConfig(num_kv_blocks=4096, max_model_len=1 << 20, itl_slo_ms=None)


def fleet(roles=("both",), config=CONFIG, **fields):
    workers = [WorkerSpec(role, CostModel(PRICES), config) for role in roles]
    fields = {"shape": SHAPE, "block_bytes": 1000, "bytes_per_second": 1e6, **fields}
    return FleetSpec(workers, **fields)


def asking(arrival, num_prompt, num_outputs, first=0, num_reasoning=0):
    prompt = list(range(first, first + num_prompt))
    return TraceRequest(arrival, num_outputs, lambda: prompt, num_reasoning=num_reasoning)


def test_ledgers_add_up_to_each_request_and_name_the_culprit_of_a_stall():
    decoding = asking(0.0, 16, 100)
    long = asking(0.1, 400, 2, first=10_000)
    front = Front(request=1e-3, per_prompt_token=1e-5, token=2e-3)
    done = run_requests(fleet(front=front), [decoding, long])
    for one in done.observations:
        ledger = one.claims["timings"]["ledger_ms"]
        # The ledger ends with the last step, the client's time with the token's delivery.
        assert sum(ledger.values()) / 1e3 == pytest.approx(one.e2e - front.token, abs=1e-5)
    assert done.observations[1].claims["timings"]["ledger_ms"]["tokenize"] == pytest.approx(5.0)
    (culprit,) = done.culprits
    assert (culprit.number, culprit.stalled) == (1, 1)
    assert culprit.seconds == pytest.approx(done.stall_seconds) == pytest.approx(0.4)
    (pool,) = done.pools
    assert pool.prefill * done.seconds == pytest.approx(0.4 + 0.021, rel=0.05)


@pytest.mark.parametrize("roles", [("both",), ("prefill", "decode")], ids=["alone", "pools"])
def test_a_recording_has_every_request_with_its_own_timings(roles, tmp_path):
    requests = [asking(0.05 * number, 64, 5, first=1000 * number) for number in range(6)]
    spec = fleet(roles)
    recorder = SimulationRecorder(spec, "tiny")
    done = run_requests(spec, requests, observer=recorder)
    recorder.write(tmp_path / "simulated.jsonl.gz")
    lanes = read_recording(tmp_path / "simulated.jsonl.gz").lanes.values()
    assert len(lanes) == len(requests)
    timings = sorted(one["timings"]["ttft_ms"] for one in lanes)
    assert timings == pytest.approx(sorted(1e3 * one.ttft for one in done.observations), abs=1e-3)


def test_users_wait_for_their_answers_and_find_their_history_in_the_cache():
    fixed = Distribution.parse
    users = Users(2, 1.0, fixed("40"), fixed("24"), turns=3, shared_prefix=32)
    done = run_requests(fleet(), [], users=users, num_requests=6)
    assert len(done.outcomes) == 6
    lengths = sorted(one.num_prompt for one in done.outcomes)
    assert lengths == [72, 72, 136, 136, 200, 200]
    longest = [one for one in done.outcomes if one.num_prompt == 200]
    # The last token of the answer before was never computed: 159 of 160, in whole blocks.
    assert all(one.num_cached == 144 for one in longest)
    busy = [(one.arrival, one.token_times[-1]) for one in done.outcomes]
    # Of two users, no more than two requests exist at any time.
    assert all(sum(a <= moment < b for a, b in busy) <= 2 for moment, _ in busy)


def test_right_drafts_save_steps_and_wrong_ones_are_not_verified():
    request = [asking(0.0, 32, 120)]
    plain = run_requests(fleet(), request)
    right, wrong = (
        run_requests(fleet(drafts=3, acceptance=acceptance), request) for acceptance in (1.0, 0.0)
    )
    assert all(len(one.outcomes[0].token_times) == 120 for one in (plain, right, wrong))
    assert right.num_steps < plain.num_steps / 2
    assert wrong.num_steps == plain.num_steps


def test_prices_add_up_and_thinking_tokens_bear_their_part():
    requests = [asking(0.0, 160, 30, num_reasoning=20), asking(9.0, 160, 30, num_reasoning=20)]
    spec = fleet()
    done = run_requests(spec, requests)
    prices = token_prices(done, spec, {"both": 3.6})
    assert prices.total == pytest.approx(done.seconds * 1e-3)
    assert prices.prefill + prices.decode == pytest.approx(prices.total)
    cached = done.outcomes[1].num_cached
    assert cached == 144
    decode = (prices.thinking * 40 + prices.answer * 20) / 1e6
    assert decode == pytest.approx(prices.decode)
    assert prices.input * (320 - cached) / 1e6 == pytest.approx(prices.prefill)
    assert done.observations[0].ttfo > done.observations[0].ttft


@pytest.mark.parametrize("text", ["0", "-5", "9-3", "uniform:1", "lognormal:5", "poisson:3", "x"])
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(InvalidRequestError, match="is not a distribution"):
        Distribution.parse(text)


def test_hardware_elsewhere_is_its_datasheet_at_the_stated_efficiency():
    one = Deployment("llama-3.1-8b", Machine("h100-sxm"))
    half = Deployment("llama-3.1-8b", Machine("h100-sxm", mbu=0.375))
    request = [asking(0.0, 16, 50)]
    tpot, slower = (
        run_requests(found.fleet(), request).observations[0].tpot for found in (one, half)
    )
    # 15.0 GB of layers and head at 0.75 of 3.35 TB/s, and half a millisecond.
    assert tpot == pytest.approx(15.0e9 / (0.75 * 3.35e12) + 5e-4, rel=0.01)
    assert slower == pytest.approx(2 * (tpot - 5e-4) + 5e-4, rel=0.01)
    with pytest.raises(InvalidRequestError, match="does not fit"):
        Deployment("llama-3.1-70b", Machine("rtx-4090")).fleet()
    assert Deployment("llama-3.1-8b", Machine("h100-sxm"), roles_of(None, 2, 3)).title.startswith(
        "2P3D"
    )


def test_a_calibration_learns_steps_and_gaps_from_a_log_and_survives_its_file(tmp_path):
    log = tmp_path / "steps.jsonl"
    write_log(log, 300, seconds=0.012, gap=0.002)
    found = calibration_of(log, first=10)
    work_of_one = found.times.seconds(replace_rows(1))
    assert work_of_one == pytest.approx(0.012, rel=0.05)
    assert found.between_steps == pytest.approx(0.002)
    assert found.noise[len(found.noise) // 2] == pytest.approx(1.0, abs=0.02)
    found.save(tmp_path / "kept.json")
    kept = read_calibration(tmp_path / "kept.json")
    assert isinstance(kept, Calibration)
    assert kept.times.learned == {**found.times.learned, "prices": tuple(kept.times.prices)}
    assert kept.worker("both", CONFIG).between_steps == pytest.approx(0.002)
    assert (found.source, kept.source, read_calibration(log).source) == ("steps", "kept", "kept")
    (tmp_path / "short.jsonl").write_text(log.read_text()[:200])
    with pytest.raises(InvalidRequestError):
        read_calibration(tmp_path / "short.jsonl")


def replace_rows(rows):
    from twinphase.batch import StepWork

    return StepWork.of_decodes(rows, 20)


def write_log(path, num_tokens, *, seconds, gap):
    """The log of a lone request that decodes."""
    from twinphase.engine.trace import TraceWriter, trace_header
    from twinphase.request import Request, SamplingParams
    from twinphase.scheduler.scheduler import Scheduler
    from twinphase.simulate.worker import SimulatedExecutor

    costs = CostModel(PRICES)
    scheduler = Scheduler(replace(CONFIG, max_model_len=1024), costs)
    with path.open("w") as file:
        writer = TraceWriter(file, trace_header(scheduler, costs))
        request = Request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=num_tokens))
        writer.add(request)
        scheduler.add(request)
        now = 0.0
        while scheduler.has_work:
            batch = scheduler.schedule()
            output = SimulatedExecutor().execute(batch)
            writer.step({}, batch, output)
            scheduler.commit(batch, output)
            costs.observe(batch.work, seconds, gap)
            writer.observe(seconds, gap, start=now, drafting=0.0, cpu_wait=0.0)
            now += seconds + gap
    assert json.loads(path.read_text().splitlines()[0])["event"] == "header"


def test_a_log_is_simulated_with_other_options(tmp_path, capsys):
    from twinphase.cli import run_app

    log = tmp_path / "steps.jsonl"
    write_log(log, 60, seconds=0.008, gap=0.002)
    assert run_app(["replay", str(log), "--with", "max_num_batched_tokens=64", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["requests"].values()
    assert len(found["with"]["token_times"]) == 60
    logged, simulated = (found[kind]["token_times"][-1] for kind in ("logged", "simulated"))
    assert simulated == pytest.approx(logged, rel=0.1)
    # Of a prompt of three tokens, one step computes one.
    assert run_app(["replay", str(log), "--with", "max_num_seqs=1,max_num_batched_tokens=1"]) == 0
    assert "TTFT p50" in capsys.readouterr().out
    assert run_app(["replay", str(log), "--with", "threads=4"]) == 2
    assert "cannot be used" in capsys.readouterr().err


def trials_of(source, ratios):
    """Trials whose real TTFT is the simulated one times each ratio."""
    from twinphase.simulate.errors import Trial

    words = ("cpu", "tiny", "2026-01-01", "one engine", "agents")
    return [
        Trial(*words, 50, 0.8, {"ttft_p50": 2.0 * ratio}, {"ttft_p50": 2.0}, source=source)
        for ratio in ratios
    ]


def test_a_band_holds_four_of_five_pairs_and_is_wider_for_a_worse_source(tmp_path):
    from twinphase.simulate.errors import bands, error_sentence, read_trials, write_trials

    assert read_trials()
    assert bands([], "steps") == {} and "unknown" in error_sentence([], "steps")
    # Of nine pairs the eighth by size sets the width, whether it was too high or too low.
    ratios = [1.0, 1.01, 1.02, 0.99, 1.1, 1.05, 1.03, 1 / 1.25, 3.0]
    steps = trials_of("steps", ratios)
    write_trials(steps, tmp_path / "errors.json")
    kept = read_trials(tmp_path / "errors.json")
    band = bands(kept, "steps")["ttft_p50"]
    assert (band.name, band.pairs, band.is_least) == ("TTFT p50", 9, False)
    assert band.around(1.0) == pytest.approx((0.8, 1.25))
    assert band.contains(1.2, 1.0) and not band.contains(1.3, 1.0)
    # Without pairs of a worse source, the band is no more than a lower bound.
    assert bands(kept, "datasheet")["ttft_p50"].is_least
    assert "no real run was compared" in error_sentence(kept, "datasheet")
    sheet = trials_of("datasheet", [2.0, 1.1, 1.1, 1.1])
    wide = bands([*kept, *sheet], "datasheet")["ttft_p50"]
    assert (wide.pairs, wide.is_least, wide.factor) == (4, False, pytest.approx(2.0))
    assert "worst 50%" in error_sentence(sheet, "datasheet")
    # A source between them has the band of the worse one; three pairs are too few for their own.
    few = trials_of("kept", [1.0, 1.0, 1.0])
    assert bands([*kept, *few, *sheet], "kept")["ttft_p50"].factor == pytest.approx(2.0)
    # A worse source that happened to be lucky is not believed.
    lucky = trials_of("kept", [1.0] * 9)
    assert bands([*kept, *lucky], "kept")["ttft_p50"].factor == pytest.approx(1.25)


def test_variation_of_step_times_keeps_their_total():
    from twinphase.simulate.calibration import _noise

    steps = [(0.02, 0.01)] * 10 + [(0.9, 1.0)] * 10
    noise = _noise(steps)
    assert sum(noise) / len(noise) == pytest.approx(9.2 / 10.1)
    assert noise[0] / noise[-1] == pytest.approx(2 / 0.9)


def test_gaps_and_steps_together_take_what_they_took(tmp_path):
    from twinphase.simulate.calibration import _gap_line

    gaps = [(size, 1e-3 + 1e-4 * size) for size in (1, 2, 4) for _ in range(9)]
    assert _gap_line(gaps) == pytest.approx((1e-3, 1e-4))
    fixed, more = _gap_line([*gaps, (2, 0.05)])  # a pause is shared out
    assert 28 * fixed + more * 65 == pytest.approx(sum(gap for _, gap in gaps) + 0.05)


def test_measured_points_of_both_phases_become_step_times():
    from twinphase.batch import StepWork
    from twinphase.simulate.points import MeasuredPoint, calibration_of_points

    model = CostModel([1e-2, 1e-3, 5e-4, 0.0, 1e-7, 2e-6, 1e-4, 0.0, 2e-3])
    works = {
        ("prefill", tokens, 1): MeasuredPoint("prefill", tokens, 0.0).works(512, None)
        for tokens in (16, 64, 256, 512, 2048)
    }
    works |= {
        ("decode", tokens, batch): [StepWork.of_decodes(batch, tokens + 1)]
        for tokens, batch in ((256, 1), (2048, 1), (256, 4), (256, 32))
    }
    points = [
        MeasuredPoint(phase, tokens, sum(map(model.seconds, steps)), batch)
        for (phase, tokens, batch), steps in works.items()
    ]
    one = Deployment("llama-3.2-1b", Machine("this"))
    found = calibration_of_points(points, one, "roofline")
    assert (found.source, found.steps) == ("roofline", 9)
    for point, steps in zip(points, works.values(), strict=True):
        assert sum(map(found.times.seconds, steps)) == pytest.approx(point.seconds, rel=0.1)
    with pytest.raises(InvalidRequestError, match="both phases"):
        calibration_of_points(points[:2], one, "roofline")
