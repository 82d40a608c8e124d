"""Linear layers in bfloat16 matrix tiles (AMX): 16 outputs x 16 rows x 32 inputs per instruction.

Weights are an instruction's left operand, [16 outputs][32 inputs]. Those of BF16 models are loaded
as they are; quantized ones are unpacked first (`bf16_weights.py`). Rows come as bfloat16, in the
order of the right operand (`quantize.round_rows`). Sums stay in float32 tiles. A row is a column of
a tile and is summed by itself, inputs in one order, so its bits do not depend on the rows around
it: the same instruction computes one row and a thousand.

A strip's weights are unpacked once for few rows, the next group while one is multiplied. Many rows
take weights by panels, which stay in the first-level cache; sums wait in scratch memory between
panels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from twinphase.backends.cpu.emit import F32, I32, Emit, Value, vector
from twinphase.backends.cpu.formats import BY_OUTPUTS, GROUPS_PER_SUPERBLOCK
from twinphase.backends.cpu.intrinsics import call_kernel, emitted, helper
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.bf16_weights import GroupWeights
from twinphase.backends.cpu.kernels.blocks import turned
from twinphase.backends.cpu.kernels.gate_tile import write_record
from twinphase.backends.cpu.kernels.register_tile import release_tiles
from twinphase.backends.cpu.tiling import (
    BF16_AREAS,
    BF16_SUM_ROWS,
    DENSE_TILE_INPUTS,
    FEW_TILE_ROWS,
    MATRIX_TILE_ROWS,
    STREAMED_PANEL_TILES,
    STREAMED_ROWS,
    WEIGHT_PANEL_TILES,
    WEIGHT_TILE_BYTES,
)

ROWS = MATRIX_TILE_ROWS
TILE_BYTES = 1024
# A strip's sums for two blocks of rows: [block of rows][block of outputs].
SUM_BYTES = 4 * TILE_BYTES
# A strip of few rows prefetches weights this far ahead of its reads.
PREFETCH_BYTES = 8192
# Groups that are unpacked and not yet multiplied lie in a ring of this many.
RING_TILES = 2


def _begin(e: Emit, scratch: Value) -> None:
    e.shape_tiles([(ROWS, 64)] * 8, scratch)


def _sums(both: bool) -> range:
    """Tiles of a strip's sums, [block of rows][block of outputs], of one block of rows or both."""
    return range(4 if both else 2)


def _multiply(e: Emit, both: bool, weights: Value, x: Value, block_bytes: Value) -> None:
    """Add the products of 32 inputs to a strip's sums; weights take tiles 4 and 5, rows 6 and 7."""
    e.matrix("tileloadd64", 4, at=(weights, e.i64(64)))
    e.matrix("tileloaddt164", 6, at=(x, e.i64(64)))
    e.matrix("tdpbf16ps", 0, 4, 6)
    e.matrix("tileloadd64", 5, at=(e.add(weights, TILE_BYTES), e.i64(64)))
    e.matrix("tdpbf16ps", 1, 5, 6)
    if both:
        e.matrix("tileloaddt164", 7, at=(e.add(x, block_bytes), e.i64(64)))
        e.matrix("tdpbf16ps", 2, 4, 7)
        e.matrix("tdpbf16ps", 3, 5, 7)


def _store_sums(e: Emit, both: bool, to: Value) -> None:
    for tile in _sums(both):
        e.matrix("tilestored64", tile, at=(e.add(to, tile * TILE_BYTES), e.i64(64)))


def _panel_block(
    e: Emit,
    both: bool,
    weights,
    tiles,
    x,
    block_bytes,
    sums,
    is_first,
    out,
    out_stride,
    out_rows,
    ahead,
    lines,
) -> None:
    """Multiply a panel of a strip by one block of rows, or two; sums continue in scratch memory.

    Per 32 inputs the outputs of `out_rows` rows are prefetched meanwhile, and that number of lines
    of the weights `ahead`.
    """
    for tile in _sums(both):
        with e.b.if_else(e.b.icmp_signed("!=", is_first, e.i64(0))) as (then, otherwise):
            with then:
                e.matrix("tilezero", tile)
            with otherwise:
                e.matrix("tileloadd64", tile, at=(e.add(sums, tile * TILE_BYTES), e.i64(64)))
    with e.loop(0, tiles) as k:
        here = e.add(weights, e.mul(k, WEIGHT_TILE_BYTES))
        _multiply(e, both, here, e.add(x, e.mul(k, TILE_BYTES)), block_bytes)
        with e.loop(0, out_rows) as row:
            place = e.add(out, e.mul(out_stride, e.add(e.mul(k, out_rows), row)))
            e.prefetch(place, write=True)
            e.prefetch(place, 64, write=True)
        with e.loop(0, lines) as line:
            e.prefetch(ahead, e.mul(e.add(e.mul(k, lines), line), 64))
    _store_sums(e, both, sums)


