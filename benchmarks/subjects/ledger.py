"""Does the ledger blame the right one? A long prompt's stalls in every decode's ledger against the gaps its user sees.

For each decoding request: the sum of its `stall` intervals of the steps that computed a part of the long prompt, and
the spike: over those same steps, the measured gap less the request's median gap before the prompt came. The first is
the engine's division of its steps by the cost model, the second is a clock outside of the engine.
Not for: making the spike small (`chunk`).
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from loads import Bench, Report, interrupt

from twinphase.bench.statistics import percentile
from twinphase.bench.targets.stepped import Stepped

SUBJECT = "ledger"
OWN_PROMPT = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--decodes", type=int, default=32, help="running requests (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="max_num_batched_tokens (default: %(default)s)")


def once(bench: Bench, driver: Stepped) -> dict[str, Any]:
    """One scenario; milliseconds, one entry a decoding request."""
    found = interrupt(driver, bench.prompts, bench.args.decodes, OWN_PROMPT, bench.args.prompt)
    steps = {record.index for record in found.prompt_steps}
    stalls, spikes, unattributed, other, gaps = [], [], [], [], 0.0
    for ticket in found.decodes:
        intervals = ticket.timeline.intervals
        mine = [i for i in intervals if i.kind.value == "stall"]
        stalls.append(sum(i.end - i.start for i in mine if i.step in steps) * 1e3)
        other.append(sum(i.end - i.start for i in mine if i.step not in steps) * 1e3)
        usual, within = statistics.median(found.gaps_before(ticket)), found.gaps_within(ticket)
        spikes.append(sum(gap - usual for gap in within) * 1e3)
        totals, life = ticket.timeline.totals(), ticket.timeline.end - ticket.timeline.arrival
        unattributed.append(totals["unattributed"] / life)
        gaps = max(gaps, abs(sum(totals.values()) - life) / life)
    error = driver.engine.cost_model.error()
    return {
        "stall": stalls, "spike": spikes, "other_stall": other, "unattributed": unattributed, "sum_error": gaps,
        "steps": len(steps), "model_error": [error.median, error.p95],
    }  # fmt: skip


def run(bench: Bench) -> Report:
    """The scenario, repeated, after one rehearsal for the cost model."""
    args = bench.args
    tokens = args.decodes * (OWN_PROMPT + 512) + args.prompt + 8192
    driver = bench.open(
        max_num_seqs=args.decodes + 1, num_kv_blocks=-(-tokens // 16), max_num_batched_tokens=args.chunk
    )
    rehearsal = once(bench, driver)
    found = []
    with bench.steps(args.reps):
        for rep in range(args.reps):
            found.append(bench.measure(f"repetition {rep + 1}", lambda: once(bench, driver)))
    return make_report(bench, rehearsal, bench.complete(found))


def make_report(bench: Bench, rehearsal: dict[str, Any], found: list[dict[str, Any]]) -> Report:
    """One line a repetition."""
    rows = []
    for name, one in [("rehearsal", rehearsal), *((f"{i + 1}", one) for i, one in enumerate(found))]:
        ratios = [stall / spike for stall, spike in zip(one["stall"], one["spike"], strict=True)]
        rows.append(
            [
                name, f"{one['steps']}", f"{statistics.median(one['stall']):,.1f}",
                f"{statistics.median(one['spike']):,.1f}", f"{statistics.median(ratios):.3f}",
                f"{min(ratios):.3f} .. {max(ratios):.3f}", f"{statistics.median(one['other_stall']):,.1f}",
                f"{percentile(one['unattributed'], 50):.2%}", f"{max(one['unattributed']):.2%}",
                f"{one['sum_error']:.0e}",
            ]
        )  # fmt: skip

    def draw(axes: Any) -> None:
        for index, one in enumerate(found):
            axes.scatter(one["spike"], one["stall"], s=14, label=f"repetition {index + 1}")
        limits = [min(min(one["spike"]) for one in found), max(max(one["spike"]) for one in found)]
        axes.plot(limits, limits, color="grey", linewidth=0.8, label="equal")
        axes.legend()

    args = bench.args
    error = found[-1]["model_error"]
    notes = [
        f"{args.decodes} decodes of {OWN_PROMPT}-token prompts, then a prompt of {args.prompt:,} tokens in chunks of "
        f"{args.chunk} less the decodes; milliseconds a request, medians over the requests",
        "spike: sum over the prompt's steps of the gap less the request's median gap before",
        "other stall: of steps without the long prompt, that is the decodes' own prompts at the start",
        "sum: largest |sum of the intervals - (end - arrival)| of a request, relative",
        f"cost model's relative error over its last steps: median {error[0]:.1%}, p95 {error[1]:.1%}",
    ]
    header = ["repetition", "steps", "stall in the ledger", "spike measured", "stall / spike", "of all requests"]
    header += ["other stall", "unattributed, median", "unattributed, most", "sum"]
    values = {"repetitions": found, "rehearsal": rehearsal}
    label = ("spike measured, ms", "stall in the ledger, ms")
    return Report("Stalls in the ledger against measured gaps", header, rows, notes, values, draw, label)
