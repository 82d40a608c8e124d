"""`twinphase simulate` from its options to its report; the engine's side is in tests/simulate."""

import json
from dataclasses import replace
from statistics import mean, median

import pytest

from twinphase import Deployment, Machine, MeasuredPoint, calibration_of_points, run_requests
from twinphase.cli import run_app
from twinphase.errors import InvalidRequestError
from twinphase.phases.slo import Slos
from twinphase_bench.load.plan import LoadOptions
from twinphase_bench.report.report import Metric, Report
from twinphase_bench.report.result import result_json
from twinphase_bench.simulate.ask import simulated
from twinphase_bench.simulate.from_bench import measured_machine
from twinphase_bench.simulate.options import UserOptions, load_plan

H100 = "llama-3.1-8b --hardware h100-sxm --seed 3"


def simulate(capsys, words, code=0):
    assert run_app(["simulate", *words.split()]) == code
    return capsys.readouterr()


def test_a_load_of_users_is_answered_as_bench_would(capsys, tmp_path):
    file = tmp_path / "simulated.jsonl.gz"
    words = (
        f"{H100} --users 6 --think-time 1 --num-prompts 12 --reasoning-tokens 40 --output-tokens 20"
    )
    found = json.loads(simulate(capsys, f"{words} --price 2 --recording {file} --json").out)
    assert {metric["name"] for metric in found["metrics"]} >= {
        "ttft_p50_seconds",
        "tpot_p50_seconds",
    }
    observations = found["data"]["load"]["observations"]
    assert len(observations) == 12
    assert all(one["num_reasoning_tokens"] == 40 for one in observations)
    titles = [table["title"] for section in found["sections"] for table in section["tables"]]
    assert {"Utilisation of both phases", "Prices"} <= set(titles)
    assert any(line.startswith("Bands: ") for line in found["noise"])
    band = found["data"]["bands"]["ttft_p50"]
    assert band["low"] < band["simulated"] < band["high"] and band["pairs"] >= 4
    (median,) = (m["values"][0] for m in found["metrics"] if m["name"] == "ttft_p50_seconds")
    assert band["simulated"] == pytest.approx(median)
    assert file.stat().st_size > 1000


def test_a_missed_level_names_its_phase_and_a_flag_that_was_simulated(capsys):
    words = "--random-input-len 2000 --random-output-len 50 --num-prompts 40 --request-rate 12"
    shown = simulate(capsys, f"{H100} {words} --goodput ttft:150").out
    assert "requests missed ttft: prefill" in " ".join(shown.split())
    assert "of the requests meet ttft <= 150 ms" in " ".join(shown.split())
    quiet = simulate(capsys, f"{H100} {words} --goodput ttft:150 --no-repair").out
    assert "With --" not in quiet


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("", "There is no load"),
        ("--users 3 --request-rate 2", "together with"),
        ("--turns 3 --request-rate 2", "--turns needs --users"),
        ("--users 3 --acceptance 0.5", "belong together"),
        ("--users 3 --prompt-tokens many", "is not a distribution"),
        ("--users 3 --price 1 --price 1 --price 1", "is given 3 times"),
    ],
)
def test_what_cannot_be_is_refused(words, what, capsys):
    assert what in simulate(capsys, f"{H100} {words}", code=2).err


def test_a_result_of_bench_gives_the_efficiencies_of_a_datasheet(tmp_path, capsys):
    def result(prefill, step):
        names = ("prefill_seconds[n=1000]", "decode_step_seconds[position=500,batch=1]")
        metrics = [
            Metric(name, "s", "lower", (value,))
            for name, value in zip(names, (prefill, step), strict=True)
        ]
        report = Report("bench", "made up", [], {}, metrics=metrics)
        (tmp_path / "result.json").write_text(result_json(report))
        return tmp_path / "result.json"

    deployment = Deployment("llama-3.1-8b", Machine("h100-sxm"))
    # 15.0 GB in 9 ms, and 15 TFLOP in 40 ms.
    found = measured_machine(result(0.04, 0.009), deployment)
    assert found.mbu == pytest.approx(15.0e9 / 3.35e12 / 0.009, rel=0.15)
    assert found.mfu == pytest.approx(2 * 7.0e9 * 1000 / 989e12 / 0.04, rel=0.15)
    words = f"{H100} --users 2 --num-prompts 4 --calibrate {result(0.04, 0.009)} --json"
    conditions = json.loads(simulate(capsys, words).out)["conditions"]
    assert f"MBU {found.mbu:g}" in conditions["step times"]
    with pytest.raises(InvalidRequestError, match="would be"):
        measured_machine(result(0.04, 0.001), deployment)
    words = f"llama-3.1-8b --users 2 --num-prompts 4 --calibrate {result(0.04, 0.009)} --json"
    assert (
        "2 points of bench" in json.loads(simulate(capsys, words).out)["conditions"]["step times"]
    )


def test_a_result_of_roofline_gives_step_times(tmp_path):
    rates = {"prefill[n=1000] tok/s": 25_000.0, "decode[batch=1,context=500] tok/s": 1 / 0.009}
    rates |= {"decode[batch=8,context=256] tok/s": 800.0, "prefill[n=1000] linear seconds": 0.02}
    metrics = [Metric(name, "", "higher", (value,)) for name, value in rates.items()]
    file = tmp_path / "result.json"
    file.write_text(result_json(Report("roofline", "made up", [], {}, metrics=metrics)))
    deployment = Deployment("llama-3.1-8b", Machine("h100-sxm"))
    found = measured_machine(file, deployment)
    assert found.source == "roofline"
    assert found.mbu == pytest.approx(15.0e9 / 3.35e12 / 0.009, rel=0.15)
    assert found.mfu == pytest.approx(2 * 7.0e9 * 1000 / 989e12 / 0.04, rel=0.15)


def test_of_simulations_with_different_slow_steps_the_typical_one_is_shown():
    one = Deployment("llama-3.2-1b", Machine("this"))
    points = [MeasuredPoint("prefill", 512, 0.1), MeasuredPoint("decode", 256, 0.01)]
    varying = [1.0] * 40 + [4.0] * 10
    measured = calibration_of_points(points, one, "bench")
    measured = replace(measured, noise=varying, prefill_noise=varying)
    deployment = replace(one, machine=Machine("this", measured))
    load = load_plan(LoadOptions(request_rate=4.0, num_prompts=20, seed=1), UserOptions(), 4096)
    answer = simulated(deployment, load, Slos(), 1, lambda *_: None)

    def mean_ttft(done):
        return mean(outcome.ttft for outcome in done.outcomes)

    others = [
        mean_ttft(run_requests(deployment.fleet(seed, ledgers=False), **load.given))
        for seed in range(1, 8)
    ]
    assert len(set(others)) > 1
    assert mean_ttft(answer.done) == median(others)
