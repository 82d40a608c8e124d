"""`twinphase estimate` as a user runs it."""

from __future__ import annotations

import os

import pytest
from rich.console import Console

from tiny_gguf import write_tiny_gguf
from twinphase.estimate.datasheets import DATASHEETS
from twinphase.estimate.known_models import KNOWN_MODELS
from twinphase.phases.hardware import Ceilings, processor_name, save_ceilings

A100 = ["--model", "llama-2-7b", "--hardware", "a100-80gb-sxm"]


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def run(twinphase):
    return lambda *words: twinphase("estimate", *words).text()


@pytest.fixture
def run_json(twinphase):
    return lambda *words: twinphase("estimate", *words, "--json").json()


def test_both_phases_side_by_side(run):
    text = run(*A100, "--price-per-hour", "2")
    parts = (
        "prefill",
        "decode",
        "153.0 FLOP per byte",
        "147.9 tok/s",
        "compute-bound",
        "memory-bound",
        "154 requests",
    )
    assert [part for part in parts if part not in text] == []
    assert run(A100[1], *A100[2:], "--price-per-hour", "2") == text  # the model can stand first
    assert "(datasheet)" in text and "NVIDIA A100 Tensor Core GPU datasheet" in text
    assert "MFU and MBU 1" in text
    assert "\x1b" not in text  # no terminal, no colour
    formula = "2 P n + 2 V h = 2 x 6,476,005,376 x 1,000 + 2 x 131,072,000 = 12,952,272,896,000"
    assert formula not in text and formula in run(*A100, "--explain")


def test_speculation(run, run_json):
    drafting = [
        "--speculative-config",
        '{"method": "ngram", "num_speculative_tokens": 4}',
        "--acceptance",
        "0.7",
    ]
    found = run_json(*A100, *drafting)["speculation"]
    assert found["tokens_per_step"] == pytest.approx((1 - 0.7**5) / (1 - 0.7))
    assert found["tokens_per_second"] == pytest.approx(
        found["tokens_per_step"] / found["step"]["seconds"]
    )
    assert "2.77 tokens per step" in run(*A100, *drafting)
    assert run_json(*A100)["speculation"] is None
    model = '{"method": "draft_model", "num_speculative_tokens": 2, "model": "llama-2-7b"}'
    found = run_json(*A100, "--speculative-config", model, "--acceptance", "1")
    assert found["speculation"]["tokens_per_step"] == 3
    assert found["speculation"]["seconds"] == pytest.approx(
        2 * found["decode"]["seconds"]
    )  # it writes as it reads


def test_json_has_the_same_numbers(run_json):
    found = run_json(*A100, "--input-len", "1000", "--output-len", "200")
    assert found["decode_tokens_per_second"] == pytest.approx(147.9, abs=0.05)
    assert found["prefill"]["linear"]["flops"] == 12_952_272_896_000
    assert found["price_per_million_output_tokens"] is None
    assert found["hardware"]["kind"] == "datasheet"


def test_given_figures_make_hardware_or_replace_a_datasheet_s(run_json):
    own = ["--flops", "312T", "--bandwidth", "2.039e12", "--memory", "80G"]
    given = run_json("--model", "llama-2-7b", *own)
    sheet = run_json(*A100)
    assert given["hardware"]["kind"] == "given"
    assert given["prefill"] == sheet["prefill"] and given["largest_batch"] == sheet["largest_batch"]
    changed = run_json(*A100, "--bandwidth", "1T")
    assert changed["hardware"]["bandwidth"] == 1e12
    assert any("--bandwidth 1T" in line for line in changed["assumptions"])


def test_this_machine_by_its_kept_ceilings(run, run_json, tmp_path):
    from twinphase.backends.cpu.isa import choose_isa

    points = ((1 << 20, 40e9), (1 << 30, 20e9))
    cores = len(os.sched_getaffinity(0))
    save_ceilings(
        Ceilings(processor_name(), cores, choose_isa(None).name, points, 1e12, 2e11, 4e11)
    )
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    found = run_json("--model", str(path), "--hardware", "this", "--prompt-tokens", "64")
    assert found["hardware"]["kind"] == "measured here"
    assert found["scenario"]["units"]["linear"] == "int8"  # Q4_0 in our kernels
    assert found["hardware"]["peaks"]["int8"] == 1e12
    assert 20e9 <= found["hardware"]["bandwidth"] <= 40e9
    assert found["kv_bytes_per_token"] == 2 * 2 * (
        16 + 4 + 2 * 16
    )  # int8 keys, a scale, 16-bit values
    assert found["ttft_seconds"] > 0
    assert "measured here" in run("--model", str(path), "--hardware", "this")


