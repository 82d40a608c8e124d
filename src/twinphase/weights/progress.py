"""Progress of long tasks: a callback, and a progress bar for the terminal.

The callers count their work; this file only shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Called with the name of the task, the bytes done, and the total bytes (None if unknown).
Progress = Callable[[str, int, "int | None"], None]


@contextmanager
def status(text: str) -> Iterator[None]:
    """A line on stderr during the block; nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextmanager
def progress_bar(title: str = "") -> Iterator[Progress]:
    """A bar on stderr, one line per task, below the title; nothing if it is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    # The import is here because a model that is already present does not need it.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns = (BarColumn, DownloadColumn, TransferSpeedColumn, TimeRemainingColumn)
    description = TextColumn("{task.description}")
    with Bars(description, *(c() for c in columns), console=Console(stderr=True)) as bars:
        tasks = {}
        if title:
            bars.console.print(title, highlight=False, soft_wrap=True)

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report