def _stored(e: Emit, sums: Value, rows: Value, out, out_stride, residual, stride) -> None:
    """Add a strip's sums of up to 16 rows to the residual or bias; four rows are turned at once."""
    quarter = vector(I32, 4)
    with e.loop(0, rows, 4) as first:
        for i in range(2):
            at = e.add(sums, TILE_BYTES * i, e.mul(first, 4))
            vectors = turned(e, [e.load(quarter, at, 64 * output) for output in range(16)])
            for m, values in enumerate(vectors):
                row = e.add(first, m)
                with e.b.if_then(e.b.icmp_signed("<", row, rows)):
                    values = e.b.bitcast(values, vector(F32, 16))
                    base = e.load(values.type, residual, e.mul(row, stride), 64 * i)
                    e.store(e.b.fadd(values, base), out, e.mul(row, out_stride), 64 * i)


def strips_in_bf16_tiles(isa: Isa, type_name: str) -> Any:
    """As `linear._strips_kernel`, for rows in bfloat16 tiles.

    `groups` is the number of groups of 32 inputs, or of inputs where weights are not quantized;
    `first_row` is a multiple of 16.
    """
    fmt = BY_OUTPUTS.get(type_name)
    record = WEIGHT_TILE_BYTES if fmt is None else fmt.record_bytes
    header = 0 if fmt is None else fmt.header_bytes
    superblock = GROUPS_PER_SUPERBLOCK

    def unpacked(e: Emit, strip: Value, g: Value, to: Value, scratch: Value) -> None:
        assert fmt is not None
        GroupWeights(e, fmt, strip, g, e.add(scratch, BF16_AREAS["numbers"])).unpack(to)

    def stream(e: Emit, both: bool, strip, tiles, x, block_bytes, scratch, sums) -> None:
        """All of a strip's weights by few rows."""
        ring = e.add(scratch, BF16_AREAS["panel"])
        for tile in _sums(both):
            e.matrix("tilezero", tile)
        if fmt is not None:
            unpacked(e, strip, e.i64(0), ring, scratch)
        with e.loop(0, tiles) as k:
            here = e.add(strip, e.mul(k, record))
            for line in range(0, record, 64):
                e.prefetch(here, PREFETCH_BYTES, line)
            if fmt is not None:
                following = e.add(k, 1)
                with e.b.if_then(e.b.icmp_signed("<", following, tiles)):
                    slot = e.b.and_(following, e.i64(RING_TILES - 1))
                    to = e.add(ring, e.mul(slot, WEIGHT_TILE_BYTES))
                    unpacked(e, strip, following, to, scratch)
                slot = e.b.and_(k, e.i64(RING_TILES - 1))
                here = e.add(ring, e.mul(slot, WEIGHT_TILE_BYTES))
            _multiply(e, both, here, e.add(x, e.mul(k, TILE_BYTES)), block_bytes)
        _store_sums(e, both, sums)

    def panel_of(e: Emit, strip, first, count, scratch) -> Value:
        """The address of a panel's weights, unpacked if they have to be."""
        if fmt is None:
            return e.add(strip, e.mul(first, WEIGHT_TILE_BYTES))
        panel = e.add(scratch, BF16_AREAS["panel"])
        with e.loop(0, count) as i:
            to = e.add(panel, e.mul(i, WEIGHT_TILE_BYTES))
            unpacked(e, strip, e.add(first, i), to, scratch)
        return panel

    def one_or_both(write: Callable[..., None]) -> Callable[..., None]:
        def either(e: Emit, both, *operands):
            with e.b.if_else(e.b.icmp_signed("!=", both, e.i64(0))) as (then, otherwise):
                with then:
                    write(e, True, *operands)
                with otherwise:
                    write(e, False, *operands)

        return either

    begin = emitted(isa, _begin)
    end = emitted(isa, release_tiles)
    store = emitted(isa, _stored)
    stream_strip = emitted(isa, one_or_both(stream), starred=6)
    multiply_panel = emitted(isa, one_or_both(_panel_block), starred=11)
    panel_at = emitted(isa, panel_of)
    streamed = fmt is None
    inputs = DENSE_TILE_INPUTS if fmt is None else 1  # that `groups` counts as one
    at_sums = BF16_AREAS["sums"]
    at_gate = BF16_AREAS["gate"]

    @helper
    def finish(operands, s, first_row, rows, sums, strip_sums, scratch):
        """Store a strip's sums of up to 32 rows, or gate them by those of the strip before it."""
        gate, gate_arguments = operands[12:]
        if gate:
            if s % 2:
                record = scratch + at_gate
                write_record(record, sums - strip_sums, strip_sums, first_row, rows, s // 2, 1)
                call_kernel(gate, gate_arguments, 0, record)
            return
        out, out_stride, residual, residual_stride = operands[8:12]
        for m in range(0, rows, ROWS):
            store(
                sums + m // ROWS * 2 * TILE_BYTES,
                min(ROWS, rows - m),
                out + (first_row + m) * out_stride + 128 * s,
                out_stride,
                residual + (first_row + m) * residual_stride + 128 * s,
                residual_stride,
            )

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def few(operands, first_strip, end_strip, first_row, rows, tiles, strip_bytes, scratch):
        w, _, data, stride = operands[:4]
        for s in range(first_strip, end_strip):
            sums = scratch + at_sums + s % 2 * SUM_BYTES
            stream_strip(
                int(rows > ROWS),
                w + s * strip_bytes,
                tiles,
                data + first_row * stride,
                ROWS * stride,
                scratch,
                sums,
            )
            finish(operands, s, first_row, rows, sums, SUM_BYTES, scratch)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def many(operands, first_strip, end_strip, first_row, rows, tiles, strip_bytes, scratch):
        w, _, data, stride = operands[:4]
        out, out_stride = operands[8:10]
        longest = STREAMED_PANEL_TILES if streamed and rows <= STREAMED_ROWS else WEIGHT_PANEL_TILES
        panels = (tiles + longest - 1) // longest
        most = (tiles + panels - 1) // panels
        strip_sums = (rows + 2 * ROWS - 1) // (2 * ROWS) * SUM_BYTES
        for p in range(0, tiles, most):
            count = min(most, tiles - p)
            for s in range(first_strip, end_strip):
                panel = panel_at(w + s * strip_bytes, p, count, scratch)
                sums = scratch + at_sums + (s - first_strip) * strip_sums
                last = p + count >= tiles
                # A gate stores its result elsewhere.
                out_rows = (2 * ROWS + count - 1) // count if last and not operands[12] else 0
                # Each block asks for its share of the next strip's panel; after the last of several
                # strips, of the first one's next panel.
                blocks = (rows + 2 * ROWS - 1) // (2 * ROWS)
                lines = (record // 64 + blocks - 1) // blocks
                ahead = w + first_strip * strip_bytes + (p + count) * record
                if s + 1 < end_strip or end_strip - first_strip == 1:
                    ahead = w + (s + 1) * strip_bytes + p * record
                for m in range(0, rows, 2 * ROWS):
                    multiply_panel(
                        int(m + ROWS < rows),
                        panel,
                        count,
                        data + (first_row + m) * stride + p * TILE_BYTES,
                        ROWS * stride,
                        sums + m // (2 * ROWS) * SUM_BYTES,
                        int(p == 0),
                        out + (first_row + m) * out_stride + 128 * s,
                        out_stride,
                        out_rows,
                        ahead + m // (2 * ROWS) * lines * count * 64,
                        lines,
                    )
                    # Sums have left the processor's queues once the next block is multiplied.
                    if last and m:
                        block = m - 2 * ROWS
                        at = sums + block // (2 * ROWS) * SUM_BYTES
                        finish(operands, s, first_row + block, 2 * ROWS, at, strip_sums, scratch)
                if last:
                    block = (rows - 1) // (2 * ROWS) * 2 * ROWS
                    at = sums + block // (2 * ROWS) * SUM_BYTES
                    left = rows - block
                    finish(operands, s, first_row + block, left, at, strip_sums, scratch)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def run(operands, first_strip, end_strip, first_row, rows, scratch):
        tiles = (operands[1] + inputs - 1) // inputs
        strip_bytes = tiles * record + tiles // superblock * header
        begin(scratch)
        if rows <= FEW_TILE_ROWS:
            few(operands, first_strip, end_strip, first_row, rows, tiles, strip_bytes, scratch)
        else:
            # Even, since a gate takes two strips.
            step = BF16_SUM_ROWS // ((rows + 2 * ROWS - 1) // (2 * ROWS) * 2 * ROWS) // 2 * 2
            for s in range(first_strip, end_strip, step):
                end_s = min(end_strip, s + step)
                many(operands, s, end_s, first_row, rows, tiles, strip_bytes, scratch)
        end()

    return run
