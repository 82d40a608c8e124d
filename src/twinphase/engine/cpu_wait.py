"""How long a thread could have run and was not let: the mark of other programs on the same processors."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

__all__ = ["thread_cpu_wait"]

NANOSECOND = 1e-9


class _Schedstat:
    """The calling thread's file, closed with the thread."""

    def __init__(self) -> None:
        self.file = -1
        with suppress(OSError):
            self.file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)


_OWN = threading.local()


def thread_cpu_wait() -> float:
    """Seconds that the calling thread has waited in the system's run queue, since it began.

    Field 2 of Linux's /proc/thread-self/schedstat (Documentation/scheduler/sched-stats.rst); always 0 where there is
    none. Time that a hypervisor took from the whole machine is not in it.
    """
    own: _Schedstat | None = getattr(_OWN, "schedstat", None)
    if own is None:
        own = _OWN.schedstat = _Schedstat()
    if own.file < 0:
        return 0.0
    try:
        return int(os.pread(own.file, 96, 0).split()[1]) * NANOSECOND
    except (OSError, ValueError, IndexError):
        return 0.0
