"""Turns raw measurements into Markdown: the table, the ratios and the conditions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Rates = dict[str, dict[str, list[float]]]  # engine -> point -> tokens/s of each repetition


def rates(measurements: Sequence[dict[str, Any]], key: str = "tokens_per_second") -> Rates:
    """Tokens per second, by engine and point; disturbed ones only where there is no other.

    Whether a measurement was disturbed is known from other processes alone, so leaving it out
    favours no engine.
    """
    table: Rates = {}
    quiet = {(one["engine"], one["point"]) for one in measurements if not one["disturbed"]}
    for one in measurements:
        if key in one and (not one["disturbed"] or (one["engine"], one["point"]) not in quiet):
            table.setdefault(one["engine"], {}).setdefault(one["point"], []).append(one[key])
    return table


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def spread(values: Sequence[float]) -> str:
    """Median ± half the distance between the extremes: an honest spread for a handful of values."""
    if not values:
        return "-"
    median = statistics.median(values)
    half = (max(values) - min(values)) / 2
    digits = 0 if median >= 100 else 1
    return f"{median:,.{digits}f} ±{half:,.{digits}f}"


def medians_table(
    table: Rates, engines: Sequence[str], points: Sequence[str], absent: dict[str, str], title: str
) -> list[str]:
    """One line per engine; an engine without figures is named with the reason."""
    lines = [_row([title, *points]), _row(["---", *["---:"] * len(points)])]
    for engine in engines:
        reason = absent.get(engine)
        found = table.get(engine, {})
        if reason and not found:
            lines.append(_row([engine, f"absent: {reason}", *["-"] * (len(points) - 1)]))
        else:
            lines.append(_row([engine, *(spread(found.get(point, ())) for point in points)]))
    return [*lines, ""]


def ratios_table(
    table: Rates, own: Sequence[str], peers: Sequence[str], points: Sequence[str]
) -> list[str]:
    """One line per point: the fastest peer, and each twinphase over it; no peer, no table."""
    present = [name for name in own if name in table]
    lines = [
        _row(["point", "fastest peer", "tokens/s", *(f"{name} / fastest peer" for name in present)])
    ]
    lines.append(_row(["---", "---", "---:", *["---:"] * len(present)]))
    for point in points:
        medians = {
            name: statistics.median(found[point]) for name, found in table.items() if point in found
        }
        best = max(
            (name for name in peers if name in medians), key=medians.__getitem__, default=None
        )
        if best is not None:
            cells = [
                f"{medians[name] / medians[best]:.2f}" if name in medians else "-"
                for name in present
            ]
            lines.append(_row([point, best, f"{medians[best]:,.0f}", *cells]))
    return [*lines, ""] if len(lines) > 2 else []


def foreign_summary(measurements: Sequence[dict[str, Any]]) -> str:
    """How much others disturbed the measurements."""
    values = [one["foreign_cores"] for one in measurements if one["foreign_cores"] is not None]
    if not values:
        return "not known"
    disturbed = sum(one["disturbed"] for one in measurements)
    text = f"median {statistics.median(values):.2f}, highest {max(values):.2f} cores"
    text += (
        f"; {disturbed} of {len(values)} measurements were disturbed and are left out where "
        "another exists"
    )
    return text


def markdown(
    result: dict[str, Any], engines: Sequence[str], own: Sequence[str], points: Sequence[str]
) -> str:
    """The whole report."""
    measurements = result["measurements"]
    absent = result["absent"]
    table = rates(measurements)
    totals = rates(measurements, "total_tokens_per_second")
    lines = medians_table(table, engines, points, absent, "tokens/s")
    lines += [f"{name}: {reason}\n" for name, reason in absent.items() if name in table]
    quiet = {(one["engine"], one["point"]) for one in measurements if not one["disturbed"]}
    lines += [
        f"- {name} {point}: UNDERSTATED, every measurement was disturbed"
        for name in table
        for point in table[name]
        if (name, point) not in quiet
    ]
    lines += ratios_table(table, own, [name for name in engines if name not in own], points)
    if totals:
        batches = [point for point in points if any(point in found for found in totals.values())]
        lines += medians_table(totals, engines, batches, absent, "prompt and new tokens/s")
    prefills = rates(measurements, "prefill_tokens_per_second")
    if prefills:
        depths = [point for point in points if any(point in found for found in prefills.values())]
        lines += medians_table(
            prefills, engines, depths, absent, "prompt tokens/s of the same requests"
        )
    narrow = {(one["engine"], one["point"], one["widest"]) for one in measurements if one["narrow"]}
    lines += [
        f"- {name} {point}: NOT ONE BATCH, at most {widest} per step"
        for name, point, widest in sorted(narrow)
    ]
    lines += [f"- {key}: {value}" for key, value in result["conditions"].items()]
    lines.append(f"- CPU used by others while measuring: {foreign_summary(measurements)}")
    for name, conditions in result["engines"].items():
        peaks = [one["peak_mib"] for one in measurements if one["engine"] == name]
        memory = f"; at most {max(peaks):,.0f} MiB resident" if peaks and all(peaks) else ""
        lines.append(f"- {name}: {conditions['version']}; {conditions['precision']}{memory}")
    return "\n".join(lines) + "\n"
