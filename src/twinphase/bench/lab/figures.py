"""What experiments make of repetitions for people: cells of a table, points of a plot, a fitted curve, metrics.

Not for verdicts (`experiment.py`), nor for the kinds of plots (`bench/report/plots.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinphase.bench.lab.experiment import median_of
from twinphase.bench.lab.workbench import fits
from twinphase.bench.report.report import Metric

__all__ = ["coefficients", "metrics_by", "milliseconds", "point", "points", "shown"]


def shown(values: Sequence[float], scale: float = 1.0) -> str:
    """Median and interval for a cell of a table: "12.3 (11.9 to 13)"."""
    estimate = median_of(values)
    if estimate.note:
        return "unknown"
    low, middle, high = (f"{value * scale:,.3g}" for value in (estimate.low, estimate.value, estimate.high))
    if abs(estimate.high * scale) >= 1000:
        low, middle, high = (f"{value * scale:,.0f}" for value in (estimate.low, estimate.value, estimate.high))
    return f"{middle} ({low} to {high})"


def milliseconds(seconds: float | None) -> str:
    """A reckoned time for a cell of a table."""
    return "unknown" if seconds is None else f"{seconds * 1e3:.3g}"


def point(values: Sequence[float], name: str, scale: float = 1.0) -> dict[str, float]:
    """A measured point for a plot: its median under `name`, and its interval as "low" and "high"."""
    estimate = median_of(values)
    return {name: estimate.value * scale, "low": estimate.low * scale, "high": estimate.high * scale}


def points(
    repetitions: Mapping[Any, Sequence[float]], x: str, y: str, scale: float = 1.0, **more: Any
) -> list[dict[str, Any]]:
    """A plot's rows: the repetitions' median and interval at each x, and what else is the same in all rows."""
    return [{x: at, **point(values, y, scale), **more} for at, values in repetitions.items()]


def coefficients(repetitions: Mapping[int, Sequence[float]], degree: int) -> list[float]:
    """Coefficients of the polynomial through the repetitions at each x, lowest power first: medians of their fits."""
    return [median_of(values).value for values in zip(*fits(repetitions, degree), strict=True)]


def metrics_by(name: str, key: str, repetitions: Mapping[int, Sequence[float]], definition: str) -> list[Metric]:
    """Seconds to be compared between runs, one metric at each value of `key`."""
    return [
        Metric(f"{name}[{key}={at}]", "s", "lower", tuple(values), definition) for at, values in repetitions.items()
    ]
