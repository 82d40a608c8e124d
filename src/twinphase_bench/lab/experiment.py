"""An experiment: a claim, rules that were fixed before the measurement, and a method.

A rule has a quantity and a limit. Only `decide`, which compares the measured interval with the
limit, makes verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from twinphase.phases.statistics import median_interval
from twinphase_bench.lab.workbench import MIN_ROUNDS, Runs, Workbench
from twinphase_bench.report.report import Status

MIN_CONFIDENCE = 0.9
# If other programs use this number of cores, the machine is not quiet.
BUSY_CORES = 0.25
Measured = Sequence[float] | float | str
"""A rule's quantity: the value of every repetition, an exact count, or why there is none."""


@dataclass(frozen=True)
class Rule:
    """A limit on one quantity; a claim holds if all its rules do.

    Attributes:
        name: name of the quantity.
        at_least, at_most: limits that the whole confidence interval must meet.
        unit: unit after the number: "x", "%" (the value is a fraction of 1) or "".
        formula: formula of the quantity, if its name does not explain it.
        fails_from: smallest size at which the rule can fail, because the effect may not be visible
            at smaller sizes.
    """

    name: str
    at_least: float = -math.inf
    at_most: float = math.inf
    unit: str = "x"
    formula: str = ""
    fails_from: int = 0

    @property
    def text(self) -> str:
        """The limit in words."""
        if self.at_least == self.at_most:
            return f"exactly {self.number(self.at_least)}"
        if self.at_most == math.inf:
            return f"at least {self.number(self.at_least)}"
        if self.at_least == -math.inf:
            return f"at most {self.number(self.at_most)}"
        return f"{self.number(self.at_least)} to {self.number(self.at_most)}"

    def number(self, value: float) -> str:
        """A value of this quantity with its unit."""
        if self.unit == "%":
            return percent(value)
        whole = abs(value) >= 100 or float(value).is_integer()
        return f"{value:,.0f}{self.unit}" if whole else f"{value:.3g}{self.unit}"


@dataclass(frozen=True)
class Reading:
    """The median of repetitions, and its confidence interval with the actual confidence."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    confidence: float = 0.0
    n: int = 0

    @classmethod
    def of(cls, measured: Sequence[float] | float) -> Reading:
        if not isinstance(measured, Sequence):
            return cls(measured, measured, measured, 1.0, 1)
        if not all(map(math.isfinite, measured)):
            return cls(n=len(measured))
        interval = median_interval(measured, MIN_CONFIDENCE)
        return cls(
            median_of(measured), interval.low, interval.high, interval.confidence, len(measured)
        )

    def shown(self, number: Callable[[float], str]) -> str:
        """The value with its interval: "2.1x (2x to 2.2x)"."""
        if not math.isfinite(self.value):
            return "unknown"
        value = number(self.value)
        low = number(self.low)
        high = number(self.high)
        return value if low == high else f"{value} ({low} to {high})"


@dataclass(frozen=True)
class Judged:
    """A rule, its measured value, and the verdict; `reason` is why it is undecided, if it is."""

    rule: Rule
    reading: Reading
    status: Status
    reason: str = ""

    @property
    def line(self) -> str:
        return f"{self.rule.name} {self.reading.shown(self.rule.number)}"


@dataclass(frozen=True)
class Figure:
    """The drawing of quantities: lines over numeric variants, otherwise bars.

    Attributes:
        title: title of the plot.
        x: the difference between the variants.
        quantities: quantities to draw, all of one unit.
        log: whether both axes are logarithmic.
        stacked: whether the quantities are parts of a whole.
    """

    title: str
    x: str
    quantities: tuple[str, ...]
    log: bool = False
    stacked: bool = False


@dataclass(frozen=True)
class Trial:
    """The measurements of one test of a claim.

    Attributes:
        runs: all repetitions of all variants, for the table and the plot.
        measured: measured values of the rules' quantities, in the order of the rules.
        why: measured reason, in words.
        curves: additional lines of the plot by name, as functions of the variant.
    """

    runs: Runs
    measured: Sequence[Measured]
    why: str
    curves: Mapping[str, Callable[[float], float]] = field(default_factory=dict)


def _nothing(bench: Workbench) -> Trial:
    raise NotImplementedError("an experiment decorates the function that measures it")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A claim and its method; decorates the measuring function and takes its name.

    Attributes:
        claim: claim in common words.
        method: description of the measurement.
        rules: rules; the claim holds if all of them do.
        meaning: consequence for a user, in one sentence.
        figure: plot, whose quantities are columns of the table.
        also: additional columns of the table.
        seconds: planned measuring time.
        sizes: possible sizes, largest first; the largest one that fits the time and the context is
            used.
        sized_in: unit of a size.
        quick: whether `--quick` includes the experiment.
    """

    claim: str
    method: str
    rules: tuple[Rule, ...]
    meaning: str
    figure: Figure
    also: tuple[str, ...] = ()
    seconds: float
    sizes: tuple[int, ...]
    sized_in: str = "prompt tokens"
    quick: bool = False
    name: str = ""
    measure: Callable[[Workbench], Trial] = _nothing

    def __call__(self, measure: Callable[[Workbench], Trial]) -> Experiment:
        return replace(self, measure=measure, name=measure.__name__.replace("_", "-"))

    def limit(self, rule: Rule) -> str:
        """The rule's limit, and the size from which it can fail."""
        return (
            f"{rule.text} (can fail from {rule.fails_from:,} {self.sized_in})"
            if rule.fails_from
            else rule.text
        )


