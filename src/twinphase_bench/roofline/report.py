"""The text and the tables of `twinphase roofline`; `findings.py` evaluates the numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from twinphase import LinkRates
from twinphase.phases.hardware import NEITHER, Ceilings
from twinphase.phases.roofline import UNITS, Placed, Roofline
from twinphase_bench.report.report import Column, Metric, Status, Table, Verdict, table_of
from twinphase_bench.roofline.ceilings import CeilingSweep
from twinphase_bench.roofline.findings import MAX_DISAGREEMENT, OUTSIDE, PointFinding

MIB = 1 << 20
UNKNOWN = "unknown"
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
SHORT = {
    "linear layers": "linear",
    "attention": "attn.",
    "scans of recurrent layers": "scan",
    "other operations": "other",
    OUTSIDE: "rest",
}
EFFICIENCIES = (
    Column("MFU", "sum over units of FLOP / measured peak, over the measured time"),
    Column(
        "MBU",
        "bytes (weights once per step, KV read and written) / bandwidth of a working set, over the "
        "time",
    ),
    Column("bound", "the ceiling that explains more of the time, and at least half of it"),
)
HOW_APART = (
    "Linear layers and attention apart: the step's captured program runs with a clock reading "
    "wherever the part changes, inside the compiled loop. Whole steps are timed without readings; "
    "both kinds alternate. The parts count as the whole step's where both forward passes take the "
    f"same time within {MAX_DISAGREEMENT:.0%}. Scans update the states of recurrent layers, and "
    "are shown for models that have any; short convolutions count as such. Other operations are "
    "the embedding, norms, rotation and writing of KV, SwiGLU, gates and quantizing of "
    "activations; outside the forward pass are scheduling, inputs, the waking of threads, and "
    "sampling."
)


def rate_text(rate: float | None, unit: str) -> str:
    """A rate with its prefix: "911 GFLOP/s"; int8 operations count as FLOP too."""
    if rate is None:
        return UNKNOWN
    for size, prefix in PREFIXES:
        if rate >= (10 if prefix == "T" else 1) * size:
            return f"{rate / size:,.{0 if rate >= 100 * size else 1}f} {prefix}{unit}"
    return f"{rate:,.0f} {unit}"


def percent(value: float | None) -> str:
    """A fraction in percent, with a mark above 100 %."""
    return UNKNOWN if value is None else f"{value:.1%}" + (" (!)" if value > 1 else "")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.{2 if seconds < 0.1 else 1 if seconds < 1 else 0}f}"


# Tables of the machine
def ceilings_table(sweep: CeilingSweep) -> Table:
    """Each kept ceiling, and this run's median."""
    definition = "GFLOP/s (a multiply-add is two), and GB/s read from a working set of all threads"
    columns = (
        Column("ceiling", definition),
        Column("kept", "for later runs"),
        "median of this run",
    )
    kept = _rates(sweep.kept)
    runs = [_rates(run) for run in sweep.runs]
    rows = (
        (name, f"{rate / 1e9:,.0f}", f"{statistics.median(run[name] for run in runs) / 1e9:,.0f}")
        for name, rate in kept.items()
    )
    return table_of(f"Ceilings with {sweep.kept.threads} threads", columns, rows)


def _rates(ceilings: Ceilings) -> dict[str, float]:
    """Rates by their names in a table."""
    peaks = {
        f"{unit}, GFLOP/s": peak for unit in UNITS if (peak := ceilings.peak(unit)) is not None
    }
    return peaks | {f"{size // MIB} MiB, GB/s": rate for size, rate in ceilings.bandwidth}


def balance_table(line: Roofline) -> Table:
    """The balance point of each unit on each memory."""
    definition = (
        "peak of the unit / bandwidth, FLOP per byte: work of a lower intensity is bound by this "
        "memory"
    )
    units = [Column(roof.unit, definition) for roof in line.roofs]
    rows = [
        (
            slope.name,
            f"{slope.rate / 1e9:,.0f}",
            *(f"{roof.rate / slope.rate:,.1f}" for roof in line.roofs),
        )
        for slope in line.slopes
    ]
    return table_of("Balance points, FLOP/byte", ["memory", "GB/s", *units], rows)


