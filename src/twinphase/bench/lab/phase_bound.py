"""One phase against the ceilings: how long its arithmetic or its bytes alone would take. Not for claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from twinphase.bench.lab.workbench import Workbench, median_step
from twinphase.phases.hardware import Ceilings, compute_seconds, memory_seconds
from twinphase.phases.report import flops_by_unit
from twinphase.phases.timeline import PhaseTotals, StepRecord

__all__ = ["PhaseBound", "phase_bound"]


@dataclass(frozen=True)
class PhaseBound:
    """One phase: how long it took, and how long its arithmetic or its bytes alone would take at the ceilings.

    Attributes:
        tokens: computed.
        seconds: of each repetition.
        flops: what the algorithm needs, by the unit that computes it.
        bytes: likewise, in `steps` steps.
        compute: seconds of the arithmetic at the measured peaks; None is unknown.
        memory: seconds of the bytes at the measured bandwidth; None is unknown.
        outside: share of the time outside of the model's computation: scheduling, bookkeeping.
    """

    tokens: int
    seconds: list[float]
    flops: Mapping[str, int]
    bytes: int
    steps: int
    compute: float | None
    memory: float | None
    outside: float

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each repetition."""
        return [self.tokens / one for one in self.seconds]

    @property
    def mfu(self) -> list[float]:
        """Seconds of the arithmetic alone / seconds of each repetition; empty if unknown."""
        return [] if self.compute is None else [self.compute / one for one in self.seconds]

    @property
    def mbu(self) -> list[float]:
        """Seconds of the bytes alone / seconds of each repetition; empty if unknown."""
        return [] if self.memory is None else [self.memory / one for one in self.seconds]

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return sum(self.flops.values()) / self.bytes

    def under(self, ceilings: Ceilings | None) -> PhaseBound:
        """The same against these ceilings."""
        compute = compute_seconds(self.flops, ceilings)
        return replace(self, compute=compute, memory=memory_seconds(self.bytes, self.bytes / self.steps, ceilings))


def phase_bound(bench: Workbench, repetitions: Sequence[Sequence[StepRecord]]) -> PhaseBound:
    """What bounds the steps of one phase; every repetition did the same work.

    A repetition's time is that of its steps. Decode steps all do the same work but for a token more of KV: theirs is
    the median step times their number, so that one that was held up does not count.
    """
    first = repetitions[0]
    totals = PhaseTotals()
    for record in first:
        for cost in (record.prefill, record.decode):
            totals.linear_flops += cost.linear_flops
            totals.attention_flops += cost.attention_flops
            totals.bytes += cost.bytes
    taken = sum(record.seconds for records in repetitions for record in records)
    executed = sum(record.executed for records in repetitions for record in records)
    phase = PhaseBound(
        tokens=sum(record.prefill_tokens + record.decode_tokens for record in first),
        seconds=[_seconds(records) for records in repetitions],
        flops=flops_by_unit(totals, bench.workshop.units),
        bytes=totals.bytes,
        steps=len(first),
        compute=None,
        memory=None,
        outside=1 - executed / taken,
    )
    return phase.under(bench.ceilings)


def _seconds(records: Sequence[StepRecord]) -> float:
    decode = not any(record.prefill_tokens for record in records)
    return median_step(records) * len(records) if decode else sum(record.seconds for record in records)
