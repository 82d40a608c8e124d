"""Charts as Vega-Lite specifications, which a browser draws live and `render.py` draws to PNG.

Not for sizes, colours and fonts, which are the page's (`render.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinphase.bench.report import Plot

__all__ = ["axis", "bars", "lines"]

Row = dict[str, Any]


def axis(field: str, title: str, *, log: bool = False, zero: bool = False) -> dict[str, Any]:
    """A quantitative axis."""
    scale = {"type": "log", "nice": False} if log else {"zero": zero}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale}


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
    zero: bool = True,
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
        zero: a linear y axis begins at zero.
        caption: of the plot.
    """
    colour = {"color": {"field": series, "type": "nominal", "title": None}} if series else {}
    x_axis, y_axis = axis(*x, log=log_x), axis(*y, log=log_y, zero=zero)
    spread = {"x": x_axis, "y": {**axis("low", y[1], log=log_y, zero=zero)}, "y2": {"field": "high"}, **colour}
    tooltip = [{"field": key} for key in (rows[0] if rows else {})]
    layers: list[dict[str, Any]] = []
    if fitted:
        data = {"values": list(fitted)}
        if "low" in fitted[0]:
            layers.append({"data": data, "mark": {"type": "area", "opacity": 0.2}, "encoding": spread})
        layers.append({"data": data, "mark": "line", "encoding": {"x": x_axis, "y": y_axis, **colour}})
    elif rows:
        layers.append(
            {"data": {"values": list(rows)}, "mark": "line", "encoding": {"x": x_axis, "y": y_axis, **colour}}
        )
    if rows and "low" in rows[0]:
        layers.append({"data": {"values": list(rows)}, "mark": "rule", "encoding": spread})
    points = {"x": x_axis, "y": y_axis, **colour, "tooltip": tooltip}
    layers.append({"data": {"values": list(rows)}, "mark": {"type": "point", "filled": True}, "encoding": points})
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
    caption: str = "",
) -> Plot:
    """Horizontal bars, one a category; divided into parts by colour where `part` names a key."""
    encoding: dict[str, Any] = {
        "y": {"field": category[0], "type": "nominal", "title": category[1], "sort": list(order) or None},
        "x": {"field": value[0], "type": "quantitative", "title": value[1], "stack": "zero"},
        "tooltip": [{"field": key} for key in (rows[0] if rows else {})],
    }
    if part:
        encoding["color"] = {"field": part, "type": "nominal", "title": None, "sort": None}
    return Plot(name, title, {"data": {"values": list(rows)}, "mark": "bar", "encoding": encoding}, caption)
