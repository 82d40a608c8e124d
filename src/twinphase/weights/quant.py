"""Block formats of quantized weights, and their lossless unpacking in plain NumPy.

Every quantized format here is an affine code over small groups of a row: `scale * (q - offset) +
minimum`; where the codes are indices into a table (IQ4, MXFP4), q is the table's integer. `unpack`
gives the parts, for backends that pack them their own way; `dequantize` gives float32, for the
reference backend and for embedding rows. Not for quantizing, and not for the layouts that kernels
want (backends do that).

Bytes of a block, as GGUF stores them (little endian; d, m, dmin are float16):
    Q4_0  d | 16 bytes, low nibbles are values 0-15, high nibbles 16-31
    Q4_1  d m | nibbles as Q4_0
    Q5_0  d | 32 fifth bits | nibbles as Q4_0
    Q5_1  d m | 32 fifth bits | nibbles as Q4_0
    Q8_0  d | 32 int8
    Q4_K  d dmin | 12 bytes: 8 scales and 8 minima of 6 bits | 128 bytes of nibbles
    Q5_K  d dmin | 12 bytes as Q4_K | 32 bytes of fifth bits | 128 bytes of nibbles
    Q6_K  128 bytes of low nibbles | 64 bytes of high bit pairs | 16 int8 scales | d
    Q2_K  16 bytes: scale and minimum, a nibble each | 64 bytes of bit pairs | d dmin
    Q3_K  32 bytes of third bits | 64 bytes of bit pairs | 12 bytes: 16 scales of 6 bits | d
    IQ4_NL  d | 16 bytes of nibbles as Q4_0, indices into a table
    IQ4_XS  d | 2 bytes: 8 high bit pairs of scales | 4 bytes: their low nibbles | 128 bytes of
    nibbles as IQ4_NL MXFP4   8 bits of exponent | 16 bytes of nibbles as Q4_0, numbers of 4 bits
    (OCP Microscaling Formats 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from twinphase.errors import CheckpointError, UnsupportedModelError

_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]
_Quants = NDArray[np.uint8] | NDArray[np.int8]


@dataclass(frozen=True)
class BlockFormat:
    """How one storage type lays out a row.

    Attributes:
        block_size: values in a block; a row is a whole number of blocks.
        group_size: values that share one scale; 0 for the unquantized types.
        bits: bits of `q`, which is signed where it has 8; 0 for the unquantized types.
        offset: subtracted from `q` before scaling.
    """

    name: str
    block_size: int
    block_bytes: int
    group_size: int = 0
    bits: int = 0
    offset: int = 0
    has_minimum: bool = False

    @property
    def quantized(self) -> bool:
        return self.bits > 0


FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        fmt.name: fmt
        for fmt in (
            BlockFormat("F32", 1, 4),
            BlockFormat("F16", 1, 2),
            BlockFormat("BF16", 1, 2),
            BlockFormat("Q8_0", 32, 34, group_size=32, bits=8),
            BlockFormat("Q4_0", 32, 18, group_size=32, bits=4, offset=8),
            BlockFormat("Q4_1", 32, 20, group_size=32, bits=4, has_minimum=True),
            BlockFormat("Q5_0", 32, 22, group_size=32, bits=5, offset=16),
            BlockFormat("Q5_1", 32, 24, group_size=32, bits=5, has_minimum=True),
            BlockFormat("Q4_K", 256, 144, group_size=32, bits=4, has_minimum=True),
            BlockFormat("Q5_K", 256, 176, group_size=32, bits=5, has_minimum=True),
            BlockFormat("Q6_K", 256, 210, group_size=16, bits=6, offset=32),
            BlockFormat("Q2_K", 256, 84, group_size=16, bits=2, has_minimum=True),
            BlockFormat("Q3_K", 256, 110, group_size=16, bits=3, offset=4),
            BlockFormat("IQ4_NL", 32, 18, group_size=32, bits=8),
            BlockFormat("IQ4_XS", 256, 136, group_size=32, bits=8),
            BlockFormat("MXFP4", 32, 17, group_size=32, bits=8),
        )
    }
)


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix as integers and per-group parameters: `scale * (q - offset) + minimum` are its values.

    Attributes:
        q: [N, K], uint8; int8 where the format has 8 bits.
        scale: float32 [N, K / group_size].
        minimum: float32 [N, K / group_size], or None where the format has none.
    """

    q: _Quants
    scale: _Floats
    minimum: _Floats | None
    group_size: int
    offset: int

    def values(self) -> _Floats:
        """The matrix in float32 [N, K]."""
        rows, columns = self.q.shape
        # float32 holds every q - offset exactly, so this costs one rounding for each multiplication
        # and addition.
        values = self.q.reshape(rows, -1, self.group_size).astype(np.float32)
        if self.offset:
            values -= np.float32(self.offset)
        values *= self.scale[..., None]
        if self.minimum is not None:
            values += self.minimum[..., None]
        return values.reshape(rows, columns)


