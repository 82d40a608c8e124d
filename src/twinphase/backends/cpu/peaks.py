"""The loops behind the ceilings: memory read by working set, and peak rates of the units that kernels use.

Every number is the best of several short rounds on all threads: a ceiling is what the hardware gives when no other
process takes a core, and disturbances only ever subtract. Run as a process of its own by ceilings.py.

The loops use the instructions of the given path, keep their operands in the L1 cache and a tile of accumulators in
registers, as a matrix product would. They are compiled anew in each process that measures: that is once a machine.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from twinphase.backends.cpu.emit import F32, I32, I64, Emit, Value, vector
from twinphase.backends.cpu.intrinsics import emitted
from twinphase.backends.cpu.isa import ISAS, Isa

__all__ = ["OPERAND_STEPS", "READ_UNIT", "WORKING_SETS", "PeakLoop", "measure_here", "peak_loop", "read_loop"]

MIB = 1 << 20
WORKING_SETS = tuple(n * MIB for n in (1, 4, 16, 32, 64, 128, 256))
ROUNDS, MAX_ROUNDS = 15, 60
ROUND_SECONDS = 0.0025  # shorter than a busy neighbour's time slice, so that some rounds have all cores
READ_UNIT = 1024  # bytes of one turn of the read loop at the widest vectors
OPERAND_STEPS = 16  # turns until the operands repeat: 16 turns of at most 8 vectors are 8 KiB, inside any L1


@dataclass(frozen=True)
class PeakLoop:
    """A compiled loop: `run(weights, inputs, out, turns)` leaves `turns` dot products in each cell of a tile.

    Operands are int32 [OPERAND_STEPS, columns or rows, lanes] holding four int8, two bfloat16 or one float32 a lane;
    `out` is int32 [rows, columns, lanes], with float32 bits for the float kinds.
    """

    run: Callable[..., Any]
    rows: int
    columns: int
    lanes: int
    operations: int  # of one turn

    def zeros(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Weights, inputs and result of the right shapes."""
        shapes = ((OPERAND_STEPS, self.columns), (OPERAND_STEPS, self.rows), (self.rows, self.columns))
        weights, inputs, out = (np.zeros((*shape, self.lanes), np.int32) for shape in shapes)
        return weights, inputs, out


def _dot(kind: str, emit: Emit, total: Value, weights: Value, inputs: Value) -> Value:
    if kind == "int8":
        return emit.dot(total, weights, inputs)
    if kind == "bfloat16":
        return emit.dot_bf16(total, weights, inputs)
    return emit.fma(emit.b.bitcast(weights, total.type), emit.b.bitcast(inputs, total.type), total)


@functools.cache
def peak_loop(kind: str, isa: Isa) -> PeakLoop | None:
    """The loop that finds the peak of `kind` ("int8", "float32", "bfloat16"); None if `isa` has no such unit."""
    if kind == "bfloat16" and not isa.bf16_dot:
        return None
    rows, columns = (4, 4) if isa.registers == 32 else (4, 2)
    lanes, width = isa.lanes, 4 * isa.lanes
    operand, sums = vector(I32, lanes), vector(I32 if kind == "int8" else F32, lanes)

    def write(emit: Emit, weights: Value, inputs: Value, out: Value, turns: Value) -> None:
        zero = ir.Constant(sums, [0] * lanes)
        tile = [[emit.variable(zero) for _ in range(columns)] for _ in range(rows)]
        with emit.loop(0, turns) as turn:
            step = emit.b.and_(turn, emit.i64(OPERAND_STEPS - 1))
            at_weights, at_inputs = emit.mul(step, columns * width), emit.mul(step, rows * width)
            w = [emit.load(operand, weights, at_weights, n * width) for n in range(columns)]
            for m in range(rows):
                x = emit.load(operand, inputs, at_inputs, m * width)
                for n in range(columns):
                    tile[m][n].set(_dot(kind, emit, tile[m][n].get(), w[n], x))
        for m in range(rows):
            for n in range(columns):
                emit.store(tile[m][n].get(), out, (m * columns + n) * width)

    accumulate = emitted(isa, 4, write)

    @numba.njit(nogil=True)
    def run(weights, inputs, out, turns):
        accumulate(weights.ctypes.data, inputs.ctypes.data, out.ctypes.data, turns)

    products = {"int8": 4, "bfloat16": 2, "float32": 1}[kind]
    return PeakLoop(run, rows, columns, lanes, 2 * rows * columns * lanes * products)


