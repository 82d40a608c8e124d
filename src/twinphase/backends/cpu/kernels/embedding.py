"""Rows of the token embedding, from the checkpoint's blocks to float32."""

from __future__ import annotations

from llvmlite import ir

from twinphase.backends.cpu.emit import F32, I8, I16, I32, I64, Emit, Value, vector
from twinphase.backends.cpu.formats import GROUP_INPUTS
from twinphase.backends.cpu.intrinsics import Kernel, tile_kernel
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.blocks import Blocks
from twinphase.backends.cpu.kernels.linear import DENSE_ELEMENTS, dense_values
from twinphase.weights.block_formats import FORMATS, BlockFormat

VALUES = vector(F32, GROUP_INPUTS)


def _codes(e: Emit, blocks: Blocks, fmt: BlockFormat, group: int) -> Value:
    """What the codes of a group stand for, less their offset, float32 [32]."""
    words = ir.Constant(vector(I32, GROUP_INPUTS // 4), ir.Undefined)
    for i in range(GROUP_INPUTS // 4):
        quad = blocks.codes(GROUP_INPUTS * group + 4 * i)
        words = e.b.insert_element(words, quad, ir.Constant(I32, i))
    codes = e.b.bitcast(words, vector(I8, GROUP_INPUTS))
    if fmt.values:
        return e.b.sitofp(e.select_by_code(codes, fmt.values), VALUES)
    offset = 128 if fmt.bits == 8 else fmt.offset
    numbers = vector(I32, GROUP_INPUTS)
    return e.b.sitofp(e.b.sub(e.b.zext(codes, numbers), e.splat(numbers, offset)), VALUES)


def _parameters(e: Emit, blocks: Blocks, fmt: BlockFormat, group: int) -> tuple[Value, Value]:
    """Scale and minimum of each value of a group, float32 [32]; None for no minimum."""
    numbers = blocks.parameters(group)

    def half(bits: Value) -> Value:
        return e.widen(e.b.bitcast(e.b.trunc(bits, I16), ir.HalfType()))

    if fmt.power_scales:
        bits = e.b.shl(numbers[0], ir.Constant(I32, 23))
        floats = [e.b.fmul(e.b.bitcast(bits, F32), ir.Constant(F32, 0.5))]
    elif fmt.scales:
        halves = [half(blocks.word(at, I16)) for at in fmt.halves]
        count = GROUP_INPUTS // fmt.group_size
        floats = [
            e.b.fmul(halves[i // count], e.b.sitofp(number, F32))
            for i, number in enumerate(numbers)
        ]
    else:
        floats = [half(number) for number in numbers]
    lanes = [e.broadcast(value, fmt.group_size) for value in floats]
    if fmt.group_size < GROUP_INPUTS:
        lanes = [
            e.shuffle(lanes[i], lanes[i + 1], range(GROUP_INPUTS)) for i in range(0, len(lanes), 2)
        ]
    return lanes[0], lanes[1] if fmt.has_minimum else None


def _write_quantized(
    e: Emit, fmt: BlockFormat, row: Value, width: Value, out: Value, scale: Value
) -> None:
    """A row in blocks."""
    factor = e.broadcast(scale, GROUP_INPUTS)
    with e.loop(0, e.b.sdiv(width, e.i64(fmt.block_size))) as i:
        blocks = Blocks(e, fmt, [row], e.mul(i, fmt.block_bytes))
        to = e.add(out, e.mul(i, 4 * fmt.block_size))
        for group in range(fmt.block_size // GROUP_INPUTS):
            scales, minimum = _parameters(e, blocks, fmt, group)
            values = e.b.fmul(scales, _codes(e, blocks, fmt, group))
            if minimum is not None:
                add = e.b.fsub if fmt.minima else e.b.fadd
                values = add(values, minimum)
            e.store(e.b.fmul(values, factor), to, 4 * GROUP_INPUTS * group)


def _write_dense(
    e: Emit, fmt: BlockFormat, row: Value, width: Value, out: Value, scale: Value
) -> None:
    """A row of F32, F16 or BF16."""
    element, size = DENSE_ELEMENTS[fmt.name]
    whole = e.mul(e.b.sdiv(width, e.i64(GROUP_INPUTS)), GROUP_INPUTS)
    for start, end, lanes in ((0, whole, GROUP_INPUTS), (whole, width, 1)):
        with e.loop(start, end, lanes) as i:
            raw = e.load(vector(element, lanes), row, e.mul(i, size))
            values = e.b.fmul(dense_values(e, fmt.name, raw), e.broadcast(scale, lanes))
            e.store(values, out, e.mul(i, 4))


def embed(isa: Isa, format_name: str) -> Kernel:
    """One row a tile.

    Arguments: address of token ids (int32), table, bytes of a table row, width, out, out stride,
    bits of the scale.
    """
    fmt = FORMATS[format_name]
    write_row = _write_quantized if fmt.quantized else _write_dense

    def write(e: Emit, tile, ids, table, row_bytes, width, out, stride, scale):
        number = e.b.zext(e.load(I32, ids, e.mul(tile, 4)), I64)
        to = e.add(out, e.mul(tile, stride))
        row = e.add(table, e.mul(number, row_bytes))
        write_row(e, fmt, row, width, to, e.float_of(scale))
        # Memory is shared with other rows of this width, whose last columns need not be padding.
        with e.loop(e.mul(width, 4), stride, 4) as at:
            e.store(ir.Constant(F32, 0.0), to, at)

    return tile_kernel(isa, write)
