"""This machine's stored ceilings, and the MFU, MBU and bound of a phase.

A backend measures ceilings, and the command line passes them here. Reading stored ceilings needs
only the standard library.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from twinphase.numa import cpu_list
from twinphase.weights.storage import cache_root, write_atomically

# The version is part of the file name: other ways of measuring need other files.
VERSION = 5
HINT_INTERVAL_SECONDS = 24 * 3600
# Results of `bound` if no ceiling explains half of the time.
NEITHER = ("overhead", "contention", "ranks", "kernels")
BOUND_WORDS = {
    "compute": "bound by compute",
    "memory": "bound by memory",
    "contention": "held up by other programs",
    "ranks": "held up by other ranks",
    "overhead": "bound by overhead outside kernels",
    "kernels": "its kernels ran below their peak",
}
# A ceiling that explains a smaller share of the time is not the bound.
MIN_EXPLAINED_SHARE = 0.5


@dataclass(frozen=True)
class Ceilings:
    """Measured peaks of one machine with a number of threads on an instruction-set path.

    Attributes:
        processor: name of the processor, as from `processor_name`.
        bandwidth: ((working set in bytes, bytes read per second), ...), by rising working set.
        int8_ops: operations per second of int8 dot products; None is unknown.
        float32_flops, bfloat16_flops, float16_flops: FLOP per second of multiply-adds and matrix
            products; None is unknown.
        provisional: whether they may be too low and need another measurement, because the machine
            was busy (then they are not stored) or a step was faster.
        measurements: number of measurements; the ceilings are the best of all.
    """

    processor: str
    threads: int
    isa: str
    bandwidth: tuple[tuple[int, float], ...]
    int8_ops: float | None
    float32_flops: float | None
    bfloat16_flops: float | None
    provisional: bool = False
    measurements: int = 1
    float16_flops: float | None = None

    def read_bandwidth(self, working_set: float) -> float | None:
        """Bytes per second if each step reads `working_set` bytes; None if unknown.

        Between measured sizes the time per byte is linear in the logarithm of the size; outside
        them it is that of the nearest size.
        """
        if not self.bandwidth or working_set <= 0:
            return None
        points = [(math.log(size), 1 / rate) for size, rate in self.bandwidth]
        at = math.log(working_set)
        if at <= points[0][0]:
            return 1 / points[0][1]
        for (left, slow), (right, slower) in zip(points, points[1:], strict=False):
            if at <= right:
                return 1 / (slow + (slower - slow) * (at - left) / (right - left))
        return 1 / points[-1][1]

    def peak(self, unit: str) -> float | None:
        """Operations per second of "int8", "float32", "bfloat16" or "float16"; None if unknown."""
        floats = {
            "float32": self.float32_flops,
            "bfloat16": self.bfloat16_flops,
            "float16": self.float16_flops,
        }
        return {"int8": self.int8_ops, **floats}.get(unit)

    def merged(self, other: Ceilings) -> Ceilings:
        """The higher of each rate, because a measurement can only be too low.

        The result is provisional only if both are.
        """
        rates = dict(self.bandwidth)
        for size, rate in other.bandwidth:
            rates[size] = max(rate, rates.get(size, 0.0))
        return replace(
            self,
            bandwidth=tuple(sorted(rates.items())),
            int8_ops=_higher(self.int8_ops, other.int8_ops),
            float32_flops=_higher(self.float32_flops, other.float32_flops),
            bfloat16_flops=_higher(self.bfloat16_flops, other.bfloat16_flops),
            float16_flops=_higher(self.float16_flops, other.float16_flops),
            provisional=self.provisional and other.provisional,
            measurements=self.measurements + other.measurements,
        )


def _higher(one: float | None, other: float | None) -> float | None:
    return max((rate for rate in (one, other) if rate is not None), default=None)


def must_measure(known: Ceilings | None) -> bool:
    """Whether to measure when idle: the ceilings are unknown, or a step was faster."""
    return known is None or known.provisional


def compute_seconds(flops: Mapping[str, int], ceilings: Ceilings | None) -> float | None:
    """Seconds at the units' peaks: the sum of FLOP / peak by unit; None if a peak is unknown."""
    if ceilings is None:
        return None
    total = 0.0
    for unit, count in flops.items():
        peak = ceilings.peak(unit)
        if count and not peak:
            return None
        total += count / peak if peak else 0.0
    return total


def memory_seconds(num_bytes: int, working_set: float, ceilings: Ceilings | None) -> float | None:
    """Seconds to read `num_bytes` at the working set's bandwidth; None if unknown."""
    bandwidth = ceilings.read_bandwidth(working_set) if ceilings else None
    return num_bytes / bandwidth if bandwidth else None


