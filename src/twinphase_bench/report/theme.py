"""The colours and the style of every chart, on a light and on a dark page.

Prefill is blue and decode is orange in every chart of every report. A chart names a role
("prefill", "muted"), never a colour, so that one specification serves both pages: roles are
parameters of Vega-Lite, which the `config` of a theme defines. Colours of series follow Okabe and
Ito (https://jfly.uni-koeln.de/color/), whose palette is distinguishable with any colour vision,
darkened or lightened for contrast with the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from twinphase.phases.colours import PAGE_COLOURS

THEMES = ("light", "dark")
# Colours by role: (on a light page, on a dark page).
COLOURS = {
    **PAGE_COLOURS,
    # Additional series of the same phase, such as "decode, batch 4" beside "decode, batch 1".
    "prefill2": ("#5ba3dc", "#2a7fb8"),
    "prefill3": ("#003a66", "#b5def7"),
    "prefill4": ("#7d94a8", "#8ba3b3"),
    "decode2": ("#eb9350", "#b85c1a"),
    "decode3": ("#6e2a00", "#ffcfa3"),
    "decode4": ("#a3887a", "#b09a8c"),
    # Series that do not belong to a phase, in order.
    "series1": ("#007d64", "#2bc4a0"),
    "series2": ("#a8488a", "#e08cc4"),
    "series3": ("#a87800", "#f0c94a"),
    "series4": ("#3d8fc7", "#7fa8f0"),
    "series5": ("#5b4bb0", "#b6a8ff"),
    "series6": ("#6b7280", "#b3bac2"),
    "good": ("#00795a", "#3ecf9f"),
    "bad": ("#b3261e", "#ff7b72"),
    "neutral": ("#8a939e", "#8a939e"),
    "surface": ("#ffffff", "#161a20"),
    "text": ("#1b1f24", "#e8eaed"),
    "muted": ("#59636e", "#a3adb8"),
    "grid": ("#e4e7eb", "#2c333c"),
}
SHADES = {phase: [phase, *(f"{phase}{number}" for number in (2, 3, 4))] for phase in PAGE_COLOURS}
SERIES = [f"series{number}" for number in range(1, 7)]
FONT = (
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', "
    "sans-serif"
)


def colour(role: str) -> dict[str, str]:
    """The colour of a role, in Vega-Lite's form."""
    if role not in COLOURS:
        raise ValueError(f"{role!r} is not a role: {', '.join(COLOURS)}")
    return {"expr": role}


def phase_of_name(name: str) -> str | None:
    """The phase at the start of a series's name ("prefill, 512 tokens"), or None."""
    return next((phase for phase in PAGE_COLOURS if name.lower().startswith(phase)), None)


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A role for each series: its phase's colour and then shades, or a colour without a phase."""
    roles: dict[str, str] = {}
    for name in dict.fromkeys(names):
        phase = phase_of_name(name)
        free = [role for role in (SHADES[phase] if phase else SERIES) if role not in roles.values()]
        roles[name] = free[0] if free else SERIES[len(roles) % len(SERIES)]
    return roles


def colour_scale(roles: Mapping[str, str]) -> dict[str, Any]:
    """Vega-Lite's `scale` of a colour channel, from names of series to roles."""
    return {"domain": list(roles), "range": [colour(role) for role in roles.values()]}


def config(theme: str) -> dict[str, Any]:
    """Vega-Lite's `config` for the "light" or the "dark" theme.

    See https://vega.github.io/vega-lite/docs/config.html.
    """
    roles = {role: pair[THEMES.index(theme)] for role, pair in COLOURS.items()}
    text = roles["text"]
    muted = roles["muted"]
    grid = roles["grid"]
    words = {"labelColor": muted, "titleColor": text, "labelFontSize": 12, "titleFontSize": 12}
    axis = {
        "gridColor": grid,
        "domainColor": muted,
        "tickColor": muted,
        "titleFontWeight": 500,
        "titlePadding": 10,
    }
    return {
        "params": [{"name": role, "value": value} for role, value in roles.items()],
        "background": roles["surface"],
        "font": FONT,
        "padding": 4,
        "view": {"stroke": None},
        "axis": {**words, **axis, "labelOverlap": True, "labelLimit": 220},
        "axisX": {"grid": False},
        "axisXQuantitative": {"tickCount": {"expr": "ceil(width / 90)"}},
        "legend": {
            **words,
            "orient": "top",
            "symbolSize": 90,
            "symbolOpacity": 1,
            "symbolBaseFillColor": muted,  # This is for shapes whose colour has another meaning.
            "symbolBaseStrokeColor": muted,
            "labelLimit": 320,
        },
        "header": words,
        "title": {
            "color": text,
            "anchor": "start",
            "fontSize": 14,
            "fontWeight": 600,
            "offset": 12,
        },
        "range": {"category": [roles[role] for role in SERIES]},
        "mark": {"color": roles["series1"], "tooltip": None},
        "line": {"strokeWidth": 2},
        "point": {"size": 45, "filled": True},
        "rule": {"color": muted, "strokeWidth": 1.5},
        "text": {"color": text, "fontSize": 12},
        "bar": {"cornerRadiusEnd": 2},
    }
