"""Measures how long threads were ready but had no processor, a sign of other programs."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterable

NANOSECOND = 1e-9
# A backend names its threads with this prefix and a number; other threads have a word instead.
THREAD_PREFIX = "twinphase-"


class CpuWait:
    """Counts the wait of the calling thread and of the threads that compute for it.

    While one thread of a step has no processor, the others spin or sleep until it is done, so a
    step loses the longest wait of any of its threads. Each reading adds that maximum since the last
    reading.
    """

    def __init__(self, read: Callable[[Iterable[int]], dict[int, float]]) -> None:
        """Count for the calling thread; `read` returns the waits in seconds by native thread id."""
        self._read = read
        self._own = threading.get_native_id()
        self._last: dict[int, float] = {}
        self._total = 0.0

    def __call__(self) -> float:
        """Seconds since an arbitrary moment; only differences are meaningful."""
        now = self._read({self._own, *_pool()})
        # A thread that is new since the last reading did not take part in this step.
        self._total += max(
            (now[thread] - self._last[thread] for thread in now if thread in self._last),
            default=0.0,
        )
        self._last = now
        return self._total


def _pool() -> set[int]:
    """Native ids of the backends' threads.

    The garbage collector is off during the call: it might free a thread pool, whose threads could
    not end while the list of threads is locked.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        threads = threading.enumerate()
    finally:
        if collects:
            gc.enable()
    return {
        thread.native_id
        for thread in threads
        if thread.name.startswith(THREAD_PREFIX)
        and thread.name.removeprefix(THREAD_PREFIX).isdecimal()
        and thread.native_id is not None
    }


class _Schedstat:
    """Reads the threads' schedstat files, and keeps them open."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def __call__(self, threads: Iterable[int]) -> dict[int, float]:
        """Seconds in the run queue by thread; threads whose file cannot be read are left out."""
        wanted = set(threads)
        for thread in self._files.keys() - wanted:
            os.close(self._files.pop(thread))
        found = {}
        for thread in wanted:
            try:
                if thread not in self._files:
                    self._files[thread] = os.open(
                        f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC
                    )
                found[thread] = int(os.pread(self._files[thread], 96, 0).split()[1]) * NANOSECOND
            except (OSError, ValueError, IndexError):
                continue
        return found

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)


_OWN = threading.local()


def thread_cpu_wait() -> float:
    """Seconds that this thread and a backend's threads have waited in the run queue.

    Field 2 of Linux's /proc/self/task/ID/schedstat (Documentation/scheduler/sched-stats.rst);
    always 0 where there is none. Time that a hypervisor takes from the whole machine is not
    included. If several engines compute in one process, the threads of all of them count.
    """
    wait: CpuWait | None = getattr(_OWN, "wait", None)
    if wait is None:
        wait = _OWN.wait = CpuWait(_Schedstat())
    return wait()
