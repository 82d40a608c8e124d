"""RMSNorm, gates, sums, and the picking of rows; rows are padded to multiples of 32.

The quantization of a result is fused in: a spec ends in `q8` where the next linear layer wants int8
groups, in `f32` where it wants float32.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from twinphase.backends.cpu.emit import F32, I32, I64, Emit, Value, vector
from twinphase.backends.cpu.intrinsics import Kernel, block_kernel, row_kernel, tile_kernel
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.quantize import RowBlock, store_quantized
from twinphase.backends.cpu.tiling import GATE_TILES_PER_ROW, LOGIT_TILES_PER_ROW

GROUP_OF_FLOATS = vector(F32, 32)


def store_group(e: Emit, kind: str, values: Value, g: Value, out: Value, *sums: Value) -> None:
    """A result's group; `sums` are the addresses of scale, fsum and isum."""
    if kind == "q8":
        store_quantized(e, values, g, out, *sums)
    else:
        e.store(values, out, e.mul(g, 128))


def inverse_rms(e: Emit, x: Value, end: Value, width: Value, eps: Value, lanes: int) -> Value:
    """1 / sqrt(mean(x^2) + eps) of `width` values, read up to `end` by that many lanes."""
    squares = e.variable(e.splat(vector(F32, lanes), 0.0))
    with e.loop(0, end, lanes) as i:
        values = e.load(vector(F32, lanes), x, e.mul(i, 4))
        squares.set(e.fma(values, values, squares.get()))
    mean = e.b.fdiv(e.reduce_add(squares.get()), e.b.sitofp(width, F32))
    root = e.unary("sqrt", e.b.fadd(mean, e.float_of(eps)))
    return e.b.fdiv(ir.Constant(F32, 1.0), root)


def _normalized(e: Emit, x, weight, width, eps, groups) -> Callable[[Value], Value]:
    """Group g of a normalized row, by its number."""
    inverse = inverse_rms(e, x, e.mul(groups, 32), width, eps, 32)
    factor = e.broadcast(inverse, 32)

    def group(g: Value) -> Value:
        return _weighted(e, x, weight, factor, g)

    return group


def _weighted(e: Emit, row: Value, weight: Value, factor: Value, g: Value) -> Value:
    """Group g of a row, times the row's factor and the weights."""
    at = e.mul(g, 128)
    values = e.b.fmul(e.load(GROUP_OF_FLOATS, row, at), factor)
    return e.b.fmul(values, e.load(GROUP_OF_FLOATS, weight, at))


def rms_norm(isa: Isa, kind: str) -> Kernel:
    """out = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019, arXiv:1910.07467).

    Arguments: address of the row count, x, x stride, weight, width, eps bits, groups, out, scale,
    fsum, isum. A tile of kind "bf16" has 16 rows.
    """
    if kind == "bf16":
        return _rms_norm_in_tiles(isa)

    def write(e: Emit, m, x, stride, weight, width, eps, groups, out, scale, fsum, isum):
        normalized = _normalized(e, e.add(x, e.mul(m, stride)), weight, width, eps, groups)
        first = e.mul(m, groups)
        with e.loop(0, groups) as g:
            store_group(e, kind, normalized(g), e.add(first, g), out, scale, fsum, isum)

    return row_kernel(isa, write)


def _rms_norm_in_tiles(isa: Isa) -> Kernel:
    """Sixteen rows in the order of matrix tiles; their factors wait in scratch memory."""

    def write(e: Emit, tile, scratch, count, x, stride, weight, width, eps, groups, out):
        block = RowBlock(e, tile, count, x, stride)
        factors = e.add(scratch, RowBlock.SCRATCH_BYTES)
        with e.loop(0, block.rows) as m:
            row = e.add(block.first, e.mul(m, stride))
            inverse = inverse_rms(e, row, e.mul(groups, 32), width, eps, 32)
            e.store(inverse, factors, e.mul(m, 4))

        def normalized(row: Value, m: Value, g: Value) -> Value:
            factor = e.broadcast(e.load(F32, factors, e.mul(m, 4)), 32)
            return _weighted(e, row, weight, factor, g)

        block.put(normalized, groups, out, scratch)

    return block_kernel(isa, write)


def part_of_row(e: Emit, tile: Value, parts: int, groups: Value) -> tuple[Value, Value, Value]:
    """A tile's row, and the first and end group of its part of the row."""
    part = e.b.srem(tile, e.i64(parts))
    first, end = (e.b.sdiv(e.mul(at, groups), e.i64(parts)) for at in (part, e.add(part, 1)))
    return e.b.sdiv(tile, e.i64(parts)), first, end


def gated(e: Emit, activation: str, gate: Value, up: Value) -> Value:
    """activation(gate) * up of float32 vectors."""
    if activation == "relu":
        return e.b.fmul(e.maximum(gate, e.splat(gate.type, 0.0)), up)
    if activation != "swiglu_oai":
        return e.b.fmul(e.silu(gate) if activation == "silu" else e.gelu(gate), up)
    limit = e.splat(gate.type, 7.0)
    minus = e.splat(gate.type, -7.0)
    gate = e.minimum(gate, limit)
    up = e.maximum(e.minimum(up, limit), minus)
    return e.b.fmul(e.silu(gate, 1.702), e.b.fadd(up, e.splat(up.type, 1.0)))


