"""Draws the roofline as a Vega-Lite chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinphase.phases.colours import PAGE_COLOURS
from twinphase.phases.roofline import Roofline, Slope
from twinphase_bench.report.plots import log_labels
from twinphase_bench.report.report import Plot
from twinphase_bench.report.theme import colour, colour_scale, colours_of
from twinphase_bench.roofline.report import rate_text

Layer = dict[str, Any]
# Slopes closer than this factor are drawn as one.
MIN_SLOPE_RATIO = 1.25
PARTS = {"linear": "linear layers", "attention": "attention"}


@dataclass(frozen=True)
class DrawnPart:
    """A measured part of a point, for the drawing.

    Attributes:
        phase: "prefill" or "decode".
        part: "linear" or "attention".
        series: name of the series; a line joins its points.
        label: varying value within the series: "n = 512", "batch 8", "context 1024".
        intensity: FLOP per byte.
        rate: FLOP per second.
        facts: additional rows of the tooltip.
    """

    phase: str
    part: str
    series: str
    label: str
    intensity: float
    rate: float
    facts: Mapping[str, str]


def _ranges(
    line: Roofline, marks: Sequence[DrawnPart]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Domains of intensity and rate that include every ridge and every mark."""
    ridges = [balance for _, _, balance in line.balances]
    xs = [*ridges, *(mark.intensity for mark in marks)]
    # Room for the names.
    left = min(xs, default=1.0) / 14
    right = max(xs, default=100.0) * 20
    top = max(roof.rate for roof in line.roofs)
    slowest = line.slopes[-1].rate
    low = min([slowest * left * 2, *(mark.rate / 2 for mark in marks)])
    return (left, right), (low, top * 1.5)


def _distinct(slopes: Sequence[Slope]) -> list[Slope]:
    """Slopes that differ visibly; a slope too close to another one adds its name to that one."""
    found: list[Slope] = []
    for slope in slopes:
        if found and found[-1].rate < MIN_SLOPE_RATIO * slope.rate:
            found[-1] = Slope(f"{found[-1].name}; {slope.name}", found[-1].rate)
        else:
            found.append(slope)
    return found


def roofline_plot(line: Roofline, marks: Sequence[DrawnPart], caption: str) -> Plot:
    """Roofs, slopes, balance points with the slowest memory (crosses), and measured parts."""
    xs, ys = _ranges(line, marks)
    x = _scaled("x", "arithmetic intensity, FLOP / byte", xs)
    axes = {"x": x, "y": _scaled("y", "GFLOP/s", (ys[0] / 1e9, ys[1] / 1e9))}
    layers = [*_roof_layers(line, xs, ys), *(_mark_layers(marks) if marks else ())]
    for layer in layers:
        layer["encoding"] = axes | layer["encoding"]
    return Plot("roofline", f"Roofline: {line.title}", {"layer": layers}, caption)


def _scaled(field: str, title: str, domain: tuple[float, float]) -> Layer:
    scale = {"type": "log", "domain": list(domain), "nice": False}
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": scale,
        "axis": log_labels(field, "~g"),
    }


def _layer(
    rows: Sequence[Mapping[str, Any]], kind: str, style: Mapping[str, Any], **encoding: Any
) -> Layer:
    """A layer of marks at the x and y of `rows`."""
    return {"data": {"values": list(rows)}, "mark": {"type": kind, **style}, "encoding": encoding}


