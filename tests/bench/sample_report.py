"""A report as `bench` writes one, of made-up measurements that look like real ones, and with hostile text in it."""

from __future__ import annotations

import math
import random

from twinphase.bench.client.observation import Observation
from twinphase.bench.load.plots import latency_plots, timeline_plot
from twinphase.bench.load.run import ClientHealth, LoadResult
from twinphase.bench.load.slo import Slos
from twinphase.bench.report import plots
from twinphase.bench.report.explanation import waterfall_plot
from twinphase.bench.report.report import Column, Metric, Plot, Report, Section, Status, Table, Verdict
from twinphase.bench.roofline.arithmetic import Roof, Roofline, Slope
from twinphase.bench.roofline.plots import Mark, roofline_plot
from twinphase.bench.targets.target import TargetFacts
from twinphase.phases.timeline import IntervalKind

HOSTILE = "Smol<script>alert(1)</script>\"'&amp;|`*_"
PROMPTS = (10, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8000)


def prefill_seconds(n: float) -> float:
    return 0.0041 + 5.9e-4 * n + 3.1e-8 * n * n


def decode_seconds(position: float, batch: int) -> float:
    return 0.0127 + 1.1e-3 * (batch - 1) + 1.9e-6 * position * batch


def sweep_section(rng: random.Random, slower: float) -> tuple[Section, list[Metric]]:
    prefill, decode, metrics = [], [], []
    for n in PROMPTS:
        values = sorted(prefill_seconds(n) * slower * rng.lognormvariate(0, 0.015) for _ in range(7))
        prefill.append({"prompt tokens": n, "ms": values[3] * 1e3, "low": values[0] * 1e3, "high": values[6] * 1e3})
        metrics.append(Metric(f"prefill_seconds[n={n}]", "s", "lower", tuple(values), "one prefill of n tokens"))
    for batch in (1, 4, 8):
        for position in PROMPTS:
            values = sorted(decode_seconds(position, batch) * rng.lognormvariate(0, 0.02) for _ in range(7))
            row = {"position": position, "ms": values[3] * 1e3, "low": values[0] * 1e3, "high": values[6] * 1e3}
            decode.append({"series": f"decode, batch {batch}", **row})
            name = f"decode_seconds[position={position},batch={batch}]"
            metrics.append(Metric(name, "s", "lower", tuple(values), "one decode step"))
    grid = [10 * (800 ** (i / 60)) for i in range(61)]
    fit = [
        {"prompt tokens": round(n, 2), "ms": prefill_seconds(n) * 1e3 * slower}
        | {"low": prefill_seconds(n) * 970 * slower, "high": prefill_seconds(n) * 1030 * slower}
        for n in grid
    ]
    rates = [
        {
            "phase": phase,
            "tokens": n,
            "tok/s": n / prefill_seconds(n) if phase == "prefill" else 1 / decode_seconds(n, 1),
        }
        for phase in ("prefill", "decode")
        for n in PROMPTS
    ]
    table = Table(
        "Prefill by prompt length",
        (
            Column("prompt tokens", "as the target counted them"),
            Column("TTFT, ms", "first piece of output here - intended send; median of 7"),
            Column("95 % interval, ms", "of the median, between values that occurred"),
            Column("tok/s", "prompt tokens / prefill time"),
            Column("MFU", "FLOP the algorithm needs / (time x measured peak)"),
            Column("fit, ms", "a + b n + c n^2"),
            Column("residual"),
        ),
        tuple(
            (f"{row['prompt tokens']:,}", f"{row['ms']:,.1f}", f"{row['low']:,.1f} .. {row['high']:,.1f}")
            + (f"{row['prompt tokens'] / row['ms'] * 1e3:,.0f}", f"{61 - 200 / row['prompt tokens']:.0f} %")
            + (f"{prefill_seconds(row['prompt tokens']) * 1e3:,.1f}", f"{rng.gauss(0, 1):+.1f} %")
            for row in prefill
        ),
    )
    section = Section(
        "Phase sweep",
        (
            Verdict(
                Status.HOLDS, "Prefill grows linearly up to about 3,000 tokens; its quadratic part is 4 % at 1,024."
            ),
            Verdict(
                Status.FAILS,
                "Decode time per token does not depend on position.",
                "It rises by 120 % from 10 to 8,000.",
            ),
        ),
        ("Each point is the median of seven repetitions in random order, behind prompts that share no prefix.",),
        (table,),
        (
            plots.lines(
                "prefill",
                "Prefill time by prompt length",
                prefill,
                ("prompt tokens", "prompt tokens"),
                ("ms", "prefill time (ms)"),
                fitted=[{**r, "phase": "prefill"} for r in fit],
                log_x=True,
                log_y=True,
                caption="Points: median, rules: interval. Line and band: fit, with its interval.",
            ),
            plots.lines(
                "decode",
                "Decode time per step by position",
                decode,
                ("position", "tokens before"),
                ("ms", "time a step (ms)"),
                series="series",
                caption="Engine alone on the machine.",
            ),
            plots.lines(
                "rates",
                "One tokens-per-second figure hides which half you measure",
                rates,
                ("tokens", "tokens"),
                ("tok/s", "tokens a second"),
                series="phase",
                log_x=True,
                log_y=True,
            ),
        ),
    )
    return section, metrics


