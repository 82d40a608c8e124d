"""The report after an answer: a row per phase, and rows for the rest of the wall time.

The shares of all rows sum to 1 by construction: the last row is unattributed time. `terminal.py`
draws the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from twinphase.backends.base import Units
from twinphase.phases.hardware import Ceilings, Efficiency, efficiency
from twinphase.phases.timeline import IntervalKind, PhaseTotals, RequestTimeline

FORMULAS = {
    "MFU": "sum over units of FLOP / measured peak, divided by the time",
    "MBU": "weights once per step + KV read and written, over the time x bandwidth measured for "
    "that working set",
}

# A phase's row is the wall time of its steps, including shared ones; `ledger.py` divides those.
PREFILL_KINDS = (IntervalKind.PREFILL, IntervalKind.RECOMPUTE, IntervalKind.PREFILL_WAIT)
DECODE_KINDS = (
    IntervalKind.DRAFTING,
    IntervalKind.DECODE,
    IntervalKind.REJECTED,
    IntervalKind.BATCHING,
    IntervalKind.STALL,
)


@dataclass(frozen=True)
class PhaseRow:
    """One phase of one request.

    Attributes:
        tokens: tokens computed in this phase; prefill computes the first output token.
        cached_tokens: prompt tokens that were in the KV cache already.
        share: fraction of the report's wall time.
        tokens_per_second: rate of these tokens; None without tokens.
        metric: metric in `efficiency`, "MFU" or "MBU".
        efficiency: fraction of the ceiling; a value above 1 shows a wrong count or ceiling; None is
            unknown.
        other_efficiency: the value of the other metric.
        working_set: bytes that a step reads, which determine the bandwidth.
        bound: result of `hardware.bound`.
        host_share: share of the steps' time during which a device with its own clock was idle or
            waited for Python; None without such a device.
        rank_share: share of the steps' time during which the first rank waited for other ranks;
            None if it did not.
    """

    name: str
    tokens: int
    cached_tokens: int
    seconds: float
    share: float
    tokens_per_second: float | None
    metric: str
    efficiency: float | None
    other_efficiency: float | None
    working_set: int
    bound: str
    host_share: float | None = None
    rank_share: float | None = None

    @property
    def nearest_limit(self) -> str | None:
        """The ceiling that the phase came closer to, "compute" or "memory"; None if unknown."""
        if self.efficiency is None or self.other_efficiency is None:
            return None
        is_own = self.efficiency >= self.other_efficiency
        return "compute" if is_own == (self.metric == "MFU") else "memory"


@dataclass(frozen=True)
class RestRow:
    """Wall time that belongs to neither phase."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True)
class PhaseReport:
    """Where the wall time of one request went."""

    wall_seconds: float
    phases: tuple[PhaseRow, PhaseRow]
    rest: tuple[RestRow, ...]
    ttft: float | None
    tpot: float | None

    @property
    def over_ceiling(self) -> bool:
        """Whether a phase was faster than a ceiling, so that a count or a ceiling is wrong."""
        return any(row.efficiency is not None and row.efficiency > 1 for row in self.phases)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the formulas."""
        return {**asdict(self), "formulas": FORMULAS}


def _phase_row(
    *,
    name: str,
    totals: PhaseTotals,
    seconds: float,
    wall: float,
    units: Units,
    ceilings: Ceilings | None,
    cached: int,
) -> PhaseRow:
    working_set = totals.bytes // totals.steps if totals.steps else 0
    reached = Efficiency("unknown")
    if totals.steps:
        reached = efficiency(
            units.flops(totals.linear_flops, totals.attention_flops),
            totals.bytes,
            working_set,
            seconds,
            ceilings,
            cpu_wait=totals.cpu_wait,
            rank_wait=totals.rank_wait,
            outside=totals.outside,
        )
    metric, value, other = (
        ("MFU", reached.mfu, reached.mbu)
        if name == "prefill"
        else ("MBU", reached.mbu, reached.mfu)
    )
    return PhaseRow(
        name=name,
        tokens=totals.tokens,
        cached_tokens=cached,
        seconds=seconds,
        share=seconds / wall if wall > 0 else 0.0,
        tokens_per_second=totals.tokens / seconds if totals.tokens and seconds > 0 else None,
        metric=metric,
        efficiency=value,
        other_efficiency=other,
        working_set=working_set,
        bound=reached.bound,
        host_share=max(0.0, 1 - totals.device / totals.seconds)
        if totals.device and totals.seconds
        else None,
        rank_share=totals.rank_wait / totals.seconds
        if totals.rank_wait and totals.seconds
        else None,
    )


def phase_report(
    timeline: RequestTimeline,
    *,
    units: Units,
    ceilings: Ceilings | None,
    wall_seconds: float,
    before: Mapping[str, float] | None = None,
    num_cached_tokens: int = 0,
) -> PhaseReport:
    """Divide a request's whole wall time, which consists of `before` and the timeline.

    `before` has seconds by name, such as for loading the model. `num_cached_tokens` of the prompt
    needed no prefill.
    """
    own = {*PREFILL_KINDS, *DECODE_KINDS, IntervalKind.UNATTRIBUTED}
    prefill_seconds = sum(timeline.seconds(kind) for kind in PREFILL_KINDS)
    decode_seconds = sum(timeline.seconds(kind) for kind in DECODE_KINDS)
    named = list((before or {}).items())
    named += [(kind.value, timeline.seconds(kind)) for kind in IntervalKind if kind not in own]
    rest = [(name, seconds) for name, seconds in named if seconds > 0]
    rest.append(
        ("unattributed", wall_seconds - prefill_seconds - decode_seconds - sum(s for _, s in rest))
    )
    phase_row = partial(_phase_row, wall=wall_seconds, units=units, ceilings=ceilings)
    phases = (
        phase_row(
            name="prefill",
            totals=timeline.prefill,
            seconds=prefill_seconds,
            cached=num_cached_tokens,
        ),
        phase_row(name="decode", totals=timeline.decode, seconds=decode_seconds, cached=0),
    )
    rows = tuple(
        RestRow(name, seconds, seconds / wall_seconds if wall_seconds > 0 else 0.0)
        for name, seconds in rest
    )
    return PhaseReport(wall_seconds, phases, rows, timeline.ttft, timeline.tpot)
