"""Charts as Vega-Lite specifications, which a browser draws live and `render.py` draws to PNG.

A row is a mapping with plain values; its keys are shown when a point is pointed at, so they are words a reader knows.
Not for sizes and fonts, which are the page's, nor for colours: a spec names roles (`theme.py`), and a series whose
name begins with "prefill" or "decode" has its phase's colour everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from twinphase.bench.report.report import Plot
from twinphase.bench.report.theme import PHASES

__all__ = [
    "ROW_HEIGHT",
    "ZOOM",
    "axis",
    "bars",
    "colour_by",
    "distribution",
    "faded",
    "highlight",
    "lines",
    "scatter",
    "tooltips",
]

Row = Mapping[str, Any]
Spec = dict[str, Any]
ROW_HEIGHT = 30  # pixels of a horizontal bar and the space around it

# A reader moves with the mouse and zooms with Ctrl and the wheel: a page that only scrolls must not be caught by a
# chart, nor one that is touched.
ZOOM: Spec = {
    "name": "zoom",
    "select": {
        "type": "interval",
        "translate": "[pointerdown[event.pointerType === 'mouse'], window:pointerup] > window:pointermove!",
        "on": "[pointerdown[event.pointerType === 'mouse'], window:pointerup] > window:pointermove!",
        "zoom": "wheel![event.ctrlKey]",
    },
    "bind": "scales",
}


def axis(field: str, title: str, *, log: bool = False, zero: bool = False) -> Spec:
    """A quantitative axis, with room for half a point at its ends; one that begins at zero begins there."""
    scale: Spec = {"zero": True} if zero else {"zero": False, "nice": False, "padding": 6}
    if log:
        scale = {"type": "log", "nice": False, "padding": 10}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale}


def tooltips(rows: Sequence[Row]) -> list[Spec]:
    """What is shown when a point is pointed at: every key of the rows, numbers to four digits."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return [_tooltip(key, [row.get(key) for row in rows]) for key in keys]


def _tooltip(key: str, values: Sequence[Any]) -> Spec:
    numbers = [value for value in values if value is not None]
    if numbers and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in numbers):
        whole = all(float(value).is_integer() for value in numbers if math.isfinite(value))
        return {"field": key, "type": "quantitative", "format": "," if whole else ".4~g"}
    return {"field": key, "type": "nominal"}


def colour_by(series: str | None, names: Sequence[str] = (), plot: str = "") -> Spec:
    """Colour by series; without series all is one, in the colour of the phase that the plot's name begins with."""
    if series is None:
        phase = next((phase for phase in PHASES if plot.startswith(phase)), "series1")
        return {"color": {"value": f"role:{phase}"}}
    return {"color": {"field": series, "type": "nominal", "title": None, "sort": list(names) or None}}


def _shape(series: str | None) -> Spec:
    """Shape as well as colour, so that neither is needed alone."""
    return {"shape": {"field": series, "type": "nominal", "title": None, "sort": None}} if series else {}


def highlight(series: str | None) -> list[Spec]:
    """A click on a name in the legend brings its series out."""
    if series is None:
        return []
    return [{"name": "chosen", "select": {"type": "point", "fields": [series]}, "bind": "legend"}]


def faded(series: str | None, opacity: float = 1.0) -> Spec:
    """Paler than `opacity` while another series is chosen."""
    if series is None:
        return {"opacity": {"value": opacity}}
    return {"opacity": {"condition": {"param": "chosen", "value": opacity}, "value": opacity * 0.15}}