@dataclass(frozen=True)
class Efficiency:
    """Efficiency of some work relative to the machine's ceilings.

    Attributes:
        bound: result of `bound`.
        mfu: ideal time of its FLOP at the units' peaks / measured time.
        mbu: ideal time of its bytes at the working set's bandwidth / measured time. A value above 1
            shows a wrong count or ceiling, so values are never clamped; None is unknown.
    """

    bound: str
    mfu: float | None = None
    mbu: float | None = None

    @property
    def over_ceiling(self) -> bool:
        """Whether the work was faster than a ceiling, so that a count or a ceiling is wrong."""
        return any(value is not None and value > 1 for value in (self.mfu, self.mbu))


def efficiency(
    flops: Mapping[str, int],
    num_bytes: int,
    working_set: float,
    seconds: float,
    ceilings: Ceilings | None,
    *,
    cpu_wait: float = 0.0,
    rank_wait: float = 0.0,
    outside: float = 0.0,
) -> Efficiency:
    """The efficiency of work that took `seconds`; the last three arguments are those of `bound`."""
    compute = compute_seconds(flops, ceilings)
    memory = memory_seconds(num_bytes, working_set, ceilings)
    mfu, mbu = (
        None if ideal is None or seconds <= 0 else ideal / seconds for ideal in (compute, memory)
    )
    found = bound(compute, memory, seconds, cpu_wait=cpu_wait, rank_wait=rank_wait, outside=outside)
    return Efficiency(found, mfu, mbu)


def bound(
    compute: float | None,
    memory: float | None,
    seconds: float,
    *,
    cpu_wait: float = 0.0,
    rank_wait: float = 0.0,
    outside: float = 0.0,
) -> str:
    """The limit of a phase: a ceiling ("compute", "memory"), one of `NEITHER`, or "unknown".

    If neither ceiling explains half of the time, the bound is the largest part of the rest: waiting
    for a processor (`cpu_wait`, seconds: contention), waiting for other ranks (`rank_wait`), time
    `outside` kernels (overhead), or else kernels that ran below their peaks.
    """
    if compute is None or memory is None or seconds <= 0:
        return "unknown"
    unexplained = seconds - max(compute, memory)
    if unexplained <= (1 - MIN_EXPLAINED_SHARE) * seconds:
        return "compute" if compute >= memory else "memory"
    parts = {"contention": cpu_wait, "ranks": rank_wait, "overhead": outside}
    parts["kernels"] = unexplained - sum(parts.values())
    return max(parts, key=parts.__getitem__)


@functools.cache
def processor_name() -> str:
    """Name, family, model and number of processors; virtual machines often hide the name."""
    facts: dict[str, str] = {}
    with (
        contextlib.suppress(OSError),
        open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file,
    ):
        for line in file:
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
            if not line.strip():
                break
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = ", ".join(
        f"{key} {facts[key]}" for key in ("cpu family", "model", "stepping") if key in facts
    )
    return f"{name} ({numbers})" if numbers else name


def _path(threads: int, isa: str) -> Path:
    key = f"{VERSION}|{processor_name()}|{os.cpu_count()}|{threads}|{isa}"
    return cache_root() / "ceilings" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def load_ceilings(threads: int, isa: str) -> Ceilings | None:
    """The stored ceilings; None if there are no undisturbed ones or the file is unreadable."""
    try:
        found = json.loads(_path(threads, isa).read_bytes())
        found["bandwidth"] = tuple((int(size), float(rate)) for size, rate in found["bandwidth"])
        return Ceilings(**found)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def save_ceilings(ceilings: Ceilings) -> None:
    """Store ceilings for later runs; callers may ignore an `OSError`."""
    data = json.dumps(asdict(ceilings), indent=1).encode()
    write_atomically(_path(ceilings.threads, ceilings.isa), data)


def hint_is_due() -> bool:
    """Whether this has not returned True on this machine for a day."""
    path = cache_root() / "ceilings" / "hint"
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime < HINT_INTERVAL_SECONDS:
            return False
    with contextlib.suppress(OSError):
        write_atomically(path, b"")
    return True


def cache_levels(threads: int) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of the data caches of `threads` cores, from the second level on.

    The smallest cache comes first. The result is empty if the system does not report caches.
    """
    levels: dict[int, int] = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            kind, level, size, sharers = (
                (folder / name).read_text().strip()
                for name in ("type", "level", "size", "shared_cpu_list")
            )
            if kind != "Instruction" and int(level) > 1:
                one = int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}[size[-1]]
                levels[int(level)] = one * -(-threads // len(cpu_list(sharers)))
    return tuple((f"L{level}", size) for level, size in sorted(levels.items()))