def link_table(link: LinkRates) -> Table:
    """A table of the communication between ranks."""
    definition = (
        f"{link.ranks} ranks gather rows in shared memory, as a step does, and each reads them "
        "whole"
    )
    large, small = (
        f"{rows} row{'s' * (rows > 1)} of {4 * columns:,} bytes"
        for rows, columns in (link.large, link.small)
    )
    rows = ((large, f"{link.bandwidth / 1e9:,.1f} GB/s"), (small, f"{1e6 * link.latency:,.1f} µs"))
    columns = (Column("rows", definition), "best round")
    return table_of(f"What {link.ranks} ranks exchange", columns, rows)


# Tables of a model's points
def _point_columns(phase: str) -> list[Column]:
    if phase == "prefill":
        return [Column("prompt", "tokens")]
    return [Column("batch"), Column("context", "tokens")]


def _point_cells(one: PointFinding) -> list[str]:
    point = one.point
    tokens = f"{point.tokens:,}"
    return [tokens] if point.phase == "prefill" else [f"{point.batch:,}", tokens]


def _efficiency_cells(placed: Placed) -> tuple[str, ...]:
    return percent(placed.mfu), percent(placed.mbu), placed.bound


def point_table(found: Sequence[PointFinding], phase: str) -> Table:
    """Whole steps of one phase: speed (median ± half the range), and the time of each part."""
    prefill = phase == "prefill"
    names = {name: short for name, short in SHORT.items() if any(name in f.parts for f in found)}
    columns = (
        *_point_columns(phase),
        Column("tokens/s", "prompt / time of its steps" if prefill else "batch / time of a step"),
        Column("ms", "of the prompt's steps" if prefill else "of a step"),
        *(
            Column(short, f"{name}: share of the time of the steps with clock readings")
            for name, short in names.items()
        ),
        *EFFICIENCIES,
    )
    rows = []
    for one in found:
        if one.point.phase == phase:
            rates = one.tokens_per_second
            whole = sum(one.parts.values())
            speed = f"{statistics.median(rates):,.0f} ±{(max(rates) - min(rates)) / 2:,.0f}"
            shares = (f"{one.parts[name] / whole:.0%}" if one.adds_up else "void" for name in names)
            rows.append(
                (
                    *_point_cells(one),
                    speed,
                    _milliseconds(one.seconds),
                    *shares,
                    *_efficiency_cells(one.whole),
                )
            )
    return table_of(f"{phase.capitalize()}: whole steps", columns, rows)


def part_table(found: Sequence[PointFinding], phase: str) -> Table:
    """Linear layers and attention of one phase under the roofline."""
    intensity = Column(
        "FLOP/byte", "arithmetic intensity: FLOP of the algorithm / bytes it must move"
    )
    columns: list[Column | str] = [
        *_point_columns(phase),
        "part",
        intensity,
        "GFLOP/s",
        "GB/s",
        *EFFICIENCIES,
    ]
    rows = []
    for one in found:
        for name, placed in one.placed[1:] if one.point.phase == phase else ():
            cells: tuple[str, ...] = ("void",) * 6
            if one.adds_up:
                ratio = UNKNOWN if placed.intensity is None else f"{placed.intensity:,.1f}"
                speeds = (f"{placed.rate / 1e9:,.1f}", f"{placed.byte_rate / 1e9:,.1f}")
                cells = (ratio, *speeds, *_efficiency_cells(placed))
            rows.append((*_point_cells(one), name.removesuffix(" layers"), *cells))
    return table_of(f"{phase.capitalize()}: parts under the roofline", columns, rows)


