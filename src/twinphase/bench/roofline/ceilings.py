"""This machine's ceilings by number of threads, several times over, the best kept for later runs of any command.

Not for the loops that measure (`backends/cpu/peaks.py`) nor for a model's steps (`roofline_measure.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from twinphase.bench.progress import Progress
from twinphase.phases.hardware import Ceilings, load_ceilings, processor_name, save_ceilings

__all__ = ["Sweep", "measure_ceilings", "thread_counts"]


@dataclass(frozen=True)
class Sweep:
    """Ceilings by number of threads.

    Attributes:
        best: the highest ever measured, earlier runs included.
        runs: this run's, one a repetition.
    """

    best: Mapping[int, Ceilings]
    runs: Mapping[int, Sequence[Ceilings]]
    problem: str = ""  # why they could not be kept

    def now(self, threads: int) -> Ceilings:
        """What efficiencies count from: the best peaks ever, and the best bandwidth of this run.

        Arithmetic belongs to the cores, so that a lower peak only means that somebody else used them. Memory is shared
        with whoever else is on the host, and what it gives changes from one hour to the next.
        """
        rates: dict[int, float] = {}
        for one in self.runs[threads]:
            for size, rate in one.bandwidth:
                rates[size] = max(rate, rates.get(size, 0.0))
        return replace(self.best[threads], bandwidth=tuple(sorted(rates.items())))

    def with_more(self, other: Sweep) -> Sweep:
        """With the repetitions of another, made later in the same run."""
        runs = {threads: [*many, *other.runs.get(threads, ())] for threads, many in self.runs.items()}
        return Sweep({**self.best, **other.best}, runs, other.problem or self.problem)


def thread_counts(cores: int) -> tuple[int, ...]:
    """Numbers of threads to sweep: every one up to 4, then doubling, and all cores."""
    doubling = [1, 2, 3, 4, *(1 << power for power in range(3, 12))]
    return (*(count for count in doubling if count < cores), cores)


def measure_ceilings(
    counts: Sequence[int],
    isa: str | None,
    repetitions: int,
    progress: Progress = lambda what, done, total: None,
) -> Sweep:
    """Measure ceilings, and keep the best of them and of those known.

    Raises:
        InvalidRequestError: this processor cannot run `isa`.
        CeilingsError: the measuring process failed.
    """
    from twinphase.backends.cpu.ceilings import measure_sweep
    from twinphase.backends.cpu.isa import choose_isa

    name = choose_isa(isa).name
    progress("ceilings: compiling the loops", 0, len(counts) * repetitions)
    found = measure_sweep(counts, isa, repetitions, lambda done, total: progress("ceilings", done, total))
    runs = {
        threads: [Ceilings(processor_name(), threads, name, **vars(one)) for one in many]
        for threads, many in found.items()
    }
    best, problem = {}, ""
    for threads, many in runs.items():
        whole = load_ceilings(threads, name) or many[0]
        for one in many:
            whole = whole.merged(one)
        best[threads] = whole
        try:
            save_ceilings(whole)
        except OSError as error:
            problem = error.strerror or str(error)
    return Sweep(best, runs, problem)