def gate_mul(isa: Isa, activation: str, kind: str) -> Kernel:
    """out = activation(gate) * up (Shazeer, 2020, arXiv:2002.05202); "swiglu_oai" as in gpt-oss.

    Arguments: gate, up, their strides, groups, out, scale, fsum, isum.
    """

    def write(e: Emit, tile, gate, up, stride, up_stride, groups, out, scale, fsum, isum):
        m, first, end = part_of_row(e, tile, GATE_TILES_PER_ROW, groups)
        rows = e.add(gate, e.mul(m, stride)), e.add(up, e.mul(m, up_stride))
        with e.loop(first, end) as g:
            both = [e.load(GROUP_OF_FLOATS, row, e.mul(g, 128)) for row in rows]
            values = gated(e, activation, *both)
            store_group(e, kind, values, e.add(e.mul(m, groups), g), out, scale, fsum, isum)

    return tile_kernel(isa, write)


def add(isa: Isa) -> Kernel:
    """out = x + scale * h. Arguments: address of the row count, x, h, scale bits, groups, out."""

    def write(e: Emit, m, x, h, scale, groups, out):
        factor = e.broadcast(e.float_of(scale), 32)
        first = e.mul(m, groups)
        with e.loop(first, e.add(first, groups)) as g:
            at = e.mul(g, 128)
            values = e.load(GROUP_OF_FLOATS, h, at)
            e.store(e.fma(values, factor, e.load(GROUP_OF_FLOATS, x, at)), out, at)

    return row_kernel(isa, write)


def add_norm(isa: Isa) -> Kernel:
    """out = (x + scale * rms_norm(h)) * factor.

    Arguments: address of the row count, x, h, weight, width, bits of eps, of scale and of factor,
    groups, out.
    """

    def write(e: Emit, m, x, h, weight, width, eps, scale, factor, groups, out):
        row = e.mul(e.mul(m, groups), 128)
        normalized = _normalized(e, e.add(h, row), weight, width, eps, groups)
        inner, outer = (e.broadcast(e.float_of(bits), 32) for bits in (scale, factor))
        with e.loop(0, groups) as g:
            at = e.add(row, e.mul(g, 128))
            total = e.fma(normalized(g), inner, e.load(GROUP_OF_FLOATS, x, at))
            e.store(e.b.fmul(total, outer), out, at)

    return row_kernel(isa, write)


def add_gated(isa: Isa) -> Kernel:
    """out = x + sigmoid(y . weight) * h.

    Arguments: address of the row count, x, h, y, weight, groups of all, out.
    """

    def write(e: Emit, m, x, h, y, weight, groups, out):
        row = e.mul(e.mul(m, groups), 128)
        sums = e.variable(e.splat(GROUP_OF_FLOATS, 0.0))
        with e.loop(0, groups) as g:
            at = e.mul(g, 128)
            values = (e.load(GROUP_OF_FLOATS, y, row, at), e.load(GROUP_OF_FLOATS, weight, at))
            sums.set(e.fma(*values, sums.get()))
        gate = e.sigmoid(e.broadcast(e.reduce_add(sums.get()), 32))
        with e.loop(0, groups) as g:
            at = e.add(row, e.mul(g, 128))
            values = e.load(GROUP_OF_FLOATS, h, at)
            e.store(e.fma(values, gate, e.load(GROUP_OF_FLOATS, x, at)), out, at)

    return row_kernel(isa, write)


def cap_logits(isa: Isa, capped: str) -> Kernel:
    """out = x * scale, then cap * tanh(out / cap) where `capped` is "1".

    Arguments: x, groups, out, bits of scale, of 2 log2(e) / cap and of cap.
    """

    def write(e: Emit, tile, x, groups, out, scale, slope, cap):
        m, first, end = part_of_row(e, tile, LOGIT_TILES_PER_ROW, groups)
        factor, steep, most = (e.broadcast(e.float_of(bits), 32) for bits in (scale, slope, cap))
        with e.loop(first, end) as g:
            at = e.mul(e.add(e.mul(m, groups), g), 128)
            values = e.b.fmul(e.load(GROUP_OF_FLOATS, x, at), factor)
            if capped == "1":
                values = e.softcap(values, steep, most)
            e.store(values, out, at)

    return tile_kernel(isa, write)


def pick_rows(isa: Isa, kind: str) -> Kernel:
    """out[m] = x[numbers[m]], one row a tile.

    Arguments: row numbers (int32), groups, x (int8 data, scale, fsum, isum; or float32 and
    nothing), out likewise.
    """
    # Type and bytes of a group in each array.
    words = [(GROUP_OF_FLOATS, 128)]
    if kind == "q8":
        words = [(vector(F32, 8), 32), (I32, 4), (I32, 4), (I64, 8)]

    def write(e: Emit, tile, numbers, groups, *arrays):
        number = e.b.zext(e.load(I32, numbers, e.mul(tile, 4)), I64)
        with e.loop(0, groups) as g:
            source, target = (e.add(e.mul(row, groups), g) for row in (number, tile))
            for (word, size), x, out in zip(words, arrays[:4], arrays[4:], strict=False):
                e.store(e.load(word, x, e.mul(source, size)), out, e.mul(target, size))

    return tile_kernel(isa, write, starred=8)
