"""The loops of the ceilings: a tile of dot products for peaks, and reading for bandwidth.

They use the instructions of the given path, keep their operands in the L1 cache and a tile of
accumulators in registers, as a matrix product would. Each reads the clock itself after every chunk
of work, so that a thread measures without the interpreter. How a rate is found with them: peaks.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from twinphase.backends.cpu.emit import F32, I32, I64, Emit, Value, vector
from twinphase.backends.cpu.formats import GROUP_INPUTS
from twinphase.backends.cpu.intrinsics import emitted
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.ranks import leave_time
from twinphase.backends.cpu.threads import libc_address

# One turn of the read loop reads this much with the widest vectors.
READ_TURN_BYTES = 1024
# Operands repeat after 16 turns: at most 8 vectors per turn are 8 KiB, which fit any L1 cache.
OPERAND_STEPS = 16
TIMESPEC_BYTES = 16


def clock_readings(chunks: int) -> NDArray[np.int64]:
    """Room for the readings around `chunks` chunks: [chunks + 1, (seconds, nanoseconds)]."""
    return np.zeros((chunks + 1, 2), np.int64)


@dataclass(frozen=True)
class PeakLoop:
    """A compiled loop: `run` leaves `turns` dot products in each cell of a tile.

    It does so once per chunk and reads the clock before the first chunk and after each
    (`clock_readings`).

    Operands are int32 [OPERAND_STEPS, columns or rows, lanes] holding four int8, two bfloat16 or
    one float32 per lane; `out` is int32 [rows, columns, sums], with float32 bits for the float
    kinds. A sum is that of a lane, or the 16 x 16 of a matrix tile, whose operands are 16 rows of
    32 bytes and, of the weights, 8 rows of 16 columns of 4 bytes.
    """

    run: Callable[..., Any]
    rows: int
    columns: int
    lanes: int
    operations: int  # per turn
    sums: int

    def zeros(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Weights, inputs and result of the right shapes."""
        weights, inputs = (
            np.zeros((OPERAND_STEPS, n, self.lanes), np.int32) for n in (self.columns, self.rows)
        )
        return weights, inputs, np.zeros((self.rows, self.columns, self.sums), np.int32)


def _dot(kind: str, emit: Emit, total: Value, weights: Value, inputs: Value) -> Value:
    if kind == "int8":
        return emit.dot(total, weights, inputs)
    if kind == "bfloat16":
        return emit.dot_bf16(total, weights, inputs)
    return emit.fma(emit.b.bitcast(weights, total.type), emit.b.bitcast(inputs, total.type), total)


