"""Finds the ceilings with the loops of peak_loops.py.

Runs as a process of its own, started by ceilings.py.

A ceiling is what the hardware gives to a machine without other load, and disturbances only ever
subtract. In a round all threads compute side by side for some 20 ms, each on its own core; a
round's rate is that of its best window of 2 ms, which is shorter than another process's time slice.
All ceilings are measured in turn, round after round, until the best rounds of each agree, so that
none depends on one good or bad moment.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.cpu.isa import Isa, choose_isa
from twinphase.backends.cpu.peak_loops import READ_TURN_BYTES, clock_readings, peak_loop, read_loop

MIB = 1 << 20
WORKING_SETS = tuple(n * MIB for n in (1, 4, 16, 32, 64, 128, 256))
KINDS = {"int8": "int8_ops", "float32": "float32_flops", "bfloat16": "bfloat16_flops"}
# Chunks of a window. Windows of memory are at least one pass over the working set.
WINDOW_CHUNKS = 8
CHUNK_SECONDS = 0.00025
ROUND_SECONDS = 0.020
LEAST_ROUNDS = 6
LIMIT_SECONDS = 5.0
# The best rounds of a settled ceiling, and how close together they lie.
AGREEING_ROUNDS = 3
AGREEMENT = 0.05
BUSY_SHARE = (
    0.03  # of the threads' time, spent waiting for a core, from which on the machine counts as busy
)

Work = Callable[[int, int, NDArray[np.int64]], object]


class Crew:
    """Threads that start together, each on a core of its own where there is one for each."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._start = threading.Barrier(threads)
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
        self._cores = cores if len(cores) == threads else []
        self.ran = self.waited = 0.0  # seconds of all threads on a core, and in the queue for one

    def run(self, work: Callable[[int], object]) -> None:
        """`work(thread)` in every thread at once."""

        def body(index: int) -> tuple[float, float]:
            if self._cores:
                with suppress(OSError):
                    os.sched_setaffinity(0, {self._cores[index]})  # of the calling thread
            self._start.wait()
            before = _scheduled()
            work(index)
            after = _scheduled()
            return after[0] - before[0], after[1] - before[1]

        for ran, waited in self._pool.map(body, range(self.threads)):
            self.ran = self.ran + ran
            self.waited = self.waited + waited

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _scheduled() -> tuple[float, float]:
    """Seconds of the calling thread on a core, and ready without one; zeros if not known."""
    try:
        ran, waited = Path("/proc/thread-self/schedstat").read_text().split()[:2]
        return int(ran) * 1e-9, int(waited) * 1e-9
    except (OSError, ValueError):
        return 0.0, 0.0


def _stolen() -> float:
    """Seconds of this machine's cores that the hypervisor gave to others; 0 if not known."""
    try:
        return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def best_window(seconds: NDArray[np.float64], window: int) -> float:
    """Chunks per second of all threads together in the best window.

    Args:
        seconds: clock readings before the first chunk and after each, [threads, chunks + 1].
        window: chunks that one thread does in a window.
    """
    starts = seconds[:, :-window].ravel()
    ends = seconds[:, window:].ravel()
    done = np.arange(seconds.shape[1], dtype=np.float64)
    counts = sum(np.interp(ends, times, done) - np.interp(starts, times, done) for times in seconds)
    return float(np.max(counts / (ends - starts)))


@dataclass
class Ceiling:
    """One rate that is being found.

    Attributes:
        work: `work(thread, repeats, readings)` computes chunks of `repeats` units, and reads the
            clock after each.
        amount: operations or bytes of a unit, which one thread computes.
        rates: the best of each round, operations or bytes per second.
    """

    work: Work
    amount: float
    repeats: int = 0
    windows: int = 0
    rates: list[float] = field(default_factory=list)

    def measure(self, crew: Crew) -> None:
        """Measure one more round."""
        if not self.repeats:
            self._find_length(crew)
        rate = best_window(
            self._readings(crew, self.repeats, self.windows * WINDOW_CHUNKS), WINDOW_CHUNKS
        )
        self.rates.append(rate * self.repeats * self.amount)

    def _find_length(self, crew: Crew) -> None:
        """Repeats that make a chunk long enough, and the number of windows in a round."""
        self.repeats = 1
        while True:
            chunk = float(np.min(np.diff(self._readings(crew, self.repeats, WINDOW_CHUNKS))))
            if chunk >= CHUNK_SECONDS / 2:
                break
            self.repeats *= min(16, max(2, round(CHUNK_SECONDS / max(chunk, 1e-7))))
        self.windows = min(10, max(2, round(ROUND_SECONDS / (chunk * WINDOW_CHUNKS))))

    def _readings(self, crew: Crew, repeats: int, chunks: int) -> NDArray[np.float64]:
        readings = [clock_readings(chunks) for _ in range(crew.threads)]
        crew.run(lambda thread: self.work(thread, repeats, readings[thread]))
        first = readings[0][0, 0]  # differences of seconds, so that no digits are lost
        return np.array([(one[:, 0] - first) + one[:, 1] * 1e-9 for one in readings])

    @property
    def settled(self) -> bool:
        """Whether the best rounds agree."""
        best = sorted(self.rates)[-AGREEING_ROUNDS:]
        return len(self.rates) >= LEAST_ROUNDS and best[0] >= (1 - AGREEMENT) * best[-1]


