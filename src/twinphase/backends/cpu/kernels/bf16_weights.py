"""Quantized weights in bfloat16 for matrix tiles: [32 outputs][32 inputs] of a strip.

Weights are computed in float32, by the scales and minima of the checkpoint, and rounded once.

A group of 32 inputs with codes of 4 bits has at most 16 different weights. Those are computed, as a
table in half a register, and each input's is looked up by one instruction. Two outputs share a
register, the second one's table in its upper half. Codes of other widths are bytes in memory, and
converted one by one.
"""

from __future__ import annotations

from llvmlite import ir

from twinphase.backends.cpu.emit import F32, I8, I16, I32, Emit, Value, vector
from twinphase.backends.cpu.formats import (
    GROUP_INPUTS,
    GROUPS_PER_SUPERBLOCK,
    STRIP_OUTPUTS,
    PackedFormat,
)
from twinphase.backends.cpu.kernels.register_tile import RegisterTile

FLOATS = vector(F32, 16)
WORDS = vector(I16, GROUP_INPUTS)
OUTPUTS_PER_LINE = 4
ROW_BYTES = 2 * GROUP_INPUTS
# Scales or minima of a strip's outputs, float32.
NUMBERS_BYTES = 4 * STRIP_OUTPUTS


def place_of_group(
    e: Emit, fmt: PackedFormat, strip: Value, g: Value
) -> tuple[Value, Value | None]:
    """Addresses of group g's record, and of its header where the format has one."""
    if not fmt.nested:
        return e.add(strip, e.mul(g, fmt.record_bytes)), None
    whole = fmt.header_bytes + GROUPS_PER_SUPERBLOCK * fmt.record_bytes
    header = e.add(strip, e.mul(e.b.sdiv(g, e.i64(GROUPS_PER_SUPERBLOCK)), whole))
    within = e.b.srem(g, e.i64(GROUPS_PER_SUPERBLOCK))
    return e.add(header, fmt.header_bytes, e.mul(within, fmt.record_bytes)), header


class GroupWeights:
    """Emits the unpacking of a group; `small` is the address of `tiling.BF16_AREAS`' numbers."""

    def __init__(self, e: Emit, fmt: PackedFormat, strip: Value, g: Value, small: Value) -> None:
        self.e = e
        self.fmt = fmt
        self.small = small
        self.record, header = place_of_group(e, fmt, strip, g)
        tile = RegisterTile(e, fmt, 0, 2, e.i64(0))
        for part in range(fmt.parts):
            for kind, numbers in enumerate(tile.part_scales(self.record, header, part)):
                for n, values in enumerate(numbers):
                    e.store(values, small, self._place(kind, part) + 64 * n)

    def _place(self, kind: int, part: int) -> int:
        """Where scales (kind 0) or minima of a part of the group are."""
        return NUMBERS_BYTES * (kind * self.fmt.parts + part)

    def _scaled(self, numbers: Value, output: int, part: int) -> Value:
        e = self.e
        scale, minimum = (
            e.broadcast(e.load(F32, self.small, self._place(kind, part) + 4 * output), 16)
            for kind in (0, 1)
        )
        if self.fmt.minimum:
            return e.fma(numbers, scale, minimum)
        return e.b.fmul(numbers, scale)

    def unpack(self, to: Value) -> None:
        """Write the weights, an output after the other."""
        if self.fmt.bits == 4:
            self._look_up(to)
        else:
            self._convert(to)

    def _look_up(self, to: Value) -> None:
        e = self.e
        numbers = ir.Constant(FLOATS, [float(number) for number in self.fmt.numbers])
        for line in range(STRIP_OUTPUTS // OUTPUTS_PER_LINE):
            codes = e.load(WORDS, self.record, 64 * line)
            for i in range(0, OUTPUTS_PER_LINE, 2):
                first = OUTPUTS_PER_LINE * line + i
                table = e.to_bf16(*(self._scaled(numbers, first + half, 0) for half in (0, 1)))
                for half in (0, 1):
                    here = codes
                    if i + half:
                        here = e.b.lshr(codes, e.splat(WORDS, 4 * (i + half)))
                    here = e.b.and_(here, e.splat(WORDS, 15))
                    if half:
                        here = e.b.or_(here, e.splat(WORDS, 16))
                    found = e.call(
                        "llvm.x86.avx512.permvar.hi.512", WORDS, e.b.bitcast(table, WORDS), here
                    )
                    e.store(found, to, ROW_BYTES * (first + half), align=64)

    def _convert(self, to: Value) -> None:
        e = self.e
        for output in range(STRIP_OUTPUTS):
            halves = []
            for half in (0, 1):
                at = GROUP_INPUTS * output + 16 * half
                codes = e.b.sext(e.load(vector(I8, 16), self.record, at), vector(I32, 16))
                numbers = e.b.sitofp(codes, FLOATS)
                part = half if self.fmt.parts == 2 else 0
                halves.append(self._scaled(numbers, output, part))
            e.store(e.to_bf16(*halves), to, ROW_BYTES * output, align=64)
