"""Four times the load that it can serve: what is refused, how soon, and what those who were let in notice of it.

Two loads in turn on one server. `full` is a closed loop of as many clients as seats and places in the queue: the
capacity. `overload` is a Poisson process at `--times` the capacity.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from running import RunningServer
from serving.processes import serving, spread
from twinphase.bench.client.client import run as run_client
from twinphase.bench.load.arrivals import Arrivals, Closed, Poisson
from twinphase.bench.load.run import LoadResult, run_load
from twinphase.bench.load.workload import Lengths, Sizing, make_workload
from twinphase.bench.report.report import Column, Section, Table
from twinphase.bench.statistics import percentile
from twinphase.bench.targets.openai import OpenAITarget

OPTIONS = {
    "seats": (16, "max_num_seqs"),
    "queued": (8, "max_queued_requests"),
    "prompt": (128, "prompt tokens"),
    "output": (64, "new tokens"),
    "seconds": (20.0, "of each load"),
    "times": (4.0, "arrivals / capacity"),
}
SETTLE = 3.0  # seconds until all seats are taken and out of step
REFUSED = "http 429"
FIGURES = {
    "served, req/s": 2, "ITL p50, ms": 1, "ITL p99, ms": 1, "TTFT p50, ms": 1, "TTFT p99, ms": 1,
    "429 p50, ms": 1, "429 p99, ms": 1,
}  # fmt: skip


def summary(result: LoadResult, seconds: float) -> dict[str, Any]:
    """Of requests that were due after the load had settled, and ended while it was on."""
    start = result.observations[0].intended
    steady = [seen for seen in result.observations if start + SETTLE <= seen.intended and seen.ended <= start + seconds]
    kept = replace(result, observations=steady)
    refusals = [seen.ended - seen.intended for seen in steady if seen.error.startswith(REFUSED)]
    latencies = {"ITL": kept.itl, "TTFT": kept.ttft, "429": refusals}
    failures = dict(result.failures)
    return {
        "served, req/s": len(kept.succeeded) / (seconds - SETTLE),
        **{f"{name} p{q}, ms": 1e3 * percentile(values, q) for name, values in latencies.items() for q in (50, 99)},
        "sent": len(result.observations),
        "refused": failures.pop(REFUSED, 0),
        "failed": failures,
        "void": list(result.void),
    }


def run(args: argparse.Namespace) -> tuple[Section, Any]:
    """Both loads in turn, repeated after a rehearsal that finds the capacity."""
    lengths, tokens = Lengths((args.prompt, args.prompt), (args.output, args.output)), args.prompt + args.output
    blocks = (args.seats + 2) * (-(-tokens // 16) + 1)
    found: dict[str, list[dict[str, Any]]] = {"full": [], "overload": []}
    flags = {"max_num_seqs": args.seats, "max_queued_requests": args.queued, "num_kv_blocks": blocks}
    with serving(args, **flags) as server:
        target = run_client(OpenAITarget.open(server.url))

        def load(arrivals: Arrivals, number: int) -> dict[str, Any]:
            seed = time.monotonic_ns()
            workload = make_workload(lengths, number, Sizing(vocab_size=40000), seed=seed, num_warm_up=0)
            result = run_client(run_load(target, workload, arrivals, send_seconds=args.seconds))
            settle(server)
            return summary(result, args.seconds)

        clients = args.seats + args.queued
        most = 100 * clients
        capacity = load(Closed(clients), most)["served, req/s"]
        rate = args.times * capacity
        for rep in range(args.reps):
            found["full"].append(load(Closed(clients), most))
            found["overload"].append(load(Poisson(rate, rep), round(2 * rate * args.seconds)))
    return section(args, found, capacity), {"capacity": capacity, **found}


def settle(server: RunningServer) -> None:
    """Wait until nothing runs."""
    while not server.is_idle():
        time.sleep(0.1)


def section(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]], capacity: float) -> Section:
    """A row per load."""
    rows = []
    for name, loads in found.items():
        counts = [str(sum(one[key] for one in loads)) for key in ("sent", "refused")]
        failed = str(sum(sum(one["failed"].values()) for one in loads))
        figures = (spread([one[figure] for one in loads], digits) for figure, digits in FIGURES.items())
        rows.append((name, *counts, failed, *figures))
    columns = [
        Column("load"),
        Column("sent"),
        Column("429", "refused"),
        Column("failed", "any other reply than a whole one or a 429"),
        *(Column(figure, "median of the repetitions (lowest .. highest)") for figure in FIGURES),
    ]
    voids = [why for loads in found.values() for one in loads for why in one["void"]]
    notes = (
        f"{args.seats} seats, {args.queued} places in the queue; {args.prompt} prompt, {args.output} new tokens each.",
        f"{args.seconds:g} s per load; overload: {args.times:g} times {capacity:.2f} requests/s.",
        f"Loads in which the client was the limit: {'; '.join(voids) or 'none'}.",
    )
    return Section("More load than can be served", (), notes, (Table("Loads", tuple(columns), tuple(rows)),))
