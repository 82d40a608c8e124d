"""The roofline drawn: as Vega-Lite for the report, and in characters for a terminal. Not for measuring or judging."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinphase.bench.report.plots import log_labels
from twinphase.bench.report.report import Plot
from twinphase.bench.report.theme import PHASES, colour, colour_scale, colours_of
from twinphase.bench.roofline.arithmetic import Roofline, Slope
from twinphase.bench.roofline.report import PREFIXES, rate_text

__all__ = ["DrawnPart", "canvas", "roofline_plot", "text_drawing"]

Layer = dict[str, Any]
SAME = 1.25  # slopes nearer than this factor are drawn as one
PARTS = {"linear": "linear layers", "attention": "attention"}
LETTERS = {("prefill", "linear"): "P", ("prefill", "attention"): "p", ("decode", "linear"): "D",
           ("decode", "attention"): "d"}  # fmt: skip


@dataclass(frozen=True)
class DrawnPart:
    """A measured part of a point, to be drawn.

    Attributes:
        phase: "prefill" or "decode".
        part: "linear" or "attention".
        series: points of one series are joined by a line.
        label: what varies in the series: "n = 512", "batch 8", "context 1024".
        intensity: FLOP per byte.
        rate: FLOP per second.
        facts: more for whoever points at it.
    """

    phase: str
    part: str
    series: str
    label: str
    intensity: float
    rate: float
    facts: Mapping[str, str]


def _ranges(line: Roofline, marks: Sequence[DrawnPart]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Domains of intensity and of rate that show every ridge and every mark, in whole decades of the former."""
    ridges = [balance for _, _, balance in line.balances]
    xs = [*ridges, *(mark.intensity for mark in marks)]
    left, right = min(xs, default=1.0) / 14, max(xs, default=100.0) * 20  # room for names
    top = max(roof.rate for roof in line.roofs)
    slowest = line.slopes[-1].rate
    low = min([slowest * left * 2, *(mark.rate / 2 for mark in marks)])
    return (left, right), (low, top * 1.5)


def _distinct(slopes: Sequence[Slope]) -> list[Slope]:
    """Slopes that can be told apart; one that is not lends its name to the one above it."""
    found: list[Slope] = []
    for slope in slopes:
        if found and found[-1].rate < SAME * slope.rate:
            found[-1] = Slope(f"{found[-1].name}; {slope.name}", found[-1].rate)
        else:
            found.append(slope)
    return found


def roofline_plot(line: Roofline, marks: Sequence[DrawnPart], caption: str) -> Plot:
    """Roofs, slopes, the balance points with the slowest memory (crosses), and measured parts; log-log."""
    xs, ys = _ranges(line, marks)
    x = _scaled("x", "arithmetic intensity, FLOP / byte", xs)
    axes = {"x": x, "y": _scaled("y", "GFLOP/s", (ys[0] / 1e9, ys[1] / 1e9))}
    layers = [*_roof_layers(line, xs, ys), *(_mark_layers(marks) if marks else ())]
    for layer in layers:
        layer["encoding"] = axes | layer["encoding"]
    what = "Roofline" if line.source == "measured" else "Roofline from a datasheet, not measured"
    return Plot("roofline", f"{what}: {line.title}", {"layer": layers}, caption)


def _scaled(field: str, title: str, domain: tuple[float, float]) -> Layer:
    scale = {"type": "log", "domain": list(domain), "nice": False}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": log_labels(field, "~g")}


def _layer(rows: Sequence[Mapping[str, Any]], kind: str, style: Mapping[str, Any], **encoding: Any) -> Layer:
    """A layer of marks at the x and y of its rows."""
    return {"data": {"values": list(rows)}, "mark": {"type": kind, **style}, "encoding": encoding}


