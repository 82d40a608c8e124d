"""This machine's ceilings, measured several times over and kept for later runs of any command.

Not for the loops that measure (`backends/cpu/peaks.py`) nor for a model's steps (`measure.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from twinphase.backends.base import Device
from twinphase.backends.cpu.ceilings import measure_repeatedly
from twinphase.backends.device import open_device
from twinphase.phases.hardware import Ceilings, load_ceilings, processor_name, save_ceilings
from twinphase.progress import Progress


@dataclass(frozen=True)
class CeilingSweep:
    """Ceilings for one number of threads.

    Attributes:
        runs: this run's measurements, one per repetition.
        earlier: what earlier runs had kept.
        problem: why they could not be kept.
    """

    runs: Sequence[Ceilings]
    earlier: Ceilings | None
    problem: str = ""

    @property
    def kept(self) -> Ceilings:
        """This run's best, which replaces the earlier one; on a busy machine the best of both."""
        today = reduce(Ceilings.merged, self.runs)
        return self.earlier.merged(today) if today.provisional and self.earlier else today

    @property
    def now(self) -> Ceilings:
        """What efficiencies count from: the kept peaks, and the best bandwidth of this run.

        Arithmetic belongs to the cores, so that a lower peak only means that somebody else used
        them. Memory is shared with whoever else is on the host, and what it gives changes from one
        hour to the next.
        """
        return replace(self.kept, bandwidth=reduce(Ceilings.merged, self.runs).bandwidth)

    def with_more(self, other: CeilingSweep) -> CeilingSweep:
        """With the repetitions of another, made later in the same run."""
        return CeilingSweep([*self.runs, *other.runs], self.earlier, other.problem or self.problem)

    def save(self) -> CeilingSweep:
        """Keep them for later runs; `problem` says why that failed."""
        try:
            save_ceilings(replace(self.kept, measurements=1))
        except OSError as error:
            return replace(self, problem=error.strerror or str(error))
        return self


def measure_ceilings(
    threads: int,
    isa: str | None,
    repetitions: int,
    progress: Progress = lambda what, done, total: None,
    device: Device | None = None,
) -> CeilingSweep:
    """Measure the ceilings with so many threads, or of a `device` of another backend; nothing is kept.

    Raises:
        InvalidRequestError: this processor cannot run `isa`.
        CeilingsError: the measuring process failed.
    """
    if device is not None:
        runs = []
        for done in range(repetitions):
            progress("ceilings", done, repetitions)
            rates = vars(device.measure())
            runs.append(Ceilings(processor_name(), device.threads, device.ceilings, **rates))
        return CeilingSweep(runs, load_ceilings(device.threads, device.ceilings))
    name = open_device("cpu", isa=isa).isa
    progress("ceilings: compiling the loops", 0, repetitions)
    found = measure_repeatedly(
        threads, isa, repetitions, lambda done, total: progress("ceilings", done, total)
    )
    runs = [Ceilings(processor_name(), threads, name, **vars(one)) for one in found]
    return CeilingSweep(runs, load_ceilings(threads, name))
