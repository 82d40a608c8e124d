"""Attention of both phases: a unit of work is some rows of a sequence and one KV head.

The rows are the query heads of the group (GQA) for one new token (decode), for the few whose drafts
a step verifies, or for many (prefill): a tile's keys and values are read once for all. Where units
are few, tiles are spread over more of them, and partial results merged afterwards to the same bits.
Rows of several sequences may also be one unit, for the first tiles where their blocks are the same.
There are two kernels, for few rows and for many; either computes any unit, to the same bits.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from twinphase.backends.cpu.emit import I32
from twinphase.backends.cpu.intrinsics import (
    KERNEL_SIGNATURE,
    Kernel,
    fields,
    helper,
    load_f32,
    load_i64,
    load_u32,
    store_f32,
    store_i64,
)
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels import attention_matrix
from twinphase.backends.cpu.kernels.attention_fetch import (
    FETCH_STEPS,
    SCORES_STEPS,
    VALUES_STEPS,
    fetch_kernel,
    fetch_scales_kernel,
)
from twinphase.backends.cpu.kernels.attention_tile import (
    MASKED_SCORE,
    clear_kernel,
    copy_query_kernel,
    divide_kernel,
    find_cells_kernel,
    merge_stats_kernel,
    scale_add_kernel,
    scores_kernel,
    softmax_kernel,
    weighted_values_kernel,
    widen_kernel,
)
from twinphase.backends.cpu.kv_layout import (
    BEGINS_WITH_STATE,
    CELL_TOKENS,
    LEAVES_PARTIALS,
    LEAVES_STATE,
    MERGE_INTS,
    PLACES_BYTES_PER_TILE,
    STATE_BYTES,
    STATS_LANES,
    TILE_TOKENS,
    UNIT_INTS,
    WHOLE,
    decode_rows,
    scratch_areas,
)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _first_tile(context, window):
    """The first KV tile that the last of `context` tokens sees."""
    return max(0, context - window) // TILE_TOKENS if window else 0


@njit(inline="always")  # type: ignore[untyped-decorator]
def _copy(source, target, nbytes):
    for i in range(0, nbytes, 8):
        store_i64(target + i, load_i64(source + i))


def attention_decode(
    isa: Isa, head_dim: str, group: str, dtype: str, softcap: str, sinks: str
) -> Kernel:
    """Few rows, bound by memory: a tile as high as the group, while the next KV tile is fetched.

    int8 values are converted in registers, but for matrix tiles in memory.
    """
    return _attention(
        isa,
        int(head_dim),
        int(group),
        dtype,
        float(softcap),
        sinks == "1",
        rows=decode_rows(int(group)),
        in_place=isa.bf16_dot and (dtype == "auto" or not isa.matrix_tiles),
        ahead=True,
    )


def attention_prefill(
    isa: Isa, head_dim: str, group: str, dtype: str, softcap: str, sinks: str
) -> Kernel:
    """Many rows, bound by arithmetic: the highest tile; int8 values are converted once for all."""
    return _attention(
        isa,
        int(head_dim),
        int(group),
        dtype,
        float(softcap),
        sinks == "1",
        rows=isa.attention_rows,
        in_place=isa.bf16_dot and dtype == "auto",
        ahead=False,
    )


def _attention(
    isa: Isa,
    dim: int,
    group: int,
    dtype: str,
    softcap: float,
    sinks: bool,
    *,
    rows: int,
    in_place: bool,
    ahead: bool,
) -> Kernel:
    """One unit a tile: `tokens` successive tokens of one sequence, KV tiles of one KV head.

    Arguments: units, row numbers, int8 queries, their scales, their sums, keys, key scales and
    values of the layer, KV heads, block tables (int32), their stride, cells a block, cells of a
    chunk, out, partials, states, window (0 is none), sinks by head. A unit is int32 [8]: sequence,
    KV head, where its row numbers begin, tokens, position of the first token, first KV tile, end of
    KV tiles, and what becomes of its results. A WHOLE unit merges its tiles in order and writes its
    rows' results. Others are pieces: they leave a partial for each tile and row, float32 [maximum,
    sum, 14 unused, weighted values], for the merge. Units are the same for all layers: tiles before
    a layer's window are left out here and in the merge.

    Tiles that sequences share are computed by a unit with LEAVES_STATE, whose tokens all see the
    whole of them: a row's maximum and sum go to `states`, its weighted values to `out`. The row's
    own unit, with BEGINS_WITH_STATE, continues from there, so that the operations of a row and
    their order are those of a unit with all tiles.

    A row's bits are those of the tiles that it sees: a tile that is masked for it adds 0 to its
    sums, and where it has seen none yet it stays as it began.
    """
    at = scratch_areas(dim, group)
    convert = in_place and dtype == "int8"
    find_cells = find_cells_kernel(dim, dtype)
    widen = widen_kernel(isa, dim, dtype, at)
    copy_query = copy_query_kernel(dim, at)
    fetch_scales = fetch_scales_kernel(isa)
    row_block = _row_block_kernel(isa, dim, group, dtype, softcap, at, rows, ahead, convert)
    clear = clear_kernel(isa, dim)
    divide = divide_kernel(isa, dim, sinks)
    begin_tiles = attention_matrix.begin_kernel(isa, dim, at, rows)
    end_tiles = attention_matrix.end_kernel(isa)
    at_places = at["places"]
    at_out = at["out"]
    at_maxima = at["maxima"]
    at_sums = at["sums"]
    partial_bytes = 64 + 4 * dim
    row_bytes = 4 * dim

    arguments = fields(18)
    unit_of = fields(UNIT_INTS, I32)

    def kernel(args, tile, scratch):
        (
            units,
            numbers,
            queries,
            query_scales,
            query_sums,
            keys,
            key_scales,
            values,
            kv_heads,
            tables,
            table_stride,
            cells_per_block,
            per_chunk,
            out,
            partials,
            states,
            window,
            sinks_at,
        ) = arguments(args)
        sequence, kv_head, first_row, tokens, position, first, end, result = unit_of(
            units + 4 * UNIT_INTS * tile
        )
        origin = first
        first = max(first, _first_tile(position + 1, window))
        if first >= end:
            return
        table = tables + sequence * table_stride
        count = tokens * group
        padded = (count + rows - 1) // rows * rows
        numbers += 4 * first_row
        for r in range(padded):
            # Rows past the end repeat the last one; nothing reads their result.
            i = min(r, count - 1)
            head = (load_u32(numbers + 4 * (i // group)) * kv_heads + kv_head) * group + i % group
            copy_query(r, head, queries, query_scales, query_sums, scratch)
            lane = 4 * (r // rows * STATS_LANES + r % rows)
            if result == BEGINS_WITH_STATE:
                state = states + STATE_BYTES * head
                store_f32(scratch + at_maxima + lane, load_f32(state))
                store_f32(scratch + at_sums + lane, load_f32(state + 4))
                _copy(out + row_bytes * head, scratch + at_out + row_bytes * r, row_bytes)
            else:
                store_f32(scratch + at_maxima + lane, MASKED_SCORE)
                store_f32(scratch + at_sums + lane, 0.0)
        if result in (WHOLE, LEAVES_STATE):
            clear(scratch + at_out, padded)
        begin_tiles(scratch)
        now = scratch + at_places
        coming = scratch + at_places + PLACES_BYTES_PER_TILE
        for t in range(first, end):
            seen = position + 1 - t * TILE_TOKENS
            cells = (min(TILE_TOKENS, seen + tokens - 1) + CELL_TOKENS - 1) // CELL_TOKENS
            if t == first or not ahead:
                find_cells(
                    t,
                    cells,
                    table,
                    cells_per_block,
                    per_chunk,
                    kv_head,
                    keys,
                    key_scales,
                    values,
                    now,
                )
            if not in_place:
                widen(cells, now, scratch)
            if ahead:
                # The next tile is fetched while this one is computed; after the last one, the next
                # unit's first.
                if t + 1 == end:
                    sequence_, kv_head_, _, tokens_, position_, next_t, _, _ = unit_of(
                        units + 4 * UNIT_INTS * (tile + 1)
                    )
                    next_t = max(next_t, _first_tile(position_ + 1, window))
                    table_ = tables + sequence_ * table_stride
                else:
                    kv_head_ = kv_head
                    tokens_ = tokens
                    position_ = position
                    next_t = t + 1
                    table_ = table
                find_cells(
                    next_t,
                    (min(TILE_TOKENS, position_ + tokens_ - next_t * TILE_TOKENS) + CELL_TOKENS - 1)
                    // CELL_TOKENS,
                    table_,
                    cells_per_block,
                    per_chunk,
                    kv_head_,
                    keys,
                    key_scales,
                    values,
                    coming,
                )
                fetch_scales(coming)
            for r in range(0, padded, rows):
                partial = 0
                if result >= LEAVES_PARTIALS:
                    number = result - LEAVES_PARTIALS + (t - origin) * padded + r
                    partial = partials + number * partial_bytes
                row_block(r, seen, window, tokens, now, coming if r == 0 else now, partial, scratch)
            if ahead:
                now, coming = coming, now
        end_tiles()
        if result < LEAVES_PARTIALS:
            for r in range(count):
                h = kv_head * group + r % group
                head = load_u32(numbers + 4 * (r // group)) * kv_heads * group + h
                lane = 4 * (r // rows * STATS_LANES + r % rows)
                total = scratch + at_out + row_bytes * r
                if result == LEAVES_STATE:
                    state = states + STATE_BYTES * head
                    store_f32(state, load_f32(scratch + at_maxima + lane))
                    store_f32(state + 4, load_f32(scratch + at_sums + lane))
                    _copy(total, out + row_bytes * head, row_bytes)
                else:
                    divide(
                        out + row_bytes * head,
                        total,
                        scratch + at_sums + lane,
                        scratch + at_maxima + lane,
                        sinks_at + 4 * h,
                    )

    return KERNEL_SIGNATURE, kernel


def _row_block_kernel(
    isa: Isa,
    dim: int,
    group: int,
    dtype: str,
    softcap: float,
    at: dict[str, int],
    rows: int,
    ahead: bool,
    convert: bool,
) -> Any:
    """Numba function of a register tile of a unit's rows against one KV tile."""
    scores = (
        attention_matrix.scores_kernel(isa, dim, dtype, ahead)
        if isa.matrix_tiles
        else scores_kernel(isa, dim, dtype, rows, ahead)
    )
    softmax = softmax_kernel(isa, dtype, softcap)
    softmax_of_two, softmax_of_one = (
        attention_matrix.softmax_kernel(isa, dtype, softcap, count) for count in (2, 1)
    )
    fetch = fetch_kernel(isa, dim, dtype)
    pairs = rows // 2 * 2 if isa.matrix_tiles else 0
    ones = rows if isa.matrix_tiles else 0
    weighted_values, merge_values = (
        attention_matrix.weighted_values_kernel(isa, dim, rows, dtype, merge, ahead)
        if isa.matrix_tiles
        else weighted_values_kernel(isa, dim, rows, dtype, merge, ahead=ahead, convert=convert)
        for merge in (False, True)
    )
    merge_stats = merge_stats_kernel(isa)
    at_scores = at["scores"]
    at_products = at["products"]
    at_weights = at["weights"]
    at_stats = at["tile_stats"]
    at_queries = at["queries"]
    at_out = at["out"]
    at_query_scales = at["query_scales"]
    at_query_sums = at["query_sums"]
    at_maxima = at["maxima"]
    at_sums = at["sums"]
    weight_row = (2 if isa.bf16_dot else 4) * TILE_TOKENS
    chunk = 4 * isa.lanes
    partial_bytes = 64 + 4 * dim
    row_bytes = 4 * dim
    softmax_steps = FETCH_STEPS - SCORES_STEPS - VALUES_STEPS if ahead else 0

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def fetch_before(i, count, coming):
        # Before the softmax of `count` rows: their share of the steps between scores and values.
        for step in range(softmax_steps * i // rows, softmax_steps * (i + count) // rows):
            fetch(coming, SCORES_STEPS + step)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def visible(end, window):
        return max(0, min(TILE_TOKENS, end - window)) if window else 0, max(
            0, min(TILE_TOKENS, end)
        )

    @helper
    def row_block(r, seen, window, tokens, now, coming, partial, scratch):
        # Rows r.. of the unit against the KV tile at `now`; token i of the unit sees its tokens up
        # to `seen` + i, the last `window` of them.
        most = min(TILE_TOKENS, seen + min(tokens - 1, (r + rows - 1) // group))
        if most <= 0 or (window and seen + r // group - window >= TILE_TOKENS):
            return
        scores(
            scratch + at_queries + r * dim,
            scratch + at_query_sums + 4 * r,
            now,
            coming,
            scratch + at_scores,
            (most + chunk - 1) // chunk,
        )
        stats = scratch + at_stats
        cells = (most + CELL_TOKENS - 1) // CELL_TOKENS
        maximum, total, stride = (
            (partial, partial + 4, partial_bytes)
            if partial
            else (stats, stats + 4 * STATS_LANES, 4)
        )
        for i in range(0, pairs, 2):
            fetch_before(i, 2, coming)
            softmax_of_two(
                scratch + at_scores + 4 * TILE_TOKENS * i,
                scratch + at_weights + weight_row * i,
                scratch + at_query_scales + 4 * (r + i),
                scratch + at_query_sums + 4 * (r + i),
                maximum + stride * i,
                total + stride * i,
                stride,
                now,
                *visible(seen + (r + i) // group, window),
                *visible(seen + (r + i + 1) // group, window),
            )
        for i in range(pairs, ones):
            fetch_before(i, 1, coming)
            softmax_of_one(
                scratch + at_scores + 4 * TILE_TOKENS * i,
                scratch + at_weights + weight_row * i,
                scratch + at_query_scales + 4 * (r + i),
                scratch + at_query_sums + 4 * (r + i),
                maximum + stride * i,
                total + stride * i,
                stride,
                now,
                *visible(seen + (r + i) // group, window),
            )
        for i in range(ones, rows):
            fetch_before(i, 1, coming)
            softmax(
                scratch + at_scores + 4 * TILE_TOKENS * i,
                scratch + at_weights + weight_row * i,
                scratch + at_query_scales + 4 * (r + i),
                *visible(seen + (r + i) // group, window),
                maximum + stride * i,
                total + stride * i,
                now,
            )
        if partial:
            weighted_values(
                scratch + at_weights,
                now,
                coming,
                cells,
                partial + 64,
                partial_bytes,
                stats,
                scratch + at_products,
            )
        else:
            block = 4 * STATS_LANES * (r // rows)
            merge_stats(scratch + at_maxima + block, scratch + at_sums + block, stats)
            merge_values(
                scratch + at_weights,
                now,
                coming,
                cells,
                scratch + at_out + row_bytes * r,
                row_bytes,
                stats,
                scratch + at_products,
            )

    return row_block


def attention_merge(isa: Isa, head_dim: str, group_size: str, sinks: str) -> Kernel:
    """One head of a row with tiles in several pieces: merge its partials in order of position.

    Arguments: merges, partials, states, KV heads, out, window, sinks. A merge is int32 [6]: row,
    context length, number of the row's first partial, partials from one tile to the next and from
    one KV head to the next, first tile. If this is not 0, the merge begins with the row's state.
    """
    dim = int(head_dim)
    group = int(group_size)
    at = scratch_areas(dim, group)
    merge_stats = merge_stats_kernel(isa)
    scale_add = scale_add_kernel(isa, dim)
    divide = divide_kernel(isa, dim, sinks == "1")

    partial_bytes = 64 + 4 * dim
    at_stats = at["tile_stats"]
    at_maxima = at["maxima"]
    at_sums = at["sums"]
    at_out = at["out"]

    arguments = fields(7)
    merge_of = fields(MERGE_INTS, I32)

    def kernel(args, tile, scratch):
        merges, partials, states, kv_heads, out, window, sinks_at = arguments(args)
        heads = kv_heads * group
        row, context, base, per_tile, per_head, origin = merge_of(
            merges + 4 * MERGE_INTS * (tile // heads)
        )
        head = tile % heads
        target = out + 4 * dim * (row * heads + head)
        stats = scratch + at_stats
        total = scratch + at_out
        if origin:
            state = states + STATE_BYTES * (row * heads + head)
            store_f32(scratch + at_maxima, load_f32(state))
            store_f32(scratch + at_sums, load_f32(state + 4))
            _copy(target, total, 4 * dim)
        else:
            store_f32(scratch + at_maxima, MASKED_SCORE)
            store_f32(scratch + at_sums, 0.0)
            for i in range(dim):
                store_f32(total + 4 * i, 0.0)
        base += head // group * per_head + head % group
        first = max(origin, _first_tile(context, window))
        for t in range(first, (context + TILE_TOKENS - 1) // TILE_TOKENS):
            place = partials + (base + (t - origin) * per_tile) * partial_bytes
            store_f32(stats, load_f32(place))
            store_f32(stats + 4 * STATS_LANES, load_f32(place + 4))
            merge_stats(scratch + at_maxima, scratch + at_sums, stats)
            scale_add(total, place + 64, stats + 8 * STATS_LANES, stats + 12 * STATS_LANES)
        divide(target, total, scratch + at_sums, scratch + at_maxima, sinks_at + 4 * head)

    return KERNEL_SIGNATURE, kernel
