"""Names of the parts of a split GGUF file in llama.cpp's form: `m-00001-of-00003.gguf`."""

from __future__ import annotations

import re

_PART = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


def part_names(name: str) -> list[str]:
    """All parts, given the name or path of the first; for any other file only its own name."""
    match = _PART.fullmatch(name)
    if not match or int(match[2]) != 1:
        return [name]
    start, _, of, count, suffix = match.groups()
    return [f"{start}{number:05}{of}{count}{suffix}" for number in range(1, int(count) + 1)]


def is_later_part(name: str) -> bool:
    """Whether this is a part of a split file other than the first."""
    match = _PART.fullmatch(name)
    return match is not None and int(match[2]) != 1
