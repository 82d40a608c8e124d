"""Writes an explanation as one HTML file, drawn by the scripts of the live page.

The file contains its script, its style and its data, and needs no network. Its policy (CSP) allows
only that script and that style, by their hashes. Data becomes text nodes, never markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from twinphase.errors import StorageError
from twinphase.explain.alone import alone_sentences

# Each module comes after the modules that it imports.
MODULES = ("dom", "lane", "draw", "figures", "explained")
IMPORT_OR_EXPORT = re.compile(r"^(import .*? from \".*?\";\n|export )", re.MULTILINE | re.DOTALL)
HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src {script_hash}; \
style-src {style_hash}; base-uri 'none'; form-action 'none'">
<title>twinphase explain</title>
<style>{style}</style>
</head>
<body>
<main><section id="explained"></section></main>
<script type="application/json" id="found">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def write_page(found: Mapping[str, Any], timeline: Mapping[str, Any] | None, file: Path) -> None:
    """Write the page of an explanation.

    Args:
        found: explanation from `explain_source.py`.
        timeline: result of `explain_source.timeline_of`; without it no lane is drawn.
        file: file to write.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        file.write_text(page(found, timeline), encoding="utf-8")
    except OSError as error:
        cause = f"The page cannot be written to {file}: {error.strerror}."
        raise StorageError(cause, "Give another file.") from None


def page(found: Mapping[str, Any], timeline: Mapping[str, Any] | None) -> str:
    """The page as text."""
    folder = files("twinphase.server") / "page"
    script = "".join(
        IMPORT_OR_EXPORT.sub("", (folder / f"{module}.js").read_text(encoding="utf-8"))
        for module in MODULES
    )
    style = (folder / "page.css").read_text(encoding="utf-8")
    data = json.dumps({"found": _drawn(found), "timeline": timeline})
    return HTML.format(
        script_hash=_hash(script),
        style_hash=_hash(style),
        style=style,
        # No text may end the element or open a comment.
        data=data.replace("<", "\\u003c"),
        script=script,
    )


def _drawn(found: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of an explanation that the page shows, with times in ms as from a server."""
    falls = found["waterfall"]
    is_client = found["kind"] == "client"
    counted = {"num_requests": found["num_requests"]} if is_client else {}
    return {
        **counted,
        "id": found["id"],
        "wall_ms": _ms(falls["wall_seconds"]),
        "first_token_ms": _ms(falls["first_token"]),
        "tpot_ms": _ms(found.get("tpot")),
        "ledger_ms": {bar["name"]: _ms(bar["seconds"]) for bar in falls["bars"]},
        "efficiency": found.get("efficiency"),
        "bounds": found.get("bounds"),
        "diagnoses": found["diagnoses"],
        "alone": [] if is_client else alone_sentences(found),
        "claims": [found["claims"]] if found.get("claims") else [],
        "unknown": found.get("unknown", ()),
        "levers": found["levers"],
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
