"""How long a step of one request would take at this machine's ceilings."""

from __future__ import annotations

import math

from twinphase.batch import StepWork
from twinphase.phases.hardware import compute_seconds, memory_seconds
from twinphase.phases.roofline import parts_of_step
from twinphase_bench.lab.workbench import Workbench


def ideal_milliseconds(bench: Workbench, start: int, num_tokens: int) -> tuple[float, float]:
    """Of the arithmetic alone at the measured peaks, and of the bytes alone at the measured bandwidth.

    Args:
        bench: its model and its ceilings; a ceiling that is unknown gives NaN.
        start: tokens of the request that are computed already.
        num_tokens: that the step computes.
    """
    shape = bench.workshop.shape
    work = StepWork.of_chunk(start, num_tokens, 1, shape.window)
    linear, attention = parts_of_step(shape, bench.workshop.units, work)
    whole = linear.plus(attention)
    compute = compute_seconds(whole.flops, bench.ceilings)
    memory = memory_seconds(whole.bytes, whole.working_set, bench.ceilings)
    return compute * 1e3 if compute else math.nan, memory * 1e3 if memory else math.nan
