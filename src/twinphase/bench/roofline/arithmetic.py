"""The roofline (Williams, Waterman and Patterson, 2009): what bounds work of a given arithmetic intensity.

A part of a step does so many FLOP on so many bytes: its arithmetic intensity. Below the balance point of a machine
(peak / bandwidth) the memory bounds it, above it the arithmetic unit. Rates come from measured `Ceilings` or from a
datasheet; nothing here measures, and what is unknown stays None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinphase.batch import StepWork
from twinphase.estimate.datasheets import Datasheet
from twinphase.phases.hardware import Ceilings, bound, compute_seconds, efficiency, memory_seconds
from twinphase.phases.report import Units
from twinphase.phases.work import ModelShape, kv_bytes_per_token, step_cost, weight_bytes_read

__all__ = [
    "UNITS",
    "Breakeven",
    "Part",
    "Placed",
    "Roof",
    "Roofline",
    "Slope",
    "attention_part",
    "breakeven_batch",
    "datasheet_roofline",
    "knee",
    "linear_part",
    "measured_roofline",
    "place",
]

UNITS = ("int8", "bfloat16", "float32")
MIB = 1 << 20
MOST_BATCH = 1 << 14  # a break-even that lies beyond is none


@dataclass(frozen=True)
class Slope:
    """Memory of one kind: `name` says which, `rate` is bytes a second."""

    name: str
    rate: float


@dataclass(frozen=True)
class Roof:
    """The peak of one arithmetic unit, operations a second."""

    unit: str
    rate: float


@dataclass(frozen=True)
class Roofline:
    """One machine's roofs and slopes.

    Attributes:
        title: which machine.
        source: "measured", or "datasheet" with where it is from: published numbers, not seen here.
        roofs: the highest first.
        slopes: the fastest first.
    """

    title: str
    source: str
    roofs: tuple[Roof, ...]
    slopes: tuple[Slope, ...]

    @property
    def balances(self) -> tuple[tuple[Roof, Slope, float], ...]:
        """Balance point of each unit on each memory: peak / bandwidth, FLOP a byte."""
        return tuple((roof, slope, roof.rate / slope.rate) for roof in self.roofs for slope in self.slopes)


def measured_roofline(ceilings: Ceilings, caches: Sequence[tuple[str, int]] = ()) -> Roofline:
    """A roof for each measured unit, and a slope for each level of memory that a measured working set stands for.

    Args:
        ceilings: of this machine.
        caches: (name, bytes together) of the caches that `ceilings.threads` threads use, smallest first; without any
            the slopes are the smallest, the middle and the largest working set.
    """
    peaks = [(unit, ceilings.peak(unit)) for unit in UNITS]
    roofs = sorted((Roof(unit, rate) for unit, rate in peaks if rate), key=lambda roof: -roof.rate)
    return Roofline(
        f"{ceilings.processor}, {ceilings.threads} threads", "measured", tuple(roofs), _slopes(ceilings, caches)
    )


def _slopes(ceilings: Ceilings, caches: Sequence[tuple[str, int]]) -> tuple[Slope, ...]:
    sets = [size for size, _ in ceilings.bandwidth]
    if not sets:
        return ()
    chosen: dict[int, str] = {}
    for name, capacity in caches:
        # Half of a cache: the other half leaves room for what else lies there.
        inside = [size for size in sets if size <= capacity / 2 and size not in chosen]
        if inside:
            chosen[inside[-1]] = f"{name}, {inside[-1] // MIB} MiB"
    if not caches:
        chosen = {size: f"{size // MIB} MiB" for size in (sets[0], sets[len(sets) // 2], sets[-1])}
    elif sets[-1] > 2 * caches[-1][1]:
        chosen[sets[-1]] = f"DRAM, {sets[-1] // MIB} MiB"
    elif sets[-1] not in chosen:
        chosen[sets[-1]] = f"{sets[-1] // MIB} MiB"
    rates = dict(ceilings.bandwidth)
    return tuple(Slope(chosen[size], rates[size]) for size in sorted(chosen))


def datasheet_roofline(sheet: Datasheet) -> Roofline:
    """A datasheet's published peaks and its one bandwidth; what it does not publish is not drawn.

    Precisions of one peak share a roof, "fp16, bf16".
    """
    rates = sorted(set(sheet.peaks.values()), reverse=True)
    roofs = [Roof(", ".join(name for name, peak in sheet.peaks.items() if peak == rate), rate) for rate in rates]
    slopes = () if sheet.bandwidth is None else (Slope("memory", sheet.bandwidth),)
    return Roofline(sheet.title, "datasheet", tuple(roofs), slopes)


@dataclass(frozen=True)
class Part:
    """The work of a part of one or several steps, by the algorithm.

    Attributes:
        flops: by arithmetic unit.
        bytes: moved, activations left out.
        working_set: bytes that each step goes through, all parts together: chooses the bandwidth, because what one
            part read has been pushed out by the others when it reads it again.
    """

    flops: Mapping[str, int]
    bytes: int
    working_set: float

    @property
    def total_flops(self) -> int:
        """Of all units."""
        return sum(self.flops.values())

    @property
    def intensity(self) -> float | None:
        """Arithmetic intensity, FLOP a byte; None without bytes."""
        return self.total_flops / self.bytes if self.bytes else None

    def plus(self, other: Part) -> Part:
        """Both together."""
        flops = dict(self.flops)
        for unit, count in other.flops.items():
            flops[unit] = flops.get(unit, 0) + count
        return Part(flops, self.bytes + other.bytes, max(self.working_set, other.working_set))


def _working_set(shape: ModelShape, work: StepWork, kv_tokens: int) -> int:
    return weight_bytes_read(shape, work.logits) + kv_tokens * kv_bytes_per_token(shape)


def linear_part(shape: ModelShape, units: Units, work: StepWork, kv_tokens: int) -> Part:
    """The linear layers and the output head of one step: 2 P n FLOP on the weights, read once."""
    flops = step_cost(shape, work, kv_tokens).linear_flops
    return Part({units.linear: flops}, weight_bytes_read(shape, work.logits), _working_set(shape, work, kv_tokens))


def attention_part(shape: ModelShape, units: Units, work: StepWork, kv_tokens: int) -> Part:
    """Attention of one step: 4 L H d sum of contexts FLOP on the KV of `kv_tokens`; half is scores, half values."""
    cost = step_cost(shape, work, kv_tokens)
    flops = {units.scores: cost.attention_flops // 2}
    flops[units.values] = flops.get(units.values, 0) + cost.attention_flops - cost.attention_flops // 2
    return Part(flops, cost.bytes, _working_set(shape, work, kv_tokens))


@dataclass(frozen=True)
class Placed:
    """A measured part under the roofline.

    Attributes:
        intensity: FLOP a byte; None without bytes.
        rate: FLOP a second.
        byte_rate: bytes a second.
        mfu: ideal time of its FLOP at the units' peaks / measured time; None is unknown.
        mbu: ideal time of its bytes at the working set's bandwidth / measured time; None is unknown.
        bound: "compute", "memory", "overhead" (neither explains half of the time) or "unknown".
    """

    intensity: float | None
    rate: float
    byte_rate: float
    mfu: float | None
    mbu: float | None
    bound: str

    @property
    def over_ceiling(self) -> bool:
        """Faster than the machine: a count or a ceiling is wrong."""
        return any(value is not None and value > 1 for value in (self.mfu, self.mbu))


def place(part: Part, seconds: float, ceilings: Ceilings | None) -> Placed:
    """Where a part that took `seconds` (above 0) stands."""
    compute = compute_seconds(part.flops, ceilings)
    memory = memory_seconds(part.bytes, part.working_set, ceilings)
    return Placed(
        part.intensity,
        part.total_flops / seconds,
        part.bytes / seconds,
        efficiency(compute, seconds),
        efficiency(memory, seconds),
        bound(compute, memory, seconds),
    )


@dataclass(frozen=True)
class Breakeven:
    """The smallest batch whose decode step is bound by compute.

    Attributes:
        batch: None if there is none up to MOST_BATCH, or if it is
        unknown: for want of a ceiling.
    """

    batch: int | None
    unknown: bool = False

    def __str__(self) -> str:
        if self.unknown:
            return "unknown"
        return "never" if self.batch is None else str(self.batch)


def breakeven_batch(
    shape: ModelShape, units: Units, ceilings: Ceilings | None, context: int, parts: Sequence[str]
) -> Breakeven:
    """From which batch on the FLOP of a decode step need longer than its bytes, by the ceilings.

    More sequences share one reading of the weights, but each reads its own KV: the linear layers always turn
    compute-bound, attention never does if its own intensity is below the balance point.

    Args:
        shape: of the model.
        units: that compute.
        ceilings: of the machine.
        context: tokens that each sequence attends to.
        parts: of "linear" and "attention", those that count.
    """

    def bound_by_compute(batch: int) -> bool | None:
        work = StepWork(batch, 0, batch * context, batch, batch)
        kinds = {"linear": linear_part, "attention": attention_part}
        chosen = [kinds[name](shape, units, work, batch * context) for name in parts]
        whole = chosen[0] if len(chosen) == 1 else chosen[0].plus(chosen[1])
        compute = compute_seconds(whole.flops, ceilings)
        memory = memory_seconds(whole.bytes, whole.working_set, ceilings)
        return None if compute is None or memory is None else compute >= memory

    # Bandwidth falls with the working set, so the answer need not be monotonic: each batch is looked at in turn.
    for batch in range(1, MOST_BATCH + 1):
        answer = bound_by_compute(batch)
        if answer is None:
            return Breakeven(None, unknown=True)
        if answer:
            return Breakeven(batch)
    return Breakeven(None)


def knee(seconds: Mapping[int, float]) -> float | None:
    """The batch at which measured step times turn from flat to proportional: t(1) / marginal time of one sequence.

    The marginal time is that between the two largest batches. In the roofline's model, t(B) = max(memory, B x compute),
    this is the break-even batch.

    Args:
        seconds: of a step (or a part), by batch; with batch 1 and two more.

    Returns:
        None if it cannot be told: fewer batches, or a time at the largest batch below twice that of batch 1, which is
        flat all the way.
    """
    batches = sorted(seconds)
    if len(batches) < 3 or batches[0] != 1:
        return None
    before, last = batches[-2:]
    if seconds[last] < 2 * seconds[1]:
        return None
    marginal = (seconds[last] - seconds[before]) / (last - before)
    return seconds[1] / marginal if marginal > 0 and math.isfinite(marginal) else None
