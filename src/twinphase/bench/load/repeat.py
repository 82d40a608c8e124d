"""One load several times. Not for one run (`load.py`), nor for what they say together (`load_report.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from twinphase.bench.load.arrivals import Arrivals, Poisson
from twinphase.bench.load.run import ClaimsReader, LoadLimits, LoadResult, Progress, run_load
from twinphase.bench.load.slo import Slos
from twinphase.bench.load.workload import Workload
from twinphase.bench.targets.target import LoadTarget

__all__ = ["run_loads"]


async def run_loads(
    target: LoadTarget,
    make_workload: Callable[[int], Workload],
    arrivals: Arrivals,
    repetitions: int,
    limits: LoadLimits | None = None,
    slos: Slos | None = None,
    progress: Progress = lambda what, done, total: None,
    make_claims: Callable[[], ClaimsReader | None] = lambda: None,
) -> list[LoadResult]:
    """The same load several times, for how much its figures differ from run to run.

    The requests of one run wait in one queue: they depend on each other, and their spread is not that of runs.

    Args:
        target: as for `run_load`, with its errors.
        make_workload: of each run, 0 the first; each must give other prompts, or the server's prefix cache has them.
        arrivals: when; each run has random gaps of its own.
        repetitions: runs, one after the other.
        limits: of each run.
        slos: for goodput.
        progress: told of runs, and of requests within them.
        make_claims: a reader for each run.
    """
    results = []
    for number in range(repetitions):
        if repetitions > 1:
            progress("repetition", number, repetitions)
        own = replace(arrivals, seed=arrivals.seed + number) if isinstance(arrivals, Poisson) else arrivals
        results.append(await run_load(target, make_workload(number), own, limits, slos, progress, make_claims()))
    return results