def load_section(rng: random.Random) -> Section:
    ttft = {f"{rate} req/s": [rng.lognormvariate(math.log(0.08 * rate), 0.5) for _ in range(900)] for rate in (1, 2, 4)}
    goodput = [
        {"offered": r, "goodput": min(r, 3.4) - max(0, r - 3) * 0.4, "what": "goodput"} for r in (0.5, 1, 2, 3, 4, 5)
    ]
    goodput += [{"offered": r, "goodput": min(r, 3.9), "what": "throughput"} for r in (0.5, 1, 2, 3, 4, 5)]
    points = [
        {"prompt": n, "ttft": prefill_seconds(n) * rng.lognormvariate(0.1, 0.1)}
        for n in (rng.randint(10, 4000) for _ in range(300))
    ]
    band = [
        {"prompt": n, "low": prefill_seconds(n) * 0.9, "high": prefill_seconds(n) * 1.3} for n in range(10, 4001, 190)
    ]
    misses = [
        {"rate": f"{rate} req/s", "missed": phase, "requests": count}
        for rate, counts in ((2, (2, 0)), (4, (31, 8)), (5, (120, 44)))
        for phase, count in zip(("prefill (TTFT)", "decode (ITL)"), counts, strict=True)
    ]
    ends = [
        {"target": name, "ms": ms, "low": ms * 0.93, "high": ms * 1.08}
        for name, ms in (("twinphase", 81.0), ("llama.cpp", 104.5), (HOSTILE, 163.2))
    ]
    return Section(
        "Load",
        (
            Verdict(Status.INFO, "Saturation at 3.4 req/s; above it TTFT grows for as long as the load lasts."),
            Verdict(
                Status.UNKNOWN, "Whether 5 req/s can be held.", "Only one repetition was left after two were void."
            ),
        ),
        (),
        (
            Table(
                "Requests",
                (
                    Column("rate"),
                    Column("sent"),
                    Column("failed", "status other than 200, or a stream that broke"),
                    Column("goodput", "requests/s that met TTFT 500 ms and ITL 50 ms"),
                ),
                (
                    ("1 req/s", "120", "0", "1.00 req/s"),
                    ("2 req/s", "240", "0", "1.98 req/s"),
                    ("4 req/s", "480", "3", "3.02 req/s"),
                ),
            ),
        ),
        (
            plots.distribution("ttft", "Client TTFT by offered rate", ttft, "TTFT (s)", limit=0.5, log_x=True),
            plots.lines(
                "goodput",
                "Goodput and throughput",
                goodput,
                ("offered", "offered load (req/s)"),
                ("goodput", "req/s"),
                series="what",
            ),
            plots.scatter(
                "server",
                "Server load: TTFT against prompt length",
                points,
                ("prompt", "prompt tokens"),
                ("ttft", "TTFT (s)"),
                band=band,
            ),
            plots.bars(
                "misses",
                "Which phase missed its SLO",
                misses,
                ("rate", "offered load"),
                ("requests", "requests that missed"),
                part="missed",
            ),
            plots.bars(  # with more names than one row of a legend holds
                "ledger",
                "Where a request's time goes",
                [
                    {"load": load, "ms": 10, "interval": kind.value}
                    for load in ("one request alone", "a burst, all run at once")
                    for kind in list(IntervalKind)[:6]
                ],
                ("load", ""),
                ("ms", "ms"),
                part="interval",
            ),
            plots.bars("targets", "TTFT of three targets", ends, ("target", ""), ("ms", "TTFT (ms)")),
        ),
    )


def roofline_marks() -> list[Mark]:
    found = [
        Mark("prefill", "linear", "prefill linear", f"n = {n}", 12.0 * n**0.45, 2.4e11 * n / (n + 25), {"MFU": "50 %"})
        for n in (16, 64, 256, 1024)
    ]
    found += [
        Mark("decode", "linear", "batch linear", f"batch {b}", 1.9 * b, 3.3e10 * b**0.8, {"MFU": "9 %"})
        for b in (1, 2, 4, 8)
    ]
    return [*found, Mark("decode", "attention", "context attention", "context 64", 1.1, 1.4e10, {"MFU": "4 %"})]


