"""RMSNorm, SwiGLU, and the picking of rows; rows are padded to multiples of 32.

The quantization of a result is fused in: a spec ends in `q8` where the next linear layer wants int8 groups, in `f32`
where it wants float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from twinphase.backends.cpu.emit import F32, I64, Emit, Value, vector
from twinphase.backends.cpu.intrinsics import KERNEL_SIGNATURE, emitted, fields, load_i64, load_u32
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.quantize import store_quantized
from twinphase.backends.cpu.tiling import ROWS_PER_TILE, SILU_PARTS

__all__ = ["pick_rows", "rms_norm", "silu_mul"]

GROUP_OF_FLOATS = vector(F32, 32)


def _store(e: Emit, kind: str, values: Value, g: Value, out: Value, scale: Value, fsum: Value, isum: Value) -> None:
    if kind == "q8":
        store_quantized(e, values, g, out, scale, fsum, isum)
    else:
        e.store(values, out, e.mul(g, 128))


def rms_norm(isa: Isa, kind: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """out = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019, arXiv:1910.07467).

    Arguments: address of the row count, x, x stride, weight, width, eps bits, groups, out, scale, fsum, isum.
    """
    width_of_row = 32 if kind == "q8" else 128

    def write(e: Emit, x: Value, weight: Value, width: Value, eps: Value, groups: Value, out: Value, scale: Value,
              fsum: Value, isum: Value) -> None:  # fmt: skip
        squares = e.variable(e.splat(GROUP_OF_FLOATS, 0.0))
        with e.loop(0, groups) as g:
            values = e.load(GROUP_OF_FLOATS, x, e.mul(g, 128))
            squares.set(e.fma(values, values, squares.get()))
        mean = e.b.fdiv(e.reduce_add(squares.get()), e.b.sitofp(width, F32))
        root = e.unary("sqrt", e.b.fadd(mean, e.b.bitcast(e.b.trunc(eps, ir.IntType(32)), F32)))
        factor = e.broadcast(e.b.fdiv(ir.Constant(F32, 1.0), root), 32)
        with e.loop(0, groups) as g:
            values = e.b.fmul(e.load(GROUP_OF_FLOATS, x, e.mul(g, 128)), factor)
            values = e.b.fmul(values, e.load(GROUP_OF_FLOATS, weight, e.mul(g, 128)))
            _store(e, kind, values, g, out, scale, fsum, isum)

    row_of, arguments = emitted(isa, 9, write), fields(11)

    def kernel(args: int, tile: int, scratch: int) -> None:
        count, x, stride, weight, width, eps, groups, out, scale, fsum, isum = arguments(args)
        for m in range(tile * ROWS_PER_TILE, min(load_i64(count), (tile + 1) * ROWS_PER_TILE)):
            at = 4 * m * groups
            row_of(x + m * stride, weight, width, eps, groups, out + m * groups * width_of_row,
                   scale + at, fsum + at, isum + 2 * at)  # fmt: skip

    return KERNEL_SIGNATURE, kernel


def silu_mul(isa: Isa, kind: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """out = silu(gate) * up (Shazeer, 2020, arXiv:2002.05202).

    Arguments: gate, up, their stride, groups, out, scale, fsum, isum.
    """
    width_of_row = 32 if kind == "q8" else 128

    def write(e: Emit, gate: Value, up: Value, first: Value, end: Value, out: Value, scale: Value, fsum: Value,
              isum: Value) -> None:  # fmt: skip
        with e.loop(first, end) as g:
            here = e.mul(g, ir.Constant(I64, 128))
            values = e.b.fmul(e.silu(e.load(GROUP_OF_FLOATS, gate, here)), e.load(GROUP_OF_FLOATS, up, here))
            _store(e, kind, values, g, out, scale, fsum, isum)

    part_of, arguments = emitted(isa, 8, write), fields(8)

    def kernel(args: int, tile: int, scratch: int) -> None:
        gate, up, stride, groups, out, scale, fsum, isum = arguments(args)
        m, part = tile // SILU_PARTS, tile % SILU_PARTS
        first, end = part * groups // SILU_PARTS, (part + 1) * groups // SILU_PARTS
        at = 4 * m * groups
        part_of(gate + m * stride, up + m * stride, first, end, out + m * groups * width_of_row,
                scale + at, fsum + at, isum + 2 * at)  # fmt: skip

    return KERNEL_SIGNATURE, kernel


def pick_rows(isa: Isa) -> tuple[Any, Callable[[int, int, int], None]]:
    """out[m] = x[numbers[m]], one row a tile.

    Arguments: row numbers (int32), x, its stride, groups, out.
    """

    def write(e: Emit, x: Value, groups: Value, out: Value) -> None:
        with e.loop(0, groups) as g:
            e.store(e.load(GROUP_OF_FLOATS, x, e.mul(g, 128)), out, e.mul(g, 128))

    copy, arguments = emitted(isa, 3, write), fields(5)

    def kernel(args: int, tile: int, scratch: int) -> None:
        numbers, x, stride, groups, out = arguments(args)
        copy(x + load_u32(numbers + 4 * tile) * stride, groups, out + tile * groups * 128)

    return KERNEL_SIGNATURE, kernel
