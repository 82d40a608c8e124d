"""Register tiles of many rows, on weights that are unpacked in panels.

A panel is `PANEL_GROUPS` groups of a strip as bytes and float32 scales. It stays in the first-level
cache while all rows of a chunk pass by, so that each weight is unpacked once and not once for every
register tile; the rows' sums wait in scratch memory between panels. What a tile takes of each row
besides its bytes lies at fixed distances (`PreparedRows`). Integer sums, scales and their order are
those of `register_tile.py`: a row has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba import njit

from twinphase.backends.cpu.emit import F32, I8, I16, I32, Emit, Value, vector
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
    totals_in_memory,
)
from twinphase.backends.cpu.kernels.whole_tile import WholeTile
from twinphase.backends.cpu.tiling import (
    PanelLayout,
    panel_areas,
    panel_groups,
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

    For register tiles bytes are the codes, unsigned, or words the codes less their offset
    (`Isa.takes_words`); for `matrix` tiles bytes are the codes less their offset. Where scales are
    multiplied in whole numbers, `_fold` says what they are.
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
        if whole and fmt.minimum and not matrix:
            kinds[1] = [[pair_of(e, *minima) for minima in zip(*kinds[1], strict=True)]]
        for quad in range(8):
            for n in range(count):
                codes = tile.codes(record, quad, n)
                if isinstance(tile, WholeTile):
                    codes = _fold(e, fmt, codes, kinds[0][quad // 4][n], matrix)
                elif matrix and fmt.offset:
                    codes = e.b.bitcast(codes, numbers)
                    codes = e.b.add(codes, e.splat(numbers, -fmt.offset))
                block, place = divmod(width * n, 64)
                place += block * BLOCK_CODE_BYTES + 64 * quad
                planes = [codes]
                if e.isa.takes_words(fmt):
                    codes = e.b.bitcast(codes, numbers)
                    planes = words_of(e, e.b.xor(codes, e.splat(numbers, -fmt.offset)))
                for plane, values in enumerate(planes):
                    e.store(values, at, plane * CODE_BYTES + place, align=width)
        for kind in small:
            for part, values in enumerate(kinds[kind]):
                put(values, at, layout.small + 128 * (kind * parts + part))
    if isinstance(tile, WholeTile):
        with e.loop(0, e.b.sdiv(groups, e.i64(GROUPS_PER_SUPERBLOCK))) as i:
            at = e.add(to, e.mul(i, GROUPS_PER_SUPERBLOCK * layout.size))
            for kind in small:
                put(tile.shared(tile.superblock(w, i), kind), at, layout.shared + 128 * kind)


def pair_of(e: Emit, first: Value, second: Value) -> Value:
    """Two vectors of int32 as pairs of 16-bit words, which they fit."""
    low = e.b.and_(first, e.splat(first.type, 0xFFFF))
    return e.b.or_(low, e.b.shl(second, e.splat(second.type, 16)))


def words_of(e: Emit, numbers: Value) -> list[Value]:
    """Signed bytes as 16-bit words: those at even places, and those at odd ones."""
    words = vector(I16, numbers.type.count // 2)
    pairs = e.b.bitcast(numbers, words)
    eight = e.splat(words, 8)
    return [e.b.ashr(e.b.shl(pairs, eight), eight), e.b.ashr(pairs, eight)]


class PreparedRows:
    """What a tile reads of its rows besides their bytes, at fixed distances in scratch memory.

    For each group of a panel that is the row's scale, and for each part of the group the number
    with which integer sums begin (-offset * sum of inputs), or by which minima are multiplied
    (scale * sum of inputs). With whole scales there is one such number for a group; for minima it
    is the pair of its parts' sums (`pair_of`). Where codes are words, inputs are, too (`words_of`).
    """

    def __init__(self, e: Emit, fmt: PackedFormat, scratch: Value) -> None:
        self.e = e
        self.fmt = fmt
        numbers, words, _ = panel_areas(e.isa, fmt)
        self.numbers = e.add(scratch, numbers)
        self.words = e.add(scratch, words)
        self.groups = panel_groups(e.isa, fmt)
        self.row_words = 2 * GROUP_INPUTS * self.groups
        self.whole = e.isa.whole_scales(fmt)
        self.offset = 0 if e.dot_is_signed(fmt.bits_multiplied) else fmt.offset
        if self.whole and fmt.offset:
            self.offset = FOLDED_OFFSET

    def place(self, kind: int, m: int) -> int:
        """Offset of row m's scales (kind 0), or of the numbers of part kind - 1."""
        return 4 * self.groups * (kind * self.e.isa.linear_rows + m)

    def _put_numbers(self, x: Inputs, m: Value, g: Value, width: int) -> None:
        e = self.e
        here = e.add(e.mul(m, x.scale_stride), e.mul(g, 4))
        to = e.add(self.numbers, e.mul(m, 4 * self.groups), e.mul(g, 4))
        scales = e.load(vector(F32, width), x.scale, here)
        e.store(scales, to)
        if not self.offset and not self.fmt.minimum:
            return
        both = e.load(vector(I32, 2 * width), x.isum, e.mul(here, 2))
        halves = [e.shuffle(both, None, range(half, 2 * width, 2)) for half in (0, 1)]
        if self.whole and self.fmt.minimum:
            e.store(pair_of(e, *halves), to, self.place(1, 0))
            return
        in_parts = self.fmt.parts == 2 and not self.whole
        for part, total in enumerate(halves if in_parts else [e.b.add(*halves)]):
            if self.fmt.minimum:
                number = e.b.fmul(scales, e.b.sitofp(total, scales.type))
            else:
                number = e.b.mul(total, e.splat(total.type, -self.offset))
            e.store(number, to, self.place(1 + part, 0))

    def fill(self, x: Inputs, rows: Value, groups: Value) -> None:
        """Prepare that number of rows for the panel's groups."""
        e = self.e
        whole = e.b.and_(groups, e.i64(-8))
        with e.loop(0, rows) as m:
            with e.loop(0, whole, 8) as g:
                self._put_numbers(x, m, g, 8)
            with e.loop(whole, groups) as g:
                self._put_numbers(x, m, g, 1)
            if e.isa.takes_words(self.fmt):
                with e.loop(0, groups) as g:
                    at = e.add(e.mul(m, x.data_stride), e.mul(g, GROUP_INPUTS))
                    to = e.add(self.words, e.mul(m, self.row_words), e.mul(g, 2 * GROUP_INPUTS))
                    for plane, words in enumerate(words_of(e, e.load(vector(I8, 32), x.data, at))):
                        e.store(words, to, 32 * plane)


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


