"""`twinphase demo`: the same question twice, the second time from the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tiny_gguf import write_tiny_gguf
from twinphase.backends.cpu import ceilings as cpu_ceilings
from twinphase.commands import demo
from twinphase.phases.report import PhaseReport, PhaseRow

RATES = cpu_ceilings.MeasuredRates(((1 << 20, 1e12), (1 << 30, 1e12)), 1e15, 1e14, 1e15, False)
ROW = PhaseRow("prefill", 0, 0, 0.0, 0.0, None, "MFU", None, None, 0, "")


@pytest.fixture
def model(tmp_path) -> str:
    return str(write_tiny_gguf(tmp_path / "tiny.gguf", context=16384))


@pytest.fixture
def measured(monkeypatch) -> list[bool]:
    """A list that states for each measurement whether it was disturbed; append later ones."""
    disturbed = [False]

    def measure(threads, isa, repetitions, progress, started):
        return [replace(RATES, provisional=disturbed.pop(0))]

    monkeypatch.setattr(cpu_ceilings, "measure_repeatedly", measure)
    return disturbed


def test_the_second_time_the_text_is_in_the_cache(twinphase, cache, model, measured):
    done = twinphase("demo", model)
    assert done.code == 0
    answers = done.out.splitlines()
    assert len(answers) % 2 == 0
    assert answers[: len(answers) // 2] == answers[len(answers) // 2 :]
    first, again = (line for line in done.err.splitlines() if line.startswith("prefill"))
    assert "cached" not in first and "MFU" in first and "cached" in again
    assert "in the cache: the first token came after" in done.err
    assert not measured  # It was measured once,
    assert twinphase("demo", model).code == 0  # and not again.


def test_a_disturbed_measurement_is_repeated_and_not_kept(twinphase, cache, model, measured):
    measured[:] = [True, True, True]
    done = twinphase("demo", model)
    assert "Other programs disturbed" in done.err and "MFU 0 %" not in done.err
    assert not measured and not list(cache.glob("ceilings/*.json"))


def test_the_findings_have_the_figures_of_the_reports():
    prefill = replace(ROW, tokens=1000, seconds=0.5, efficiency=0.6, other_efficiency=0.02)
    decode = replace(
        ROW,
        name="decode",
        tokens=10,
        seconds=0.05,
        working_set=100_000_000,
        metric="MBU",
        efficiency=0.7,
        other_efficiency=0.1,
    )
    again = replace(ROW, tokens=8, seconds=0.004, cached_tokens=992)
    first, limits, cached, _ = demo.findings(
        PhaseReport(1.0, (prefill, decode), (), 0.51, 0.005),
        PhaseReport(0.1, (again, decode), (), 0.014, 0.005),
    )
    assert "1,000 tokens in parallel, 0.50 ms per token" in first
    assert "5.00 ms per token: 10.0 times as long" in first and "100 MB" in first
    assert "prefill used 60 % of this machine's arithmetic and 2 % of its memory" in limits
    assert "decode used 10 % of this machine's arithmetic and 70 % of its memory" in limits
    assert "992 of the prompt's tokens" in cached and "14 ms instead of 510 ms" in cached


def test_the_page_comes_with_a_wheel_and_with_a_clone(monkeypatch, tmp_path):
    assert "## Prefill" in demo.page()
    package = tmp_path / "twinphase"
    (package / "commands").mkdir(parents=True)
    (package / demo.TEXT_NAME).write_text("of the wheel")
    monkeypatch.setattr(demo, "__file__", str(package / "commands" / "demo.py"))
    assert demo.page() == "of the wheel"
