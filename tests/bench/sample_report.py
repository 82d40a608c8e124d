"""A report as `bench` writes one, of made-up measurements, with hostile text in it."""

from __future__ import annotations

import functools
import math
import random

from tests.bench.made_target import MadeTarget

from twinphase.phases.observation import Observation
from twinphase.phases.roofline import Roof, Roofline, Slope
from twinphase.phases.slo import Slos
from twinphase.phases.timeline import IntervalKind
from twinphase_bench.client.health import ClientHealth
from twinphase_bench.load.plots import timeline_plot
from twinphase_bench.load.run import LoadResult
from twinphase_bench.report import plots
from twinphase_bench.report.report import Plot, Report, Section, Status, Verdict
from twinphase_bench.roofline.plots import DrawnPart, roofline_plot
from twinphase_bench.sweep.plan import SweepOptions, make_plan
from twinphase_bench.sweep.report import sweep_metrics, sweep_sections
from twinphase_bench.sweep.run import sweep
from twinphase_bench.targets.target import TargetFacts

HOSTILE = "Smol<script>alert(1)</script>\"'&amp;|`*_"


def load_section(rng: random.Random) -> Section:
    ttft = {
        f"{rate} req/s": [rng.lognormvariate(math.log(0.08 * rate), 0.5) for _ in range(900)]
        for rate in (1, 2, 4)
    }
    ends = [
        {"target": name, "ms": ms, "low": ms * 0.93, "high": ms * 1.08}
        for name, ms in (("twinphase", 81.0), ("llama.cpp", 104.5), (HOSTILE, 163.2))
    ]
    ledger = [  # with more names than one row of a legend holds
        {"load": load, "ms": 10, "interval": kind.value}
        for load in ("one request alone", "a burst, all run at once")
        for kind in list(IntervalKind)[:6]
    ]
    return Section(
        "Load",
        (Verdict(Status.UNKNOWN, "Whether 5 req/s can be held.", "Only one repetition was left."),),
        plots=(
            plots.distribution(
                "ttft", "Client TTFT by offered rate", ttft, "TTFT (s)", limit=0.5, log_x=True
            ),
            plots.bars(
                "ledger",
                "Where a request's time goes",
                ledger,
                ("load", ""),
                ("ms", "ms"),
                part="interval",
            ),
            plots.bars(
                "targets", "TTFT of three targets", ends, ("target", ""), ("ms", "TTFT (ms)")
            ),
        ),
    )


def roofline_marks() -> list[DrawnPart]:
    found = [
        DrawnPart(
            "prefill",
            "linear",
            "prefill linear",
            f"n = {n}",
            12.0 * n**0.45,
            2.4e11 * n / (n + 25),
            {"MFU": "50 %"},
        )
        for n in (16, 64, 256, 1024)
    ]
    found += [
        DrawnPart(
            "decode",
            "linear",
            "batch linear",
            f"batch {b}",
            1.9 * b,
            3.3e10 * b**0.8,
            {"MFU": "9 %"},
        )
        for b in (1, 2, 4, 8)
    ]
    return [
        *found,
        DrawnPart(
            "decode", "attention", "context attention", "context 64", 1.1, 1.4e10, {"MFU": "4 %"}
        ),
    ]


def load_result(number: int) -> LoadResult:
    """Requests of which every seventh failed, and every second tells of its queue."""
    seen = []
    for n in range(number):
        at = 0.1 * n
        times = (
            [at + 0.08 + 0.01 * (n % 5) + 0.02 * k for k in range(4 + 5 * (n % 4))]
            if n % 7 != 6
            else []
        )
        one = Observation(
            str(n), at, at, times, times[-1] if times else at + 0.1, 10, 0, len(times), 200
        )
        one.error = "" if times else "http 429: slow down"
        one.claims = {"timings": {"ledger_ms": {"queue": 30.0}}} if times and n % 2 else {}
        seen.append(one)
    facts = TargetFacts("made up", "test", "none", HOSTILE, "unknown", None, "", "")
    client = ClientHealth([0.0], [0.0])
    return LoadResult(
        facts, "work", "10 req/s", 10.0, None, seen, number, client, slos=Slos(ttft=0.1)
    )


def machine_section() -> Section:
    roofs = (Roof("int8", 3.1e11), Roof("float32", 1.2e11))
    slopes = (Slope("L3, 16 MiB", 6e10), Slope("DRAM", 2.1e10))
    line = Roofline("a processor, 2 threads", roofs, slopes)
    charts = (
        roofline_plot(line, roofline_marks(), ""),
        timeline_plot(load_result(12)),
    )
    return Section("Where the time goes", plots=charts)


@functools.cache
def sample_report(seed: int = 1, slower: float = 1.0, model: str = HOSTILE) -> Report:
    found = sweep(
        MadeTarget(0.015, seed, slower),
        make_plan(8192, SweepOptions(repetitions=7)),
        watch_others=False,
    )
    verdicts = (
        Verdict(
            Status.HOLDS, "A prompt token takes 0.6 ms at 10, 0.41 ms at 512 tokens of prompt."
        ),
        Verdict(
            Status.FAILS,
            "Decode is flat per token.",
            "It rises by 1.2 µs for each token before it.",
        ),
        Verdict(Status.UNKNOWN, "Whether batching beyond 8 helps.", "The target seats eight."),
        Verdict(Status.INFO, "1,700 prompt tokens per second, 78 output tokens per second."),
        Verdict(
            Status.VOID,
            "The run at 5 req/s.",
            "The client was late by 31 ms in the median: it was the limit.",
        ),
    )
    conditions = {
        "date": "2026-03-01 12:00:00 UTC",
        "command": "twinphase bench 'http://127.0.0.1:8000' --api-key *** --duration 120",
        "model": model,
        "model SHA-256": "5b1c7ad9c3b9b8f6f0e0d63b5a1e5d0c1d4b7b3f2a6f9e8d7c6b5a4938271605",
        "processor": "AMD EPYC 7B13 (cpu family 25, model 1, stepping 0)",
        "load average": "0.21, 0.30, 0.28 (1, 5, 15 minutes before)",
    }
    noise = ("Others used 0.03 cores during the measurement: the machine was quiet.",)
    observation = {
        "intended": 0.0,
        "sent": 0.0001,
        "token_times": [0.1, 0.12],
        "text": "</script><!--",
    }
    return Report(
        "bench",
        f"Both phases of {model}",
        verdicts,
        conditions,
        noise,
        (*sweep_sections(found), load_section(random.Random(seed)), machine_section()),
        tuple(sweep_metrics(found)),
        {"observations": [observation]},
    )


def all_plots(report: Report) -> list[Plot]:
    return [plot for section in report.sections for plot in section.plots]
