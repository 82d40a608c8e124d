"""RMSNorm, gates, sums, and the picking of rows; rows are padded to multiples of 32.

The quantization of a result is fused in: a spec ends in `q8` where the next linear layer wants int8
groups, in `f32` where it wants float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from twinphase.backends.cpu.emit import F32, I32, I64, Emit, Value, vector
from twinphase.backends.cpu.intrinsics import KERNEL_SIGNATURE, emitted, fields, load_i64, load_u32
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.quantize import store_quantized
from twinphase.backends.cpu.tiling import (
    ELEMENTWISE_TILE_ROWS,
    GATE_TILES_PER_ROW,
    LOGIT_TILES_PER_ROW,
)

GROUP_OF_FLOATS = vector(F32, 32)


def _store(
    e: Emit, kind: str, values: Value, g: Value, out: Value, scale: Value, fsum: Value, isum: Value
) -> None:
    if kind == "q8":
        store_quantized(e, values, g, out, scale, fsum, isum)
    else:
        e.store(values, out, e.mul(g, 128))


def _float(e: Emit, bits: Value) -> Value:
    """The float32 whose bits are the low 32 of an int64."""
    return e.b.bitcast(e.b.trunc(bits, I32), F32)


def _inverse_rms(e: Emit, x: Value, width: Value, eps: Value, groups: Value) -> Value:
    """1 / sqrt(mean(x^2) + eps), in every lane."""
    squares = e.variable(e.splat(GROUP_OF_FLOATS, 0.0))
    with e.loop(0, groups) as g:
        values = e.load(GROUP_OF_FLOATS, x, e.mul(g, 128))
        squares.set(e.fma(values, values, squares.get()))
    mean = e.b.fdiv(e.reduce_add(squares.get()), e.b.sitofp(width, F32))
    root = e.unary("sqrt", e.b.fadd(mean, _float(e, eps)))
    return e.broadcast(e.b.fdiv(ir.Constant(F32, 1.0), root), 32)


def rms_norm(isa: Isa, kind: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """out = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019, arXiv:1910.07467).

    Arguments: address of the row count, x, x stride, weight, width, eps bits, groups, out, scale,
    fsum, isum.
    """
    width_of_row = 32 if kind == "q8" else 128

    def write(
        e: Emit,
        x: Value,
        weight: Value,
        width: Value,
        eps: Value,
        groups: Value,
        out: Value,
        scale: Value,
        fsum: Value,
        isum: Value,
    ) -> None:
        factor = _inverse_rms(e, x, width, eps, groups)
        with e.loop(0, groups) as g:
            values = e.b.fmul(e.load(GROUP_OF_FLOATS, x, e.mul(g, 128)), factor)
            values = e.b.fmul(values, e.load(GROUP_OF_FLOATS, weight, e.mul(g, 128)))
            _store(e, kind, values, g, out, scale, fsum, isum)

    row_of = emitted(isa, 9, write)
    arguments = fields(11)

    def kernel(args: int, tile: int, scratch: int) -> None:
        count, x, stride, weight, width, eps, groups, out, scale, fsum, isum = arguments(args)
        for m in range(
            tile * ELEMENTWISE_TILE_ROWS, min(load_i64(count), (tile + 1) * ELEMENTWISE_TILE_ROWS)
        ):
            at = 4 * m * groups
            row_of(
                x + m * stride,
                weight,
                width,
                eps,
                groups,
                out + m * groups * width_of_row,
                scale + at,
                fsum + at,
                isum + 2 * at,
            )

    return KERNEL_SIGNATURE, kernel


def gate_mul(isa: Isa, activation: str, kind: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """out = activation(gate) * up (Shazeer, 2020, arXiv:2002.05202); "swiglu_oai" as in gpt-oss.

    Arguments: gate, up, their stride, groups, out, scale, fsum, isum.
    """
    width_of_row = 32 if kind == "q8" else 128

    def gated(e: Emit, gate: Value, up: Value) -> Value:
        if activation != "swiglu_oai":
            return e.b.fmul(e.silu(gate) if activation == "silu" else e.gelu(gate), up)
        limit = e.splat(gate.type, 7.0)
        minus = e.splat(gate.type, -7.0)
        gate = e.minimum(gate, limit)
        up = e.maximum(e.minimum(up, limit), minus)
        return e.b.fmul(e.silu(gate, 1.702), e.b.fadd(up, e.splat(up.type, 1.0)))

    def write(
        e: Emit,
        gate: Value,
        up: Value,
        first: Value,
        end: Value,
        out: Value,
        scale: Value,
        fsum: Value,
        isum: Value,
    ) -> None:
        with e.loop(first, end) as g:
            here = e.mul(g, ir.Constant(I64, 128))
            values = gated(
                e, e.load(GROUP_OF_FLOATS, gate, here), e.load(GROUP_OF_FLOATS, up, here)
            )
            _store(e, kind, values, g, out, scale, fsum, isum)

    part_of = emitted(isa, 8, write)
    arguments = fields(8)

    def kernel(args: int, tile: int, scratch: int) -> None:
        gate, up, stride, groups, out, scale, fsum, isum = arguments(args)
        m = tile // GATE_TILES_PER_ROW
        part = tile % GATE_TILES_PER_ROW
        first = part * groups // GATE_TILES_PER_ROW
        end = (part + 1) * groups // GATE_TILES_PER_ROW
        at = 4 * m * groups
        part_of(
            gate + m * stride,
            up + m * stride,
            first,
            end,
            out + m * groups * width_of_row,
            scale + at,
            fsum + at,
            isum + 2 * at,
        )

    return KERNEL_SIGNATURE, kernel


def add(isa: Isa) -> tuple[Any, Callable[[int, int, int], None]]:
    """out = x + scale * h. Arguments: address of the row count, x, h, scale bits, groups, out."""

    def write(e: Emit, x: Value, h: Value, scale: Value, groups: Value, out: Value) -> None:
        factor = e.broadcast(_float(e, scale), 32)
        with e.loop(0, groups) as g:
            at = e.mul(g, 128)
            e.store(
                e.fma(e.load(GROUP_OF_FLOATS, h, at), factor, e.load(GROUP_OF_FLOATS, x, at)),
                out,
                at,
            )

    row_of = emitted(isa, 5, write)
    arguments = fields(6)

    def kernel(args: int, tile: int, scratch: int) -> None:
        count, x, h, scale, groups, out = arguments(args)
        for m in range(
            tile * ELEMENTWISE_TILE_ROWS, min(load_i64(count), (tile + 1) * ELEMENTWISE_TILE_ROWS)
        ):
            at = m * groups * 128
            row_of(x + at, h + at, scale, groups, out + at)

    return KERNEL_SIGNATURE, kernel


def add_norm(isa: Isa) -> tuple[Any, Callable[[int, int, int], None]]:
    """out = x + scale * rms_norm(h).

    Arguments: address of the row count, x, h, weight, width, eps bits, scale bits, groups, out.
    """

    def write(
        e: Emit,
        x: Value,
        h: Value,
        weight: Value,
        width: Value,
        eps: Value,
        scale: Value,
        groups: Value,
        out: Value,
    ) -> None:
        root = _inverse_rms(e, h, width, eps, groups)
        factor = e.broadcast(_float(e, scale), 32)
        with e.loop(0, groups) as g:
            at = e.mul(g, 128)
            values = e.b.fmul(e.load(GROUP_OF_FLOATS, h, at), root)
            values = e.b.fmul(values, e.load(GROUP_OF_FLOATS, weight, at))
            e.store(e.fma(values, factor, e.load(GROUP_OF_FLOATS, x, at)), out, at)

    row_of = emitted(isa, 8, write)
    arguments = fields(9)

    def kernel(args: int, tile: int, scratch: int) -> None:
        count, x, h, weight, width, eps, scale, groups, out = arguments(args)
        for m in range(
            tile * ELEMENTWISE_TILE_ROWS, min(load_i64(count), (tile + 1) * ELEMENTWISE_TILE_ROWS)
        ):
            at = m * groups * 128
            row_of(x + at, h + at, weight, width, eps, scale, groups, out + at)

    return KERNEL_SIGNATURE, kernel


def cap_logits(isa: Isa, capped: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """out = x * scale, then cap * tanh(out / cap) where `capped` is "1".

    Arguments: x, groups, out, bits of scale, of 2 log2(e) / cap and of cap.
    """

    def write(
        e: Emit,
        x: Value,
        first: Value,
        end: Value,
        out: Value,
        scale: Value,
        slope: Value,
        cap: Value,
    ) -> None:
        factor, steep, most = (e.broadcast(_float(e, bits), 32) for bits in (scale, slope, cap))
        with e.loop(first, end) as g:
            values = e.b.fmul(e.load(GROUP_OF_FLOATS, x, e.mul(g, 128)), factor)
            if capped == "1":
                values = e.softcap(values, steep, most)
            e.store(values, out, e.mul(g, 128))

    part_of = emitted(isa, 7, write)
    arguments = fields(6)

    def kernel(args: int, tile: int, scratch: int) -> None:
        x, groups, out, scale, slope, cap = arguments(args)
        part = tile % LOGIT_TILES_PER_ROW
        at = tile // LOGIT_TILES_PER_ROW * groups * 128
        part_of(
            x + at,
            part * groups // LOGIT_TILES_PER_ROW,
            (part + 1) * groups // LOGIT_TILES_PER_ROW,
            out + at,
            scale,
            slope,
            cap,
        )

    return KERNEL_SIGNATURE, kernel


def pick_rows(isa: Isa, kind: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """out[m] = x[numbers[m]], one row a tile.

    Arguments: row numbers (int32), groups, x (int8 data, scale, fsum, isum; or float32 and
    nothing), out likewise.
    """
    small = (("scale", 4), ("fsum", 4), ("isum", 8)) if kind == "q8" else ()
    size = 32 if kind == "q8" else 128
    word = vector(F32, size // 4)

    def write(e: Emit, groups: Value, x: Value, out: Value, *arrays: Value) -> None:
        with e.loop(0, groups) as g:
            e.store(e.load(word, x, e.mul(g, size)), out, e.mul(g, size))
            for i, (_, width) in enumerate(small):
                source = arrays[2 * i]
                target = arrays[2 * i + 1]
                e.store(
                    e.load(ir.IntType(8 * width), source, e.mul(g, width)), target, e.mul(g, width)
                )

    copy = emitted(isa, 9, write)
    arguments = fields(10)

    def kernel(args: int, tile: int, scratch: int) -> None:
        numbers, groups, x, scale, fsum, isum, out, to_scale, to_fsum, to_isum = arguments(args)
        row = load_u32(numbers + 4 * tile) * groups
        to = tile * groups
        copy(
            groups,
            x + size * row,
            out + size * to,
            scale + 4 * row,
            to_scale + 4 * to,
            fsum + 4 * row,
            to_fsum + 4 * to,
            isum + 8 * row,
            to_isum + 8 * to,
        )

    return KERNEL_SIGNATURE, kernel
