"""Writes a report as files: an HTML page, PNGs, JSON with all raw data, and Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinphase import StorageError
from twinphase_bench.extras import can_draw, require
from twinphase_bench.report.markdown import markdown
from twinphase_bench.report.page import page
from twinphase_bench.report.report import Plot, Report
from twinphase_bench.report.result import plain, result_json
from twinphase_bench.report.theme import config

# The size of PNGs in CSS pixels, and device pixels per CSS pixel.
WIDTH = 640
HEIGHT = 340
SCALE = 2.0


@dataclass(frozen=True)
class Written:
    """The paths of a report's files; PNGs are in the order of the report.

    Without the bench extra there are no page and no PNGs.
    """

    html: Path | None
    markdown: Path
    json: Path
    plots: Sequence[Path]


def write_report(
    report: Report,
    folder: Path,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Written:
    """Write `report.html`, `report.md`, `result.json` and `plots/NAME.png`.

    Args:
        report: report to write.
        folder: folder for the files, created if necessary.
        progress: called before the page, and before each plot.

    Raises:
        StorageError: the files cannot be written.
        ValueError: two plots have the same name, or a name is not a valid file name.
    """
    plots = [plot for section in report.sections for plot in section.plots]
    _check_names([plot.name for plot in plots])
    text = result_json(report)
    progress("writing the report", 0, 0)
    images = []
    try:
        # This file is first because its data took long to measure.
        _write(folder / "result.json", text.encode())
        _write(folder / "report.md", markdown(report, with_plots=can_draw()).encode())
        if not can_draw():
            return Written(None, folder / "report.md", folder / "result.json", [])
        _write(folder / "report.html", page(report, text).encode())
        for number, plot in enumerate(plots):
            progress(f"drawing {plot.name}", number, len(plots))
            images.append(folder / "plots" / f"{plot.name}.png")
            _write(images[-1], png(plot))
    except OSError as error:
        cause = f"The report cannot be written to {folder}: {error.strerror}."
        raise StorageError(cause, "Give another folder.") from None
    return Written(folder / "report.html", folder / "report.md", folder / "result.json", images)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)  # Readers never see a partial file.


def _check_names(names: list[str]) -> None:
    for number, name in enumerate(names):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ValueError(f"plot name {name!r} is not a valid file name")
        if name.lower() in (other.lower() for other in names[:number]):
            raise ValueError(f"two plots are named {name!r}")


def png(plot: Plot) -> bytes:
    """The chart with its title on a white background."""
    spec = {"title": plot.title, "width": WIDTH, "height": HEIGHT, **plain(plot.spec)}
    # A report may come from a file, so its charts must not fetch anything.
    drawn: bytes = require("vl_convert").vegalite_to_png(
        spec, scale=SCALE, config=config("light"), allowed_base_urls=[]
    )
    return drawn
