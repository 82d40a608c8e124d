"""The remaining time that the progress bar of compiling shows rarely rises, on recorded runs."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinphase.backends.cpu.compile_estimate import CompileEstimate, shared_out, usual_seconds
from twinphase.terminal import Bar

DATA = Path(__file__).parents[2] / "data" / "compile_times.json"
# Seconds after the start at which each of two processes had compiled its kernels: SmolLM2, a
# Qwen2.5 of several formats and a mixture of experts, the last also on one core for both.
RECORDED: dict[str, dict[str, Any]] = json.loads(DATA.read_text())


def times_left(isa: str, shares: list[dict[str, float]]) -> Iterator[tuple[float, float | None]]:
    """The estimates at 20 readings per second, as in the compiler."""
    estimate = CompileEstimate(isa, [list(share) for share in shares])
    ends = {spec: end for share in shares for spec, end in share.items()}
    for step in range(int(max(ends.values()) * 20)):
        now = step / 20
        yield now, estimate.seconds_left(now, {spec for spec, end in ends.items() if end <= now})


@pytest.mark.parametrize("name", RECORDED)
def test_the_time_left_never_rises_by_more_than_15_percent(name):
    isa, shares = RECORDED[name].values()
    end = max(max(share.values()) for share in shares)
    least = float("inf")
    known = [(now, left) for now, left in times_left(isa, shares) if left is not None]
    assert known[0][0] < 0.6 * end, "it is known early"
    for now, left in known:
        if left >= 0.5:  # less is shown as 0 s
            assert left <= 1.15 * least, now
        least = min(least, left)
    now, left = known[0]
    assert now + left == pytest.approx(end, rel=0.3)


def test_a_count_of_kernels_would_not_do():
    """The same recording fails without the weights, because the slow kernels come first."""
    shares = RECORDED["qwen2.5"]["shares"]
    ends = [end for share in shares for end in share.values()]
    now = min(ends)
    by_count = now * (len(ends) - 1)
    assert by_count > 4 * (max(ends) - now)


def test_processes_get_about_as_much_to_compile():
    specs = [spec for share in RECORDED["experts"]["shares"] for spec in share]
    shares = shared_out("avx2", specs, 3)
    assert sorted(spec for share in shares for spec in share) == sorted(specs)
    sums = [sum(usual_seconds("avx2", spec) for spec in share) for share in shares]
    assert max(sums) - min(sums) < 0.2 * max(sums)
    assert all(share[0].startswith(("run_", "attention_", "quantized_")) for share in shares)


def test_work_ends_with_the_last_kernel():
    estimate = CompileEstimate("generic", [["run_program", "quantize"], ["add"]])
    assert estimate.work_done(1.0, set()) == 0.0
    assert 0 < estimate.work_done(2.0, {"add"}) < 3
    assert estimate.work_done(9.0, {"run_program", "quantize", "add"}) == 3.0


def test_the_bar_shows_the_time_that_the_estimate_says(monkeypatch):
    shown: list[str] = []
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "write", shown.append)
    shares = RECORDED["experts"]["shares"]
    estimate = CompileEstimate("generic", [list(share) for share in shares])
    bar = Bar("Compiling kernels", "kernels", even=True)
    now[0] += 50  # a download, whose time is none of the bar's
    bar.update(0.0, 19)
    done = {spec for share in shares for spec, end in share.items() if end <= 6.0}
    left = estimate.seconds_left(6.0, done)
    now[0] += 6.0
    bar.update(
        CompileEstimate("generic", [list(share) for share in shares]).work_done(6.0, done), 19
    )
    found = re.search(r"(\d+) s left", shown[-1])
    assert found and left is not None and int(found[1]) == round(left)