def decide(rule: Rule, measured: Measured, size: float = math.inf, others: float = 0.0) -> Judged:
    """HOLDS if the interval is within the limits, FAILS if it is outside of one, else UNKNOWN.

    A rule does not fail at a `size` below its `fails_from`, or by a time that was measured while
    other programs used too many cores (`others`).
    """
    if isinstance(measured, str):
        return Judged(rule, Reading(), Status.UNKNOWN, measured)
    reading = Reading.of(measured)
    status = Status.UNKNOWN
    interval = f"{rule.number(reading.low)} to {rule.number(reading.high)}"
    if not math.isfinite(reading.value):
        reason = "A repetition gave no number."
    elif reading.confidence < MIN_CONFIDENCE:
        reason = f"Too few repetitions: {reading.n}; it takes {MIN_ROUNDS}."
    elif rule.unit == "%" and reading.high > 1:
        reason = f"{interval} of a whole: a count or a ceiling is wrong."
    elif rule.at_least <= reading.low and reading.high <= rule.at_most:
        status = Status.HOLDS
        reason = ""
    elif rule.at_least <= reading.high and reading.low <= rule.at_most:
        reason = f"Too noisy to tell: a limit ({rule.text}) lies within {interval}."
    elif size < rule.fails_from:
        reason = (
            f"Too small to see: it was measured at {size:,}, and can fail from {rule.fails_from:,} "
            "on."
        )
    elif others >= BUSY_CORES and isinstance(measured, Sequence):
        reason = f"It was not kept, but other programs used {others:.1f} cores meanwhile."
    else:
        status = Status.FAILS
        reason = ""
    return Judged(rule, reading, status, reason)


def overall(judged: Sequence[Judged]) -> Status:
    """FAILS if any rule fails, HOLDS if all hold, else UNKNOWN; never HOLDS without a rule."""
    statuses = {one.status for one in judged}
    if Status.FAILS in statuses:
        return Status.FAILS
    return Status.HOLDS if statuses == {Status.HOLDS} else Status.UNKNOWN


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio within each repetition, which cancels out slow periods."""
    pairs = zip(numerators, denominators, strict=True)
    return [one / other if other > 0 else math.nan for one, other in pairs]


def median_of(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


def percent(share: float) -> str:
    """A share with three digits."""
    return f"{share * 100:.3g} %"
