"""Linear layers of many rows in matrix tiles (AMX), on weights that are unpacked in panels.

A tile instruction multiplies a group of 32 inputs (16 where scales are of 16) of 16 rows and 16
outputs. Its integer sums are those of the register tiles, and are scaled and added by the same
operations in the same order: a row has the same bits whichever computes it.

A panel is `PANEL_GROUPS` groups of a strip. All rows of a chunk are multiplied while it is in the
first-level cache; their partial sums wait in scratch memory. Integer sums pass through memory too:
`BATCH_GROUPS` groups are multiplied before any of them is scaled, since vectors can read a stored
tile only once it has left the processor's queues, and run at half their speed while tiles are
computed.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from twinphase.backends.cpu.emit import I8, Emit, Value, vector
from twinphase.backends.cpu.formats import (
    FORMATS,
    GROUP_INPUTS,
    GROUPS_PER_SUPERBLOCK,
    STRIP_OUTPUTS,
    PackedFormat,
)
from twinphase.backends.cpu.intrinsics import emitted
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.register_tile import (
    TILE_OPERANDS,
    Inputs,
    RegisterTile,
    each_group,
    release_tiles,
    store_tile,
    tile_operands,
)
from twinphase.backends.cpu.tiling import (
    MATRIX_BATCH_GROUPS,
    MATRIX_PANEL_GROUPS,
    MATRIX_TILE_ROWS,
    matrix_areas,
    unpacked_bytes,
)

ROWS = MATRIX_TILE_ROWS
PANEL_GROUPS = MATRIX_PANEL_GROUPS
BATCH_GROUPS = MATRIX_BATCH_GROUPS
# The codes of one group: for a block of 16 outputs, and for the strip of two blocks.
BLOCK_CODE_BYTES = 16 * GROUP_INPUTS
CODE_BYTES = 2 * BLOCK_CODE_BYTES
SUM_TILE_BYTES = ROWS * 64


class _MatrixTile(RegisterTile):
    """A tile of 16 rows and 16 outputs, on a panel that `_unpack` has written to `panel`."""

    def __init__(self, e: Emit, fmt: PackedFormat, panel: Value, block: Value, sums: Value) -> None:
        super().__init__(e, fmt, ROWS, 1, block)
        self.panel = panel
        self.block = block
        self.sums = sums
        self.parts = GROUP_INPUTS // fmt.group

    def _sums_at(self, g: Value) -> Value:
        place = self.e.b.and_(g, self.e.i64(BATCH_GROUPS - 1))
        return self.e.add(self.sums, self.e.mul(place, self.parts * SUM_TILE_BYTES))

    def multiply(self, x: Inputs, g: Value, first: int) -> None:
        """Multiply group g in three tile registers; a group past the end does no harm."""
        e = self.e
        fmt = self.fmt
        codes = e.add(
            self.panel, e.mul(g, unpacked_bytes(fmt)), e.mul(self.block, BLOCK_CODE_BYTES)
        )
        for part in range(self.parts):
            e.matrix("tilezero", first)
            inputs = e.add(x.data, e.mul(g, GROUP_INPUTS), part * fmt.group)
            e.matrix("tileloadd64", first + 1, at=(inputs, x.data_stride))
            e.matrix("tileloadd64", first + 2, at=(e.add(codes, part * 16 * fmt.group), e.i64(64)))
            e.matrix("tdpbssd", first, first + 1, first + 2)
            e.matrix(
                "tilestored64",
                first,
                at=(e.add(self._sums_at(g), part * SUM_TILE_BYTES), e.i64(64)),
            )

    def fetch(self, x: Inputs, g: Value) -> None:
        """Prefetch groups g and g + 1 of the next tile's rows, half of them beside each block."""
        e = self.e
        first = e.add(e.mul(self.block, ROWS // 2), ROWS)
        at = e.add(x.data, e.mul(g, GROUP_INPUTS), e.mul(first, x.data_stride))
        for m in range(ROWS // 2):
            e.prefetch(at, e.mul(x.data_stride, m), level=1)

    def scale(self, x: Inputs, g: Value, totals: list[Any]) -> None:
        """Add group g, which has been multiplied, to the totals."""
        e = self.e
        fmt = self.fmt
        parts = self.parts
        floats = e.add(self.panel, e.mul(g, unpacked_bytes(fmt)), e.mul(self.block, 64))
        for part in range(parts):
            at = e.add(self._sums_at(g), part * SUM_TILE_BYTES)
            sums = [[e.load(self.ints, at, 64 * m, align=64)] for m in range(ROWS)]
            scales = [e.load(self.floats, floats, CODE_BYTES + 128 * part, align=64)]
            minima = (
                [e.load(self.floats, floats, CODE_BYTES + 128 * (parts + part), align=64)]
                if fmt.minimum
                else []
            )
            self.add(scales, minima, x, g, totals, sums, part)


def _unpack(e: Emit, fmt: PackedFormat, w: Value, groups: Value, to: Value) -> None:
    """Groups as signed bytes less the offset, [block][quad][output][input], and float scales."""
    tile = RegisterTile(e, fmt, 0, 2, e.i64(0))
    size = unpacked_bytes(fmt)
    parts = GROUP_INPUTS // fmt.group
    signed = vector(I8, 64)
    with each_group(e, fmt, w, groups) as (g, record, header):
        at = e.add(to, e.mul(g, size))
        for quad in range(8):
            for n in range(2):
                codes = e.b.bitcast(tile.codes(record, quad, n), signed)
                if fmt.offset:
                    codes = e.b.add(codes, e.splat(signed, -fmt.offset))
                e.store(codes, at, n * BLOCK_CODE_BYTES + 64 * quad, align=64)
        for part in range(parts):
            scales, minima = tile.part_scales(record, header, part)
            for kind, vectors in enumerate((scales, minima)):
                for n, values in enumerate(vectors):
                    e.store(values, at, CODE_BYTES + 128 * (kind * parts + part) + 64 * n, align=64)


def strips_in_matrix_tiles(isa: Isa, format_name: str) -> Any:
    """As `linear._strips_kernel` for at least 16 rows."""
    fmt = FORMATS[format_name]
    record = fmt.record_bytes
    header = fmt.header_bytes
    shapes = ((ROWS, 64), (ROWS, fmt.group), (fmt.group // 4, 64))  # sums, rows, columns; twice

    def begin(e: Emit, scratch):
        e.shape_tiles(shapes * 2, scratch)

    def unpack(e: Emit, w, groups, to):
        _unpack(e, fmt, w, groups, to)

    def panel_of_rows(e: Emit, panel, groups, block, sums, waiting, first, last, *operands):
        x = Inputs(*operands[:6])
        tile = _MatrixTile(e, fmt, panel, block, sums)
        totals = [[e.variable(e.splat(tile.floats, 0.0))] for m in range(ROWS)]
        with e.b.if_then(e.b.icmp_signed("==", first, e.i64(0))):
            for m, row in enumerate(totals):
                row[0].set(e.load(tile.floats, waiting, 64 * m, align=64))
        with e.loop(0, groups, BATCH_GROUPS) as start:
            end = e.least(e.add(start, BATCH_GROUPS), groups)
            with e.loop(start, end, 2) as g:
                tile.multiply(x, g, 0)
                tile.multiply(x, e.add(g, 1), 3)
                tile.fetch(x, g)
            with e.loop(start, end) as g:
                tile.scale(x, g, totals)
        with e.b.if_else(e.b.icmp_signed("!=", last, e.i64(0))) as (then, otherwise):
            with then:
                store_tile(e, totals, *operands[6:])
            with otherwise:
                for m, row in enumerate(totals):
                    e.store(row[0].get(), waiting, 64 * m, align=64)

    begin_tiles = emitted(isa, begin)
    unpack_panel = emitted(isa, unpack)
    end_tiles = emitted(isa, release_tiles)
    multiply = emitted(isa, panel_of_rows, starred=TILE_OPERANDS)
    sums_at, panel_at, waiting_at = matrix_areas(fmt)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def run(operands, first_strip, end_strip, first_row, rows, scratch):
        w, groups = operands[:2]
        panel_bytes = PANEL_GROUPS * record + PANEL_GROUPS // GROUPS_PER_SUPERBLOCK * header
        strip_bytes = groups * record + groups // GROUPS_PER_SUPERBLOCK * header
        blocks = (rows + ROWS - 1) // ROWS
        sums = scratch + sums_at
        panel = scratch + panel_at
        waiting = scratch + waiting_at
        begin_tiles(scratch)
        for s in range(first_strip, end_strip):
            for p in range(0, groups, PANEL_GROUPS):
                count = min(PANEL_GROUPS, groups - p)
                unpack_panel(w + s * strip_bytes + p // PANEL_GROUPS * panel_bytes, count, panel)
                for i in range(blocks):
                    m = first_row + min(i * ROWS, rows - ROWS)  # some rows of the last block twice
                    for block in range(2):
                        multiply(
                            panel,
                            count,
                            block,
                            sums,
                            waiting + (2 * i + block) * SUM_TILE_BYTES,
                            int(p == 0),
                            int(p + PANEL_GROUPS >= groups),
                            *tile_operands(operands, m, s * STRIP_OUTPUTS + 16 * block, p),
                        )
        end_tiles()

    return run