def falls(parts: list[tuple[str, float]]) -> dict:
    """A waterfall as an explanation has it, of (part, seconds)."""
    wall = sum(spent for _, spent in parts)
    bars = [{"name": name, "seconds": spent, "share": spent / wall, "before_first_token": 0.0} for name, spent in parts]
    return {"wall_seconds": wall, "first_token": None, "bars": bars}


def load_result(number: int) -> LoadResult:
    """Requests of which every seventh failed, and every second tells of its queue."""
    seen = []
    for n in range(number):
        at = 0.1 * n
        times = [at + 0.08 + 0.01 * (n % 5) + 0.02 * k for k in range(4 + 5 * (n % 4))] if n % 7 != 6 else []
        one = Observation(str(n), at, at, times, times[-1] if times else at + 0.1, 10, 0, len(times), 200)
        one.error = "" if times else "http 429: slow down"
        one.claims = {"timings": {"ledger_ms": {"queue": 30.0}}} if times and n % 2 else {}
        seen.append(one)
    facts = TargetFacts("made up", "test", "none", HOSTILE, "unknown", None, "", "")
    client = ClientHealth([0.0], [0.0])
    return LoadResult(facts, "work", "10 req/s", 10.0, None, seen, number, client, slos=Slos(ttft=0.1))


def machine_section() -> Section:
    roofs, slopes = (Roof("int8", 3.1e11), Roof("float32", 1.2e11)), (Slope("L3, 16 MiB", 6e10), Slope("DRAM", 2.1e10))
    line = Roofline("a processor, 2 threads", "measured", roofs, slopes)
    kinds = [("queue", 0.02), ("prefill", 0.21), ("prefill_wait", 0.05), ("decode", 0.4), ("batching", 0.07),
             ("stall", 0.12)]  # fmt: skip
    load = load_result(12)
    return Section(
        "Where the time goes",
        plots=(
            roofline_plot(line, roofline_marks(), "Both phases under this machine's ceilings."),
            waterfall_plot(falls(kinds), ""),
            latency_plots(load)[0],
            timeline_plot(load),
        ),
    )


def sample_report(seed: int = 1, slower: float = 1.0, model: str = HOSTILE) -> Report:
    rng = random.Random(seed)
    sweep, metrics = sweep_section(rng, slower)
    return Report(
        "bench",
        f"Both phases of {model}",
        (
            Verdict(
                Status.HOLDS,
                "Prefill time is a + b n + c n^2 in prompt length n, to 2.1 % on held-out lengths.",
            ),
            Verdict(
                Status.FAILS,
                "Decode is flat per token.",
                "It rises by 1.2 µs for each token before it: 120 % from 10 to 8,000.",
            ),
            Verdict(Status.UNKNOWN, "Whether batching beyond 8 helps.", "The target seats eight."),
            Verdict(Status.INFO, "1,700 prompt tokens a second, 78 output tokens a second."),
            Verdict(
                Status.VOID, "The run at 5 req/s.", "The client was late by 31 ms in the median: it was the limit."
            ),
        ),
        {
            "date": "2026-03-01 12:00:00 UTC",
            "command": "twinphase bench 'http://127.0.0.1:8000' --api-key *** --duration 120",
            "target": "http://127.0.0.1:8000",
            "engine": "llama.cpp b4800",
            "model": model,
            "model SHA-256": "5b1c7ad9c3b9b8f6f0e0d63b5a1e5d0c1d4b7b3f2a6f9e8d7c6b5a4938271605",
            "precision": "Q4_1 weights, float16 KV",
            "processor": "AMD EPYC 7B13 (cpu family 25, model 1, stepping 0)",
            "cores": "2 usable of 2",
            "memory": "7.7 GiB",
            "system": "Debian GNU/Linux 12 (bookworm), Linux 6.1.0",
            "Python": "3.11.2",
            "twinphase": "0.5.0",
            "load average": "0.21, 0.30, 0.28 (1, 5, 15 minutes before)",
        },
        (
            "Others used 0.03 cores during the measurement: the machine was quiet.",
            "Two repetitions of 2,048 tokens were repeated: 14 % above their median.",
        ),
        (sweep, load_section(rng), machine_section()),
        tuple(metrics),
        {
            "observations": [
                {"intended": 0.0, "sent": 0.0001, "token_times": [0.1, 0.12, 0.14], "text": "</script><!--"}
            ]
        },
    )


def all_plots(report: Report) -> list[Plot]:
    return [plot for section in report.sections for plot in section.plots]
