"""This machine's ceilings by number of threads, several times over, kept for later runs of any command.

Not for the loops that measure (`backends/cpu/peaks.py`) nor for a model's steps (`measure.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from twinphase.backends.cpu.ceilings import measure_sweep
from twinphase.backends.device import Device, open_device
from twinphase.bench.progress import Progress
from twinphase.phases.hardware import Ceilings, load_ceilings, processor_name, save_ceilings

__all__ = ["CeilingSweep", "measure_ceilings", "thread_counts"]


@dataclass(frozen=True)
class CeilingSweep:
    """Ceilings by number of threads.

    Attributes:
        runs: this run's measurements, one per repetition.
        earlier: what earlier runs had kept.
        problem: why they could not be kept.
    """

    runs: Mapping[int, Sequence[Ceilings]]
    earlier: Mapping[int, Ceilings | None]
    problem: str = ""

    @property
    def kept(self) -> dict[int, Ceilings]:
        """This run's best, which replace the earlier ones; on a busy machine the best of both."""
        today = {threads: reduce(Ceilings.merged, many) for threads, many in self.runs.items()}
        return {
            threads: before.merged(best) if best.provisional and (before := self.earlier.get(threads)) else best
            for threads, best in today.items()
        }

    def now(self, threads: int) -> Ceilings:
        """What efficiencies count from: the kept peaks, and the best bandwidth of this run.

        Arithmetic belongs to the cores, so that a lower peak only means that somebody else used them. Memory is shared
        with whoever else is on the host, and what it gives changes from one hour to the next.
        """
        return replace(self.kept[threads], bandwidth=reduce(Ceilings.merged, self.runs[threads]).bandwidth)

    def with_more(self, other: CeilingSweep) -> CeilingSweep:
        """With the repetitions of another, made later in the same run."""
        runs = {threads: [*many, *other.runs.get(threads, ())] for threads, many in self.runs.items()}
        return CeilingSweep(runs, self.earlier, other.problem or self.problem)

    def save(self) -> CeilingSweep:
        """Keep them for later runs; `problem` says why that failed."""
        try:
            for best in self.kept.values():
                save_ceilings(replace(best, measurements=1))
        except OSError as error:
            return replace(self, problem=error.strerror or str(error))
        return self


def thread_counts(cores: int) -> tuple[int, ...]:
    """Numbers of threads to sweep: every one up to 4, then doubling, and all cores."""
    doubling = [1, 2, 3, 4, *(1 << power for power in range(3, 12))]
    return (*(count for count in doubling if count < cores), cores)


def measure_ceilings(
    counts: Sequence[int],
    isa: str | None,
    repetitions: int,
    progress: Progress = lambda what, done, total: None,
    device: Device | None = None,
) -> CeilingSweep:
    """Measure the ceilings of each number of threads, or of a `device` of another backend; nothing is kept.

    Raises:
        InvalidRequestError: this processor cannot run `isa`.
        CeilingsError: the measuring process failed.
    """
    if device is not None:
        runs = {device.threads: list[Ceilings]()}
        for done in range(repetitions):
            progress("ceilings", done, repetitions)
            rates = vars(device.measure())
            runs[device.threads].append(Ceilings(processor_name(), device.threads, device.ceilings, **rates))
        return CeilingSweep(runs, {device.threads: load_ceilings(device.threads, device.ceilings)})
    name = open_device("cpu", isa=isa).isa
    progress("ceilings: compiling the loops", 0, len(counts) * repetitions)
    found = measure_sweep(counts, isa, repetitions, lambda done, total: progress("ceilings", done, total))
    runs = {
        threads: [Ceilings(processor_name(), threads, name, **vars(one)) for one in many]
        for threads, many in found.items()
    }
    return CeilingSweep(runs, {threads: load_ceilings(threads, name) for threads in counts})
