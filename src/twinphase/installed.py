"""How this copy of twinphase was installed, for hints that install more of it."""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Of a clone: the folder that has `src`.
ROOT = Path(__file__).parents[2]


def install_command(extra: str) -> str:
    """The command that adds an extra to this copy: from its clone, its wheel, or the index."""
    return f"{_pip()} install {_source(extra)}"


def _pip() -> str:
    """pip of this environment; with its path where it is not the first one on the PATH."""
    own = Path(sys.prefix) / "bin" / "pip"
    first = next(
        (
            path
            for folder in os.environ.get("PATH", "").split(os.pathsep)
            if (path := Path(folder) / "pip").exists()
        ),
        None,
    )
    if not own.exists() or first == own:
        return "pip"
    here = Path.cwd()
    return str(own.relative_to(here) if own.is_relative_to(here) else own)


def _source(extra: str) -> str:
    if (ROOT / "pyproject.toml").is_file():
        return f"-e '.[{extra}]'" if Path.cwd() == ROOT else f"-e '{ROOT}[{extra}]'"
    try:
        found = json.loads(metadata.distribution("twinphase").read_text("direct_url.json") or "{}")
        url = str(found.get("url", ""))
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        url = ""
    path = unquote(urlsplit(url).path) if url.startswith("file:") else ""
    # Where the file or folder is gone, the index may have it.
    return f"'{path}[{extra}]'" if path and Path(path).exists() else f"'twinphase[{extra}]'"
