"""Time to first token of requests that share a long prefix, with the prefix cache and without.

The requests come one after another (or `--together` at once), so that the time is that of the prompt and not of a
queue. The first one of a repetition has to compute the prefix; it is shown apart. Without the cache every request costs
the same, so fewer are measured.
Not for: the hit rate of real traffic.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

from loads import Bench, Report

from twinphase.bench.statistics import percentile
from twinphase.bench.targets.stepped import Stepped

SUBJECT = "prefix"
NEW_TOKENS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--requests", type=int, default=100, help="with the cache (default: %(default)s)")
    parser.add_argument("--requests-off", type=int, default=10, help="without it (default: %(default)s)")
    parser.add_argument("--prefix", type=int, default=4000, help="shared tokens (default: %(default)s)")
    parser.add_argument("--own", type=int, default=32, help="tokens of each request alone (default: %(default)s)")
    parser.add_argument("--together", type=int, default=1, help="requests submitted at once (default: %(default)s)")


def once(bench: Bench, driver: Stepped, count: int) -> dict[str, Any]:
    """`count` requests behind one fresh prefix; milliseconds."""
    args = bench.args
    prefix = bench.prompts.take(args.prefix)
    tickets = []
    for first in range(0, count, args.together):
        group = [prefix + bench.prompts.take(args.own) for _ in range(min(args.together, count - first))]
        tickets += [driver.submit(prompt, NEW_TOKENS) for prompt in group]
        driver.run()
    driver.clear()
    cached = sum(ticket.request.num_cached_tokens for ticket in tickets)
    return {
        "ttft": [ticket.ttft * 1e3 for ticket in tickets],
        "hit_rate": cached / (count * (args.prefix + args.own)),
        "cached": [ticket.request.num_cached_tokens for ticket in tickets],
    }


def run(bench: Bench) -> Report:
    """On and off in turn, repeated."""
    args = bench.args
    blocks = -(-(args.prefix + args.together * (args.own + NEW_TOKENS)) // 16) + args.together + 200
    blocks_off = args.together * (-(-(args.prefix + args.own + NEW_TOKENS) // 16) + 2) + 100
    counts = {"on": args.requests, "off": args.requests_off}
    drivers = {
        "on": bench.open(enable_prefix_caching=True, num_kv_blocks=blocks),
        "off": bench.open(num_kv_blocks=blocks_off),
    }
    found = bench.interleave({name: partial(once, bench, drivers[name], counts[name]) for name in drivers})
    return make_report(bench, found, counts)


def make_report(bench: Bench, found: dict[str, list[dict[str, Any]]], counts: dict[str, int]) -> Report:
    """The table and the distribution."""
    args = bench.args
    rows, later = [], {}
    for name, reps in found.items():
        first = statistics.median(one["ttft"][0] for one in reps)
        # Where the cache is off the first is like the others.
        later[name] = [ttft for one in reps for ttft in (one["ttft"][1:] if name == "on" else one["ttft"])]
        hits = statistics.median(one["hit_rate"] for one in reps)
        median, p99 = percentile(later[name], 50), percentile(later[name], 99)
        rows.append([name, f"{counts[name]}", f"{first:,.1f}", f"{median:,.1f}", f"{p99:,.1f}", f"{hits:.1%}"])
    gain = percentile(later["off"], 50) / percentile(later["on"], 50)

    def draw(axes: Any) -> None:
        for name, values in later.items():
            ordered = sorted(values)
            axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=f"cache {name}")
        axes.set_xscale("log")
        axes.legend()

    notes = [
        f"{args.prefix:,} shared tokens and {args.own} own; {args.together} at once; ms, all repetitions pooled",
        f"the first request with the cache computes the prefix and is left out of median and p99: {gain:.0f} times "
        "faster in the median than without",
        "hit rate: prompt tokens found in the cache over all prompt tokens, the first request's included",
        f"without the cache {counts['off']} requests a repetition instead of {counts['on']}",
    ]
    header = ["prefix cache", "requests", "TTFT, first", "TTFT, median", "TTFT, p99", "hit rate"]
    label = ("TTFT, ms", "share of the requests up to it")
    return Report("Requests that share a prefix", header, rows, notes, found, draw, label)
