"""How long a step of one request would take at this machine's ceilings."""

from __future__ import annotations

import math

from twinphase.batch import StepWork
from twinphase.bench.lab.workbench import Workbench
from twinphase.bench.roofline.arithmetic import ideal_seconds, parts_of_step

__all__ = ["ideal_milliseconds"]


def ideal_milliseconds(bench: Workbench, start: int, num_tokens: int) -> tuple[float, float]:
    """Of the arithmetic alone at the measured peaks, and of the bytes alone at the measured bandwidth.

    Args:
        bench: its model and its ceilings; NaN if one is unknown.
        start: tokens of the request that are computed already.
        num_tokens: that the step computes.
    """
    shape = bench.workshop.shape
    work = StepWork.of_chunk(start, num_tokens, 1, shape.window)
    linear, attention = parts_of_step(shape, bench.workshop.units, work)
    compute, memory = ideal_seconds(linear.plus(attention), bench.ceilings) or (math.nan, math.nan)
    return compute * 1e3, memory * 1e3