def test_what_does_not_fit_is_said_first(run):
    text = run("--model", "llama-3-70b", "--hardware", "a100-80gb-sxm")
    assert "! The weights (141.1 GB) do not fit 80 GB" in text
    assert "but only 129 fit" in run("--model", "llama-3-70b", "--hardware", "mi300x")


def test_never_is_not_unknown(run, run_json):
    fast = ["--model", "llama-3-8b", "--flops", "1e30", "--bandwidth", "1T"]
    assert "break-even batch    never: " in run(*fast)
    found = run_json(*fast)
    assert found["break_even_batch"] is None and found["no_break_even"].startswith("never")
    apple = ["--model", "llama-3-8b", "--hardware", "apple-m4-pro"]
    assert "break-even batch    unknown: no peak in" in run(*apple)


def test_what_no_datasheet_says_is_unknown_not_zero(run, run_json):
    arguments = ["--model", "llama-3-8b", "--hardware", "apple-m4-pro", "--price-per-hour", "1"]
    found = run_json(*arguments)
    assert (
        found["ttft_seconds"]
        is found["decode"]["seconds"]
        is found["price_per_million_prompt_tokens"]
        is None
    )
    assert found["decode"]["memory_seconds"] > 0
    assert "at most" in run(*arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "MODEL"),
        (["llama-3-8b", *A100], "Two models"),
        (["--model", "llama-2-7b"], "--hardware"),
        (["--model", "llama-2-7b", "--flops", "1T"], "--hardware"),
        (["--model", "llama-2-7b", "--hardware", "a100"], "a100-80gb-sxm"),
        (["--model", "llama-2-7b", "--hardware", "no such"], "apple-m1"),
        ([*A100, "--flops", "fast"], "--flops"),
        ([*A100, "--bandwidth", "-1T"], "--bandwidth"),
        ([*A100, "--memory", "nan"], "--memory"),
        ([*A100, "--memory", ""], "--memory"),
        ([*A100, "--devices", "0"], "devices is 0"),
        (["--model", "llama-2-7b", "--hardware", "this"], "twinphase roofline"),  # not measured yet
        (["--model", "llama-2-7b", "--hardware", "this", "--devices", "2"], "--devices"),
        ([*A100, "--dtype", "fp7"], "fp7"),
        ([*A100, "--kv-cache-dtype", "fp7"], "kv_cache_dtype"),
        ([*A100, "--compute-dtype", "int4"], "compute_dtype"),
        ([*A100, "--mfu", "0"], "mfu"),
        ([*A100, "--mfu", "nan"], "mfu"),
        ([*A100, "--mbu", "1.1"], "mbu"),
        ([*A100, "--prompt-tokens", "0"], "prompt_tokens"),
        ([*A100, "--output-tokens", "-1"], "output_tokens"),
        ([*A100, "--batch-size", "0"], "batch_size"),
        ([*A100, "--price-per-hour", "0"], "price_per_hour"),
        ([*A100, "--price-per-hour", "inf"], "price_per_hour"),
        ([*A100, "--batch-size", "many"], "batch-size"),
        ([*A100, "--acceptance", "0.5"], "--speculative-config"),
        ([*A100, "--speculative-config", "suffix"], "--acceptance"),
        ([*A100, "--speculative-config", "suffix", "--acceptance", "1.1"], "acceptance"),
        ([*A100, "--speculative-config", "magic", "--acceptance", "0.5"], "magic"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(twinphase, arguments, named):
    done = twinphase("estimate", *arguments)
    assert named in done.error() and done.code == 2


def test_an_unknown_model_offers_close_ones(twinphase):
    done = twinphase("estimate", "--model", "llama-2-8b", "--hardware", "l40s")
    assert done.code == 3 and "Did you mean" in done.error() and "llama-2-7b" in done.err


def test_one_is_not_several(run):
    figures = ["--flops", "312T", "--bandwidth", "2T", "--memory"]
    assert "1 request of 1,200 tokens" in run("llama-2-7b", *figures, "14.2G")
    assert "2 requests of 1,200 tokens" in run("llama-2-7b", *figures, "15G")


def test_no_repository_is_cut_on_a_narrow_terminal(run, monkeypatch):
    monkeypatch.setattr("twinphase.commands.estimate_view.answers", lambda: Console(width=80))
    models = run("--list-models")
    assert "…" not in models and max(map(len, models.splitlines())) <= 80
    assert all(name in models for name in KNOWN_MODELS)


def test_lists(run, run_json):
    hardware = run("--list-hardware")
    models = run("--list-models")
    for name, sheet in DATASHEETS.items():
        assert name in hardware
        assert all(f"    {source.address}\n" in hardware for source in sheet.sources)
    assert all(name in models for name in KNOWN_MODELS)
    assert len(run_json("--list-hardware")) == len(DATASHEETS)
    assert len(run_json("--list-models")) == len(KNOWN_MODELS)
