"""The roofline (Williams, Waterman and Patterson, 2009): what bounds a part of a step.

The arithmetic intensity of a part of a step is its FLOP per byte. Below the machine's balance point
(peak / bandwidth) memory bounds the part, above it the arithmetic unit does. Rates come from
measured `Ceilings`; unknown values are None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinphase.backends.base import Units
from twinphase.batch import StepWork
from twinphase.phases.hardware import (
    Ceilings,
    Efficiency,
    compute_seconds,
    efficiency,
    memory_seconds,
)
from twinphase.phases.work import ModelShape, step_cost, weight_bytes_read

UNITS = ("int8", "bfloat16", "float16", "float32")
MIB = 1 << 20


@dataclass(frozen=True)
class Slope:
    """The bandwidth of one level of memory: its `name`, and `rate` in bytes per second."""

    name: str
    rate: float


@dataclass(frozen=True)
class Roof:
    """The peak of one arithmetic unit, operations per second."""

    unit: str
    rate: float


@dataclass(frozen=True)
class Roofline:
    """One machine's roofs and slopes.

    Attributes:
        title: name of the machine.
        roofs: roofs, the highest first.
        slopes: slopes, the fastest first.
    """

    title: str
    roofs: tuple[Roof, ...]
    slopes: tuple[Slope, ...]

    @property
    def balances(self) -> tuple[tuple[Roof, Slope, float], ...]:
        """The balance point of each unit on each memory: peak / bandwidth, in FLOP per byte."""
        return tuple(
            (roof, slope, roof.rate / slope.rate) for roof in self.roofs for slope in self.slopes
        )


def measured_roofline(ceilings: Ceilings, caches: Sequence[tuple[str, int]] = ()) -> Roofline:
    """A roof for each measured unit, and a slope for each level of memory.

    Args:
        ceilings: ceilings of this machine.
        caches: (name, total bytes) of the caches of `ceilings.threads` threads, smallest first; if
            empty, the slopes are the smallest, the middle and the largest working set.
    """
    peaks = [(unit, ceilings.peak(unit)) for unit in UNITS]
    roofs = sorted((Roof(unit, rate) for unit, rate in peaks if rate), key=lambda roof: -roof.rate)
    rates = dict(ceilings.bandwidth)
    slopes = tuple(
        Slope(name, rates[size]) for size, name in sorted(_memories(sorted(rates), caches).items())
    )
    return Roofline(f"{ceilings.processor}, {ceilings.threads} threads", tuple(roofs), slopes)


def _memories(sizes: Sequence[int], caches: Sequence[tuple[str, int]]) -> dict[int, str]:
    """Names of the memories that working sets of these sizes represent."""
    if not sizes:
        return {}
    if not caches:
        return {
            size: f"{size // MIB} MiB" for size in (sizes[0], sizes[len(sizes) // 2], sizes[-1])
        }
    chosen: dict[int, str] = {}
    for name, capacity in caches:
        # A working set should fill at most half of a cache, which also holds other data.
        inside = [size for size in sizes if size <= capacity / 2 and size not in chosen]
        if inside:
            chosen[inside[-1]] = f"{name}, {inside[-1] // MIB} MiB"
    dram = "DRAM, " if sizes[-1] > 2 * caches[-1][1] else ""
    return {sizes[-1]: f"{dram}{sizes[-1] // MIB} MiB", **chosen}


@dataclass(frozen=True)
class PartWork:
    """The work of a part of one or several steps, as the algorithm requires.

    Attributes:
        flops: FLOP by arithmetic unit.
        bytes: bytes moved, without activations.
        working_set: bytes that all parts of a step read together; they determine the bandwidth,
            because the other parts evict a part's data from the caches before the next step.
    """

    flops: Mapping[str, int]
    bytes: int
    working_set: float

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    def plus(self, other: PartWork) -> PartWork:
        units = dict.fromkeys((*self.flops, *other.flops))
        flops = {unit: self.flops.get(unit, 0) + other.flops.get(unit, 0) for unit in units}
        return PartWork(flops, self.bytes + other.bytes, max(self.working_set, other.working_set))


def parts_of_step(shape: ModelShape, units: Units, work: StepWork) -> tuple[PartWork, PartWork]:
    """The work of a step's linear layers with the output head, and of its attention.

    Linear: 2 P n FLOP on the weights, read once. Attention: 4 L H d sum of contexts FLOP on the KV,
    half of them for scores and half for values; in layers with a window no context is longer.
    """
    cost = step_cost(shape, work)
    weights = weight_bytes_read(shape, work.rows, work.logits)
    working_set = weights + cost.bytes
    linear = PartWork({units.linear: cost.linear_flops}, weights, working_set)
    attention = PartWork(units.flops(0, cost.attention_flops), cost.bytes, working_set)
    return linear, attention


def ideal_seconds_of_chunk(
    shape: ModelShape, units: Units, ceilings: Ceilings | None, start: int, num_tokens: int
) -> tuple[float | None, float | None]:
    """Ideal seconds for the FLOP and the bytes of a step with `num_tokens` rows from `start`.

    The rows belong to one request; a value is None if its ceiling is unknown.
    """
    work = StepWork.of_chunk(start, num_tokens, True, shape.window)
    linear, attention = parts_of_step(shape, units, work)
    whole = linear.plus(attention)
    memory = memory_seconds(whole.bytes, whole.working_set, ceilings)
    return compute_seconds(whole.flops, ceilings), memory


@dataclass(frozen=True, kw_only=True)
class Placed(Efficiency):
    """A measured part under the roofline.

    Attributes:
        intensity: FLOP per byte; None without bytes.
        rate: FLOP per second.
        byte_rate: bytes per second.
    """

    intensity: float | None
    rate: float
    byte_rate: float


def place(part: PartWork, seconds: float, ceilings: Ceilings | None) -> Placed:
    """Place a part that took `seconds` (above 0) under the roofline."""
    return Placed(
        **vars(efficiency(part.flops, part.bytes, part.working_set, seconds, ceilings)),
        intensity=part.total_flops / part.bytes if part.bytes else None,
        rate=part.total_flops / seconds,
        byte_rate=part.bytes / seconds,
    )
