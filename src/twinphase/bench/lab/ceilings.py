"""How long a step of one request would take at this machine's ceilings."""

from __future__ import annotations

import math

from twinphase.bench.lab.workbench import Workbench
from twinphase.phases.hardware import compute_seconds, memory_seconds
from twinphase.phases.report import flops_by_unit
from twinphase.phases.timeline import PhaseTotals
from twinphase.phases.work import Cost, rows_cost, weight_bytes_read

__all__ = ["ideal_milliseconds"]


def ideal_milliseconds(bench: Workbench, start: int, num_tokens: int) -> tuple[float, float]:
    """Of the arithmetic alone at the measured peaks, and of the bytes alone at the measured bandwidth.

    Args:
        bench: its model and its ceilings; a ceiling that is unknown gives NaN.
        start: tokens of the request that are computed already.
        num_tokens: that the step computes.
    """
    shape = bench.workshop.shape
    cost = rows_cost(shape, start, num_tokens, 1) + Cost(bytes=weight_bytes_read(shape, num_tokens, 1))
    totals = PhaseTotals(linear_flops=cost.linear_flops, attention_flops=cost.attention_flops)
    compute = compute_seconds(flops_by_unit(totals, bench.workshop.units), bench.ceilings)
    memory = memory_seconds(cost.bytes, cost.bytes, bench.ceilings)
    return compute * 1e3 if compute else math.nan, memory * 1e3 if memory else math.nan
