"""What a step costs outside the kernels: schedule, inputs, sampling, commit, and the ledger with its cost model.

Parts are timed by wrapping the engine's own functions, which itself costs about a microsecond each. `kernels` is the
backend's call, with the copy of the inputs into place. `rest` is what is left of the whole `step()`: records,
timelines, the cost model's learning.
Not for: tokenizing and text, which happen outside of the engine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from loads import Bench, Report, spread

from twinphase.bench.targets.stepped import Stepped
from twinphase.engine import runner

SUBJECT = "bookkeeping"
PARTS = ("schedule", "inputs", "kernels", "sampling", "commit", "rest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--batches", default="1,16,64", help="concurrent requests (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="new tokens (default: %(default)s)")


class Stopwatch:
    """Sums the seconds of wrapped calls by name."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Time every call of `owner.attribute`."""
        original, inside = getattr(owner, attribute), attribute in vars(owner)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.sums[name] = self.sums.get(name, 0.0) + time.perf_counter() - start

        setattr(owner, attribute, timed)
        self._undo.append(lambda: setattr(owner, attribute, original) if inside else delattr(owner, attribute))

    def take(self) -> dict[str, float]:
        """The sums since the last call."""
        sums, self.sums = self.sums, {}
        return sums

    def close(self) -> None:
        """Put everything back."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def watch(driver: Stepped) -> Stopwatch:
    """Wrap the parts of a step."""
    engine, watch = driver.engine, Stopwatch()
    watch.wrap(engine.scheduler, "schedule", "schedule")
    watch.wrap(engine.scheduler, "commit", "commit")
    watch.wrap(engine.executor, "execute", "execute")
    watch.wrap(engine.executor.backend, "execute", "kernels")
    watch.wrap(runner, "build", "inputs")
    watch.wrap(runner, "sample", "sampling")
    return watch


def once(bench: Bench, driver: Stepped, batch: int) -> list[dict[str, Any]]:
    """One load of `batch` requests: the parts of each step, seconds."""
    for _ in range(batch):
        driver.submit(bench.prompts.take(bench.args.prompt), bench.args.steps)
    stopwatch, steps = watch(driver), []
    try:
        while driver.engine.has_work:
            record = driver.step().record
            parts = {"wall": driver.walls[-1], "record": record.seconds, **stopwatch.take()}
            named = sum(parts[name] for name in PARTS[:-1])
            parts["rest"] = parts["wall"] - named
            steps.append({"prefill": record.prefill_tokens, "decodes": record.num_decodes, **parts})
    finally:
        stopwatch.close()
    driver.clear()
    return steps


def run(bench: Bench) -> Report:
    """Each number of requests in turn, repeated."""
    args = bench.args
    batches = [int(batch) for batch in args.batches.split(",")]
    blocks = max(batches) * (-(-(args.prompt + args.steps) // 16) + 1) + 60
    driver = bench.open(max_num_seqs=max(batches), num_kv_blocks=blocks)
    found = bench.interleave({batch: partial(once, bench, driver, batch) for batch in batches})
    return make_report(bench, found)


def make_report(bench: Bench, found: dict[int, list[list[dict[str, Any]]]]) -> Report:
    """One line for the decode steps of each batch, and one for its steps with prefill."""
    rows, bars = [], {}
    for batch, reps in found.items():
        for kind, prefill in (("decode", False), ("with prefill", True)):
            loads = [[s for s in steps if bool(s["prefill"]) is prefill] for steps in reps]
            # The first step of a kind meets cold caches.
            loads = [steps[1:] if len(steps) > 1 else steps for steps in loads]
            if not all(loads):
                continue
            walls = [sum(s["wall"] for s in steps) for steps in loads]
            outside = [sum(s["wall"] - s["execute"] for s in steps) for steps in loads]
            shares = [share / wall for share, wall in zip(outside, walls, strict=True)]
            means = {name: statistics.median(statistics.mean(s[name] for s in steps) for steps in loads)
                     for name in PARTS}  # fmt: skip
            bars[f"{batch}, {kind}"] = means
            step = [statistics.mean(s["wall"] for s in steps) * 1e3 for steps in loads]
            micros = [f"{means[name] * 1e6:,.0f}" for name in PARTS if name != "kernels"]
            around = (means["inputs"] + means["sampling"]) / sum(means.values())
            rows.append([f"{batch}, {kind}", spread(step, digits=2), spread(shares, 100, 1), f"{around:.1%}", *micros])

    def draw(axes: Any) -> None:
        left = [0.0] * len(bars)
        for name in (part for part in PARTS if part != "kernels"):
            widths = [means[name] / sum(means.values()) * 100 for means in bars.values()]
            axes.barh(list(bars), widths, left=left, label=name)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.legend()

    args = bench.args
    notes = [
        f"{args.prompt} prompt and {args.steps} new tokens each; mean microseconds a step, medians of the repetitions",
        "outside: the step without `executor.execute`, that is schedule, commit and rest",
    ]
    header = ["requests, steps", "step, ms", "outside the executor, %", "inputs + sampling"]
    header += [f"{name}, us" for name in PARTS if name != "kernels"]
    return Report(
        "Time of a step outside the kernels",
        header,
        rows,
        notes,
        found,
        draw,
        ("share of the step, %", "requests, steps"),
    )
