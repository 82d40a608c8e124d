"""What a phase sweep found, as parts of a report: tables, plots, metrics, noise and raw data.

Not for verdicts (`verdicts.py`), measuring (`run.py`) or fits (`fit.py`).
"""

from __future__ import annotations

import statistics
from typing import Any

from twinphase.bench.report.report import Column, Metric, Section, Table
from twinphase.bench.statistics import median_interval
from twinphase.bench.sweep.fit import Fit, SweepPoint
from twinphase.bench.sweep.plan import Place
from twinphase.bench.sweep.plots import decode_plots, prefill_plots
from twinphase.bench.sweep.run import HeldOut, PhaseSweep
from twinphase.bench.sweep.verdicts import percent, rate_text, time_text

__all__ = ["sweep_data", "sweep_metrics", "sweep_noise", "sweep_sections"]

TIME = Column("time (ms)", "prefill: of the prompt. decode: of a step, one token for each sequence. Median")
INTERVAL = Column(
    "interval (ms)",
    "of the median, by the ranks of the repetitions, with the confidence that so many can give: the lowest to the "
    "highest of five give 94 %, of three 75 %",
)
RATE = Column("tok/s", "prefill: prompt tokens / time. decode: batch / time, all sequences together")
# What grows in a certain way, and what theory has for it; the cause itself is not measured.
MEANINGS = {
    "": "what every prompt or step costs; in theory reading the weights, among other things",
    " n": "what every prompt token costs; in theory the linear layers, among other things",
    " n^2": "what every pair of tokens costs; in theory attention, among other things",
    " batch": "what another sequence costs",
    " position": "what another token of context costs; in theory reading its keys and values, among other things",
    " batch position": "the same, for each sequence",
}


def sweep_sections(result: PhaseSweep) -> list[Section]:
    """Both phases side by side, then each with its law, held-out predictions, points and plots."""
    return [_both(result), _phase(result, "prefill"), _phase(result, "decode")]


def _both(result: PhaseSweep) -> Section:
    columns = (
        Column("phase"),
        Column("tokens before", "prefill: length of the prompt. decode: tokens before the decoded one, on average"),
        Column("batch", "sequences at once"),
        TIME,
        INTERVAL,
        RATE,
        Column("tok/s each", "decode: of one sequence, 1 / time"),
    )
    rows = [
        (place.phase, f"{point.x[0]:,.0f}", f"{place.batch}", *_measured(place, point))
        + (rate_text(1 / point.median) if place.phase == "decode" else "-",)
        for place, point in _notable(result)
    ]
    return Section(
        "Both phases",
        paragraphs=(f"Prefill: {result.facts.prefill_definition}", f"Decode: {result.facts.decode_definition}"),
        tables=(Table("Both phases", columns, tuple(rows)),),
    )


