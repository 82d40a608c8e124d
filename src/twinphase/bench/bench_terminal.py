"""A bench's report on a terminal: verdicts first, then conditions, noise and the main tables. Not for files."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from twinphase.bench.report import Report, Section, Status, Table
from twinphase.terminal import answers

__all__ = ["aligned", "show"]

COLOURS = {Status.HOLDS: "green", Status.FAILS: "red", Status.UNKNOWN: "yellow", Status.VOID: "red"}
WORDS = {Status.HOLDS: "HOLDS", Status.FAILS: "FAILS", Status.UNKNOWN: "UNKNOWN", Status.VOID: "VOID"}
INDENT = 9
MOST_ROWS = 40  # of a table that is printed


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
        word = WORDS.get(verdict.status, "")
        line = Text(f"{word:<{INDENT}}", f"bold {COLOURS.get(verdict.status, 'default')}")
        _hanging(console, line, verdict.text)
        if verdict.reason:
            console.print(Padding(Text(verdict.reason, "dim"), (0, 0, 0, INDENT)))
    console.print()
    for key, value in report.conditions.items():
        console.print(Text(f"{key}: {value}", "dim"), soft_wrap=True)
    console.print()
    for sentence in report.noise:
        console.print(Text(sentence, "dim"))
    for section in report.sections:
        _section(console, section)


def _hanging(console: Console, head: Text, text: str) -> None:
    lines = Text(text).wrap(console, max(20, console.width - INDENT))
    for number, line in enumerate(lines):
        console.print((head if number == 0 else Text(" " * INDENT)).append(line.plain, "not bold default"))


def _section(console: Console, section: Section) -> None:
    """Its first table; the rest is in the files."""
    console.print()
    console.print(Text(section.title, "bold"))
    for paragraph in section.paragraphs:
        console.print(Text(paragraph, "dim"))
    for table in section.tables[:1]:
        console.print()
        for line in aligned(table)[: MOST_ROWS + 2]:
            console.print(Text(line), soft_wrap=True)
        if len(table.rows) > MOST_ROWS:
            console.print(Text(f"... {len(table.rows) - MOST_ROWS} more rows in the report", "dim"))
        console.print()
        for column in table.columns:
            if column.definition:
                console.print(Text(f"{column.name}: {column.definition}", "dim"))


def aligned(table: Table) -> list[str]:
    """The table as Markdown whose columns stand in line, to be read here and pasted elsewhere."""
    heads = [column.name for column in table.columns]
    rows: list[Sequence[str]] = [[cell.replace("|", r"\|") for cell in row] for row in table.rows]
    widths = [max(len(row[index]) for row in [heads, *rows]) for index in range(len(heads))]
    lines = [_row(heads, widths)]
    lines.append("|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|")
    return [*lines, *(_row(row, widths) for row in rows)]


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        f"{cell:<{width}}" if index == 0 else f"{cell:>{width}}"
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "| " + " | ".join(padded) + " |"
