"""Compares two results metric by metric: the ratio, and whether it is significant.

It computes the ratio of medians B/A with a bootstrap interval (Efron and Tibshirani, An
Introduction to the Bootstrap, chapter 13). An interval that contains 1 shows no difference, which
does not prove that there is none.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinphase import ResultError
from twinphase.phases.statistics import Interval
from twinphase_bench.extras import require
from twinphase_bench.report.report import (
    Column,
    Metric,
    Report,
    Section,
    Status,
    Table,
    Verdict,
    table_of,
)
from twinphase_bench.report.result import read_result

CONFIDENCE = 0.95
# With fewer values on either side, the interval would be too narrow.
MIN_VALUES = 5
RESAMPLES = 9999
# The seed is fixed, so that the same files give the same report.
SEED = 20240501
# Conditions that differ between any two runs of a command without an effect: prompts are drawn for
# each run, and the time limits a sweep ("longest prompt"); only places in both results are
# compared.
INCIDENTAL = (
    "date",
    "command",
    "load average",
    "seed",
    "seed of prompts and order",
    "sweep took",
    "longest prompt",
)
# Measured conditions are the same if their numbers differ by less than this share.
MAX_RELATIVE_DIFFERENCES = {"prompts": 0.02}
NUMBER = re.compile(r"\d+(?:\.\d+)?")
SPEEDS = ("s", "ms", "us", "µs", "tok/s", "req/s")
SAME = "no difference shown"
CANNOT = "unknown"
DIFFERENT = ("faster", "slower", "better", "worse")


@dataclass(frozen=True)
class Comparison:
    """The comparison of one metric.

    `ratio` is median of B / median of A, even if its error is unknown; NaN if it has no meaning.
    Without an `interval`, `reason` has the cause. `verdict` is on B: "faster", "slower" ("better"
    or "worse" for neither a time nor a rate), `SAME` or `CANNOT`.
    """

    a: Metric
    b: Metric
    ratio: float
    interval: Interval | None
    verdict: str
    reason: str = ""

    @property
    def family(self) -> str:
        """The metric's name without its point; metrics of a family share a table."""
        return self.a.name.partition("[")[0]


def compare(a: Path, b: Path) -> Report:
    """Compare two files.

    Args:
        a: `result.json` of the first result, or its folder.
        b: the same of the second result, the ratio's numerator.

    Raises:
        ResultError: a file is not a result, or the results have different kinds or no common
            metric.
        MissingExtraError: the bench extra is not installed.
    """
    return compare_reports(read_result(a), read_result(b), (str(a), str(b)))


def compare_reports(a: Report, b: Report, names: tuple[str, str] = ("A", "B")) -> Report:
    """Compare two reports; `names` are the names of their sources."""
    if a.kind != b.kind:
        raise ResultError(
            f"{names[0]} is a result of {a.kind}, {names[1]} of {b.kind}.",
            "Compare two of one kind.",
        )
    ours, theirs = ({metric.name: metric for metric in report.metrics} for report in (a, b))
    shared = [name for name in ours if name in theirs and _alike(ours[name], theirs[name])]
    if not shared:
        raise ResultError(
            f"{names[0]} and {names[1]} have no metric in common.",
            "Compare two runs of one command.",
        )
    found = [_compared(a.kind, ours[name], theirs[name]) for name in shared]
    differing = _differing(a, b, found)
    conditions = {}
    noise = []
    for letter, name, report in zip("AB", names, (a, b), strict=True):
        conditions[letter] = (
            f"{name} ({report.title}, {report.conditions.get('date', 'date unknown')})"
        )
        noise += [f"{letter}: {line}" for line in report.noise]
    conditions |= {f"{key} (differs)": f"A: {of_a}; B: {of_b}" for key, of_a, of_b in differing}
    same = a.conditions.keys() - {key for key, _, _ in differing}
    return Report(
        kind="compare",
        title=f"B against A: {b.title}" + (f" against {a.title}" if a.title != b.title else ""),
        verdicts=(*_warnings(a, b, differing), *_findings(found)),
        conditions=conditions | {key: value for key, value in a.conditions.items() if key in same},
        noise=noise,
        sections=(*_sections(found), *_left_out(ours, theirs, shared)),
        data={"comparisons": found, "seed": SEED, "resamples": RESAMPLES, "confidence": CONFIDENCE},
    )


def _alike(a: Metric, b: Metric) -> bool:
    return (a.unit, a.better) == (b.unit, b.better)