def _roof_layers(line: Roofline, xs: tuple[float, float], ys: tuple[float, float]) -> list[Layer]:
    """Lines and their names; rates are in GFLOP/s."""
    slopes = _distinct(line.slopes)
    top = line.roofs[0].rate
    rows: list[Layer] = []
    names: dict[str, list[Layer]] = {"above": [], "below": [], "roof": []}
    for number, slope in enumerate(slopes):
        start = max(xs[0], ys[0] / slope.rate)
        end = top / slope.rate
        rows += [
            {"line": slope.name, "kind": "memory", "x": at, "y": at * slope.rate / 1e9}
            for at in (start, end)
        ]
        # The fastest memory is named above its line, the others below theirs, each slower one
        # lower, so that names do not overlap.
        above = number == 0 and len(slopes) > 1
        at = start * (end / start) ** (0.85 if above else 0.08 + 0.12 * (len(slopes) - 1 - number))
        text = f"{slope.name}: {slope.rate / 1e9:,.0f} GB/s"
        names["above" if above else "below"].append(
            {"text": text, "x": at, "y": at * slope.rate / 1e9}
        )
    for roof in line.roofs:
        ends = (roof.rate / slopes[0].rate, xs[1])
        rows += [{"line": roof.unit, "kind": "unit", "x": at, "y": roof.rate / 1e9} for at in ends]
        text = f"{roof.unit}: {rate_text(roof.rate, 'FLOP/s')}"
        names["roof"].append({"text": text, "x": xs[1], "y": roof.rate / 1e9})
    names_shown = ("unit", "memory", "balance point, FLOP/byte")
    balances = [
        {
            "x": balance,
            "y": roof.rate / 1e9,
            **dict(zip(names_shown, (roof.unit, slope.name, f"{balance:,.1f}"), strict=True)),
        }
        for roof, slope, balance in line.balances
        if slope == line.slopes[-1]
    ]
    dash = _nominal(
        "kind", scale={"domain": ["memory", "unit"], "range": [[1, 0], [6, 3]]}, legend=None
    )
    lines_style = {"color": colour("muted"), "strokeWidth": 1.5, "clip": True}
    cross = {"shape": "cross", "color": colour("text"), "size": 60}
    layers = [
        _layer(rows, "line", lines_style, detail={"field": "line"}, strokeDash=dash),
        _layer(balances, "point", cross, tooltip=[{"field": key} for key in names_shown]),
    ]
    edge = {
        "stroke": colour("surface"),
        "strokeWidth": 4,
        "strokeJoin": "round",
    }  # No line crosses it there.
    for side, align, dx, dy in (
        ("above", "right", -8, -4),
        ("below", "left", 10, 8),
        ("roof", "right", -4, -7),
    ):
        style = {"align": align, "dx": dx, "dy": dy, "color": colour("muted"), "fontSize": 11}
        layers += [
            _layer(names[side], "text", style | more, text={"field": "text"}) for more in (edge, {})
        ]
    return layers


def _nominal(field: str, **more: Any) -> Layer:
    return {"field": field, "type": "nominal", "title": None, **more}


def _mark_layers(marks: Sequence[DrawnPart]) -> list[Layer]:
    series = {mark.series: [one for one in marks if one.series == mark.series] for mark in marks}
    at_ends = {id(many[index]) for many in series.values() for index in (0, -1)}
    shown = [
        {
            "phase": mark.phase,
            "part": PARTS[mark.part],
            "point": mark.label,
            "FLOP / byte": f"{mark.intensity:,.1f}",
            "GFLOP/s": f"{mark.rate / 1e9:,.0f}",
            **mark.facts,
        }
        for mark in marks
    ]
    rows = [
        {**facts, "x": mark.intensity, "y": mark.rate / 1e9, "series": mark.series, "order": order}
        for order, (mark, facts) in enumerate(zip(marks, shown, strict=True))
    ]
    shade = _nominal("phase", scale=colour_scale(colours_of(PAGE_COLOURS)))
    shape = _nominal("part", scale={"domain": list(PARTS.values()), "range": ["circle", "diamond"]})
    trail = {"strokeWidth": 1, "opacity": 0.6}
    dot = {"filled": True, "size": 70, "opacity": 0.9}
    tooltip = [{"field": key} for key in shown[0]]
    layers = [
        _layer(
            rows, "line", trail, color=shade, detail={"field": "series"}, order={"field": "order"}
        ),
        _layer(rows, "point", dot, color=shade, shape=shape, tooltip=tooltip),
    ]
    # Attention in decode has the same intensity for all batches and contexts, so only contexts are
    # named.
    for named, align, dx, dy in (
        (("prefill linear",), "left", 3, -10),
        (("prefill attention", "context attention"), "left", 8, 1),
        (("batch linear",), "right", -5, -8),
    ):
        chosen = [
            row
            for row, mark in zip(rows, marks, strict=True)
            if id(mark) in at_ends and mark.series in named
        ]
        style = {"fontSize": 10, "align": align, "dx": dx, "dy": dy}
        layers.append(_layer(chosen, "text", style, color=shade, text={"field": "point"}))
    return layers
