"""Register tiles of many rows, on weights that are unpacked in panels.

A panel is `PANEL_GROUPS` groups of a strip as bytes and float32 scales. It stays in the first-level
cache while all rows of a chunk pass by, so that each weight is unpacked once and not once for every
register tile; the rows' sums wait in scratch memory between panels. Integer sums, scales and their
order are those of `register_tile.py`: a row has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba import njit

from twinphase.backends.cpu.emit import I8, I16, Emit, Value, vector
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
    AHEAD_LINES,
    TILE_OPERANDS,
    Inputs,
    RegisterTile,
    Weights,
    each_group,
    store_tile,
    tile_operands,
)
from twinphase.backends.cpu.kernels.whole_tile import WholeTile
from twinphase.backends.cpu.tiling import (
    PANEL_GROUPS,
    PanelLayout,
    panel_area,
    panel_min_rows,
)

# The codes of one group: for a block of 16 outputs, and for the strip of two blocks.
BLOCK_CODE_BYTES = 16 * GROUP_INPUTS
CODE_BYTES = 2 * BLOCK_CODE_BYTES
# Added to products of codes and whole scales, so that bytes are unsigned.
FOLDED_OFFSET = 124
# Sums that wait: bytes of a row.
WAITING_BYTES = 4 * STRIP_OUTPUTS


def unpack(
    e: Emit, fmt: PackedFormat, w: Value, groups: Value, to: Value, matrix: bool = False
) -> None:
    """Groups of a strip as bytes, [block][quad][output][input], with their scales.

    For register tiles bytes are the codes, unsigned; for `matrix` tiles the codes less their
    offset. Where scales are multiplied in whole numbers, `_fold` says what they are.
    """
    count = STRIP_OUTPUTS // e.isa.lanes
    whole = e.isa.whole_scales(fmt)
    tile = (WholeTile if whole else RegisterTile)(e, fmt, 0, count, e.i64(0))
    layout = PanelLayout.of(e.isa, fmt)
    parts = fmt.parts
    width = 4 * e.isa.lanes
    numbers = vector(I8, width)

    def put(vectors: list[Value], at: Value, offset: int) -> None:
        for n, values in enumerate(vectors):
            e.store(values, at, offset + width * n, align=width)

    with each_group(e, fmt, w, groups) as (g, record, header):
        at = e.add(to, e.mul(g, layout.size))
        small = range(2 if fmt.minimum else 1)
        if isinstance(tile, WholeTile):
            kinds = [[tile.factors(record, kind, part) for part in range(parts)] for kind in small]
        else:
            each = [tile.part_scales(record, header, part) for part in range(parts)]
            kinds = [[scales[kind] for scales in each] for kind in small]
        for quad in range(8):
            for n in range(count):
                codes = tile.codes(record, quad, n)
                if isinstance(tile, WholeTile):
                    codes = _fold(e, fmt, codes, kinds[0][quad // 4][n], matrix)
                elif matrix and fmt.offset:
                    codes = e.b.bitcast(codes, numbers)
                    codes = e.b.add(codes, e.splat(numbers, -fmt.offset))
                block, place = divmod(width * n, 64)
                e.store(codes, at, block * BLOCK_CODE_BYTES + 64 * quad + place, align=width)
        for kind in small:
            for part in range(parts):
                put(kinds[kind][part], at, layout.small + 128 * (kind * parts + part))
    if isinstance(tile, WholeTile):
        with e.loop(0, e.b.sdiv(groups, e.i64(GROUPS_PER_SUPERBLOCK))) as i:
            at = e.add(to, e.mul(i, GROUPS_PER_SUPERBLOCK * layout.size))
            for kind in small:
                put(tile.shared(tile.superblock(w, i), kind), at, layout.shared + 128 * kind)


def _fold(e: Emit, fmt: PackedFormat, codes: Value, scales: Value, matrix: bool) -> Value:
    """Codes less their offset, times whole scales: bytes in int32 lanes.

    They are from -124 to 128 (Q3_K), or 0 to 45 (Q2_K). For register tiles FOLDED_OFFSET is added
    to the former; matrix tiles get their negatives, which fit a signed byte.
    """
    b = e.b
    words = vector(I16, 2 * codes.type.count)
    pair = b.and_(scales, e.splat(scales.type, 0xFFFF))
    by = b.bitcast(b.or_(pair, b.shl(pair, e.splat(pair.type, 16))), words)
    eight = e.splat(words, 8)
    low_byte = e.splat(words, 255)
    inputs = b.bitcast(codes, words)
    products = [
        b.mul(b.sub(number, e.splat(words, fmt.offset)), by)
        for number in (b.and_(inputs, low_byte), b.lshr(inputs, eight))
    ]
    if fmt.offset and matrix:
        products = [b.sub(e.splat(words, 0), product) for product in products]
    elif fmt.offset:
        products = [b.add(product, e.splat(words, FOLDED_OFFSET)) for product in products]
    even, odd = products
    return b.bitcast(b.or_(b.and_(even, low_byte), b.shl(odd, eight)), codes.type)


class _Waiting:
    """A total in scratch memory, where a narrow register file has no room for it."""

    def __init__(self, e: Emit, ty: Any, address: Value, offset: int) -> None:
        self._e = e
        self._ty = ty
        self._place = (address, offset)

    def get(self) -> Value:
        """The value now."""
        return self._e.load(self._ty, *self._place, align=4)

    def set(self, value: Value) -> None:
        """Change it."""
        self._e.store(value, *self._place, align=4)


class _OnPanel:
    """Reads a group's unpacked record; mixed into the tiles on packed weights."""

    if TYPE_CHECKING:
        e: Emit
        fmt: PackedFormat
        lanes: int
        vectors: int
        ints: Any
        floats: Any
        low_at: Value

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.layout = PanelLayout.of(self.e.isa, self.fmt)
        self.codes_at = self.e.mul(args[-1], BLOCK_CODE_BYTES)

    def codes(self, record: Value, quad: int, n: int) -> Value:
        block, place = divmod(4 * self.lanes * n, 64)
        offset = block * BLOCK_CODE_BYTES + 64 * quad + place
        return self.e.load(self.ints, record, self.codes_at, offset, align=4 * self.lanes)

    def numbers_at(self, ty: Any, record: Value, offset: int) -> list[Value]:
        """One for each output; a block's take as many bytes as a line of its codes."""
        return [
            self.e.load(ty, record, self.low_at, offset + 4 * self.lanes * n, align=4)
            for n in range(self.vectors)
        ]

    def small_at(self, kind: int, part: int) -> int:
        """Where scales (kind 0) or minima (1) of a part of a group are."""
        return self.layout.small + 128 * (kind * self.fmt.parts + part)


