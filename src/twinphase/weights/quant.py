"""Unpacks quantized tensors without loss in plain NumPy, by the table in `block_formats.py`.

`unpack` returns integers, scales and minima for backends, which pack them for their kernels;
`dequantize` returns float32 for the reference backend. `quantize.py` quantizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.weights.block_formats import FORMATS, BlockFormat, Numbers, Plane

_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]
_Quants = NDArray[np.uint8] | NDArray[np.int8]


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix as integers and per-group parameters: `scale * (q - offset) + minimum`.

    Attributes:
        q: uint8 [N, K]; int8 if the format has 8 bits.
        scale: float32 [N, K / group_size].
        minimum: float32 [N, K / group_size], or None if the format has no minimum.
    """

    q: _Quants
    scale: _Floats
    minimum: _Floats | None
    group_size: int
    offset: int

    def values(self) -> _Floats:
        """The matrix as float32 [N, K]."""
        rows, columns = self.q.shape
        # float32 represents every q - offset exactly, so each multiplication and addition rounds
        # only once.
        values = self.q.reshape(rows, -1, self.group_size).astype(np.float32)
        if self.offset:
            values -= np.float32(self.offset)
        values *= self.scale[..., None]
        if self.minimum is not None:
            values += self.minimum[..., None]
        return values.reshape(rows, columns)


def tensor_nbytes(shape: Sequence[int], type: str) -> int:
    """The size in bytes of a tensor with that row-major shape.

    Raises:
        UnsupportedModelError: the type is not in `FORMATS`.
        CheckpointError: a row is not a whole number of blocks.
    """
    fmt = _format(type)
    columns = shape[-1] if shape else 1
    if columns % fmt.block_size:
        raise CheckpointError(
            f"A row of {columns} values is not a whole number of {type} blocks of "
            f"{fmt.block_size}.",
            "The file is damaged or was written wrongly: fetch or convert it again.",
        )
    return math.prod(shape) // fmt.block_size * fmt.block_bytes


def dequantize(raw: _Bytes, shape: Sequence[int], type: str) -> _Floats:
    """Convert a tensor's values to float32.

    Args:
        raw: uint8 [nbytes], as stored.
        shape: row-major shape; a slice of rows is passed as a part of `raw` and a smaller shape.
        type: a key of `FORMATS`.

    Returns:
        A fresh float32 array of `shape`.

    Raises:
        UnsupportedModelError: the type is unknown.
        CheckpointError: the size of `raw` does not fit the shape and the type.
    """
    _check_size(raw, shape, type)
    if type == "F32":
        return raw.view(np.float32).reshape(shape).copy()
    if type == "F16":
        return raw.view(np.float16).astype(np.float32).reshape(shape)
    if type == "BF16":
        # bfloat16 is the upper half of a float32.
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return _unpack(raw, shape, type).values().reshape(shape)


def unpack(raw: _Bytes, shape: Sequence[int], type: str) -> QuantizedTensor:
    """Unpack a quantized tensor without loss.

    Args:
        raw: uint8 [nbytes], as stored.
        shape: row-major shape (N, K); further leading dimensions count as rows.
        type: a quantized type of `FORMATS`.

    Raises:
        UnsupportedModelError: the type is unknown or unquantized.
        CheckpointError: the size of `raw` does not fit the shape and the type.
    """
    _check_size(raw, shape, type)
    if not FORMATS[type].quantized:
        raise UnsupportedModelError(f"{type} is not a quantized type.", "Use dequantize for it.")
    return _unpack(raw, shape, type)


def _unpack(raw: _Bytes, shape: Sequence[int], type: str) -> QuantizedTensor:
    fmt = FORMATS[type]
    columns = shape[-1]
    rows = raw.size // (columns // fmt.block_size * fmt.block_bytes)
    blocks = raw.reshape(-1, fmt.block_bytes)
    q = _numbers(blocks, (fmt.codes,), fmt.block_size)
    if fmt.values:
        q = np.array(fmt.values, np.int8)[q]
    scale, minimum = _scales(blocks, fmt)
    return QuantizedTensor(
        q=q.reshape(rows, columns),
        scale=scale.reshape(rows, -1),
        minimum=None if minimum is None else minimum.reshape(rows, -1),
        group_size=fmt.group_size,
        offset=fmt.offset,
    )


def _format(type: str) -> BlockFormat:
    if type not in FORMATS:
        raise UnsupportedModelError(
            f"Tensor type {type} is not supported.", f"Use one of {', '.join(FORMATS)}."
        )
    return FORMATS[type]


def _check_size(raw: _Bytes, shape: Sequence[int], type: str) -> None:
    expected = tensor_nbytes(shape, type)
    if raw.dtype != np.uint8 or raw.size != expected:
        raise CheckpointError(
            f"A {type} tensor of shape {tuple(shape)} takes {expected} bytes, here are "
            f"{raw.nbytes}.",
            "The file is damaged: fetch it again.",
        )


def _half(blocks: _Bytes, start: int) -> _Floats:
    """The float16 at byte `start` of each block, float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _plane(blocks: _Bytes, plane: Plane, count: int) -> _Bytes:
    """The bits of `count` numbers in a plane, [blocks, count]."""
    start, bits, run, first = plane
    last = first + count
    per_byte = 8 // bits
    nbytes = -(-last // (run * per_byte)) * run
    raw = blocks[:, start : start + nbytes].reshape(len(blocks), -1, 1, run)
    if bits < 8:
        shifts = np.arange(0, bits * per_byte, bits, dtype=np.uint8)[:, None]
        raw = raw >> shifts & np.uint8((1 << bits) - 1)
    return raw.reshape(len(blocks), -1)[:, first:last]


def _numbers(blocks: _Bytes, parts: Numbers, count: int) -> _Quants:
    """The numbers of each block, [blocks, count]; 8-bit numbers are int8."""
    joined = []
    for lowest, *planes in parts:
        numbers = _plane(blocks, lowest, count // len(parts))
        bits = lowest.bits
        for plane in planes:
            numbers = numbers | _plane(blocks, plane, count // len(parts)) << np.uint8(bits)
            bits += plane.bits
        joined.append(numbers)
    out = np.concatenate(joined, axis=1)
    return out.view(np.int8) if bits == 8 else out


def _scales(blocks: _Bytes, fmt: BlockFormat) -> tuple[_Floats, _Floats | None]:
    """Scale and minimum of each group, float32 [blocks, groups]."""
    if fmt.power_scales:
        # The two smallest exponents are subnormal in float32; ldexp computes them exactly.
        return np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128), None
    groups = fmt.block_size // fmt.group_size
    scale, *minimum = (_half(blocks, start) for start in fmt.halves)
    if fmt.scales:
        scale = scale * (_numbers(blocks, fmt.scales, groups).astype(np.float32) - fmt.scale_offset)
    if fmt.minima:
        # These formats subtract the minimum, but `QuantizedTensor` adds it.
        minimum = [-(minimum[0] * _numbers(blocks, fmt.minima, groups).astype(np.float32))]
    return scale, minimum[0] if minimum else None