def _roof_layers(line: Roofline, xs: tuple[float, float], ys: tuple[float, float]) -> list[Layer]:
    """Lines and their names; rates in GFLOP/s."""
    slopes, top = _distinct(line.slopes), line.roofs[0].rate
    rows: list[Layer] = []
    names: dict[str, list[Layer]] = {"above": [], "below": [], "roof": []}
    for number, slope in enumerate(slopes):
        start, end = max(xs[0], ys[0] / slope.rate), top / slope.rate
        rows += [{"line": slope.name, "kind": "memory", "x": at, "y": at * slope.rate / 1e9} for at in (start, end)]
        # The fastest is named above its line, the others below theirs, the slower the lower, so that no two names meet.
        above = number == 0 and len(slopes) > 1
        at = start * (end / start) ** (0.85 if above else 0.08 + 0.12 * (len(slopes) - 1 - number))
        text = f"{slope.name}: {slope.rate / 1e9:,.0f} GB/s"
        names["above" if above else "below"].append({"text": text, "x": at, "y": at * slope.rate / 1e9})
    for roof in line.roofs:
        ends = (roof.rate / slopes[0].rate, xs[1])
        rows += [{"line": roof.unit, "kind": "unit", "x": at, "y": roof.rate / 1e9} for at in ends]
        text = f"{roof.unit}: {rate_text(roof.rate, 'FLOP/s')}"
        names["roof"].append({"text": text, "x": xs[1], "y": roof.rate / 1e9})
    said = ("unit", "memory", "balance point, FLOP/byte")
    balances = [
        {"x": balance, "y": roof.rate / 1e9, **dict(zip(said, (roof.unit, slope.name, f"{balance:,.1f}"), strict=True))}
        for roof, slope, balance in line.balances
        if slope == line.slopes[-1]
    ]
    dash = _nominal("kind", scale={"domain": ["memory", "unit"], "range": [[1, 0], [6, 3]]}, legend=None)
    lines_style = {"color": colour("muted"), "strokeWidth": 1.5, "clip": True}
    cross = {"shape": "cross", "color": colour("text"), "size": 60}
    layers = [
        _layer(rows, "line", lines_style, detail={"field": "line"}, strokeDash=dash),
        _layer(balances, "point", cross, tooltip=[{"field": key} for key in said]),
    ]
    edge = {"stroke": colour("surface"), "strokeWidth": 4, "strokeJoin": "round"}  # so that no line goes through it
    for side, align, dx, dy in (("above", "right", -8, -4), ("below", "left", 10, 8), ("roof", "right", -4, -7)):
        style = {"align": align, "dx": dx, "dy": dy, "color": colour("muted"), "fontSize": 11}
        layers += [_layer(names[side], "text", style | more, text={"field": "text"}) for more in (edge, {})]
    return layers


def _nominal(field: str, **more: Any) -> Layer:
    return {"field": field, "type": "nominal", "title": None, **more}


def _mark_layers(marks: Sequence[DrawnPart]) -> list[Layer]:
    series = {mark.series: [one for one in marks if one.series == mark.series] for mark in marks}
    at_ends = {id(many[index]) for many in series.values() for index in (0, -1)}
    said = [
        {
            "phase": mark.phase, "part": PARTS[mark.part], "point": mark.label,
            "FLOP / byte": f"{mark.intensity:,.1f}", "GFLOP/s": f"{mark.rate / 1e9:,.0f}", **mark.facts,
        }
        for mark in marks
    ]  # fmt: skip
    rows = [
        {**facts, "x": mark.intensity, "y": mark.rate / 1e9, "series": mark.series, "order": order}
        for order, (mark, facts) in enumerate(zip(marks, said, strict=True))
    ]
    shade = _nominal("phase", scale=colour_scale(colours_of(PHASES)))
    shape = _nominal("part", scale={"domain": list(PARTS.values()), "range": ["circle", "diamond"]})
    trail, dot = {"strokeWidth": 1, "opacity": 0.6}, {"filled": True, "size": 70, "opacity": 0.9}
    tooltip = [{"field": key} for key in said[0]]
    layers = [
        _layer(rows, "line", trail, color=shade, detail={"field": "series"}, order={"field": "order"}),
        _layer(rows, "point", dot, color=shade, shape=shape, tooltip=tooltip),
    ]
    # Attention of decode has one intensity whatever the batch and the context: only the latter are named there.
    for named, align, dx, dy in (
        (("prefill linear",), "left", 3, -10),
        (("prefill attention", "context attention"), "left", 8, 1),
        (("batch linear",), "right", -5, -8),
    ):
        chosen = [row for row, mark in zip(rows, marks, strict=True) if id(mark) in at_ends and mark.series in named]
        style = {"fontSize": 10, "align": align, "dx": dx, "dy": dy}
        layers.append(_layer(chosen, "text", style, color=shade, text={"field": "point"}))
    return layers