# Verdicts
def verdicts(line: Roofline, found: Sequence[PointFinding], disturbance: str = "") -> list[Verdict]:
    """The findings, most important first; after a `disturbance` nothing is decided."""
    result = [
        Verdict(
            Status.VOID,
            f"{one.point}, {name}: MFU {percent(placed.mfu)}, MBU {percent(placed.mbu)}.",
            "above 100 %: the count or the ceiling is wrong",
        )
        for one in found
        for name, placed in one.placed
        if placed.over_ceiling
    ]
    if found:
        result.append(_adding_up(found))
    sound = [one for one in found if one.adds_up]
    prefills = [one for one in sound if one.point.phase == "prefill"]
    decodes = [one for one in sound if one.point.phase == "decode" and one.point.batch == 1]
    result += [_bound_verdict(longest, "compute") for longest in prefills[-1:]]
    result += [_bound_verdict(single, "memory") for single in decodes[:1]]
    if disturbance:
        firm = (Status.HOLDS, Status.FAILS)
        result = [
            replace(one, status=Status.UNKNOWN, reason=disturbance) if one.status in firm else one
            for one in result
        ]
    return [*result, machine_verdict(line)]


def machine_verdict(line: Roofline) -> Verdict:
    """The most important balance point."""
    if not line.roofs or not line.slopes:
        return Verdict(
            Status.UNKNOWN, "The balance point is unknown.", "a peak or a bandwidth is unknown"
        )
    roof = line.roofs[0]
    slope = line.slopes[-1]
    balance = roof.rate / slope.rate
    memory = slope.name.partition(",")[0]
    text = (
        f"{line.title}: {roof.unit} {rate_text(roof.rate, 'FLOP/s')} / {memory} "
        f"{rate_text(slope.rate, 'B/s')} = balance at {balance:,.{0 if balance >= 10 else 1}f} "
        "FLOP/byte (measured)."
    )
    return Verdict(Status.INFO, text)


def _adding_up(found: Sequence[PointFinding]) -> Verdict:
    right = [one for one in found if one.adds_up]
    worst = max(found, key=lambda one: abs(one.disagreement))
    text = (
        f"The parts add up to whole steps within {MAX_DISAGREEMENT:.0%} at {len(right)} of "
        f"{len(found)} points"
    )
    text += f"; the largest difference is {worst.disagreement:+.1%} at {worst.point}."
    if len(right) == len(found):
        return Verdict(Status.HOLDS, text)
    return Verdict(
        Status.FAILS, text, "the parts of the other points are void; repeat on a quieter machine"
    )


def _bound_verdict(one: PointFinding, wanted: str) -> Verdict:
    placed = one.linear
    number = f"MFU {percent(placed.mfu)}" if wanted == "compute" else f"MBU {percent(placed.mbu)}"
    text = f"The linear layers of {one.point} are bound by {wanted} ({number})."
    if placed.bound == wanted:
        return Verdict(Status.HOLDS, text)
    if placed.bound == UNKNOWN:
        return Verdict(Status.UNKNOWN, text, "a ceiling is unknown")
    reason = (
        "neither ceiling explains half of their time"
        if placed.bound in NEITHER
        else f"they are bound by {placed.bound}"
    )
    return Verdict(Status.FAILS, text, reason)


# Numbers for comparing
def metrics(sweep: CeilingSweep, found: Sequence[PointFinding]) -> list[Metric]:
    """All measured quantities with their repetitions."""
    result: list[Metric] = []
    for name in _rates(sweep.runs[0]):
        what, _, unit = name.partition(", ")
        title = f"peak[unit={what},threads={sweep.kept.threads}]"
        if unit == "GB/s":
            title = f"bandwidth[MiB={what.removesuffix(' MiB')},threads={sweep.kept.threads}]"
        values = tuple(_rates(run)[name] for run in sweep.runs)
        result.append(
            Metric(
                title, unit.removeprefix("G"), "higher", values, "per second, best of many rounds"
            )
        )
    for one in found:
        definition = "tokens of the prompt, or of a decode step / the time of its steps"
        result.append(
            Metric(f"{one.point} tok/s", "tok/s", "higher", one.tokens_per_second, definition)
        )
        for part in ("linear", "attention"):
            spent = tuple(sample.parts[part] for sample in one.samples)
            result.append(
                Metric(
                    f"{one.point} {part} seconds",
                    "s",
                    "lower",
                    spent,
                    "with clock readings between",
                )
            )
    return result
