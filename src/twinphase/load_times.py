"""Where the seconds of loading go: downloads, unpacking and compiling are timed where they happen.

What has no name of its own is loading itself, and the caller's to compute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_measured: ContextVar[dict[str, float] | None] = ContextVar("_measured", default=None)


@contextmanager
def measured_loading() -> Iterator[dict[str, float]]:
    """Seconds by part, of the parts that this thread runs in the block."""
    seconds: dict[str, float] = {}
    token = _measured.set(seconds)
    try:
        yield seconds
    finally:
        _measured.reset(token)


@contextmanager
def loading_part(name: str) -> Iterator[None]:
    """A part of loading; of parts inside each other, every second counts for the innermost."""
    seconds = _measured.get()
    if seconds is None:
        yield
        return
    start = time.perf_counter()
    before = sum(seconds.values())
    try:
        yield
    finally:
        own = time.perf_counter() - start - (sum(seconds.values()) - before)
        seconds[name] = seconds.get(name, 0.0) + own
