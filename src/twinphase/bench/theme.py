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

__all__ = ["DARK", "LIGHT", "SERIES", "Theme", "coloured", "drawable"]

# Names of series that mean a phase, wherever they occur; longer names may follow them ("prefill, 512 tokens").
PHASES = ("prefill", "decode")
SERIES = tuple(f"role:series{number}" for number in range(1, 7))
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
            "legend": {**words, "orient": "top", "symbolType": "circle", "symbolSize": 90, "symbolStrokeWidth": 0},
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
        "decode": "#c24a00",
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
        "decode": "#f08a3c",
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
    found: dict[str, Any] = _replaced(coloured(spec), theme.roles)
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


def coloured(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a spec in which each nominal colour has a role, phases their own, the same in all layers."""
    found: dict[str, Any] = copy.deepcopy(dict(spec))
    channels = [(channel, rows) for channel, rows in _channels(found, []) if "scale" not in channel]
    names: dict[str, list[str]] = {}
    for channel, rows in channels:
        known = names.setdefault(channel["field"], [])
        for row in rows:
            value = str(row[channel["field"]]) if row.get(channel["field"]) is not None else ""
            if value and value not in known:
                known.append(value)
    for channel, _ in channels:
        domain = names[channel["field"]]
        if domain:
            channel["scale"] = {"domain": domain, "range": _roles(domain)}
    return found


def _channels(spec: dict[str, Any], rows: list[Any]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Every nominal colour channel, with the rows that its layer draws."""
    rows = spec.get("data", {}).get("values", rows)
    for name in ("color", "fill", "stroke"):
        channel = spec.get("encoding", {}).get(name)
        if isinstance(channel, dict) and channel.get("type") == "nominal" and "field" in channel:
            yield channel, rows
    for key in ("layer", "hconcat", "vconcat", "concat"):
        for part in spec.get(key, ()):
            yield from _channels(part, rows)
    if isinstance(spec.get("spec"), dict):
        yield from _channels(spec["spec"], rows)


def _roles(names: list[str]) -> list[str]:
    """A role for each name: its phase's own, the first time; then the series' in order."""
    roles: list[str] = []
    others = 0
    for name in names:
        phase = next((f"role:{phase}" for phase in PHASES if name.lower().startswith(phase)), None)
        if phase is None or phase in roles:
            phase = SERIES[others % len(SERIES)]
            others += 1
        roles.append(phase)
    return roles
