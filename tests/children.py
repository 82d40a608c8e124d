"""Child processes of tests: none outlives its `with` block, whatever happens inside."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process that still runs, and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


@contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed at the end of the block if it has not ended by itself."""
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        end(process)


def descendants(parent: int, wanted: Callable[[bytes], bool]) -> list[int]:
    """Ids of a process's descendants whose command line is wanted."""
    found = []
    queue = [parent]
    while queue:
        pid = queue.pop()
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            queue += [int(child) for child in path.read_text().split()]
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if wanted(words):
            found.append(pid)
    return found
