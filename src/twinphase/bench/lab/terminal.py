"""The lab on a terminal: each claim with its verdict and numbers. Not for files (`render.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from twinphase.bench.lab.experiment import Experiment
from twinphase.bench.lab.lab import Conclusion
from twinphase.bench.report.report import Report, Status
from twinphase.bench.report.terminal import COLOURS, INDENT
from twinphase.terminal import answers

__all__ = ["list_experiments", "show"]


def show(report: Report, findings: Sequence[Conclusion], console: Console | None = None) -> None:
    """Print every claim with its verdict, then what disturbed the measurement.

    Args:
        report: for its title and noise.
        findings: in order.
        console: where to; stdout unless told.
    """
    console = console or answers()
    console.print(Text(report.title, "bold"))
    for one in findings:
        console.print()
        line = Text(f"{one.status.word.upper():<{INDENT}}", f"bold {COLOURS[one.status]}")
        console.print(line.append(one.experiment.claim, "not bold default"), soft_wrap=True)
        for rule in one.judged:
            text = Text(rule.line, COLOURS[rule.status])
            _indented(console, text.append(f", must be {rule.rule.text}", "dim default"))
        if one.status is Status.FAILS:
            _indented(console, Text(one.trial.why))
        elif one.status is Status.UNKNOWN:
            _indented(console, Text(one.reason))
    console.print()
    for note in report.noise:
        console.print(Text(note, "dim"))


def _indented(console: Console, text: Text) -> None:
    console.print(Padding(text, (0, 0, 0, INDENT), expand=False))


def list_experiments(experiments: Sequence[Experiment], console: Console | None = None) -> None:
    """Print claims and rules without measuring anything."""
    console = console or answers()
    for number, experiment in enumerate(experiments, 1):
        line = Text(f"{number:>2} {experiment.name}", "bold").append(f"  {experiment.claim}", "not bold")
        console.print(line, soft_wrap=True)
        for rule in experiment.rules:
            text = Text(f"{rule.name}: {experiment.limit(rule)}", "dim")
            console.print(Padding(text, (0, 0, 0, 3), expand=False))
