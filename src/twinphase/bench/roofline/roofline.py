"""`twinphase roofline`: this machine's ceilings, and where a model's two phases stand under them, as a `Report`.

Joins measuring (`roofline_ceilings.py`, `roofline_measure.py`), meaning (`roofline_findings.py`), words
(`roofline_report.py`) and drawings (`roofline_plots.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from twinphase.batch import StepWork
from twinphase.bench.conditions import Bystanders, conditions
from twinphase.bench.progress import Progress
from twinphase.bench.report.report import Plot, Report, Section, Status, Verdict
from twinphase.bench.roofline import plots
from twinphase.bench.roofline import report as words
from twinphase.bench.roofline.arithmetic import Roofline, datasheet_roofline, linear_part, measured_roofline
from twinphase.bench.roofline.ceilings import Sweep, measure_ceilings, thread_counts
from twinphase.bench.roofline.findings import Break, Finding, breaks, findings
from twinphase.bench.roofline.measure import QUIET_CORES, ModelPoints, Settings, measure_model
from twinphase.bench.roofline.plots import Mark
from twinphase.config import available_cores
from twinphase.errors import InvalidRequestError
from twinphase.estimate.datasheets import find_datasheet
from twinphase.phases.hardware import Ceilings, cache_levels

__all__ = ["Drawing", "datasheet_report", "roofline", "settings_of"]

MIB = 1 << 20
STEADY = 0.85  # of the best bandwidth known: below it the present one is told


@dataclass(frozen=True)
class Drawing:
    """What a report is drawn from: for a terminal, too."""

    report: Report
    line: Roofline
    marks: Sequence[Mark]


def roofline(
    model: str | None,
    settings: Settings,
    ceiling_repetitions: int = 3,
    progress: Progress = lambda what, done, total: None,
) -> Drawing:
    """Measure this machine, and a model on it.

    Args:
        model: as `twinphase run` takes it; None measures the machine alone.
        settings: of the model's points.
        ceiling_repetitions: of the ceilings.
        progress: told what is measured.

    Raises:
        TwinphaseError: the model cannot be found, read or run, or the ceilings could not be measured.
    """
    threads, isa = settings.threads or available_cores(), settings.isa
    counts = sorted({*thread_counts(available_cores()), threads})
    with Bystanders() as others:
        sweep = measure_ceilings(counts, isa, ceiling_repetitions, progress)
        points = None if model is None else measure_model(model, replace(settings, threads=threads), progress)
        found = []
        if points:  # what memory gives changes: measured on both sides of the model
            sweep = sweep.with_more(measure_ceilings([threads], isa, ceiling_repetitions, progress))
            found = findings(points, sweep.now(threads))
        if points and any(placed.over_ceiling for one in found for _, placed in one.placed):
            # A ceiling that was taken on a busy machine is too low: once more, before the counts are doubted.
            sweep = sweep.with_more(measure_ceilings([threads], isa, ceiling_repetitions, progress))
            found = findings(points, sweep.now(threads))
    ceilings = sweep.now(threads)
    line = measured_roofline(ceilings, cache_levels(threads))
    turns = breaks(points, found, ceilings) if points else []
    marks = _marks(found)
    report = Report(
        kind="roofline",
        title=f"Roofline of {points.loaded.checkpoint.path.name if points else 'this machine'}",
        verdicts=tuple(words.verdicts(line, found, turns)),
        conditions=_conditions(points, settings, threads, ceilings, ceiling_repetitions),
        noise=tuple(_noise(sweep, threads, points, others)),
        sections=tuple(_sections(sweep, line, points, found, turns, marks)),
        metrics=tuple(words.metrics(sweep, found)),
        data=_data(sweep, line, points, turns),
    )
    return Drawing(report, line, marks)


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Settings from the command line's options, of which those left out are not in `given`.

    Raises:
        InvalidRequestError: a list that is none, or a value out of range.
    """
    values = {name: given[name] for name in Settings.__dataclass_fields__ if name in given}
    for name in ("prompt_lengths", "batches", "contexts"):
        if name in values:
            try:
                values[name] = tuple(int(word) for word in values[name].split(","))
            except ValueError:
                option = name.replace("_", "-")
                raise InvalidRequestError(f"--{option} is {values[name]!r}.", "Use numbers such as 1,2,4.") from None
    return Settings(**values)


