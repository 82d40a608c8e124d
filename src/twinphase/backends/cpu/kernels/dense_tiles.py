"""Linear layers on BF16 weights in matrix tiles (AMX): 16 rows x 16 outputs x 32 inputs.

Rows come as bfloat16 too, as such models were trained, and sums stay in float32 tiles over a panel
of inputs, waiting in the output's own memory between panels. A row of a tile is added by itself,
inputs in one order, so its bits do not depend on the rows around it: the same instruction computes
one row and a thousand.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from twinphase.backends.cpu.emit import F32, Emit, vector
from twinphase.backends.cpu.intrinsics import emitted
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.register_tile import release_tiles
from twinphase.backends.cpu.tiling import DENSE_PANEL_TILES, DENSE_TILE_INPUTS, MATRIX_TILE_ROWS

ROWS = MATRIX_TILE_ROWS
# Bytes of a strip's weights for `DENSE_TILE_INPUTS` inputs: [block of 16 outputs][pair of
# inputs][output][2]
WEIGHTS = 2048
# A single tile of rows prefetches weights this far ahead of its reads.
PREFETCH_BYTES = 8192


def _begin(e: Emit, scratch, first, second):
    """Shape the tiles: sums of `first` and of `second` rows by two blocks of outputs."""
    e.shape_tiles(
        [(rows, 64) for rows in (first, first, second, second, first, second, ROWS, ROWS)], scratch
    )


def _block(e: Emit, both: bool, w, tiles, data, data_stride, out, out_stride, is_first):
    """Add a panel's products to a strip's outputs of one block of rows, or of both."""
    sums = [
        (i, j, 2 * i + j, (e.add(out, e.mul(out_stride, ROWS * i), 64 * j), out_stride))
        for i in range(2 if both else 1)
        for j in range(2)
    ]
    for _, _, tile, place in sums:
        with e.b.if_else(e.b.icmp_signed("!=", is_first, e.i64(0))) as (then, otherwise):
            with then:
                e.matrix("tilezero", tile)
            with otherwise:
                e.matrix("tileloadd64", tile, at=place)
    with e.loop(0, tiles) as k:
        weights = e.add(w, e.mul(k, WEIGHTS))
        inputs = e.add(data, e.mul(k, 2 * DENSE_TILE_INPUTS))
        for i, j, tile, _ in sums:
            if j == 0:
                e.matrix(
                    "tileloadd64",
                    4 + i,
                    at=(e.add(inputs, e.mul(data_stride, ROWS * i)), data_stride),
                )
            if i == 0:
                e.matrix("tileloadd64", 6 + j, at=(e.add(weights, j * WEIGHTS // 2), e.i64(64)))
            e.matrix("tdpbf16ps", tile, 4 + i, 6 + j)
        if not both:
            for line in range(0, WEIGHTS, 64):
                e.prefetch(weights, PREFETCH_BYTES, line)
    for _, _, tile, place in sums:
        e.matrix("tilestored64", tile, at=place)


def _add_rows(e: Emit, rows, out, out_stride, residual, stride):
    """Add a strip's residual, or its bias."""
    ty = vector(F32, 16)
    with e.loop(0, rows) as m:
        for n in range(2):
            at = e.add(out, e.mul(m, out_stride), 64 * n)
            e.store(e.b.fadd(e.load(ty, at), e.load(ty, residual, e.mul(m, stride), 64 * n)), at)


def strips_in_dense_tiles(isa: Isa) -> Any:
    """As `linear._strips_kernel`, for bfloat16 rows; `groups` is the number of inputs."""

    def blocks(e: Emit, both, *operands):
        with e.b.if_else(e.b.icmp_signed("!=", both, e.i64(0))) as (then, otherwise):
            with then:
                _block(e, True, *operands)
            with otherwise:
                _block(e, False, *operands)

    begin = emitted(isa, _begin)
    end = emitted(isa, release_tiles)
    add = emitted(isa, _add_rows)
    add_products = emitted(isa, blocks, starred=7)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def run(operands, first_strip, end_strip, first_row, rows, scratch):
        w, groups, data, data_stride = operands[:4]
        out, out_stride, residual, residual_stride = operands[8:]
        tiles = (groups + DENSE_TILE_INPUTS - 1) // DENSE_TILE_INPUTS
        whole = rows // (2 * ROWS) * 2 * ROWS
        rest = rows - whole
        for p in range(0, tiles, DENSE_PANEL_TILES):
            count = min(DENSE_PANEL_TILES, tiles - p)
            here = data + 2 * DENSE_TILE_INPUTS * p
            if whole:
                begin(scratch, ROWS, ROWS)
                for s in range(first_strip, end_strip):
                    for m in range(first_row, first_row + whole, 2 * ROWS):
                        add_products(
                            1,
                            w + (s * tiles + p) * WEIGHTS,
                            count,
                            here + m * data_stride,
                            data_stride,
                            out + m * out_stride + 128 * s,
                            out_stride,
                            int(p == 0),
                        )
            if rest:
                m = first_row + whole
                begin(scratch, min(rest, ROWS), max(rest - ROWS, 1))
                for s in range(first_strip, end_strip):
                    add_products(
                        int(rest > ROWS),
                        w + (s * tiles + p) * WEIGHTS,
                        count,
                        here + m * data_stride,
                        data_stride,
                        out + m * out_stride + 128 * s,
                        out_stride,
                        int(p == 0),
                    )
        end()
        for s in range(first_strip, end_strip):
            add(
                rows,
                out + first_row * out_stride + 128 * s,
                out_stride,
                residual + first_row * residual_stride + 128 * s,
                residual_stride,
            )

    return run
