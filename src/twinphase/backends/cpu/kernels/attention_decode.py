"""Decode's attention: a unit of work is one new token and one KV head, its KV tiles merged in order of position.

Where there are few, the tiles are spread over more units, and partial results merged afterwards to the same bits.

A head's keys and values are read once for all query heads of its group (GQA).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from twinphase.backends.cpu.emit import I32
from twinphase.backends.cpu.intrinsics import KERNEL_SIGNATURE, fields, load_f32, store_f32
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.attention_tile import (
    MASKED,
    STATS,
    copy_query_kernel,
    divide_kernel,
    fetch_scales_kernel,
    find_cells_kernel,
    merge_stats_kernel,
    scale_add_kernel,
    scores_kernel,
    softmax_kernel,
    weighted_values_kernel,
)
from twinphase.backends.cpu.kv_layout import CELL, PLACES_BYTES, TILE, decode_rows, padded_group, scratch_areas

__all__ = ["attention_decode", "attention_merge"]


@njit(inline="always")  # type: ignore[untyped-decorator]
def _first_tile(context: int, window: int) -> int:
    """The first KV tile that the last of `context` tokens sees."""
    return max(0, context - window) // TILE if window else 0


def attention_decode(
    isa: Isa, head_dim: str, group_size: str, dtype: str, softcap: str, sinks: str
) -> tuple[Any, Callable[[int, int, int], None]]:
    """One unit a tile: KV tiles of one sequence and KV head, for one new token.

    Arguments: those of `attention_prefill`, the partials' address before the window. A unit is int32 [8]: sequence, KV
    head, row, context length, first KV tile, end of KV tiles, whether it is a piece, number of the piece's head's first
    partial. A unit that is not a piece has all tiles, merges them in order and writes the row's result. A piece leaves
    a partial for each tile and head of the group, float32 [maximum, sum, 14 unused, weighted values], for the merge.
    Units are the same for all layers: tiles before a layer's window are left out here and in the merge.
    """
    dim, group = int(head_dim), int(group_size)
    rows, padded = decode_rows(group), padded_group(group)
    at, ahead = scratch_areas(dim, group), isa.bf16_dot  # elsewhere values are widened, one tile at a time
    find_cells = find_cells_kernel(isa, dim, dtype, at, in_place=isa.bf16_dot)
    copy_query, convert = copy_query_kernel(dim, at), isa.bf16_dot and dtype == "int8"
    scores, softmax, weighted_values, merge_values, merge_stats, divide = (
        scores_kernel(isa, dim, rows, ahead),
        softmax_kernel(isa, dtype, float(softcap)),
        weighted_values_kernel(isa, dim, rows, False, ahead=ahead, convert=convert),
        weighted_values_kernel(isa, dim, rows, True, ahead=ahead, convert=convert),
        merge_stats_kernel(isa),
        divide_kernel(isa, dim, sinks == "1"),
    )
    at_places, at_scores, at_weights = at["places"], at["scores"], at["weights"]
    at_stats, at_queries, at_out = at["tile_stats"], at["queries"], at["out"]
    at_query_scales, at_query_sums = at["query_scales"], at["query_sums"]
    at_maxima, at_sums = at["maxima"], at["sums"]
    weight_row, chunk, partial_bytes = (2 if isa.bf16_dot else 4) * TILE, 4 * isa.lanes, 64 + 4 * dim
    row_bytes = 4 * dim

    arguments, unit_of, fetch_scales = fields(16), fields(8, I32), fetch_scales_kernel(isa)

    @njit  # type: ignore[untyped-decorator]
    def weigh(r: int, hidden: int, visible: int, now: int, coming: int, maximum: int, total: int, stride: int,
              scratch: int) -> None:  # fmt: skip
        # Scores and softmax of rows r.. against the KV tile in scratch; maxima and sums go `stride` bytes apart.
        scores(scratch + at_queries + r * dim, scratch + at_query_sums + 4 * r, now, coming,
               scratch + at_scores, (visible + chunk - 1) // chunk)  # fmt: skip
        for i in range(rows):
            softmax(scratch + at_scores + 4 * TILE * i, scratch + at_weights + weight_row * i,
                    scratch + at_query_scales + 4 * (r + i), hidden, visible, maximum + stride * i,
                    total + stride * i, now)  # fmt: skip

    def kernel(args: int, tile: int, scratch: int) -> None:
        (units, queries, query_scales, query_sums, keys, key_scales, values, kv_heads, tables, table_stride,
         cells_per_block, per_chunk, out, partials, window, sinks_at) = arguments(args)  # fmt: skip
        sequence, kv_head, row, context, first, end, piece, base = unit_of(units + 32 * tile)
        first = max(first, _first_tile(context, window))
        if first >= end:
            return
        table, first_head = tables + sequence * table_stride, (row * kv_heads + kv_head) * group
        stats, total = scratch + at_stats, scratch + at_out
        for r in range(padded):
            copy_query(r, first_head + min(r, group - 1), queries, query_scales, query_sums, scratch)
            lane = 4 * (r // rows * STATS + r % rows)
            store_f32(scratch + at_maxima + lane, MASKED)
            store_f32(scratch + at_sums + lane, 0.0)
        if not piece:
            for i in range(padded * dim):
                store_f32(total + 4 * i, 0.0)
        now, coming = scratch + at_places, scratch + at_places + PLACES_BYTES
        find_cells(first, (min(TILE, context - first * TILE) + CELL - 1) // CELL, table, cells_per_block, per_chunk,
                   kv_head, keys, key_scales, values, scratch, now)  # fmt: skip
        for t in range(first, end):
            visible = min(TILE, context - t * TILE)
            hidden = max(0, context - window - t * TILE) if window else 0
            cells = (visible + CELL - 1) // CELL
            if ahead:
                # The next tile is fetched while this one is computed; after the last one, the next unit's first.
                if t + 1 == end:
                    sequence, kv_head_, _, context_, next_t, _, _, _ = unit_of(units + 32 * (tile + 1))
                    next_t = max(next_t, _first_tile(context_, window))
                    table_ = tables + sequence * table_stride
                else:
                    kv_head_, context_, next_t, table_ = kv_head, context, t + 1, table
                find_cells(next_t, (min(TILE, context_ - next_t * TILE) + CELL - 1) // CELL, table_, cells_per_block,
                           per_chunk, kv_head_, keys, key_scales, values, scratch, coming)  # fmt: skip
                fetch_scales(coming)
            elif t > first:
                find_cells(t, cells, table, cells_per_block, per_chunk, kv_head, keys, key_scales, values, scratch, now)
            for r in range(0, padded, rows):
                if piece:
                    place = partials + ((base + t) * padded + r) * partial_bytes
                    weigh(r, hidden, visible, now, coming, place, place + 4, partial_bytes, scratch)
                    weighted_values(scratch + at_weights, now, coming, cells, place + 64, partial_bytes, stats)
                else:
                    weigh(r, hidden, visible, now, coming, stats, stats + 4 * STATS, 4, scratch)
                    block = 4 * STATS * (r // rows)
                    merge_stats(scratch + at_maxima + block, scratch + at_sums + block, stats)
                    merge_values(scratch + at_weights, now, coming, cells, total + row_bytes * r, row_bytes, stats)
            if ahead:
                now, coming = coming, now
        if not piece:
            for r in range(group):
                lane = 4 * (r // rows * STATS + r % rows)
                divide(out + row_bytes * (first_head + r), total + row_bytes * r, scratch + at_sums + lane,
                       scratch + at_maxima + lane, sinks_at + 4 * (kv_head * group + r))  # fmt: skip

    return KERNEL_SIGNATURE, kernel


def attention_merge(
    isa: Isa, head_dim: str, group_size: str, sinks: str
) -> tuple[Any, Callable[[int, int, int], None]]:
    """One head of a sequence whose tiles were spread over pieces: merge its partials in order of position.

    Arguments: merges, partials, KV heads, out, window, sinks. A merge is int32 [4]: sequence, KV tiles, number of the
    first partial, context length.
    """
    dim, group = int(head_dim), int(group_size)
    padded = padded_group(group)
    at = scratch_areas(dim, group)
    merge_stats, scale_add = merge_stats_kernel(isa), scale_add_kernel(isa, dim)
    divide = divide_kernel(isa, dim, sinks == "1")
    partial_bytes, at_stats, at_maxima, at_sums, at_out = (
        64 + 4 * dim, at["tile_stats"], at["maxima"], at["sums"], at["out"])  # fmt: skip

    arguments, merge_of = fields(6), fields(4, I32)

    def kernel(args: int, tile: int, scratch: int) -> None:
        merges, partials, kv_heads, out, window, sinks_at = arguments(args)
        heads = kv_heads * group
        sequence, tiles, base, context = merge_of(merges + 16 * (tile // heads))
        head = tile % heads
        stats, total = scratch + at_stats, scratch + at_out
        store_f32(scratch + at_maxima, MASKED)
        store_f32(scratch + at_sums, 0.0)
        for i in range(dim):
            store_f32(total + 4 * i, 0.0)
        for t in range(_first_tile(context, window), tiles):
            index = (base + head // group * tiles + t) * padded + head % group
            place = partials + index * partial_bytes
            store_f32(stats, load_f32(place))
            store_f32(stats + 4 * STATS, load_f32(place + 4))
            merge_stats(scratch + at_maxima, scratch + at_sums, stats)
            scale_add(total, place + 64, stats + 8 * STATS, stats + 12 * STATS)
        divide(out + 4 * dim * (sequence * heads + head), total, scratch + at_sums, scratch + at_maxima,
               sinks_at + 4 * head)  # fmt: skip

    return KERNEL_SIGNATURE, kernel
