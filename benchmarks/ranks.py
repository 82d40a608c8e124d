"""What tensor parallelism gains or costs on this machine: N ranks of one thread beside one rank of N threads.

    python benchmarks/ranks.py smollm2 qwen2.5-coder:1.5b
    python benchmarks/ranks.py smollm2 --ranks 4 --reps 9

Both are measured in turn within a repetition. Printed are medians, the share of the steps' time
that rank 0 waited for others, and the speed of several ranks as a share of one's in the same
repetition. Their tokens must be equal.
"""

from __future__ import annotations

import argparse
import statistics

from rich.console import Console
from rich.table import Table

from twinphase.engine.stepped import TimedRequest
from twinphase_bench.targets.engine import EngineTarget

PROMPT = 512
NEW = 64


def measure(target: EngineTarget, rep: int) -> TimedRequest:
    """A prompt of `PROMPT` tokens and the decode behind it."""
    ticket = target.stepped.submit([300 + (7 * i + 31 * rep) % 600 for i in range(PROMPT)], NEW)
    for _ in target.stepped.run():
        pass
    target.stepped.clear()
    return ticket


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--reps", type=int, default=7)
    args = parser.parse_args()
    title = f"1 rank of {args.ranks} threads -> {args.ranks} ranks of 1: medians, ratios (range)"
    table = Table(
        "model",
        f"prefill {PROMPT}, tok/s",
        "ratio",
        "waits",
        "TPOT, ms",
        "ratio",
        "waits",
        title=title,
    )
    for model in args.models:
        options = {"max_model_len": 1024, "max_num_seqs": 1}
        one = EngineTarget(model, threads=args.ranks, **options)
        several = EngineTarget(model, threads=1, tensor_parallel_size=args.ranks, **options)
        pairs = [(measure(one, rep), measure(several, rep)) for rep in range(args.reps + 1)][
            1:
        ]  # the first warms up
        assert all(left.tokens == right.tokens for left, right in pairs)
        cells = []
        for phase, seconds in (
            ("prefill", lambda ticket: ticket.ttft),
            ("decode", lambda ticket: ticket.tpot),
        ):
            times = [(seconds(left), seconds(right)) for left, right in pairs]
            ratios = [left / right for left, right in times]
            medians = [statistics.median(column) for column in zip(*times, strict=True)]
            shown = [
                f"{PROMPT / t:,.0f}" if phase == "prefill" else f"{1e3 * t:.2f}" for t in medians
            ]
            totals = [getattr(ticket.timeline, phase) for _, ticket in pairs]
            waits = statistics.median(total.rank_wait / total.seconds for total in totals)
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            cells += [" -> ".join(shown), ratio, f"{100 * waits:.0f} %"]
        table.add_row(model, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
