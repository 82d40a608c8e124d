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

from twinphase.backends.cpu.emit import Emit, Value
from twinphase.backends.cpu.formats import (
    FORMATS,
    GROUP_INPUTS,
    GROUPS_PER_SUPERBLOCK,
    STRIP_OUTPUTS,
    PackedFormat,
)
from twinphase.backends.cpu.intrinsics import emitted
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.panels import (
    BLOCK_CODE_BYTES,
    PanelTile,
    WholePanelTile,
    unpack,
)
from twinphase.backends.cpu.kernels.register_tile import (
    TILE_OPERANDS,
    Inputs,
    release_tiles,
    store_tile,
    tile_operands,
)
from twinphase.backends.cpu.tiling import (
    MATRIX_BATCH_GROUPS,
    MATRIX_TILE_ROWS,
    PANEL_GROUPS,
    PanelLayout,
    matrix_areas,
)

ROWS = MATRIX_TILE_ROWS
BATCH_GROUPS = MATRIX_BATCH_GROUPS
SUM_TILE_BYTES = ROWS * 64


class _NegativeTile(WholePanelTile):
    """Q3_K's bytes are the negatives of the products (`panels.py`)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.negative = self.fmt.offset > 0


class _MatrixTile:
    """A tile of 16 rows and 16 outputs, on a panel that `unpack` has written to `panel`."""

    def __init__(self, e: Emit, fmt: PackedFormat, panel: Value, block: Value, sums: Value) -> None:
        self.e = e
        self.panel = panel
        self.block = block
        self.sums = sums
        self.size = PanelLayout.of(e.isa, fmt).size
        # Products of a group: where their codes and their inputs are.
        self.products = [(part * 16 * fmt.group, part * fmt.group) for part in range(fmt.parts)]
        self.tile: PanelTile | _NegativeTile = PanelTile(e, fmt, ROWS, 1, block)
        if e.isa.whole_scales(fmt):
            self.products = [(0, 0)]
            self.tile = _NegativeTile(e, fmt, ROWS, 1, block)

    def _sums_at(self, g: Value, product: int) -> Value:
        place = self.e.b.and_(g, self.e.i64(BATCH_GROUPS - 1))
        offset = self.e.mul(place, len(self.products) * SUM_TILE_BYTES)
        return self.e.add(self.sums, offset, product * SUM_TILE_BYTES)

    def multiply(self, x: Inputs, g: Value, first: int) -> None:
        """Multiply group g in three tile registers; a group past the end does no harm."""
        e = self.e
        codes = e.add(self.panel, e.mul(g, self.size), e.mul(self.block, BLOCK_CODE_BYTES))
        for product, (code_at, input_at) in enumerate(self.products):
            e.matrix("tilezero", first)
            inputs = e.add(x.data, e.mul(g, GROUP_INPUTS), input_at)
            e.matrix("tileloadd64", first + 1, at=(inputs, x.data_stride))
            e.matrix("tileloadd64", first + 2, at=(e.add(codes, code_at), e.i64(64)))
            e.matrix("tdpbssd", first, first + 1, first + 2)
            e.matrix("tilestored64", first, at=(self._sums_at(g, product), e.i64(64)))

    def fetch(self, x: Inputs, g: Value) -> None:
        """Prefetch groups g and g + 1 of the next tile's rows, half of them beside each block."""
        e = self.e
        first = e.add(e.mul(self.block, ROWS // 2), ROWS)
        at = e.add(x.data, e.mul(g, GROUP_INPUTS), e.mul(first, x.data_stride))
        for m in range(ROWS // 2):
            e.prefetch(at, e.mul(x.data_stride, m), level=1)

    def scale(self, x: Inputs, g: Value, totals: list[Any]) -> None:
        """Add group g, which has been multiplied, to the totals, or to those of its superblock."""
        e = self.e
        tile = self.tile
        record = e.add(self.panel, e.mul(g, self.size))
        found = [
            [[e.load(tile.ints, self._sums_at(g, i), 64 * m, align=64)] for m in range(ROWS)]
            for i in range(len(self.products))
        ]
        if isinstance(tile, PanelTile):
            for part, sums in enumerate(found):
                tile.add(*tile.part_scales(record, None, part), x, g, totals, sums, part)
            return
        tile.add_whole(found[0], x, g, totals)

    def batch(self, x: Inputs, start: Value, end: Value, totals: list[Any]) -> None:
        """Multiply and scale the groups from `start` to `end`, at most BATCH_GROUPS."""
        e = self.e
        with e.loop(start, end, 2) as g:
            self.multiply(x, g, 0)
            self.multiply(x, e.add(g, 1), 3)
            self.fetch(x, g)
        with e.loop(start, end) as g:
            self.scale(x, g, totals)

    def add_groups(self, groups: Value, x: Inputs, totals: list[Any]) -> None:
        """Add the panel's groups to the totals."""
        e = self.e
        tile = self.tile
        if isinstance(tile, PanelTile):
            with e.loop(0, groups, BATCH_GROUPS) as start:
                self.batch(x, start, e.least(e.add(start, BATCH_GROUPS), groups), totals)
            return
        with e.loop(0, groups, GROUPS_PER_SUPERBLOCK) as first:
            superblock = e.add(self.panel, e.mul(first, self.size))
            partial = tile.zeros()
            with e.loop(first, e.add(first, GROUPS_PER_SUPERBLOCK), BATCH_GROUPS) as start:
                self.batch(x, start, e.add(start, BATCH_GROUPS), partial)
            tile.finish(partial, superblock, 0, totals)
            tile.add_minima(superblock, first, x, totals)


def strips_in_matrix_tiles(isa: Isa, format_name: str) -> Any:
    """As `linear._strips_kernel` for at least 16 rows."""
    fmt = FORMATS[format_name]
    record = fmt.record_bytes
    header = fmt.header_bytes
    inputs = GROUP_INPUTS if isa.whole_scales(fmt) else fmt.group
    shapes = ((ROWS, 64), (ROWS, inputs), (inputs // 4, 64))  # sums, rows, columns; twice

    def begin(e: Emit, scratch):
        e.shape_tiles(shapes * 2, scratch)

    def unpack_bytes(e: Emit, w, groups, to):
        unpack(e, fmt, w, groups, to, matrix=True)

    def panel_of_rows(e: Emit, panel, groups, block, sums, waiting, first, last, *operands):
        x = Inputs(*operands[:6])
        matrix = _MatrixTile(e, fmt, panel, block, sums)
        tile = matrix.tile
        totals = [[e.variable(e.splat(tile.floats, 0.0))] for m in range(ROWS)]
        with e.b.if_then(e.b.icmp_signed("==", first, e.i64(0))):
            for m, row in enumerate(totals):
                row[0].set(e.load(tile.floats, waiting, 64 * m, align=64))
        matrix.add_groups(groups, x, totals)
        with e.b.if_else(e.b.icmp_signed("!=", last, e.i64(0))) as (then, otherwise):
            with then:
                store_tile(e, totals, *operands[6:])
            with otherwise:
                for m, row in enumerate(totals):
                    e.store(row[0].get(), waiting, 64 * m, align=64)

    begin_tiles = emitted(isa, begin)
    unpack_panel = emitted(isa, unpack_bytes)
    end_tiles = emitted(isa, release_tiles)
    multiply = emitted(isa, panel_of_rows, starred=TILE_OPERANDS)
    sums_at, panel_at, waiting_at = matrix_areas(isa, fmt)

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