def _finite(metric: Metric) -> list[float]:
    return [value for value in metric.values if math.isfinite(value)]


def _compared(kind: str, a: Metric, b: Metric) -> Comparison:
    x = _finite(a)
    y = _finite(b)
    positive = min([*x, *y], default=0.0) > 0
    ratio = statistics.median(y) / statistics.median(x) if x and y and positive else math.nan
    if min(len(x), len(y)) < MIN_VALUES:
        return Comparison(a, b, ratio, None, CANNOT, _too_few(kind, len(x), len(y)))
    if not positive:
        return Comparison(a, b, ratio, None, CANNOT, "a ratio needs values above 0")
    interval = _interval(x, y)
    verdict = SAME
    if not interval.low <= 1 <= interval.high:
        words = ("faster", "slower") if a.unit in SPEEDS else ("better", "worse")
        verdict = words[0] if (ratio < 1) == (a.better == "lower") else words[1]
    return Comparison(a, b, ratio, interval, verdict)


def _too_few(kind: str, number_a: int, number_b: int) -> str:
    """The numbers of values, the required number, and how to get more."""
    what = "repetitions" if kind == "bench" else "values"
    found = (
        f"{number_a} {what} each" if number_a == number_b else f"{number_a} and {number_b} {what}"
    )
    return f"{found}, {MIN_VALUES} needed" + (
        f": --repetitions {MIN_VALUES}" if what == "repetitions" else ""
    )


