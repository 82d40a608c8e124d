"""One law per phase, fitted to timings by least squares of the relative error. Not for measuring (`run.py`).

Prefill: t = a + b n + c n^2 of the prompt length n. Decode, one step: t = a + b batch + c batch position; a is what
every step costs, b what another sequence adds, c what each token in a sequence's context adds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twinphase.bench.extras import require

__all__ = ["DECODE_LAW", "LONE_DECODE_LAW", "PREFILL_LAW", "Fit", "Law", "SweepPoint", "fit_decode", "fit_prefill"]

SPARE_POINTS = 2  # beyond the number of coefficients; with fewer, residuals say nothing


@dataclass(frozen=True)
class SweepPoint:
    """Where it was measured, as (prompt tokens, 1) or (position, batch), and the seconds of each repetition."""

    x: tuple[float, float]
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class Law:
    """A sum of terms, each a coefficient times a function of the point."""

    formula: str  # as printed
    units: tuple[str, ...]  # of the coefficients a, b, c
    symbols: tuple[str, ...]  # what each coefficient is multiplied by, as printed
    terms: tuple[Callable[[float, float], float], ...]


PREFILL_LAW = Law(
    "t = a + b n + c n^2",
    ("s", "s/token", "s/token^2"),
    ("", " n", " n^2"),
    (lambda n, _: 1.0, lambda n, _: n, lambda n, _: n * n),
)
DECODE_LAW = Law(
    "t = a + b batch + c batch position",
    ("s", "s/sequence", "s/token"),
    ("", " batch", " batch position"),
    (lambda position, batch: 1.0, lambda position, batch: batch, lambda position, batch: batch * position),
)
# With one batch size, what a step costs and what a sequence adds cannot be told apart.
LONE_DECODE_LAW = Law(
    "t = a + b position",
    ("s", "s/token"),
    ("", " position"),
    (lambda position, _: 1.0, lambda position, _: position),
)


@dataclass(frozen=True)
class Fit:
    """A law with its numbers."""

    law: Law
    points: tuple[SweepPoint, ...]  # that it was fitted to; the held-out ones are not among them
    coefficients: tuple[float, ...]  # in the law's order; never negative: no machine gets faster with more work

    def seconds(self, x: tuple[float, float]) -> float:
        """The law's value at a point."""
        return math.fsum(value * term(*x) for value, term in zip(self.coefficients, self.law.terms, strict=True))

    @property
    def residuals(self) -> tuple[float, ...]:
        """(measured - fitted) / fitted, one per point."""
        return tuple(point.median / self.seconds(point.x) - 1 for point in self.points)

    @property
    def spread(self) -> float:
        """Standard deviation of the residuals, with as many degrees of freedom as points beyond the coefficients."""
        freedom = len(self.points) - len(self.coefficients)
        return math.sqrt(sum(residual**2 for residual in self.residuals) / freedom)

    def __str__(self) -> str:
        """The law with its numbers, in milliseconds."""
        parts = zip(self.coefficients, self.law.symbols, strict=True)
        return " + ".join(f"{value * 1000:.3g}{symbol}" for value, symbol in parts) + " ms"

    @property
    def range_text(self) -> str:
        """Where the fitted points lie, in words."""
        by_batch: dict[float, list[float]] = {}
        for first, batch in sorted(point.x for point in self.points):
            by_batch.setdefault(batch, []).append(first)
        spans = {batch: f"{at[0]:,.0f} to {at[-1]:,.0f} tokens" for batch, at in sorted(by_batch.items())}
        if len(spans) == 1:
            return f"from {next(iter(spans.values()))}"
        return "from " + ", ".join(f"{span} at batch {batch:g}" for batch, span in spans.items())


def fit_prefill(points: Sequence[SweepPoint]) -> Fit | None:
    """The law of prefill; None where there are too few points."""
    return _fit(PREFILL_LAW, points)


def fit_decode(points: Sequence[SweepPoint]) -> Fit | None:
    """The law of decode, without its terms in the batch where only one batch size was measured."""
    several = len({point.x[1] for point in points}) > 1
    return _fit(DECODE_LAW if several else LONE_DECODE_LAW, points)


def _fit(law: Law, points: Sequence[SweepPoint]) -> Fit | None:
    """Non-negative least squares of measured / fitted - 1, weighted by 1 / measured: noise grows with the time."""
    if len(points) < len(law.terms) + SPARE_POINTS or min(point.median for point in points) <= 0:
        return None
    rows = np.array([[term(*point.x) / point.median for term in law.terms] for point in points])
    scale = np.abs(rows).max(axis=0)  # the terms differ by many orders of magnitude
    if np.linalg.matrix_rank(rows / scale) < len(law.terms):
        return None
    values, _ = require("scipy.optimize").nnls(rows / scale, np.ones(len(points)))
    return Fit(law, tuple(points), tuple(float(value) for value in values / scale))