class _OnPreparedRows:
    """Reads rows' numbers; mixed into the tiles on panels."""

    if TYPE_CHECKING:
        e: Emit
        lanes: int
        vectors: int
        rows: int

    def __init__(self, x: PreparedRows, rows: int, vectors: int, block: Value) -> None:
        super().__init__(x.e, x.fmt, rows, vectors, block)  # type: ignore[call-arg]
        self.x = x

    def number(self, ty: Any, g: Value, kind: int, m: int) -> Value:
        """A number of row m and group g, in each lane; kinds are those of `PreparedRows.place`."""
        e = self.e
        return e.broadcast(
            e.load(ty, self.x.numbers, e.mul(g, 4), self.x.place(kind, m)), self.lanes
        )

    def token_scale(self, x: Inputs, g: Value, m: int) -> Value:
        return self.number(F32, g, 0, m)

    def starts(self, x: Inputs, g: Value, offset: int, *halves: int) -> list[list[Value]]:
        if not offset:
            return super().starts(x, g, offset, *halves)  # type: ignore[misc,no-any-return]
        kind = 1 + halves[0]
        return [[self.number(I32, g, kind, m)] * self.vectors for m in range(self.rows)]


class PreparedTile(_OnPreparedRows, PanelTile):
    """A register tile on a panel and on rows that are prepared for it."""

    def token_sum(self, x: Inputs, g: Value, m: int, part: int) -> Value:
        return self.number(F32, g, 1 + part, m)

    def dots(
        self,
        record: Value,
        x: Inputs,
        g: Value,
        sums: list[list[Value]],
        quads: range,
        signed: bool = False,
    ) -> None:
        e = self.e
        if not e.isa.takes_words(self.fmt):
            super().dots(record, x, g, sums, quads, signed)
            return
        for quad in quads:
            for plane in (0, 1):
                codes_at = e.add(record, plane * CODE_BYTES)
                codes = [self.codes(codes_at, quad, n) for n in range(self.vectors)]
                for m in range(self.rows):
                    at = self.x.row_words * m + GROUP_INPUTS * plane + 4 * quad
                    pair = e.load(I32, self.x.words, e.mul(g, 2 * GROUP_INPUTS), at)
                    inputs = e.broadcast(pair, self.lanes)
                    for n in range(self.vectors):
                        sums[m][n] = e.b.add(sums[m][n], e.dot_words(codes[n], inputs))


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


