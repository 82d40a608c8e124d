"""The catalogue of models (`catalogue.toml`), and look-ups of names in it.

`hub.py` fetches models.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

# Suffixes of a model's name in file names: the format, and the number of a part.
_FORMAT = re.compile(r"([-._](i?q\d\w*|b?f16|f32|mxfp4|ud|imat|gguf|\d+-of-\d+))*", re.IGNORECASE)
_LATEST = ":latest"


@dataclass(frozen=True)
class Entry:
    """A model in the catalogue; `catalogue.toml` explains the fields."""

    name: str
    source: str
    repo: str
    size: int
    licence: str
    context: int
    aliases: tuple[str, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    system: str | None = None
    shape: str | None = None
    version: str | None = None
    file: str | None = None
    sha256: str | None = None
    wheel_sha256: str | None = None

    @property
    def tried(self) -> bool:
        """Whether this project has fetched and run the model, so that its content is pinned."""
        return self.version is not None

    @property
    def packages(self) -> str | None:
        """Its packages in canonical form; None if it comes from a model hub."""
        kind, _, rest = self.source.partition(":")
        return rest if kind == "pypi" else None

    @property
    def typed(self) -> tuple[str, ...]:
        """Its short names, in Ollama's form."""
        latest = [alias + _LATEST for alias in self.aliases if ":" not in alias]
        return (self.name, *self.aliases, *latest)

    @property
    def names(self) -> tuple[str, ...]:
        """All its names, including those of packages and repositories."""
        _, _, place = self.source.partition(":")
        place = place.partition(":")[0]
        return tuple(dict.fromkeys([*self.typed, self.source, place, self.repo, f"hf:{self.repo}"]))


@cache
def entries() -> tuple[Entry, ...]:
    import tomllib

    table = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text())
    return tuple(
        Entry(name, **{**fields, "aliases": tuple(fields.get("aliases", ()))})
        for name, fields in table.items()
    )


def find(name: str) -> Entry | None:
    """The entry with a short name; upper and lower case are equal."""
    return next((entry for entry in entries() if name.lower() in entry.typed), None)


def other_names(name: str) -> tuple[str, ...]:
    """All names of the model with this name; empty if it is not in the catalogue."""
    wanted = name.lower()
    for entry in entries():
        if wanted in map(str.lower, entry.names):
            return entry.names
    return ()


def of_file(path: Path) -> Entry | None:
    """The entry for a file or folder, by the name that the model's makers gave it."""
    for entry in entries():
        stem = entry.repo.rpartition("/")[2].lower()
        before, found, after = path.name.lower().partition(stem)
        # Some quantizers add the makers' name and an underscore at the front.
        if found and (not before or before.endswith("_")) and _FORMAT.fullmatch(after):
            return entry
    return None


def near(text: str, cutoff: float = 0.6) -> list[str]:
    """Similar names, the closest first: of the same family, or with another spelling."""
    text = text.lower().removesuffix(_LATEST)
    names = [name for entry in entries() for name in (entry.name, *entry.aliases)]
    family = [name for name in names if text and name.partition(":")[0] == text.partition(":")[0]]
    close = difflib.get_close_matches(text, names, n=3, cutoff=cutoff)
    return list(dict.fromkeys([*close, *family]))[:4]


def search(words: str) -> list[Entry]:
    """Entries with all words in a name, a repository or the licence; without words, all entries."""
    wanted = words.lower().split()
    return [
        entry
        for entry in entries()
        if all(
            any(word in text.lower() for text in (*entry.names, entry.licence)) for word in wanted
        )
    ]
