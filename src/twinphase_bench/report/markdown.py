"""A report as Markdown for an issue or a README; its plots are files beside it."""

from __future__ import annotations

from collections.abc import Iterator

from twinphase_bench.report.report import Report, Section, Table, Verdict


def markdown(report: Report, *, with_plots: bool = True) -> str:
    """Verdicts, noise, numbers, then conditions; plots if their files exist."""
    lines = [f"# {_text(report.title)}", "", *map(_verdict, report.verdicts), ""]
    if report.noise:
        lines += ["## Noise", "", *(f"- {_text(line)}" for line in report.noise), ""]
    for section in report.sections:
        lines += _section(section, with_plots)
    lines += ["## Conditions", "", "| condition | value |", "|---|---|"]
    lines += [f"| {_text(key)} | {_text(value)} |" for key, value in report.conditions.items()]
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section, with_plots: bool) -> Iterator[str]:
    yield from (f"## {_text(section.title)}", "")
    if section.verdicts:
        yield from (*map(_verdict, section.verdicts), "")
    for paragraph in section.paragraphs:
        yield from (_text(paragraph), "")
    for table in section.tables:
        yield from _table(table)
    for plot in section.plots if with_plots else ():
        yield from (f"![{_text(plot.title)}](plots/{plot.name}.png)", "", _text(plot.caption), "")


def _verdict(verdict: Verdict) -> str:
    reason = f" {_text(verdict.reason)}" if verdict.reason else ""
    return f"- **{verdict.status.word}**: {_text(verdict.text)}{reason}"


def _table(table: Table) -> Iterator[str]:
    yield from (f"**{_text(table.title)}**", "")
    yield f"| {' | '.join(_text(column.name) for column in table.columns)} |"
    yield f"|---|{'---:|' * (len(table.columns) - 1)}"
    yield from (f"| {' | '.join(map(_text, row))} |" for row in table.rows)
    yield ""
    defined = [column for column in table.columns if column.definition]
    yield from (f"- *{_text(column.name)}*: {_text(column.definition)}" for column in defined)
    if defined:
        yield ""


def _text(text: str) -> str:
    """Escape all markup, because the text may come from a server."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(
        f"\\{character}" if character in "\\`*_[]|#" else character for character in text
    )
