"""The kinds of charts in reports, as Vega-Lite specifications made with Altair.

Every kind takes the plot's `name`, `title` and `caption`, and rows: mappings with plain values. The
keys of a row are shown when a reader points at it, so they are words that a reader knows; "low" and
"high" are an interval. `x` and `y` are (key of the row, title of the axis with its unit). `series`
or `part` is the key shown by colour: a name that begins with "prefill" or "decode" has its phase's
colour (`theme.py`). Sizes, fonts and colours are left to the renderer: the page, or `render.py` for
a PNG.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec

from twinphase_bench.extras import MissingExtraError, OnFirstUse
from twinphase_bench.report.report import Plot
from twinphase_bench.report.theme import colour, colour_scale, colours_of, phase_of_name

alt: Any = OnFirstUse("altair")
Given = ParamSpec("Given")
Row = Mapping[str, Any]
# The height of a horizontal bar with its margin.
ROW_PIXELS = 30
DRAG = "[pointerdown[event.pointerType === 'mouse'], window:pointerup] > window:pointermove!"


def _if_installed(draw: Callable[Given, Plot]) -> Callable[Given, Plot]:
    """Without Altair, return a plot with only name, title and caption, so that the report works."""

    @functools.wraps(draw)
    def plot(*given: Given.args, **named: Given.kwargs) -> Plot:
        try:
            return draw(*given, **named)
        except MissingExtraError:
            return Plot(str(given[0]), str(given[1]), {}, str(named.get("caption", "")))

    return plot


@_if_installed
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
    """Measured points with error bars, and lines through them or through the rows `fitted`."""
    names = _names([*rows, *fitted], series)
    base = alt.Chart().encode(x=_axis(alt.X, *x, log_x), color=_colour(series, names, name))
    at = _axis(alt.Y, *y, log_y, zero=True)
    layers = []
    if any("low" in row for row in rows):
        low = _axis(alt.Y, "low", y[1], log_y, zero=True)
        layers.append(base.mark_rule().encode(y=low, y2="high", opacity=_faded(series)))
    line = base.mark_line(clip=True).encode(y=at, opacity=_faded(series, 0.75))
    layers.append(line.properties(data=_data(fitted)) if fitted else line)
    points = base.mark_point().encode(y=at, opacity=_faded(series), tooltip=_tooltips(rows))
    if series:  # Shape distinguishes series besides colour.
        points = points.encode(
            shape=alt.Shape(field=series, type="nominal", title=None).scale(domain=names)
        )
    return _plot(name, title, [*layers, points], rows, caption, [_zoom(), *_highlight(series)])


@_if_installed
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
    """Horizontal bars with error bars, one per category; divided by colour by the key `part`.

    Parts are stacked, or side by side if `grouped`. They have no error bars.
    """
    parts = _names(rows, part)
    categories = _names(rows, category[0])
    x_axis = alt.X(field=value[0], type="quantitative", title=value[1]).axis(grid=True)
    base = alt.Chart().encode(
        y=alt.Y(
            field=category[0], type="nominal", title=category[1] or None, sort=list(order) or None
        ),
        x=x_axis.stack("zero" if part and not grouped else None),
        tooltip=_tooltips(rows),
    )
    bar = base.mark_bar()
    if part:  # Parts are stacked in the order of the rows, like the legend, not by name.
        rows = [{**row, "order": parts.index(str(row[part]))} for row in rows]
        bar = bar.encode(color=_colour(part, parts), opacity=_faded(part), order="order:Q")
        if grouped:
            bar = bar.encode(yOffset=alt.YOffset(field=part, type="nominal", sort=parts))
    elif all(map(phase_of_name, categories)):  # The axis serves as the legend.
        bar = bar.encode(color=_colour(category[0], categories, legend=False))
    else:
        bar = bar.encode(color=_colour(None, plot=name))
    layers = [bar]
    if not part and any("low" in row for row in rows):
        low = alt.X(field="low", type="quantitative", title=value[1])
        layers.append(base.mark_rule(color=colour("text")).encode(x=low, x2="high"))
    height = ROW_PIXELS * len(categories) * (max(1, len(parts)) if grouped else 1)
    return _plot(name, title, layers, rows, caption, _highlight(part), height=height)


@_if_installed
def spans(
    name: str,
    title: str,
    rows: Sequence[Row],
    lane: tuple[str, str],
    unit: str,
    *,
    part: str,
    roles: Mapping[str, str],
    height: int,
    caption: str = "",
) -> Plot:
    """Bars in lanes, each from its row's "from" to its "to" in `unit`, for parts of a time.

    `lane` is (key of the row, title of the axis); lanes are in the order of the rows and together
    `height` pixels high. `roles` are the colours (`theme.py`) of a bar by its value of the key
    `part`.
    """
    lanes = list(dict.fromkeys(row[lane[0]] for row in rows))
    base = alt.Chart().encode(
        y=alt.Y(field=lane[0], type="nominal", title=lane[1] or None, sort=lanes).axis(
            labels=len(lanes) <= 30
        )
    )
    bar = base.mark_bar(cornerRadius=1).encode(
        x=_axis(alt.X, "from", unit, zero=True).axis(grid=True),
        x2="to",
        color=_colour(part, roles={one: roles[one] for one in _names(rows, part)}),
        opacity=_faded(part),
        tooltip=_tooltips(rows),
    )
    return _plot(name, title, [bar], rows, caption, _highlight(part), height=height)


@_if_installed
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
    """Empirical distribution functions, one line per series.

    `values` are in `unit`, by the name of their series; `limit` is drawn as a line, such as an SLO.
    """
    rows = [row for series, found in values.items() for row in _ranks(series, found)]
    base = alt.Chart().encode(x=_axis(alt.X, "value", unit, log_x, zero=not log_x))
    share = alt.Y(field="share", type="quantitative", title="share of values at most so large")
    steps = base.mark_line(interpolate="step-after", clip=True).encode(
        y=share.scale(domain=[0, 1]).axis(format=".0%"),
        order="share:Q",
        color=_colour("series", list(values), legend=len(values) > 1),
        opacity=_faded("series"),
        tooltip=_tooltips(rows),
    )
    layers = [steps]
    if limit is not None:
        line = base.properties(data=_data([{"value": limit, "limit": "limit"}]))
        layers.append(line.mark_rule(strokeDash=[5, 4], color=colour("bad")))
        layers.append(
            line.mark_text(align="left", dx=5, y=8, color=colour("bad")).encode(text="limit:N")
        )
    return _plot(name, title, layers, rows, caption, [_zoom(), *_highlight("series")])


def log_labels(channel: str, number_format: str = ",~r") -> dict[str, Any]:
    """Vega-Lite's `axis` of a logarithmic "x" or "y": labels at 1, 2 and 5 of each decade.

    Within one decade every tick has a label; across more than four, only the first tick of each.
    `number_format` is D3's (https://d3js.org/d3-format).
    """
    decades = f"log(domain('{channel}')[1] / domain('{channel}')[0]) / LN10"
    digit = "round(datum.value / pow(10, floor(log(datum.value) / LN10 + 1e-9)))"
    chosen = (
        f"{decades} < 1 ? true : {decades} > 4 ? {digit} == 1 : indexof([1, 2, 5], {digit}) >= 0"
    )
    return {
        "format": number_format,
        "labelExpr": f"({chosen}) ? format(datum.value, '{number_format}') : ''",
    }


def _plot(
    name: str,
    title: str,
    layers: Sequence[Any],
    rows: Sequence[Row],
    caption: str,
    parameters: Sequence[Any],
    *,
    height: int | None = None,
) -> Plot:
    """A plot of layers; `rows` are the data of layers without their own."""
    chart = alt.layer(*layers, data=_data(rows)).add_params(*parameters)
    if height is not None:
        chart = chart.properties(height=height)
    with alt.theme.enable("none"), alt.data_transformers.enable(consolidate_datasets=False):
        spec = chart.to_dict(
            validate=False
        )  # Everything but the rows was validated above, and rows take long.
    spec.pop("$schema", None)  # This is Altair's own version, but the page contains another one.
    return Plot(name, title, spec, caption)


def _data(rows: Iterable[Row]) -> Any:
    return alt.Data(values=list(rows))


def _names(rows: Iterable[Row], key: str | None) -> list[str]:
    return (
        list(dict.fromkeys(str(row[key]) for row in rows if row.get(key) is not None))
        if key
        else []
    )


def _axis(channel: Any, field: str, title: str, log: bool = False, *, zero: bool = False) -> Any:
    """A quantitative axis with a margin of half a point at its ends, or starting at zero."""
    axis = channel(field=field, type="quantitative", title=title)
    if log:
        return axis.scale(type="log", nice=False, padding=10).axis(
            **log_labels(channel.__name__.lower())
        )
    return axis.scale(zero=True) if zero else axis.scale(zero=False, nice=False, padding=6)


def _colour(
    series: str | None,
    names: Sequence[str] = (),
    plot: str = "",
    *,
    roles: Mapping[str, str] | None = None,
    legend: bool = True,
) -> Any:
    """Colour by series, or by the phase in the plot's name."""
    if series is None:
        return alt.value(colour(phase_of_name(plot) or "series1"))
    roles = colours_of(names) if roles is None else roles
    channel = alt.Color(field=series, type="nominal", title=None)
    channel = channel.scale(**colour_scale(roles)) if roles else channel
    # The number of columns with room for the longest name, at about 7 pixels per letter.
    columns = alt.expr(f"max(1, floor(width / {7 * max(map(len, roles), default=0) + 32}))")
    return channel.legend(columns=columns) if legend else channel.legend(None)


