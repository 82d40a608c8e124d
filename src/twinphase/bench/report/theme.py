"""How charts look, in one place: what a spec says by role ("role:prefill") becomes a colour here, light or dark.

A spec names roles and never colours, so that prefill and decode have the same two colours in every chart of every
report, and one spec serves a light and a dark page. Colours of series are Okabe and Ito's, which people with any
colour vision tell apart (https://jfly.uni-koeln.de/color/), darkened or lightened for contrast with the page.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["DARK", "LIGHT", "PHASES", "SERIES", "Theme", "drawable", "dressed"]

# Names of series that mean a phase, wherever they occur; longer names may follow them ("prefill, 512 tokens").
PHASES = ("prefill", "decode")
SERIES = tuple(f"role:series{number}" for number in range(1, 7))
SHADES = {phase: tuple(f"role:{phase}{number}" for number in ("", 2, 3, 4)) for phase in PHASES}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"


@dataclass(frozen=True)
class Theme:
    """Colours by role, and the settings of Vega-Lite made of them."""

    name: str
    roles: Mapping[str, str]

    @property
    def config(self) -> dict[str, Any]:
        """Vega-Lite's `config` (https://vega.github.io/vega-lite/docs/config.html)."""
        text, muted, grid = self.roles["text"], self.roles["muted"], self.roles["grid"]
        words = {"labelColor": muted, "titleColor": text, "labelFontSize": 12, "titleFontSize": 12}
        return {
            "background": self.roles["surface"],
            "font": FONT,
            "padding": 4,
            "view": {"stroke": None},
            "axis": {
                **words,
                "gridColor": grid,
                "domainColor": muted,
                "tickColor": muted,
                "titleFontWeight": 500,
                "titlePadding": 10,
                "labelOverlap": True,
                "labelLimit": 220,
            },
            "axisX": {"grid": False},
            "axisXQuantitative": {"tickCount": {"expr": "ceil(width / 90)"}},
            "legend": {
                **words,
                "orient": "top",
                "symbolSize": 90,
                "symbolOpacity": 1,
                "symbolBaseFillColor": muted,  # of shapes whose colour means something else
                "symbolBaseStrokeColor": muted,
                "labelLimit": 320,
            },
            "header": words,
            "title": {"color": text, "anchor": "start", "fontSize": 14, "fontWeight": 600, "offset": 12},
            "range": {"category": [self.roles[name.partition(":")[2]] for name in SERIES]},
            "mark": {"color": self.roles["series1"], "tooltip": None},
            "line": {"strokeWidth": 2},
            "point": {"size": 45, "filled": True},
            "rule": {"color": muted, "strokeWidth": 1.5},
            "text": {"color": text, "fontSize": 12},
            "bar": {"cornerRadiusEnd": 2},
        }


LIGHT = Theme(
    "light",
    {
        "surface": "#ffffff",
        "text": "#1b1f24",
        "muted": "#59636e",
        "grid": "#e4e7eb",
        "prefill": "#0067b0",
        "prefill2": "#5ba3dc",
        "prefill3": "#003a66",
        "prefill4": "#7d94a8",
        "decode": "#c24a00",
        "decode2": "#eb9350",
        "decode3": "#6e2a00",
        "decode4": "#a3887a",
        "good": "#00795a",
        "bad": "#b3261e",
        "neutral": "#8a939e",
        "series1": "#007d64",
        "series2": "#a8488a",
        "series3": "#a87800",
        "series4": "#3d8fc7",
        "series5": "#5b4bb0",
        "series6": "#6b7280",
    },
)
DARK = Theme(
    "dark",
    {
        "surface": "#161a20",
        "text": "#e8eaed",
        "muted": "#a3adb8",
        "grid": "#2c333c",
        "prefill": "#56b4e9",
        "prefill2": "#2a7fb8",
        "prefill3": "#b5def7",
        "prefill4": "#8ba3b3",
        "decode": "#f08a3c",
        "decode2": "#b85c1a",
        "decode3": "#ffcfa3",
        "decode4": "#b09a8c",
        "good": "#3ecf9f",
        "bad": "#ff7b72",
        "neutral": "#8a939e",
        "series1": "#2bc4a0",
        "series2": "#e08cc4",
        "series3": "#f0c94a",
        "series4": "#7fa8f0",
        "series5": "#b6a8ff",
        "series6": "#b3bac2",
    },
)