def datasheet_report(name: str, model: str | None = None) -> Drawing:
    """The roofline of a datasheet: published numbers, nothing measured.

    Raises:
        InvalidRequestError: no such datasheet, one without bandwidth or peaks, or a model, which is not there.
    """
    if model is not None:
        raise InvalidRequestError(
            "A model cannot be measured on hardware that is not here.",
            "Leave out MODEL, or use `twinphase estimate` for what it would do there.",
        )
    sheet = find_datasheet(name, "Leave --hardware out to measure this machine, or use")
    line = datasheet_roofline(sheet)
    if not line.roofs or not line.slopes:
        raise InvalidRequestError(
            f"The datasheet of {sheet.title} has no {'peak' if line.slopes else 'bandwidth'}.", "Choose another."
        )
    caption = "Published peaks, dense: nothing here was measured. " + sheet.note
    section = Section(
        "Datasheet",
        paragraphs=tuple(
            [*(f"Source: {source.title}, {source.address} ({', '.join(source.figures)})." for source in sheet.sources),
             *(f"Computed: {figure}: {formula}." for figure, formula in sheet.computed.items()), sheet.note]
        ),
        tables=(words.balance_table(line),),
        plots=(plots.roofline_plot(line, (), caption.strip()),),
    )  # fmt: skip
    report = Report(
        kind="roofline",
        title=f"Roofline of {sheet.title}, from its datasheet",
        verdicts=(words.machine_verdict(line), Verdict(Status.INFO, "Datasheet: published, not measured here.")),
        conditions={"hardware": sheet.title, "source": "datasheet; nothing was measured"},
        sections=(section,),
        data={"hardware": sheet.name, "figures": sheet.figures(), "source": "datasheet"},
    )
    return Drawing(report, line, ())


def _conditions(
    points: ModelPoints | None, settings: Settings, threads: int, ceilings: Ceilings, ceiling_repetitions: int
) -> dict[str, str]:
    flags: dict[str, object] = {
        "ceilings": f"{ceiling_repetitions} repetitions before and after; bandwidth is the best of these, peaks the "
        "best of these and of earlier runs"
    }
    if points is None:
        return conditions(threads=threads, isa=ceilings.isa, flags=flags)
    shape, units = points.shape, points.units
    flags |= {
        "repetitions": f"{min(map(len, points.samples.values()))}, all points in turn; figures are medians",
        "decode steps": f"{settings.steps} whole and {settings.steps} in parts a repetition",
        "largest prefill chunk": f"{settings.max_num_batched_tokens} tokens",
        "KV cache": f"{settings.kv_cache_dtype}, {shape.kv_token_bytes:,} bytes a token",
        "weights": f"{shape.linear_bytes + shape.head_bytes:,} bytes read a step",
        "units": f"linear layers {units.linear}; attention {units.scores} (scores), {units.values} (values)",
    }
    return conditions(model=points.loaded.checkpoint.path, threads=threads, isa=ceilings.isa, flags=flags)


def _noise(sweep: Sweep, threads: int, points: ModelPoints | None, others: Bystanders) -> list[str]:
    lines = [others.noise()]
    runs = sweep.runs[threads]
    rates = ([one.peak("int8") or 0.0 for one in runs], [one.bandwidth[-1][1] for one in runs])
    spreads = [max(many) / min(many) - 1 for many in rates if min(many)]
    if len(runs) > 1 and len(spreads) == 2:
        lines.append(
            f"Between {len(runs)} repetitions the int8 peak of {threads} threads varied by {spreads[0]:.0%}, the "
            f"bandwidth of the largest working set by {spreads[1]:.0%}."
        )
    seen, known_best = max(one.bandwidth[-1][1] for one in runs), sweep.best[threads].bandwidth[-1][1]
    if seen < STEADY * known_best:
        lines.append(
            f"This run saw at most {seen / 1e9:,.1f} of the {known_best / 1e9:,.1f} GB/s that were once measured here "
            f"for the largest working set. MBU counts from what it gave in this run. Neighbours on "
            "shared hardware may take bandwidth; no counter here shows it."
        )
    if sweep.problem:
        lines.append(f"The ceilings could not be kept for later runs: {sweep.problem}.")
    if points is None:
        return lines
    samples = [sample for many in points.samples.values() for sample in many]
    known = [sample.others for sample in samples if sample.others is not None]
    if known:
        disturbed = sum(value > QUIET_CORES for value in known)
        lines.append(
            f"While points were measured others used {statistics.median(known):.2f} cores (median; at most "
            f"{max(known):.2f}); {disturbed} of {len(known)} samples stayed disturbed (above {QUIET_CORES} cores)."
        )
    spread = [(max(rates) - min(rates)) / statistics.median(rates) / 2 for rates in
              ([s.tokens / s.seconds for s in many] for many in points.samples.values())]  # fmt: skip
    lines.append(
        f"Half the range of a point's tokens/s is {statistics.median(spread):.0%} of its median (median point)."
    )
    return [*lines, *(f"Left out: {reason}." for reason in points.left_out)]


