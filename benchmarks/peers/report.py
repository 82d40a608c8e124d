"""Turns raw measurements into the Markdown table, the ratios and the conditions.

For: `versus_peers.py`. Not for: measuring; everything here is arithmetic on what was recorded.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Rates = dict[str, dict[str, list[float]]]  # engine -> point -> tokens a second, one a repetition


def half_range(values: Sequence[float]) -> float:
    """Half the distance between the extremes: an honest spread for a handful of values."""
    return (max(values) - min(values)) / 2


def rates(measurements: Sequence[dict[str, Any]], key: str = "tokens_per_second") -> Rates:
    """Tokens a second, by engine and point; disturbed ones only where there is no other."""
    table: Rates = {}
    # Whether a measurement was disturbed is known from other processes alone, so leaving it out favours no engine.
    quiet = {(one["engine"], one["point"]) for one in measurements if not one["disturbed"]}
    for one in measurements:
        if not one["disturbed"] or (one["engine"], one["point"]) not in quiet:
            table.setdefault(one["engine"], {}).setdefault(one["point"], []).append(one[key])
    return table


def only_disturbed(measurements: Sequence[dict[str, Any]]) -> list[str]:
    """Cells of the table that rest on disturbed measurements."""
    cells = {(one["engine"], one["point"]) for one in measurements}
    quiet = {(one["engine"], one["point"]) for one in measurements if not one["disturbed"]}
    return sorted(f"{engine} {point}" for engine, point in cells - quiet)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(values: Sequence[float] | None) -> str:
    if not values:
        return "-"
    median = statistics.median(values)
    digits = 0 if median >= 100 else 1
    return f"{median:,.{digits}f} ±{half_range(values):,.{digits}f}"


def medians_table(
    table: Rates, engines: Sequence[str], points: Sequence[str], absent: dict[str, str], title: str = "tokens/s"
) -> list[str]:
    """One line an engine; an engine without figures is named with the reason."""
    lines = [_row([title, *points]), _row(["---", *["---:"] * len(points)])]
    for engine in engines:
        reason = absent.get(engine)
        if reason and engine not in table:
            lines.append(_row([engine, f"absent: {reason}", *["-"] * (len(points) - 1)]))
        else:
            found = table.get(engine, {})
            lines.append(_row([f"{engine} (*)" if reason else engine, *(_cell(found.get(point)) for point in points)]))
    return lines


def fastest(table: Rates, point: str, peers: Iterable[str]) -> tuple[str, float] | None:
    """The peer with the highest median at a point."""
    medians = {name: statistics.median(table[name][point]) for name in peers if table.get(name, {}).get(point)}
    return max(medians.items(), key=lambda item: item[1]) if medians else None


def ratios_table(table: Rates, own: Sequence[str], peers: Sequence[str], points: Sequence[str]) -> list[str]:
    """One line a point: the fastest peer, and each twinphase over it; nothing where no peer was measured."""
    if not any(fastest(table, point, peers) for point in points):
        return []
    present = [name for name in own if name in table]
    lines = [_row(["point", "fastest peer", "tokens/s", *(f"{name} / fastest peer" for name in present)])]
    lines.append(_row(["---", "---", "---:", *["---:"] * len(present)]))
    for point in points:
        best = fastest(table, point, peers)
        if best is None:
            continue
        cells = []
        for name in present:
            values = table[name].get(point)
            cells.append(f"{statistics.median(values) / best[1]:.2f}" if values else "-")
        lines.append(_row([point, best[0], f"{best[1]:,.0f}", *cells]))
    return lines


def totals_table(measurements: Sequence[dict[str, Any]], engines: Sequence[str], absent: dict[str, str]) -> list[str]:
    """Tokens a second of the batches with their prompts; nothing where no batch was measured."""
    batches = [one for one in measurements if one.get("total_tokens_per_second")]
    points = list(dict.fromkeys(one["point"] for one in batches))
    if not points:
        return []
    table = rates(batches, "total_tokens_per_second")
    return [*medians_table(table, engines, points, absent, "prompt and new tokens/s"), ""]


def narrow_summary(measurements: Sequence[dict[str, Any]]) -> list[str]:
    """Batches that an engine never ran all at once."""
    cells = sorted({(one["engine"], one["point"], one["widest"]) for one in measurements if one.get("narrow")})
    return [f"- {engine} {point}: NOT ONE BATCH, at most {widest} requests a step" for engine, point, widest in cells]


def foreign_summary(measurements: Sequence[dict[str, Any]]) -> str:
    """How much others disturbed the measurements."""
    values = [one["foreign_cores"] for one in measurements if one["foreign_cores"] is not None]
    if not values:
        return "not known"
    disturbed = sum(one["disturbed"] for one in measurements)
    text = f"median {statistics.median(values):.2f}, highest {max(values):.2f} cores"
    text += f"; {disturbed} of {len(values)} measurements were disturbed and are left out where another exists"
    cells = only_disturbed(measurements)
    return f"{text}; UNDERSTATED, no undisturbed one: {', '.join(cells)}" if cells else text


def markdown(result: dict[str, Any], engines: Sequence[str], own: Sequence[str], points: Sequence[str]) -> str:
    """The whole report."""
    table, absent = rates(result["measurements"]), result["absent"]
    lines = medians_table(table, engines, points, absent)
    notes = [f"(*) {name}: {reason}" for name, reason in absent.items() if name in table]
    peers = [name for name in engines if name not in own]
    lines += [*([""] if notes else []), *notes, "", *ratios_table(table, own, peers, points), ""]
    lines += totals_table(result["measurements"], engines, absent)
    lines += narrow_summary(result["measurements"])
    lines += [f"- {key}: {value}" for key, value in result["conditions"].items()]
    bandwidth = result["dram_gigabytes_per_second"]
    if bandwidth:
        text = f"{statistics.median(bandwidth):.1f} ±{half_range(bandwidth):.1f} GB/s"
        lines.append(f"- DRAM read in this run: {text} ({result['dram_method']}, n={len(bandwidth)})")
    lines.append(f"- CPU used by others while measuring: {foreign_summary(result['measurements'])}")
    for name, conditions in result["engines"].items():
        lines.append(f"- {name}: {conditions['version']}; {conditions['precision']}")
    return "\n".join(lines) + "\n"
