"""`twinphase search`, and the catalogue's part of `twinphase show`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from twinphase.arguments import JSON
from twinphase.errors import ModelNotFoundError

if TYPE_CHECKING:
    from twinphase.weights.catalogue import Entry

UNTRIED = "not tried by this project: its size is approximate and no hash is known"


def search(
    words: list[str] = typer.Argument(None, help="Parts of a name or licence; all must occur."),
    json: bool = JSON,
) -> None:
    """Search the models that can be fetched by name; without a word, list all of them."""
    from twinphase.terminal import answers, note, print_json
    from twinphase.weights import catalogue

    text = " ".join(words or ())
    found = catalogue.search(text)
    if json:
        print_json([catalogue_facts(entry) for entry in found])
        return
    if not found:
        near = catalogue.near(text)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise ModelNotFoundError(
            f"No model of the catalogue fits {text[:80]!r}.",
            f"{hint}`twinphase search` lists all; others come as hf:ORG/REPO[:FILE], ollama:NAME "
            "or a .gguf file.",
        )
    answers().print(_table(found))
    note("`twinphase run NAME` fetches and runs one, `twinphase show NAME` says more of it.")
    if not all(entry.tried for entry in found):
        note("untried: this project has not fetched and run it; its size is approximate.")


def catalogue_facts(entry: Entry) -> dict[str, Any]:
    """The entry as plain values; "sha256" exists only for files that this project has tried."""
    return {
        "name": entry.name,
        "names": list(entry.names),
        "source": entry.source,
        "repository": entry.repo,
        "bytes": entry.size,
        "licence": entry.licence,
        "context_length": entry.context,
        "sampling": dict(entry.sampling),
        "tried": entry.tried,
        "sha256": entry.sha256,
    }


def catalogue_lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The catalogue's facts as rows; empty for a model that is not in it."""
    if not facts:
        return
    yield "names", ", ".join(facts["names"])
    yield "source", facts["source"]
    yield "licence", f"{facts['licence']}, by its makers: huggingface.co/{facts['repository']}"
    yield (
        "sampling",
        ", ".join(f"{name} {value:g}" for name, value in facts["sampling"].items())
        or "its makers recommend nothing",
    )
    yield "content", "tried, and pinned by SHA-256" if facts["tried"] else UNTRIED


def show_catalogued(entry: Entry) -> None:
    """Print the catalogue's facts about a model that was not fetched."""
    from rich.text import Text

    from twinphase.commands.estimate_view import grid
    from twinphase.terminal import answers, describe_bytes, note

    about = "" if entry.tried else "about "
    console = answers()
    console.print(Text(f"{entry.name}: not on this machine", "bold"))
    rows = [
        ("size", f"{about}{describe_bytes(entry.size)}"),
        ("context", f"{entry.context:,} tokens"),
        *catalogue_lines(catalogue_facts(entry)),
    ]
    console.print(grid(rows))
    note(f"`twinphase pull {entry.name}` fetches it.")


def _table(found: list[Entry]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from twinphase.terminal import describe_bytes
    from twinphase.weights.hub import cached_model

    table = Table(box=SIMPLE_HEAD)
    for title in ("name", "also", "size", "context", "licence", "state"):
        right = title in ("size", "context")
        table.add_column(title, justify="right" if right else "left", no_wrap=title == "name")
    for entry in found:
        here = "here" if cached_model(entry.name) else ""
        state = [here] if here else []
        state += [] if entry.tried else ["untried"]
        table.add_row(
            entry.name,
            ", ".join(entry.aliases),
            describe_bytes(entry.size),
            f"{entry.context:,}",
            entry.licence,
            ", ".join(state),
        )
    return table
