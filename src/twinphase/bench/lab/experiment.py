"""The shape of an experiment: a claim as people say it, rules stated before anything is measured, and their verdicts.

A rule names one quantity and the limit that it must keep; `decide` compares the measured interval with the limit, and
nothing else makes a verdict. Not for measuring (the other files here), nor for budgets of time (`workbench.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from twinphase.bench.lab.workbench import QUIET_CORES, Workbench
from twinphase.bench.report.report import Metric, Plot, Status, Table
from twinphase.bench.statistics import median_interval, percentile
from twinphase.phases.hardware import Ceilings

__all__ = [
    "OTHER_BANDWIDTH",
    "OTHER_RUN",
    "Estimate",
    "Experiment",
    "Judged",
    "Rule",
    "decide",
    "exactly",
    "judge",
    "median_of",
    "overall",
    "percent",
    "ratio_of",
    "tempered",
    "undisturbed",
    "unknown",
]

CONFIDENCE = 0.9  # an interval that has less decides nothing
OTHER_RUN = 0.15  # by which a share of the arithmetic peak differs between runs on a shared host
OTHER_BANDWIDTH = 0.3  # likewise what is compared with the bandwidth: reading the same weights, 38 GB/s and then 55


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
        margin: how much another run may differ, a fraction of the limit: nothing so close to it holds or fails.
        disturbed: what other programs that compute do to the quantity: "lowers" it, of a rule whose only limit is a
            lower one; "moves" it either way; "" nothing, both of its sides being slowed alike.
    """

    name: str
    formula: str
    at_least: float | None = None
    at_most: float | None = None
    unit: str = "x"
    fails_from: int | None = None
    sized_in: str = "tokens"
    decided_from: int | None = None
    margin: float = 0.0
    disturbed: Literal["", "lowers", "moves"] = ""

    @property
    def sizes(self) -> str:
        """From which size on it may hold, and may fail; "" if at any."""
        fails = "" if self.fails_from is None else f"may fail from {self.fails_from:,} {self.sized_in} on"
        return fails if self.decided_from is None else f"may hold from {self.decided_from:,}, {fails}"

    @property
    def scope(self) -> str:
        """Where nothing is decided; "" if it always is."""
        close = f"undecided within {percent(self.margin)} of the limit" if self.margin else ""
        return "; ".join(filter(None, (self.sizes, close)))

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
            return percent(value)
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
        had, needed = percent(estimate.confidence), percent(CONFIDENCE)
        count = f"{estimate.n} repetition{'' if estimate.n == 1 else 's'}"
        note = f"Too little was measured: {count}, {had} confidence; {needed} are needed."
        return Judged(rule, estimate, Status.UNKNOWN, note)
    keeps, beyond = _against(rule, estimate)
    if _below(rule.decided_from, estimate.size) or (beyond and _below(rule.fails_from, estimate.size)):
        size = "an unknown number of" if estimate.size is None else f"{estimate.size:,}"
        few = "short" if "tokens" in rule.sized_in else "small"
        note = f"Too {few} to see: {size} {rule.sized_in}; it {rule.sizes}."
        return Judged(rule, estimate, Status.UNKNOWN, note)
    if beyond:
        return Judged(rule, estimate, Status.FAILS)
    if keeps:
        return Judged(rule, estimate, Status.HOLDS)
    note = f"Too noisy to tell: {_interval(rule, estimate)} lies on both sides of a limit ({rule.text})."
    if any(_against(replace(rule, margin=0.0), estimate)):
        note = f"Too close to tell: {_close_ends(rule, estimate)} within {percent(rule.margin)} of a limit "
        note += f"({rule.text}), and another run may differ by as much."
    return Judged(rule, estimate, Status.UNKNOWN, note)


def _interval(rule: Rule, estimate: Estimate) -> str:
    low, high = rule.number(estimate.low), rule.number(estimate.high)
    return low if low == high else f"{low} to {high}"


def _close_ends(rule: Rule, estimate: Estimate) -> str:
    """Which ends of the interval are within the margin of a limit, with the verb."""
    limits = [limit for limit in (rule.at_least, rule.at_most) if limit is not None]
    ranges = [(limit - rule.margin * abs(limit), limit + rule.margin * abs(limit)) for limit in limits]
    low, high = (any(a <= end <= b for a, b in ranges) for end in (estimate.low, estimate.high))
    interval = _interval(rule, estimate)
    if low and high:
        return f"{interval} is"
    return f"the {'lower' if low else 'upper'} end of {interval} is"


def _against(rule: Rule, estimate: Estimate) -> tuple[bool, bool]:
    """Whether all of the interval keeps every limit, and whether all of it is beyond one, by more than the margin."""
    keeps, beyond = [], []
    if rule.at_least is not None:
        close = rule.margin * abs(rule.at_least)
        keeps.append(estimate.low >= rule.at_least + close)
        beyond.append(estimate.high < rule.at_least - close)
    if rule.at_most is not None:
        close = rule.margin * abs(rule.at_most)
        keeps.append(estimate.high <= rule.at_most - close)
        beyond.append(estimate.low > rule.at_most + close)
    return all(keeps), any(beyond)


