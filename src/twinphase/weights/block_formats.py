"""The bits of every storage type, with one table row per format; all decoders use this table.

`quant.py` unpacks tensors in NumPy with this table; the cpu backend derives its packed layouts, the
packing of matrices and the reading of embedding rows from it. A new format needs a row here, its
type number in `gguf_header.py`, and a kernel if it multiplies in a new way.

A quantized weight is `scale * (q - offset) + minimum`, with a scale and a minimum per group. Where
codes stand for other numbers (`values`), q is that number. The layouts are those of ggml
(ggml-common.h) and of OCP Microscaling Formats 1.0; d, m and dmin are float16:

    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL    scale d; minimum m
    Q2_K, Q4_K, Q5_K                        scale d * scales[group]; minimum -dmin * minima[group]
    Q3_K, Q6_K, IQ4_XS                      scale d * (scales[group] - scale_offset)
    MXFP4                                   scale 2 ** (byte 0 - 128)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple


class Plane(NamedTuple):
    """Some bits of successive numbers, in runs of bytes from byte `start` of a block.

    The lowest `bits` of the `run` bytes are those of the first `run` numbers, the next bits those
    of the following numbers; then comes the next run of bytes. The plane's number `first` is the
    first that it is used for.
    """

    start: int
    bits: int
    run: int
    first: int = 0

    def place(self, number: int) -> tuple[int, int]:
        """The byte of the block that holds a number, and the number's lowest bit in that byte."""
        runs, within = divmod(number + self.first, self.run)
        byte_runs, part = divmod(runs, 8 // self.bits)
        return self.start + byte_runs * self.run + within, self.bits * part


# Numbers of a block, in parts of equal size. Each part is a tuple of planes, from the lowest bits
# to the highest.
Numbers = tuple[tuple[Plane, ...], ...]


@dataclass(frozen=True)
class BlockFormat:
    """The layout of a row in one storage type.

    Attributes:
        block_size: values in a block; a row is a whole number of blocks.
        group_size: values that share one scale; 0 for the unquantized types.
        codes: the planes of the codes; numbers of 8 bits are signed, here and below.
        offset: subtracted from `q` before scaling.
        halves: positions of a block's float16 numbers: d, and that of the minimum if it exists.
        scales, minima: small integers of the groups that multiply `halves`, in nested formats.
        scale_offset: subtracted from `scales`.
        values: number for each code, if it is not the code itself.
    """

    name: str
    block_size: int
    block_bytes: int
    group_size: int = 0
    codes: tuple[Plane, ...] = ()
    offset: int = 0
    halves: tuple[int, ...] = ()
    scales: Numbers = ()
    minima: Numbers = ()
    scale_offset: int = 0
    values: tuple[int, ...] = ()

    @property
    def quantized(self) -> bool:
        return bool(self.codes)

    @property
    def code_bits(self) -> int:
        return sum(plane.bits for plane in self.codes)

    @property
    def bits(self) -> int:
        """Bits of `q`, which is signed if it has 8 bits; 0 for unquantized types."""
        return 8 if self.values else self.code_bits

    @property
    def has_minimum(self) -> bool:
        return len(self.halves) == 2

    @property
    def power_scales(self) -> bool:
        """Whether byte 0 is the scale, as an exponent of 2 plus 128."""
        return self.quantized and not self.halves


_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# The values are doubled to be integers (0, 0.5, 1, 1.5, 2, 3, 4 and 6), and the exponent is reduced
# by one.
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# Eight scales and eight minima of 6 bits in the bytes 4 to 15: the first four of each are whole in
# the low bits of bytes 4 to 7 and 8 to 11; the last four are nibbles in bytes 12 to 15, with their
# upper two bits in the spare top bits of bytes 4 to 11.
_K_SCALES = ((Plane(4, 6, 4),), (Plane(12, 4, 4), Plane(4, 2, 4, 12)))
_K_MINIMA = ((Plane(8, 6, 4),), (Plane(12, 4, 4, 4), Plane(8, 2, 4, 12)))


def _flat(
    name: str, nbytes: int, *codes: Plane, offset: int = 0, minimum: bool = False
) -> BlockFormat:
    """32 values with one scale and, in some formats, one minimum."""
    return BlockFormat(
        name,
        block_size=32,
        block_bytes=nbytes,
        group_size=32,
        codes=codes,
        offset=offset,
        halves=(0, 2) if minimum else (0,),
    )


FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        fmt.name: fmt
        for fmt in (
            BlockFormat("F32", 1, 4),
            BlockFormat("F16", 1, 2),
            BlockFormat("BF16", 1, 2),
            _flat("Q8_0", 34, Plane(2, 8, 32)),
            _flat("Q4_0", 18, Plane(2, 4, 16), offset=8),
            _flat("Q4_1", 20, Plane(4, 4, 16), minimum=True),
            _flat("Q5_0", 22, Plane(6, 4, 16), Plane(2, 1, 1), offset=16),
            _flat("Q5_1", 24, Plane(8, 4, 16), Plane(4, 1, 1), minimum=True),
            BlockFormat(
                "Q4_K",
                block_size=256,
                block_bytes=144,
                group_size=32,
                codes=(Plane(16, 4, 32),),
                halves=(0, 2),
                scales=_K_SCALES,
                minima=_K_MINIMA,
            ),
            BlockFormat(
                "Q5_K",
                block_size=256,
                block_bytes=176,
                group_size=32,
                codes=(Plane(48, 4, 32), Plane(16, 1, 32)),
                halves=(0, 2),
                scales=_K_SCALES,
                minima=_K_MINIMA,
            ),
            BlockFormat(
                "Q6_K",
                block_size=256,
                block_bytes=210,
                group_size=16,
                codes=(Plane(0, 4, 64), Plane(128, 2, 32)),
                offset=32,
                halves=(208,),
                scales=((Plane(192, 8, 16),),),
            ),
            BlockFormat(
                "Q2_K",
                block_size=256,
                block_bytes=84,
                group_size=16,
                codes=(Plane(16, 2, 32),),
                halves=(80, 82),
                scales=((Plane(0, 4, 16),),),
                minima=((Plane(0, 4, 16, 16),),),
            ),
            BlockFormat(
                "Q3_K",
                block_size=256,
                block_bytes=110,
                group_size=16,
                codes=(Plane(32, 2, 32), Plane(0, 1, 32)),
                offset=4,
                halves=(108,),
                scales=((Plane(96, 4, 8), Plane(104, 2, 4)),),
                scale_offset=32,
            ),
            BlockFormat(
                "IQ4_NL",
                block_size=32,
                block_bytes=18,
                group_size=32,
                codes=(Plane(2, 4, 16),),
                halves=(0,),
                values=_IQ4_VALUES,
            ),
            BlockFormat(
                "IQ4_XS",
                block_size=256,
                block_bytes=136,
                group_size=32,
                codes=(Plane(8, 4, 16),),
                halves=(0,),
                scales=((Plane(4, 4, 1), Plane(2, 2, 1)),),
                scale_offset=32,
                values=_IQ4_VALUES,
            ),
            BlockFormat(
                "MXFP4",
                block_size=32,
                block_bytes=17,
                group_size=32,
                codes=(Plane(1, 4, 16),),
                values=_MXFP4_VALUES,
            ),
        )
    }
)