def peak_ceiling(kind: str, isa: Isa, threads: int) -> Ceiling | None:
    """The peak of "int8", "float32" or "bfloat16"; None if the processor has no such unit."""
    loop = peak_loop(kind, isa)
    if loop is None:
        return None
    # Zeros: data does not change these instructions' speed, and sums stay finite.
    operands = [loop.zeros() for _ in range(threads)]
    turns = 1 << 10

    def work(thread: int, repeats: int, readings: NDArray[np.int64]) -> None:
        loop.run(*operands[thread], turns * repeats, readings)

    return Ceiling(work, float(turns * loop.operations))


def bandwidth_ceiling(size: int, memory: list[NDArray[np.uint8]], isa: Isa) -> Ceiling:
    """Reading a working set of `size` bytes; each thread reads its share of its own `memory`."""
    read = read_loop(isa)
    threads = len(memory)
    slices = WINDOW_CHUNKS if size // threads >= WINDOW_CHUNKS * 64 * READ_TURN_BYTES else 1
    slice_bytes = size // threads // slices // READ_TURN_BYTES * READ_TURN_BYTES
    share = slices * slice_bytes
    rounds = [0] * threads

    def work(thread: int, repeats: int, readings: NDArray[np.int64]) -> None:
        # Elsewhere in each round: which physical pages a small set has decides how well it fits a
        # cache.
        start = rounds[thread] * share % (memory[thread].size - share + READ_TURN_BYTES)
        rounds[thread] += 1
        read(memory[thread][start : start + share], slice_bytes, repeats, readings)

    return Ceiling(work, float(slice_bytes))


def settle(
    ceilings: Sequence[Ceiling], crew: Crew, progress: Callable[[float], None] = lambda share: None
) -> bool:
    """Measure round after round until all ceilings are settled or the time is over.

    `progress` is called with the share that is done, from 0 to 1.

    Returns:
        Whether they may be too low: not all are settled, or others took the cores meanwhile.
    """
    crew.ran = crew.waited = 0.0
    begin = time.perf_counter()
    end = begin + LIMIT_SECONDS
    stolen = _stolen()
    unsettled = list(ceilings)
    while unsettled:
        for ceiling in unsettled:
            ceiling.measure(crew)
        unsettled = [ceiling for ceiling in ceilings if not ceiling.settled]
        passed = (time.perf_counter() - begin) / max(LIMIT_SECONDS, 1.0)
        progress(min(1.0, max(passed, 1 - len(unsettled) / len(ceilings))))
        if time.perf_counter() > end:
            break
    waited = crew.waited + _stolen() - stolen
    return bool(unsettled) or waited > BUSY_SHARE * (crew.ran + waited)


def measure_here(threads: int, isa: Isa) -> dict[str, Any]:
    """All ceilings of `threads` threads, as the fields of `ceilings.MeasuredRates`."""
    crew = Crew(threads)
    memory = [
        np.empty(-(-WORKING_SETS[-1] // threads // READ_TURN_BYTES) * READ_TURN_BYTES, np.uint8)
        for _ in range(threads)
    ]
    crew.run(
        lambda thread: memory[thread].fill(1)
    )  # by the thread that reads it, on whose memory node it then lies
    peaks = {name: peak_ceiling(kind, isa, threads) for kind, name in KINDS.items()}
    sets = {size: bandwidth_ceiling(size, memory, isa) for size in WORKING_SETS}
    ceilings = [*sets.values(), *(peak for peak in peaks.values() if peak is not None)]
    for ceiling in ceilings:
        ceiling.work(0, 1, clock_readings(1))  # compiles
    provisional = settle(ceilings, crew, _print_share)
    crew.close()
    return {
        "bandwidth": [(size, max(ceiling.rates)) for size, ceiling in sets.items()],
        **{name: None if peak is None else max(peak.rates) for name, peak in peaks.items()},
        "provisional": provisional,
    }


def _print_share(share: float) -> None:
    print(json.dumps({"share": share}), flush=True)


def _main(isa: Isa, threads: int, repetitions: int) -> None:
    """Print lines of JSON: the share of a measurement that is done, then what it found."""
    for _ in range(repetitions):
        print(json.dumps(measure_here(threads, isa)), flush=True)


if __name__ == "__main__":
    _main(choose_isa(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
