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
from twinphase.bench.roofline.report import rate_text

__all__ = ["Mark", "batching_plot", "canvas", "roofline_plot", "stacked_plot", "text_drawing", "thread_plot"]

SAME = 1.25  # slopes nearer than this factor are drawn as one
PARTS = {"linear": "linear layers", "attention": "attention"}
LETTERS = {("prefill", "linear"): "P", ("prefill", "attention"): "p", ("decode", "linear"): "D",
           ("decode", "attention"): "d"}  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """A measured part of a point, to be drawn.

    Attributes:
        phase: "prefill" or "decode".
        part: "linear" or "attention".
        series: points of one series are joined by a line.
        label: what varies in the series: "n = 512", "batch 8", "context 1024".
        intensity: FLOP a byte.
        rate: FLOP a second.
        facts: more for whoever points at it.
    """

    phase: str
    part: str
    series: str
    label: str
    intensity: float
    rate: float
    facts: Mapping[str, str]


def _ranges(line: Roofline, marks: Sequence[Mark]) -> tuple[tuple[float, float], tuple[float, float]]:
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


def _roof_layers(line: Roofline, xs: tuple[float, float], ys: tuple[float, float]) -> list[dict[str, Any]]:
    """Lines and their names; rates in GFLOP/s."""
    slopes, top = _distinct(line.slopes), line.roofs[0].rate
    rows, names = [], []
    for number, slope in enumerate(slopes):
        start = max(xs[0], ys[0] / slope.rate)
        end = top / slope.rate
        for along in (start, end):
            rows.append({"line": slope.name, "kind": "memory", "x": along, "y": along * slope.rate / 1e9})
        text = f"{slope.name}: {slope.rate / 1e9:,.0f} GB/s"
        # The fastest is named above its line, the others below theirs, the slower the lower, so that no two names meet.
        above = number == 0 and len(slopes) > 1
        part = 0.85 if above else 0.08 + 0.12 * (len(slopes) - 1 - number)
        at = start * (end / start) ** part
        names.append({"text": text, "x": at, "y": at * slope.rate / 1e9, "side": "above" if above else "below"})
    for roof in line.roofs:
        for ridge_or_end in (roof.rate / slopes[0].rate, xs[1]):
            rows.append({"line": roof.unit, "kind": "unit", "x": ridge_or_end, "y": roof.rate / 1e9})
        text = f"{roof.unit}: {rate_text(roof.rate, 'FLOP/s')}"
        names.append({"text": text, "x": xs[1], "y": roof.rate / 1e9, "side": "roof"})
    ridge = [{"x": balance, "y": roof.rate / 1e9, "unit": roof.unit, "memory": slope.name,
              "balance point, FLOP/byte": f"{balance:,.1f}"}
             for roof, slope, balance in line.balances if slope.name == line.slopes[-1].name]  # fmt: skip
    x, y = _scaled("x", "arithmetic intensity, FLOP / byte", xs), _scaled("y", "GFLOP/s", (ys[0] / 1e9, ys[1] / 1e9))
    dash = {"field": "kind", "type": "nominal", "legend": None, "scale": {"domain": ["memory", "unit"],
            "range": [[1, 0], [6, 3]]}}  # fmt: skip
    layers: list[dict[str, Any]] = [
        {
            "data": {"values": rows},
            "mark": {"type": "line", "color": colour("muted"), "strokeWidth": 1.5, "clip": True},
            "encoding": {"x": x, "y": y, "detail": {"field": "line"}, "strokeDash": dash},
        },
        {
            "data": {"values": ridge},
            "mark": {"type": "point", "shape": "cross", "color": colour("text"), "size": 60},
            "encoding": {
                "x": x,
                "y": y,
                "tooltip": [{"field": key} for key in ("unit", "memory", *list(ridge[0])[4:])],
            },
        },
    ]
    for side, align, dx, dy in (("above", "right", -8, -4), ("below", "left", 10, 8), ("roof", "right", -4, -7)):
        chosen = [name for name in names if name["side"] == side]
        mark = {"type": "text", "align": align, "dx": dx, "dy": dy, "color": colour("muted"), "fontSize": 11}
        edge = {"stroke": colour("surface"), "strokeWidth": 4, "strokeJoin": "round"}  # so that no line goes through it
        encoding = {"x": x, "y": y, "text": {"field": "text"}}
        layers += [{"data": {"values": chosen}, "mark": mark | more, "encoding": encoding} for more in (edge, {})]
    return layers


def _scaled(field: str, title: str, domain: tuple[float, float]) -> dict[str, Any]:
    scale = {"type": "log", "domain": list(domain), "nice": False}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": log_labels(field, "~g")}


