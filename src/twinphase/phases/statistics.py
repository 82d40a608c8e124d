"""Medians, percentiles and confidence intervals, without an assumed distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A confidence interval, `low` to `high`, with its actual `confidence` (a fraction)."""

    low: float
    high: float
    confidence: float


def percentile(values: Sequence[float], q: float) -> float:
    """The nearest-rank percentile `q` (in percent), which is one of the values; NaN without values.

    For `q` = 50 it is the usual median, with the mean of the middle two values if their number is
    even; the nearest rank would be the lower one, which is biased for few values.
    """
    if q == 50:
        return statistics.median(values) if values else math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q / 100 * len(ordered)) - 1)] if ordered else math.nan


def has_percentile(n: int, q: float) -> bool:
    """Whether percentile `q` of `n` values is below the maximum; p99 needs 100 values."""
    return n > 1 and math.ceil(q / 100 * n) < n


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Confidence interval of the median between two of the values, by the binomial law of ranks.

    See Conover, Practical Nonparametric Statistics, 3.2. Few values cannot give a high confidence:
    five give 0.94 between the lowest and the highest. The result's `confidence` is the actual one.
    The interval is NaN without values.
    """
    ordered = sorted(values)
    n = len(values)
    if not n:
        return Interval(math.nan, math.nan, 0.0)
    # Probability that the median is below the lowest value.
    below = 0.5**n
    rank = 0
    while rank + 1 < n / 2 and below + math.comb(n, rank + 1) * 0.5**n <= (1 - confidence) / 2:
        rank += 1
        below += math.comb(n, rank) * 0.5**n
    return Interval(ordered[rank], ordered[n - 1 - rank], max(0.0, 1 - 2 * below))