def canvas(line: Roofline, marks: Sequence[DrawnPart], width: int = 76, height: int = 20) -> list[str]:
    """The same in characters: lines of text, with axes.

    The roofs are "-", the slopes "/"; P and p are prefill's linear layers and attention, D and d decode's.
    """
    (left, _), ys = _ranges(line, marks)
    xs = (left * 6, max([*(mark.intensity for mark in marks), *(balance for _, _, balance in line.balances)]) * 2)
    names = {roof.unit: f" {roof.unit} {rate_text(roof.rate, 'FLOP/s')}" for roof in line.roofs}
    across, up = width - 9 - max(map(len, names.values())), height - 2  # room for the axis and the names
    grid = [[" "] * across for _ in range(up)]

    def column(x: float) -> int:
        return round((math.log(x) - math.log(xs[0])) / (math.log(xs[1]) - math.log(xs[0])) * (across - 1))

    def row(y: float) -> int:
        return up - 1 - round((math.log(y) - math.log(ys[0])) / (math.log(ys[1]) - math.log(ys[0])) * (up - 1))

    slopes = _distinct(line.slopes)
    for index in range(across):
        x = xs[0] * (xs[1] / xs[0]) ** (index / (across - 1))
        for slope in slopes:
            if ys[0] <= x * slope.rate <= line.roofs[0].rate:
                grid[row(x * slope.rate)][index] = "/"
        for roof in line.roofs:
            if x >= roof.rate / slopes[0].rate:
                grid[row(roof.rate)][index] = "-"
    for mark in marks:
        grid[row(mark.rate)][column(mark.intensity)] = LETTERS[mark.phase, mark.part]
    ticks = {row(10.0**power): power for power in range(6, 18) if ys[0] <= 10.0**power <= ys[1]}
    beside: dict[int, str] = {}
    for roof in line.roofs:
        at = row(roof.rate)
        beside[at] = f"{beside[at]},{names[roof.unit]}" if at in beside else names[roof.unit]
    drawn = []
    for index, cells in enumerate(grid):
        label = _tick(10.0 ** ticks[index]) if index in ticks else ""
        drawn.append(f"{label:>7} |{''.join(cells)}{beside.get(index, '')}".rstrip())
    drawn.append(f"{'FLOP/s':>7} +{'-' * across} FLOP/byte")
    axis = [" "] * (across + 8)
    for power in range(-3, 8):
        if xs[0] <= 10.0**power <= xs[1]:
            text = f"{10.0**power:,.0f}" if power >= 0 else f"{10.0**power:g}"
            at = column(10.0**power)
            axis[at : at + len(text)] = list(text)
    drawn.append(" " * 9 + "".join(axis).rstrip())
    return drawn


def text_drawing(line: Roofline, marks: Sequence[DrawnPart], columns: int) -> list[str]:
    """The roofline for a terminal with so many columns, and what its letters mean."""
    if not (line.roofs and line.slopes):
        return []
    drawn = ["", *canvas(line, marks, max(60, min(columns, 100)))]
    if marks:
        drawn.append("/ bandwidth, - peak; prefill: P linear layers, p attention; decode: D, d")
    return drawn


def _tick(rate: float) -> str:
    return next((f"{rate / size:g} {name}" for size, name in PREFIXES if rate >= size), f"{rate:g}")
