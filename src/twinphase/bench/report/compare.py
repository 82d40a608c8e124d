"""Two results of one kind, metric by metric: by what factor they differ, and whether that is more than chance.

The ratio of medians B/A with a bootstrap interval (Efron and Tibshirani, An Introduction to the Bootstrap, chapter
13). An interval that has 1 in it shows no difference, which is not the same as showing that there is none. Not for
measuring, nor for judging why.
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

from twinphase.bench.extras import require
from twinphase.bench.report.plots import log_labels
from twinphase.bench.report.report import Column, Metric, Plot, Report, Section, Status, Table, Verdict
from twinphase.bench.report.result import ResultError, read_result
from twinphase.bench.report.theme import colour_scale
from twinphase.bench.statistics import Interval

__all__ = ["Comparison", "compare", "compare_reports"]

CONFIDENCE = 0.95
FEWEST = 5  # values on each side: fewer give an interval that is too narrow
RESAMPLES = 9999
SEED = 20240501  # so that the same files give the same report
# Conditions that differ between any two runs of one command and change nothing: prompts are drawn anew each time, and
# a sweep ends where its time does ("longest prompt"); only places that both have are compared.
INCIDENTAL = (
    "date",
    "command",
    "load average",
    "seed",
    "seed of prompts and order",
    "sweep took",
    "longest prompt",
)
NEARLY = {"prompts": 0.02}  # conditions that are measured: numbers so close, as a share, are the same
NUMBER = re.compile(r"\d+(?:\.\d+)?")
SPEEDS = ("s", "ms", "us", "µs", "tok/s", "req/s")
SAME, CANNOT = "no difference shown", "unknown"
SEARCHED = re.compile(r"\[(?:rate|concurrency)=|^capacity_")  # found by --saturate, which takes no --repetitions
TONES = {"faster": "good", "better": "good", "slower": "bad", "worse": "bad"}


@dataclass(frozen=True)
class Comparison:
    """One metric of both results.

    Attributes:
        metric: as A has it.
        definition_b: how B has it.
        medians: of A and of B.
        counts: finite values of A and of B.
        ratio: median of B / median of A, also where nothing is known of its error; NaN where it has no meaning.
        interval: of the ratio; None where it cannot be told.
        verdict: "faster", "slower" (or "better", "worse", where it is no time or rate), `SAME` or `CANNOT`: of B.
        reason: why it cannot be told.
    """

    metric: Metric
    definition_b: str
    medians: tuple[float, float]
    counts: tuple[int, int]
    ratio: float
    interval: Interval | None
    verdict: str
    reason: str = ""


def compare(a: Path, b: Path) -> Report:
    """Compare two files.

    Args:
        a: `result.json` of the one, or its folder.
        b: of the other: the ratio's numerator.

    Raises:
        ResultError: either is not a result, they are of different kinds, or they have no metric in common.
        MissingExtraError: without the bench extra.
    """
    return compare_reports(read_result(a), read_result(b), (str(a), str(b)))


def compare_reports(a: Report, b: Report, names: tuple[str, str] = ("A", "B")) -> Report:
    """Compare two reports; `names` say where they come from."""
    if a.kind != b.kind:
        raise ResultError(f"{names[0]} is a result of {a.kind}, {names[1]} of {b.kind}.", "Compare two of one kind.")
    ours, theirs = ({metric.name: metric for metric in report.metrics} for report in (a, b))
    shared = [name for name in ours if name in theirs and _alike(ours[name], theirs[name])]
    if not shared:
        raise ResultError(f"{names[0]} and {names[1]} have no metric in common.", "Compare two runs of one command.")
    found = [_compared(a.kind, ours[name], theirs[name]) for name in shared]
    differing = [*_redefined(found), *_differing(a.conditions, b.conditions)]
    apart_keys = {key for key, _, _ in differing}
    same = {key: value for key, value in a.conditions.items() if key not in apart_keys}
    origin = {
        f"{letter}": f"{name} ({report.title}, {report.conditions.get('date', 'date unknown')})"
        for letter, name, report in zip("AB", names, (a, b), strict=True)
    }
    sections = [*_sections(found), *_left_out(ours, theirs, shared)]
    apart = {f"{key} (differs)": f"A: {of_a}; B: {of_b}" for key, of_a, of_b in differing}
    noise = (f"{letter}: {line}" for letter, report in zip("AB", (a, b), strict=True) for line in report.noise)
    return Report(
        kind="compare",
        title=f"B against A: {b.title}" + (f" against {a.title}" if a.title != b.title else ""),
        verdicts=(*_warnings(a, b, differing), *_findings(found)),
        conditions={**origin, **apart, **same},
        noise=tuple(noise),
        sections=tuple(sections),
        data={"comparisons": found, "seed": SEED, "resamples": RESAMPLES, "confidence": CONFIDENCE},
    )


def _alike(a: Metric, b: Metric) -> bool:
    return (a.unit, a.better) == (b.unit, b.better)


def _compared(kind: str, a: Metric, b: Metric) -> Comparison:
    values = [[value for value in metric.values if math.isfinite(value)] for metric in (a, b)]
    counts = (len(values[0]), len(values[1]))
    medians = tuple(statistics.median(side) if side else math.nan for side in values)
    ratio = medians[1] / medians[0] if min(map(min, filter(None, values)), default=0.0) > 0 else math.nan
    reason = ""
    if min(counts) < FEWEST:
        reason = _too_few(kind, a.name, counts)
    elif min(map(min, values)) <= 0:
        reason = "a ratio needs values above 0"
    if reason:
        return Comparison(a, b.definition, (medians[0], medians[1]), counts, ratio, None, CANNOT, reason)
    interval, verdict = _interval(values[0], values[1]), SAME
    if not interval.low <= 1 <= interval.high:
        good = (ratio < 1) == (a.better == "lower")
        words = ("faster", "slower") if a.unit in SPEEDS else ("better", "worse")
        verdict = words[0] if good else words[1]
    return Comparison(a, b.definition, (medians[0], medians[1]), counts, ratio, interval, verdict)


def _too_few(kind: str, name: str, counts: tuple[int, int]) -> str:
    """How many values there are, how many are needed, and where they would come from."""
    what = "repetitions" if kind == "bench" and not SEARCHED.search(name) else "values"
    there = f"{counts[0]} {what} each" if counts[0] == counts[1] else f"{counts[0]} and {counts[1]} {what}"
    return f"{there}, {FEWEST} needed" + (f": --repetitions {FEWEST}" if what == "repetitions" else "")


def _interval(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Percentile interval of median(b) / median(a), values of each drawn anew with replacement."""
    numpy, stats = require("numpy"), require("scipy.stats")

    def ratio(x: Any, y: Any, axis: int = -1) -> Any:
        return numpy.median(y, axis=axis) / numpy.median(x, axis=axis)

    if len({*a}) == 1 and len({*b}) == 1:  # nothing varies, so nothing can be drawn anew
        return Interval(b[0] / a[0], b[0] / a[0], CONFIDENCE)
    samples = (numpy.asarray(a), numpy.asarray(b))
    options = {"method": "percentile", "vectorized": True, "n_resamples": RESAMPLES, "batch": 500}
    found = stats.bootstrap(samples, ratio, random_state=SEED, confidence_level=CONFIDENCE, **options)
    low, high = found.confidence_interval
    return Interval(float(low), float(high), CONFIDENCE)


