"""A report on a terminal: title, verdicts, short tables, and the noise."""

from __future__ import annotations

from typing import Literal, TypeAlias

from rich.console import Console
from rich.text import Text

from twinphase import answers
from twinphase_bench.report.report import Report, Status, Table

ShownTables: TypeAlias = Literal["none", "short", "all"]
COLOURS = {
    Status.HOLDS: "green",
    Status.FAILS: "red",
    Status.UNKNOWN: "yellow",
    Status.INFO: "cyan",
    Status.VOID: "red",
}
STATUS_COLUMNS = 10
MAX_SHORT_TABLE_ROWS = 40
MAX_SHORT_TABLE_COLUMNS = 120


def show(report: Report, *, tables: ShownTables = "short", console: Console | None = None) -> None:
    """Print the most important facts of a report; all others are in its files.

    Args:
        report: report of any command that measures.
        tables: "short" prints only the first table of each section, if it is short and narrow.
        console: output; by default stdout.
    """
    console = console or answers()
    console.print(Text(report.title, "bold"))
    console.print()
    for verdict in report.verdicts:
        word = Text(
            f"{verdict.status.word.upper():<{STATUS_COLUMNS}}", f"bold {COLOURS[verdict.status]}"
        )
        _hanging(console, word, Text(verdict.text))
        if verdict.reason:
            _hanging(console, Text(" " * STATUS_COLUMNS), Text(verdict.reason, "dim"))
    for section in report.sections:
        for table in section.tables[: {"none": 0, "short": 1, "all": None}[tables]]:
            _table(console, table, only_short=tables == "short")
    console.print()
    for line in report.noise:
        console.print(Text(line, "dim"))
    if tables != "all":
        console.print(Text("Conditions, definitions and all other tables: report.md.", "dim"))


def _hanging(console: Console, head: Text, text: Text) -> None:
    for number, line in enumerate(text.wrap(console, max(20, console.width - STATUS_COLUMNS))):
        console.print((head if number == 0 else Text(" " * STATUS_COLUMNS)) + line)


def _table(console: Console, table: Table, only_short: bool) -> None:
    """Aligned columns, two spaces apart; the first one aligns left, numbers right."""
    rows = [[column.name for column in table.columns], *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if only_short and (
        len(table.rows) > MAX_SHORT_TABLE_ROWS
        or sum(widths) + 2 * len(widths) - 2 > MAX_SHORT_TABLE_COLUMNS
    ):
        return
    console.print()
    console.print(Text(table.title, "bold"))
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        console.print(Text("  ".join(cells).rstrip()), soft_wrap=True)
