"""What a phase sweep found, as parts of a report: tables, plots, metrics, noise and raw data.

Not for verdicts (`sweep_verdicts.py`), measuring (`phase_sweep.py`), fits (`fit.py`), nor for the report as a whole
(`bench_report.py`).
"""

from __future__ import annotations

import statistics
from typing import Any

from twinphase.bench.report.report import Column, Metric, Section, Table
from twinphase.bench.statistics import median_interval
from twinphase.bench.sweep.fit import Fit, Point
from twinphase.bench.sweep.plan import Place
from twinphase.bench.sweep.plots import decode_plots, prefill_plots
from twinphase.bench.sweep.run import HeldOut, SweepResult
from twinphase.bench.sweep.verdicts import percent, rate_text, time_text

__all__ = ["sweep_data", "sweep_metrics", "sweep_noise", "sweep_sections"]

POINT_COLUMNS = (
    Column("time (ms)", "median of the repetitions"),
    Column(
        "interval (ms)",
        "of the median, by ranks of the repetitions, with the confidence that so many can give: the lowest to the "
        "highest of five 94 %, of three 75 %",
    ),
    Column("fit (ms)", "by the law"),
    Column("residual", "(measured - fit) / fit"),
    Column("used as", "fit: the law was fitted to it. held out: the law had to predict it"),
)


def sweep_sections(result: SweepResult) -> list[Section]:
    """Both phases side by side, then each with its points, law, held-out predictions and plots."""
    return [_both(result), _phase(result, "prefill"), _phase(result, "decode")]


def _both(result: SweepResult) -> Section:
    facts = result.facts
    columns = (
        Column("phase"),
        Column("tokens before", "prefill: length of the prompt. decode: tokens before the decoded one, on average"),
        Column("batch", "sequences at once"),
        Column("time (ms)", "prefill: of the prompt. decode: of a step, a token for each sequence. Median"),
        Column(POINT_COLUMNS[1].name, POINT_COLUMNS[1].definition),
        Column("tok/s", "prefill: prompt tokens / time. decode: batch / time, all sequences together"),
        Column("tok/s each", "decode: of one sequence, 1 / time"),
    )
    rows = [_both_row(place, point) for place, point in _notable(result)]
    return Section(
        "Both phases",
        paragraphs=(f"Prefill: {facts.prefill_definition}", f"Decode: {facts.decode_definition}"),
        tables=(Table("Both phases", columns, tuple(rows)),),
    )


