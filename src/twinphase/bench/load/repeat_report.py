"""What several runs of one load say together: how much its figures differ from run to run.

Not for one run (`load_report.py`), nor for running (`load_runs.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from twinphase.bench.load.run import LoadResult
from twinphase.bench.report.report import Column, Section, Status, Table, Verdict
from twinphase.bench.statistics import has_percentile, percentile

__all__ = ["runs_section", "runs_verdicts"]


def _p99(values: Sequence[float]) -> float | None:
    """Milliseconds; None where it would be the highest of a few by another name."""
    return 1e3 * percentile(values, 99) if has_percentile(len(values), 99) else None


FIGURES: tuple[tuple[str, str, Callable[[LoadResult], float | None]], ...] = (
    ("TTFT p50, ms", "median over the run's requests", lambda run: 1e3 * percentile(run.ttft, 50)),
    ("TTFT p99, ms", "nearest rank; of a hundred requests or more", lambda run: _p99(run.ttft)),
    ("TPOT p50, ms", "median over the run's requests", lambda run: 1e3 * percentile(run.tpot, 50)),
    ("E2E p50, ms", "median over the run's requests", lambda run: 1e3 * percentile(run.e2e, 50)),
    ("served, req/s", "succeeded / seconds", lambda run: run.request_rate),
    ("output, tok/s", "output tokens / seconds", lambda run: run.output_rate),
)


def runs_verdicts(results: Sequence[LoadResult]) -> list[Verdict]:
    """Which runs are void, and the range of the figures of the others."""
    found = [
        Verdict(Status.VOID, f"The client was the limit: run {number} of {len(results)} is void.", "; ".join(run.void))
        for number, run in enumerate(results, 1)
        if run.void
    ]
    sound = [run for run in results if not run.void and run.succeeded]
    if len(sound) > 1:
        ranges = [_range(name, [of_run(run) for run in sound]) for name, _, of_run in FIGURES]
        text = f"Over {len(sound)} runs with other prompts (median, lowest .. highest): {'; '.join(ranges)}."
        found.append(Verdict(Status.INFO, text))
    return found


def _range(name: str, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None and math.isfinite(value)]
    what, _, unit = name.partition(", ")
    if not known:
        return f"{what} unknown"
    return f"{what} {statistics.median(known):.4g} {unit} ({min(known):.4g} .. {max(known):.4g})"


def runs_section(results: Sequence[LoadResult]) -> Section:
    """A row a run."""
    columns = [Column("run"), *(Column(name, definition) for name, definition, _ in FIGURES)]
    columns += [Column("sent"), Column("failed"), Column("counts", "void: the client was the limit")]
    rows = []
    for number, run in enumerate(results, 1):
        cells = [_cell(of_run(run)) for _, _, of_run in FIGURES]
        ends = (str(len(run.observations)), str(sum(run.failures.values())), "void" if run.void else "yes")
        rows.append((str(number), *cells, *ends))
    return Section("Runs of the load", tables=(Table("Runs of the load", tuple(columns), tuple(rows)),))


def _cell(value: float | None) -> str:
    return "unknown" if value is None or not math.isfinite(value) else f"{value:,.4g}"
