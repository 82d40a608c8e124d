"""Measures this machine's ceilings several times, and stores them for later runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from twinphase.phases.hardware import Ceilings, save_ceilings


@dataclass(frozen=True)
class CeilingSweep:
    """Ceilings for one number of threads.

    Attributes:
        runs: measurements of this run, one per repetition.
        earlier: ceilings stored by earlier runs.
    """

    runs: Sequence[Ceilings]
    earlier: Ceilings | None

    @property
    def kept(self) -> Ceilings:
        """The best ceilings of this run; on a busy machine, the best of this and earlier runs."""
        today = reduce(Ceilings.merged, self.runs)
        return self.earlier.merged(today) if today.provisional and self.earlier else today

    @property
    def now(self) -> Ceilings:
        """The kept peaks and this run's best bandwidth, which MFU and MBU are based on.

        A lower arithmetic peak only means that other programs used the cores. But memory is shared
        with other users of the host, and its bandwidth changes from hour to hour.
        """
        return replace(self.kept, bandwidth=reduce(Ceilings.merged, self.runs).bandwidth)

    def save(self) -> str:
        """Store the ceilings for later runs; return the reason if they were not stored, else ""."""
        if self.kept.provisional:
            return "other programs disturbed the measurement"
        try:
            save_ceilings(replace(self.kept, measurements=1))
        except OSError as error:
            return error.strerror or str(error)
        return ""
