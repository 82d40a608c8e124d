"""Peak rates of a device through torch: products by element type, memory by working set.

The loops are torch's own. They are ceilings of our kernels too as far as they reach the device's
limits: a rate can only be too low.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from twinphase.backends.base import MeasuredRates
from twinphase.backends.torch.device import mark, seconds_between

MIB = 1 << 20
# Working sets in MiB by type of device.
WORKING_SETS = {"cpu": (1, 4, 16, 64, 256), "cuda": (4, 16, 32, 64, 256, 1024)}
# Rows and columns of the matrices.
SIDE = {"cpu": 1024, "cuda": 8192}
MIN_READING_SECONDS = 0.005
TOTAL_SECONDS = 4.0
# A rate is settled when its best readings agree to within the tolerance.
AGREEING_READINGS = 3
TOLERANCE = 0.05

Work = Callable[[], object]


class _Rate:
    """Operations or bytes per second of `work`, which does `amount` of them."""

    def __init__(self, amount: float, work: Work) -> None:
        self.amount = amount
        self.work = work
        self.repeats = 1
        self.readings = list[float]()

    def read(self, device: torch.device) -> None:
        while True:
            start = mark(device)
            for _ in range(self.repeats):
                self.work()
            seconds = seconds_between(start, mark(device))
            if seconds >= MIN_READING_SECONDS:
                break
            self.repeats *= 2
        self.readings.append(self.repeats * self.amount / seconds)

    @property
    def best(self) -> float:
        return max(self.readings)

    @property
    def settled(self) -> bool:
        best = sorted(self.readings)[-AGREEING_READINGS:]
        return len(best) == AGREEING_READINGS and best[0] >= (1 - TOLERANCE) * best[-1]


def measure(device: torch.device) -> MeasuredRates:
    """Measures all rates in rounds until each is settled or the time is over, some seconds.

    A working set is streamed by copying it, which reads one half and writes the other, and by a
    product with a vector, which reads all of it; the faster one counts.
    """
    peaks = {
        dtype: _product(device, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    streams = {size * MIB: _streams(device, size * MIB) for size in WORKING_SETS[device.type]}
    rates = [*peaks.values(), *(rate for both in streams.values() for rate in both)]
    end = time.perf_counter() + TOTAL_SECONDS
    with torch.inference_mode():
        unsettled = rates
        while unsettled and (unsettled is rates or time.perf_counter() < end):
            for rate in unsettled:
                rate.read(device)
            unsettled = [rate for rate in rates if not rate.settled]
    return MeasuredRates(
        tuple((size, max(rate.best for rate in both)) for size, both in streams.items()),
        int8_ops=None,  # nothing here computes in it
        float32_flops=peaks[torch.float32].best,
        bfloat16_flops=peaks[torch.bfloat16].best,
        float16_flops=peaks[torch.float16].best,
        provisional=bool(unsettled),
    )


def _product(device: torch.device, dtype: torch.dtype) -> _Rate:
    side = SIDE[device.type]
    # Not zeros: they take less power, and a GPU multiplies them at clocks that it does not keep up
    # with real numbers.
    a, b, out = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(3))
    return _Rate(2.0 * side**3, lambda: torch.matmul(a, b, out=out))


def _streams(device: torch.device, size: int) -> tuple[_Rate, _Rate]:
    source, target = torch.ones(2, size // 8, dtype=torch.float32, device=device)
    matrix = torch.ones(size // 4096, 1024, device=device)
    vector = torch.ones(1024, device=device)
    out = torch.empty(len(matrix), device=device)
    copied = _Rate(float(size), lambda: target.copy_(source))
    return copied, _Rate(float(size), lambda: torch.mv(matrix, vector, out=out))
