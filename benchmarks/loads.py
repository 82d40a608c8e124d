"""What the benchmarks of many requests share: engines to step by hand, loads, tables, files, plots.

For: `many_requests.py` and its `subjects`. Not for: comparing engines (`versus_peers.py`), nor one request alone
(`efficiency.py`). Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from peers.points import Prompts

from twinphase import LLM
from twinphase.bench.conditions import Bystanders
from twinphase.bench.progress import live
from twinphase.bench.targets.stepped import Stepped, TimedRequest
from twinphase.phases.hardware import processor_name
from twinphase.phases.timeline import StepRecord

Key, Value = TypeVar("Key"), TypeVar("Value")
RESULTS = Path(__file__).resolve().parent / "results"
QUIET_CORES = 0.1  # others may use this much of the machine before a measurement counts as disturbed
WARM_PROMPTS = (40, 200, 600)


def _lists(found: Any) -> list[list[Any]]:
    """The lists in dicts of dicts."""
    return [found] if isinstance(found, list) else [one for value in found.values() for one in _lists(value)]


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """Median ± half range."""
    middle, half = statistics.median(values) * scale, (max(values) - min(values)) / 2 * scale
    return f"{middle:,.{digits}f} ±{half:,.{digits}f}"


@dataclass
class Report:
    """What a subject found.

    Attributes:
        title: one line.
        header, rows: the table.
        notes: what a reader must know to judge it.
        values: everything measured, for the file.
        draw: draws it on matplotlib axes, if it can be drawn.
        label: names of the axes, x and y.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    values: Any
    draw: Callable[[Any], None] | None = None
    label: tuple[str, str] = ("", "")


class Bench:
    """One subject's run: opens engines, repeats what was disturbed, shows progress, and publishes the report."""

    def __init__(self, args: argparse.Namespace, subject: str) -> None:
        self.args = args
        self.subject = subject
        self.prompts = Prompts(None)
        self.foreign: list[float] = []
        self.reps = 0  # complete ones
        self.interrupted = False
        self.method = "interleaved; prompts are random token ids"
        self.checkpoint = Path()
        self.config: Any = None
        self._progress: Callable[[str], None] = lambda what: None

    def load(self, **config: Any) -> LLM:
        """A model of its own, warm; prefix cache off unless asked for, so that no repetition helps the next."""
        settings = {"threads": self.args.threads, "enable_prefix_caching": False, **config}
        if self.args.kv_cache_dtype != "auto":
            settings["kv_cache_dtype"] = self.args.kv_cache_dtype
        llm = LLM(self.args.model, **settings)
        self.checkpoint, self.config = llm.checkpoint.path, llm.config
        engine = Stepped(llm.engine)
        limit = min(llm.config.num_kv_blocks * llm.config.block_size, llm.config.max_model_len) - 8
        for length in WARM_PROMPTS:
            engine.submit(self.prompts.take(min(length, limit)), 8)
        engine.run()
        return llm

    def open(self, **config: Any) -> Stepped:
        """The engine of `load`."""
        return Stepped(self.load(**config).engine)

    @contextlib.contextmanager
    def steps(self, total: int) -> Iterator[None]:
        """Progress on stderr over `total` measurements; Ctrl-C and SIGTERM end the block early."""
        before = len(self.foreign)
        with live(self.subject) as progress:
            self._progress = lambda what: progress(what, len(self.foreign) - before, total)
            try:
                yield
            except KeyboardInterrupt:
                self.interrupted = True
                print("interrupted: reporting the complete repetitions", file=sys.stderr)

    def interleave(self, cases: Mapping[Key, Callable[[], Value]]) -> dict[Key, list[Value]]:
        """Measure every case `--reps` times, one after the other, each repetition from the next one on."""
        names, found = list(cases), {name: [] for name in cases}
        with self.steps(len(names) * self.args.reps):
            for rep in range(self.args.reps):
                shift = rep % len(names)
                for name in names[shift:] + names[:shift]:
                    found[name].append(self.measure(f"{name}", cases[name]))
        return self.complete(found)

    def complete(self, found: Value) -> Value:
        """What was found, every list of repetitions cut to the shortest; lists lie in dicts, or dicts of them.

        Raises:
            SystemExit: no repetition is complete.
        """
        self.reps = min(map(len, _lists(found)))
        if not self.reps:
            raise SystemExit(f"{self.subject}: interrupted before the first repetition was complete")
        for repetitions in _lists(found):
            del repetitions[self.reps :]
        return found

    def measure(self, what: str, function: Callable[[], Value]) -> Value:
        """Measure; once more, with fresh prompts, where others used the processor meanwhile, up to `--retries`."""
        self._progress(what)
        found: list[tuple[float, Value]] = []
        for _ in range(self.args.retries + 1):
            with Bystanders() as others:
                value = function()
            found.append((others.cores or 0.0, value))
            if found[-1][0] <= QUIET_CORES:
                break
        cores, value = min(found, key=lambda item: item[0])
        self.foreign.append(cores)
        return value

    def _conditions(self) -> dict[str, str]:
        disturbed = sum(others > QUIET_CORES for others in self.foreign)
        others = "not known"
        if self.foreign:
            others = f"median {statistics.median(self.foreign):.2f}, highest {max(self.foreign):.2f} cores; "
            others += f"{disturbed} of {len(self.foreign)} measurements stayed disturbed"
        return {
            "machine": f"{processor_name()}, {os.cpu_count()} cores, {self.args.threads} threads",
            "model": f"{self.checkpoint.name}, kv_cache_dtype {self.args.kv_cache_dtype}",
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "method": f"medians of {self.reps} repetitions, {self.method}" if self.reps else self.method,
            "CPU used by others": others,
        }

    def publish(self, report: Report) -> None:
        """Print the table, save the values, and draw the plot where matplotlib is installed."""
        conditions = self._conditions()
        print(f"\n## {report.title}\n")
        print(f"| {' | '.join(report.header)} |")
        print(f"|{'|'.join(['---', *['---:'] * (len(report.header) - 1)])}|")
        for row in report.rows:
            print(f"| {' | '.join(row)} |")
        print()
        for note in report.notes:
            print(f"- {note}")
        for key, text in conditions.items():
            print(f"- {key}: {text}")
        folder = self.args.out
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.subject}-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
        stored = {"title": report.title, "conditions": conditions, "notes": list(report.notes)}
        stored["config"] = str(self.config)
        stored["header"], stored["rows"], stored["values"] = list(report.header), list(report.rows), report.values
        path.write_text(json.dumps(stored, indent=1) + "\n")
        print(f"values: {path}", file=sys.stderr)
        self._draw(report, path.with_suffix(".png"), conditions)

    def _draw(self, report: Report, path: Path, conditions: dict[str, str]) -> None:
        if report.draw is None:
            return
        try:
            import matplotlib
        except ImportError:
            print("no plot: matplotlib is not installed", file=sys.stderr)
            return
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(8, 5), constrained_layout=True)
        report.draw(axes)
        figure.suptitle(f"{report.title}\n{conditions['model']}; {conditions['date']}", fontsize=10)
        axes.set_xlabel(report.label[0])
        axes.set_ylabel(report.label[1])
        axes.grid(True, alpha=0.3)
        figure.savefig(path, dpi=120)
        plt.close(figure)
        print(f"plot: {path}", file=sys.stderr)


