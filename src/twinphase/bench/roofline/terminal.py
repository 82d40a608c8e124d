"""A roofline on a terminal: verdicts, the drawing in characters, and tables. Not for files (`render.py`)."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from twinphase.bench.report.report import Table, Verdict
from twinphase.bench.report.terminal import COLOURS, INDENT
from twinphase.bench.roofline.plots import canvas
from twinphase.bench.roofline.roofline import Drawing
from twinphase.terminal import answers

__all__ = ["show"]

LEGEND = "/ bandwidth, - peak; prefill: P linear layers, p attention; decode: D, d"


def show(drawing: Drawing, console: Console | None = None) -> None:
    """Print a report, verdicts first.

    Args:
        drawing: what to show.
        console: where to; stdout unless told.
    """
    console = console or answers()
    report = drawing.report
    console.print(Text(report.title, "bold"))
    for verdict in report.verdicts:
        console.print(_verdict(verdict))
    if drawing.line.roofs and drawing.line.slopes:
        console.print()
        width = max(60, min(console.width, 100))
        for line in canvas(drawing.line, drawing.marks, width):
            console.print(Text(line), no_wrap=True, overflow="crop")
        if drawing.marks:
            console.print(Text(LEGEND, "dim"))
        if drawing.line.source != "measured":
            console.print(Text("Datasheet: published peaks, not measured.", "bold yellow"))
    for section in report.sections:
        for table in section.tables:
            console.print()
            console.print(_grid(table))
    for line in report.noise:
        console.print(Text(line, "dim"))


def _verdict(verdict: Verdict) -> Text:
    text = Text(f"{verdict.status.word.upper():<{INDENT}}", f"bold {COLOURS[verdict.status]}")
    text.append(verdict.text, "default")
    if verdict.reason:
        text.append(f" ({verdict.reason})", "dim")
    return text


def _grid(table: Table) -> Grid:
    grid = Grid(
        title=table.title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        padding=(0, 1),
        pad_edge=False,
        box=None,
    )
    for index, column in enumerate(table.columns):
        grid.add_column(column.name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in table.rows:
        grid.add_row(*(Text(cell) for cell in row))
    return grid
