"""Prefill's attention: many query rows of a sequence share each KV tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from twinphase.backends.cpu.emit import I32
from twinphase.backends.cpu.intrinsics import KERNEL_SIGNATURE, fields, store_f32
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.attention_tile import (
    MASKED,
    STATS,
    copy_query_kernel,
    divide_kernel,
    find_cells_kernel,
    merge_stats_kernel,
    scores_kernel,
    softmax_kernel,
    weighted_values_kernel,
)
from twinphase.backends.cpu.kv_layout import CELL, TILE, scratch_areas

__all__ = ["attention_prefill"]


def attention_prefill(
    isa: Isa, head_dim: str, group_size: str, dtype: str, softcap: str, sinks: str
) -> tuple[Any, Callable[[int, int, int], None]]:
    """One unit a tile: up to `query_tile_tokens` prompt tokens of one sequence and KV head.

    Arguments: units, int8 queries, their scales, their sums, keys, key scales and values of the layer, KV heads,
    block tables (int32), their stride, cells a block, cells of a chunk, out, window (0 is none), sinks
    by head. A unit is int32 [8]: sequence, KV head, first row, tokens, position of the first token.

    A row's bits are those of the tiles that it sees: a tile that is masked for it adds 0 to its sums, and where it has
    seen none yet it stays as it began.
    """
    dim, group, rows = int(head_dim), int(group_size), isa.attention_rows
    at = scratch_areas(dim, group)
    find_cells = find_cells_kernel(isa, dim, dtype, at, in_place=isa.bf16_dot and dtype == "auto")
    copy_query = copy_query_kernel(dim, at)
    scores, softmax = scores_kernel(isa, dim, rows), softmax_kernel(isa, dtype, float(softcap))
    weighted_values, merge_stats, divide = (
        weighted_values_kernel(isa, dim, rows, True),
        merge_stats_kernel(isa),
        divide_kernel(isa, dim, sinks == "1"),
    )
    at_places, at_scores, at_weights = at["places"], at["scores"], at["weights"]
    at_stats, at_queries = at["tile_stats"], at["queries"]
    at_query_scales, at_query_sums = at["query_scales"], at["query_sums"]
    at_maxima, at_sums, at_out = at["maxima"], at["sums"], at["out"]
    weight_row, chunk = (2 if isa.bf16_dot else 4) * TILE, 4 * isa.lanes

    arguments, unit_of = fields(15), fields(5, I32)

    @njit  # type: ignore[untyped-decorator]
    def row_block(r: int, seen: int, window: int, group: int, tokens: int, scratch: int) -> None:
        # Rows r.. of the unit against the KV tile; token i of the unit sees its tokens up to `seen` + i, the last
        # `window` of them.
        most = min(TILE, seen + min(tokens - 1, (r + rows - 1) // group))
        if most <= 0 or (window and seen + r // group - window >= TILE):
            return
        scores(scratch + at_queries + r * dim, scratch + at_query_sums + 4 * r, scratch + at_places,
               scratch + at_places, scratch + at_scores, (most + chunk - 1) // chunk)  # fmt: skip
        for i in range(rows):
            end = seen + (r + i) // group
            first = max(0, min(TILE, end - window)) if window else 0
            stats = scratch + at_stats + 4 * i
            softmax(scratch + at_scores + 4 * TILE * i, scratch + at_weights + weight_row * i,
                    scratch + at_query_scales + 4 * (r + i), first, max(0, min(TILE, end)), stats, stats + 4 * STATS,
                    scratch + at_places)  # fmt: skip
        block = 4 * STATS * (r // rows)
        merge_stats(scratch + at_maxima + block, scratch + at_sums + block, scratch + at_stats)
        weighted_values(scratch + at_weights, scratch + at_places, scratch + at_places, (most + CELL - 1) // CELL,
                        scratch + at_out + 4 * dim * r, 4 * dim, scratch + at_stats)  # fmt: skip

    def kernel(args: int, tile: int, scratch: int) -> None:
        (units, queries, query_scales, query_sums, keys, key_scales, values, kv_heads, tables, table_stride,
         cells_per_block, per_chunk, out, window, sinks_at) = arguments(args)  # fmt: skip
        sequence, kv_head, first_row, tokens, position = unit_of(units + 32 * tile)
        table = tables + sequence * table_stride
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
        first_tile = max(0, position + 1 - window) // TILE if window else 0
        for t in range(first_tile, (position + tokens - 1) // TILE + 1):
            seen = position + 1 - t * TILE
            cells = (min(TILE, seen + tokens - 1) + CELL - 1) // CELL
            find_cells(t, cells, table, cells_per_block, per_chunk, kv_head, keys, key_scales, values, scratch,
                       scratch + at_places)  # fmt: skip
            for r in range(0, count, rows):
                row_block(r, seen, window, group, tokens, scratch)
        for r in range(count):
            head, lane = kv_head * group + r % group, 4 * (r // rows * STATS + r % rows)
            divide(out + 4 * dim * ((first_row + r // group) * kv_heads * group + head), scratch + at_out + 4 * dim * r,
                   scratch + at_sums + lane, scratch + at_maxima + lane, sinks_at + 4 * head)  # fmt: skip

    return KERNEL_SIGNATURE, kernel