def tensor_nbytes(shape: Sequence[int], type: str) -> int:
    """Bytes of a tensor of that row-major shape.

    Raises:
        UnsupportedModelError: a type that is not in `FORMATS`.
        CheckpointError: rows that are not a whole number of blocks.
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
    """Tensor values in float32.

    Args:
        raw: uint8 [nbytes], as stored.
        shape: row-major; rows of the file may be taken by slicing `raw` and giving fewer of them
            here.
        type: a key of `FORMATS`.

    Returns:
        A fresh float32 array of `shape`.

    Raises:
        UnsupportedModelError: an unknown type.
        CheckpointError: `raw` does not have the size that shape and type ask for.
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
    """Takes a quantized tensor apart without loss.

    Args:
        raw: uint8 [nbytes], as stored.
        shape: row-major (N, K); leading dimensions, if there are more, count as rows.
        type: a quantized type of `FORMATS`.

    Raises:
        UnsupportedModelError: an unknown or unquantized type.
        CheckpointError: `raw` does not have the size that shape and type ask for.
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
    q, scale, minimum = _UNPACKERS[type](blocks, fmt)
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


# Each unpacker takes blocks, uint8 [blocks, block_bytes], and returns q [blocks, block_size] and
# the scale and minimum (or None) of each group, float32 [blocks, groups].
_Parts = tuple[_Quants, _Floats, _Floats | None]


def _half(blocks: _Bytes, start: int) -> _Floats:
    """The float16 at byte `start` of each block, float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: _Bytes) -> _Bytes:
    """Low nibbles, then high nibbles: uint8 [..., n] to [..., 2n]."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _fifth_bits(packed: _Bytes) -> _Bytes:
    """Bit i of the four bytes, moved to the place of the fifth bit: uint8 [blocks, 4] to [blocks, 32]."""
    return np.left_shift(np.unpackbits(packed, axis=-1, bitorder="little"), 4, dtype=np.uint8)


def _q4_or_q5(blocks: _Bytes, fmt: BlockFormat) -> _Parts:
    start = 4 if fmt.has_minimum else 2
    minimum = _half(blocks, 2) if fmt.has_minimum else None
    if fmt.bits == 4:
        return _nibbles(blocks[:, start:]), _half(blocks, 0), minimum
    q = _nibbles(blocks[:, start + 4 :]) | _fifth_bits(blocks[:, start : start + 4])
    return q, _half(blocks, 0), minimum


def _q8_0(blocks: _Bytes, _: BlockFormat) -> _Parts:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0), None


def _k_scales(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    """Scale and minimum of the eight groups of a Q4_K or Q5_K block, float32 [blocks, 8] each.

    Bytes 4-15 hold 8 scales and 8 minima of 6 bits: the first four of each whole in the low bits of
    bytes 0-3 and 4-7, the last four as nibbles in bytes 8-11 with their upper two bits in the spare
    top bits of bytes 0-7.
    """
    first = blocks[:, 4:8]
    second = blocks[:, 8:12]
    third = blocks[:, 12:16]
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | (first >> 2 & 0x30)], axis=-1)
    minima = np.concatenate([second & 0x3F, (third >> 4) | (second >> 2 & 0x30)], axis=-1)
    scale = _half(blocks, 0) * scales.astype(np.float32)
    minimum = _half(blocks, 2) * minima.astype(np.float32)
    # The format subtracts the minimum; we add it.
    return scale, -minimum


def _q4_k(blocks: _Bytes, _: BlockFormat) -> _Parts:
    # Each 32 bytes hold two groups: low nibbles, then high nibbles.
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return q.reshape(-1, 256), *_k_scales(blocks)


def _q5_k(blocks: _Bytes, _: BlockFormat) -> _Parts:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    # Bit g of byte i is the fifth bit of value i of group g.
    groups = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[:, None, 16:48] >> groups & 1) << 4
    return (low | high).reshape(-1, 256), *_k_scales(blocks)


def _q6_k(blocks: _Bytes, _: BlockFormat) -> _Parts:
    # Two halves of 128 values, each of four runs of 32: runs 0 and 1 are the low nibbles of 64
    # bytes, 2 and 3 the high ones; bit pair r of byte i of 32 are the upper bits of value i of run
    # r.
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return (low | high).reshape(-1, 256), _half(blocks, 208) * scales, None


def _bit_pairs(packed: _Bytes) -> _Bytes:
    """Two halves of four runs of 32 values, run r in bit pair r of 32 bytes: uint8 [blocks, 64] to [blocks, 8, 32]."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (packed.reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)).reshape(-1, 8, 32)