class WholePreparedTile(_OnPreparedRows, WholePanelTile):
    """A register tile on a panel of whole numbers and on prepared rows."""

    def minima(self, record: Value, x: Inputs, g: Value) -> list[list[Value]]:
        pairs = self.factors(record, 1, 0)
        sums = [self.number(I32, g, 1, m) for m in range(self.rows)]
        return [[self.e.dot_words(pair, total) for pair in pairs] for total in sums]


def strips_in_panels(isa: Isa, format_name: str) -> Any:
    """As `linear._strips_kernel`, for at least `panel_min_rows` rows."""
    fmt = FORMATS[format_name]
    record = fmt.record_bytes
    header = fmt.header_bytes
    most_groups = panel_groups(isa, fmt)
    pieces = 1 if isa.lanes == 16 else 2
    columns = STRIP_OUTPUTS // pieces
    vectors = columns // isa.lanes
    most = isa.linear_rows
    least = min(rows // -(-rows // most) for rows in range(panel_min_rows(isa, fmt), 8 * most))

    def unpack_codes(e: Emit, w, groups, to):
        unpack(e, fmt, w, groups, to)

    def prepare_rows(e: Emit, rows, groups, scratch, *operands):
        PreparedRows(e, fmt, scratch).fill(Inputs(*operands[:6]), rows, groups)

    kind = WholePreparedTile if isa.whole_scales(fmt) else PreparedTile

    def of_height(e: Emit, rows: int, weights: Weights, waiting, first, last, operands):
        tile = kind(PreparedRows(e, fmt, weights.address), rows, vectors, weights.block)
        slots = totals_in_memory(e, rows, vectors, waiting, WAITING_BYTES)
        zero = e.splat(tile.floats, 0.0)
        narrow = isa.registers == 16
        totals = slots if narrow else [[e.variable(zero) for _ in row] for row in slots]
        each = [(totals[m][n], slots[m][n]) for m in range(rows) for n in range(vectors)]
        with e.b.if_else(e.b.icmp_signed("==", first, e.i64(0))) as (later, begin):
            with later:
                for total, slot in each if not narrow else ():
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
                for total, slot in each if not narrow else ():
                    slot.set(total.get())

    def tiles(e: Emit, height, panel, groups, block, ahead, step, waiting, first, last, *operands):
        for rows in range(most, least - 1, -1):
            with e.b.if_then(e.b.icmp_signed("==", height, e.i64(rows))):
                weights = Weights(panel, groups, block, ahead, step)
                of_height(e, rows, weights, waiting, first, last, operands)

    unpack_panel = emitted(isa, unpack_codes)
    prepare = emitted(isa, prepare_rows, starred=TILE_OPERANDS)
    tile_of = emitted(isa, tiles, starred=TILE_OPERANDS)
    _, _, waiting_at = panel_areas(isa, fmt)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def run(operands, first_strip, end_strip, first_row, rows, scratch):
        w, groups = operands[:2]
        panel_bytes = most_groups * record + most_groups // GROUPS_PER_SUPERBLOCK * header
        strip_bytes = groups * record + groups // GROUPS_PER_SUPERBLOCK * header
        blocks = (rows + most - 1) // most
        waiting = scratch + waiting_at
        # Each block asks for its share of the next panel.
        step = min(64 * AHEAD_LINES, (record // 64 + blocks) // blocks * 64)
        for s in range(first_strip, end_strip):
            for p in range(0, groups, most_groups):
                count = min(most_groups, groups - p)
                here = w + s * strip_bytes + p // most_groups * panel_bytes
                unpack_panel(here, count, scratch)
                ahead = here + panel_bytes if p + count < groups else w + (s + 1) * strip_bytes
                for i in range(blocks):
                    m = first_row + i * rows // blocks
                    end = first_row + (i + 1) * rows // blocks
                    prepare(end - m, count, scratch, *tile_operands(operands, m, 0, p))
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