def drawable(spec: Mapping[str, Any], theme: Theme) -> dict[str, Any]:
    """A spec with the colours of a theme in place of roles."""
    found: dict[str, Any] = _replaced(dressed(spec), theme.roles)
    return {**found, "config": theme.config}


def _replaced(value: Any, roles: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        # Data may hold any text, and text is not a role.
        return {key: item if key == "values" else _replaced(item, roles) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(item, roles) for item in value]
    if isinstance(value, str) and value.startswith("role:"):
        return roles[value.removeprefix("role:")]
    return value


def dressed(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a spec in which each nominal colour has a role, the same in all layers, and axes can be read."""
    found: dict[str, Any] = copy.deepcopy(dict(spec))
    for encoding, _ in _encodings(found, []):
        for name in ("x", "y"):
            _label(encoding.get(name), name)
    channels = [(channel, rows) for channel, rows in _channels(found) if "scale" not in channel]
    names = {channel["field"]: _domain(channel) for channel, _ in _channels(found)}
    for channel, rows in channels:
        known = names[channel["field"]]
        for row in rows:
            value = str(row[channel["field"]]) if row.get(channel["field"]) is not None else ""
            if value and value not in known:
                known.append(value)
    for channel, _ in channels:
        domain = names[channel["field"]]
        if domain:
            channel["scale"] = {"domain": domain, "range": _roles(domain)}
            channel.setdefault("legend", {})
            if isinstance(channel["legend"], dict):
                # As many columns as there is room for the longest name, at about 7 pixels a letter.
                entry = 7 * max(map(len, domain)) + 32
                channel["legend"].setdefault("columns", {"expr": f"max(1, floor(width / {entry}))"})
    for encoding, _ in _encodings(found, []):
        shape = encoding.get("shape")
        if isinstance(shape, dict) and names.get(shape.get("field", "")):
            shape.setdefault("scale", {"domain": names[shape["field"]]})  # one legend for colour and shape
    return found


def _channels(spec: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Every nominal colour channel, with the rows that its layer draws."""
    for encoding, rows in _encodings(spec, []):
        for name in ("color", "fill", "stroke"):
            channel = encoding.get(name)
            if isinstance(channel, dict) and channel.get("type") == "nominal" and "field" in channel:
                yield channel, rows


def _encodings(spec: dict[str, Any], rows: list[Any]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Every layer's encoding, with the rows that it draws."""
    rows = spec.get("data", {}).get("values", rows)
    if "encoding" in spec:
        yield spec["encoding"], rows
    for key in ("layer", "hconcat", "vconcat", "concat"):
        for part in spec.get(key, ()):
            yield from _encodings(part, rows)
    if isinstance(spec.get("spec"), dict):
        yield from _encodings(spec["spec"], rows)


def _domain(channel: dict[str, Any]) -> list[str]:
    """The names that a channel gives colours to by itself."""
    domain = (channel.get("scale") or {}).get("domain")
    return list(domain) if isinstance(domain, list) else []


def _label(channel: Any, name: str) -> None:
    """Give a logarithmic axis labels at 1, 2 and 5 of each decade.

    Within one decade every tick has one, across many only each decade's first; other ticks stay bare. A number is
    written by the axis' own format (https://d3js.org/d3-format).
    """
    if not isinstance(channel, dict) or (channel.get("scale") or {}).get("type") != "log":
        return
    axis = channel.get("axis", {})
    if axis is None or "labelExpr" in axis or "values" in axis:
        return
    span = f"log(domain('{name}')[1] / domain('{name}')[0]) / LN10"
    digit = "round(datum.value / pow(10, floor(log(datum.value) / LN10 + 1e-9)))"
    chosen = f"{span} < 1 ? true : {span} > 4 ? {digit} == 1 : indexof([1, 2, 5], {digit}) >= 0"
    labels = f"({chosen}) ? format(datum.value, '{axis.get('format', ',~r')}') : ''"
    channel["axis"] = {**axis, "labelExpr": labels}


def _roles(names: list[str]) -> list[str]:
    """A role for each name: a shade of its phase, the first the phase's own; then the series' in order."""
    roles: list[str] = []
    for name in names:
        phase = next((phase for phase in PHASES if name.lower().startswith(phase)), None)
        free = [role for role in (SHADES[phase] if phase else SERIES) if role not in roles]
        roles.append(free[0] if free else SERIES[len(roles) % len(SERIES)])
    return roles
