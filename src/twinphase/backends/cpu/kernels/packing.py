"""Packs a quantized matrix from a checkpoint's blocks into strips (`formats.py`), without changing a value.

The block layouts are those of ggml (ggml-common.h, `dequantize_row_*`), which the gguf package documents in
`gguf.quants`; the tests compare with that package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from twinphase.backends.cpu.formats import FORMATS, SUPER
from twinphase.backends.cpu.intrinsics import (
    KERNEL_SIGNATURE,
    fields,
    load_u8,
    load_u16,
    load_u32,
    store_u8,
    store_u16,
)
from twinphase.backends.cpu.isa import Isa

__all__ = ["BLOCK_BYTES", "code_of", "iq4_scale", "k_minimum", "k_scale", "pack", "q3_scale"]

HALF = 32768  # sign bit of a float16
BLOCK_BYTES = {
    "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176,
    "Q6_K": 210, "IQ4_NL": 18, "IQ4_XS": 136, "MXFP4": 17,
}  # fmt: skip


@njit(inline="always")  # type: ignore[untyped-decorator]
def k_scale(block: int, j: int) -> int:
    """6-bit scale j of a Q4_K or Q5_K block."""
    if j < 4:
        return load_u8(block + 4 + j) & 63
    return (load_u8(block + 8 + j) & 15) | (load_u8(block + j) >> 6 << 4)


@njit(inline="always")  # type: ignore[untyped-decorator]
def k_minimum(block: int, j: int) -> int:
    """6-bit minimum j of a Q4_K or Q5_K block."""
    if j < 4:
        return load_u8(block + 8 + j) & 63
    return (load_u8(block + 8 + j) >> 4) | (load_u8(block + 4 + j) >> 6 << 4)


@njit(inline="always")  # type: ignore[untyped-decorator]
def q3_scale(block: int, i: int) -> int:
    """Scale i of the 16 of a Q3_K block: 6 bits, less 32."""
    low = load_u8(block + 96 + i % 8) >> 4 * (i // 8) & 15
    return (low | (load_u8(block + 104 + i % 4) >> 2 * (i // 4) & 3) << 4) - 32


@njit(inline="always")  # type: ignore[untyped-decorator]
def iq4_scale(block: int, j: int) -> int:
    """Scale j of the 8 of an IQ4_XS block: 6 bits, less 32."""
    low = load_u8(block + 4 + j // 2) >> 4 * (j % 2) & 15
    return (low | (load_u16(block + 2) >> 2 * j & 3) << 4) - 32


def code_of(name: str) -> Any:
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
        half, part = j // 4, j % 4
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
        "Q4_0": q4, "Q4_1": q4, "Q5_0": q5, "Q5_1": q5, "Q8_0": q8, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
        "Q2_K": q2_k, "Q3_K": q3_k, "IQ4_NL": q4, "IQ4_XS": iq4_xs, "MXFP4": q4,
    }[name]  # fmt: skip


def _put_scales(name: str) -> Any:
    """The function (block, group within the block, output within the strip, record, header) that copies scales."""
    fmt = FORMATS[name]
    scale_at, minimum_at = fmt.code_bytes, fmt.code_bytes + fmt.scale_bytes

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def flat(block: int, j: int, o: int, record: int, header: int) -> None:
        store_u16(record + scale_at + 2 * o, load_u16(block))
        if has_minimum:
            store_u16(record + minimum_at + 2 * o, load_u16(block + 2))

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def nested(block: int, j: int, o: int, record: int, header: int) -> None:
        store_u8(record + scale_at + o, k_scale(block, j))
        store_u8(record + minimum_at + o, k_minimum(block, j))
        store_u16(header + 2 * o, load_u16(block))
        store_u16(header + 64 + 2 * o, load_u16(block + 2) ^ HALF)  # minima are subtracted there, added here

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def q6_k(block: int, j: int, o: int, record: int, header: int) -> None:
        store_u8(record + scale_at + o, load_u8(block + 192 + 2 * j))
        store_u8(record + scale_at + 32 + o, load_u8(block + 192 + 2 * j + 1))
        store_u16(header + 2 * o, load_u16(block + 208))

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def q2_k(block: int, j: int, o: int, record: int, header: int) -> None:
        for part in range(2):
            both = load_u8(block + 2 * j + part)
            store_u8(record + scale_at + 32 * part + o, both & 15)
            store_u8(record + minimum_at + 32 * part + o, both >> 4)
        store_u16(header + 2 * o, load_u16(block + 80))
        store_u16(header + 64 + 2 * o, load_u16(block + 82) ^ HALF)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def q3_k(block: int, j: int, o: int, record: int, header: int) -> None:
        for part in range(2):
            store_u8(record + scale_at + 32 * part + o, q3_scale(block, 2 * j + part))
        store_u16(header + 2 * o, load_u16(block + 108))

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def iq4_xs(block: int, j: int, o: int, record: int, header: int) -> None:
        store_u8(record + scale_at + o, iq4_scale(block, j))
        store_u16(header + 2 * o, load_u16(block))

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def mxfp4(block: int, j: int, o: int, record: int, header: int) -> None:
        store_u8(record + scale_at + o, load_u8(block))

    has_minimum = fmt.minimum
    special = {"Q6_K": q6_k, "Q2_K": q2_k, "Q3_K": q3_k, "IQ4_XS": iq4_xs, "MXFP4": mxfp4}
    return special.get(name, nested if fmt.nested else flat)


def pack(isa: Isa, format_name: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """One strip a tile. Arguments: source, bytes of a source row, outputs, groups, destination.

    Outputs beyond the matrix (the last strip's padding) keep what the destination holds, zeros.
    """
    fmt = FORMATS[format_name]
    code, put_scales = code_of(format_name), _put_scales(format_name)
    size, per_block = BLOCK_BYTES[format_name], SUPER if fmt.nested else 1
    record_bytes, header_bytes, bits = fmt.record_bytes, fmt.header_bytes, fmt.bits
    arguments, plane_lines, per_header = fields(5), fmt.plane_lines, SUPER if fmt.nested else 1

    def kernel(args: int, tile: int, scratch: int) -> None:
        source, row_bytes, outputs, groups, destination = arguments(args)
        strip_bytes = groups * record_bytes + groups // per_header * header_bytes
        for o in range(min(32, outputs - 32 * tile)):
            row, block_of_16, lane = source + (32 * tile + o) * row_bytes, o // 16, o % 16 * 4
            for g in range(groups):
                block, j = row + g // per_block * size, g % per_block
                header = destination + tile * strip_bytes + g // per_header * (header_bytes + per_header * record_bytes)
                record = header + header_bytes + g % per_header * record_bytes
                put_scales(block, j, o, record, header)
                for i in range(4):
                    plane0 = plane1 = 0
                    for quad in range(8):
                        value = code(block, j, 4 * quad + i)
                        if bits == 8:
                            store_u8(record + (2 * quad + block_of_16) * 64 + lane + i, value)
                        elif quad % 2 == 0:
                            store_u8(record + (2 * (quad // 2) + block_of_16) * 64 + lane + i, value & 15)
                        else:
                            at = record + (2 * (quad // 2) + block_of_16) * 64 + lane + i
                            store_u8(at, load_u8(at) | (value & 15) << 4)
                        if plane_lines == 1:
                            plane0 |= value >> 4 << quad
                        elif quad < 4:
                            plane0 |= value >> 4 << 2 * quad
                        else:
                            plane1 |= value >> 4 << 2 * (quad - 4)
                    if plane_lines >= 1:
                        at = record + 512 + block_of_16 * 64 + lane + i
                        store_u8(at, plane0)
                        if plane_lines == 2:
                            store_u8(at + 128, plane1)

    return KERNEL_SIGNATURE, kernel
