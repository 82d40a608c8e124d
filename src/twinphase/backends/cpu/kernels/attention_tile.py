"""What attention does with one KV tile: the micro-kernels that prefill and decode share.

For each KV tile of 128 tokens at absolute positions: int8 keys are multiplied with int8 queries in
exact integers; the softmax of the tile alone gives maximum, sum and weighted values; tiles are
merged in order with the online softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al.,
2022). Weights and values are multiplied in bfloat16 where the processor can, in float32 elsewhere.
Since the arithmetic of a row is that of its tiles, prefill (many rows share a tile) and decode (the
tiles of one row are spread over threads and merged afterwards) give the same bits.
With matrix tiles, scores, softmax and weighted values are those of `attention_matrix.py`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from twinphase.backends.cpu.emit import (
    EXP2_DEGREE_3,
    EXP2_DEGREE_5,
    F16,
    F32,
    I8,
    I32,
    I64,
    LOG2_E,
    Emit,
    Value,
    vector,
)
from twinphase.backends.cpu.intrinsics import (
    emitted,
    helper,
    load_f32,
    load_i64,
    load_u32,
    store_f32,
    store_i32,
    store_i64,
)
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.attention_fetch import (
    FETCH_STEPS,
    SCORES_STEPS,
    VALUES_STEPS,
    fetch,
)
from twinphase.backends.cpu.kv_layout import (
    CELL_TOKENS,
    CELLS_PER_TILE,
    CHUNK_CELLS,
    STATS_LANES,
    TILE_TOKENS,
    key_bytes,
    scale_bytes,
    value_bytes,
)

# Finite, so that a wholly masked tile merges with weight 0 instead of NaN.
MASKED_SCORE = -1e30


def _bf16_pairs(e: Emit, address: Value, *offsets: int | Value) -> Value:
    """int8 values at an address as bfloat16, exactly: pairs of tokens, in int32 lanes."""
    count = e.isa.lanes
    floats = []
    for half in (0, count):
        small = e.load(vector(I8, count), address, *offsets, half)
        floats.append(e.b.sitofp(e.b.sext(small, vector(I32, count)), vector(F32, count)))
    return e.to_bf16(*floats)


def _widen_values(isa: Isa, dim: int, dtype: str) -> Any:
    """Numba-callable (cell's values, out): values as they are multiplied.

    That is pairs of bfloat16 where the processor multiplies them, rows of float32 elsewhere.
    """
    lanes = isa.lanes

    def write(e: Emit, values, out):
        for i in range(0, CELL_TOKENS * dim, 2 * lanes):
            if isa.bf16_dot:
                e.store(_bf16_pairs(e, values, i), out, 2 * i)
                continue
            if dtype == "int8":
                small = e.load(vector(I8, 2 * lanes), values, i)
                pairs = e.b.sitofp(e.b.sext(small, vector(I32, 2 * lanes)), vector(F32, 2 * lanes))
            else:
                pairs = e.widen(e.load(vector(F16, 2 * lanes), values, 2 * i))
            pair = i // (2 * dim)
            column = i % (2 * dim) // 2
            for side in (0, 1):
                row = e.shuffle(pairs, None, range(side, 2 * lanes, 2))
                e.store(row, out, 4 * ((2 * pair + side) * dim + column))

    return emitted(isa, write)


def scores_kernel(isa: Isa, dim: int, dtype: str, rows: int, ahead: bool = False) -> Any:
    """Numba-callable (queries, sums, places, next places, out, chunks): out[r, t] = (q .

    k) * key scale.

    The register tile is `rows` queries x 4 vectors of tokens; `chunks` of them are computed. Places
    are the addresses of the tile's cells: keys, then scales, then values (`find_cells_kernel`).
    With `ahead` the first steps of the tile at the next places are asked for meanwhile.
    """
    lanes = isa.lanes
    columns = 4
    ints = vector(I32, lanes)
    floats = vector(F32, lanes)
    quads = dim // 4  # of a chunk
    quads_per_step = TILE_TOKENS // (lanes * columns) * quads // SCORES_STEPS

    def write(e: Emit, queries, sums, places, coming, out, chunks):
        b = e.b
        signed = e.dot_is_signed(8)
        with e.loop(0, chunks) as chunk:
            first = e.mul(chunk, lanes * columns)  # token
            keys = []
            scales = []
            for c in range(columns):
                token = e.add(first, c * lanes)
                place = e.mul(b.ashr(token, e.i64(4)), 8)
                part = e.mul(b.and_(token, e.i64(15)), 4)
                keys.append(e.add(e.load(I64, places, place), part))
                scales.append(e.load(floats, e.load(I64, places, place, 8 * CELLS_PER_TILE), part))
            totals = []
            for r in range(rows):
                start: Value = e.splat(ints, 0)
                if not signed:
                    start = e.broadcast(
                        b.mul(e.load(I32, sums, 4 * r), ir.Constant(I32, -128)), lanes
                    )
                totals.append([e.variable(start) for _ in range(columns)])
            with e.loop(0, quads) as quad:
                vectors = [e.load(ints, key, e.mul(quad, 4 * CELL_TOKENS)) for key in keys]
                if ahead:
                    count = e.add(e.mul(chunk, quads), quad)
                    due = b.icmp_signed("==", b.srem(count, e.i64(quads_per_step)), e.i64(0))
                    with b.if_then(due):
                        fetch(e, coming, b.sdiv(count, e.i64(quads_per_step)), dim, dtype)
                for r in range(rows):
                    query = e.broadcast(e.load(I32, queries, r * dim, e.mul(quad, 4)), lanes)
                    for c in range(columns):
                        totals[r][c].set(
                            e.dot(totals[r][c].get(), vectors[c], query, signed=signed)
                        )
            for c in range(columns):
                at = e.mul(e.add(first, c * lanes), 4)
                for r in range(rows):
                    e.store(
                        b.fmul(b.sitofp(totals[r][c].get(), floats), scales[c]),
                        out,
                        4 * TILE_TOKENS * r,
                        at,
                    )
        if ahead:
            # A tile that is partly filled asks for no less.
            count = e.add(e.mul(chunks, quads), quads_per_step - 1)
            with e.loop(b.sdiv(count, e.i64(quads_per_step)), SCORES_STEPS) as step:
                fetch(e, coming, step, dim, dtype)

    return emitted(isa, write)


def softmax_kernel(isa: Isa, dtype: str, softcap: float) -> Any:
    """Numba-callable softmax of one row.

    Arguments: scores, weights out, query scale, first visible token, their end, maximum, sum,
    places.

    All but the range of visible tokens are addresses. Scores, in powers of 2, are capped by
    `softcap` unless it is 0. The scales of int8 values, found by the places, are multiplied into
    the weights once these are summed, so that values are multiplied as the integers they are stored
    as.
    """
    lanes = isa.lanes
    ints = vector(I32, lanes)
    floats = vector(F32, lanes)
    count = TILE_TOKENS // lanes

    def row(
        e: Emit,
        x: list[Value],
        masks: list[Value],
        out,
        maximum,
        total,
        places,
    ):
        b = e.b
        zero = e.splat(floats, 0.0)
        # The tile's own maximum: a tile is computed alike after any other tile.
        largest = x[0]
        for value in x[1:]:
            largest = e.maximum(largest, value)
        top = e.reduce_max(largest)
        e.store(top, maximum)
        top = e.broadcast(top, lanes)
        # bfloat16 keeps 8 bits of a weight, so the short polynomial costs nothing; float32 gets the
        # long one.
        powers = EXP2_DEGREE_3 if isa.bf16_dot else EXP2_DEGREE_5
        weights = [e.exp2(b.fsub(value, top), powers) for value in x]
        if masks:
            weights = [b.select(seen, w, zero) for seen, w in zip(masks, weights, strict=True)]
        summed = weights[0]
        for value in weights[1:]:
            summed = b.fadd(summed, value)
        e.store(e.reduce_add(summed), total)
        if dtype == "int8":
            for i in range(count):
                cell = i * lanes // CELL_TOKENS
                lane = i * lanes % CELL_TOKENS
                scales = e.load(I64, places, 8 * (CELLS_PER_TILE + cell))
                weights[i] = b.fmul(weights[i], e.load(floats, scales, 4 * (CELL_TOKENS + lane)))
        if isa.bf16_dot:
            for i in range(0, count, 2):
                e.store(e.to_bf16(weights[i], weights[i + 1]), out, 2 * i * lanes)
        else:
            for i, value in enumerate(weights):
                e.store(value, out, 4 * i * lanes)

    def write(e: Emit, scores, out, scale, first, end, maximum, total, places):
        b = e.b
        factor = e.broadcast(e.load(F32, scale), lanes)
        x = [b.fmul(e.load(floats, scores, 4 * i * lanes), factor) for i in range(count)]
        if softcap:
            slope = e.splat(floats, 2 / softcap)
            cap = e.splat(floats, softcap * LOG2_E)
            x = [e.softcap(value, slope, cap) for value in x]
        masked = b.or_(
            b.icmp_signed("<", end, e.i64(TILE_TOKENS)), b.icmp_signed(">", first, e.i64(0))
        )
        with b.if_else(masked) as (partly, wholly):
            with partly:
                start, limit = (e.broadcast(b.trunc(bound, I32), lanes) for bound in (first, end))
                numbers = [
                    ir.Constant(ints, list(range(i * lanes, (i + 1) * lanes))) for i in range(count)
                ]
                masks = [
                    b.and_(b.icmp_signed("<", number, limit), b.icmp_signed(">=", number, start))
                    for number in numbers
                ]
                seen = [
                    b.select(mask, value, e.splat(floats, MASKED_SCORE))
                    for mask, value in zip(masks, x, strict=True)
                ]
                row(e, seen, masks, out, maximum, total, places)
            with wholly:
                row(e, x, [], out, maximum, total, places)

    return emitted(isa, write)


def weighted_values_kernel(
    isa: Isa,
    dim: int,
    rows: int,
    dtype: str,
    merge: bool,
    *,
    ahead: bool = False,
    convert: bool = False,
) -> Any:
    """Numba-callable sum over tokens of weight * value.

    Arguments: weights, places, next places, cells, out, out stride, stats, a place for the sums of
    matrix tiles.

    With `merge` the sums are folded into out (out * alpha + sum * beta, from `stats`), else stored.
    With `ahead` the last steps of the tile at the next places are asked for meanwhile. With
    `convert` values are int8 where they lie.
    """
    lanes = isa.lanes
    floats = vector(F32, lanes)
    ints = vector(I32, lanes)
    columns = min(4, dim // lanes)
    tokens = 2 if isa.bf16_dot else 1  # of one step
    steps = CELL_TOKENS // tokens
    value_size = 1 if convert else 2 if isa.bf16_dot else 4  # bytes
    value_row = tokens * value_size * dim

    def write(e: Emit, weights, places, coming, cells, out, stride, stats, _products):
        b = e.b
        for first in range(0, dim, columns * lanes):
            here = range(min(columns, (dim - first) // lanes))
            totals = [[e.variable(e.splat(floats, 0.0)) for _ in here] for _ in range(rows)]
            with e.loop(0, cells) as cell:
                start = tokens * value_size * first
                values = e.add(e.load(I64, places, e.mul(cell, 8), 16 * CELLS_PER_TILE), start)
                weight_at = e.add(weights, e.mul(cell, 4 * steps))
                if ahead and first == 0:
                    fetch(e, coming, e.add(cell, FETCH_STEPS - VALUES_STEPS), dim, dtype)
                with e.loop(0, steps) as step:
                    if convert:
                        row = [
                            _bf16_pairs(e, values, e.mul(step, value_row), 2 * c * lanes)
                            for c in here
                        ]
                    else:
                        row = [
                            e.load(ints, values, e.mul(step, value_row), 4 * c * lanes)
                            for c in here
                        ]
                    for r in range(rows):
                        place = (r * TILE_TOKENS * 4 // tokens, e.mul(step, 4))
                        weight = e.broadcast(e.load(I32, weight_at, *place), lanes)
                        for c in here:
                            total = totals[r][c]
                            if isa.bf16_dot:
                                total.set(e.dot_bf16(total.get(), weight, row[c]))
                            else:
                                total.set(
                                    e.fma(
                                        b.bitcast(weight, floats),
                                        b.bitcast(row[c], floats),
                                        total.get(),
                                    )
                                )
            if ahead and first == 0:
                with e.loop(e.add(cells, FETCH_STEPS - VALUES_STEPS), FETCH_STEPS) as step:
                    fetch(e, coming, step, dim, dtype)
            for r in range(rows):
                for c in here:
                    at = (e.mul(stride, r), 4 * (first + c * lanes))
                    value = totals[r][c].get()
                    if merge:
                        alpha, beta = (
                            e.broadcast(e.load(F32, stats, 4 * (STATS_LANES * k + r)), lanes)
                            for k in (2, 3)
                        )
                        value = e.fma(e.load(floats, out, *at), alpha, b.fmul(value, beta))
                    e.store(value, out, *at)

    return emitted(isa, write)


def merge_stats_kernel(isa: Isa) -> Any:
    """Numba-callable (maxima, sums, stats): fold a tile's into the rows', leave alpha and beta."""
    ty = vector(F32, STATS_LANES)

    def write(e: Emit, maxima, sums, stats):
        old = e.load(ty, maxima)
        tile = e.load(ty, stats)
        new = e.maximum(old, tile)
        alpha = e.exp2(e.b.fsub(old, new))
        beta = e.exp2(e.b.fsub(tile, new))
        e.store(new, maxima)
        e.store(
            e.fma(e.load(ty, sums), alpha, e.b.fmul(e.load(ty, stats, 4 * STATS_LANES), beta)), sums
        )
        e.store(alpha, stats, 8 * STATS_LANES)
        e.store(beta, stats, 12 * STATS_LANES)

    return emitted(isa, write)


def scale_add_kernel(isa: Isa, dim: int) -> Any:
    """Numba-callable (out, tile, addresses of alpha and beta): out * alpha + tile * beta."""
    floats = vector(F32, 16)

    def write(e: Emit, out, tile, alpha, beta):
        a, c = (e.broadcast(e.load(F32, address), 16) for address in (alpha, beta))
        for i in range(0, dim, 16):
            value = e.fma(e.load(floats, out, 4 * i), a, e.b.fmul(e.load(floats, tile, 4 * i), c))
            e.store(value, out, 4 * i)

    return emitted(isa, write)


def divide_kernel(isa: Isa, dim: int, sinks: bool) -> Any:
    """Numba-callable (out, source, addresses of sum, maximum and sink): out = source / sum.

    A sink is a score (a natural logarithm, not a power of 2) that takes its share of the sum and
    has no value.
    """
    floats = vector(F32, 16)

    def write(e: Emit, out, source, total, maximum, sink):
        b = e.b
        divisor = e.broadcast(e.load(F32, total), 16)
        alpha = None
        if sinks:
            score = b.fmul(e.broadcast(e.load(F32, sink), 16), e.splat(floats, LOG2_E))
            old = e.broadcast(e.load(F32, maximum), 16)
            top = e.maximum(old, score)
            alpha = e.exp2(b.fsub(old, top))
            divisor = e.fma(divisor, alpha, e.exp2(b.fsub(score, top)))
        for i in range(0, dim, 16):
            value = e.load(floats, source, 4 * i)
            e.store(b.fdiv(value if alpha is None else b.fmul(value, alpha), divisor), out, 4 * i)

    return emitted(isa, write)


def find_cells_kernel(dim: int, dtype: str) -> Any:
    """Numba function that writes the places of KV tile t's first `cells` cells.

    Places are int64 [3][CELLS_PER_TILE]: of keys, scales and values.
    """
    size = key_bytes(dim)
    scale_size = scale_bytes(dtype)
    value_size = value_bytes(dim, dtype)

    @helper
    def find(t, cells, table, cells_per_block, per_chunk, kv_head, keys, scales, values, places):
        block = t * CELLS_PER_TILE // cells_per_block
        offset = t * CELLS_PER_TILE - block * cells_per_block
        for c in range(cells):
            where = load_u32(table + 4 * block) * cells_per_block + offset
            index = where // CHUNK_CELLS * per_chunk + kv_head * CHUNK_CELLS + where % CHUNK_CELLS
            place = places + 8 * c
            store_i64(place, keys + index * size)
            store_i64(place + 8 * CELLS_PER_TILE, scales + index * scale_size)
            store_i64(place + 16 * CELLS_PER_TILE, values + index * value_size)
            offset += 1
            if offset == cells_per_block:
                block = block + 1
                offset = 0
        for c in range(cells, CELLS_PER_TILE):
            # A chunk of scores may reach past the last cell: any readable place will do, the result
            # is masked.
            store_i64(places + 8 * c, load_i64(places))
            store_i64(places + 8 * (CELLS_PER_TILE + c), load_i64(places + 8 * CELLS_PER_TILE))
            store_i64(places + 8 * (2 * CELLS_PER_TILE + c), load_i64(places + 16 * CELLS_PER_TILE))

    return find


def widen_kernel(isa: Isa, dim: int, dtype: str, at: dict[str, int]) -> Any:
    """Numba function (cells, places, scratch): widen the values of a KV tile's first cells."""
    widen = _widen_values(isa, dim, dtype)
    widened_bytes = (2 if isa.bf16_dot else 4) * CELL_TOKENS * dim
    at_values = at["values"]

    @helper
    def widen_tile(cells, places, scratch):
        to = scratch + at_values
        for c in range(cells):
            place = places + 8 * (2 * CELLS_PER_TILE + c)
            widen(load_i64(place), to + c * widened_bytes)
            store_i64(place, to + c * widened_bytes)

    return widen_tile


def clear_kernel(isa: Isa, dim: int) -> Any:
    """Numba-callable (out, rows): zero rows of `dim` float32, which a loop of Numba's scatters."""
    floats = vector(F32, 16)

    def write(e: Emit, out, rows):
        with e.loop(0, rows) as row:
            for i in range(0, dim, 16):
                e.store(e.splat(floats, 0.0), out, e.mul(row, 4 * dim), 4 * i)

    return emitted(isa, write)


def copy_query_kernel(dim: int, at: dict[str, int]) -> Any:
    """Numba function that copies one int8 query head with its scale and sum to row r of scratch."""
    at_queries = at["queries"]
    at_scales = at["query_scales"]
    at_sums = at["query_sums"]

    @helper
    def copy(r, head, queries, query_scales, query_sums, scratch):
        for i in range(0, dim, 8):
            store_i64(scratch + at_queries + r * dim + i, load_i64(queries + head * dim + i))
        store_f32(scratch + at_scales + 4 * r, load_f32(query_scales + 4 * head))
        store_i32(scratch + at_sums + 4 * r, load_u32(query_sums + 4 * head))

    return copy