def lines(
    name: str,
    title: str,
    rows: Sequence[Row],
    x: tuple[str, str],
    y: tuple[str, str],
    *,
    series: str | None = None,
    fitted: Sequence[Row] = (),
    log_x: bool = False,
    log_y: bool = False,
    caption: str = "",
) -> Plot:
    """Measured points, and lines.

    Args:
        name: of the plot.
        title: of the plot.
        rows: measured points. A row with the keys "low" and "high" gets an error bar.
        x: (key of the row, title of the axis with its unit).
        y: the same.
        series: key that tells the series apart, by colour.
        fitted: a line through these instead of through the measured points; with "low" and "high" a band as well.
        log_x: a logarithmic axis.
        log_y: the same.
        caption: of the plot.
    """
    colour = colour_by(series, plot=name)
    x_axis, y_axis = axis(*x, log=log_x), axis(*y, log=log_y, zero=True)
    spread = {"x": x_axis, "y": {**y_axis, "field": "low"}, "y2": {"field": "high"}, **colour}
    layers: list[Spec] = []
    measured, through = {"values": list(rows)}, {"values": list(fitted or rows)}
    if any("low" in row for row in fitted):
        layers.append({"data": through, "mark": "area", "encoding": {**spread, **faded(series, 0.18)}})
    if any("low" in row for row in rows):
        layers.append({"data": measured, "mark": "rule", "encoding": {**spread, **faded(series)}})
    line = {"x": x_axis, "y": y_axis, **colour, **faded(series, 0.75)}
    layers.append({"data": through, "mark": {"type": "line", "clip": True}, "encoding": line})
    points = {"x": x_axis, "y": y_axis, **colour, **_shape(series), **faded(series), "tooltip": tooltips(rows)}
    layers.append({"data": measured, "mark": "point", "encoding": points})
    layers[0] = {**layers[0], "params": [ZOOM, *highlight(series)]}
    return Plot(name, title, {"layer": layers}, caption)


def scatter(
    name: str,
    title: str,
    rows: Sequence[Row],
    x: tuple[str, str],
    y: tuple[str, str],
    *,
    series: str | None = None,
    band: Sequence[Row] = (),
    log_x: bool = False,
    caption: str = "",
) -> Plot:
    """Points alone, over a band that says where they ought to lie.

    Args:
        name: of the plot.
        title: of the plot.
        rows: a point each.
        x: (key of the row, title of the axis with its unit).
        y: the same.
        series: key that tells the series apart, by colour.
        band: rows with x's key, "low" and "high".
        log_x: a logarithmic axis.
        caption: of the plot.
    """
    x_axis, y_axis = axis(*x, log=log_x), axis(*y, zero=True)
    layers: list[Spec] = []
    if band:
        spread = {"x": x_axis, "y": {**y_axis, "field": "low"}, "y2": {"field": "high"}}
        mark = {"type": "area", "color": "role:neutral", "opacity": 0.22}
        layers.append({"data": {"values": list(band)}, "mark": mark, "encoding": spread})
    points = {"x": x_axis, "y": y_axis, **colour_by(series, plot=name), **faded(series, 0.7), "tooltip": tooltips(rows)}
    layers.append({"data": {"values": list(rows)}, "mark": {"type": "point", "size": 30}, "encoding": points})
    layers[0] = {**layers[0], "params": [ZOOM, *highlight(series)]}
    return Plot(name, title, {"layer": layers}, caption)


