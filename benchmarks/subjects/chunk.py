"""A long prompt among running decodes: what each chunk size does to their gaps, and to the prompt.

The decodes' inter-token latency (ITL) is that of the steps which computed a part of the prompt; the price is the
prompt's time to first token. Automatic chunks aim at `itl_slo_ms` by the cost model, which learns while it runs: the
first scenario of each engine is a rehearsal, kept apart in the values.
Not for: many prompts at once.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from loads import Bench, Report, interrupt, spread

from twinphase.bench.statistics import percentile
from twinphase.bench.targets.stepped import Stepped

SUBJECT = "chunk"
OWN_PROMPT = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--decodes", type=int, default=12, help="running requests (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt (default: %(default)s)")
    parser.add_argument("--fixed", default="512", help="fixed chunks (default: %(default)s)")
    parser.add_argument("--slo", default="20,40,80", help="itl_slo_ms of automatic chunks (default: %(default)s)")


def settings(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The engines to compare, by name."""
    whole = -(-(args.prompt + args.decodes) // 512) * 512
    found: dict[str, dict[str, Any]] = {"no chunks": {"max_num_batched_tokens": whole}}
    for size in filter(None, args.fixed.split(",")):
        found[f"fixed {size}"] = {"max_num_batched_tokens": int(size)}
    for slo in filter(None, args.slo.split(",")):
        found[f"automatic, {slo} ms"] = {"max_num_batched_tokens": whole, "itl_slo_ms": float(slo)}
    return found


def once(bench: Bench, driver: Stepped) -> dict[str, Any]:
    """One scenario; milliseconds."""
    found = interrupt(driver, bench.prompts, bench.args.decodes, OWN_PROMPT, bench.args.prompt)
    within = [gap * 1e3 for ticket in found.decodes for gap in found.gaps_within(ticket)]
    before = [gap * 1e3 for ticket in found.decodes for gap in found.gaps_before(ticket)]
    chunks = [record.prefill_tokens for record in found.prompt_steps]
    error = driver.engine.cost_model.error()
    return {
        "before_p50": percentile(before, 50), "before_p99": percentile(before, 99),
        "p50": percentile(within, 50), "p99": percentile(within, 99), "max": max(within),
        "ttft": found.prompt.ttft * 1e3, "chunks": chunks, "gaps": within,
        "model_error": [error.median, error.p95],
    }  # fmt: skip


def run(bench: Bench) -> Report:
    """Every setting in turn, repeated."""
    args = bench.args
    tokens = args.decodes * (OWN_PROMPT + 2048) + args.prompt + 1024
    drivers = {}
    for name, config in settings(args).items():
        drivers[name] = bench.open(max_num_seqs=args.decodes + 1, num_kv_blocks=-(-tokens // 16), **config)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in drivers}
    rehearsals: dict[str, dict[str, Any]] = {}
    with bench.steps(len(drivers) * (args.reps + 1)):
        for rep in range(-1, args.reps):
            names = list(drivers)
            shift = rep % len(names)
            for name in names[shift:] + names[:shift]:
                value = bench.measure(name, lambda name=name: once(bench, drivers[name]))
                if rep < 0:
                    rehearsals[name] = value
                else:
                    found[name].append(value)
    return make_report(bench, bench.complete(found), rehearsals)


def row(name: str, reps: list[dict[str, Any]]) -> list[str]:
    """One line of the table."""

    def column(key: str) -> str:
        return spread([one[key] for one in reps])

    goal, near, above = "-", "-", "-"
    if name.startswith("automatic"):
        slo = float(name.split()[1])
        gaps = [gap for one in reps for gap in one["gaps"]]
        goal, near = f"{slo:.0f}", f"{percentile(gaps, 99) / slo:.2f}"
        above = f"{sum(gap > slo for gap in gaps) / len(gaps):.1%}"
    size = statistics.median(chunk for one in reps for chunk in one["chunks"])
    steps = statistics.median(len(one["chunks"]) for one in reps)
    cells = [name, goal, column("before_p50"), column("p50"), column("p99"), column("max"), near, above]
    return [*cells, spread([one["ttft"] for one in reps], digits=0), f"{size:.0f}", f"{steps:.0f}"]


def make_report(bench: Bench, found: dict[str, list[dict[str, Any]]], rehearsals: dict[str, dict[str, Any]]) -> Report:
    """The table and the trade-off."""
    args = bench.args

    def draw(axes: Any) -> None:
        for name, reps in found.items():
            ttft, p99 = (statistics.median(one[key] for one in reps) for key in ("ttft", "p99"))
            (mark,) = axes.plot(p99, ttft / 1e3, "o")
            axes.annotate(name, (p99, ttft / 1e3), xytext=(5, 5), textcoords="offset points", fontsize=9)
            if name.startswith("automatic"):
                axes.axvline(float(name.split()[1]), color=mark.get_color(), linewidth=0.8, linestyle=":")
        axes.margins(x=0.25)
        axes.set_xscale("log")

    errors = [one["model_error"] for reps in found.values() for one in reps]
    medians = [error[0] for error in errors if error[0] is not None]
    notes = [
        f"{args.decodes} decodes of {OWN_PROMPT}-token prompts, then a prompt of {args.prompt:,} tokens; milliseconds",
        "ITL: gaps of all decodes that a step with a part of the prompt ended; with few steps, p99 is the largest",
        "chunk: prompt tokens a step, median; p99 / SLO and gaps above it: over all repetitions together",
        f"cost model's relative error over the last steps: median {statistics.median(medians):.1%}, "
        f"p95 {statistics.median(error[1] for error in errors if error[1] is not None):.1%}",
    ]
    header = ["chunks", "SLO", "ITL before, p50", "ITL, p50", "ITL, p99", "ITL, max", "p99 / SLO", "gaps above SLO"]
    header += ["TTFT of the prompt", "chunk", "steps"]
    rows = [row(name, reps) for name, reps in found.items()]
    values = {"repetitions": found, "rehearsals": rehearsals}
    label = ("p99 ITL of the decodes, ms (dotted: the SLO)", "TTFT of the long prompt, s")
    return Report("A long prompt among running decodes", header, rows, notes, values, draw, label)
