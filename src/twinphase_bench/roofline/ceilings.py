"""This machine's ceilings, measured several times over and kept for later runs of any command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from twinphase.phases.hardware import Ceilings, save_ceilings


@dataclass(frozen=True)
class CeilingSweep:
    """Ceilings for one number of threads.

    Attributes:
        runs: the measurements of this run, one per repetition.
        earlier: what earlier runs kept.
    """

    runs: Sequence[Ceilings]
    earlier: Ceilings | None

    @property
    def kept(self) -> Ceilings:
        """The best of this run; on a busy machine the best of this run and earlier ones."""
        today = reduce(Ceilings.merged, self.runs)
        return self.earlier.merged(today) if today.provisional and self.earlier else today

    @property
    def now(self) -> Ceilings:
        """The kept peaks and the best bandwidth of this run: MFU and MBU count from these.

        Arithmetic belongs to the cores, so a lower peak only means that other programs used them.
        Memory is shared with everything else on the host, and its bandwidth changes from one hour
        to the next.
        """
        return replace(self.kept, bandwidth=reduce(Ceilings.merged, self.runs).bandwidth)

    def save(self) -> str:
        """Keep the ceilings for later runs; returns why they were not kept, "" if they were."""
        if self.kept.provisional:
            return "other programs disturbed the measurement"
        try:
            save_ceilings(replace(self.kept, measurements=1))
        except OSError as error:
            return error.strerror or str(error)
        return ""