def _sections(
    sweep: Sweep,
    line: Roofline,
    points: ModelPoints | None,
    found: Sequence[Finding],
    turns: Sequence[Break],
    marks: Sequence[Mark],
) -> list[Section]:
    caption = "Solid lines: bandwidth by working set; dashed: peaks of the arithmetic units; crosses: balance points."
    if marks:
        caption += " Points: medians; the labels are prompt lengths, batches and contexts of a line's ends."
    drawn = (plots.roofline_plot(line, marks, caption),) if line.roofs and line.slopes else ()
    machine = words.section(
        "The machine", [words.balance_table(line), words.ceilings_table(sweep)], plots=(*drawn, _thread_plot(sweep))
    )
    if points is None:
        return [machine]
    sections = [machine]
    for phase in ("prefill", "decode"):
        tables = [words.point_table(found, phase), words.part_table(found, phase)]
        if phase == "decode":
            tables.insert(0, words.break_table(turns))
        sections.append(
            words.section(phase.capitalize(), tables, plots=tuple(_phase_plots(points, sweep, found, turns, phase)))
        )
    how = words.section("How the parts were timed", [words.check_table(found)], paragraphs=(words.HOW_APART,))
    return [*sections, how]


def _thread_plot(sweep: Sweep) -> Plot:
    rows = [
        {
            "MiB": size // MIB,
            "GB/s": round(rate / 1e9, 1),
            "threads": f"{threads} threads" if threads > 1 else "1 thread",
        }
        for threads, best in sorted(sweep.best.items())
        for size, rate in best.bandwidth
    ]
    return plots.thread_plot(rows, "The best ever measured, reads only.")


def _phase_plots(
    points: ModelPoints, sweep: Sweep, found: Sequence[Finding], turns: Sequence[Break], phase: str
) -> list[Plot]:
    sound = [one for one in found if one.adds_up and one.point.phase == phase]
    caption = "Steps with clock readings between the parts; the repetition of median time."
    if phase == "prefill":
        rows = _stack(sound, "prompt, tokens", "µs a token", lambda one: one.point.tokens, 1e6)
        title = "Prefill: attention's share grows with the prompt"
        return (
            [plots.stacked_plot("prefill-parts", title, rows, "prompt, tokens", "µs a token", caption)] if rows else []
        )
    result = []
    by_context = [one for one in sound if one.point.batch == 1]
    by_batch = [one for one in sound if one.point.tokens == _batch_context(sound)]
    if len(by_batch) > 1:
        result += [_batching_plot(points, sweep, by_batch, turns)]
        rows = _stack(by_batch, "batch", "ms a step", lambda one: one.point.batch, 1e3)
        title = f"Decode: where a step's time goes, by batch (context {by_batch[0].point.tokens:,})"
        result.append(plots.stacked_plot("decode-by-batch", title, rows, "batch", "ms a step", caption))
    if len(by_context) > 1:
        rows = _stack(sorted(by_context, key=lambda one: one.point.tokens), "context, tokens", "ms a step",
                      lambda one: one.point.tokens, 1e3)  # fmt: skip
        title = "Decode: where a step's time goes, by context (batch 1)"
        result.append(plots.stacked_plot("decode-by-context", title, rows, "context, tokens", "ms a step", caption))
    return result


