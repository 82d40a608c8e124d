"""Continuous against static batching, where outputs differ in length.

Three ways to run the same requests on the same engine:

    continuous  all are submitted at once; whoever ends makes room for the next
    static      groups of `--seats`; the next group waits until the last of this one has ended
    naive       groups too; prompts are padded to the longest of the group, and all decode until the longest output ends

Only the tokens that were asked for count. Steps are counted too: they do not depend on a noisy machine.
Not for: waiting times; every request is there from the start.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from loads import Bench, Report, log_ticks, spread

from twinphase.bench.targets.stepped import Stepped

SUBJECT = "static"
MODES = ("continuous", "static", "naive")
PROMPT = (16, 64)  # shortest and longest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--seats", type=int, default=16, help="requests running at once (default: %(default)s)")
    parser.add_argument("--longest", default="32,128,512", help="longest outputs (default: %(default)s)")
    parser.add_argument("--spreads", default="equal,exponential,bimodal", help="(default: %(default)s)")


def output_lengths(kind: str, longest: int, count: int, seed: int) -> list[int]:
    """Output lengths: all the longest; exponential of mean longest / 8; or one in eight the longest, others a 16th."""
    rng = random.Random(f"{kind}{longest}{seed}")
    if kind == "equal":
        return [longest] * count
    if kind == "exponential":
        return [min(longest, max(1, round(rng.expovariate(8 / longest)))) for _ in range(count)]
    if kind == "bimodal":
        lengths = [longest if i % 8 == 0 else max(1, longest // 16) for i in range(count)]
        rng.shuffle(lengths)
        return lengths
    raise SystemExit(f"no spread {kind!r}: use equal, exponential or bimodal")


def play(bench: Bench, driver: Stepped, mode: str, jobs: list[tuple[int, int]]) -> dict[str, float]:
    """Run jobs of (prompt, output) tokens in one mode; useful tokens a second, and steps."""
    seats = bench.args.seats
    size = len(jobs) if mode == "continuous" else seats
    groups = [jobs[i : i + size] for i in range(0, len(jobs), size)]
    if mode == "naive":
        groups = [[(max(p for p, _ in group), max(o for _, o in group))] * len(group) for group in groups]
    texts = [[(bench.prompts.take(prompt), output) for prompt, output in group] for group in groups]
    start = time.perf_counter()
    for group in texts:
        for text, output in group:
            driver.submit(text, output)
        driver.run()
    seconds = time.perf_counter() - start
    steps = len(driver.records)
    driver.clear()
    return {"rate": sum(output for _, output in jobs) / seconds, "steps": steps}


def run(bench: Bench) -> Report:
    """Sweep the spreads and the longest output."""
    args = bench.args
    points = [(kind, int(longest)) for kind in args.spreads.split(",") for longest in args.longest.split(",")]
    most = max(longest for _, longest in points) + PROMPT[1]
    driver = bench.open(max_num_seqs=args.seats, num_kv_blocks=args.seats * (-(-most // 16) + 2) + 40)
    found: dict[tuple[str, int], dict[str, list[dict[str, float]]]] = {p: {m: [] for m in MODES} for p in points}
    with bench.steps(len(points) * len(MODES) * args.reps):
        for rep in range(args.reps):
            for index, (kind, longest) in enumerate(points):
                rng = random.Random(f"{rep}{kind}{longest}")
                outputs = output_lengths(kind, longest, args.requests, rep)
                jobs = [(rng.randint(*PROMPT), output) for output in outputs]
                shift = (rep + index) % len(MODES)
                for mode in MODES[shift:] + MODES[:shift]:

                    def once(mode: str = mode, jobs: list[tuple[int, int]] = jobs) -> dict[str, float]:
                        return play(bench, driver, mode, jobs)

                    value = bench.measure(f"{kind} {longest} {mode}", once)
                    found[kind, longest][mode].append(value)
    return make_report(bench, bench.complete(found))


def ratio(modes: dict[str, list[dict[str, float]]], other: str, key: str) -> float:
    """Median over repetitions of continuous over another mode (of rates), or the other way round (of steps)."""
    pairs = zip(modes["continuous"], modes[other], strict=True)
    return statistics.median(a[key] / b[key] if key == "rate" else b[key] / a[key] for a, b in pairs)


def make_report(bench: Bench, found: dict[tuple[str, int], dict[str, list[dict[str, float]]]]) -> Report:
    """The table and the curve."""
    rows, values = [], []
    for (kind, longest), modes in found.items():
        rates = [spread([one["rate"] for one in modes[mode]], digits=0) for mode in MODES]
        steps = " / ".join(f"{statistics.median(one['steps'] for one in modes[mode]):.0f}" for mode in MODES)
        ratios = [f"{ratio(modes, other, 'rate'):.2f}" for other in MODES[1:]]
        by_steps = [f"{ratio(modes, other, 'steps'):.2f}" for other in MODES[1:]]
        rows.append([f"{kind}, {longest}", *rates, *ratios, steps, " / ".join(by_steps)])
        values.append({"spread": kind, "longest": longest, "modes": modes})

    def draw(axes: Any) -> None:
        kinds = dict.fromkeys(kind for kind, _ in found)
        for color, kind in enumerate(kinds):
            for other, style in (("static", "--"), ("naive", "-")):
                points = [(longest, ratio(modes, other, "rate")) for (k, longest), modes in found.items() if k == kind]
                label = f"{kind}, over {other}"
                axes.plot(*zip(*sorted(points), strict=True), style, color=f"C{color}", marker="o", label=label)
        log_ticks(axes, sorted({longest for _, longest in found}))
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.legend()

    header = ["output lengths, longest", *(f"{mode}, useful tokens/s" for mode in MODES)]
    header += ["continuous / static", "continuous / naive", "steps: c / s / n", "steps: s/c, n/c"]
    notes = [
        f"{bench.args.requests} requests, {bench.args.seats} at once; prompts of {PROMPT[0]} to {PROMPT[1]} tokens",
        "exponential: mean an eighth of the longest, cut there; bimodal: one in eight the longest, others a sixteenth",
    ]
    label = ("longest output, tokens", "continuous batching's useful tokens/s over the other's")
    return Report("Continuous against static batching", header, rows, notes, values, draw, label)
