"""Packing changes no value: a reader written from `formats.py` gives back the weights."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
from kernel_calls import (
    call_kernel,
    kernel,
    pack,
    packed_format,
    per_isa_and_format,
    random_blocks,
)
from numpy.typing import NDArray

from twinphase.backends.cpu.formats import PackedFormat
from twinphase.backends.cpu.isa import choose_isa
from twinphase.backends.cpu.memory import aligned

Bytes = NDArray[np.uint8]
Reader = Callable[[Bytes, PackedFormat], NDArray[np.int32]]


def read_codes_by_outputs(record: Bytes, fmt: PackedFormat) -> NDArray[np.int32]:
    """The same where codes lie for matrix tiles in bfloat16."""
    if fmt.bits == 8:  # less their offset
        return record[: fmt.code_bytes].view(np.int8).reshape(32, 32).astype(np.int32)
    words = record[: fmt.code_bytes].view(np.uint16).astype(np.int32).reshape(8, 1, 32)
    codes = (words >> np.array([0, 4, 8, 12])[:, None] & 15).reshape(32, 32)
    return np.array(fmt.values, np.int32)[codes] if fmt.values else codes - fmt.offset


def read_codes(record: Bytes, fmt: PackedFormat) -> NDArray[np.int32]:
    """What the codes of a record stand for, [32 outputs, 32 inputs]."""
    codes = np.zeros((32, 32), np.int32)
    low = (
        record[: 128 * fmt.low_lines].reshape(fmt.low_lines, 2, 16, 4).swapaxes(0, 1)
    )  # block, line, output, input
    planes = (
        record[128 * fmt.low_lines : fmt.code_bytes]
        .reshape(fmt.plane_lines, 2, 16, 4)
        .swapaxes(0, 1)
    )
    high_bits = fmt.bits - 4
    for quad in range(8):
        if fmt.bits == 8:
            quads = low[:, quad].astype(np.int32)
        else:
            quads = low[:, quad // 2].astype(np.int32) >> 4 * (quad % 2) & 15
        if fmt.plane_lines:
            per_line = 8 // fmt.plane_lines
            line = planes[:, quad // per_line].astype(np.int32)
            quads = quads | (line >> high_bits * (quad % per_line) & (1 << high_bits) - 1) << 4
        codes[:, 4 * quad : 4 * quad + 4] = quads.reshape(32, 4)
    return np.array(fmt.values, np.int32)[codes] if fmt.values else codes - fmt.offset


def read_group(
    record: Bytes, header: Bytes, fmt: PackedFormat, read: Reader
) -> NDArray[np.float32]:
    """Weights of a record, [32 outputs, 32 inputs]."""
    parts = 32 // fmt.group
    scales = record[fmt.code_bytes :][: fmt.scale_bytes]
    minima = record[fmt.code_bytes + fmt.scale_bytes :]
    if fmt.nested:
        shared = header.view(np.float16).reshape(-1, 32).astype(np.float32)
        small = scales.view(np.int8 if fmt.signed_scales else np.uint8).reshape(parts, 32)
        scale = shared[0] * small.astype(np.float32)
        minimum = shared[1] * minima.reshape(parts, 32).astype(np.float32) if fmt.minimum else None
    elif fmt.power_scales:
        scale = (
            np.where(scales == 0, 0, 2.0 ** (scales.astype(np.float32) - 128))
            .astype(np.float32)
            .reshape(parts, 32)
        )
        minimum = None
    else:
        scale = scales.view(np.float16).reshape(parts, 32).astype(np.float32)
        minimum = (
            minima.view(np.float16).reshape(parts, 32).astype(np.float32) if fmt.minimum else None
        )
    spread = np.repeat(scale.T, fmt.group, axis=1)  # [32 outputs, 32 inputs]
    values = spread * read(record, fmt).astype(np.float32)
    return values if minimum is None else values + np.repeat(minimum.T, fmt.group, axis=1)


def read_strip(strip: Bytes, fmt: PackedFormat, groups: int, read: Reader) -> NDArray[np.float32]:
    """Weights of a strip, [32 outputs, inputs]."""
    values = []
    at = 0
    header = strip[:0]
    for group in range(groups):
        if fmt.nested and group % 8 == 0:
            header = strip[at : at + fmt.header_bytes]
            at = at + fmt.header_bytes
        values.append(read_group(strip[at : at + fmt.record_bytes], header, fmt, read))
        at += fmt.record_bytes
    assert at == len(strip)
    return np.concatenate(values, axis=1)


@per_isa_and_format
def test_every_weight_comes_back(name, isa):
    rng = np.random.default_rng(1)
    fmt = packed_format(isa, name)
    read = read_codes_by_outputs if choose_isa(isa).takes_bf16(name) else read_codes
    unit = 256 if fmt.nested else 32
    for outputs, inputs in (
        (32, unit),
        (1, 3 * unit),
        (33, 2 * unit),
        (70, 5 * unit),
        (96, 18 * unit),
    ):
        raw = random_blocks(rng, outputs, inputs, name)
        packed = pack(isa, name, raw, inputs)
        values = np.concatenate([read_strip(strip, fmt, inputs // 32, read) for strip in packed])
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
        np.testing.assert_array_equal(values[:outputs], expected)
        assert not values[outputs:].any(), "padding must be zeros, whatever it is multiplied with"


@per_isa_and_format
def test_rows_of_the_embedding(name, isa):
    rng = np.random.default_rng(2)
    width = 512
    raw = random_blocks(rng, 5, width, name)
    rows = np.array([3, 0, 4], np.int32)
    out = aligned(3 * width, np.float32).reshape(3, width)
    one = int(np.array(1, np.float32).view(np.int32))
    args = [
        rows.ctypes.data,
        raw.ctypes.data,
        raw.shape[1],
        width,
        out.ctypes.data,
        out.strides[0],
        one,
    ]
    call_kernel(kernel(isa, f"embed:{name}"), args, 3)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])[rows]
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7)
