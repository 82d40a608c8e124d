"""The end of every command that measures: prints the report, and writes its files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinphase_bench.report.report import Report
    from twinphase_bench.report.terminal import ShownTables


def show_report(report: Report, as_json: bool, tables: ShownTables = "short") -> None:
    """Print a report: as JSON, or its verdicts and these tables."""
    if as_json:
        from twinphase_bench.report.result import result_json

        print(result_json(report))
    else:
        from twinphase_bench.report.terminal import show

        show(report, tables=tables)


def save_report(report: Report, out: Path | None) -> None:
    """Write the files of a report, by default to a new folder."""
    from twinphase import live, note
    from twinphase_bench.report.render import write_report

    folder = out or Path(time.strftime(f"twinphase-{report.kind}-%Y%m%d-%H%M%S"))
    with live(f"twinphase {report.kind}") as progress:
        written = write_report(report, folder, progress)
    if written.html is None:
        note(f"Report: {written.markdown}, and all values in {written.json}")
    else:
        note(f"Report: {written.html} (report.md has the same as text)")
