"""Settings of all tests: hypothesis without deadlines, Ctrl-C in a known state, and no process left behind."""

from __future__ import annotations

import os

if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # one process per core: libraries that would take all cores wait for each other
    for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(
            _variable, "1"
        )  # read when the library is loaded, so before anything below

os.environ.setdefault(
    "TRITON_INTERPRET", "1"
)  # there is no GPU to run its kernels; read when it is imported

import contextlib
import ctypes
import signal
from pathlib import Path

from hypothesis import HealthCheck, settings

# A busy machine is slow now and then: how long an example takes says nothing of what it tests. The
# same examples are tried each time, so that a change is judged by what it changed;
# `--hypothesis-profile explore` looks for new ones.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("twinphase", settings.get_profile("explore"), derandomize=True)
settings.load_profile("twinphase")

PR_SET_CHILD_SUBREAPER = 36


def pytest_sessionstart() -> None:
    """A shell starts background jobs with SIGINT ignored, which every child would inherit: Ctrl-C is tested here.

    Processes whose parent has died become children of this one, so that the end of the session
    finds them.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pytest_sessionfinish() -> None:
    """Whatever a test did not end computes for no one, and would slow whatever runs next."""
    for pid in reversed(_descendants(os.getpid())):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Process ids, parents first; empty where the system does not tell."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *_descendants(child)]
    return found
