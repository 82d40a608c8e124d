"""Medians, percentiles and their confidence, without assuming a distribution."""

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
    """The nearest-rank percentile, `q` in percent: a value that occurred. NaN without values.

    But 50 is the median as everywhere else, the mean of the middle two where their number is even:
    the nearest rank would be the lower of two, a bias that grows as values get fewer.
    """
    if q == 50:
        return statistics.median(values) if values else math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q / 100 * len(ordered)) - 1)] if ordered else math.nan


def has_percentile(n: int, q: float) -> bool:
    """Whether percentile `q` of `n` values lies below the highest; p99 needs a hundred."""
    return n > 1 and math.ceil(q / 100 * n) < n


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Interval of the median between two measured values, by the binomial law of ranks.

    (Conover, Practical Nonparametric Statistics, 3.2.) Few values cannot give much confidence: five
    give 0.94 between the lowest and the highest; `confidence` of the result says which is reached.
    NaN without values.
    """
    ordered = sorted(values)
    n = len(values)
    if not n:
        return Interval(math.nan, math.nan, 0.0)
    # chance that the median lies below the lowest value
    below = 0.5**n
    rank = 0
    while rank + 1 < n / 2 and below + math.comb(n, rank + 1) * 0.5**n <= (1 - confidence) / 2:
        rank += 1
        below += math.comb(n, rank) * 0.5**n
    return Interval(ordered[rank], ordered[n - 1 - rank], max(0.0, 1 - 2 * below))