def _q2_k(blocks: _Bytes, _: BlockFormat) -> _Parts:
    scale = _half(blocks, 80) * (blocks[:, :16] & 0x0F).astype(np.float32)
    minimum = _half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    return _bit_pairs(np.ascontiguousarray(blocks[:, 16:80])).reshape(-1, 256), scale, -minimum


def _q3_k(blocks: _Bytes, _: BlockFormat) -> _Parts:
    # Bit g of byte i is the third bit of value i of run g.
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 2
    q = _bit_pairs(np.ascontiguousarray(blocks[:, 32:96])) | third
    # Low nibbles of the 16 scales in bytes 0-7, low ones first; their upper two bits in the bit
    # pairs of bytes 8-11.
    low = _nibbles(blocks[:, 96:104])
    high = blocks[:, None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = (low | high.reshape(-1, 16) << 4).astype(np.float32) - 32
    return q.reshape(-1, 256), _half(blocks, 108) * scales, None


_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
)
# Twice 0, 0.5, 1, 1.5, 2, 3, 4 and 6, so that they are integers; the exponent is one less.
_MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)


def _iq4_nl(blocks: _Bytes, _: BlockFormat) -> _Parts:
    return _IQ4_VALUES[_nibbles(blocks[:, 2:])], _half(blocks, 0), None


def _iq4_xs(blocks: _Bytes, _: BlockFormat) -> _Parts:
    pairs = (
        np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    )
    low = np.stack([blocks[:, 4:8] & 0x0F, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    scales = (low | pairs.astype(np.uint8) << 4).astype(np.float32) - 32
    q = _IQ4_VALUES[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    return q.reshape(-1, 256), _half(blocks, 0) * scales, None


def _mxfp4(blocks: _Bytes, _: BlockFormat) -> _Parts:
    # 2 ** (exponent - 128); the two smallest are subnormal in float32, and ldexp knows.
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return _MXFP4_VALUES[_nibbles(blocks[:, 1:])], scale, None


_UNPACKERS: Mapping[str, Callable[[_Bytes, BlockFormat], _Parts]] = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1"), _q4_or_q5),
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
