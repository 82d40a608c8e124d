"""Words and tables of `twinphase roofline`. Not for what the numbers mean (`roofline_findings.py`)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from twinphase.bench.report.report import Column, Metric, Plot, Section, Status, Table, Verdict
from twinphase.bench.roofline.arithmetic import UNITS, Placed, Roofline
from twinphase.bench.roofline.ceilings import Sweep
from twinphase.bench.roofline.findings import OUTSIDE, TOLERANCE, Break, Finding
from twinphase.phases.hardware import Ceilings

__all__ = [
    "HOW_APART",
    "balance_table",
    "break_table",
    "ceilings_table",
    "check_table",
    "machine_verdict",
    "metrics",
    "part_table",
    "point_table",
    "rate_text",
    "section",
    "share",
    "verdicts",
]

MIB = 1 << 20
UNKNOWN = "unknown"
SHORT = {"linear layers": "linear", "attention": "attn.", "other operations": "other", OUTSIDE: "rest"}
MFU = "sum over units of FLOP / measured peak, over the measured time"
MBU = "bytes (weights once a step, KV read and written) / bandwidth of a step's working set, over the measured time"
HOW_APART = (
    "Linear layers and attention apart: the step's captured program runs with a clock reading wherever the part "
    "changes, inside the compiled loop. Whole steps are timed without readings; both kinds alternate. The parts count "
    f"as the whole step's where both forward passes take the same time within {TOLERANCE:.0%}. Other operations are "
    "the embedding, norms, rotation and writing of KV, SwiGLU and quantizing of activations; outside the forward pass "
    "are scheduling, inputs, the waking of threads, and sampling."
)


def rate_text(rate: float | None, unit: str) -> str:
    """A rate with its prefix: "911 GFLOP/s"; operations of int8 are counted as FLOP too."""
    if rate is None:
        return UNKNOWN
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rate >= (10 if prefix == "T" else 1) * size:
            return f"{rate / size:,.{0 if rate >= 100 * size else 1}f} {prefix}{unit}"
    return f"{rate:,.0f} {unit}"


def share(value: float | None) -> str:
    """A fraction in percent; above 100 % with a mark."""
    if value is None:
        return UNKNOWN
    return f"{value:.1%}" + (" (!)" if value > 1 else "")


def milliseconds(seconds: float) -> str:
    """Three or four significant digits."""
    return f"{seconds * 1e3:,.{2 if seconds < 0.1 else 1 if seconds < 1 else 0}f}"


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Median ± half the range."""
    middle, half = statistics.median(values), (max(values) - min(values)) / 2
    return f"{middle:,.{digits}f} ±{half:,.{digits}f}"


def ceilings_table(sweep: Sweep) -> Table:
    """One column a number of threads: the best ever measured, and this run's median beside it."""
    definition = "best ever measured, and in brackets the median of this run"
    columns = [Column("ceiling", "GFLOP/s (a multiply-add is two), and GB/s read from a working set of all threads")]
    columns += [Column(_threads(threads), definition) for threads in sorted(sweep.best)]
    rows = []
    for unit in UNITS:
        cells = [
            _both(best.peak(unit), [one.peak(unit) for one in sweep.runs.get(threads, ())])
            for threads, best in sorted(sweep.best.items())
        ]
        rows.append((f"{unit}, GFLOP/s", *cells))
    for size in sorted({size for best in sweep.best.values() for size, _ in best.bandwidth}):
        cells = [
            _both(
                dict(best.bandwidth).get(size), [dict(one.bandwidth).get(size) for one in sweep.runs.get(threads, ())]
            )
            for threads, best in sorted(sweep.best.items())
        ]
        rows.append((f"{size // MIB} MiB, GB/s", *cells))
    return Table("Ceilings by number of threads: best ever measured (median of this run)", tuple(columns), tuple(rows))


def _threads(count: int) -> str:
    return f"{count} threads" if count > 1 else "1 thread"


def _both(best: float | None, runs: Sequence[float | None]) -> str:
    if best is None:
        return "none"
    known = [value for value in runs if value is not None]
    return f"{best / 1e9:,.0f}" + (f" ({statistics.median(known) / 1e9:,.0f})" if known else "")


def balance_table(line: Roofline) -> Table:
    """Balance point of each unit on each memory."""
    definition = "peak of the unit / bandwidth, FLOP a byte: work of a lower intensity is bound by this memory"
    columns = (Column("memory"), Column("GB/s"), *(Column(roof.unit, definition) for roof in line.roofs))
    rows = []
    for slope in line.slopes:
        cells = (f"{roof.rate / slope.rate:,.1f}" for roof in line.roofs)
        rows.append((slope.name, f"{slope.rate / 1e9:,.0f}", *cells))
    return Table("Balance points, FLOP/byte", columns, tuple(rows))


def _what(finding: Finding) -> tuple[str, ...]:
    point = finding.point
    return (f"{point.tokens:,}",) if point.phase == "prefill" else (f"{point.batch:,}", f"{point.tokens:,}")


