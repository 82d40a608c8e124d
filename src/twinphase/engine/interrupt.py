"""Ctrl-C waits for the step to end, so that it never finds the engine, or a backend's threads, half-way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

__all__ = ["Interrupt", "deferred_interrupt"]


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed meanwhile."""

    requested: bool = False


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Note the first SIGINT instead of raising KeyboardInterrupt; a second one raises at once, as ever.

    Does nothing outside the main thread, or where the program handles SIGINT in its own way.
    """
    interrupt = Interrupt()
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt
        return

    def note(signal_number: int, frame: FrameType | None) -> None:
        interrupt.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
