"""The findings of a phase sweep as report parts: tables, plots, metrics, noise and raw data.

`verdicts.py` has the verdicts, and `run.py` measures.
"""

from __future__ import annotations

import statistics
from typing import Any

from twinphase.phases.statistics import median_interval
from twinphase_bench.report.report import Column, Metric, Section, table_of
from twinphase_bench.sweep.plots import decode_plots, prefill_plots
from twinphase_bench.sweep.run import PhaseSweep, SweepPoint
from twinphase_bench.sweep.verdicts import percent, rate_text, time_text

TIME = Column(
    "time (ms)", "prefill: of the prompt. decode: of a step, one token for each sequence. Median"
)
INTERVAL = Column(
    "interval (ms)",
    "of the median, by the ranks of the repetitions, with the confidence that their number gives: "
    "the lowest to the highest of five give 94 %, of three 75 %",
)
RATE = Column(
    "tok/s", "prefill: prompt tokens / time. decode: batch / time, all sequences together"
)


def sweep_sections(result: PhaseSweep) -> list[Section]:
    """A table of all points of both phases, then plots of each phase."""
    return [_both(result), _phase(result, "prefill"), _phase(result, "decode")]


def _both(result: PhaseSweep) -> Section:
    columns = (
        "phase",
        Column(
            "tokens before",
            "prefill: length of the prompt. decode: tokens before the decoded one, on average",
        ),
        Column("batch", "sequences at once"),
        TIME,
        INTERVAL,
        RATE,
        Column("tok/s each", "decode: of one sequence, 1 / time"),
    )
    rows = [
        (
            phase,
            f"{point.tokens:,.0f}",
            f"{point.place.batch}",
            *_measured(point),
            rate_text(1 / point.median) if phase == "decode" else "-",
        )
        for phase in ("prefill", "decode")
        for point in result.points(phase)
    ]
    return Section(
        "Both phases",
        paragraphs=(
            f"Prefill: {result.facts.prefill_definition}",
            f"Decode: {result.facts.decode_definition}",
        ),
        tables=[table_of("Both phases", columns, rows)],
    )


def _measured(point: SweepPoint) -> tuple[str, str, str]:
    """The cells of the columns TIME, INTERVAL and RATE."""
    interval = median_interval(point.values)
    tokens = point.tokens if point.place.phase == "prefill" else point.place.batch
    span = (
        f"{time_text(interval.low)} .. {time_text(interval.high)} ({100 * interval.confidence:.0f} "
        "%)"
    )
    return (
        time_text(point.median),
        span if len(point.values) > 1 else "-",
        rate_text(tokens / point.median),
    )


def _phase(result: PhaseSweep, phase: str) -> Section:
    failed = [
        f"Not measured: {place}: {why}"
        for place, why in result.failures.items()
        if place.phase == phase
    ]
    plots = prefill_plots(result) if phase == "prefill" else decode_plots(result)
    return Section(phase.capitalize(), paragraphs=failed, plots=plots)


def sweep_metrics(result: PhaseSweep) -> list[Metric]:
    """A metric per planned place, so that targets can be compared; one value per round."""
    definitions = {
        "prefill": result.facts.prefill_definition,
        "decode": result.facts.decode_definition,
    }
    found = []
    for phase, definition in definitions.items():
        for point in result.points(phase):
            place = point.place
            name = f"prefill_seconds[n={place.length}]"
            if phase == "decode":
                name = f"decode_step_seconds[position={place.length},batch={place.batch}]"
            found.append(Metric(name, "s", "lower", point.values, definition))
    return found


def sweep_noise(result: PhaseSweep) -> list[str]:
    """How steady the machine was, and which measurements were repeated or omitted."""
    kept = result.kept()
    plan = result.plan
    spreads = [
        statistics.stdev(point.values) / point.median
        for point in result.points("prefill") + result.points("decode")
        if len(point.values) > 1
    ]
    lines = []
    if spreads:
        lines.append(
            f"Repetitions of a point differ by ±{percent(statistics.median(spreads))} (standard "
            f"deviation, median over {len(spreads)} points), ±{percent(max(spreads))} at the worst "
            "point."
        )
    known = [one.foreign_cores for one in kept if one.foreign_cores is not None]
    if known:
        lines.append(
            f"Others used {statistics.median(known):.2f} cores (median), {max(known):.2f} at most. "
            f"{len(result.visits) - len(kept)} measurements were replaced by a repetition because "
            f"others used the processor; {sum(one.disturbed for one in kept)} of {len(kept)} "
            "stayed disturbed."
        )
    else:
        lines.append(
            "Whether others used the processor meanwhile is unknown: only repetitions show the "
            "noise here."
        )
    lines.append(
        f"{plan.repetitions} rounds over all points, each in a random order, took "
        f"{result.seconds:.0f} s."
    )
    if result.stopped:
        lines.append(
            f"Cut short: {result.stopped}. The points below have fewer repetitions, and are "
            "otherwise whole."
        )
    if plan.longest and plan.longest < 0.8 * plan.wanted_length:
        lines.append(
            f"The longest prompt is {plan.longest:,} of {plan.wanted_length:,} tokens: more would "
            f"not have fitted into {plan.max_seconds:g} s (--max-seconds)."
        )
    return lines


def sweep_data(result: PhaseSweep) -> dict[str, Any]:
    """All raw data."""
    return {
        "plan": result.plan,
        "seconds": result.seconds,
        "stopped": result.stopped,
        "failures": [{"place": place, "why": why} for place, why in result.failures.items()],
        "measurements": result.visits,
    }
