"""Settings of all tests: no deadlines, Ctrl-C in a known state, and no process left behind."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # There is one process per core: libraries that take all cores would wait for each other. They
    # read these variables when they are loaded, so before anything below.
    for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_variable, "1")

# There is no GPU to run Triton's kernels, which read this variable when they are imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

import contextlib
import ctypes
import gc
import io
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import twinphase_bench.cli  # noqa: F401  adds bench, lab and roofline to the command line
from command_line import Done
from steps import USER_CACHE
from twinphase.cli import run_app
from twinphase.config import ENGINES_VARIABLE

# A busy machine is slow now and then, so examples have no deadline. Every run tries the same
# examples, so that a failure is due to the change; `--hypothesis-profile explore` looks for others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "twinphase", settings.get_profile("explore"), derandomize=True, max_examples=50
)
settings.load_profile("twinphase")

PR_SET_CHILD_SUBREAPER = 36
# The files that take longest, longest first. They start first, so that no process is left alone
# with one of them at the end; all other files follow in the order of their folders.
LONGEST_FILES = (
    "backends/cpu/test_linear.py",
    "parallel/test_ranks.py",
    "backends/cpu/test_attention.py",
    "backends/test_torch_kernels.py",
    "invariance/test_mixes.py",
    "parity/test_families_cpu.py",
    "parity/test_perplexity.py",
    "server/test_fuzz.py",
    "server/test_replicas.py",
    "cluster/test_faults_of_pools.py",
    "invariance/test_logits_bitwise.py",
    "parity/test_families.py",
    "parity/test_families_torch.py",
    "parity/test_embeddings.py",
    "invariance/test_mixes_torch.py",
    "bench/test_bench_command.py",
    "bench/targets/test_targets.py",
    "cluster/test_pools_of_roles.py",
    "server/test_faults_engine.py",
    "server/test_faults_clients.py",
    "cluster/test_pools.py",
    "server/test_live_page.py",
    "cluster/test_deploy.py",
    "cluster/test_router.py",
    "cluster/test_worker.py",
    "bench/load/test_run.py",
    "bench/lab/test_rules.py",
)


@pytest.fixture(autouse=True)
def lone_engine():
    """A server started in this process leaves its number of engines to no other test."""
    before = os.environ.pop(ENGINES_VARIABLE, None)
    yield
    os.environ.pop(ENGINES_VARIABLE, None)
    if before is not None:
        os.environ[ENGINES_VARIABLE] = before


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache without models and measurements; compiled kernels are the user's."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "kernels").symlink_to(USER_CACHE / "kernels")
    monkeypatch.setenv("TWINPHASE_CACHE", str(folder))
    return folder


@pytest.fixture
def twinphase(monkeypatch, capfd) -> Callable[..., Done]:
    """Runs a command in this process, which starts no interpreter."""

    def run(*given: object, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = run_app([str(word) for word in given])
        return Done(code, *capfd.readouterr())

    return run


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude imported modules and collected tests from garbage collection.

    The collector would visit their half a million objects again and again, for half a second each.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest files first."""
    tests = Path(__file__).parent
    ranks = {tests / name: rank for rank, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_sessionstart() -> None:
    """Handle SIGINT, and adopt orphans.

    A shell starts background jobs with SIGINT ignored, which every child would inherit, and these
    tests press Ctrl-C. Processes that lost their parent become children of this one, so that the
    end of the session finds them.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pytest_sessionfinish() -> None:
    """End every process that a test has left: it would slow down what runs next."""
    for pid in reversed(_descendants(os.getpid())):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Process ids, parents first; empty on a system without `/proc`."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *_descendants(child)]
    return found
