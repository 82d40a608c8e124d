"""Exclusive use of an engine: by one thread at a time, in the process that loaded it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from twinphase.errors import EngineDeadError


@dataclass
class Interrupt:
    """Records whether Ctrl-C was pressed during a turn."""

    requested: bool = False


@contextmanager
def _deferred_interrupt() -> Iterator[Interrupt]:
    """Note the first SIGINT instead of raising KeyboardInterrupt; a second one raises at once.

    It does nothing outside the main thread, or if the program has its own SIGINT handler.
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


class OwnProcess:
    """The process that loaded an engine.

    A forked child has the engine's memory, but none of its threads.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise an error in a forked child, where a wait for the engine would never end.

        Raises:
            EngineDeadError: this is a forked child.
        """
        if not self.is_here:
            raise EngineDeadError(
                f"The engine runs in process {self._pid}; this is a forked child of it, where "
                "its threads do not run.",
                "Load the model in the child, or start the child with multiprocessing's 'spawn' "
                "method.",
            )


class Turns:
    """Lets threads use an engine one after the other, in order of arrival."""

    def __init__(self) -> None:
        self.process = OwnProcess()
        # A waiting thread holds `_next`, so that the thread that just had a turn cannot overtake
        # it.
        self._next = threading.Lock()
        self._now = threading.Lock()

    @contextmanager
    def take(self) -> Iterator[Interrupt]:
        """Wait for a turn and take it; after Ctrl-C the caller raises KeyboardInterrupt.

        Raises:
            EngineDeadError: this is a forked child.
        """
        self.process.check()
        with _deferred_interrupt() as interrupt:
            with self._next:
                self._now.acquire()
            try:
                yield interrupt
            finally:
                self._now.release()

    @contextmanager
    def take_if_free(self) -> Iterator[bool]:
        """Take a turn if no other thread has one; yields whether it did.

        Never waits, so that a destructor may call it.
        """
        free = self.process.is_here and self._now.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._now.release()
