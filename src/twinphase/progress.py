"""Live progress of a measurement on stderr: what is measured, how far, and time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

Progress = Callable[[str, int, int], None]
"""Called as progress(what is measured now, pieces done, pieces in all)."""

# On narrower terminals the bar is short, to leave room for the label.
WIDE_COLUMNS = 100
# Interval between lines where the output is not a terminal.
QUIET_SECONDS = 10.0


@contextmanager
def live(title: str, stream: TextIO | None = None, *, percent: bool = False) -> Iterator[Progress]:
    """Show progress while the block runs.

    On a terminal a bar that is redrawn, with the time since the start and, once two pieces are
    done, the time left. Elsewhere (a log, CI) a line when something new begins, but none within ten
    seconds of the last.

    Args:
        title: name of the whole task, such as "twinphase bench".
        stream: output; by default stderr.
        percent: show the share that is done instead of the number of pieces.
    """
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield _lines(title, stream, percent)
        return
    with _bars(title, stream, percent) as bars:
        task = bars.add_task("", total=None)
        yield lambda what, done, total: bars.update(
            task, description=what, completed=done, total=total or None
        )


def _bars(title: str, stream: TextIO, percent: bool) -> RichProgress:
    from rich import progress
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column

    console = Console(file=stream)
    what = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return progress.Progress(
        progress.TextColumn(f"[bold]{escape(title)}"),
        progress.BarColumn(bar_width=24 if console.width >= WIDE_COLUMNS else 8),
        progress.TaskProgressColumn() if percent else progress.MofNCompleteColumn(),
        progress.TextColumn("{task.description}", markup=False, table_column=what),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(compact=True, elapsed_when_finished=False),
        console=console,
        # costs next to nothing; more would be work on a core that is being measured
        refresh_per_second=4,
        expand=True,
        transient=True,
    )


def _lines(title: str, stream: TextIO, percent: bool) -> Progress:
    start = time.monotonic()
    last_text = ""
    last_time = 0.0

    def write(what: str, done: int, total: int) -> None:
        nonlocal last_text, last_time
        now = time.monotonic()
        if last_text and (what == last_text or now - last_time < QUIET_SECONDS):
            return
        last_text = what
        last_time = now
        share = f"{100 * done // max(1, total)} % " if percent else f"{done}/{total} "
        stream.write(f"{title}: {share if total else ''}{what} ({now - start:.0f} s)\n")
        stream.flush()

    return write
