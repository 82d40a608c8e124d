"""Rows of the token embedding, from the checkpoint's blocks to float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from twinphase.backends.cpu.emit import F32, I8, I16, I32, Emit, Value, vector
from twinphase.backends.cpu.formats import GROUP_INPUTS
from twinphase.backends.cpu.intrinsics import (
    KERNEL_SIGNATURE,
    emitted,
    fields,
    load_u32,
    store_f32,
)
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


def _quantized_row(isa: Isa, fmt: BlockFormat) -> Any:
    """Numba function (row, width, out, bits of the scale) of a row in blocks."""

    def write(e: Emit, row: Value, width: Value, out: Value, bits: Value) -> None:
        factor = e.broadcast(e.b.bitcast(e.b.trunc(bits, I32), F32), GROUP_INPUTS)
        with e.loop(0, e.b.sdiv(width, e.i64(fmt.block_size))) as i:
            blocks = Blocks(e, fmt, [row], e.mul(i, fmt.block_bytes))
            to = e.add(out, e.mul(i, 4 * fmt.block_size))
            for group in range(fmt.block_size // GROUP_INPUTS):
                scale, minimum = _parameters(e, blocks, fmt, group)
                values = e.b.fmul(scale, _codes(e, blocks, fmt, group))
                if minimum is not None:
                    add = e.b.fsub if fmt.minima else e.b.fadd
                    values = add(values, minimum)
                e.store(e.b.fmul(values, factor), to, 4 * GROUP_INPUTS * group)

    return emitted(isa, 4, write)


def _dense_row(isa: Isa, dtype: str) -> Any:
    """The same of a row of F32, F16 or BF16."""
    element, size = DENSE_ELEMENTS[dtype]

    def write(e: Emit, row: Value, width: Value, out: Value, bits: Value) -> None:
        factor = e.b.bitcast(e.b.trunc(bits, I32), F32)
        whole = e.mul(e.b.sdiv(width, e.i64(GROUP_INPUTS)), GROUP_INPUTS)
        for start, end, lanes in ((0, whole, GROUP_INPUTS), (whole, width, 1)):
            with e.loop(start, end, lanes) as i:
                raw = e.load(vector(element, lanes), row, e.mul(i, size))
                values = e.b.fmul(dense_values(e, dtype, raw), e.broadcast(factor, lanes))
                e.store(values, out, e.mul(i, 4))

    return emitted(isa, 4, write)


def embed(isa: Isa, format_name: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """One row a tile.

    Arguments: address of token ids (int32), table, bytes of a table row, width, out, out stride,
    bits of the scale.
    """
    fmt = FORMATS[format_name]
    write_row = _quantized_row(isa, fmt) if fmt.quantized else _dense_row(isa, format_name)
    arguments = fields(7)

    def kernel(args: int, tile: int, scratch: int) -> None:
        ids, table, row_bytes, width, out, stride, scale = arguments(args)
        to = out + tile * stride
        write_row(table + load_u32(ids + 4 * tile) * row_bytes, width, to, scale)
        for k in range(width, stride // 4):
            # Memory is shared with other rows of this width, whose last columns need not be
            # padding.
            store_f32(to + 4 * k, 0.0)

    return KERNEL_SIGNATURE, kernel
