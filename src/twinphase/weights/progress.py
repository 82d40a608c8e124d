"""How long work reports that it is moving: a callback, and a bar in the terminal that is one.

What is done and how fast is the caller's; this only shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Called with the name of the task, the bytes done, and all bytes (None while unknown).
Progress = Callable[[str, int, "int | None"], None]


@contextmanager
def status(text: str) -> Iterator[None]:
    """A line on stderr while the block runs; nothing if it is not a terminal."""
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
    # Imported here: a model that is already present is resolved without it.
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