@functools.cache
def peak_loop(kind: str, isa: Isa) -> PeakLoop | None:
    """The loop for the peak of "int8", "float32" or "bfloat16"; None if `isa` has no such unit."""
    if kind == "bfloat16" and not isa.bf16_dot:
        return None
    rows, columns = (4, 4) if isa.registers == 32 else (4, 2)
    lanes = isa.lanes
    width = 4 * isa.lanes
    operand = vector(I32, lanes)
    sums = vector(I32 if kind == "int8" else F32, lanes)

    def write(emit: Emit, weights, inputs, out, turns):
        zero = ir.Constant(sums, [0] * lanes)
        tile = [[emit.variable(zero) for _ in range(columns)] for _ in range(rows)]
        with emit.loop(0, turns) as turn:
            step = emit.b.and_(turn, emit.i64(OPERAND_STEPS - 1))
            at_weights = emit.mul(step, columns * width)
            at_inputs = emit.mul(step, rows * width)
            w = [emit.load(operand, weights, at_weights, n * width) for n in range(columns)]
            for m in range(rows):
                x = emit.load(operand, inputs, at_inputs, m * width)
                for n in range(columns):
                    tile[m][n].set(_dot(kind, emit, tile[m][n].get(), w[n], x))
        for m in range(rows):
            for n in range(columns):
                emit.store(tile[m][n].get(), out, (m * columns + n) * width)

    products = {"int8": 4, "bfloat16": 2, "float32": 1}[kind]
    operations = 2 * rows * columns * lanes * products
    if kind != "float32" and isa.matrix_tiles:
        size = 16 * GROUP_INPUTS * 4 // products  # bytes of a tile of operands
        tiles = functools.partial(_in_matrix_tiles, kind, size)
        return PeakLoop(_running(isa, tiles), 2, 2, size // 4, 2 * 4 * 16 * 16 * GROUP_INPUTS, 256)
    return PeakLoop(_running(isa, write), rows, columns, lanes, operations, lanes)


def _in_matrix_tiles(
    kind: str, size: int, emit: Emit, weights: Value, inputs: Value, out: Value, turns: Value
) -> None:
    """Tiles of 32 inputs, operands of `size` bytes; of int8 as many as share a scale."""
    width = size // 16
    emit.shape_tiles(((16, 64),) * 4 + ((16, width),) * 2 + ((width // 4, 64),) * 2, out)
    for tile in range(4):
        emit.matrix("tilezero", tile)
    with emit.loop(0, turns) as turn:
        at = emit.mul(emit.b.and_(turn, emit.i64(OPERAND_STEPS - 1)), 2 * size)
        for i in range(2):
            emit.matrix("tileloadd64", 4 + i, at=(emit.add(inputs, at, i * size), emit.i64(width)))
            emit.matrix("tileloadd64", 6 + i, at=(emit.add(weights, at, i * size), emit.i64(64)))
        for tile in range(4):
            emit.matrix(
                "tdpbssd" if kind == "int8" else "tdpbf16ps", tile, 4 + tile // 2, 6 + tile % 2
            )
    for tile in range(4):
        emit.matrix("tilestored64", tile, at=(emit.add(out, tile * 1024), emit.i64(64)))
    emit.matrix("tilerelease")


def _running(isa: Isa, write: Callable[..., None]) -> Callable[..., Any]:
    """The loop that `write` emits, compiled with the clock around it."""
    accumulate = emitted(isa, write)
    clock = libc_address("clock_gettime")

    @numba.njit(nogil=True)
    def run(weights, inputs, out, turns, readings):
        leave_time(clock, readings.ctypes.data)
        for chunk in range(1, len(readings)):
            accumulate(weights.ctypes.data, inputs.ctypes.data, out.ctypes.data, turns)
            leave_time(clock, readings.ctypes.data + TIMESPEC_BYTES * chunk)

    return run


@functools.cache
def read_loop(isa: Isa) -> Callable[..., Any]:
    """Compiled `read(memory, slice_bytes, repeats, readings)`: the xor of all words read.

    A chunk is `repeats` slices of the uint8 `memory`, one after the other and round again; a slice
    is a multiple of READ_TURN_BYTES. The clock is read as by `PeakLoop.run`. Sixteen loads per turn
    in eight chains: only memory limits it.
    """
    words = vector(I64, isa.lanes // 2)
    width = 4 * isa.lanes
    loads = 16

    def write(emit: Emit, base, size) -> Value:
        chains = [emit.variable(ir.Constant(words, [0] * words.count)) for _ in range(8)]
        with emit.loop(0, size, loads * width) as at:
            for index in range(loads):
                chain = chains[index % len(chains)]
                chain.set(
                    emit.b.xor(chain.get(), emit.load(words, base, at, index * width, align=8))
                )
        total = chains[0].get()
        for chain in chains[1:]:
            total = emit.b.xor(total, chain.get())
        result = emit.b.extract_element(total, ir.Constant(I32, 0))
        for lane in range(1, words.count):
            result = emit.b.xor(result, emit.b.extract_element(total, ir.Constant(I32, lane)))
        return result

    read_once = emitted(isa, write)
    clock = libc_address("clock_gettime")

    @numba.njit(nogil=True)
    def read(memory, slice_bytes, repeats, readings):
        total = 0
        at = 0
        leave_time(clock, readings.ctypes.data)
        for chunk in range(1, len(readings)):
            for _ in range(repeats):
                total ^= read_once(memory.ctypes.data + at, slice_bytes)
                at = (at + slice_bytes) % memory.size
            leave_time(clock, readings.ctypes.data + TIMESPEC_BYTES * chunk)
        return total

    return read
