"""The shape of an experiment: a claim as people say it, rules stated before anything is measured, and their verdicts.

A rule names one quantity and the limit that it must keep; `decide` compares the measured interval with the limit, and
nothing else makes a verdict. Not for measuring (the other files here), nor for budgets of time (`workbench.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from twinphase.bench.experiments.workbench import Workbench
from twinphase.bench.report import Metric, Plot, Status, Table
from twinphase.bench.statistics import median_interval, percentile
from twinphase.phases.hardware import Ceilings

__all__ = [
    "Estimate",
    "Experiment",
    "Found",
    "Judged",
    "Rule",
    "decide",
    "exactly",
    "judge",
    "median_of",
    "overall",
    "point",
    "ratio_of",
    "shown",
    "tempered",
    "unknown",
]

CONFIDENCE = 0.9  # an interval that has less decides nothing
Found = TypeVar("Found")


@dataclass(frozen=True)
class Rule:
    """What must be true for the claim to hold.

    Attributes:
        name: of the quantity, a few words.
        formula: how it is computed.
        at_least: the interval's lower end must not be below it.
        at_most: the interval's upper end must not be above it.
        unit: behind the number: "x", "%" (the value is a fraction), "" or another.
        fails_from: the smallest size at which it may fail, where the quantity depends on the size that fitted the time
            and the context; a smaller one shows nothing against the claim.
        sized_in: of what that is the size: "prompt tokens".
        decided_from: the smallest size at which it may hold either: below, the quantity is lost in other things.
    """

    name: str
    formula: str
    at_least: float | None = None
    at_most: float | None = None
    unit: str = "x"
    fails_from: int | None = None
    sized_in: str = "tokens"
    decided_from: int | None = None

    @property
    def scope(self) -> str:
        """From which size on it may hold, and may fail; "" if at any."""
        fails = "" if self.fails_from is None else f"may fail from {self.fails_from:,} {self.sized_in} on"
        return fails if self.decided_from is None else f"may hold from {self.decided_from:,}, {fails}"

    @property
    def text(self) -> str:
        """The limit in words."""
        if self.at_least is not None and self.at_most is not None:
            if self.at_least == self.at_most:
                return f"exactly {self.number(self.at_least)}"
            return f"{self.number(self.at_least)} to {self.number(self.at_most)}"
        if self.at_least is not None:
            return f"at least {self.number(self.at_least)}"
        return f"at most {self.number(self.at_most if self.at_most is not None else math.inf)}"

    def number(self, value: float) -> str:
        """A value of this quantity."""
        if not math.isfinite(value):
            return "unknown"
        if self.unit == "%":
            return f"{value * 100:.3g} %"
        shown = f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"
        return f"{shown}{'' if self.unit in ('', 'x') else ' '}{self.unit}"

    def measured(self, estimate: Estimate) -> str:
        """The value with its interval."""
        if estimate.note or not math.isfinite(estimate.value):
            return "unknown"
        if estimate.low == estimate.high == estimate.value:
            return self.number(estimate.value)
        return f"{self.number(estimate.value)} ({self.number(estimate.low)} to {self.number(estimate.high)})"


@dataclass(frozen=True)
class Estimate:
    """A measured quantity and how sure it is.

    Attributes:
        value: the median.
        low, high: its confidence interval.
        confidence: that the interval really has.
        n: repetitions.
        note: why it is unknown, if it is.
        size: at which it was measured, for a rule with `fails_from`.
    """

    value: float
    low: float
    high: float
    confidence: float
    n: int
    note: str = ""
    size: int | None = None

    def at(self, size: int) -> Estimate:
        """The same, measured at a size."""
        return replace(self, size=size)


def median_of(values: Sequence[float]) -> Estimate:
    """The median of repetitions with its interval."""
    clean = [value for value in values if math.isfinite(value)]
    if len(clean) < len(values) or not clean:
        return unknown("A repetition gave no number." if values else "It was not measured.")
    interval = median_interval(clean, CONFIDENCE)
    return Estimate(percentile(clean, 50), interval.low, interval.high, interval.confidence, len(clean))


def ratio_of(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """The median of the ratios within each repetition: both were measured moments apart, so that a slow minute cancels.

    Raises:
        ValueError: one side has more repetitions: then it is not known which belong together.
    """
    pairs = zip(numerators, denominators, strict=True)
    return median_of([one / other if other > 0 else math.nan for one, other in pairs])


def exactly(value: float) -> Estimate:
    """A count, which no noise can change."""
    return Estimate(value, value, value, 1.0, 1)


def unknown(note: str) -> Estimate:
    """No number, and why."""
    return Estimate(math.nan, math.nan, math.nan, 0.0, 0, note)


@dataclass(frozen=True)
class Judged:
    """A rule, what was measured, and the verdict; `reason` says why it cannot be told, if so."""

    rule: Rule
    estimate: Estimate
    status: Status
    reason: str = ""

    @property
    def line(self) -> str:
        """The rule with its number, for one line."""
        return f"{self.rule.name} {self.rule.measured(self.estimate)}"


def decide(rule: Rule, estimate: Estimate) -> Judged:
    """HOLDS if the whole interval keeps the limits, FAILS if all of it is beyond one, otherwise UNKNOWN.

    Below the rule's `fails_from` it is UNKNOWN instead of FAILS, and below `decided_from` whatever was measured.
    """
    if estimate.note or not math.isfinite(estimate.value):
        return Judged(rule, estimate, Status.UNKNOWN, estimate.note or "It could not be measured.")
    if estimate.confidence < CONFIDENCE:
        note = f"{estimate.n} repetitions give {estimate.confidence:.0%} confidence; {CONFIDENCE:.0%} are needed."
        return Judged(rule, estimate, Status.UNKNOWN, note)
    low = -math.inf if rule.at_least is None else rule.at_least
    high = math.inf if rule.at_most is None else rule.at_most
    fails = estimate.high < low or estimate.low > high
    if _below(rule.decided_from, estimate.size) or (fails and _below(rule.fails_from, estimate.size)):
        size = "an unknown number of" if estimate.size is None else f"{estimate.size:,}"
        few = "short" if "tokens" in rule.sized_in else "small"
        note = f"Too {few} to see: {size} {rule.sized_in}; it {rule.scope}."
        return Judged(rule, estimate, Status.UNKNOWN, note)
    if fails:
        return Judged(rule, estimate, Status.FAILS)
    if estimate.low >= low and estimate.high <= high:
        return Judged(rule, estimate, Status.HOLDS)
    note = "Too noisy: the interval lies on both sides of the limit."
    return Judged(rule, estimate, Status.UNKNOWN, note)


def _below(least: int | None, size: int | None) -> bool:
    """Whether a size that matters is too small; one that nobody noted is."""
    return least is not None and (size is None or size < least)


def judge(rules: Sequence[Rule], estimates: Mapping[str, Estimate]) -> list[Judged]:
    """Every rule with its estimate, by name; one that is missing is unknown."""
    return [decide(rule, estimates.get(rule.name, unknown("It was not measured."))) for rule in rules]


def tempered(judged: Sequence[Judged], around: Sequence[Judged]) -> list[Judged]:
    """What fails against the best ceilings of a run, but not against those measured right around it, is UNKNOWN.

    What memory gives is shared with others on the host: a ceiling of another minute may not have been there to use.
    """
    found = []
    for one, near in zip(judged, around, strict=True):
        if one.status is Status.FAILS and near.status is not Status.FAILS:
            note = "It fails only against a ceiling of another time: with those measured right before and after it is "
            one = replace(one, status=Status.UNKNOWN, reason=f"{note}{near.rule.measured(near.estimate)}.")
        found.append(one)
    return found


def overall(judged: Sequence[Judged]) -> Status:
    """FAILS if any rule fails, HOLDS if all hold, otherwise UNKNOWN; never HOLDS without a rule."""
    statuses = {one.status for one in judged}
    if Status.FAILS in statuses:
        return Status.FAILS
    return Status.HOLDS if statuses == {Status.HOLDS} else Status.UNKNOWN


@dataclass(frozen=True)
class Experiment(Generic[Found]):
    """One claim and how it is tried.

    Attributes:
        name: short, for `--only` and files.
        claim: as people say it.
        method: what is measured, and how.
        rules: the claim holds if every one of them does.
        meaning: what it means for a user, one sentence.
        share: of the time, relative to the others'.
        measure: does it; `Found` is a dataclass of plain numbers.
        estimates: the rules' quantities, by name.
        why: what lies behind the numbers, measured: sentences, given the judged rules. The last one is the one to know
            where the claim does not hold.
        tables: more numbers.
        plots: at least one.
        metrics: for comparing two runs.
        under: the same measurement against other ceilings, where a rule compares with them; None if none does.
    """

    name: str
    claim: str
    method: str
    rules: tuple[Rule, ...]
    meaning: str
    share: float
    measure: Callable[[Workbench], Found]
    estimates: Callable[[Found], Mapping[str, Estimate]]
    why: Callable[[Found, Sequence[Judged]], Sequence[str]]
    tables: Callable[[Found], Sequence[Table]]
    plots: Callable[[Found], Sequence[Plot]]
    metrics: Callable[[Found], Sequence[Metric]] = lambda found: ()
    under: Callable[[Found, Ceilings | None], Found] | None = None

    def evaluate(self, found: Found) -> tuple[Status, list[Judged]]:
        """The verdict on what was found."""
        judged = judge(self.rules, self.estimates(found))
        return overall(judged), judged


AnyExperiment = Experiment[Any]


def shown(values: Sequence[float], scale: float = 1.0, digits: int = 3) -> str:
    """Median and interval for a cell of a table: "12.3 (11.9 to 13)"."""
    estimate = median_of(values)
    if estimate.note:
        return "unknown"
    low, middle, high = (f"{value * scale:,.{digits}g}" for value in (estimate.low, estimate.value, estimate.high))
    if abs(estimate.high * scale) >= 1000:
        low, middle, high = (f"{value * scale:,.0f}" for value in (estimate.low, estimate.value, estimate.high))
    return f"{middle} ({low} to {high})"


def point(values: Sequence[float], name: str, scale: float = 1.0) -> dict[str, float]:
    """A measured point for a plot: its median under `name`, and its interval as "low" and "high"."""
    estimate = median_of(values)
    return {name: estimate.value * scale, "low": estimate.low * scale, "high": estimate.high * scale}
