"""The products of attention in matrix tiles (AMX), for units of one row and of a hundred.

Scores are sums of whole numbers, those of the dot products elsewhere. Weighted values are summed in
the instruction's order: both kernels multiply one cell's 16 tokens at a time, where they lie in the
cache. A row of a tile is computed by itself, so its bits do not depend on how many are beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from twinphase.backends.cpu.emit import F32, I16, I32, I64, LOG2_E, Emit, Value, vector
from twinphase.backends.cpu.intrinsics import emitted
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.attention_fetch import (
    FETCH_STEPS,
    SCORES_STEPS,
    VALUES_STEPS,
    fetch,
)
from twinphase.backends.cpu.kernels.attention_tile import MASKED_SCORE
from twinphase.backends.cpu.kernels.register_tile import release_tiles
from twinphase.backends.cpu.kv_layout import (
    CELL_TOKENS,
    CELLS_PER_TILE,
    STATS_LANES,
    TILE_TOKENS,
)

# Tile registers: four of sums, then rows and cells of either product.
SUMS = 4
QUERIES, KEYS, WEIGHTS, VALUES = range(SUMS, SUMS + 4)


# Minimax polynomial of 2^f on [0, 1], highest power first.
EXP2_ABOVE = (7.802452e-2, 2.2606715e-1, 6.9583355e-1, 9.9992521e-1)


def _dimensions(dim: int) -> int:
    """Dimensions that a tile of keys has: equal parts of the head, of 64 at most."""
    parts = -(-dim // 64)
    while dim % (4 * parts):
        parts += 1
    return dim // parts


def begin_kernel(isa: Isa, dim: int, at: dict[str, int], rows: int) -> Any:
    """Numba-callable (scratch): shape the tiles for that many rows, where there are tiles."""
    width = _dimensions(dim)
    pairs = CELL_TOKENS // 2

    def write(e: Emit, scratch):
        factors = [(rows, width), (width // 4, 64), (rows, 2 * CELL_TOKENS), (pairs, 64)]
        if isa.matrix_tiles:
            e.shape_tiles([(rows, 64)] * SUMS + factors, e.add(scratch, at["shapes"]))

    return emitted(isa, write)


def end_kernel(isa: Isa) -> Any:
    """Numba-callable (): give the tiles back, where there are any."""
    return emitted(isa, release_tiles if isa.matrix_tiles else lambda e: None)


def scores_kernel(isa: Isa, dim: int, dtype: str, ahead: bool) -> Any:
    """As `attention_tile.scores_kernel`, but scores are left as int32 of the stored keys.

    So `softmax_kernel` scales them, and takes 128 times the sum of the query off.
    """
    width = _dimensions(dim)
    steps = SCORES_STEPS * SUMS // CELLS_PER_TILE  # of a chunk

    def write(e: Emit, queries, _sums, places, coming, out, chunks):
        with e.loop(0, chunks) as chunk:
            first = e.mul(chunk, SUMS)  # cell
            at = e.mul(first, 8)
            keys = [e.load(I64, places, at, 8 * n) for n in range(SUMS)]
            for n in range(SUMS):
                e.matrix("tilezero", n)
            for start in range(0, dim, width):
                e.matrix("tileloadd64", QUERIES, at=(e.add(queries, start), e.i64(dim)))
                for n in range(SUMS):
                    part = e.add(keys[n], start * CELL_TOKENS)
                    e.matrix("tileloadd64", KEYS, at=(part, e.i64(64)))
                    e.matrix("tdpbsud", n, QUERIES, KEYS)
            for n in range(SUMS):
                to = e.add(out, e.mul(first, 4 * CELL_TOKENS), 4 * CELL_TOKENS * n)
                e.matrix("tilestored64", n, at=(to, e.i64(4 * TILE_TOKENS)))
                if ahead and n % (SUMS // steps) == 0:
                    step = e.add(e.mul(chunk, steps), n // (SUMS // steps))
                    fetch(e, coming, step, dim, dtype)
        if ahead:
            with e.loop(e.mul(chunks, steps), SCORES_STEPS) as step:
                fetch(e, coming, step, dim, dtype)

    return emitted(isa, write)


def softmax_kernel(isa: Isa, dtype: str, softcap: float, rows: int) -> Any:
    """Numba-callable softmax of some rows, interleaved, so that none waits for its own sums.

    Arguments: as those of `attention_tile.softmax_kernel`, of the first row, with the sum of its
    query, the bytes from one maximum to the next, and the visible tokens of each row last. Without
    matrix tiles it is empty.
    """
    ints = vector(I32, CELL_TOKENS)
    floats = vector(F32, CELL_TOKENS)
    cells = range(CELLS_PER_TILE)
    each = range(rows)

    def scaled(e: Emit, scores, scale, query_sum, places) -> tuple[list[list[Value]], list[Value]]:
        """Scores of each row and cell, and what they are to be multiplied by."""
        b = e.b
        factors = [e.broadcast(e.load(F32, scale, 4 * r), CELL_TOKENS) for r in each]
        # Keys are stored + 128.
        more = [
            e.broadcast(b.shl(e.load(I32, query_sum, 4 * r), ir.Constant(I32, 7)), CELL_TOKENS)
            for r in each
        ]
        x: list[list[Value]] = [[] for _ in each]
        for c in cells:
            keys = e.load(floats, e.load(I64, places, 8 * (CELLS_PER_TILE + c)))
            for r in each:
                number = e.load(ints, scores, 4 * (TILE_TOKENS * r + CELL_TOKENS * c))
                x[r].append(b.fmul(b.sitofp(b.sub(number, more[r]), floats), keys))
        if not softcap:
            return x, factors
        slope = e.splat(floats, 2 / softcap)
        cap = e.splat(floats, softcap * LOG2_E)
        x = [
            [e.softcap(b.fmul(value, factor), slope, cap) for value in row]
            for row, factor in zip(x, factors, strict=True)
        ]
        return x, [e.splat(floats, 1.0) for _ in each]

    def finish(e: Emit, x, factors, masks, out, maximum, total, stride, places) -> None:
        b = e.b
        zero = e.splat(floats, 0.0)
        masked = ir.Constant(F32, MASKED_SCORE)
        tops = []
        for r in each:
            seen = x[r]
            if masks:
                hidden = e.splat(floats, MASKED_SCORE)
                seen = [b.select(m, value, hidden) for m, value in zip(masks[r], seen, strict=True)]
            largest = e.reduce_max(_tree(e.maximum, seen))
            # Rounding keeps order, so this is the largest of the products.
            top = b.fmul(largest, b.extract_element(factors[r], ir.Constant(I32, 0)))
            if masks:
                top = b.select(b.fcmp_ordered("==", largest, masked), masked, top)
            e.store(top, maximum, e.mul(stride, r))
            tops.append(e.broadcast(b.fsub(ir.Constant(F32, -0.0), top), CELL_TOKENS))
        for r in each:
            weights = [_exp2(e, e.fma(value, factors[r], tops[r])) for value in x[r]]
            if masks:
                weights = [b.select(m, w, zero) for m, w in zip(masks[r], weights, strict=True)]
            e.store(e.reduce_add(_tree(b.fadd, weights)), total, e.mul(stride, r))
            if dtype == "int8":
                for c in cells:
                    scales = e.load(I64, places, 8 * (CELLS_PER_TILE + c))
                    weights[c] = b.fmul(weights[c], e.load(floats, scales, 4 * CELL_TOKENS))
            for c in cells[::2]:
                place = 2 * (TILE_TOKENS * r + CELL_TOKENS * c)
                e.store(e.to_bf16(weights[c], weights[c + 1]), out, place)

    def write(e: Emit, scores, out, scale, query_sum, maximum, total, stride, places, *bounds):
        if not isa.matrix_tiles:
            return
        b = e.b
        x, factors = scaled(e, scores, scale, query_sum, places)
        ranges = list(zip(bounds[::2], bounds[1::2], strict=True))
        partly_seen = ir.Constant(ir.IntType(1), 0)
        for first, end in ranges:
            partly_seen = b.or_(partly_seen, b.icmp_signed("<", end, e.i64(TILE_TOKENS)))
            partly_seen = b.or_(partly_seen, b.icmp_signed(">", first, e.i64(0)))
        with b.if_else(partly_seen) as (partly, wholly):
            with partly:
                masks = []
                for bound in ranges:
                    start, limit = (e.broadcast(b.trunc(i, I32), CELL_TOKENS) for i in bound)
                    numbers = [
                        ir.Constant(ints, list(range(CELL_TOKENS * c, CELL_TOKENS * (c + 1))))
                        for c in cells
                    ]
                    masks.append(
                        [
                            b.and_(b.icmp_signed("<", n, limit), b.icmp_signed(">=", n, start))
                            for n in numbers
                        ]
                    )
                finish(e, x, factors, masks, out, maximum, total, stride, places)
            with wholly:
                finish(e, x, factors, [], out, maximum, total, stride, places)

    return emitted(isa, write, starred=2 * rows)


def _exp2(e: Emit, x: Value) -> Value:
    """2^x of a float32 vector of 16 in few instructions, to a relative error of 7.5e-5.

    What is above the integer below x goes to a polynomial; one instruction multiplies by 2 to the
    integer, and gives 0 far below.
    """
    every = ir.Constant(I16, -1)
    ty = x.type
    down = ir.Constant(I32, 1)
    now = ir.Constant(I32, 4)  # rounding mode and exceptions are the thread's
    zero = e.splat(ty, 0.0)
    f = e.call("llvm.x86.avx512.mask.reduce.ps.512", ty, x, down, zero, every, now)
    p = e.splat(ty, EXP2_ABOVE[0])
    for c in EXP2_ABOVE[1:]:
        p = e.fma(p, f, e.splat(ty, c))
    return e.call("llvm.x86.avx512.mask.scalef.ps.512", ty, p, x, zero, every, now)


def _tree(combine: Callable[[Value, Value], Value], values: list[Value]) -> Value:
    """Values combined two by two, so that few wait for each other."""
    while len(values) > 1:
        values = [combine(*values[i : i + 2]) for i in range(0, len(values), 2)]
    return values[0]


def weighted_values_kernel(
    isa: Isa, dim: int, rows: int, dtype: str, merge: bool, ahead: bool
) -> Any:
    """As `attention_tile.weighted_values_kernel`.

    Values are bfloat16 where they lie; `dtype` is that of the values to fetch.
    """
    floats = vector(F32, 16)
    stride_of_sums = 4 * dim
    first_step = FETCH_STEPS - VALUES_STEPS

    def write(e: Emit, weights, places, coming, cells, out, stride, stats, products):
        b = e.b
        to, to_stride = (products, e.i64(stride_of_sums)) if merge else (out, stride)
        for first in range(0, dim, 16 * SUMS):
            columns = range(min(SUMS, (dim - first) // 16))
            for n in columns:
                e.matrix("tilezero", n)
            with e.loop(0, cells) as cell:
                at = e.mul(cell, 8)
                values = e.load(I64, places, at, 16 * CELLS_PER_TILE)
                here = e.add(weights, e.mul(cell, 2 * CELL_TOKENS))
                e.matrix("tileloadd64", WEIGHTS, at=(here, e.i64(2 * TILE_TOKENS)))
                for n in columns:
                    column = e.add(values, 4 * (first + 16 * n))
                    e.matrix("tileloadd64", VALUES, at=(column, e.i64(4 * dim)))
                    e.matrix("tdpbf16ps", n, WEIGHTS, VALUES)
                if ahead and first == 0:
                    fetch(e, coming, e.add(cell, first_step), dim, dtype)
            if ahead and first == 0:
                with e.loop(e.add(cells, first_step), FETCH_STEPS) as step:
                    fetch(e, coming, step, dim, dtype)
            for n in columns:
                place = e.add(to, 4 * (first + 16 * n))
                e.matrix("tilestored64", n, at=(place, to_stride))
        if not merge:
            return
        with e.loop(0, rows) as r:
            alpha, beta = (
                e.broadcast(e.load(F32, stats, e.mul(r, 4), 4 * STATS_LANES * k), 16)
                for k in (2, 3)
            )
            for i in range(0, dim, 16):
                total = (e.mul(stride, r), 4 * i)
                product = e.load(floats, products, e.mul(r, stride_of_sums), 4 * i)
                value = e.fma(e.load(floats, out, *total), alpha, b.fmul(product, beta))
                e.store(value, out, *total)

    return emitted(isa, write)
