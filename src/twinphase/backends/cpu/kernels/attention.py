"""Attention over the paged cache, both phases, from one set of micro-kernels.

For each KV tile of 128 tokens at absolute positions: keys become int8 (one scale a token) and are multiplied with
int8 queries in exact integers; the softmax of the tile alone gives maximum, sum and weighted values; tiles are merged
in order with the online softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022). Weights and values
are multiplied in bfloat16 where the processor can, in float32 elsewhere. Since the arithmetic of a row is that of its
tiles, prefill (many rows share a converted tile) and decode (the tiles of one row are spread over threads and merged
afterwards) give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit

from twinphase.backends.cpu.intrinsics import (
    F16,
    F32,
    I8,
    I32,
    KERNEL_SIGNATURE,
    Emit,
    Value,
    emitted,
    load_f32,
    load_i64,
    load_u32,
    store_f32,
    store_i32,
    store_i64,
    vector,
)
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.quantize import MAGIC
from twinphase.backends.cpu.kv_layout import CELL, TILE, decode_rows, key_bytes, padded_group, scratch_areas

__all__ = ["attention_decode", "attention_merge", "attention_prefill"]

MASKED = -1e30  # finite, so that a wholly masked tile merges with weight 0 instead of NaN
AHEAD = 8  # cells of KV asked for in advance
STATS = 8  # lanes of the vectors that hold a row block's maxima and sums


def _convert_keys(isa: Isa, dim: int) -> Any:
    """Numba-callable (cell's keys, cell's scales, bytes out, scales out): float16 to uint8, stored + 128."""

    def write(e: Emit, keys: Value, scales: Value, out: Value, scales_out: Value) -> None:
        b, wide = e.b, vector(F32, 4 * CELL)
        scale = e.load(vector(F32, CELL), scales)
        e.store(scale, scales_out)
        inverse = b.fdiv(e.splat(scale.type, 1.0), scale)
        each = e.shuffle(inverse, None, [token for token in range(CELL) for _ in range(4)])
        for quad in range(dim // 4):
            key = e.widen(e.load(vector(F16, 4 * CELL), keys, quad * 8 * CELL))
            # The low byte of the shifted float is the rounded number in two's complement.
            bits = b.bitcast(e.fma(key, each, e.splat(wide, MAGIC)), vector(I32, 4 * CELL))
            number = b.trunc(bits, vector(I8, 4 * CELL))
            e.store(b.xor(number, e.splat(number.type, -128)), out, quad * 4 * CELL)

    return emitted(isa, 4, write)


def _convert_values(isa: Isa, dim: int) -> Any:
    """Numba-callable (cell's values, out): float16 pairs to bfloat16 pairs, or to float32 rows."""
    lanes = isa.lanes

    def write(e: Emit, values: Value, out: Value) -> None:
        for i in range(0, CELL // 2 * dim * 2, 2 * lanes):
            pairs = e.widen(e.load(vector(F16, 2 * lanes), values, 2 * i))
            if isa.bf16_dot:
                low, high = (e.shuffle(pairs, None, range(n, n + lanes)) for n in (0, lanes))
                e.store(e.to_bf16(low, high), out, 2 * i)
                continue
            pair, column = i // (2 * dim), i % (2 * dim) // 2
            for side in (0, 1):
                row = e.shuffle(pairs, None, range(side, 2 * lanes, 2))
                e.store(row, out, 4 * ((2 * pair + side) * dim + column))

    return emitted(isa, 2, write)


def _scores(isa: Isa, dim: int, rows: int) -> Any:
    """Numba-callable (queries, sums, keys, key scales, out, key vectors): out[r, t] = (q . k) * key scale.

    The register tile is `rows` queries x 64 tokens; `chunks` of 64 tokens are computed.
    """
    lanes, columns = isa.lanes, 4
    ints, floats = vector(I32, lanes), vector(F32, lanes)

    def write(e: Emit, queries: Value, sums: Value, keys: Value, scales: Value, out: Value, chunks: Value) -> None:
        b, signed = e.b, e.dot_is_signed(8)
        with e.loop(0, chunks) as chunk:
            first = e.mul(chunk, lanes * columns)  # token
            totals = []
            for r in range(rows):
                start: Value = e.splat(ints, 0)
                if not signed:
                    start = e.broadcast(b.mul(e.load(I32, sums, 4 * r), ir.Constant(I32, -128)), lanes)
                totals.append([e.variable(start) for _ in range(columns)])
            with e.loop(0, dim // 4) as quad:
                vectors = []
                for c in range(columns):
                    token = e.add(first, c * lanes)
                    cell, part = b.ashr(token, e.i64(4)), b.and_(token, e.i64(15))
                    vectors.append(e.load(ints, keys, e.mul(cell, CELL * dim), e.mul(quad, 4 * CELL), e.mul(part, 4)))
                for r in range(rows):
                    query = e.broadcast(e.load(I32, queries, r * dim, e.mul(quad, 4)), lanes)
                    for c in range(columns):
                        totals[r][c].set(e.dot(totals[r][c].get(), vectors[c], query, signed=signed))
            for c in range(columns):
                at = e.mul(e.add(first, c * lanes), 4)
                scale = e.load(floats, scales, at)
                for r in range(rows):
                    e.store(b.fmul(b.sitofp(totals[r][c].get(), floats), scale), out, 4 * TILE * r, at)

    return emitted(isa, 6, write)


def _softmax(isa: Isa) -> Any:
    """Numba-callable (scores, weights out, query scale's address, visible tokens, maximum out, sum out): one row."""
    lanes = isa.lanes
    ints, floats = vector(I32, lanes), vector(F32, lanes)
    count = TILE // lanes

    def write(e: Emit, scores: Value, out: Value, scale: Value, visible: Value, maximum: Value, total: Value) -> None:
        b = e.b
        factor = e.broadcast(e.load(F32, scale), lanes)
        limit = e.broadcast(b.trunc(visible, I32), lanes)
        numbers = ir.Constant(ints, list(range(lanes)))
        masked = e.splat(floats, MASKED)
        x = []
        for i in range(count):
            seen = b.icmp_signed("<", b.add(numbers, e.splat(ints, i * lanes)), limit)
            x.append(b.select(seen, b.fmul(e.load(floats, scores, 4 * i * lanes), factor), masked))
        largest = x[0]
        for value in x[1:]:
            largest = e.maximum(largest, value)
        top = e.reduce_max(largest)
        e.store(top, maximum)
        top = e.broadcast(top, lanes)
        weights = [e.exp2(b.fsub(value, top)) for value in x]
        # A masked token's weight is exactly 0 (exp2 alone would leave 2^-126).
        zero = e.splat(floats, 0.0)
        weights = [b.select(b.fcmp_ordered("==", value, masked), zero, w) for value, w in zip(x, weights, strict=True)]
        summed = weights[0]
        for value in weights[1:]:
            summed = b.fadd(summed, value)
        e.store(e.reduce_add(summed), total)
        if isa.bf16_dot:
            for i in range(0, count, 2):
                e.store(e.to_bf16(weights[i], weights[i + 1]), out, 2 * i * lanes)
        else:
            for i, value in enumerate(weights):
                e.store(value, out, 4 * i * lanes)

    return emitted(isa, 6, write)


def _weighted_values(isa: Isa, dim: int, rows: int, merge: bool) -> Any:
    """Numba-callable (weights, values, tokens, out, out stride, stats): sum over tokens of weight * value.

    With `merge` the sums are folded into out (out * alpha + sum * beta, from `stats`), else stored.
    """
    lanes = isa.lanes
    floats, ints = vector(F32, lanes), vector(I32, lanes)
    columns = min(4, dim // lanes)
    per_step = 2 if isa.bf16_dot else 1  # tokens
    value_row = 4 * dim  # bytes: a pair of bfloat16 rows, or a float32 row

    def write(e: Emit, weights: Value, values: Value, tokens: Value, out: Value, stride: Value, stats: Value) -> None:
        b = e.b
        steps = b.sdiv(e.add(tokens, per_step - 1), e.i64(per_step))
        for first in range(0, dim, columns * lanes):
            here = range(min(columns, (dim - first) // lanes))
            totals = [[e.variable(e.splat(floats, 0.0)) for _ in here] for _ in range(rows)]
            with e.loop(0, steps) as step:
                row = [e.load(ints, values, e.mul(step, value_row), 4 * (first + c * lanes)) for c in here]
                for r in range(rows):
                    place = (r * TILE * 4 // per_step, e.mul(step, 4))
                    weight = e.broadcast(e.load(I32, weights, *place), lanes)
                    for c in here:
                        total = totals[r][c]
                        if isa.bf16_dot:
                            total.set(e.dot_bf16(total.get(), weight, row[c]))
                        else:
                            total.set(e.fma(b.bitcast(weight, floats), b.bitcast(row[c], floats), total.get()))
            for r in range(rows):
                for c in here:
                    at = (e.mul(stride, r), 4 * (first + c * lanes))
                    value = totals[r][c].get()
                    if merge:
                        alpha, beta = (e.broadcast(e.load(F32, stats, 4 * (STATS * k + r)), lanes) for k in (2, 3))
                        value = e.fma(e.load(floats, out, *at), alpha, b.fmul(value, beta))
                    e.store(value, out, *at)

    return emitted(isa, 6, write)


def _merge_stats(isa: Isa) -> Any:
    """Numba-callable (maxima, sums, stats): fold a tile's maxima and sums into the rows', leave alpha and beta."""
    ty = vector(F32, STATS)

    def write(e: Emit, maxima: Value, sums: Value, stats: Value) -> None:
        old, tile = e.load(ty, maxima), e.load(ty, stats)
        new = e.maximum(old, tile)
        alpha, beta = e.exp2(e.b.fsub(old, new)), e.exp2(e.b.fsub(tile, new))
        e.store(new, maxima)
        e.store(e.fma(e.load(ty, sums), alpha, e.b.fmul(e.load(ty, stats, 4 * STATS), beta)), sums)
        e.store(alpha, stats, 8 * STATS)
        e.store(beta, stats, 12 * STATS)

    return emitted(isa, 3, write)


def _scale_add(isa: Isa, dim: int) -> Any:
    """Numba-callable (out, tile, alpha and beta's addresses): out = out * alpha + tile * beta, as the merge above."""
    floats = vector(F32, 16)

    def write(e: Emit, out: Value, tile: Value, alpha: Value, beta: Value) -> None:
        a, c = (e.broadcast(e.load(F32, address), 16) for address in (alpha, beta))
        for i in range(0, dim, 16):
            value = e.fma(e.load(floats, out, 4 * i), a, e.b.fmul(e.load(floats, tile, 4 * i), c))
            e.store(value, out, 4 * i)

    return emitted(isa, 4, write)


def _divide(isa: Isa, dim: int) -> Any:
    """Numba-callable (out, source, sum's address): out = source / sum."""
    floats = vector(F32, 16)

    def write(e: Emit, out: Value, source: Value, total: Value) -> None:
        divisor = e.broadcast(e.load(F32, total), 16)
        for i in range(0, dim, 16):
            e.store(e.b.fdiv(e.load(floats, source, 4 * i), divisor), out, 4 * i)

    return emitted(isa, 3, write)


def _load_tile(isa: Isa, dim: int, at: dict[str, int]) -> Any:
    """Numba function that converts the first `tokens` tokens of KV tile t into scratch."""
    convert_keys, convert_values = _convert_keys(isa, dim), _convert_values(isa, dim)
    at_keys, at_scales, at_values = at["keys"], at["key_scales"], at["values"]
    cell_bytes, value_cell = key_bytes(dim), (2 if isa.bf16_dot else 4) * CELL * dim
    prefetch = emitted(isa, 2, lambda e, address, line: e.prefetch(address, e.mul(line, 64)))

    @njit  # type: ignore[untyped-decorator]
    def place_of(cell: int, table: int, cells_per_block: int, first: int) -> int:
        block = load_u32(table + 4 * (cell // cells_per_block))
        return first + block * cells_per_block + cell % cells_per_block

    @njit  # type: ignore[untyped-decorator]
    def load(t: int, tokens: int, table: int, cells_per_block: int, cells: int, kv_head: int, keys: int,
             scales: int, values: int, scratch: int) -> None:  # fmt: skip
        # The table is padded with block 0, so looking ahead is safe and at worst useless.
        first = kv_head * cells
        for c in range((tokens + CELL - 1) // CELL):
            cell = t * (TILE // CELL) + c
            ahead = place_of(cell + AHEAD, table, cells_per_block, first)
            for line in range(cell_bytes // 64):
                prefetch(keys + ahead * cell_bytes, line)
                prefetch(values + ahead * cell_bytes, line)
            place = place_of(cell, table, cells_per_block, first)
            convert_keys(keys + place * cell_bytes, scales + place * 4 * CELL, scratch + at_keys + c * CELL * dim,
                         scratch + at_scales + 4 * CELL * c)  # fmt: skip
            convert_values(values + place * cell_bytes, scratch + at_values + c * value_cell)

    return load


def _copy_query(dim: int, at: dict[str, int]) -> Any:
    """Numba function that copies one int8 query head with its scale and sum to row r of scratch."""
    at_queries, at_scales, at_sums = at["queries"], at["query_scales"], at["query_sums"]

    @njit  # type: ignore[untyped-decorator]
    def copy(r: int, head: int, queries: int, query_scales: int, query_sums: int, scratch: int) -> None:
        for i in range(0, dim, 8):
            store_i64(scratch + at_queries + r * dim + i, load_i64(queries + head * dim + i))
        store_f32(scratch + at_scales + 4 * r, load_f32(query_scales + 4 * head))
        store_i32(scratch + at_sums + 4 * r, load_u32(query_sums + 4 * head))

    return copy


def attention_prefill(isa: Isa, head_dim: str, group_size: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """One unit a tile: up to `query_tile_tokens` prompt tokens of one sequence and KV head.

    Arguments: units, int8 queries, their scales, their sums, keys, key scales and values of the layer, KV heads,
    block tables (int32), their stride, cells a block, cells in all, out. A unit is int32 [8]: sequence, KV head, first row, tokens,
    position of the first token.
    """
    dim, group, rows = int(head_dim), int(group_size), isa.attention_rows
    at = scratch_areas(dim, group)
    load_tile, copy_query = _load_tile(isa, dim, at), _copy_query(dim, at)
    scores, softmax = _scores(isa, dim, rows), _softmax(isa)
    weighted_values, merge_stats, divide = _weighted_values(isa, dim, rows, True), _merge_stats(isa), _divide(isa, dim)
    at_keys, at_key_scales, at_values, at_scores = at["keys"], at["key_scales"], at["values"], at["scores"]
    at_weights, at_stats, at_queries = at["weights"], at["tile_stats"], at["queries"]
    at_query_scales, at_query_sums = at["query_scales"], at["query_sums"]
    at_maxima, at_sums, at_out = at["maxima"], at["sums"], at["out"]
    weight_row, chunk = (2 if isa.bf16_dot else 4) * TILE, 4 * isa.lanes

    @njit  # type: ignore[untyped-decorator]
    def row_block(r: int, seen: int, group: int, tokens: int, scratch: int) -> None:
        # Rows r.. of the unit against the converted tile; token i of the unit sees `seen` + i of its tokens.
        most = min(TILE, seen + min(tokens - 1, (r + rows - 1) // group))
        if most <= 0:
            return
        scores(scratch + at_queries + r * dim, scratch + at_query_sums + 4 * r, scratch + at_keys,
               scratch + at_key_scales, scratch + at_scores, (most + chunk - 1) // chunk)  # fmt: skip
        for i in range(rows):
            visible = max(0, min(TILE, seen + (r + i) // group))
            stats = scratch + at_stats + 4 * i
            softmax(scratch + at_scores + 4 * TILE * i, scratch + at_weights + weight_row * i,
                    scratch + at_query_scales + 4 * (r + i), visible, stats, stats + 4 * STATS)  # fmt: skip
        block = 4 * STATS * (r // rows)
        merge_stats(scratch + at_maxima + block, scratch + at_sums + block, scratch + at_stats)
        weighted_values(scratch + at_weights, scratch + at_values, most, scratch + at_out + 4 * dim * r, 4 * dim,
                        scratch + at_stats)  # fmt: skip

    def kernel(args: int, tile: int, scratch: int) -> None:
        unit = load_i64(args) + 32 * tile
        sequence, kv_head, first_row, tokens, position = (
            load_u32(unit), load_u32(unit + 4), load_u32(unit + 8), load_u32(unit + 12), load_u32(unit + 16))  # fmt: skip
        queries, query_scales, query_sums = load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
        keys, key_scales, values = load_i64(args + 32), load_i64(args + 40), load_i64(args + 48)
        kv_heads, cells_per_block, cells, out = load_i64(args + 56), load_i64(args + 80), load_i64(args + 88), load_i64(args + 96)
        table = load_i64(args + 64) + sequence * load_i64(args + 72)
        count = tokens * group
        for r in range((count + rows - 1) // rows * rows):
            # Rows past the end repeat the last one; nothing reads their result.
            token, h = min(r, count - 1) // group, min(r, count - 1) % group
            head = ((first_row + token) * kv_heads + kv_head) * group + h
            copy_query(r, head, queries, query_scales, query_sums, scratch)
            lane = 4 * (r // rows * STATS + r % rows)
            store_f32(scratch + at_maxima + lane, MASKED)
            store_f32(scratch + at_sums + lane, 0.0)
            for i in range(dim):
                store_f32(scratch + at_out + 4 * (r * dim + i), 0.0)
        for t in range((position + tokens - 1) // TILE + 1):
            seen = position + 1 - t * TILE
            load_tile(t, min(TILE, seen + tokens - 1), table, cells_per_block, cells, kv_head, keys, key_scales,
                      values, scratch)  # fmt: skip
            for r in range(0, count, rows):
                row_block(r, seen, group, tokens, scratch)
        for r in range(count):
            head = ((first_row + r // group) * kv_heads + kv_head) * group + r % group
            divide(out + 4 * dim * head, scratch + at_out + 4 * dim * r,
                   scratch + at_sums + 4 * (r // rows * STATS + r % rows))  # fmt: skip

    return KERNEL_SIGNATURE, kernel


def attention_decode(isa: Isa, head_dim: str, group_size: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """One unit a tile: some KV tiles of one sequence and KV head, for one new token; leaves partial results.

    Arguments: those of `attention_prefill` with the partials' address for out, then the most KV tiles a sequence can
    have. A unit is int32 [8]: sequence, KV head, row, context length, first KV tile, end of KV tiles. A partial is
    float32 [maximum, sum, 14 unused, weighted values], by sequence, KV tile and head.
    """
    dim, group = int(head_dim), int(group_size)
    rows, padded = decode_rows(group), padded_group(group)
    at = scratch_areas(dim, group)
    load_tile, copy_query = _load_tile(isa, dim, at), _copy_query(dim, at)
    scores, softmax, weighted_values = _scores(isa, dim, rows), _softmax(isa), _weighted_values(isa, dim, rows, False)
    at_keys, at_key_scales, at_values, at_scores = at["keys"], at["key_scales"], at["values"], at["scores"]
    at_weights, at_stats, at_queries = at["weights"], at["tile_stats"], at["queries"]
    at_query_scales, at_query_sums = at["query_scales"], at["query_sums"]
    weight_row, chunk, partial_bytes = (2 if isa.bf16_dot else 4) * TILE, 4 * isa.lanes, 64 + 4 * dim

    def kernel(args: int, tile: int, scratch: int) -> None:
        unit = load_i64(args) + 32 * tile
        sequence, kv_head, row, context = load_u32(unit), load_u32(unit + 4), load_u32(unit + 8), load_u32(unit + 12)
        queries, query_scales, query_sums = load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
        keys, key_scales, values = load_i64(args + 32), load_i64(args + 40), load_i64(args + 48)
        kv_heads, cells_per_block, cells = load_i64(args + 56), load_i64(args + 80), load_i64(args + 88)
        partials = load_i64(args + 96)
        table, most_tiles = load_i64(args + 64) + sequence * load_i64(args + 72), load_i64(args + 104)
        for r in range(padded):
            head = (row * kv_heads + kv_head) * group + min(r, group - 1)
            copy_query(r, head, queries, query_scales, query_sums, scratch)
        for t in range(load_u32(unit + 16), load_u32(unit + 20)):
            visible = min(TILE, context - t * TILE)
            load_tile(t, visible, table, cells_per_block, cells, kv_head, keys, key_scales, values, scratch)
            for r in range(0, padded, rows):
                scores(scratch + at_queries + r * dim, scratch + at_query_sums + 4 * r, scratch + at_keys,
                       scratch + at_key_scales, scratch + at_scores, (visible + chunk - 1) // chunk)  # fmt: skip
                place = partials + (((sequence * most_tiles + t) * kv_heads + kv_head) * padded + r) * partial_bytes
                for i in range(rows):
                    softmax(scratch + at_scores + 4 * TILE * i, scratch + at_weights + weight_row * i,
                            scratch + at_query_scales + 4 * (r + i), visible, place + i * partial_bytes,
                            place + i * partial_bytes + 4)  # fmt: skip
                weighted_values(scratch + at_weights, scratch + at_values, visible, place + 64, partial_bytes,
                                scratch + at_stats)  # fmt: skip

    return KERNEL_SIGNATURE, kernel


def attention_merge(isa: Isa, head_dim: str, group_size: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """One decoding sequence and head a tile: merge its partials in order of position.

    Arguments: partials, most KV tiles of a sequence, KV heads, context lengths (int32), out.
    """
    dim, group = int(head_dim), int(group_size)
    padded = padded_group(group)
    at = scratch_areas(dim, group)
    merge_stats, scale_add, divide = _merge_stats(isa), _scale_add(isa, dim), _divide(isa, dim)
    partial_bytes, at_stats, at_maxima, at_sums, at_out = (
        64 + 4 * dim, at["tile_stats"], at["maxima"], at["sums"], at["out"])  # fmt: skip

    def kernel(args: int, tile: int, scratch: int) -> None:
        partials, most_tiles, kv_heads = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        sequence, head = tile // (kv_heads * group), tile % (kv_heads * group)
        context, out = load_u32(load_i64(args + 24) + 4 * sequence), load_i64(args + 32)
        stats, total = scratch + at_stats, scratch + at_out
        store_f32(scratch + at_maxima, MASKED)
        store_f32(scratch + at_sums, 0.0)
        for i in range(dim):
            store_f32(total + 4 * i, 0.0)
        for t in range((context + TILE - 1) // TILE):
            index = ((sequence * most_tiles + t) * kv_heads + head // group) * padded + head % group
            place = partials + index * partial_bytes
            store_f32(stats, load_f32(place))
            store_f32(stats + 4 * STATS, load_f32(place + 4))
            merge_stats(scratch + at_maxima, scratch + at_sums, stats)
            scale_add(total, place + 64, stats + 8 * STATS, stats + 12 * STATS)
        divide(out + 4 * dim * tile, total, scratch + at_sums)

    return KERNEL_SIGNATURE, kernel
