"""A report as one HTML page with its text, charts, drawing program, and JSON.

The page needs no network, and its policy (CSP) forbids requests. The template escapes text from
outside; data is in a script element that is not executed. `assets/` has the layout, and `theme.py`
the colours.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from twinphase import __version__
from twinphase_bench.extras import require
from twinphase_bench.report.report import Report, Table
from twinphase_bench.report.theme import COLOURS, THEMES, config

NO_NUMBER = ("", "-", "unknown", "none", "n/a")
NUMBER = re.compile(r"[<>≤≥~≈±+−-]*\s*[\d.,]*\d")


def page(report: Report, result: str) -> str:
    """The page of a report; it contains `result`, the text of `result.json`."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number_columns"] = _number_columns
    environment.filters["anchor"] = lambda number: f"section-{number}"
    colours = "".join(
        f"--{role}: light-dark({light}, {dark}); " for role, (light, dark) in COLOURS.items()
    )
    style = f":root {{ {colours}}}\n{_asset('page.css')}"
    program = _asset("page.js")
    drawing = _drawing_program()
    return environment.from_string(_asset("page.html.j2")).render(
        report=report,
        version=__version__,
        # Only these two scripts and this style are allowed, and nothing is fetched.
        policy=f"default-src 'none'; script-src {_hash(drawing)} {_hash(program)}; style-src "
        f"{_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        drawing=Markup(drawing),
        program=Markup(program),
        result=_inert(result),
        themes=_inert(json.dumps({theme: config(theme) for theme in THEMES})),
    )


def _number_columns(table: Table) -> list[bool]:
    """The columns with numbers, which are aligned right; empty cells do not count."""
    columns = zip(*(row[1:] for row in table.rows), strict=True)
    found = [all(NUMBER.match(cell) or cell in NO_NUMBER for cell in column) for column in columns]
    return [False, *found] if found else [False for _ in table.columns]


def _inert(text: str) -> Markup:
    """JSON escaped so that it cannot end its script element or open a comment."""
    return Markup(
        text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    )


def _asset(name: str) -> str:
    return (
        resources.files("twinphase_bench.report")
        .joinpath("assets", name)
        .read_text(encoding="utf-8")
    )


@functools.cache
def _drawing_program() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    program: str = require("vl_convert").javascript_bundle()
    if re.search(r"</script|<!--|\r", program, re.IGNORECASE):
        raise ValueError("the drawing program cannot be embedded in a page")
    return program


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