class PanelTile(_OnPanel, RegisterTile):
    """A register tile on a panel."""

    def part_scales(
        self, record: Value, header: Value | None, part: int
    ) -> tuple[list[Value], list[Value]]:
        scales = self.numbers_at(self.floats, record, self.small_at(0, part))
        if not self.fmt.minimum:
            return scales, []
        return scales, self.numbers_at(self.floats, record, self.small_at(1, part))

    def add_groups(
        self,
        address: Value,
        groups: Value,
        x: Inputs,
        totals: list[Any],
        fetch: Callable[[Value, Value], None],
    ) -> None:
        e = self.e
        with e.loop(0, groups) as g:
            record = e.add(address, e.mul(g, self.layout.size))
            fetch(g, record)
            self.group(record, None, x, g, totals)


class WholePanelTile(_OnPanel, WholeTile):
    """A register tile on a panel of whole numbers."""

    def superblock(self, address: Value, i: Value) -> Value:
        return self.e.add(address, self.e.mul(i, GROUPS_PER_SUPERBLOCK * self.layout.size))

    def record(self, superblock: Value, j: Value) -> Value:
        return self.e.add(superblock, self.e.mul(j, self.layout.size))

    def factors(self, record: Value, kind: int, part: int) -> list[Value]:
        return self.numbers_at(self.ints, record, self.small_at(kind, part))

    def shared(self, superblock: Value, kind: int) -> list[Value]:
        return self.numbers_at(self.floats, superblock, self.layout.shared + 128 * kind)

    def numbers(self, record: Value, x: Inputs, g: Value) -> list[list[Value]]:
        sums = self.starts(x, g, FOLDED_OFFSET if self.fmt.offset else 0, 0, 1)
        self.dots(record, x, g, sums, range(8))
        return sums