def _below(least: int | None, size: int | None) -> bool:
    """Whether a size that matters is too small; one that nobody noted is."""
    return least is not None and (size is None or size < least)


def judge(rules: Sequence[Rule], estimates: Mapping[Rule, Estimate]) -> list[Judged]:
    """Every rule with its estimate; one that is missing is unknown."""
    return [decide(rule, estimates.get(rule, unknown("It was not measured."))) for rule in rules]


def undisturbed(judged: Sequence[Judged], others: float | None) -> list[Judged]:
    """What other programs that computed meanwhile may have made hold or fail is UNKNOWN; its number stays.

    Args:
        judged: as measured.
        others: cores that other programs used meanwhile; None is unknown.
    """
    if others is None or others < QUIET_CORES:
        return list(judged)
    found = []
    for one in judged:
        doubtful = {"": (), "lowers": (Status.FAILS,), "moves": (Status.HOLDS, Status.FAILS)}[one.rule.disturbed]
        if one.status in doubtful:
            how = "lowers it" if one.rule.disturbed == "lowers" else "may move it either way"
            reason = f"It {one.status.value}, but other programs used {others:.1f} cores meanwhile, which {how}."
            one = replace(one, status=Status.UNKNOWN, reason=reason)
        found.append(one)
    return found


def tempered(judged: Sequence[Judged], around: Sequence[Judged]) -> list[Judged]:
    """What holds or fails against the best ceilings of a run only, and not against those right around it, is UNKNOWN.

    What memory gives is shared with others on the host: a ceiling of another minute may not have been there to use.
    What a better ceiling can only lower, and holds against the best one, holds.
    """
    found = []
    for one, near in zip(judged, around, strict=True):
        sound = one.status is near.status or (one.status is Status.HOLDS and one.rule.disturbed == "lowers")
        if one.status is not Status.UNKNOWN and not sound:
            note = f"It {one.status.value} only against a ceiling of another time. With those measured right before "
            known = math.isfinite(near.estimate.value)
            note += f"and after it is {near.rule.measured(near.estimate)}." if known else f"and after it: {near.reason}"
            one = replace(one, status=Status.UNKNOWN, reason=note)
        found.append(one)
    return found


def overall(judged: Sequence[Judged]) -> Status:
    """FAILS if any rule fails, HOLDS if all hold, otherwise UNKNOWN; never HOLDS without a rule."""
    statuses = {one.status for one in judged}
    if Status.FAILS in statuses:
        return Status.FAILS
    return Status.HOLDS if statuses == {Status.HOLDS} else Status.UNKNOWN


@dataclass(frozen=True)
class Experiment(ABC):
    """One claim and how it is tried: the class is the claim, an instance is what one trial of it measured.

    A subclass states claim and rules, then the plain numbers that it measures (its fields), then what they mean.

    Attributes:
        name: short, for `--only` and files.
        claim: as people say it.
        method: what is measured, and how.
        rules: the claim holds if every one of them does.
        meaning: what it means for a user, one sentence.
        share: of the time, relative to the others'.
        uses_ceilings: whether a rule compares with the machine's ceilings; they are then measured again around it.
        others: cores that other programs used in the repetitions that count; None is unknown.
    """

    name: ClassVar[str]
    claim: ClassVar[str]
    method: ClassVar[str]
    rules: ClassVar[tuple[Rule, ...]]
    meaning: ClassVar[str]
    share: ClassVar[float]
    uses_ceilings: ClassVar[bool] = False

    others: float | None = field(default=None, kw_only=True)

    @classmethod
    @abstractmethod
    def measure(cls, bench: Workbench) -> Experiment:
        """Try it."""

    @abstractmethod
    def estimates(self) -> Mapping[Rule, Estimate]:
        """What was measured of each rule's quantity."""

    @abstractmethod
    def why(self, judged: Sequence[Judged]) -> Sequence[str]:
        """What lies behind the numbers, measured: sentences. The last is the one to know where the claim fails."""

    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """More numbers."""

    @abstractmethod
    def plots(self) -> Sequence[Plot]:
        """At least one."""

    def metrics(self) -> Sequence[Metric]:
        """For comparing two runs."""
        return ()

    def under(self, ceilings: Ceilings | None) -> Experiment:
        """The same measurement against other ceilings."""
        return self

    def evaluate(self) -> tuple[Status, list[Judged]]:
        """The verdict on it."""
        judged = undisturbed(judge(self.rules, self.estimates()), self.others)
        return overall(judged), judged


def percent(share: float) -> str:
    """A share to three digits."""
    return f"{share * 100:.3g} %"
