"""A report as files: one page that needs no network, PNGs, JSON with everything raw, and Markdown to paste.

Not for what is in them (`report.py`), nor for how each looks (`page.py`, `markdown.py`, `theme.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from twinphase.bench.extras import require
from twinphase.bench.report.markdown import markdown
from twinphase.bench.report.page import page
from twinphase.bench.report.report import Plot, Report
from twinphase.bench.report.result import plain, result_json
from twinphase.bench.report.theme import LIGHT, drawable, dressed
from twinphase.errors import StorageError

__all__ = ["Written", "png", "write_report"]

WIDTH, HEIGHT, SCALE = 640, 340, 2.0  # of PNGs: CSS pixels, and device pixels for each


@dataclass(frozen=True)
class Written:
    """Where the files of a report are.

    Attributes:
        html: the page; it has all of the others inside, or can make them.
        markdown: tables to paste.
        json: what `bench compare` reads.
        plots: PNGs, in the order of the report.
    """

    html: Path
    markdown: Path
    json: Path
    plots: tuple[Path, ...]


def write_report(
    report: Report, folder: Path, progress: Callable[[str, int, int], None] = lambda what, done, total: None
) -> Written:
    """Write `report.html`, `report.md`, `result.json` and `plots/NAME.png`; files of the same names are replaced.

    Args:
        report: what was measured.
        folder: made if it is not there.
        progress: called for each file.

    Raises:
        MissingExtraError: without the bench extra.
        StorageError: no space or no right to write.
        ValueError: two plots of one name, or a name that is no file name.
    """
    require("vl_convert")  # before anything is written
    report = _prepared(report)
    plots = [plot for section in report.sections for plot in section.plots]
    total = len(plots) + 1
    text = result_json(report)
    files: list[tuple[Path, bytes]] = [(folder / "result.json", text.encode())]  # first: it has what took long
    progress("page", 0, total)
    try:
        _write(files[0][0], files[0][1])
        _write(folder / "report.md", markdown(report).encode())
        _write(folder / "report.html", page(report, text).encode())
        images = []
        for number, plot in enumerate(plots, 1):
            progress(f"plot {plot.name}", number, total)
            images.append(folder / "plots" / f"{plot.name}.png")
            _write(images[-1], png(plot))
    except OSError as error:
        raise StorageError(
            f"The report cannot be written to {folder}: {error.strerror}.", "Give another folder."
        ) from None
    progress("report", total, total)
    return Written(folder / "report.html", folder / "report.md", folder / "result.json", tuple(images))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)  # nobody sees half a file


def _prepared(report: Report) -> Report:
    """The report with a role for each colour, so that page, PNG and whoever reads the JSON draw the same."""
    names: set[str] = set()
    for section in report.sections:
        for plot in section.plots:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", plot.name):
                raise ValueError(f"plot name {plot.name!r} is no file name")
            if plot.name.lower() in names:
                raise ValueError(f"two plots are named {plot.name!r}")
            names.add(plot.name.lower())
    sections = (
        replace(section, plots=tuple(replace(plot, spec=dressed(plot.spec)) for plot in section.plots))
        for section in report.sections
    )
    return replace(report, sections=tuple(sections))


def png(plot: Plot) -> bytes:
    """The chart with its title, on white."""
    spec: dict[str, Any] = drawable(plain(plot.spec), LIGHT)
    if "layer" in spec or "mark" in spec:
        spec = {"width": WIDTH, "height": HEIGHT, **spec}
    # A report may come from a file: its charts fetch nothing.
    spec = {"title": plot.title, **spec}
    drawn: bytes = require("vl_convert").vegalite_to_png(spec, scale=SCALE, allowed_base_urls=[])
    return drawn
