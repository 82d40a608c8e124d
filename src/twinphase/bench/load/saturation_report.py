"""A search for saturation as parts of a report."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from twinphase.bench.load.plots import saturation_plots
from twinphase.bench.load.report import load_data, load_metrics, loads_table
from twinphase.bench.load.run import LoadResult
from twinphase.bench.load.saturation import LoadPoint, SaturationSearch
from twinphase.bench.report.report import Metric, Section, Status, Verdict

__all__ = ["saturation_data", "saturation_metrics", "saturation_section", "saturation_verdicts"]


def saturation_verdicts(search: SaturationSearch) -> tuple[Verdict, ...]:
    """Where the target saturates, and what it serves within its service levels."""
    unit = "at once" if search.plan.closed else "req/s"
    found = []
    if search.capacity is not None and search.saturated_at is not None:
        text = f"Serves {search.capacity:.3g} {unit}, saturated at {search.saturated_at:.3g}."
        found.append(Verdict(Status.INFO, text, search.stopped))
    else:
        found.append(Verdict(Status.UNKNOWN, "Where the target saturates is not known.", search.stopped))
    best = search.best_goodput
    if best is not None and best.result.goodput is not None:
        text = f"Highest goodput {best.result.goodput.rate:.3g} req/s, at {best.value:.3g} {unit} ({best.result.slos})."
        found.append(Verdict(Status.INFO, text))
    found += [Verdict(Status.VOID, "The load of one request at a time is void.", why) for why in search.alone.void]
    for point in search.ordered:
        found += [
            Verdict(Status.VOID, f"The load of {point.value:.3g} {unit} is void.", why) for why in point.result.void
        ]
    return tuple(found)


def saturation_section(search: SaturationSearch) -> Section:
    """A row per load, and the loads' latencies against it."""
    rows = [("alone", search.alone, "served")]
    rows += [(f"{point.value:.3g}", point.result, _verdict(point)) for point in search.ordered]
    table = loads_table("Loads", "concurrency" if search.plan.closed else "rate, req/s", rows)
    paragraph = f"{search.alone.workload.partition(', ')[2]}. The search ended: {search.stopped}."
    verdicts = saturation_verdicts(search)
    return Section("Search for saturation", verdicts, (paragraph,), (table,), saturation_plots(search))


def _verdict(point: LoadPoint) -> str:
    if point.undecided:
        return f"undecided: {point.undecided}"
    return f"saturated: {point.saturated}" if point.saturated else "served"


def saturation_metrics(search: SaturationSearch) -> tuple[Metric, ...]:
    """Of each load, and the capacity found."""
    mode = search.plan.mode
    runs: dict[float, list[LoadResult]] = {}
    for point in search.ordered:
        runs.setdefault(point.value, []).append(point.result)
    found = [metric for value, results in runs.items() for metric in load_metrics(results, f"{mode}={value:.4g}")]
    if search.capacity is not None and search.saturated_at is not None:
        unit, definition = ("requests" if search.plan.closed else "req/s"), f"highest {mode} below every saturated one"
        found.append(Metric(f"capacity_{mode}", unit, "higher", (search.capacity,), definition))
    return tuple(found)


def saturation_data(search: SaturationSearch) -> dict[str, Any]:
    """Everything raw, plain values for JSON."""
    return {
        "plan": asdict(search.plan),
        "stopped": search.stopped,
        "alone": load_data(search.alone),
        "points": [
            {"value": point.value, "saturated": point.saturated, "undecided": point.undecided} | load_data(point.result)
            for point in search.ordered
        ],
    }
