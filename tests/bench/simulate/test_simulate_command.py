"""`twinphase simulate` from its options to its report; the engine's side is in tests/simulate."""

import json

import pytest

from twinphase.cli import run_app

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
    assert any(verdict["text"].startswith("Error") for verdict in found["verdicts"])
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