def _notable(result: PhaseSweep) -> list[tuple[Place, SweepPoint]]:
    """A few places that say most: prompts from short to long, decode by position, decode by batch."""
    prefill, decode = (result.points(phase, held_out=False) for phase in ("prefill", "decode"))
    alone = [one for one in decode if one[0].batch == 1]
    short = min((place.length for place, _ in alone), default=0)
    batches = [one for one in decode if one[0].batch > 1 and one[0].length == short]
    every = max(1, len(prefill) // 4)
    return [*prefill[:-1:every], *prefill[-1:], *alone, *batches]


def _measured(place: Place, point: SweepPoint) -> tuple[str, str, str]:
    """The cells of TIME, INTERVAL and RATE."""
    interval, tokens = median_interval(point.values), point.x[0] if place.phase == "prefill" else place.batch
    span = f"{time_text(interval.low)} .. {time_text(interval.high)} ({100 * interval.confidence:.0f} %)"
    return time_text(point.median), span if len(point.values) > 1 else "-", rate_text(tokens / point.median)


def _phase(result: PhaseSweep, phase: str) -> Section:
    found = result.fit(phase)
    failed = [f"Not measured: {place}: {why}" for place, why in result.failures.items() if place.phase == phase]
    points = _points_table(result, phase, found)
    if found is None:
        return Section(phase.capitalize(), (), ("Too few points for a fit.", *failed), (points,))
    law = (
        f"Law: {found.law.formula}, fitted {found.range_text} to {len(found.points)} points; outside it extrapolates. "
        f"Residuals ±{percent(found.spread)} (standard deviation). Least squares of the relative error; coefficients "
        "are not below zero."
    )
    tables = (_coefficients(phase, found), _held_out_table(phase, result.held_out(phase, found)), points)
    plots = prefill_plots(result, found) if phase == "prefill" else decode_plots(result, found)
    return Section(phase.capitalize(), (), (law, *failed), tables, tuple(plots))


def _coefficients(phase: str, found: Fit) -> Table:
    columns = (Column("coefficient"), Column("value"), Column("unit"), Column("meaning"))
    parts = zip("abc", found.coefficients, found.law.units, found.law.symbols, strict=False)
    rows = tuple((name, f"{value:.4g}", unit, MEANINGS[symbol]) for name, value, unit, symbol in parts)
    return Table(f"{phase.capitalize()}: {found.law.formula}", columns, rows)


def _where(phase: str) -> Column:
    if phase == "prefill":
        return Column("prompt tokens", "by the target's count")
    return Column("position × batch", "mean number of tokens before the decoded ones × sequences at once")


def _at(place: Place, x: tuple[float, float]) -> str:
    return f"{x[0]:,.0f}" if place.phase == "prefill" else f"{x[0]:,.0f} × {place.batch}"


def _held_out_table(phase: str, points: list[HeldOut]) -> Table:
    columns = (
        _where(phase),
        Column("predicted (ms)", "by the law, which was not fitted to this point"),
        Column("measured (ms)", "median of the repetitions"),
        Column("error", "(predicted - measured) / measured"),
    )
    rows = (
        (_at(one.place, one.x), time_text(one.predicted), time_text(one.measured), percent(one.error, signed=True))
        for one in points
    )
    return Table(f"{phase.capitalize()}: held-out points", columns, tuple(rows))


def _points_table(result: PhaseSweep, phase: str, found: Fit | None) -> Table:
    columns = (
        _where(phase),
        TIME,
        INTERVAL,
        RATE,
        Column("law (ms)"),
        Column("residual", "(measured - law) / law"),
        Column("used as", "fit: the law was fitted to it. held out: the law had to predict it"),
    )
    rows = []
    for place, point in result.points(phase):
        law = found.seconds(point.x) if found else None
        fitted = ("-", "-") if law is None else (time_text(law), percent(point.median / law - 1, signed=True))
        used = "held out" if place.held_out else "fit"
        rows.append((_at(place, point.x), *_measured(place, point), *fitted, used))
    return Table(f"{phase.capitalize()}: all points", columns, tuple(rows))


def sweep_metrics(result: PhaseSweep) -> list[Metric]:
    """Every place under the name of what was asked for, so that two targets can be compared; one value per round."""
    definitions = {"prefill": result.facts.prefill_definition, "decode": result.facts.decode_definition}
    found = []
    for phase, definition in definitions.items():
        for place, point in result.points(phase):
            name = f"prefill_seconds[n={place.length}]"
            if phase == "decode":
                name = f"decode_step_seconds[position={place.length},batch={place.batch}]"
            found.append(Metric(name, "s", "lower", point.values, definition))
    return found


def sweep_noise(result: PhaseSweep) -> list[str]:
    """How steady the machine was, and what was repeated or cut short."""
    kept, plan = result.kept(), result.plan
    points = [point for phase in ("prefill", "decode") for _, point in result.points(phase)]
    spreads = [statistics.stdev(point.values) / point.median for point in points if len(point.values) > 1]
    lines = []
    if spreads:
        lines.append(
            f"Repetitions of a point differ by ±{percent(statistics.median(spreads))} (standard deviation, median "
            f"over {len(spreads)} points), ±{percent(max(spreads))} at the worst point."
        )
    known = [one.foreign_cores for one in kept if one.foreign_cores is not None]
    if known:
        lines.append(
            f"Others used {statistics.median(known):.2f} cores (median), {max(known):.2f} at most. "
            f"{len(result.visits) - len(kept)} measurements were replaced by a repetition because others used the "
            f"processor; {sum(one.disturbed for one in kept)} of {len(kept)} stayed disturbed."
        )
    else:
        lines.append("Whether others used the processor meanwhile is unknown: only repetitions show the noise here.")
    lines.append(f"{plan.repetitions} rounds over all points, each in a random order, took {result.seconds:.0f} s.")
    if result.stopped:
        lines.append(f"Cut short: {result.stopped}. The points below have fewer repetitions, and are otherwise whole.")
    if plan.longest and plan.longest < 0.8 * plan.wanted_length:
        lines.append(
            f"The longest prompt is {plan.longest:,} of {plan.wanted_length:,} tokens: more would not have fitted into "
            f"{plan.max_seconds:g} s (--max-seconds)."
        )
    return lines


def sweep_data(result: PhaseSweep) -> dict[str, Any]:
    """Everything raw."""
    return {
        "plan": result.plan,
        "seconds": result.seconds,
        "stopped": result.stopped,
        "failures": [{"place": place, "why": why} for place, why in result.failures.items()],
        "measurements": result.visits,
        "fits": {phase: _fit_data(result, phase) for phase in ("prefill", "decode")},
    }


def _fit_data(result: PhaseSweep, phase: str) -> dict[str, Any] | None:
    found = result.fit(phase)
    if found is None:
        return None
    residuals = zip(found.points, found.residuals, strict=True)
    return {
        "formula": found.law.formula,
        "coefficients": found.coefficients,
        "residuals": [{"x": point.x, "relative": value} for point, value in residuals],
        "held_out": result.held_out(phase, found),
    }
