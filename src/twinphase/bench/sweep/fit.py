"""Laws fitted to timings: coefficients with intervals, residuals, and the error a prediction claims.

Least squares of the relative error, because the noise of a timing is proportional to it. One observation a point of
the plan (the median of its repetitions), so that what the formula cannot follow counts as error, as noise does: many
repetitions of a point make it exact, but a wrong formula no better. Not for measuring (`phase_sweep.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinphase.bench.extras import require

__all__ = ["DECODE_LAWS", "PREFILL_LAW", "Coefficient", "Fit", "Law", "Point", "Prediction", "best_fit", "fit"]

CONFIDENCE = 0.95
ROUNDS = 20  # of weighting by the fitted values
ROUGH_ROUNDS = 4  # where laws are only compared
SPARE_POINTS = 2  # beyond the number of coefficients: with fewer the residuals tell nothing
WORTH = 0.95  # another term must bring the error of left-out points below this share of the error without it
EDGE = 0.05  # prompts are about as long as asked: so far beyond the fitted range, as a share, is still its edge
MISFIT_LEVEL = 0.01  # chance that noise alone leaves such residuals, below which the formula is said not to fit
MISFIT_SIZE = 0.01  # relative residuals smaller than this are no matter, however exact the repetitions


@dataclass(frozen=True)
class Point:
    """Where it was measured, as (prompt tokens, 1) or (position, batch), and each repetition's seconds."""

    x: tuple[float, float]
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle repetition; the mean of the middle two where their number is even."""
        return float(np.median(self.values))


@dataclass(frozen=True)
class Law:
    """A sum of terms, each a coefficient times a function of the point.

    Attributes:
        formula: as printed.
        names: of the coefficients.
        units: of the coefficients.
        terms: the functions.
    """

    formula: str
    names: tuple[str, ...]
    units: tuple[str, ...]
    terms: tuple[Callable[[float, float], float], ...]

    def row(self, x: tuple[float, float]) -> NDArray[np.float64]:
        """The terms' values at a point, [num_terms]."""
        return np.array([term(*x) for term in self.terms])


def _one(_first: float, _batch: float) -> float:
    return 1.0


def _first(first: float, _batch: float) -> float:
    return first


def _square(first: float, _batch: float) -> float:
    return first * first


def _batch(_first: float, batch: float) -> float:
    return batch


def _product(first: float, batch: float) -> float:
    return first * batch


PREFILL_LAW = Law(
    "t = a + b n + c n^2", ("a", "b", "c"), ("s", "s/token", "s/token^2"), (_one, _first, _square)
)  # fmt: skip
_A, _B, _C, _D = ("a", "s", _one), ("b", "s/token", _first), ("c", "s/sequence", _batch), ("d", "s/token", _product)


def _law(formula: str, *parts: tuple[str, str, Callable[[float, float], float]]) -> Law:
    names, units, terms = zip(*parts, strict=True)
    return Law(formula, names, units, terms)


CONSTANT = _law("t = a", _A)
# From few terms to many. With one batch size only, the first is all that can be told.
DECODE_LAWS = (
    _law("t = a + b position", _A, _B),
    _law("t = a + c batch", _A, _C),
    _law("t = a + b position + c batch", _A, _B, _C),
    _law("t = a + c batch + d batch position", _A, _C, _D),
    _law("t = a + b position + c batch + d batch position", _A, _B, _C, _D),
)


@dataclass(frozen=True)
class Coefficient:
    """A fitted number with its confidence interval.

    Attributes:
        name, unit: as in the law.
        value: never negative: time that grows with less work is no law of a machine.
        low, high: of the confidence interval.
        free: what the fit gives where negative values are allowed, if that is negative; None otherwise.
    """

    name: str
    unit: str
    value: float
    low: float
    high: float
    free: float | None = None


@dataclass(frozen=True)
class Prediction:
    """Seconds at a new point: the median of its repetitions lies between `low` and `high` with `CONFIDENCE`.

    Not so where it is `extrapolated`: there the interval supposes that the law goes on as it is, which nothing has
    shown.
    """

    value: float
    low: float
    high: float
    extrapolated: bool = False

    @property
    def error(self) -> float:
        """Half the interval as a share of the value: the claimed error."""
        return (self.high - self.low) / 2 / self.value if self.value > 0 else math.inf

    def holds(self, measured: float) -> bool:
        """Whether a measurement lies inside."""
        return self.low <= measured <= self.high