def roofline_plot(line: Roofline, marks: Sequence[Mark], caption: str) -> Plot:
    """Roofs, slopes, the balance points with the slowest memory (crosses), and measured parts; log-log."""
    xs, ys = _ranges(line, marks)
    layers = _roof_layers(line, xs, ys)
    if marks:
        layers += _mark_layers(marks, xs, ys)
    what = "Roofline" if line.source == "measured" else "Roofline from a datasheet, not measured"
    return Plot("roofline", f"{what}: {line.title}", {"layer": layers}, caption)


def _mark_layers(marks: Sequence[Mark], xs: tuple[float, float], ys: tuple[float, float]) -> list[dict[str, Any]]:
    at_ends = {id(series[index]) for series in _series(marks).values() for index in (0, -1)}
    rows = [
        {"x": mark.intensity, "y": mark.rate / 1e9, "phase": mark.phase, "part": PARTS[mark.part],
         "series": mark.series, "point": mark.label, "label": mark.label if id(mark) in at_ends else "", "order": order,
         "FLOP / byte": f"{mark.intensity:,.1f}", "GFLOP/s": f"{mark.rate / 1e9:,.0f}", **mark.facts}
        for order, mark in enumerate(marks)
    ]  # fmt: skip
    x, y = _scaled("x", "arithmetic intensity, FLOP / byte", xs), _scaled("y", "GFLOP/s", (ys[0] / 1e9, ys[1] / 1e9))
    shade = {"field": "phase", "type": "nominal", "title": None, "scale": colour_scale(colours_of(PHASES))}
    shape = {"field": "part", "type": "nominal", "title": None, "scale": {"domain": list(PARTS.values()),
             "range": ["circle", "diamond"]}}  # fmt: skip
    hidden = ("x", "y", "label", "order", "series")
    tooltip = [{"field": key} for key in rows[0] if key not in hidden]
    data = {"values": rows}
    trail = {"x": x, "y": y, "color": shade, "detail": {"field": "series"}, "order": {"field": "order"}}
    return [
        {"data": data, "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.6}, "encoding": trail},
        {
            "data": data,
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 0.9},
            "encoding": {"x": x, "y": y, "color": shade, "shape": shape, "tooltip": tooltip},
        },
        # Attention of decode has one intensity whatever the batch and the context: only the latter are named there.
        *(
            {
                "data": {"values": [row for row in rows if row["label"] and row["series"] in series]},
                "mark": {"type": "text", "fontSize": 10, **place},
                "encoding": {"x": x, "y": y, "color": shade, "text": {"field": "label"}},
            }
            for series, place in (
                (("prefill linear",), {"align": "left", "dx": 3, "dy": -10}),
                (("prefill attention", "context attention"), {"align": "left", "dx": 8, "dy": 1}),
                (("batch linear",), {"align": "right", "dx": -5, "dy": -8}),
            )
        ),
    ]


def _series(marks: Sequence[Mark]) -> dict[str, list[Mark]]:
    found: dict[str, list[Mark]] = {}
    for mark in marks:
        found.setdefault(mark.series, []).append(mark)
    return found


def stacked_plot(name: str, title: str, rows: Sequence[Mapping[str, Any]], x: str, y: str, caption: str) -> Plot:
    """Columns of parts: rows have `x` (a number), `y`, and "part"."""
    order = ["linear layers", "attention", "other operations", "outside the forward pass"]
    colours = colour_scale(dict(zip(order, ("series1", "series2", "series3", "series6"), strict=True)))
    ranked = [{**row, "rank": order.index(str(row["part"]))} for row in rows]
    spec = {
        "data": {"values": ranked},
        "mark": {"type": "bar", "cornerRadiusEnd": 0},
        "encoding": {
            "x": {"field": x, "type": "ordinal", "title": x, "axis": {"labelAngle": 0}},
            "y": {"field": y, "type": "quantitative", "title": y, "stack": "zero"},
            "color": {"field": "part", "type": "nominal", "title": None, "scale": colours},
            "order": {"field": "rank"},
            "tooltip": [{"field": key} for key in (x, "part", y)],
        },
    }
    return Plot(name, title, spec, caption)


