"""Charts that only this subject has: a roofline, a waterfall of one request's time, many requests along time.

Rows and colours as in `plots.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from twinphase.bench.plots import ROW_HEIGHT, ZOOM, axis, colour_by, faded, highlight, tooltips
from twinphase.bench.report import Plot
from twinphase.terminal import percentages

__all__ = ["roofline", "timeline", "waterfall"]

Row = Mapping[str, Any]
Spec = dict[str, Any]


def roofline(
    name: str,
    title: str,
    roofs: Sequence[Row],
    points: Sequence[Row],
    *,
    balance: float | None = None,
    caption: str = "",
) -> Plot:
    """Work under a machine's ceilings (Williams, Waterman, Patterson 2009), both axes logarithmic.

    Args:
        name: of the plot.
        title: of the plot.
        roofs: corners of the ceilings by rising intensity, each {"intensity": FLOP a byte, "rate": FLOP/s,
            "roof": its name}.
        points: measured work, each {"intensity", "rate", "phase": series, "label": what it was}, and what else a
            reader is to see when pointing at it.
        balance: intensity at which compute begins to bind.
        caption: of the plot.
    """
    x_axis = axis("intensity", "arithmetic intensity (FLOP a byte)", log=True)
    y_axis = {**axis("rate", "work done (FLOP/s)", log=True), "axis": {"format": "~s"}}
    y_axis["scale"] = {**y_axis["scale"], "padding": 24}  # room for the roofs' names
    ends = [row for index, row in enumerate(roofs) if [r["roof"] for r in roofs[index + 1 :]].count(row["roof"]) == 0]
    line = {"x": x_axis, "y": y_axis, "detail": {"field": "roof", "type": "nominal"}}
    text = {"type": "text", "align": "right", "dy": -8, "color": "role:muted"}
    few = len({row.get("label") for row in points}) <= 6
    shape = {"field": "label", "type": "nominal", "title": None, "sort": None, "legend": {"orient": "bottom"}}
    layers: list[Spec] = [
        {
            "data": {"values": list(roofs)},
            "mark": {"type": "line", "color": "role:muted", "strokeWidth": 1.5},
            "encoding": line,
            "params": [ZOOM, *highlight("phase")],
        },
        {"data": {"values": ends}, "mark": text, "encoding": {"x": x_axis, "y": y_axis, "text": {"field": "roof"}}},
        {
            "data": {"values": list(points)},
            "mark": {"type": "point", "size": 70},
            "encoding": {"x": x_axis, "y": y_axis, **colour_by("phase"), **faded("phase", 0.85)}
            | ({"shape": shape} if few else {})
            | {"tooltip": tooltips(points)},
        },
    ]
    if balance is not None:
        rule = {"type": "rule", "strokeDash": [4, 4]}
        layers.append({"data": {"values": [{"intensity": balance}]}, "mark": rule, "encoding": {"x": x_axis}})
    return Plot(name, title, {"layer": layers}, caption)


def waterfall(
    name: str, title: str, parts: Sequence[tuple[str, float]], unit: str, *, caption: str = "", total: str = "total"
) -> Plot:
    """Parts one behind the other, each beginning where the one before ends, and their sum below.

    Args:
        name: of the plot.
        title: of the plot.
        parts: (name, size), in the order in which they are drawn.
        unit: title of the axis, with the unit.
        caption: of the plot.
        total: name of the sum.
    """
    sizes = [size for _, size in parts]
    whole, ends = math.fsum(sizes), list(itertools.accumulate(sizes))
    shares = percentages([size / whole for size in sizes]) if whole else ["" for _ in sizes]
    rows: list[Spec] = [
        {"part": part, "from": end - size, "to": end, "size": size, "share": share}
        for (part, size), end, share in zip(parts, ends, shares, strict=True)
    ]
    rows.append({"part": total, "from": 0.0, "to": whole, "size": whole, "share": "100.0 %" if whole else ""})
    y_axis = {"field": "part", "type": "nominal", "title": None, "sort": [row["part"] for row in rows]}
    x_axis = {"field": "from", "type": "quantitative", "title": unit, "axis": {"grid": True}}
    x_label = {**x_axis, "field": "to"}
    colour = {**colour_by("part", [part for part, _ in parts])["color"], "legend": None}
    bar = {"y": y_axis, "x": x_axis, "x2": {"field": "to"}, "tooltip": tooltips(rows)}
    layers = [
        {"data": {"values": rows[:-1]}, "mark": "bar", "encoding": {**bar, "color": colour}},
        {"data": {"values": rows[-1:]}, "mark": {"type": "bar", "color": "role:neutral"}, "encoding": bar},
        {
            "data": {"values": rows},
            "mark": {"type": "text", "align": "left", "dx": 5},
            "encoding": {"y": y_axis, "x": x_label, "text": {"field": "share"}},
        },
    ]
    return Plot(name, title, {"height": ROW_HEIGHT * len(rows), "layer": layers}, caption)


def timeline(
    name: str,
    title: str,
    rows: Sequence[Row],
    *,
    lane: tuple[str, str] = ("request", "request"),
    kind: str = "kind",
    unit: str = "seconds",
    caption: str = "",
) -> Plot:
    """Intervals along time, a lane a request, coloured by kind.

    Args:
        name: of the plot.
        title: of the plot.
        rows: an interval each: {"start", "end" in the axis' unit, the lane's key, the kind's key}, and what else a
            reader is to see when pointing at it.
        lane: (key of the row, title).
        kind: key of the row.
        unit: title of the axis.
        caption: of the plot.
    """
    lanes = list(dict.fromkeys(str(row[lane[0]]) for row in rows))
    encoding = {
        "y": {"field": lane[0], "type": "nominal", "title": lane[1] or None, "sort": lanes},
        "x": {**axis("start", unit), "scale": {"zero": False}, "axis": {"grid": True}},
        "x2": {"field": "end"},
        **colour_by(kind),
        **faded(kind),
        "tooltip": tooltips(rows),
    }
    layer = {"mark": {"type": "bar", "cornerRadius": 1}, "encoding": encoding, "params": highlight(kind)}
    height = (26 if len(lanes) <= 20 else 14) * len(lanes)
    return Plot(name, title, {"data": {"values": list(rows)}, "height": height, "layer": [layer]}, caption)