def _batch_context(found: Sequence[Finding]) -> int:
    """The context at which batches were measured: the one with the largest batch."""
    return max(found, key=lambda one: one.point.batch).point.tokens if found else 0


def _stack(found: Sequence[Finding], x: str, y: str, at: Any, scale: float) -> list[dict[str, Any]]:
    """Rows of a stacked plot: seconds of each part, for prefill those of a token."""
    rows = []
    for one in found:
        tokens = one.point.tokens if one.point.phase == "prefill" else 1
        rows += [{x: at(one), y: round(spent * scale / tokens, 4), "part": part} for part, spent in one.parts.items()]
    return rows


def _batching_plot(points: ModelPoints, sweep: Sweep, by_batch: Sequence[Finding], turns: Sequence[Break]) -> Plot:
    from twinphase.phases.hardware import compute_seconds, memory_seconds

    context = by_batch[0].point.tokens
    ceilings = sweep.now(points.loaded.config.threads or available_cores())
    measured = [(one.point.batch, statistics.median(s.parts["linear"] for s in one.samples)) for one in by_batch]
    ideal = []
    for batch in range(1, by_batch[-1].point.batch + 1):
        part = linear_part(
            points.shape, points.units, StepWork(batch, 0, batch * context, batch, batch), batch * context
        )
        compute = compute_seconds(part.flops, ceilings)
        memory = memory_seconds(part.bytes, part.working_set, ceilings)
        if compute is not None and memory is not None:
            ideal.append((batch, max(compute, memory)))
    turn = next((one for one in turns if one.context == context and one.what == "linear layers"), None)
    caption = (
        f"Linear layers at context {context:,}. At the ceilings: the longer of weights / bandwidth and FLOP / peak. "
        "The knee is time of batch 1 / time that one more sequence adds at the largest batches."
    )
    return plots.batching_plot(
        measured, ideal, turn.predicted.batch if turn else None, turn.knee if turn else None, caption
    )


def _marks(found: Sequence[Finding]) -> list[Mark]:
    """The parts to be drawn, series by series."""
    context = _batch_context([one for one in found if one.point.phase == "decode"])
    marks = []
    for part in ("linear", "attention"):
        for series in ("prefill", "batch", "context"):
            for one in _series(found, series, context):
                placed = one.linear if part == "linear" else one.attention
                if not one.adds_up or placed.intensity is None or placed.rate <= 0:
                    continue
                # Linear layers do not depend on the context.
                if series == "context" and part == "linear":
                    continue
                label = {"prefill": f"n = {one.point.tokens:,}", "batch": f"batch {one.point.batch}",
                         "context": f"context {one.point.tokens:,}"}[series]  # fmt: skip
                facts = {"MFU": words.share(placed.mfu), "MBU": words.share(placed.mbu), "bound by": placed.bound}
                marks.append(
                    Mark(one.point.phase, part, f"{series} {part}", label, placed.intensity, placed.rate, facts)
                )
    return marks


def _series(found: Sequence[Finding], series: str, context: int) -> list[Finding]:
    if series == "prefill":
        return sorted((one for one in found if one.point.phase == series), key=lambda one: one.point.tokens)
    decodes = [one for one in found if one.point.phase == "decode"]
    if series == "batch":
        return sorted((one for one in decodes if one.point.tokens == context), key=lambda one: one.point.batch)
    return sorted((one for one in decodes if one.point.batch == 1), key=lambda one: one.point.tokens)


def _data(sweep: Sweep, line: Roofline, points: ModelPoints | None, turns: Sequence[Break]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "ceilings": {
            "best": [asdict(best) for _, best in sorted(sweep.best.items())],
            "runs": [asdict(one) for _, runs in sorted(sweep.runs.items()) for one in runs],
        },
        "roofline": asdict(line),
        "balance points": [
            {"unit": roof.unit, "memory": slope.name, "flop_per_byte": balance}
            for roof, slope, balance in line.balances
        ],
    }
    if points is not None:
        data["samples"] = {str(point): [asdict(sample) for sample in many] for point, many in points.samples.items()}
        data["breakeven"] = [{**asdict(one), "predicted": str(one.predicted)} for one in turns]
        data["left out"] = list(points.left_out)
    return data