def _zoom() -> Any:
    """Drag to move, Ctrl and the wheel to zoom, so that scrolling a page does not zoom a chart."""
    return alt.selection_interval(
        name="zoom", bind="scales", on=DRAG, translate=DRAG, zoom="wheel![event.ctrlKey]"
    )


def _highlight(series: str | None) -> list[Any]:
    """A click on a name in the legend highlights its series."""
    return [alt.selection_point(name="chosen", fields=[series], bind="legend")] if series else []


def _faded(series: str | None, opacity: float = 1.0) -> Any:
    """A lower opacity than `opacity` while another series is selected."""
    if series is None:
        return alt.value(opacity)
    return alt.condition(*_highlight(series), alt.value(opacity), alt.value(opacity * 0.15))


def _tooltips(rows: Sequence[Row]) -> list[Any]:
    """Tooltips with every key of the rows, numbers with four digits."""
    found = []
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row[key] for row in rows if row.get(key) is not None]
        if values and all(
            isinstance(value, (int, float)) and not isinstance(value, bool) for value in values
        ):
            whole = all(float(value).is_integer() for value in values if math.isfinite(value))
            found.append(
                alt.Tooltip(field=key, type="quantitative", format="," if whole else ".4~g")
            )
        else:
            found.append(alt.Tooltip(field=key, type="nominal"))
    return found


def _ranks(series: str, values: Sequence[float], most: int = 400) -> list[dict[str, Any]]:
    """Sorted values with the share at or below each; at most `most`, evenly selected."""
    ordered = sorted(values)
    n = len(values)
    ranks = (
        range(n)
        if n <= most
        else sorted({round(index * (n - 1) / (most - 1)) for index in range(most)})
    )
    return [{"series": series, "value": ordered[rank], "share": (rank + 1) / n} for rank in ranks]
