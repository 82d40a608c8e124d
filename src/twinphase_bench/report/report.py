"""A measurement as data: verdicts first, then noise, numbers, plots and conditions.

Every command that measures produces a `Report`. `plots.py` makes charts, and `render.py` files.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


class Status(enum.StrEnum):
    """The status of a verdict's claim; the value is the one in files."""

    HOLDS = "holds"
    FAILS = "fails"
    # The measurement does not decide the claim.
    UNKNOWN = "unknown"
    # A finding rather than a claim.
    INFO = "info"
    # The measurement itself must not be used.
    VOID = "void"

    @property
    def word(self) -> str:
        """The word for readers, on terminals, pages and in Markdown."""
        return {Status.INFO: "finding", Status.UNKNOWN: "undecided"}.get(self, self.value)


@dataclass(frozen=True)
class Verdict:
    """A sentence with its number; `reason` is why it fails or is undecided."""

    status: Status
    text: str
    reason: str = ""


@dataclass(frozen=True)
class Column:
    """A column's head, and the definition of its numbers, which is printed beside the table."""

    name: str
    definition: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text with a cell per column; the first column names the row."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"A row of the table {self.title!r} lacks a cell, or has one too many")


def table_of(title: str, columns: Iterable[Column | str], rows: Iterable[Sequence[str]]) -> Table:
    """A table; a column without a definition is given by its name alone."""
    heads = [Column(head) if isinstance(head, str) else head for head in columns]
    return Table(title, heads, list(rows))


@dataclass(frozen=True)
class Plot:
    """A Vega-Lite chart (https://vega.github.io/vega-lite) including its data.

    `name` is unique in its report, and the stem of its PNG file. `spec` has no size, theme or
    title, which the renderer adds. `caption` describes the measurement.
    """

    name: str
    title: str
    spec: Mapping[str, Any]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a report: verdicts, then text, tables and plots."""

    title: str
    verdicts: Sequence[Verdict] = ()
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()


@dataclass(frozen=True)
class Metric:
    """A measured quantity with the value of every repetition, for comparisons of results.

    `name` is unique in its report and includes the point: "prefill_seconds[n=512]". `unit` is "s",
    "tok/s", "req/s", ... `definition` is the formula. A repetition without a value is NaN.
    """

    name: str
    unit: str
    better: Literal["lower", "higher"]
    values: tuple[float, ...]
    definition: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that a reader needs to judge and to repeat a measurement.

    Attributes:
        kind: command: "bench", "lab", "roofline", "compare".
        title: title of one line.
        verdicts: findings, most important first.
        conditions: machine, model and its hash, versions, flags, date (`conditions.py`).
        noise: steadiness of the machine, and measurements that were repeated or omitted for lack of
            it.
        sections: sections with the numbers.
        metrics: metrics for `bench compare`.
        data: raw data, including the timestamps of all tokens.
    """

    kind: str
    title: str
    verdicts: Sequence[Verdict]
    conditions: Mapping[str, str]
    noise: Sequence[str] = ()
    sections: Sequence[Section] = ()
    metrics: Sequence[Metric] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
