"""A bench's report on a terminal: its verdicts and the short tables. All else is in the files."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from twinphase.bench.report.report import Report, Section, Status, Table
from twinphase.terminal import answers

__all__ = ["COLOURS", "INDENT", "show"]

COLOURS = {
    Status.HOLDS: "green",
    Status.FAILS: "red",
    Status.UNKNOWN: "yellow",
    Status.INFO: "cyan",
    Status.VOID: "red",
}
INDENT = 10  # of what stands behind a verdict's word
MOST_ROWS = 40  # of a table that is printed
WIDEST = 120  # characters of it


def show(report: Report, console: Console | None = None) -> None:
    """Print what a reader needs; all points and plots are in the files.

    Args:
        report: of a bench or a comparison.
        console: where to; stdout unless told.
    """
    console = console or answers()
    console.print(Text(report.title, "bold"))
    console.print()
    for verdict in report.verdicts:
        line = Text(f"{verdict.status.word.upper():<{INDENT}}", f"bold {COLOURS[verdict.status]}")
        _hanging(console, line, verdict.text)
        if verdict.reason:
            console.print(Padding(Text(verdict.reason, "dim"), (0, 0, 0, INDENT)))
    for section in report.sections:
        _section(console, section)
    console.print()
    console.print(Text("Conditions, noise, definitions and all other tables: report.md.", "dim"))


def _hanging(console: Console, head: Text, text: str) -> None:
    lines = Text(text).wrap(console, max(20, console.width - INDENT))
    for number, line in enumerate(lines):
        console.print((head if number == 0 else Text(" " * INDENT)).append(line.plain, "not bold default"))


def _section(console: Console, section: Section) -> None:
    """Its first table, where that is short and narrow enough to be read here."""
    for table in section.tables[:1]:
        lines = _plain(table)
        if len(table.rows) > MOST_ROWS or max(map(len, lines)) > WIDEST:
            continue
        console.print()
        console.print(Text(table.title, "bold"))
        for line in lines:
            console.print(Text(line), soft_wrap=True)


def _plain(table: Table) -> list[str]:
    """Columns in line, two spaces between them."""
    rows: list[Sequence[str]] = [[column.name for column in table.columns], *table.rows]
    widths = [max(len(row[index]) for row in rows) for index in range(len(table.columns))]
    return ["  ".join(_padded(row, widths)).rstrip() for row in rows]


def _padded(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """The first column to the left, numbers to the right."""
    return [
        f"{cell:<{width}}" if index == 0 else f"{cell:>{width}}"
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