@functools.cache
def read_loop(isa: Isa) -> Callable[..., Any]:
    """Compiled `read(memory, passes)`: xor of all 64-bit words of uint8 `memory`, `passes` times over.

    `memory` holds a multiple of READ_UNIT bytes. Sixteen loads a turn in eight chains: nothing but memory limits it.
    """
    words = vector(I64, isa.lanes // 2)
    width, loads = 4 * isa.lanes, 16

    def write(emit: Emit, base: Value, size: Value) -> Value:
        chains = [emit.variable(ir.Constant(words, [0] * words.count)) for _ in range(8)]
        with emit.loop(0, size, loads * width) as at:
            for index in range(loads):
                chain = chains[index % len(chains)]
                chain.set(emit.b.xor(chain.get(), emit.load(words, base, at, index * width, align=8)))
        total = chains[0].get()
        for chain in chains[1:]:
            total = emit.b.xor(total, chain.get())
        result = emit.b.extract_element(total, ir.Constant(I32, 0))
        for lane in range(1, words.count):
            result = emit.b.xor(result, emit.b.extract_element(total, ir.Constant(I32, lane)))
        return result

    read_once = emitted(isa, 2, write)

    @numba.njit(nogil=True)
    def read(memory, passes):
        total = 0
        for _ in range(passes):
            total ^= read_once(memory.ctypes.data, memory.size)
        return total

    return read


def _seconds(work: Callable[[int], object], threads: int) -> float:
    """Wall time from the first start to the last end of `work(thread)` on all threads."""
    spans = [(0.0, 0.0)] * threads
    ready = threading.Barrier(threads)

    def body(index: int) -> None:
        ready.wait()
        start = time.perf_counter()
        work(index)
        spans[index] = (start, time.perf_counter())

    workers = [threading.Thread(target=body, args=(index,), daemon=True) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(end for _, end in spans) - min(start for start, _ in spans)


def _best_rate(work: Callable[[int, int], object], amount: float, threads: int) -> float:
    """Highest `amount` a second of `work(thread, repeats)`, where one repeat on all threads is `amount`."""
    repeats = 1

    def one_round() -> float:
        return _seconds(lambda index: work(index, repeats), threads)

    while (spent := one_round()) < ROUND_SECONDS / 2:
        # At most eightfold: a first short call is mostly the starting of threads.
        repeats *= min(8, max(2, round(ROUND_SECONDS / max(spent, 1e-6))))
    times = sorted(one_round() for _ in range(ROUNDS))
    # A best that no other round comes near was luck on a busy machine, and there may be better luck still.
    while times[1] > 1.02 * times[0] and len(times) < MAX_ROUNDS:
        times = sorted([*times, one_round()])
    return amount * repeats / times[0]


def measure_peak(kind: str, isa: Isa, threads: int) -> float | None:
    """Operations a second of all threads, or None if the processor has no unit of this kind."""
    loop = peak_loop(kind, isa)
    if loop is None:
        return None
    # Zeros: data does not change these instructions' speed, and sums stay finite.
    operands = [loop.zeros() for _ in range(threads)]
    loop.run(*operands[0], 1)  # compiles
    turns = 1 << 14

    def work(index: int, repeats: int) -> None:
        loop.run(*operands[index], turns * repeats)

    return _best_rate(work, float(turns * loop.operations * threads), threads)


def measure_bandwidth(isa: Isa, threads: int) -> tuple[tuple[int, float], ...]:
    """Bytes read a second by all threads for each working set, which the threads share evenly."""
    read = read_loop(isa)
    memory = np.empty(WORKING_SETS[-1], np.uint8)
    memory[::4096] = 1  # touch every page: pages never written all map to one page of zeros
    read(memory[:READ_UNIT], 1)  # compiles
    rates = []
    for size in WORKING_SETS:
        share = size // threads // READ_UNIT * READ_UNIT
        parts = [memory[index * share : (index + 1) * share] for index in range(threads)]

        def work(index: int, passes: int, parts: list[NDArray[np.uint8]] = parts) -> None:
            read(parts[index], passes)

        rates.append((size, _best_rate(work, float(share * threads), threads)))
    return tuple(rates)


def measure_here(threads: int, isa: Isa) -> dict[str, Any]:
    """All ceilings of `threads` threads, as the fields of `ceilings.Measurement`."""
    return {
        "bandwidth": measure_bandwidth(isa, threads),
        "int8_ops": measure_peak("int8", isa, threads),
        "float32_flops": measure_peak("float32", isa, threads),
        "bfloat16_flops": measure_peak("bfloat16", isa, threads),
    }


def _main(isa: Isa, counts: list[int], repetitions: int) -> None:
    """A line of JSON a measurement, all numbers of threads in turn, so that a disturbance does not meet one alone."""
    for _ in range(repetitions):
        for threads in counts:
            print(json.dumps(measure_here(threads, isa)), flush=True)


if __name__ == "__main__":
    _main(ISAS[sys.argv[1]], [int(count) for count in sys.argv[2].split(",")], int(sys.argv[3]))
