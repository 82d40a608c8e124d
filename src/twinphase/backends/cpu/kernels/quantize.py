"""Activations to int8: 32 values share a scale, as llama.cpp's Q8 activations do; or to bfloat16.

A quantized row is four arrays: int8 values, float32 scale of each group, scale * sum of each group
(for formats with a minimum), and int32 sums of each 16 values (for formats with an offset).
Rounding is to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from twinphase.backends.cpu.emit import F32, I8, I32, I64, Emit, Value, vector
from twinphase.backends.cpu.intrinsics import Kernel, block_kernel, row_kernel
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.blocks import turned
from twinphase.backends.cpu.tiling import MATRIX_TILE_ROWS

# Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
MAGIC = 12582912.0
MAGIC_BITS = 0x4B400000


def round_to_int(e: Emit, x: Value, factor: Value) -> Value:
    """x * factor rounded to the nearest int32; magnitudes below 2^22."""
    ints = vector(I32, x.type.count)
    shifted = e.fma(x, factor, e.splat(x.type, MAGIC))
    return e.b.sub(e.b.bitcast(shifted, ints), e.splat(ints, MAGIC_BITS))


def absmax_scale(e: Emit, largest: Value) -> tuple[Value, Value]:
    """(scale, 1 / scale) of scalars up to `largest` in magnitude; (0, 0) when all are zero."""
    zero = ir.Constant(F32, 0.0)
    positive = e.b.fcmp_ordered(">", largest, zero)
    scale = e.b.fdiv(largest, ir.Constant(F32, 127.0))
    inverse = e.b.fdiv(ir.Constant(F32, 127.0), largest)
    return e.b.select(positive, scale, zero), e.b.select(positive, inverse, zero)


def store_quantized(
    e: Emit, values: Value, g: Value, data: Value, scale: Value, fsum: Value, isum: Value
) -> None:
    """Quantize group g, a float32 vector of 32, into a row's four arrays."""
    factor, inverse = absmax_scale(e, e.reduce_max(e.unary("fabs", values)))
    numbers = round_to_int(e, values, e.broadcast(inverse, 32))
    e.store(e.b.trunc(numbers, vector(I8, 32)), data, e.mul(g, 32))
    halves = [e.reduce_add(e.shuffle(numbers, None, range(i, i + 16))) for i in (0, 16)]
    e.store(halves[0], isum, e.mul(g, 8))
    e.store(halves[1], isum, e.mul(g, 8), 4)
    e.store(factor, scale, e.mul(g, 4))
    e.store(e.b.fmul(factor, e.b.sitofp(e.b.add(*halves), F32)), fsum, e.mul(g, 4))


def quantize(isa: Isa) -> Kernel:
    """Quantize rows.

    Arguments: rows' address, source, source stride, groups, data, scale, fsum, isum.
    """

    def write(e: Emit, m, source, stride, groups, data, scale, fsum, isum):
        row = e.add(source, e.mul(m, stride))
        first = e.mul(m, groups)
        with e.loop(0, groups) as g:
            values = e.load(vector(F32, 32), row, e.mul(g, 128))
            store_quantized(e, values, e.add(first, g), data, scale, fsum, isum)

    return row_kernel(isa, write)


class RowBlock:
    """Emits 16 rows of bfloat16, rounded to nearest even, in the order of matrix tiles.

    That is [16 rows' block][32 inputs][pair of inputs][row][2], the right operand of a tile
    instruction. Nothing reads the places of rows that are not there.

    Attributes:
        first: address of the block's first row, `rows` the number of its rows.
    """

    SCRATCH_BYTES = 64 * MATRIX_TILE_ROWS

    def __init__(self, e: Emit, tile: Value, count: Value, source: Value, stride: Value) -> None:
        """Block number `tile` of the rows whose count is at `count`."""
        self.e = e
        self.tile = tile
        self.stride = stride
        first = e.mul(tile, MATRIX_TILE_ROWS)
        self.rows = e.least(e.b.sub(e.load(I64, count), first), e.i64(MATRIX_TILE_ROWS))
        self.first = e.add(source, e.mul(first, stride))

    def put(
        self, values: Callable[[Value, Value, Value], Value], groups: Value, out: Value, scratch
    ) -> None:
        """Write `values` (address of a row, its number in the block, group): 32 float32 each."""
        e = self.e
        words = vector(I32, 4)
        to = e.add(out, e.mul(e.mul(self.tile, groups), 64 * MATRIX_TILE_ROWS))

        def rounded(m: Value, g: Value) -> Value:
            group = values(e.add(self.first, e.mul(m, self.stride)), m, g)
            return e.to_bf16(*(e.shuffle(group, None, range(i, i + 16)) for i in (0, 16)))

        with e.loop(0, groups) as g:
            here = e.add(to, e.mul(g, 64 * MATRIX_TILE_ROWS))
            with e.b.if_else(e.b.icmp_signed("<", self.rows, e.i64(5))) as (few, many):
                with few, e.loop(0, self.rows) as m:
                    pairs = rounded(m, g)
                    for i in range(16):
                        pair = e.b.extract_element(pairs, ir.Constant(I32, i))
                        e.store(pair, here, e.mul(m, 4), 64 * i)
                with many:
                    for m in range(MATRIX_TILE_ROWS):
                        last = e.add(self.rows, -1)
                        e.store(rounded(e.least(e.i64(m), last), g), scratch, 64 * m)
                    for quarter in range(4):
                        loads = [
                            e.load(words, scratch, 64 * m + 16 * quarter)
                            for m in range(MATRIX_TILE_ROWS)
                        ]
                        for i, pairs in enumerate(turned(e, loads)):
                            e.store(pairs, here, 64 * (4 * quarter + i))


def round_rows(isa: Isa) -> Kernel:
    """Round rows to bfloat16 in the order of matrix tiles.

    Arguments: address of the row count, source, source stride, groups of 32, out.
    """

    def write(e: Emit, tile, scratch, count, source, stride, groups, out):
        def values(row: Value, m: Value, g: Value) -> Value:
            return e.load(vector(F32, 32), row, e.mul(g, 128))

        RowBlock(e, tile, count, source, stride).put(values, groups, out, scratch)

    return block_kernel(isa, write)
