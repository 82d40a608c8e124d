"""Live progress of a measurement on stderr: what is measured now, how far it is, and about how long it still takes.

Not for answers, which go to stdout, nor for measuring: what it shows is what it is told.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

__all__ = ["Progress", "live"]

Progress = Callable[[str, int, int], None]
"""Called as progress(what is measured now, pieces done, pieces in all)."""

ROOMY = 100  # columns; in fewer the bar is short, so that what is measured can be read
QUIET_SECONDS = 10.0  # between lines where nobody watches


@contextmanager
def live(title: str, stream: TextIO | None = None, *, percent: bool = False) -> Iterator[Progress]:
    """Show progress while the block runs.

    On a terminal a bar that is redrawn, with the time since the start and, once two pieces are done, the time left.
    Elsewhere (a log, CI) a line when something new begins, but none within ten seconds of the last.

    Args:
        title: what all of it is: "twinphase bench".
        stream: where to; stderr unless told.
        percent: show the share that is done; the number of pieces unless told.
    """
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield _Lines(title, stream, percent)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars
    from rich.table import Column

    console = Console(file=stream)
    # Four drawings a second cost next to nothing; more would be work on a core that is being measured.
    bars = Bars(
        TextColumn("[bold]{task.fields[title]}", markup=True),
        BarColumn(bar_width=24 if console.width >= ROOMY else 8),
        TaskProgressColumn() if percent else MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=False),
        console=console,
        refresh_per_second=4,
        expand=True,
        transient=True,
    )
    with bars:
        yield _Bar(bars, bars.add_task("", total=None, title=title))


class _Bar:
    """Draws on a terminal."""

    def __init__(self, bars: Bars, task: TaskID) -> None:
        self._bars, self._task = bars, task

    def __call__(self, what: str, done: int, total: int) -> None:
        self._bars.update(self._task, description=what, completed=done, total=total or None)


class _Lines:
    """Writes a line now and then."""

    def __init__(self, title: str, stream: TextIO, percent: bool) -> None:
        self._title, self._stream, self._percent = title, stream, percent
        self._start = time.monotonic()
        self._written: tuple[str, float] | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if self._written and (what == self._written[0] or now - self._written[1] < QUIET_SECONDS):
            return
        self._written = (what, now)
        share = ""
        if total:
            share = f"{100 * done // total} % " if self._percent else f"{done}/{total} "
        self._stream.write(f"{self._title}: {share}{what} ({now - self._start:.0f} s)\n")
        self._stream.flush()
