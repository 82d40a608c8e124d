"""Register tiles of packed weights: integer sums of groups, scaled and added in a fixed order.

Used by linear layers (`linear.py`), and by those in matrix tiles (`linear_tiles.py`) for all but
the integer sums.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, NamedTuple

from llvmlite import ir
from numba import njit

from twinphase.backends.cpu.emit import F16, F32, I8, I32, Emit, Value, vector
from twinphase.backends.cpu.formats import (
    GROUP_INPUTS,
    GROUPS_PER_SUPERBLOCK,
    STRIP_OUTPUTS,
    PackedFormat,
)

# Cache lines of the next strip that a tile prefetches per group: one of few tiles AHEAD_LINES, one
# of many FEW_LINES.
FEW_LINES = 3
OPERANDS = 12
# w, groups, data, data stride, scale, fsum, scale stride, isum, out, out stride, residual, residual
# stride of a linear layer; strides are bytes.
Operands = tuple[int, ...]
AHEAD_LINES = 9
# The only row tile of a strip prefetches weights this far ahead; a tile of fewer rows always is.
STREAM_PREFETCH_BYTES = 8192
MIN_STREAM_PREFETCH_ROWS = 4


# Those of a tile: `Inputs`, then out, out stride, residual and residual stride.
TILE_OPERANDS = 10


@njit(inline="always")  # type: ignore[untyped-decorator]
def tile_operands(operands, row, column, group) -> tuple[int, ...]:
    """The operands of the tile at that row, output column and group of inputs."""
    (_, _, data, data_stride, scale, fsum, scale_stride, isum) = operands[:8]
    out, out_stride, residual, residual_stride = operands[8:12]
    at = row * scale_stride + 4 * group
    return (
        data + row * data_stride + GROUP_INPUTS * group,
        data_stride,
        scale + at,
        fsum + at,
        scale_stride,
        isum + 2 * at,
        out + row * out_stride + 4 * column,
        out_stride,
        residual + row * residual_stride + 4 * column,
        residual_stride,
    )


class Inputs(NamedTuple):
    """Addresses of a tile's first input row, and the bytes between rows."""

    data: Value
    data_stride: Value
    scale: Value
    fsum: Value
    scale_stride: Value
    isum: Value


class Weights(NamedTuple):
    """A strip's weights, and those to fetch meanwhile: from `ahead` on, `step` bytes per group."""

    address: Value
    groups: Value
    block: Value  # first block of 16 outputs
    ahead: Value
    step: Value

    def fetch(self, e: Emit, rows: int, g: Value, record: Value, record_bytes: int) -> None:
        """Prefetch the next weights, in iteration g of a tile of `rows` rows."""

        def stream() -> None:
            # A narrow register file reads a strip twice; there the processor's own guess is as
            # good.
            for line in range(0, record_bytes if e.isa.lanes == 16 else 0, 64):
                e.prefetch(record, STREAM_PREFETCH_BYTES, line)

        def share(first: int, end: int) -> None:
            for line in range(first, end):
                e.prefetch(self.ahead, e.mul(g, self.step), 64 * line)

        if rows < MIN_STREAM_PREFETCH_ROWS:
            stream()
            return
        with e.b.if_else(e.b.icmp_signed("==", self.step, e.i64(0))) as (single, several):
            with single:
                stream()
            with several:
                share(0, FEW_LINES)
                with e.b.if_then(e.b.icmp_signed(">", self.step, e.i64(64 * FEW_LINES))):
                    share(FEW_LINES, AHEAD_LINES)


class MemoryTotal:
    """A total in scratch memory, where a narrow register file has no room for it."""

    def __init__(self, e: Emit, address: Value, offset: int) -> None:
        self._e = e
        self._place = (address, offset)

    def get(self) -> Value:
        """The value now."""
        return self._e.load(vector(F32, self._e.isa.lanes), *self._place, align=4)

    def set(self, value: Value) -> None:
        """Change it."""
        self._e.store(value, *self._place, align=4)


def totals_in_memory(
    e: Emit, rows: int, vectors: int, address: Value, row_bytes: int
) -> list[list[MemoryTotal]]:
    """Totals of a tile's rows that are `row_bytes` apart."""
    width = 4 * e.isa.lanes
    return [
        [MemoryTotal(e, address, row_bytes * m + width * n) for n in range(vectors)]
        for m in range(rows)
    ]


