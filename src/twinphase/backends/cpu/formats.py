"""How each block format of a checkpoint lies in memory for the kernels: the packed layouts.

A matrix is cut into strips of 32 outputs. A strip is one linear stream: for each group of 32 inputs
a record of

    codes    64-byte lines, each with 4 inputs of 16 outputs, [output][input]; lines of the strip's
             two blocks of 16 outputs in turn; 8 lines a block (8 bits), or 4 with two quads of
             inputs in a line's low and high nibbles
    planes   the 5th (1 line a block) or the 5th and 6th bits (2 lines a block) of all codes, blocks
    in turn scales   one number for each output (two where groups are of 16), then the minima where
    the format has them

so that decode reads memory in order and prefill keeps a strip in the first-level cache. Weights are
w = scale * (code - offset) + minimum, exactly as in the checkpoint. Only sizes here; `packing.py`
fills them.

For matrix tiles in bfloat16 (`Isa.takes_bf16`) codes lie by outputs instead. A line of 4-bit codes
has 32 words of 16 bits, one per input, with the codes of four outputs from the low bits up. Other
codes are signed bytes, less their offset, [output][input].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinphase.weights.block_formats import FORMATS as BLOCK_FORMATS
from twinphase.weights.block_formats import BlockFormat

STRIP_OUTPUTS = 32
GROUP_INPUTS = 32
# In the K formats, the groups of a superblock share a float16 scale.
GROUPS_PER_SUPERBLOCK = 8


@dataclass(frozen=True)
class PackedFormat:
    """A packed layout.

    Attributes:
        bits: bits of a code; codes of 2 or 3 bits are kept in 4.
        group: inputs that share a scale, 32 or 16.
        nested: scales (and minima) are 8-bit numbers times a float16 that 256 inputs share, as in
            the K formats.
        minimum: whether a minimum is stored.
        offset: subtracted from every code.
        signed_scales: whether nested 8-bit scales have a sign.
        values: what each code stands for, where that is not itself; kernels look it up, plus 128.
        power_scales: scales are 8-bit exponents of 2, 128 more than they are, in place of float16.
    """

    name: str
    bits: int
    group: int
    nested: bool
    minimum: bool
    offset: int
    signed_scales: bool
    values: tuple[int, ...]
    power_scales: bool

    @classmethod
    def of(cls, fmt: BlockFormat) -> PackedFormat:
        """The packed layout of a checkpoint's format."""
        return cls(
            name=fmt.name,
            bits=max(4, fmt.code_bits),
            group=fmt.group_size,
            nested=bool(fmt.scales),
            minimum=fmt.has_minimum,
            offset=128 if fmt.bits == 8 else fmt.offset,
            signed_scales=not fmt.has_minimum,
            values=fmt.values,
            power_scales=fmt.power_scales,
        )

    @property
    def bits_multiplied(self) -> int:
        """Bits of what is multiplied: the code, or the value that it stands for."""
        return 8 if self.values else self.bits

    @property
    def by_outputs(self) -> PackedFormat:
        """The same for matrix tiles in bfloat16: codes of 4 bits in words, others in bytes."""
        return replace(self, bits=4 if self.bits == 4 else 8)

    @property
    def numbers(self) -> tuple[int, ...]:
        """What each code of 4 bits stands for, before its scale."""
        return self.values or tuple(code - self.offset for code in range(16))

    @property
    def parts(self) -> int:
        """Parts of a group of 32 inputs that have a scale of their own."""
        return GROUP_INPUTS // self.group

    @property
    def scale_size(self) -> int:
        """Bytes of a scale or minimum in a record."""
        return 1 if self.nested or self.power_scales else 2

    @property
    def has_plain_codes(self) -> bool:
        """Whether unpacking a code takes at most a shift and a mask."""
        return not self.values and not self.plane_lines

    @property
    def low_lines(self) -> int:
        """Lines of 64 bytes with the low bits of a block's 8 quads of inputs."""
        return 8 if self.bits == 8 else 4

    @property
    def plane_lines(self) -> int:
        """Lines with the high bits of a block."""
        return {4: 0, 5: 1, 6: 2, 8: 0}[self.bits]

    @property
    def code_bytes(self) -> int:
        """Bytes of codes and planes in a record."""
        return 2 * 64 * (self.low_lines + self.plane_lines)

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales in a record."""
        return STRIP_OUTPUTS * self.parts * self.scale_size

    @property
    def minimum_bytes(self) -> int:
        """Bytes of minima in a record."""
        return self.scale_bytes if self.minimum else 0

    @property
    def record_bytes(self) -> int:
        """Bytes of one group of one strip."""
        return self.code_bytes + self.scale_bytes + self.minimum_bytes

    @property
    def header_bytes(self) -> int:
        """Bytes of the shared float16 scales in front of every 8 records (nested formats)."""
        return (STRIP_OUTPUTS * 2 * (2 if self.minimum else 1)) if self.nested else 0

    def strip_bytes(self, inputs: int) -> int:
        """Bytes of one strip of a matrix with that many inputs."""
        groups = inputs // GROUP_INPUTS
        return groups * self.record_bytes + (
            groups // GROUPS_PER_SUPERBLOCK * self.header_bytes if self.nested else 0
        )


FORMATS = {fmt.name: PackedFormat.of(fmt) for fmt in BLOCK_FORMATS.values() if fmt.quantized}
# Formats that matrix tiles in bfloat16 unpack: all but those of 4-bit codes with a scale per 16.
BY_OUTPUTS = {
    name: fmt.by_outputs
    for name, fmt in FORMATS.items()
    if fmt.bits != 4 or fmt.group == GROUP_INPUTS
}