def point_table(found: Sequence[Finding], phase: str) -> Table:
    """Whole steps of one phase: speed, and where the time goes."""
    chosen = [one for one in found if one.point.phase == phase]
    prefill = phase == "prefill"
    first = (Column("prompt", "tokens"),) if prefill else (Column("batch"), Column("context", "tokens"))
    parts = ("linear layers", "attention", "other operations", OUTSIDE)
    columns = (
        *first,
        Column("tokens/s", "prompt / time of its steps" if prefill else "batch / time of a step") ,
        Column("ms", "of the prompt's steps" if prefill else "of a step"),
        *(Column(SHORT[name], f"{name}: share of the time of the steps with clock readings") for name in parts),
        Column("MFU", MFU),
        Column("MBU", MBU),
        Column("bound", "the ceiling that explains more of the time, and at least half of it"),
    )  # fmt: skip
    rows = []
    for one in chosen:
        shares = (f"{one.parts[name] / one.split_seconds:.0%}" if one.adds_up else "void" for name in parts)
        whole = one.whole
        rows.append((*_what(one), spread(one.tokens_per_second), milliseconds(one.seconds), *shares, share(whole.mfu),
                     share(whole.mbu), whole.bound))  # fmt: skip
    return Table(f"{phase.capitalize()}: whole steps", columns, tuple(rows))


def part_table(found: Sequence[Finding], phase: str) -> Table:
    """Linear layers and attention of one phase under the roofline."""
    first = (Column("prompt", "tokens"),) if phase == "prefill" else (Column("batch"), Column("context", "tokens"))
    columns = (
        *first,
        Column("part"),
        Column("FLOP/byte", "arithmetic intensity: FLOP of the algorithm / bytes it must move"),
        Column("GFLOP/s"),
        Column("GB/s"),
        Column("MFU", MFU),
        Column("MBU", MBU),
        Column("bound"),
    )
    rows = []
    for one in found:
        if one.point.phase != phase:
            continue
        for name, placed in (("linear", one.linear), ("attention", one.attention)):
            cells = _cells(placed) if one.adds_up else ("void",) * 6
            rows.append((*_what(one), name, *cells))
    return Table(f"{phase.capitalize()}: parts under the roofline", columns, tuple(rows))


def _cells(placed: Placed) -> tuple[str, ...]:
    intensity = UNKNOWN if placed.intensity is None else f"{placed.intensity:,.1f}"
    return (intensity, f"{placed.rate / 1e9:,.1f}", f"{placed.byte_rate / 1e9:,.1f}", share(placed.mfu),
            share(placed.mbu), placed.bound)  # fmt: skip


def check_table(found: Sequence[Finding]) -> Table:
    """Whether reading the clock changed the steps."""
    columns = (
        Column("point"),
        Column("forward pass, ms", "median, without readings"),
        Column("with readings, ms", "median"),
        Column("difference", "median over repetitions of with / without - 1"),
    )
    rows = []
    for one in found:
        plain, split = ([getattr(s, name) for s in one.samples] for name in ("forward", "split_forward"))
        mark = "" if one.adds_up else " (!)"
        rows.append((str(one.point), milliseconds(statistics.median(plain)), milliseconds(statistics.median(split)),
                     f"{one.disagreement:+.1%}{mark}"))  # fmt: skip
    return Table("Do the parts add up to whole steps?", columns, tuple(rows))


def break_table(found: Sequence[Break]) -> Table:
    """Break-even batches."""
    columns = (
        Column("context", "tokens"),
        Column("of"),
        Column("predicted", "smallest batch whose FLOP need longer at the peaks than its bytes at the bandwidth"),
        Column("measured", "time of batch 1 / time that one more sequence adds at the largest batches; range"),
    )
    rows = []
    for one in found:
        if one.measured_to == 1:
            measured = "not measured"
        elif one.knee is None:
            measured = f"none up to {one.measured_to}"
        else:
            low, high = min(one.knees, default=one.knee), max(one.knees, default=one.knee)
            measured = f"{one.knee:.1f} ({low:.1f} to {high:.1f})"
        rows.append((f"{one.context:,}", one.what, str(one.predicted), measured))
    return Table("The batch from which decode is bound by compute", columns, tuple(rows))


# Verdicts
def verdicts(line: Roofline, found: Sequence[Finding], breaks: Sequence[Break]) -> list[Verdict]:
    """The findings, most important first."""
    result = [*_over(found), *_adding_up(found)]
    for one in breaks:
        if one.measured_to > 1:
            result.append(_break_verdict(one))
    sound = [one for one in found if one.adds_up]
    prefills = [one for one in sound if one.point.phase == "prefill"]
    decodes = [one for one in sound if one.point.phase == "decode" and one.point.batch == 1]
    result += [_bound_verdict(longest, "compute") for longest in prefills[-1:]]
    result += [_bound_verdict(single, "memory") for single in decodes[:1]]
    result.append(machine_verdict(line))
    return result