def _redefined(found: Sequence[Comparison]) -> list[tuple[str, str, str]]:
    """As `_differing`: what has one name in both results and is not the same thing, which comes before all else."""
    pairs = {item.metric.name.partition("[")[0]: (item.metric.definition, item.definition_b) for item in found}
    return [(f"definition of {family}", *pair) for family, pair in pairs.items() if pair[0] != pair[1]]


def _differing(a: Mapping[str, str], b: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(condition, A's, B's), those that matter first."""
    keys = [key for key in dict.fromkeys([*a, *b]) if not _same(key, a.get(key), b.get(key))]
    keys.sort(key=lambda key: key in INCIDENTAL)
    return [(key, a.get(key, "not stated"), b.get(key, "not stated")) for key in keys]


def _same(key: str, a: str | None, b: str | None) -> bool:
    if a == b or a is None or b is None or key not in NEARLY or NUMBER.sub("", a) != NUMBER.sub("", b):
        return a == b
    pairs = zip(map(float, NUMBER.findall(a)), map(float, NUMBER.findall(b)), strict=True)
    return all(abs(x - y) <= NEARLY[key] * max(x, y) for x, y in pairs)


def _warnings(a: Report, b: Report, differing: list[tuple[str, str, str]]) -> Iterable[Verdict]:
    for letter, report in zip("AB", (a, b), strict=True):
        for verdict in (*report.verdicts, *(item for section in report.sections for item in section.verdicts)):
            if verdict.status is Status.VOID:
                yield Verdict(Status.VOID, f"{letter}: {verdict.text}", verdict.reason)
    material = [key for key, _, _ in differing if key not in INCIDENTAL]
    claim = "Both were measured under the same conditions."
    if material:
        reason = f"These differ: {', '.join(material)}. A difference below may come from any of them."
        yield Verdict(Status.FAILS, claim, reason)
    else:
        yield Verdict(Status.HOLDS, claim)


def _findings(found: Sequence[Comparison]) -> Iterable[Verdict]:
    told = [item for item in found if item.interval is not None]
    differ = [item for item in told if item.verdict != SAME]
    for word in ("faster", "slower", "better", "worse"):
        these = [item for item in differ if item.verdict == word]
        if these:
            extreme = max(these, key=lambda item: abs(math.log(item.ratio)))
            yield Verdict(
                Status.INFO,
                f"B is {word} in {len(these)} of {len(found)} metrics, most in {extreme.metric.name}: "
                f"{_factor(extreme.ratio)} ({_span(extreme)}).",
            )
    if len(told) > len(differ):
        yield Verdict(Status.INFO, f"No difference is shown in {len(told) - len(differ)} of {len(found)} metrics.")
    if len(found) > len(told):
        reasons = Counter(item.reason for item in found if item.interval is None)
        several = len(reasons) > 1
        why = "; ".join(f"{number} have {reason}" if several else reason for reason, number in reasons.items())
        yield Verdict(
            Status.UNKNOWN,
            f"{len(found) - len(told)} of {len(found)} metrics cannot be compared: {why}. Their B / A is shown without "
            "an interval: it may be chance.",
        )
    if told:
        by_chance = (1 - CONFIDENCE) * len(told)
        yield Verdict(
            Status.INFO,
            f"Of {len(told)} comparisons about {by_chance:.1f} would show a difference by chance alone.",
        )


def _sections(found: Sequence[Comparison]) -> Iterable[Section]:
    families: dict[str, list[Comparison]] = {}
    for item in found:
        families.setdefault(item.metric.name.partition("[")[0], []).append(item)
    for number, (family, items) in enumerate(families.items()):
        plots = (_plot(f"ratio-{number}", family, items),) if any(item.interval for item in items) else ()
        yield Section(
            family, paragraphs=(*_about(items), *_reason(items)), tables=(_table(family, items),), plots=plots
        )


def _about(items: Sequence[Comparison]) -> tuple[str, ...]:
    better = dict.fromkeys(f"{item.metric.better} is better" for item in items)
    ours = "; ".join(dict.fromkeys(item.metric.definition for item in items if item.metric.definition))
    theirs = "; ".join(dict.fromkeys(item.definition_b for item in items if item.definition_b))
    if ours != theirs:
        return (f"A: {ours or 'not defined'}.", f"B: {theirs or 'not defined'}.", f"{'; '.join(better)}.")
    return (f"{'; '.join([*filter(None, [ours]), *better])}.",)


def _reason(items: Sequence[Comparison]) -> tuple[str, ...]:
    """Why none of them can be compared, where that is the same for all."""
    reasons = {item.reason for item in items}
    return tuple(f"Cannot be compared: {reason}." for reason in reasons if reason and len(reasons) == 1)


def _table(title: str, items: Sequence[Comparison]) -> Table:
    columns = (
        Column("metric"),
        Column("A", "median"),
        Column("B", "median"),
        Column("n", "finite values of A, of B"),
        Column("B / A", "median of B / median of A"),
        Column(
            "95 % interval", "of B / A: both sides' values drawn anew, 9,999 times; supposes that they are independent"
        ),
        Column("B is", "by whether the interval has 1 in it"),
    )
    several = len({item.reason for item in items}) > 1  # one reason for all is above the table
    rows = (
        (item.metric.name, *(_value(median, item.metric.unit) for median in item.medians))
        + (f"{item.counts[0]}, {item.counts[1]}", _factor(item.ratio), _span(item))
        + (item.verdict + (f": {item.reason}" if item.reason and several else ""),)
        for item in items
    )
    return Table(title, columns, tuple(rows))


def _value(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "unknown"
    if unit == "s" and value < 1:
        return f"{value * 1e3:.4g} ms"
    return f"{value:,.4g} {unit}" if value < 1e4 else f"{value:,.0f} {unit}"


def _factor(ratio: float) -> str:
    return f"{ratio:.3f}" if math.isfinite(ratio) else "-"


def _span(item: Comparison) -> str:
    return f"{item.interval.low:.3f} .. {item.interval.high:.3f}" if item.interval else "-"


def _left_out(a: Mapping[str, Metric], b: Mapping[str, Metric], shared: Sequence[str]) -> Iterable[Section]:
    names = [name for name in dict.fromkeys([*a, *b]) if name not in shared]
    if not names:
        return
    rows = tuple((name, _stated(a.get(name)), _stated(b.get(name))) for name in names)
    table = Table("Not compared", (Column("metric"), Column("A"), Column("B")), rows)
    yield Section("In one result only, or in different units", tables=(table,))


def _stated(metric: Metric | None) -> str:
    if metric is None:
        return "not measured"
    values = [value for value in metric.values if math.isfinite(value)]
    return f"{_value(statistics.median(values) if values else math.nan, metric.unit)}, {metric.better} is better"


def _plot(name: str, family: str, items: Sequence[Comparison]) -> Plot:
    """Each ratio with its interval, beside 1."""
    rows = [
        {"metric": re.sub(r"^[^\[]*\[(.*)\]$", r"\1", item.metric.name), "B / A": item.ratio}
        | {"low": item.interval.low, "high": item.interval.high, "B is": item.verdict}
        for item in items
        if item.interval
    ]
    order = list(dict.fromkeys(row["metric"] for row in rows))
    verdicts = sorted({str(row["B is"]) for row in rows})
    tones = colour_scale({verdict: TONES.get(verdict, "neutral") for verdict in verdicts})
    y_axis = {"field": "metric", "type": "nominal", "title": None, "sort": order}
    x_axis = {"type": "quantitative", "title": "B / A (95 % interval)", "axis": {"grid": True, **log_labels("x")}}
    x_axis["scale"] = {"type": "log", "nice": False, "padding": 14}
    colour = {"field": "B is", "type": "nominal", "title": None, "scale": tones}
    tooltip = [{"field": key} for key in ("metric", "B is")]
    tooltip += [{"field": key, "type": "quantitative", "format": ".3f"} for key in ("B / A", "low", "high")]
    places = {"y": y_axis, "color": colour, "tooltip": tooltip}
    layers: list[dict[str, Any]] = [
        {"data": {"values": [{"one": 1}]}, "mark": "rule", "encoding": {"x": {**x_axis, "field": "one"}}},
        {"mark": "rule", "encoding": {**places, "x": {**x_axis, "field": "low"}, "x2": {"field": "high"}}},
        {"mark": {"type": "point", "size": 60}, "encoding": {**places, "x": {**x_axis, "field": "B / A"}}},
    ]
    spec = {"data": {"values": rows}, "height": 26 * len(order), "layer": layers}
    return Plot(
        name,
        f"{family}: B / A",
        spec,
        "Left of the line B's figure is smaller. An interval that crosses it shows no difference.",
    )