@dataclass(frozen=True)
class Fit:
    """A law with its numbers.

    Attributes:
        law: what was fitted.
        points: to what.
        coefficients: in the law's order.
        covariance: of the coefficients, [num_terms, num_terms], rows and columns of those at zero being zero.
        scale: standard deviation of the relative residuals.
        freedom: points - coefficients.
        r_squared: 1 - sum of squared relative residuals / the same of the best constant.
        residuals: (measured - fitted) / fitted, one a point.
        repetition_noise: relative standard deviation of a point's median, from how its repetitions differ; None where
            nothing was repeated.
        misfit: chance that repetition noise alone leaves residuals as large; None where it is not known.
    """

    law: Law
    points: tuple[Point, ...]
    coefficients: tuple[Coefficient, ...]
    covariance: NDArray[np.float64]
    scale: float
    freedom: int
    r_squared: float
    residuals: tuple[float, ...]
    repetition_noise: float | None
    misfit: float | None

    @property
    def values(self) -> NDArray[np.float64]:
        """The coefficients as numbers, [num_terms]."""
        return np.array([one.value for one in self.coefficients])

    @property
    def bends_otherwise(self) -> bool:
        """Whether the measurements differ from the formula by more than repetitions differ from each other."""
        return self.misfit is not None and self.misfit < MISFIT_LEVEL and self.scale > MISFIT_SIZE

    def predict(self, x: tuple[float, float], repetitions: int | None = None) -> Prediction:
        """Seconds at a point, and the interval in which a new measurement there is to be expected.

        value ± t sqrt((scale value)^2 + variance of the fitted line there), t of Student's distribution. The law is
        taken as given: that it was chosen among several (`best_fit`) is not in the interval.

        Args:
            x: the point.
            repetitions: whose median the new measurement is; None: as many as the fitted points have. With others the
                noise of a median is another, and what the law misses (the rest of the residuals) is the same.
        """
        row = self.law.row(x)
        value = float(row @ self.values)
        variance = self.scale**2
        if repetitions is not None and self.repetition_noise is not None:
            fitted = _of_median([len(point.values) for point in self.points])
            noise = self.repetition_noise**2 * _of_median([repetitions]) / fitted
            variance = max(variance - self.repetition_noise**2, 0.0) + noise
        spread = math.sqrt(variance * value**2 + float(row @ self.covariance @ row))
        half = _student(self.freedom) * spread
        return Prediction(value, value - half, value + half, not self.covers(x))

    def covers(self, x: tuple[float, float]) -> bool:
        """Whether a point lies among the fitted ones.

        No farther out than any of them, and its position no farther than that of one with as large a batch: where
        batches were fitted behind short prompts only, a batch behind a long one is outside.
        """
        first, batch = x
        batches = [point.x[1] for point in self.points]
        if not min(batches) <= batch <= max(batches):
            return False
        lowest = min(point.x[0] for point in self.points)
        highest = max(point.x[0] for point in self.points if point.x[1] >= batch)
        return lowest * (1 - EDGE) <= first <= highest * (1 + EDGE)

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

    def line(self, x: tuple[float, float]) -> float:
        """The fitted seconds at a point."""
        return float(self.law.row(x) @ self.values)

    @property
    def typical_error(self) -> float:
        """Claimed relative error at a fitted point, the middle one of them."""
        return float(np.median([self.predict(point.x).error for point in self.points]))

    @property
    def lawless_error(self) -> float:
        """The relative error that the best constant through the same points claims."""
        constant = fit(CONSTANT, self.points)
        return constant.typical_error if constant is not None else math.inf


def _student(freedom: int) -> float:
    return float(require("scipy.stats").t.ppf((1 + CONFIDENCE) / 2, freedom))


def fit(law: Law, points: Sequence[Point]) -> Fit | None:
    """Fit a law to the points' medians; None where the points are too few, or cannot tell its terms apart.

    The weights are 1 / fitted value^2, found by repetition (iteratively reweighted least squares; McCullagh and Nelder,
    Generalized Linear Models, 9.2): weights by the measured values would favour those that came out low.
    """
    if len(points) < len(law.terms) + SPARE_POINTS:
        return None
    x = np.array([law.row(point.x) for point in points])
    y = np.array([point.median for point in points])
    if (y <= 0).any() or np.linalg.matrix_rank(x / np.abs(x).max(axis=0)) < x.shape[1]:
        return None
    free, _ = _reweighted(x, y, _least_squares)
    values, weights = _reweighted(x, y, _non_negative)
    freedom = len(points) - len(law.terms)
    fitted = x @ values
    scale = math.sqrt(float(np.sum(((y - fitted) * weights) ** 2)) / freedom)
    covariance = _covariance(x, weights, values > 0) * scale**2
    level = float(np.sum(weights**2 * y) / np.sum(weights**2))
    total = float(np.sum(((y - level) * weights) ** 2))
    noise, noise_freedom = _repetition_noise(points)
    return Fit(
        law=law,
        points=tuple(points),
        coefficients=_coefficients(law, x, weights, values, free, covariance, freedom, scale),
        covariance=covariance,
        scale=scale,
        freedom=freedom,
        r_squared=1 - scale**2 * freedom / total if total else math.nan,
        residuals=tuple(map(float, (y - fitted) / fitted)),
        repetition_noise=noise,
        misfit=_misfit(scale, freedom, noise, noise_freedom),
    )


