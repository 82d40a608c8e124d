"""Decode against batch size: where it stops waiting for memory and begins to wait for arithmetic.

A decode step reads the weights once for the whole batch, and each request's KV. So the arithmetic intensity (FLOP by
the algorithm over bytes it must move) grows with the batch; the machine's balance point is the intensity at which its
measured peak and its measured bandwidth take the same time. Ceilings are measured before and after, and the highest
ever measured counts.
Not for: prefill, whose chunks lie far above the balance point.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

from loads import Bench, Report, log_ticks, spread

from twinphase import LLM
from twinphase.bench.roofline.ceilings import measure_ceilings
from twinphase.bench.targets.stepped import Stepped
from twinphase.engine.load import compute_units
from twinphase.phases.hardware import Ceilings, compute_seconds, memory_seconds

SUBJECT = "balance"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--batches", default="1,2,4,8,16,32,64", help="(default: %(default)s)")
    parser.add_argument("--depth", type=int, default=256, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=48, help="measured decode steps (default: %(default)s)")


def once(bench: Bench, driver: Stepped, batch: int) -> dict[str, Any]:
    """Median decode step of a full batch: seconds and work."""
    args = bench.args
    for _ in range(batch):
        driver.submit(bench.prompts.take(args.depth), 4 * args.steps + 64)
    while driver.engine.has_work:
        driver.step()
        decoding = [r.num_decodes == batch and not r.prefill_tokens for r in driver.records]
        if sum(decoding) > args.steps:
            break
    chosen = [i for i, full in enumerate(decoding) if full][1:]  # the first one follows a prefill
    records = [driver.records[i] for i in chosen]
    seconds = statistics.median(driver.walls[i] for i in chosen)
    driver.clear()
    middle = records[len(records) // 2].decode
    return {
        "seconds": seconds,
        "linear_flops": middle.linear_flops,
        "attention_flops": middle.attention_flops,
        "bytes": middle.bytes,
    }


def run(bench: Bench) -> Report:
    """Each batch size in turn, repeated."""
    args = bench.args
    batches = [int(batch) for batch in args.batches.split(",")]
    blocks = max(batches) * (-(-(args.depth + 4 * args.steps + 64) // 16) + 1) + 40
    llm = bench.load(max_num_seqs=max(batches), num_kv_blocks=blocks)
    driver = Stepped(llm.engine)
    before = measure_ceilings([args.threads], None, 1).best[args.threads]
    found = bench.interleave({batch: partial(once, bench, driver, batch) for batch in batches})
    machine = before.merged(measure_ceilings([args.threads], None, 1).best[args.threads])
    return make_report(bench, llm, found, machine)


def limits(llm: LLM, work: dict[str, Any], machine: Ceilings) -> tuple[float, float]:
    """Seconds that arithmetic and memory need for a step at the measured ceilings."""
    units = compute_units(llm.checkpoint, llm.config)
    flops: dict[str, int] = {}
    half = work["attention_flops"] // 2
    for unit, count in ((units.linear, work["linear_flops"]), (units.scores, half), (units.values, half)):
        flops[unit] = flops.get(unit, 0) + count
    return compute_seconds(flops, machine) or 0.0, memory_seconds(work["bytes"], work["bytes"], machine) or 0.0


def crossing(points: list[tuple[int, float, float]]) -> float | None:
    """Batch size at which arithmetic takes as long as memory, between the measured ones; None beyond them."""
    for (a, compute_a, memory_a), (b, compute_b, memory_b) in zip(points, points[1:], strict=False):
        left, right = compute_a - memory_a, compute_b - memory_b
        if left < 0 <= right:
            return a + (b - a) * -left / (right - left)
    return None


def make_report(bench: Bench, llm: LLM, found: dict[int, list[dict[str, Any]]], machine: Ceilings) -> Report:
    """The table and the curve under its two limits."""
    rows, points, rates = [], [], []
    for batch, reps in sorted(found.items()):
        work = reps[0]
        seconds = statistics.median(one["seconds"] for one in reps)
        compute, memory = limits(llm, work, machine)
        flops = work["linear_flops"] + work["attention_flops"]
        points.append((batch, compute, memory))
        rates.append(batch / seconds)
        rows.append(
            [
                f"{batch}", spread([batch / one["seconds"] for one in reps], digits=0),
                spread([one["seconds"] * 1e3 for one in reps], digits=2), f"{flops / work['bytes']:.1f}",
                f"{flops / seconds / 1e9:.0f}", f"{work['bytes'] / seconds / 1e9:.1f}", f"{memory * 1e3:.2f}",
                f"{compute * 1e3:.2f}", f"{max(compute, memory) / seconds:.0%}",
            ]
        )  # fmt: skip
    weights = llm.engine.shape.linear_bytes + llm.engine.shape.head_bytes
    bandwidth, peak = machine.read_bandwidth(weights) or float("nan"), machine.int8_ops or float("nan")
    at = crossing(points)

    def draw(axes: Any) -> None:
        batches = [batch for batch, _, _ in points]
        axes.plot(batches, rates, "o-", label="measured")
        axes.plot(batches, [b / memory for b, _, memory in points], "--", label="limit of memory")
        axes.plot(batches, [b / compute for b, compute, _ in points], "--", label="limit of arithmetic")
        if at:
            axes.axvline(at, color="grey", linestyle=":", label=f"balance: batch {at:.0f}")
        log_ticks(axes, batches)
        axes.set_yscale("log")
        axes.legend()

    notes = [
        f"balance point {peak / bandwidth:.1f} FLOP/byte: int8 peak {peak / 1e9:.0f} GOP/s over "
        f"{bandwidth / 1e9:.1f} GB/s, measured for the {weights / 1e6:.0f} MB of weights",
        f"arithmetic takes as long as memory at a batch of {at:.0f}" if at else "the limits do not cross here",
        f"every request is {bench.args.depth} to about {bench.args.depth + 2 * bench.args.steps} tokens deep; FLOP "
        "and bytes as the algorithm needs them, attention's by their own units",
        "of the limit: the larger of both times over the measured one",
    ]
    header = ["batch", "decode tokens/s", "step, ms", "FLOP/byte", "GFLOP/s", "GB/s", "memory needs, ms"]
    header += ["arithmetic needs, ms", "of the limit"]
    values = {"batches": found, "ceilings": vars(machine), "crossing": at}
    return Report("Decode against batch size", header, rows, notes, values, draw, ("batch", "decode tokens/s"))