def _notable(result: SweepResult) -> list[tuple[Place, Point]]:
    """A few places that say most: prompts from short to long, decode by position, decode by batch."""
    prefill = [one for one in result.points("prefill") if not one[0].held_out]
    decode = [one for one in result.points("decode") if not one[0].held_out]
    alone = [one for one in decode if one[0].batch == 1]
    short = min((place.length for place, _ in alone), default=0)
    batches = [one for one in decode if one[0].batch > 1 and one[0].length == short]
    every = max(1, len(prefill) // 4)
    return [*prefill[:-1:every], *prefill[-1:], *alone, *batches]


def _both_row(place: Place, point: Point) -> tuple[str, ...]:
    tokens = point.x[0] if place.phase == "prefill" else float(place.batch)
    return (
        place.phase,
        f"{point.x[0]:,.0f}",
        f"{place.batch}",
        time_text(point.median),
        _interval(point),
        rate_text(tokens / point.median),
        rate_text(1 / point.median) if place.phase == "decode" else "-",
    )


def _interval(point: Point) -> str:
    interval = median_interval(point.values)
    if len(point.values) < 2:
        return "-"
    return f"{time_text(interval.low)} .. {time_text(interval.high)} ({interval.confidence:.0%})".replace("%)", " %)")


def _phase(result: SweepResult, phase: str) -> Section:
    found = result.fit(phase)
    tables = [_points_table(result, phase, found)]
    plots: list[Any] = []
    paragraphs = []
    if found is None:
        paragraphs.append("Too few points for a fit.")
    else:
        tables = [_coefficients(phase, found), _held_out_table(phase, result.held_out(phase, found)), *tables]
        noise = "unknown" if found.repetition_noise is None else f"±{percent(found.repetition_noise)}"
        paragraphs.append(
            f"Law: {found.law.formula}, fitted {found.range_text}; outside it extrapolates. "
            f"{len(found.points)} points, {found.freedom} degrees of freedom. R² "
            f"{found.r_squared:.4f} (1 - squared relative residuals / those of the best constant). Residuals "
            f"±{percent(found.scale)} (standard deviation), noise of a point's median {noise}. Least squares of the "
            "relative error, coefficients not below zero."
        )
        if phase == "decode":
            paragraphs.append(
                "Of the laws linear in position, batch and their product, this one predicted left-out points best; "
                "a law with more terms is taken only where it predicts 5 % better. The intervals take the chosen law "
                "as given: the choice among five is not in them, so that they are a little too narrow; held-out points "
                "tell by how much."
            )
        plots = prefill_plots(result, found) if phase == "prefill" else decode_plots(result, found)
    paragraphs += [f"Not measured: {place}: {why}" for place, why in result.failures.items() if place.phase == phase]
    return Section(phase.capitalize(), (), tuple(paragraphs), tuple(tables), tuple(plots))


def _theory(meaning: str, cause: str) -> str:
    """A coefficient is what grows in a certain way; the cause is what theory has for it, and was not measured."""
    return f"{meaning}; in theory {cause}, and whatever else grows like this is in it"


def _coefficients(phase: str, found: Fit) -> Table:
    meanings = {
        "prefill": {
            "a": "what every prompt costs",
            "b": _theory("what every prompt token costs", "the linear layers"),
            "c": _theory("what every pair of tokens costs", "attention"),
        },
        "decode": {
            "a": _theory("what every step costs", "reading the weights"),
            "b": "what a token before costs in every step",
            "c": "what another sequence costs",
            "d": _theory("what a token before costs for each sequence", "reading its keys and values"),
        },
    }[phase]
    columns = (
        Column("coefficient"),
        Column("value"),
        Column("95 % interval", "Student's t with the residuals' degrees of freedom; ends at zero"),
        Column("unit"),
        Column("meaning"),
        Column("without the bound", "what the fit gives where coefficients may be negative, for those at zero"),
    )
    rows = (
        (
            one.name,
            f"{one.value:.4g}",
            f"{one.low:.4g} .. {one.high:.4g}",
            one.unit,
            meanings[one.name],
            "-" if one.free is None else f"{one.free:.3g}",
        )
        for one in found.coefficients
    )
    return Table(f"{phase.capitalize()}: {found.law.formula}", columns, tuple(rows))


def _held_out_table(phase: str, points: list[HeldOut]) -> Table:
    columns = (
        Column("held out" if phase == "prefill" else "held out (position × batch)"),
        Column("predicted (ms)", "by the law, which was not fitted to this point"),
        Column("claimed interval (ms)", "in which a new measurement lies with 95 %: noise and the law's own doubt"),
        Column("measured (ms)", "median of the repetitions"),
        Column("error", "(predicted - measured) / measured"),
        Column("inside"),
        Column("extrapolated", "whether it lies outside the range of the fitted points"),
    )
    rows = (
        (
            _where(one.place, one.x),
            time_text(one.predicted.value),
            f"{time_text(one.predicted.low)} .. {time_text(one.predicted.high)}",
            time_text(one.measured),
            percent(one.error, signed=True),
            "yes" if one.inside else "no",
            "yes" if one.predicted.extrapolated else "no",
        )
        for one in points
    )
    return Table(f"{phase.capitalize()}: held-out points", columns, tuple(rows))


def _where(place: Place, x: tuple[float, float]) -> str:
    return f"{x[0]:,.0f}" if place.phase == "prefill" else f"{x[0]:,.0f} × {place.batch}"


def _points_table(result: SweepResult, phase: str, found: Fit | None) -> Table:
    head = (
        (Column("prompt tokens", "by the target's count"),)
        if phase == "prefill"
        else (Column("position × batch", "mean number of tokens before the decoded ones × sequences at once"),)
    )
    rate = Column("tok/s", "prompt tokens / time" if phase == "prefill" else "batch / time")
    rows = []
    for place, point in result.points(phase):
        line = found.line(point.x) if found else None
        rows.append(
            (
                _where(place, point.x),
                time_text(point.median),
                _interval(point),
                "-" if line is None else time_text(line),
                "-" if line is None else percent(point.median / line - 1, signed=True),
                "held out" if place.held_out else "fit",
                rate_text((point.x[0] if phase == "prefill" else place.batch) / point.median),
            )
        )
    return Table(f"{phase.capitalize()}: all points", (*head, *POINT_COLUMNS, rate), tuple(rows))


def sweep_metrics(result: SweepResult) -> list[Metric]:
    """Every place under the name of what was asked for, so that two targets can be compared.

    One value a round, the median of its visits: those of one round are of one mood of the machine, and a comparison
    that took each for an independent measurement would be too sure.
    """
    found = []
    for phase, definition in (
        ("prefill", result.facts.prefill_definition),
        ("decode", result.facts.decode_definition),
    ):
        for place, _ in result.points(phase):
            name = f"prefill_seconds[n={place.length}]"
            if phase == "decode":
                name = f"decode_step_seconds[position={place.length},batch={place.batch}]"
            rounds: dict[int, list[float]] = {}
            for one in result.used(place):
                rounds.setdefault(one.round, []).append(one.seconds)
            values = tuple(statistics.median(visits) for _, visits in sorted(rounds.items()))
            found.append(Metric(name, "s", "lower", values, definition))
    return found


def sweep_noise(result: SweepResult) -> list[str]:
    """How steady the machine was, and what was repeated, left out or cut short."""
    kept = [one for one in result.measurements if one.kept]
    spreads = [
        statistics.stdev(point.values) / point.median
        for phase in ("prefill", "decode")
        for _, point in result.points(phase)
        if len(point.values) > 1
    ]
    lines = []
    if spreads:
        lines.append(
            f"Repetitions of a point differ by ±{percent(statistics.median(spreads))} (standard deviation, median "
            f"over {len(spreads)} points), ±{percent(max(spreads))} at the worst point."
        )
    left_out = len(kept) - sum(len(result.used(place)) for place in result.plan.places)
    known = [one.foreign_cores for one in kept if one.foreign_cores is not None]
    if known:
        lines.append(
            f"Others used {statistics.median(known):.2f} cores (median), {max(known):.2f} at most. "
            f"{len(result.measurements) - len(kept)} measurements were replaced by a repetition because others used "
            f"the processor; {sum(one.disturbed for one in kept)} of {len(kept)} stayed disturbed, {left_out} of which "
            "are left out where at least half of a point's repetitions were not."
        )
    else:
        lines.append("Whether others used the processor meanwhile is unknown: only repetitions tell of noise here.")
    plan = result.plan
    counts = [len(point.values) for phase in ("prefill", "decode") for _, point in result.points(phase)]
    lines.append(f"The sweep took {result.seconds:.0f} s.")
    lines.append(
        f"{plan.repetitions} rounds over all points, each in an order of its own, in which what takes little time is "
        f"measured several times: {min(counts, default=0)} to {max(counts, default=0)} repetitions of a point."
    )
    if result.stopped:
        lines.append(f"Cut short: {result.stopped}. What is here is complete in itself, with fewer repetitions.")
    if plan.longest and plan.longest < 0.8 * plan.wanted_length:
        lines.append(
            f"The longest prompt is {plan.longest:,} of {plan.wanted_length:,} tokens: more would not have fitted into "
            f"{plan.max_seconds:g} s (--max-seconds)."
        )
    return lines


def sweep_data(result: SweepResult) -> dict[str, Any]:
    """Everything raw, plain values."""
    fits = {phase: _fit_data(result, phase) for phase in ("prefill", "decode")}
    return {
        "plan": vars(result.plan) | {"places": [vars(place) for place in result.plan.places]},
        "seconds": result.seconds,
        "stopped": result.stopped,
        "failures": [{"place": vars(place), "why": why} for place, why in result.failures.items()],
        "measurements": [
            vars(one) | {"place": vars(one.place), "samples": [vars(sample) for sample in one.samples]}
            for one in result.measurements
        ],
        "fits": fits,
    }


def _fit_data(result: SweepResult, phase: str) -> dict[str, Any] | None:
    found = result.fit(phase)
    if found is None:
        return None
    return {
        "formula": found.law.formula,
        "coefficients": [vars(one) for one in found.coefficients],
        "covariance": found.covariance.tolist(),
        "scale": found.scale,
        "freedom": found.freedom,
        "r_squared": found.r_squared,
        "residuals": [
            {"x": point.x, "relative": value} for point, value in zip(found.points, found.residuals, strict=True)
        ],
        "repetition_noise": found.repetition_noise,
        "misfit": found.misfit,
        "held_out": [
            {"x": one.x, "predicted": vars(one.predicted), "measured": one.measured, "inside": one.inside}
            for one in result.held_out(phase, found)
        ],
    }