class RegisterTile:
    """Emits one register tile: `rows` rows times `vectors` vectors of outputs."""

    def __init__(self, e: Emit, fmt: PackedFormat, rows: int, vectors: int, block: Value) -> None:
        self.e = e
        self.fmt = fmt
        self.rows = rows
        self.vectors = vectors
        self.lanes = e.isa.lanes
        self.ints = vector(I32, self.lanes)
        self.floats = vector(F32, self.lanes)
        # Byte offsets of the first block: 0, or those of the strip's second block of 16 outputs.
        self.low_at = e.mul(block, 64)
        self.scale_at = e.mul(block, 16 * fmt.scale_size)
        self.shared_at = e.mul(block, 32)

    def codes(self, record: Value, quad: int, n: int) -> Value:
        """Codes of 4 inputs (the quad) of vector n's outputs, bytes in int32 lanes."""
        e = self.e
        b = self.e.b
        fmt = self.fmt
        per_block = 16 // self.lanes
        block = n // per_block
        part = n % per_block * 4 * self.lanes
        if fmt.bits == 8:
            return e.load(self.ints, record, self.low_at, (2 * quad + block) * 64 + part)
        low = e.load(self.ints, record, self.low_at, (2 * (quad // 2) + block) * 64 + part)
        low = b.and_(
            b.lshr(low, e.splat(self.ints, 4 * (quad % 2))), e.splat(self.ints, 0x0F0F0F0F)
        )
        if fmt.values:
            return e.lookup(low, [value + 128 for value in fmt.values])
        if not fmt.plane_lines:
            return low
        high_bits = fmt.bits - 4
        per_line = 8 // fmt.plane_lines  # quads whose high bits share a line
        line = 2 * 4 * 64 + (2 * (quad // per_line) + block) * 64 + part
        shift = high_bits * (quad % per_line) - 4
        plane = e.load(self.ints, record, self.low_at, line)
        moved = (
            b.shl(plane, e.splat(self.ints, -shift))
            if shift < 0
            else b.lshr(plane, e.splat(self.ints, shift))
        )
        mask = 0x10101010 if high_bits == 1 else 0x30303030
        return b.or_(low, b.and_(moved, e.splat(self.ints, mask)))

    def scales(
        self, address: Value, offset: int, header: tuple[Value, int] | None, n: int, signed: bool
    ) -> Value:
        """Scales (or minima) of vector n's outputs, float32."""
        e = self.e
        b = self.e.b
        if self.fmt.power_scales:  # 0, the padding's, is 0
            small = e.load(vector(I8, self.lanes), address, self.scale_at, offset + n * self.lanes)
            power = b.bitcast(b.shl(b.zext(small, self.ints), e.splat(self.ints, 23)), self.floats)
            return b.fmul(power, e.splat(self.floats, 0.5))
        if header is None:
            return e.widen(
                e.load(vector(F16, self.lanes), address, self.scale_at, offset + 2 * n * self.lanes)
            )
        wide = self.small(address, offset, n, signed)
        shared = e.widen(
            e.load(
                vector(F16, self.lanes), header[0], self.shared_at, header[1] + 2 * n * self.lanes
            )
        )
        return b.fmul(b.sitofp(wide, self.floats), shared)

    def small(self, address: Value, offset: int, n: int, signed: bool) -> Value:
        """8-bit numbers of vector n's outputs, in int32 lanes."""
        e = self.e
        small = e.load(vector(I8, self.lanes), address, self.scale_at, offset + n * self.lanes)
        return e.b.sext(small, self.ints) if signed else e.b.zext(small, self.ints)

    def add_groups(
        self,
        address: Value,
        groups: Value,
        x: Inputs,
        totals: list[Any],
        fetch: Callable[[Value, Value], None],
    ) -> None:
        """Add a strip's groups to the totals; `fetch` gets each group's number and record."""
        with each_group(self.e, self.fmt, address, groups) as (g, record, header):
            fetch(g, record)
            self.group(record, header, x, g, totals)

    def starts(self, x: Inputs, g: Value, offset: int, *halves: int) -> list[list[Value]]:
        """Integer sums to begin with: -offset times the inputs' sums of these halves of group g."""
        e = self.e
        if not offset:
            return [[e.splat(self.ints, 0)] * self.vectors for _ in range(self.rows)]
        found = []
        for m in range(self.rows):
            place = e.add(e.mul(e.mul(x.scale_stride, 2), m), e.mul(g, 8))
            loads = [e.load(I32, x.isum, place, 4 * half) for half in halves]
            total = reduce(e.b.add, loads)
            start = e.broadcast(e.b.mul(total, ir.Constant(I32, -offset)), self.lanes)
            found.append([start] * self.vectors)
        return found

    def group(
        self, record: Value, header: Value | None, x: Inputs, g: Value, totals: list[Any]
    ) -> None:
        """Add one group of 32 inputs to the totals."""
        fmt = self.fmt
        signed = self.e.dot_is_signed(fmt.bits_multiplied)
        offset = 0 if signed else fmt.offset
        quads = fmt.group // 4
        for part in range(fmt.parts):
            sums = self.starts(x, g, offset, *((0, 1) if fmt.group == 32 else (part,)))
            self.dots(record, x, g, sums, range(part * quads, (part + 1) * quads), signed)
            self.add(*self.part_scales(record, header, part), x, g, totals, sums, part)

    def dots(
        self,
        record: Value,
        x: Inputs,
        g: Value,
        sums: list[list[Value]],
        quads: range,
        signed: bool = False,
    ) -> None:
        """Add the products of these quads of inputs to the integer sums."""
        e = self.e
        b = self.e.b
        # Where a dot product takes a step by 16 bits, as many as fit 16 bits are added there first.
        together = (
            {4: 8, 5: 4, 6: 2}.get(self.fmt.bits_multiplied, 0) if e.isa.dot == "maddubs" else 0
        )
        pairs: list[list[Value]] = [[None] * self.vectors for _ in range(self.rows)]
        # Two that fit are added at once, row by row, so that few registers wait.
        step = 2 if together == 2 else 1
        for first in range(quads.start, quads.stop, step):
            chunk = range(first, first + step)
            codes = [[self.codes(record, quad, n) for n in range(self.vectors)] for quad in chunk]
            for m, quad in itertools.product(range(self.rows), chunk):
                last = not together or quad == quads[-1] or (quad + 1) % together == 0
                where = e.add(e.mul(x.data_stride, m), e.mul(g, GROUP_INPUTS), 4 * quad)
                inputs = e.broadcast(e.load(I32, x.data, where), self.lanes)
                for n in range(self.vectors):
                    code = codes[quad - first][n]
                    if not together:
                        sums[m][n] = e.dot(sums[m][n], code, inputs, signed=signed)
                        continue
                    here = e.pairs(code, inputs)
                    before = pairs[m][n]
                    here = here if before is None else b.add(before, here)
                    sums[m][n] = e.add_pairs(sums[m][n], here) if last else sums[m][n]
                    pairs[m][n] = None if last else here

    def part_scales(
        self, record: Value, header: Value | None, part: int
    ) -> tuple[list[Value], list[Value]]:
        """Scales and minima of a part of a group, a vector for each of outputs."""
        fmt = self.fmt
        scale_at = fmt.code_bytes + part * STRIP_OUTPUTS * fmt.scale_size
        shared = None if header is None else (header, 0)
        scales = [
            self.scales(record, scale_at, shared, n, fmt.signed_scales) for n in range(self.vectors)
        ]
        if not fmt.minimum:
            return scales, []
        shared = None if header is None else (header, 2 * STRIP_OUTPUTS)
        at = scale_at + fmt.scale_bytes
        return scales, [self.scales(record, at, shared, n, False) for n in range(self.vectors)]

    def token_scale(self, x: Inputs, g: Value, m: int) -> Value:
        """The scale of group g of row m's inputs."""
        e = self.e
        return e.broadcast(e.load(F32, x.scale, e.mul(x.scale_stride, m), e.mul(g, 4)), self.lanes)

    def token_sum(self, x: Inputs, g: Value, m: int, part: int) -> Value:
        """What the minima of a part of group g are multiplied by for row m: scale * sum."""
        e = self.e
        here = e.add(e.mul(x.scale_stride, m), e.mul(g, 4))
        if self.fmt.group == GROUP_INPUTS:
            return e.broadcast(e.load(F32, x.fsum, here), self.lanes)
        total = e.load(I32, x.isum, e.mul(here, 2), 4 * part)
        number = e.broadcast(e.b.sitofp(total, F32), self.lanes)
        return e.b.fmul(self.token_scale(x, g, m), number)

    def add(
        self,
        scales: list[Value],
        minima: list[Value],
        x: Inputs,
        g: Value,
        totals: list[Any],
        sums: list[list[Value]],
        part: int,
    ) -> None:
        """Add the integer sums of a part of group g to the totals, however the sums were made."""
        e = self.e
        b = self.e.b
        for m in range(self.rows):
            token_scale = self.token_scale(x, g, m)
            token_sum = self.token_sum(x, g, m, part) if self.fmt.minimum else None
            for n in range(self.vectors):
                value = b.sitofp(sums[m][n], self.floats)
                total = e.fma(value, b.fmul(scales[n], token_scale), totals[m][n].get())
                if token_sum is not None:
                    total = e.fma(minima[n], token_sum, total)
                totals[m][n].set(total)


def store_tile(e: Emit, totals: list[list[Any]], out, out_stride, residual, stride) -> None:
    for m, row in enumerate(totals):
        for n, total in enumerate(row):
            value = total.get()
            at = 4 * n * e.isa.lanes
            base = e.load(value.type, residual, e.mul(stride, m), at)
            e.store(e.b.fadd(value, base), out, e.mul(out_stride, m), at)


def release_tiles(e: Emit) -> None:
    """Give the matrix tiles back, which slow down what does not use them."""
    e.matrix("tilerelease")


@contextlib.contextmanager
def each_group(
    e: Emit, fmt: PackedFormat, address: Value, groups: Value
) -> Iterator[tuple[Value, Value, Value | None]]:
    """The groups of a strip: number, record and header; the body is the `with` block."""
    per_header = GROUPS_PER_SUPERBLOCK if fmt.nested else 1
    with e.loop(0, e.b.sdiv(groups, e.i64(per_header))) as i:
        header = e.add(address, e.mul(i, fmt.header_bytes + per_header * fmt.record_bytes))
        if not fmt.nested:
            yield i, header, None
        else:
            with e.loop(0, per_header) as j:
                record = e.add(header, fmt.header_bytes, e.mul(j, fmt.record_bytes))
                yield e.add(e.mul(i, per_header), j), record, header
