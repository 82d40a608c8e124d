"""What computing a shared prefix once for all requests brings, beside computing it for each.

python benchmarks/shared_prefixes.py smollm2 --prefixes 512 2000 --requests 4 64

Requests find the first tokens of their prompts in the prefix cache, and have 24 more of their own.
Both forms take turns: in decode from step to step, on the same requests; in prefill from repetition
to repetition. Medians of milliseconds, computed apart > shared; a ratio above 1 says that sharing
is faster. Options of `LLM` follow the model, such as "smollm2 kv_cache_dtype=int8".
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable

from rich.console import Console
from rich.progress import track
from rich.table import Table
from variants import options_of

from twinphase import TimedForward, Workshop
from twinphase.backends.cpu.attention_units import AttentionUnits

OWN_TOKENS = 24
PARTS = ("prefill", "decode", "attention")
Times = dict[tuple[str, bool], list[float]]


def measure(
    workshop: Workshop, timed: TimedForward, sizes: tuple[int, int], reps: int, steps: int
) -> Times:
    """Milliseconds by part and whether the prefix was shared, for (prefix, requests) `sizes`."""
    prefix, requests = sizes
    engine = workshop.engine(
        max_num_batched_tokens=2048, max_num_seqs=requests, enable_prefix_caching=True
    )
    shared = [300 + 7 * i % 600 for i in range(prefix)]
    engine.prefill([*shared, 299])
    times: Times = defaultdict(list)
    for rep in range(-2, 2 * reps):  # The first two warm up.
        sharing = rep % 2 == 0
        AttentionUnits.sharing = "auto" if sharing else "never"
        firsts = range(1000 + 4 * requests * rep, 1000 + 4 * requests * (rep + 1), 4)
        prompts = [[*shared, *range(first, first + OWN_TOKENS)] for first in firsts]
        tickets = [engine.submit(prompt, steps + 1) for prompt in prompts]
        seconds = 0.0
        while not all(ticket.times for ticket in tickets):
            engine.step()
            seconds += timed.seconds
        times["prefill", sharing].append(1e3 * seconds)
        timed.in_parts = True
        while engine.engine.has_work:
            sharing = not sharing
            AttentionUnits.sharing = "auto" if sharing else "never"
            engine.step()
            times["decode", sharing].append(1e3 * timed.seconds)
            attention = 1e3 * timed.parts["attention"]
            times["attention", sharing].append(attention)
        timed.in_parts = False
        if rep < 0:
            times.clear()
    return times


def cells(times: Times) -> Iterable[str]:
    """Medians of both forms and their ratio, by part."""
    for part in PARTS:
        apart, shared = (statistics.median(times[part, sharing]) for sharing in (False, True))
        yield f"{apart:.2f} > {shared:.2f} ({apart / shared:.2f}x)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL [OPTION=VALUE ...]")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[128, 512, 2000, 4096])
    parser.add_argument("--requests", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--steps", type=int, default=32, help="output tokens of a request")
    parser.add_argument("--reps", type=int, default=3)
    args = parser.parse_args()
    model, options = options_of(args.model)
    options["max_model_len"] = max(args.prefixes) + OWN_TOKENS + args.steps + 16
    limits = {"max_num_seqs": max(args.requests), "max_num_batched_tokens": 2048}
    workshop = Workshop(model, **{**options, **limits})
    timed = workshop.time_forward()
    table = Table("prefix", "requests", *PARTS, title=f"{args.model}: ms, apart > shared")
    grid = [(prefix, requests) for prefix in args.prefixes for requests in args.requests]
    for sizes in track(grid, "sizes", console=Console(stderr=True)):
        table.add_row(
            *map(str, sizes), *cells(measure(workshop, timed, sizes, args.reps, args.steps))
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
