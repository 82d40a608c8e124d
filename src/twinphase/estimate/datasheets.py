"""Published peaks of hardware, from `datasheets.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from twinphase.errors import InvalidRequestError

FILE = Path(__file__).with_name("datasheets.toml")


@dataclass(frozen=True)
class Source:
    """A document, and the figures that it states: "bandwidth", "memory" or precisions."""

    title: str
    address: str
    figures: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Datasheet:
    """One product's published peaks.

    Attributes:
        name: value of `--hardware`.
        bandwidth: bytes per second of its memory; None is unpublished.
        memory: bytes of the largest configuration; None if it depends on what is installed.
        peaks: dense operations per second by precision in `PRECISIONS`; missing ones are
            unpublished.
        sources: the documents that state the figures.
        computed: formulas over published parts, for figures without a document.
    """

    name: str
    title: str
    bandwidth: float | None = None
    memory: float | None = None
    peaks: Mapping[str, float] = field(default_factory=dict)
    sources: tuple[Source, ...]
    computed: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def figures(self) -> dict[str, float]:
        """Every known figure by name."""
        memory = {"bandwidth": self.bandwidth, "memory": self.memory}
        return {name: value for name, value in memory.items() if value is not None} | dict(
            self.peaks
        )


def _read() -> dict[str, Datasheet]:
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    sheets = {}
    for name, fields in data["hardware"].items():
        sources = [
            data["documents"][key] | {"figures": figures}
            for key, figures in fields["sources"].items()
        ]
        sheets[name] = msgspec.convert({**fields, "name": name, "sources": sources}, Datasheet)
    return sheets


DATASHEETS: Mapping[str, Datasheet] = _read()


def find_datasheet(name: str, instead: str = "") -> Datasheet:
    """The datasheet of that name, or the only one whose name begins with it.

    Args:
        name: name of a product; case does not matter.
        instead: alternative for the user, as the start of "... one of: NAMES".

    Raises:
        InvalidRequestError: no product matches, or several do; the message names them.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    if wanted in DATASHEETS:
        return DATASHEETS[wanted]
    found = [known for known in DATASHEETS if wanted and known.startswith(wanted)]
    if len(found) == 1:
        return DATASHEETS[found[0]]
    if found:
        raise InvalidRequestError(
            f"--hardware {name!r} matches {len(found)} products: {', '.join(found)}.",
            "Name one of them.",
        )
    raise InvalidRequestError(
        f"There is no datasheet of {name[:100]!r}.",
        f"{instead or 'Use'} one of: {', '.join(DATASHEETS)}.",
    )
