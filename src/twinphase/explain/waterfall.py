"""Divides a request's wall time into bars that add up to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from twinphase.errors import TwinphaseError
from twinphase.phases.timeline import IntervalKind, RequestTimeline

# Allowed difference of a sum, as a fraction of the wall time.
TOLERANCE = 1e-4
# Maximum rounding error, in seconds, of a ledger written in microseconds.
ROUNDING = 2e-5
DAMAGED = "The ledger is damaged, or was cut."


class WaterfallError(TwinphaseError):
    """The parts do not add up to their whole."""

    exit_code = 2


@dataclass(frozen=True)
class WaterfallBar:
    """One kind of time.

    Attributes:
        name: an `IntervalKind`, or time before the request arrived ("load", ...).
        seconds: total.
        share: fraction of the wall time.
        before_first_token: seconds before the first output token was delivered.
    """

    name: str
    seconds: float
    share: float
    before_first_token: float


@dataclass(frozen=True)
class Waterfall:
    """Bars that partition a wall time, in the usual order of a request.

    Attributes:
        first_token: seconds from the start to the first output token; None if there was none.
        bars: bars with time.

    Raises:
        WaterfallError: there is no wall time, a bar is not part of it, or the bars do not add up to
            it; bars are never scaled to fit.
    """

    wall_seconds: float
    first_token: float | None
    bars: tuple[WaterfallBar, ...]

    def __post_init__(self) -> None:
        wall = self.wall_seconds
        if not 0 < wall < math.inf:
            raise WaterfallError(f"The wall time is {wall!r} seconds.", DAMAGED)
        check_sum(sum(bar.seconds for bar in self.bars), wall)
        for bar in self.bars:  # This form of the comparison refuses NaN.
            if not (
                bar.seconds >= 0
                and abs(bar.share - bar.seconds / wall) <= TOLERANCE
                and 0 <= bar.before_first_token <= bar.seconds + max(ROUNDING, TOLERANCE * wall)
            ):
                raise WaterfallError(f"{bar} is not part of {wall!r} seconds.", DAMAGED)


def check_sum(found: float, whole: float, roundings: int = 1) -> None:
    """Refuse parts whose sum `found`, of `roundings` rounded numbers, differs from `whole`."""
    if not abs(found - whole) <= max(roundings * ROUNDING, TOLERANCE * whole):
        raise WaterfallError(
            f"The parts of the ledger add up to {1e3 * found:.3f} ms, but {1e3 * whole:.3f} ms "
            "passed.",
            DAMAGED,
        )


def waterfall(timeline: RequestTimeline, before: Mapping[str, float] | None = None) -> Waterfall:
    """The bars of a timeline, after those of `before` (seconds by name before the arrival)."""
    earlier = {name: seconds for name, seconds in (before or {}).items() if seconds > 0}
    lead = sum(earlier.values())
    first = until_first_token(timeline)
    totals = timeline.totals()
    wall = lead + timeline.end - timeline.arrival
    bars = [(name, seconds, seconds) for name, seconds in earlier.items()]
    bars += [
        (kind.value, totals[kind.value], first[kind])
        for kind in IntervalKind
        if totals[kind.value] > 0
    ]
    ttft = None if timeline.ttft is None else lead + timeline.ttft
    return Waterfall(
        wall,
        ttft,
        tuple(WaterfallBar(name, spent, spent / wall, early) for name, spent, early in bars),
    )


def until_first_token(timeline: RequestTimeline) -> dict[IntervalKind, float]:
    """Seconds by kind up to the first output token, or all if there is none; they sum to TTFT."""
    sums = dict.fromkeys(IntervalKind, 0.0)
    cut = timeline.token_times[0] if timeline.token_times else timeline.end
    for interval in timeline.intervals:
        sums[interval.kind] += max(0.0, min(interval.end, cut) - interval.start)
    return sums