def machine_verdict(line: Roofline) -> Verdict:
    """The balance point that matters most."""
    if not line.roofs or not line.slopes:
        return Verdict(Status.UNKNOWN, "The balance point is unknown.", "a peak or a bandwidth is unknown")
    roof, slope = line.roofs[0], line.slopes[-1]
    balance, memory = roof.rate / slope.rate, slope.name.partition(",")[0]
    text = (
        f"{line.title}: {roof.unit} {rate_text(roof.rate, 'FLOP/s')} / {memory} {rate_text(slope.rate, 'B/s')} = "
        f"balance at {balance:,.{0 if balance >= 10 else 1}f} FLOP/byte ({line.source})."
    )
    return Verdict(Status.INFO, text)


def _over(found: Sequence[Finding]) -> list[Verdict]:
    result = []
    for one in found:
        for name, placed in one.placed:
            if placed.over_ceiling:
                text = f"{one.point}, {name}: MFU {share(placed.mfu)}, MBU {share(placed.mbu)}."
                result.append(Verdict(Status.VOID, text, "above 100 %: the count or the ceiling is wrong"))
    return result


def _adding_up(found: Sequence[Finding]) -> list[Verdict]:
    if not found:
        return []
    wrong = [one for one in found if not one.adds_up]
    worst = max(found, key=lambda one: abs(one.disagreement))
    text = f"The parts add up to whole steps within {TOLERANCE:.0%} at {len(found) - len(wrong)} of {len(found)} points"
    text += f"; the largest difference is {worst.disagreement:+.1%} at {worst.point}."
    if not wrong:
        return [Verdict(Status.HOLDS, text)]
    return [Verdict(Status.FAILS, text, "the parts of the other points are void; repeat on a quieter machine")]


def _break_verdict(one: Break) -> Verdict:
    context = f"at {one.context:,} tokens of context"
    predicted = {"unknown": "at an unknown batch", "never": "at no batch"}.get(
        str(one.predicted), f"from batch {one.predicted} on"
    )
    text = f"Decode, {one.what}, {context}: bound by compute {predicted} by the ceilings"
    if one.knee is None:
        return Verdict(Status.INFO, f"{text}; measured times show no knee up to batch {one.measured_to}.")
    return Verdict(Status.INFO, f"{text}; measured times turn upwards at batch {one.knee:.1f}.")


def _bound_verdict(one: Finding, wanted: str) -> Verdict:
    placed = one.linear
    number = f"MFU {share(placed.mfu)}" if wanted == "compute" else f"MBU {share(placed.mbu)}"
    text = f"The linear layers of {one.point} are bound by {wanted} ({number})."
    if placed.bound == wanted:
        return Verdict(Status.HOLDS, text)
    if placed.bound == "unknown":
        return Verdict(Status.UNKNOWN, text, "a ceiling is unknown")
    if placed.bound == "overhead":
        return Verdict(Status.FAILS, text, "neither ceiling explains half of their time")
    return Verdict(Status.FAILS, text, f"they are bound by {placed.bound}")


# Numbers for comparing
def metrics(sweep: Sweep | None, found: Sequence[Finding]) -> list[Metric]:
    """Every measured quantity with its repetitions."""
    result: list[Metric] = []
    for threads, runs in sorted(sweep.runs.items()) if sweep else ():
        result += _ceiling_metrics(threads, runs)
    for one in found:
        phase = one.point.phase
        definition = "prompt tokens / time of their steps" if phase == "prefill" else "batch / time of a decode step"
        result.append(Metric(f"{one.point} tok/s", "tok/s", "higher", one.tokens_per_second, definition))
        for part in ("linear", "attention"):
            values = tuple(sample.parts[part] for sample in one.samples)
            result.append(Metric(f"{one.point} {part} seconds", "s", "lower", values, "with clock readings between"))
    return result


def _ceiling_metrics(threads: int, runs: Sequence[Ceilings]) -> list[Metric]:
    result = []
    for unit in UNITS:
        peaks = tuple(peak for one in runs if (peak := one.peak(unit)) is not None)
        if peaks:
            name = f"peak[unit={unit},threads={threads}]"
            result.append(Metric(name, "FLOP/s", "higher", peaks, "best of short rounds; a multiply-add is two"))
    for size, _ in runs[0].bandwidth:
        values = tuple(dict(one.bandwidth)[size] for one in runs)
        name = f"bandwidth[MiB={size // MIB},threads={threads}]"
        result.append(Metric(name, "B/s", "higher", values, "bytes read a second, best of short rounds"))
    return result


def section(title: str, tables: Sequence[Table], plots: Sequence[Plot] = (), paragraphs: Sequence[str] = ()) -> Section:
    """A section without its empty tables."""
    shown = tuple(table for table in tables if table.rows)
    return Section(title, paragraphs=tuple(paragraphs), tables=shown, plots=tuple(plots))
