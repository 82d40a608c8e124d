"""The options of `twinphase roofline`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from twinphase import EngineConfig, Options, with_options
from twinphase_bench.commands.publish import save_report, show_report

MODEL_OPTIONS = Options(
    EngineConfig,
    only={"threads", "tensor_parallel_size", "isa", "backend", "device", "dtype", "kv_cache_dtype"}
    | {"max_num_batched_tokens"},
)


@with_options(engine=MODEL_OPTIONS)
def roofline(
    model: str = typer.Argument(
        None,
        help="GGUF file, pypi:NAME, hf:ORG/REPO[:FILE] or ollama:NAME. [default: the machine "
        "alone]",
    ),
    prompt_lengths: str = typer.Option(
        None, help="Prompt lengths of the prefills, in tokens. [default: 16,64,256,512,...,4096]"
    ),
    batches: str = typer.Option(None, help="Batch sizes of the decodes. [default: 1,2,...,64]"),
    batch_context: int = typer.Option(
        None, help="Tokens of context of each batched sequence. [default: 256]"
    ),
    contexts: str = typer.Option(
        None, help="Contexts of the decodes at batch 1, in tokens. [default: 64,256,1024,4096]"
    ),
    repetitions: int = typer.Option(None, help="Repetitions of every point. [default: 5]"),
    steps: int = typer.Option(None, help="Decode steps per repetition. [default: 8]"),
    ceiling_repetitions: int = typer.Option(3, min=1, help="Repetitions of the ceilings."),
    out: Path = typer.Option(
        None, help="Write the report (HTML, PNG, JSON, Markdown) to this folder."
    ),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON instead of tables."),
    *,
    engine: dict[str, Any],
) -> None:
    """Measure this machine's roofline, and place both phases of a model under it."""
    given = {name: value for name, value in locals().items() if value is not None}
    if out is not None:
        from twinphase_bench.extras import note_missing_plots

        note_missing_plots()
    from twinphase import live
    from twinphase_bench.roofline.roofline import roofline as measure
    from twinphase_bench.roofline.roofline import settings_of

    settings = settings_of(given, engine)
    with live("twinphase roofline") as progress:
        report = measure(model, settings, ceiling_repetitions, progress)
    show_report(report, json, tables="all")
    if out is not None:
        save_report(report, out)
