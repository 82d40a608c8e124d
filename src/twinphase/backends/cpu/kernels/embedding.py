"""Rows of the token embedding, read straight from the checkpoint's blocks to float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from twinphase.backends.cpu.emit import F32, Value
from twinphase.backends.cpu.formats import FORMATS, IQ4_VALUES, MXFP4_VALUES
from twinphase.backends.cpu.intrinsics import (
    KERNEL_SIGNATURE,
    fields,
    load_f16,
    load_f32,
    load_u8,
    load_u16,
    load_u32,
    store_f32,
)
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.packing import BLOCK_BYTES


@intrinsic
def _float_from_bits(ctx: Any, bits: Any) -> Any:
    """The float32 whose bits are the low 32 of an int64."""

    def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Value:
        return b.bitcast(b.trunc(args[0], ir.IntType(32)), F32)

    return types.float32(types.int64), codegen


@njit(inline="always")  # type: ignore[untyped-decorator]
def _k_scale(block: int, j: int) -> int:
    """6-bit scale j of a Q4_K or Q5_K block."""
    if j < 4:
        return load_u8(block + 4 + j) & 63
    return (load_u8(block + 8 + j) & 15) | (load_u8(block + j) >> 6 << 4)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _k_minimum(block: int, j: int) -> int:
    """6-bit minimum j of a Q4_K or Q5_K block."""
    if j < 4:
        return load_u8(block + 8 + j) & 63
    return (load_u8(block + 8 + j) >> 4) | (load_u8(block + 4 + j) >> 6 << 4)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _q3_scale(block: int, i: int) -> int:
    """Scale i of the 16 of a Q3_K block: 6 bits, less 32."""
    low = load_u8(block + 96 + i % 8) >> 4 * (i // 8) & 15
    return (low | (load_u8(block + 104 + i % 4) >> 2 * (i // 4) & 3) << 4) - 32


@njit(inline="always")  # type: ignore[untyped-decorator]
def _iq4_scale(block: int, j: int) -> int:
    """Scale j of the 8 of an IQ4_XS block: 6 bits, less 32."""
    low = load_u8(block + 4 + j // 2) >> 4 * (j % 2) & 15
    return (low | (load_u16(block + 2) >> 2 * j & 3) << 4) - 32


def _code_of(name: str) -> Any:
    """The function (block address, group within the block, input within the group) -> code."""

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def q4(block: int, j: int, k: int) -> int:
        return load_u8(block + header + k % 16) >> 4 * (k // 16) & 15

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def q5(block: int, j: int, k: int) -> int:
        low = load_u8(block + header + 4 + k % 16) >> 4 * (k // 16) & 15
        return low | (load_u32(block + header) >> k & 1) << 4

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def q8(block: int, j: int, k: int) -> int:
        return load_u8(block + 2 + k) ^ 128

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def q4_k(block: int, j: int, k: int) -> int:
        return load_u8(block + 16 + j // 2 * 32 + k) >> 4 * (j % 2) & 15

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def q5_k(block: int, j: int, k: int) -> int:
        low = load_u8(block + 48 + j // 2 * 32 + k) >> 4 * (j % 2) & 15
        return low | (load_u8(block + 16 + k) >> j & 1) << 4

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def q6_k(block: int, j: int, k: int) -> int:
        half = j // 4
        part = j % 4
        low = load_u8(block + half * 64 + part % 2 * 32 + k) >> 4 * (part // 2) & 15
        return low | (load_u8(block + 128 + half * 32 + k) >> 2 * part & 3) << 4

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def q2_k(block: int, j: int, k: int) -> int:
        return load_u8(block + 16 + j // 4 * 32 + k) >> 2 * (j % 4) & 3

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def q3_k(block: int, j: int, k: int) -> int:
        low = load_u8(block + 32 + j // 4 * 32 + k) >> 2 * (j % 4) & 3
        return low | (load_u8(block + k) >> j & 1) << 2

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def iq4_xs(block: int, j: int, k: int) -> int:
        return load_u8(block + 8 + 16 * j + k % 16) >> 4 * (k // 16) & 15

    header = 4 if name.endswith("_1") else 1 if name == "MXFP4" else 2
    return {
        "Q4_0": q4,
        "Q4_1": q4,
        "Q5_0": q5,
        "Q5_1": q5,
        "Q8_0": q8,
        "Q4_K": q4_k,
        "Q5_K": q5_k,
        "Q6_K": q6_k,
        "Q2_K": q2_k,
        "Q3_K": q3_k,
        "IQ4_NL": q4,
        "IQ4_XS": iq4_xs,
        "MXFP4": q4,
    }[name]


def _value_of(isa: Isa, name: str) -> Any:
    """The function (row address, input index) -> float32."""
    half = load_f16(isa)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def f32(row: int, k: int) -> float:
        return load_f32(row + 4 * k)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def f16(row: int, k: int) -> float:
        return half(row + 2 * k)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def bf16(row: int, k: int) -> float:
        return _float_from_bits(load_u16(row + 2 * k) << 16)

    if name in ("F32", "F16", "BF16"):
        return {"F32": f32, "F16": f16, "BF16": bf16}[name]
    fmt = FORMATS[name]
    size = BLOCK_BYTES[name]
    code = _code_of(name)
    offset = fmt.offset
    minimum = fmt.minimum

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def flat(row: int, k: int) -> float:
        block = row + k // 32 * size
        value = half(block) * types.float32(code(block, 0, k % 32) - offset)
        return value + half(block + 2) if minimum else value

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def nested(row: int, k: int) -> float:
        block = row + k // 256 * size
        j = k // 32 % 8
        scale = half(block) * types.float32(_k_scale(block, j))
        return scale * types.float32(code(block, j, k % 32)) - half(block + 2) * types.float32(
            _k_minimum(block, j)
        )

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def q6_k(row: int, k: int) -> float:
        block = row + k // 256 * size
        j = k // 32 % 8
        small = (load_u32(block + 192 + k // 16 % 16) & 255 ^ 128) - 128
        return half(block + 208) * types.float32(small) * types.float32(code(block, j, k % 32) - 32)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def q2_k(row: int, k: int) -> float:
        block = row + k // 256 * size
        j = k // 32 % 8
        both = load_u8(block + k // 16 % 16)
        scale = half(block + 80) * types.float32(both & 15)
        return scale * types.float32(code(block, j, k % 32)) - half(block + 82) * types.float32(
            both >> 4
        )

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def q3_k(row: int, k: int) -> float:
        block = row + k // 256 * size
        j = k // 32 % 8
        scale = half(block + 108) * types.float32(_q3_scale(block, k // 16 % 16))
        return scale * types.float32(code(block, j, k % 32) - 4)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def iq4_nl(row: int, k: int) -> float:
        block = row + k // 32 * size
        return half(block) * types.float32(IQ4_VALUES[code(block, 0, k % 32)])

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def iq4_xs(row: int, k: int) -> float:
        block = row + k // 256 * size
        j = k // 32 % 8
        scale = half(block) * types.float32(_iq4_scale(block, j))
        return scale * types.float32(IQ4_VALUES[code(block, j, k % 32)])

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def mxfp4(row: int, k: int) -> float:
        block = row + k // 32 * size
        scale = _float_from_bits(load_u8(block) << 23) * types.float32(0.5)
        return scale * types.float32(MXFP4_VALUES[code(block, 0, k % 32)])

    special = {
        "Q6_K": q6_k,
        "Q2_K": q2_k,
        "Q3_K": q3_k,
        "IQ4_NL": iq4_nl,
        "IQ4_XS": iq4_xs,
        "MXFP4": mxfp4,
    }
    return special.get(name, nested if fmt.nested else flat)


def embed(isa: Isa, format_name: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """One row a tile.

    Arguments: address of token ids (int32), table, bytes of a table row, width, out, out stride,
    bits of the scale.
    """
    value_of = _value_of(isa, format_name)
    arguments = fields(7)

    def kernel(args: int, tile: int, scratch: int) -> None:
        ids, table, row_bytes, width, out, stride, bits = arguments(args)
        scale = _float_from_bits(bits)
        row = table + load_u32(ids + 4 * tile) * row_bytes
        to = out + tile * stride
        for k in range(width):
            store_f32(to + 4 * k, value_of(row, k) * scale)
        for k in range(width, stride // 4):
            # Memory is shared with other rows of this width, whose last columns need not be
            # padding.
            store_f32(to + 4 * k, 0.0)

    return KERNEL_SIGNATURE, kernel
