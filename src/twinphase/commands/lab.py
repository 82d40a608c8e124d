"""`twinphase lab`: what is said of prefill and decode, tried on this machine."""

from __future__ import annotations

from pathlib import Path

import typer

from twinphase.arguments import DEFAULT_MODEL

__all__ = ["lab"]


def lab(
    model: str = typer.Argument(DEFAULT_MODEL, help="GGUF file, pypi:NAME or hf:ORG/REPO[:FILE]."),
    only: list[str] = typer.Option([], help="Number or name of an experiment; repeatable."),
    list_: bool = typer.Option(False, "--list", help="List the claims and their rules; nothing is measured."),
    quick: bool = typer.Option(False, "--quick", help="A minute of measuring instead of three and a half."),
    seconds: float = typer.Option(None, help="Time to measure; sizes shrink to fit."),
    threads: int = typer.Option(None, min=1, help="Compute threads; all cores if left out."),
    isa: str = typer.Option(None, help="Force an instruction-set path, e.g. avx2."),
    out: Path = typer.Option(None, help="Folder for the report; twinphase-lab-DATE-TIME if left out."),
    json: bool = typer.Option(False, "--json", help="The report as JSON on stdout; files only with --out."),
) -> None:
    """Try every claim about prefill and decode on this machine: verdicts with numbers and plots, in minutes."""
    from twinphase.bench.extras import require
    from twinphase.bench.lab.lab import EXPERIMENTS, QUICK_SECONDS, SECONDS, choose
    from twinphase.bench.lab.lab import lab as measure
    from twinphase.bench.lab.terminal import list_experiments, show

    experiments = choose(only)
    if list_:
        list_experiments(EXPERIMENTS)
        return
    if out is not None or not json:
        require("vl_convert")  # before minutes are spent
    from twinphase.bench.progress import live
    from twinphase.bench.report.render import write_report
    from twinphase.bench.report.result import result_json
    from twinphase.terminal import note

    if seconds is None:
        whole = QUICK_SECONDS if quick else SECONDS
        # Alone, an experiment gets twice its share, for more repetitions.
        share = sum(one.share for one in experiments) / sum(one.share for one in EXPERIMENTS)
        seconds = whole * min(1.0, 2 * share)
    config = {name: value for name, value in (("threads", threads), ("isa", isa)) if value is not None}
    with live("twinphase lab", percent=True) as progress:
        report, findings = measure(model, experiments=experiments, seconds=seconds, progress=progress, **config)
    if json:
        print(result_json(report))
    else:
        show(report, findings)
    if out is None and json:
        return
    import time

    folder = out or Path(time.strftime("twinphase-lab-%Y%m%d-%H%M%S"))
    note(f"Report: {write_report(report, folder).html}")
