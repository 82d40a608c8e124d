"""activation(gate) * up of a tile of a linear layer, as soon as the tile has both.

The strips of gate and of up take turns in memory (`weights.place`), so a tile computes a pair. It
calls this kernel by its address with a record in its scratch memory of what it leaves there: the
results never reach memory that other threads read, which for many rows would be several times the
second-level cache.
"""

from __future__ import annotations

from collections.abc import Callable

from twinphase.backends.cpu.emit import F32, I16, Emit, vector
from twinphase.backends.cpu.intrinsics import (
    KERNEL_SIGNATURE,
    Kernel,
    emitted,
    fields,
    helper,
    store_i64,
)
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.elementwise import GROUP_OF_FLOATS, gated, store_group
from twinphase.backends.cpu.tiling import MATRIX_TILE_ROWS

RECORD = 6
# A matrix tile of sums: 16 outputs and 16 rows.
SUMS_BYTES = 64 * MATRIX_TILE_ROWS


@helper
def write_record(record, results, stride, first_row, rows, first_pair, pairs):
    """Note what a tile has left: rows of pairs of strips (gate, up), or the sums of one pair.

    Sums lie in the order of matrix tiles: those of gate at `results`, those of up `stride` bytes
    after them.
    """
    store_i64(record, results)
    store_i64(record + 8, stride)
    store_i64(record + 16, first_row)
    store_i64(record + 24, rows)
    store_i64(record + 32, first_pair)
    store_i64(record + 40, pairs)


def gate_tile(isa: Isa, activation: str, kind: str) -> Kernel:
    """Write a tile's part of the result, of kind "q8" or "f32", or "bf16" from sums.

    Arguments: groups of a row of the result, out, scale, fsum, isum. In place of scratch memory
    stands the address of the record.
    """
    write = _from_sums(activation) if kind == "bf16" else _from_rows(activation, kind)
    tile_of = emitted(isa, write, starred=RECORD)
    arguments = fields(5)
    record_of = fields(RECORD)

    def kernel(args, tile, record):
        tile_of(*arguments(args), *record_of(record))

    return KERNEL_SIGNATURE, kernel


def _from_rows(activation: str, kind: str) -> Callable[..., None]:
    def write(e: Emit, groups, out, scale, fsum, isum, *record):
        results, stride, first_row, rows, first_pair, pairs = record
        with e.loop(0, rows) as m, e.loop(0, pairs) as p:
            at = e.add(results, e.mul(m, stride), e.mul(p, 256))
            values = gated(e, activation, *(e.load(GROUP_OF_FLOATS, at, n) for n in (0, 128)))
            g = e.add(e.mul(e.add(first_row, m), groups), first_pair, p)
            store_group(e, kind, values, g, out, scale, fsum, isum)

    return write


def _from_sums(activation: str) -> Callable[..., None]:
    """Up to 32 rows: two blocks of [block of 16 outputs][output][row] become tiles of rows.

    A row of such a tile is a pair of outputs of 16 rows, so nothing is turned.
    """
    floats = vector(F32, 16)
    words = vector(I16, 32)
    alternating = [lane for i in range(16) for lane in (i, 16 + i)]

    def write(e: Emit, groups, out, scale, fsum, isum, *record):
        gates, to_up, first_row, rows, pair, _ = record
        blocks = e.b.sdiv(e.add(rows, MATRIX_TILE_ROWS - 1), e.i64(MATRIX_TILE_ROWS))
        first_block = e.b.sdiv(first_row, e.i64(MATRIX_TILE_ROWS))
        with e.loop(0, blocks) as block:
            g = e.add(e.mul(e.add(first_block, block), groups), pair)
            to = e.add(out, e.mul(g, 64 * MATRIX_TILE_ROWS))
            sums = e.add(gates, e.mul(block, 2 * SUMS_BYTES))
            with e.loop(0, 2 * MATRIX_TILE_ROWS, 2) as output:
                at = e.add(sums, e.mul(output, 64))
                values = [
                    gated(e, activation, *(e.load(floats, at, part, n) for part in (0, to_up)))
                    for n in (0, 64)
                ]
                both = e.b.bitcast(e.to_bf16(*values), words)
                e.store(e.shuffle(both, None, alternating), to, e.mul(output, 32), align=64)

    return write
