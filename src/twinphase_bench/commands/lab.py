"""`twinphase lab`: tests claims about prefill and decode on this machine."""

from __future__ import annotations

from pathlib import Path

import typer

from twinphase import DEFAULT_MODEL
from twinphase_bench.commands.publish import save_report, show_report


def lab(
    model: str = typer.Argument(
        DEFAULT_MODEL, help="GGUF file, pypi:NAME, hf:ORG/REPO[:FILE] or ollama:NAME."
    ),
    only: list[str] = typer.Option([], help="Try only this claim, by number or name; repeatable."),
    list_: bool = typer.Option(
        False, "--list", help="List the claims and their rules without measuring."
    ),
    quick: bool = typer.Option(
        False, "--quick", help="Try only the claims that are decided in about a minute."
    ),
    seconds: float = typer.Option(
        None, help="Seconds of measuring; sizes shrink to fit. [default: 151 for all claims]"
    ),
    threads: int = typer.Option(None, min=1, help="Compute threads. [default: all cores]"),
    isa: str = typer.Option(None, help="Force an instruction-set path, e.g. avx2."),
    out: Path = typer.Option(
        None, help="Folder for the report. [default: twinphase-lab-DATE-TIME]"
    ),
    recordings: Path = typer.Option(
        None, help="Folder: record each variant there, to open on a server's live page."
    ),
    json: bool = typer.Option(
        False, "--json", help="Print the report as JSON; write files only with --out."
    ),
) -> None:
    """Test claims about prefill and decode on this machine: verdicts, numbers and plots."""
    from twinphase_bench.extras import note_missing_plots
    from twinphase_bench.lab.lab import EXPERIMENTS, choose, planned_seconds, run_lab
    from twinphase_bench.lab.report import make_report

    experiments = choose(only, quick)
    if list_:
        _list()
        return
    note_missing_plots()
    from twinphase import live

    if seconds is None and only and not quick:
        # A lone experiment gets twice its time, for more repetitions.
        seconds = min(planned_seconds(EXPERIMENTS), 2 * planned_seconds(experiments))
    config = {
        name: value for name, value in (("threads", threads), ("isa", isa)) if value is not None
    }
    with live("twinphase lab", percent=True) as progress:
        setting, conclusions, bystanders = run_lab(
            model,
            experiments=experiments,
            seconds=seconds,
            recordings=recordings,
            progress=progress,
            **config,
        )
    report = make_report(setting, conclusions, bystanders)
    show_report(report, json, tables="none")
    if out or not json:
        save_report(report, out)


def _list() -> None:
    """Print claims and rules without measuring anything."""
    from rich.markup import escape
    from rich.padding import Padding

    from twinphase import answers
    from twinphase_bench.lab.lab import EXPERIMENTS

    console = answers()
    for number, experiment in enumerate(EXPERIMENTS, 1):
        console.print(
            f"[bold]{number:>2} {experiment.name}[/]  {escape(experiment.claim)}", soft_wrap=True
        )
        for rule in experiment.rules:
            text = escape(f"{rule.name}: {experiment.limit(rule)}")
            console.print(Padding(f"[dim]{text}", (0, 0, 0, 3), expand=False))
