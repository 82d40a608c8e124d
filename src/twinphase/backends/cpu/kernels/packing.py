"""Packs a quantized matrix from blocks into strips (`formats.py`), without changing a value.

Sixteen rows are packed at a time, a row in each lane of a vector: four bytes of each row, turned,
are the four inputs of sixteen outputs that stand side by side in a packed line. Where the numbers
are in a block, `weights/block_formats.py` says; the tests compare with the gguf package.
"""

from __future__ import annotations

from llvmlite import ir

from twinphase.backends.cpu.emit import I8, I16, I32, Emit, Value, vector
from twinphase.backends.cpu.formats import (
    BY_OUTPUTS,
    FORMATS,
    GROUP_INPUTS,
    GROUPS_PER_SUPERBLOCK,
    STRIP_OUTPUTS,
    PackedFormat,
)
from twinphase.backends.cpu.intrinsics import Kernel, tile_kernel
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.blocks import PACKED_ROWS, Blocks, turned_within
from twinphase.weights.block_formats import FORMATS as BLOCK_FORMATS

FLOAT16_SIGN_BIT = 0x8000
WORDS = vector(I32, PACKED_ROWS)


class _Strip:
    """The half of a strip that 16 rows fill; `keep` masks the lanes beyond the matrix to zero."""

    def __init__(
        self, e: Emit, fmt: PackedFormat, half: Value, keep: Value, by_outputs: bool
    ) -> None:
        self.e = e
        self.by_outputs = by_outputs
        self.fmt = fmt
        self.half = half
        self.keep = keep

    def put(self, value: Value, element: ir.Type, at: Value, offset: int) -> None:
        """A number for each output, at the place of the strip's first half."""
        kept = self.e.b.and_(value, self.keep)
        kept = kept if element == I32 else self.e.b.trunc(kept, vector(element, PACKED_ROWS))
        self.e.store(kept, at, self.e.mul(self.half, PACKED_ROWS * element.width // 8), offset)

    def put_group(self, x: Blocks, j: int, record: Value) -> None:
        """Group j of the blocks."""
        fmt = self.fmt
        codes = [x.codes(GROUP_INPUTS * j + first) for first in range(0, GROUP_INPUTS, 4)]
        if self.by_outputs:
            self._put_by_outputs(codes, record)
        else:
            self._put_by_inputs(x, codes, record)
        at = fmt.code_bytes
        for value in x.parameters(j):
            self.put(value, I8 if fmt.scale_size == 1 else I16, record, at)
            at += STRIP_OUTPUTS * fmt.scale_size

    def _put_by_inputs(self, x: Blocks, codes: list[Value], record: Value) -> None:
        fmt = self.fmt
        lines = codes
        if fmt.bits != 8:
            lines = [x.joined(codes[i : i + 2], 0, 4) for i in range(0, 8, 2)]
            for i in range(fmt.plane_lines):
                per_line = 8 // fmt.plane_lines
                lines.append(x.joined(codes[i * per_line :][:per_line], 4, fmt.bits - 4))
        for i, line in enumerate(lines):
            self.put(line, I32, record, 128 * i)

    def _put_by_outputs(self, codes: list[Value], record: Value) -> None:
        """Bytes of each output, or a word per input with the codes of four outputs."""
        e = self.e
        kept = [e.b.and_(value, self.keep) for value in codes]
        halves = [turned_within(e, kept[i : i + 4]) for i in (0, 4)]
        bytes_type = vector(I8, 4 * PACKED_ROWS)
        words = vector(I16, GROUP_INPUTS)
        for line in range(4):
            total = e.splat(words, 0)
            lanes = range(16 * line, 16 * line + 16)
            for i in range(4):
                first, second = (e.b.bitcast(half[i], bytes_type) for half in halves)
                row = e.shuffle(first, second, [*lanes, *(64 + lane for lane in lanes)])
                if self.fmt.bits == 8:
                    output = 4 * line + i
                    row = e.b.sub(row, e.splat(row.type, self.fmt.offset))
                    at = e.mul(self.half, PACKED_ROWS * GROUP_INPUTS)
                    e.store(row, record, at, GROUP_INPUTS * output)
                else:
                    wide = e.b.zext(row, words)
                    total = e.b.or_(total, e.b.shl(wide, e.splat(words, 4 * i)))
            if self.fmt.bits == 4:
                e.store(total, record, e.mul(self.half, 4 * 64), 64 * line)

    def put_shared(self, x: Blocks, header: Value) -> None:
        """The float16 numbers that all groups of a block share."""
        for i, at in enumerate(x.fmt.halves):
            value = x.word(at, I16)
            if i:  # minima are subtracted in the checkpoint, added here
                value = self.e.b.xor(value, self.e.splat(WORDS, FLOAT16_SIGN_BIT))
            self.put(value, I16, header, 2 * STRIP_OUTPUTS * i)


def pack(isa: Isa, format_name: str) -> Kernel:
    """One strip a tile.

    Arguments: source, bytes of a source row, outputs, groups, destination, bytes from strip to
    strip.

    Outputs beyond the matrix (the last strip's padding) become zeros.
    """
    return _pack(isa, format_name, by_outputs=False)


def pack_tiles(isa: Isa, format_name: str) -> Kernel:
    """The same for matrix tiles in bfloat16: codes lie by outputs."""
    return _pack(isa, format_name, by_outputs=True)


def _pack(isa: Isa, format_name: str, by_outputs: bool) -> Kernel:
    fmt = (BY_OUTPUTS if by_outputs else FORMATS)[format_name]
    block_format = BLOCK_FORMATS[format_name]
    per_block = GROUPS_PER_SUPERBLOCK if fmt.nested else 1
    to_bytes = fmt.header_bytes + per_block * fmt.record_bytes

    def half_strip(e: Emit, source, row_bytes, rows, blocks, to, half):
        lanes = ir.Constant(WORDS, list(range(PACKED_ROWS)))
        inside = e.b.icmp_signed("<", lanes, e.broadcast(e.b.trunc(rows, I32), PACKED_ROWS))
        strip = _Strip(e, fmt, half, e.b.sext(inside, WORDS), by_outputs)
        last = e.add(rows, -1)
        addresses = [
            e.add(source, e.mul(e.least(e.i64(lane), last), row_bytes))
            for lane in range(PACKED_ROWS)
        ]
        with e.loop(0, blocks) as i:
            x = Blocks(e, block_format, addresses, e.mul(i, block_format.block_bytes))
            header = e.add(to, e.mul(i, to_bytes))
            if fmt.nested:
                strip.put_shared(x, header)
            for j in range(per_block):
                strip.put_group(x, j, e.add(header, fmt.header_bytes + j * fmt.record_bytes))

    def write(e: Emit, tile, source, row_bytes, outputs, groups, destination, stride):
        blocks = e.b.sdiv(groups, e.i64(per_block))
        to = e.add(destination, e.mul(tile, stride))
        with e.loop(0, 2) as half:
            first = e.add(e.mul(tile, STRIP_OUTPUTS), e.mul(half, PACKED_ROWS))
            rows = e.b.sub(outputs, first)
            with e.b.if_then(e.b.icmp_signed(">", rows, e.i64(0))):
                start = e.add(source, e.mul(first, row_bytes))
                half_strip(e, start, row_bytes, rows, blocks, to, half)

    return tile_kernel(isa, write)
