"""Decode's attention: the KV tiles of one query row spread over threads, then merged in order of position.

A head's keys and values are read once for all query heads of its group (GQA).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinphase.backends.cpu.emit import I32
from twinphase.backends.cpu.intrinsics import KERNEL_SIGNATURE, fields, load_f32, load_u32, store_f32
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.attention_tile import (
    MASKED,
    STATS,
    copy_query_kernel,
    divide_kernel,
    find_cells_kernel,
    merge_stats_kernel,
    scale_add_kernel,
    scores_kernel,
    softmax_kernel,
    weighted_values_kernel,
)
from twinphase.backends.cpu.kv_layout import CELL, TILE, decode_rows, padded_group, scratch_areas

__all__ = ["attention_decode", "attention_merge"]


def attention_decode(isa: Isa, head_dim: str, group_size: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """One unit a tile: some KV tiles of one sequence and KV head, for one new token; leaves partial results.

    Arguments: those of `attention_prefill` with the partials' address for out, then the most KV tiles a sequence can
    have. A unit is int32 [8]: sequence, KV head, row, context length, first KV tile, end of KV tiles. A partial is
    float32 [maximum, sum, 14 unused, weighted values], by sequence, KV tile and head.
    """
    dim, group = int(head_dim), int(group_size)
    rows, padded = decode_rows(group), padded_group(group)
    at = scratch_areas(dim, group)
    find_cells, copy_query = find_cells_kernel(isa, dim, at), copy_query_kernel(dim, at)
    scores, softmax, weighted_values = (
        scores_kernel(isa, dim, rows),
        softmax_kernel(isa),
        weighted_values_kernel(isa, dim, rows, False),
    )
    at_places, at_scores, at_weights = at["places"], at["scores"], at["weights"]
    at_stats, at_queries = at["tile_stats"], at["queries"]
    at_query_scales, at_query_sums = at["query_scales"], at["query_sums"]
    weight_row, chunk, partial_bytes = (2 if isa.bf16_dot else 4) * TILE, 4 * isa.lanes, 64 + 4 * dim

    arguments, unit_of = fields(14), fields(6, I32)

    def kernel(args: int, tile: int, scratch: int) -> None:
        (units, queries, query_scales, query_sums, keys, key_scales, values, kv_heads, tables, table_stride,
         cells_per_block, per_chunk, partials, most_tiles) = arguments(args)  # fmt: skip
        sequence, kv_head, row, context, first, end = unit_of(units + 32 * tile)
        table = tables + sequence * table_stride
        for r in range(padded):
            head = (row * kv_heads + kv_head) * group + min(r, group - 1)
            copy_query(r, head, queries, query_scales, query_sums, scratch)
        for t in range(first, end):
            visible = min(TILE, context - t * TILE)
            cells = (visible + CELL - 1) // CELL
            find_cells(t, cells, table, cells_per_block, per_chunk, kv_head, keys, key_scales, values, scratch)
            for r in range(0, padded, rows):
                scores(scratch + at_queries + r * dim, scratch + at_query_sums + 4 * r, scratch + at_places,
                       scratch + at_scores, (visible + chunk - 1) // chunk)  # fmt: skip
                place = partials + (((sequence * most_tiles + t) * kv_heads + kv_head) * padded + r) * partial_bytes
                for i in range(rows):
                    softmax(scratch + at_scores + 4 * TILE * i, scratch + at_weights + weight_row * i,
                            scratch + at_query_scales + 4 * (r + i), visible, place + i * partial_bytes,
                            place + i * partial_bytes + 4)  # fmt: skip
                weighted_values(scratch + at_weights, scratch + at_places, cells, place + 64, partial_bytes,
                                scratch + at_stats)  # fmt: skip

    return KERNEL_SIGNATURE, kernel


def attention_merge(isa: Isa, head_dim: str, group_size: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """One decoding sequence and head a tile: merge its partials in order of position.

    Arguments: partials, most KV tiles of a sequence, KV heads, context lengths (int32), out.
    """
    dim, group = int(head_dim), int(group_size)
    padded = padded_group(group)
    at = scratch_areas(dim, group)
    merge_stats, scale_add, divide = merge_stats_kernel(isa), scale_add_kernel(isa, dim), divide_kernel(isa, dim)
    partial_bytes, at_stats, at_maxima, at_sums, at_out = (
        64 + 4 * dim, at["tile_stats"], at["maxima"], at["sums"], at["out"])  # fmt: skip

    arguments = fields(5)

    def kernel(args: int, tile: int, scratch: int) -> None:
        partials, most_tiles, kv_heads, contexts, out = arguments(args)
        sequence, head = tile // (kv_heads * group), tile % (kv_heads * group)
        context = load_u32(contexts + 4 * sequence)
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