def best_fit(laws: Sequence[Law], points: Sequence[Point]) -> Fit | None:
    """The law that predicts left-out points best; one with more terms only where it is worth them.

    Each point is predicted by a fit to all others (leave-one-out); the error is the root mean square of those.
    """
    best: tuple[float, Fit] | None = None
    for law in laws:
        found = fit(law, points)
        if found is None:
            continue
        error = _left_out_error(law, points)
        if best is None or error < WORTH * best[0]:
            best = error, found
    return best[1] if best else None


def _left_out_error(law: Law, points: Sequence[Point]) -> float:
    errors = []
    x = np.array([law.row(point.x) for point in points])
    y = np.array([point.median for point in points])
    for index in range(len(points)):
        kept = np.arange(len(points)) != index
        values, _ = _reweighted(x[kept], y[kept], _non_negative, ROUGH_ROUNDS)
        errors.append((float(x[index] @ values) - y[index]) / y[index])
    return math.sqrt(float(np.mean(np.square(errors))))


Solver = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]


def _reweighted(
    x: NDArray[np.float64], y: NDArray[np.float64], solve: Solver, rounds: int = ROUNDS
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Coefficients, and the weights 1 / fitted value that they were found with."""
    size = np.abs(x).max(axis=0)  # the terms differ by many orders of magnitude
    weights = 1 / y
    values = np.zeros(x.shape[1])
    for _ in range(rounds):
        last, values = values, solve(x / size * weights[:, None], y * weights) / size
        fitted = x @ values
        weights = 1 / np.where(fitted > 0.1 * y, fitted, y)  # a line below zero somewhere gives no weight
        if (np.abs(values - last) <= 1e-7 * np.abs(values)).all():
            break
    return values, weights


def _least_squares(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.lstsq(x, y, rcond=None)[0], dtype=np.float64)


def _non_negative(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(require("scipy.optimize").nnls(x, y)[0], dtype=np.float64)


def _covariance(x: NDArray[np.float64], weights: NDArray[np.float64], used: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Inverse of the weighted normal matrix over the terms in use, zero elsewhere, [num_terms, num_terms]."""
    size: NDArray[np.float64] = np.abs(x).max(axis=0)
    scaled = (x / size * weights[:, None])[:, used]
    inverse = np.zeros((x.shape[1], x.shape[1]))
    inverse[np.ix_(used, used)] = np.linalg.pinv(scaled.T @ scaled)
    return inverse / np.outer(size, size)


def _coefficients(
    law: Law,
    x: NDArray[np.float64],
    weights: NDArray[np.float64],
    values: NDArray[np.float64],
    free: NDArray[np.float64],
    covariance: NDArray[np.float64],
    freedom: int,
    scale: float,
) -> tuple[Coefficient, ...]:
    """With intervals; of one at its bound, the upper end is that of the fit without the bound."""
    student = _student(freedom)
    whole = _covariance(x, weights, np.ones(len(values), dtype=bool)) * scale**2
    found = []
    for index, (name, unit) in enumerate(zip(law.names, law.units, strict=True)):
        value = float(values[index])
        if value > 0:
            half = student * math.sqrt(covariance[index, index])
            found.append(Coefficient(name, unit, value, max(0.0, value - half), value + half))
        else:
            high = max(0.0, float(free[index]) + student * math.sqrt(whole[index, index]))
            found.append(Coefficient(name, unit, 0.0, 0.0, high, min(0.0, float(free[index]))))
    return tuple(found)


def _repetition_noise(points: Sequence[Point]) -> tuple[float | None, int]:
    """Relative standard deviation of a point's median, and how many repetitions it rests on."""
    repeated = [point for point in points if len(point.values) > 1]
    freedom = sum(len(point.values) - 1 for point in repeated)
    if not freedom:
        return None, 0
    squares = sum(float(np.var(point.values)) * len(point.values) / point.median**2 for point in repeated)
    return math.sqrt(squares / freedom * _of_median([len(point.values) for point in repeated])), freedom


def _of_median(counts: Sequence[int]) -> float:
    """Variance of the median of so many normal values over that of one, about pi / 2 / k; the mean over the counts."""
    return float(np.mean([(math.pi / 2 if count > 2 else 1.0) / count for count in counts]))


def _misfit(scale: float, freedom: int, noise: float | None, noise_freedom: int) -> float | None:
    """Chance of residuals as large as these by repetition noise alone (F test of lack of fit); None: not known."""
    if noise is None:
        return None
    return float(require("scipy.stats").f.sf((scale / noise) ** 2, freedom, noise_freedom)) if noise else 0.0
