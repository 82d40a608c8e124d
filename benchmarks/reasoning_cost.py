"""What an answer costs against the length of its reasoning, by phase: the picture of planning.md.

python benchmarks/reasoning_cost.py                    # Llama-3.1-8B on one H100 at 2.50 per hour
python benchmarks/reasoning_cost.py --model smollm2-135m --hardware xeon-8480+ --price 0.4

Simulates a load at each length, at a rate that keeps the worker busy for 70 % of the time. Writes
a report with the plot, and prints a row per length.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from twinphase import (
    Deployment,
    Distribution,
    LoadShape,
    Machine,
    Paced,
    TokenPrices,
    capacity_of,
    open_load,
    run_requests,
    token_prices,
)
from twinphase_bench.conditions import conditions
from twinphase_bench.report.plots import bars
from twinphase_bench.report.render import write_report
from twinphase_bench.report.report import Report, Section

LENGTHS = (0, 250, 1000, 2000)
PROMPT = Distribution.parse("1000")
ANSWER = Distribution.parse("200")
USE = 0.7
REQUESTS = 40


def prices_at(args: argparse.Namespace, reasoning: int) -> TokenPrices:
    options = {"max_num_seqs": 128}
    one = Deployment(args.model, Machine(args.hardware), ("both",), options)
    spec = one.fleet(1)
    output = ANSWER.mean + reasoning
    capacity = capacity_of(spec.workers[0], LoadShape(1.0, PROMPT.mean, output), args.itl)
    rate = USE / capacity.seconds
    requests = open_load(
        Paced(rate, 1).offsets([None] * REQUESTS),
        PROMPT,
        ANSWER,
        reasoning=Distribution.parse(str(reasoning)) if reasoning else None,
        seed=1,
    )
    return token_prices(run_requests(spec, requests), spec, {"both": args.price})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--hardware", default="h100-sxm")
    parser.add_argument("--price", type=float, default=2.5, help="of a worker per hour")
    parser.add_argument("--itl", type=float, default=0.03, help="seconds between two tokens")
    parser.add_argument("--out", type=Path, default=Path("reasoning-cost"), help="folder")
    args = parser.parse_args()
    rows = []
    for length in LENGTHS:
        found = prices_at(args, length)
        each = 1000 * found.request
        share = found.prefill / found.total
        print(f"{length:>6} reasoning tokens: {each:.4g} per 1,000 answers, prefill {share:.1%}")
        for phase, part in (("prefill", share), ("decode", 1 - share)):
            rows.append({"reasoning": f"{length:,}", "price": each * part, "phase": phase})
    plot = bars(
        "reasoning_cost",
        "What 1,000 answers cost",
        rows,
        ("reasoning", "reasoning tokens"),
        ("price", f"price, at {args.price:g} per hour and worker"),
        part="phase",
        order=[f"{length:,}" for length in LENGTHS],
        caption=f"{args.model} on {args.hardware}, simulated; 1,000 prompt and 200 answer tokens.",
    )
    report = Report("plan", plot.title, [], conditions(), sections=[Section("Cost", plots=[plot])])
    print(write_report(report, args.out).plots)


if __name__ == "__main__":
    main()