def strips_in_panels(isa: Isa, format_name: str) -> Any:
    """As `linear._strips_kernel`, for at least `panel_min_rows` rows."""
    fmt = FORMATS[format_name]
    record = fmt.record_bytes
    header = fmt.header_bytes
    kind = WholePanelTile if isa.whole_scales(fmt) else PanelTile
    pieces = 1 if isa.lanes == 16 else 2
    columns = STRIP_OUTPUTS // pieces
    vectors = columns // isa.lanes
    most = isa.linear_rows
    least = min(rows // -(-rows // most) for rows in range(panel_min_rows(isa), 8 * most))

    def unpack_codes(e: Emit, w, groups, to):
        unpack(e, fmt, w, groups, to)

    def of_height(e: Emit, rows: int, weights: Weights, waiting, first, last, operands):
        tile = kind(e, fmt, rows, vectors, weights.block)
        slots = [
            [
                _Waiting(e, tile.floats, waiting, WAITING_BYTES * m + 4 * isa.lanes * n)
                for n in range(vectors)
            ]
            for m in range(rows)
        ]
        zero = e.splat(tile.floats, 0.0)
        in_memory = isa.registers == 16
        totals = slots if in_memory else [[e.variable(zero) for _ in row] for row in slots]
        each = [(totals[m][n], slots[m][n]) for m in range(rows) for n in range(vectors)]
        with e.b.if_else(e.b.icmp_signed("==", first, e.i64(0))) as (later, begin):
            with later:
                for total, slot in each if not in_memory else ():
                    total.set(slot.get())
            with begin:
                for total, _ in each:
                    total.set(zero)

        def fetch(g: Value, record: Value) -> None:
            weights.fetch(e, rows, g, record, 0)

        tile.add_groups(weights.address, weights.groups, Inputs(*operands[:6]), totals, fetch)
        with e.b.if_else(e.b.icmp_signed("!=", last, e.i64(0))) as (then, otherwise):
            with then:
                store_tile(e, totals, *operands[6:])
            with otherwise:
                for total, slot in each if not in_memory else ():
                    slot.set(total.get())

    def tiles(e: Emit, height, panel, groups, block, ahead, step, waiting, first, last, *operands):
        for rows in range(most, least - 1, -1):
            with e.b.if_then(e.b.icmp_signed("==", height, e.i64(rows))):
                weights = Weights(panel, groups, block, ahead, step)
                of_height(e, rows, weights, waiting, first, last, operands)

    unpack_panel = emitted(isa, unpack_codes)
    tile_of = emitted(isa, tiles, starred=TILE_OPERANDS)
    waiting_at = panel_area(isa, fmt)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def run(operands, first_strip, end_strip, first_row, rows, scratch):
        w, groups = operands[:2]
        panel_bytes = PANEL_GROUPS * record + PANEL_GROUPS // GROUPS_PER_SUPERBLOCK * header
        strip_bytes = groups * record + groups // GROUPS_PER_SUPERBLOCK * header
        blocks = (rows + most - 1) // most
        waiting = scratch + waiting_at
        # Each block asks for its share of the next panel.
        step = min(64 * AHEAD_LINES, (record // 64 + blocks) // blocks * 64)
        for s in range(first_strip, end_strip):
            for p in range(0, groups, PANEL_GROUPS):
                count = min(PANEL_GROUPS, groups - p)
                here = w + s * strip_bytes + p // PANEL_GROUPS * panel_bytes
                unpack_panel(here, count, scratch)
                ahead = here + panel_bytes if p + count < groups else w + (s + 1) * strip_bytes
                for i in range(blocks):
                    m = first_row + i * rows // blocks
                    end = first_row + (i + 1) * rows // blocks
                    for piece in range(pieces):
                        tile_of(
                            end - m,
                            scratch,
                            count,
                            piece,
                            ahead + i * count * step,
                            step,
                            waiting + (m - first_row) * WAITING_BYTES + 4 * columns * piece,
                            int(p == 0),
                            int(p + count >= groups),
                            *tile_operands(operands, m, s * STRIP_OUTPUTS + piece * columns, p),
                        )

    return run
