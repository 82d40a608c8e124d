"""Child processes of tests: none outlives its `with` block, whatever happens inside."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
