"""A KV cache that is too small: twice the load that fits, against a load that fits.

All requests have the same number of tokens and are submitted at once. `fits` is as many as the cache holds to their
end; `twice` is double that; `twice, room for all` is the same load with a cache that holds it, the best that could be.
Preempted requests compute again what was lost, unless the prefix cache still has it.
The engine lets in whom it expects to have room for, by how long answers were of late: after the rehearsal it knows.
With --usual-output it is made to expect that many tokens before each load, so that blocks do run out.
Not for: priorities, or who is preempted.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

from loads import Bench, Report, spread

from twinphase.bench.targets.stepped import Stepped

SUBJECT = "full"
LOADS = {"fits": 1, "twice": 2, "twice, room for all": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--fitting", type=int, default=16, help="requests that fit the cache (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--output", type=int, default=256, help="new tokens (default: %(default)s)")
    parser.add_argument("--usual-output", type=float, help="new tokens that the engine expects (default: as learned)")


def once(bench: Bench, driver: Stepped, count: int) -> dict[str, Any]:
    """One load, all at once."""
    args = bench.args
    scheduler = driver.engine.scheduler
    before = scheduler.num_preemptions
    if args.usual_output is not None:
        scheduler.usual_output = args.usual_output
    tickets = [driver.submit(bench.prompts.take(args.prompt), args.output) for _ in range(count)]
    start = tickets[0].submitted
    driver.run()
    seconds = driver.engine.clock() - start
    computed = sum(record.prefill_tokens + record.decode_tokens for record in driver.records)
    most = max(record.num_decodes for record in driver.records)
    driver.clear()
    requests = [ticket.request for ticket in tickets]
    return {
        "rate": count * args.output / seconds,
        "preemptions": scheduler.num_preemptions - before,
        "recomputed": sum(request.num_recomputed_tokens for request in requests),
        "cached": sum(request.num_cached_tokens for request in requests),
        "computed": computed,
        "needed": count * (args.prompt + args.output - 1),
        "most": most,
        "latency": statistics.median(ticket.times[-1] - start for ticket in tickets),
    }


def run(bench: Bench) -> Report:
    """Each load in turn, repeated, with the prefix cache and without."""
    args = bench.args
    fitting = args.fitting * -(-(args.prompt + args.output - 1) // 16)
    drivers = {}
    for caching in (True, False):
        for large in (False, True):
            blocks = fitting * (2 if large else 1) + (2 * args.fitting if large else 0)
            config = {"max_num_seqs": 2 * args.fitting, "num_kv_blocks": blocks, "enable_prefix_caching": caching}
            drivers[caching, large] = bench.open(**config)
    cases = {}
    for caching in (True, False):
        for name, times in LOADS.items():
            label = f"{name}; prefix cache {'on' if caching else 'off'}"
            cases[label] = partial(once, bench, drivers[caching, "room" in name], times * args.fitting)
    return make_report(bench, bench.interleave(cases), fitting)


def make_report(bench: Bench, found: dict[str, list[dict[str, Any]]], blocks: int) -> Report:
    """The table."""
    rows = []
    for label, reps in found.items():
        fits = found[f"fits;{label.split(';')[1]}"]
        ratio = statistics.median(a["rate"] / b["rate"] for a, b in zip(reps, fits, strict=True))

        def middle(key: str, reps: list[dict[str, Any]] = reps) -> float:
            return statistics.median(one[key] for one in reps)

        counts = [f"{middle(key):,.0f}" for key in ("most", "preemptions", "recomputed", "cached")]
        extra = statistics.median(one["computed"] / one["needed"] - 1 for one in reps)
        rate = spread([one["rate"] for one in reps], digits=0)
        rows.append([label, rate, f"{ratio:.2f}", *counts, f"{extra:.1%}", f"{middle('latency'):.2f}"])

    def draw(axes: Any) -> None:
        axes.barh(list(found), [statistics.median(one["rate"] for one in reps) for reps in found.values()])
        axes.invert_yaxis()

    args = bench.args
    notes = [
        f"{args.fitting} or {2 * args.fitting} requests of {args.prompt} prompt and {args.output} new tokens, at once; "
        f"a cache of {blocks} blocks of 16 tokens",
        "ratio: new tokens/s over those of the load that fits, median over repetitions",
        "recomputed: tokens computed again after a preemption; cached: prompt or own tokens found in the prefix cache; "
        "extra: tokens computed beyond those needed once",
    ]
    header = ["load", "new tokens/s", "ratio", "most decodes at once", "preemptions", "recomputed", "cached", "extra"]
    header += ["median time to the last token, s"]
    return Report("A load of twice the KV cache", header, rows, notes, found, draw, ("new tokens/s", ""))