def log_ticks(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic x axis with plain numbers at the measured values."""
    axes.set_xscale("log")
    axes.set_xticks(list(values), [f"{value:g}" for value in values])
    axes.minorticks_off()


@dataclass
class Interruption:
    """Running decodes into which one long prompt came.

    Attributes:
        decodes: the running ones.
        prompt: the long one.
        records: of every step since the decodes ran.
    """

    decodes: list[TimedRequest]
    prompt: TimedRequest
    records: list[StepRecord]

    @property
    def prompt_steps(self) -> list[StepRecord]:
        """The steps that computed a part of the long prompt."""
        return [record for record in self.records if self.prompt.request.request_id in record.prefill_ids]

    def gaps_before(self, ticket: TimedRequest) -> list[float]:
        """A decode's gaps that ended before the long prompt came."""
        return [gap for gap, at in zip(ticket.gaps, ticket.times[1:], strict=True) if at <= self.prompt.submitted]

    def gaps_within(self, ticket: TimedRequest) -> list[float]:
        """A decode's gaps while the long prompt was read: those ended by a step that computed a part of it."""
        steps = {record.index for record in self.prompt_steps}
        return [gap for gap, step in zip(ticket.gaps, ticket.steps[1:], strict=True) if step in steps]


def interrupt(driver: Stepped, prompts: Prompts, count: int, own: int, length: int, before: int = 64) -> Interruption:
    """Let `count` requests of `own` prompt tokens decode, and send a prompt of `length` tokens into them.

    Args:
        driver: idle; its cache must hold all of it.
        prompts: fresh text.
        count: decodes.
        own: prompt tokens of each.
        length: tokens of the long prompt.
        before: steps of decodes alone before it comes.
    """
    room = driver.engine.scheduler.max_model_len - own
    decodes = [driver.submit(prompts.take(own), room) for _ in range(count)]
    driver.run_until(lambda: all(ticket.times for ticket in decodes))
    first = len(driver.records)
    for ticket in decodes:
        ticket.times, ticket.steps = ticket.times[-1:], ticket.steps[-1:]
    for _ in range(before):
        driver.step()
    prompt = driver.submit(prompts.take(length), 16)
    driver.run_until(lambda: len(prompt.times) == 16)
    found = Interruption(decodes, prompt, driver.records[first:])
    driver.clear()
    return found