def bars(
    name: str,
    title: str,
    rows: Sequence[Row],
    category: tuple[str, str],
    value: tuple[str, str],
    *,
    part: str | None = None,
    order: Sequence[str] = (),
    grouped: bool = False,
    caption: str = "",
) -> Plot:
    """Horizontal bars, one a category; divided into parts by colour where `part` names a key.

    Parts add up, one behind the other; `grouped` ones are compared, one below the other. A row with the keys "low" and
    "high" gets an error bar, where bars have no parts.
    """
    categories: Spec = {"field": category[0], "type": "nominal", "title": category[1] or None}
    categories["sort"] = list(order) or None
    values: Spec = {
        "field": value[0],
        "type": "quantitative",
        "title": value[1],
        "stack": "zero" if part and not grouped else None,
    }
    encoding: Spec = {"y": categories, "x": {**values, "axis": {"grid": True}}, "tooltip": tooltips(rows)}
    parts = list(dict.fromkeys(str(row[part]) for row in rows)) if part else []
    # Stacked in the order of the rows, as the legend is, not by name.
    data = {"values": [{**row, "order": parts.index(str(row[part]))} for row in rows] if part else list(rows)}
    if part:
        encoding |= {**colour_by(part, parts), **faded(part), "order": {"field": "order", "type": "quantitative"}}
        encoding |= {"yOffset": {"field": part, "type": "nominal", "sort": parts}} if grouped else {}
    else:
        # By category, so that a category named after a phase has the phase's colour; the axis is legend enough.
        phases = all(str(row[category[0]]).lower().startswith(("prefill", "decode")) for row in rows)
        encoding |= colour_by(category[0]) if phases else colour_by(None, plot=name)
        encoding["color"] = {**encoding["color"], "legend": None} if phases else encoding["color"]
    layers: list[Spec] = [{"mark": "bar", "encoding": encoding, "params": highlight(part)}]
    if not part and any("low" in row for row in rows):
        spread = {"y": categories, "x": {**values, "field": "low"}, "x2": {"field": "high"}}
        layers.append({"mark": {"type": "rule", "color": "role:text"}, "encoding": spread})
    return Plot(
        name,
        title,
        {
            "data": data,
            "height": ROW_HEIGHT * len({row[category[0]] for row in rows}) * (max(1, len(parts)) if grouped else 1),
            "layer": layers,
        },
        caption,
    )


def distribution(
    name: str,
    title: str,
    values: Mapping[str, Sequence[float]],
    unit: str,
    *,
    limit: float | None = None,
    log_x: bool = False,
    caption: str = "",
) -> Plot:
    """What share of the values is at most so large (empirical distribution function), a line a series.

    Args:
        name: of the plot.
        title: of the plot.
        values: by the name of their series.
        unit: title of the axis, with the unit.
        limit: drawn across: an SLO.
        log_x: a logarithmic axis.
        caption: of the plot.
    """
    rows = [row for series, found in values.items() for row in _ranks(series, found)]
    x_axis = axis("value", unit, log=log_x, zero=not log_x)
    y_axis: Spec = {"field": "share", "type": "quantitative", "title": "share of values at most so large"}
    y_axis |= {"scale": {"domain": [0, 1]}, "axis": {"format": ".0%"}}
    mark = {"type": "line", "interpolate": "step-after", "clip": True}
    legend = {"symbolType": "stroke"} if len(values) > 1 else None
    colour = {**colour_by("series", list(values))["color"], "legend": legend}
    encoding = {"x": x_axis, "y": y_axis, "color": colour, **faded("series"), "tooltip": tooltips(rows)}
    layers: list[Spec] = [
        {
            "data": {"values": rows},
            "mark": mark,
            "encoding": {**encoding, "order": {"field": "share", "type": "quantitative"}},
            "params": [ZOOM, *highlight("series")],
        }
    ]
    if limit is not None:
        layers += _limit(limit, x_axis)
    return Plot(name, title, {"layer": layers}, caption)


def _ranks(series: str, values: Sequence[float], most: int = 400) -> list[dict[str, Any]]:
    """Ordered values with the share at or below each; of many, evenly chosen ranks, first and last among them."""
    ordered, n = sorted(values), len(values)
    ranks = range(n) if n <= most else sorted({round(index * (n - 1) / (most - 1)) for index in range(most)})
    return [{"series": series, "value": ordered[rank], "share": (rank + 1) / n} for rank in ranks]


def _limit(limit: float, x_axis: Spec) -> list[Spec]:
    data = {"values": [{x_axis["field"]: limit, "limit": "limit"}]}
    rule = {"type": "rule", "strokeDash": [5, 4], "color": "role:bad"}
    text = {"type": "text", "align": "left", "dx": 5, "y": 8, "color": "role:bad"}
    return [
        {"data": data, "mark": rule, "encoding": {"x": x_axis}},
        {"data": data, "mark": text, "encoding": {"x": x_axis, "text": {"field": "limit"}}},
    ]