def batching_plot(
    measured: Sequence[tuple[int, float]],
    ideal: Sequence[tuple[int, float]],
    predicted: float | None,
    knee: float | None,
    caption: str,
) -> Plot:
    """Step time of the linear layers by batch, measured and as the ceilings allow, and where each turns upwards.

    Args:
        measured: (batch, seconds).
        ideal: the same, the longer of memory's and compute's time; empty is unknown.
        predicted: break-even batch.
        knee: the measured one.
        caption: of the plot.
    """
    x = {"field": "batch", "type": "quantitative", "title": "sequences that decode together",
         "scale": {"type": "log", "base": 2}, "axis": {"values": [batch for batch, _ in measured]}}  # fmt: skip
    y = {"field": "ms", "type": "quantitative", "title": "linear layers, ms a step", "scale": {"type": "log"},
         "axis": log_labels("y")}  # fmt: skip
    names = ("decode, measured", "at the ceilings")
    shade = {"field": "what", "type": "nominal", "title": None, "scale": colour_scale(colours_of(names))}
    layers: list[dict[str, Any]] = []
    for name, points in zip(names, (measured, ideal), strict=True):
        rows = [{"batch": batch, "ms": round(seconds * 1e3, 4), "what": name} for batch, seconds in points]
        if rows:
            mark: dict[str, Any] = {"type": "line", "point": name == names[0]}
            tooltip = [{"field": "batch"}, {"field": "ms"}]
            encoding = {"x": x, "y": y, "color": shade, "tooltip": tooltip}
            layers.append({"data": {"values": rows}, "mark": mark, "encoding": encoding})
    left = not knee or not predicted or predicted <= knee  # each name on the side away from the other's line
    turns = [(predicted, f"predicted: {predicted:,.0f}" if predicted else "", left),
             (knee, f"measured knee: {knee:,.1f}" if knee else "", not left)]  # fmt: skip
    for batch, text, to_left in turns:
        if batch and measured[0][0] <= batch <= measured[-1][0]:
            data = {"values": [{"batch": batch, "text": text}]}
            layers.append({"data": data, "mark": {"type": "rule", "strokeDash": [4, 3]}, "encoding": {"x": x}})
            mark = {"type": "text", "align": "right" if to_left else "left", "dx": -5 if to_left else 5,
                    "color": colour("muted")}  # fmt: skip
            encoding = {"x": x, "y": {"value": 12}, "text": {"field": "text"}}
            layers.append({"data": data, "mark": mark, "encoding": encoding})
    return Plot("decode-batching", "Where batched decode turns from memory-bound to compute-bound", {"layer": layers},
                caption)  # fmt: skip


def thread_plot(rows: Sequence[Mapping[str, Any]], caption: str) -> Plot:
    """Bandwidth by working set, one line a number of threads; rows: MiB, GB/s, threads."""
    encoding = {
        "x": {"field": "MiB", "type": "quantitative", "title": "working set of all threads together, MiB",
              "scale": {"type": "log", "base": 2}, "axis": {"values": sorted({row["MiB"] for row in rows})}},
        "y": {"field": "GB/s", "type": "quantitative", "title": "read bandwidth, GB/s", "scale": {"zero": True}},
        "color": {"field": "threads", "type": "nominal", "title": None},
        "tooltip": [{"field": key} for key in ("threads", "MiB", "GB/s")],
    }  # fmt: skip
    spec = {"data": {"values": list(rows)}, "mark": {"type": "line", "point": True}, "encoding": encoding}
    return Plot("bandwidth", "Memory bandwidth falls with the working set", spec, caption)


def canvas(line: Roofline, marks: Sequence[Mark], width: int = 76, height: int = 20) -> list[str]:
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
    lines = []
    for index, cells in enumerate(grid):
        label = _tick(10.0 ** ticks[index]) if index in ticks else ""
        lines.append(f"{label:>7} |{''.join(cells)}{beside.get(index, '')}".rstrip())
    lines.append(f"{'FLOP/s':>7} +{'-' * across} FLOP/byte")
    axis = [" "] * (across + 8)
    for power in range(-3, 8):
        if xs[0] <= 10.0**power <= xs[1]:
            text = f"{10.0**power:,.0f}" if power >= 0 else f"{10.0**power:g}"
            at = column(10.0**power)
            axis[at : at + len(text)] = list(text)
    lines.append(" " * 9 + "".join(axis).rstrip())
    return lines


def text_drawing(line: Roofline, marks: Sequence[Mark], columns: int) -> list[str]:
    """The roofline for a terminal with so many columns, and what its letters mean."""
    if not (line.roofs and line.slopes):
        return []
    lines = ["", *canvas(line, marks, max(60, min(columns, 100)))]
    if marks:
        lines.append("/ bandwidth, - peak; prefill: P linear layers, p attention; decode: D, d")
    return lines


def _tick(rate: float) -> str:
    for size, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rate >= size:
            return f"{rate / size:g} {name}"
    return f"{rate:g}"