def _interval(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Percentile interval of median(b) / median(a), with both resampled with replacement."""
    numpy = require("numpy")
    stats = require("scipy.stats")

    def ratio(x: Any, y: Any, axis: int = -1) -> Any:
        return numpy.median(y, axis=axis) / numpy.median(x, axis=axis)

    if len({*a}) == 1 and len({*b}) == 1:  # Without variation there is nothing to resample.
        return Interval(b[0] / a[0], b[0] / a[0], CONFIDENCE)
    samples = (numpy.asarray(a), numpy.asarray(b))
    options = {"method": "percentile", "vectorized": True, "n_resamples": RESAMPLES, "batch": 500}
    found = stats.bootstrap(
        samples, ratio, random_state=SEED, confidence_level=CONFIDENCE, **options
    )
    low, high = found.confidence_interval
    return Interval(float(low), float(high), CONFIDENCE)


def _differing(a: Report, b: Report, found: Sequence[Comparison]) -> list[tuple[str, str, str]]:
    """(condition, A's, B's): definitions of metrics first, incidental conditions last."""
    defined = {item.family: (item.a.definition, item.b.definition) for item in found}
    differing = [
        (f"definition of {family}", *pair) for family, pair in defined.items() if pair[0] != pair[1]
    ]
    ours = a.conditions
    theirs = b.conditions
    keys = [
        key
        for key in dict.fromkeys([*ours, *theirs])
        if not _same(key, ours.get(key), theirs.get(key))
    ]
    keys.sort(key=lambda key: key in INCIDENTAL)
    return differing + [
        (key, ours.get(key, "not stated"), theirs.get(key, "not stated")) for key in keys
    ]


def _same(key: str, a: str | None, b: str | None) -> bool:
    if (
        a == b
        or a is None
        or b is None
        or key not in MAX_RELATIVE_DIFFERENCES
        or NUMBER.sub("", a) != NUMBER.sub("", b)
    ):
        return a == b
    pairs = zip(map(float, NUMBER.findall(a)), map(float, NUMBER.findall(b)), strict=True)
    return all(abs(x - y) <= MAX_RELATIVE_DIFFERENCES[key] * max(x, y) for x, y in pairs)


def _warnings(a: Report, b: Report, differing: list[tuple[str, str, str]]) -> Iterable[Verdict]:
    for letter, report in zip("AB", (a, b), strict=True):
        for verdict in (
            *report.verdicts,
            *(item for section in report.sections for item in section.verdicts),
        ):
            if verdict.status is Status.VOID:
                yield Verdict(Status.VOID, f"{letter}: {verdict.text}", verdict.reason)
    material = [key for key, _, _ in differing if key not in INCIDENTAL]
    claim = "Both were measured under the same conditions."
    if material:
        reason = (
            f"These differ: {', '.join(material)}. A difference below may come from any of them."
        )
        yield Verdict(Status.FAILS, claim, reason)
    else:
        yield Verdict(Status.HOLDS, claim)


def _findings(found: Sequence[Comparison]) -> Iterable[Verdict]:
    number = len(found)
    for word in DIFFERENT:
        these = [item for item in found if item.verdict == word]
        if these:
            extreme = max(these, key=lambda item: abs(math.log(item.ratio)))
            yield Verdict(
                Status.INFO,
                f"B is {word} in {len(these)} of {number} metrics, most in {extreme.a.name}: "
                f"{_factor(extreme.ratio)} ({_span(extreme)}).",
            )
    verdicts = Counter(item.verdict for item in found)
    if verdicts[SAME]:
        yield Verdict(
            Status.INFO, f"No difference is shown in {verdicts[SAME]} of {number} metrics."
        )
    if verdicts[CANNOT]:
        reasons = Counter(item.reason for item in found if item.reason)
        several = len(reasons) > 1
        why = "; ".join(
            f"{count} have {reason}" if several else reason for reason, count in reasons.items()
        )
        yield Verdict(
            Status.UNKNOWN,
            f"{verdicts[CANNOT]} of {number} metrics cannot be compared: {why}. Their B / A is "
            "shown without an interval: it may be chance.",
        )
    compared = number - verdicts[CANNOT]
    if compared:
        by_chance = (1 - CONFIDENCE) * compared
        text = (
            f"Of {compared} comparisons about {by_chance:.1f} would show a difference by chance "
            "alone."
        )
        yield Verdict(Status.INFO, text)


def _sections(found: Sequence[Comparison]) -> Iterable[Section]:
    for family in dict.fromkeys(item.family for item in found):
        items = [item for item in found if item.family == family]
        yield Section(
            family, (), (*_definitions(items), *_common_reason(items)), (_table(family, items),)
        )


def _definitions(items: Sequence[Comparison]) -> tuple[str, ...]:
    better = "; ".join(dict.fromkeys(f"{item.a.better} is better" for item in items))
    ours, theirs = (
        "; ".join(dict.fromkeys(metric.definition for metric in metrics if metric.definition))
        for metrics in ([item.a for item in items], [item.b for item in items])
    )
    if ours != theirs:
        return f"A: {ours or 'not defined'}.", f"B: {theirs or 'not defined'}.", f"{better}."
    return (f"{ours}; {better}." if ours else f"{better}.",)


def _common_reason(items: Sequence[Comparison]) -> list[str]:
    """The reason why no metric can be compared, if it is the same for all."""
    reasons = {item.reason for item in items}
    return [f"Cannot be compared: {reason}." for reason in reasons if reason and len(reasons) == 1]


def _table(title: str, items: Sequence[Comparison]) -> Table:
    columns = (
        "metric",
        Column("A", "median"),
        Column("B", "median"),
        Column("n", "finite values of A, of B"),
        Column("B / A", "median of B / median of A"),
        Column(
            "95 % interval",
            "of B / A, by 9,999 resamplings of both sides' values, which are taken as independent",
        ),
        Column("B is", "by whether the interval has 1 in it"),
    )
    # A single reason for all is above the table.
    several = len({item.reason for item in items}) > 1
    rows = (
        (
            item.a.name,
            _median(item.a),
            _median(item.b),
            f"{len(_finite(item.a))}, {len(_finite(item.b))}",
            _factor(item.ratio),
            _span(item),
            item.verdict + (f": {item.reason}" if item.reason and several else ""),
        )
        for item in items
    )
    return table_of(title, columns, rows)


def _median(metric: Metric) -> str:
    values = _finite(metric)
    if not values:
        return "unknown"
    value = statistics.median(values)
    if metric.unit == "s" and value < 1:
        return f"{value * 1e3:.4g} ms"
    return f"{value:,.4g} {metric.unit}" if value < 1e4 else f"{value:,.0f} {metric.unit}"


def _factor(ratio: float) -> str:
    return f"{ratio:.3f}" if math.isfinite(ratio) else "-"


def _span(item: Comparison) -> str:
    return f"{item.interval.low:.3f} .. {item.interval.high:.3f}" if item.interval else "-"


def _left_out(
    a: Mapping[str, Metric], b: Mapping[str, Metric], shared: Sequence[str]
) -> Iterable[Section]:
    def cell(metric: Metric | None) -> str:
        return f"{_median(metric)}, {metric.better} is better" if metric else "not measured"

    rows = [
        (name, cell(a.get(name)), cell(b.get(name)))
        for name in dict.fromkeys([*a, *b])
        if name not in shared
    ]
    if rows:
        table = table_of("Not compared", ("metric", "A", "B"), rows)
        yield Section("In one result only, or in different units", tables=(table,))
