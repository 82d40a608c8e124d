"""Attention over the paged KV cache: flash-style (Dao et al., 2022, arXiv:2205.14135), by phase.

A context is cut into spans at fixed absolute positions. Within a span the softmax runs online, tile
after tile; spans are merged in order. Prefill does so in one program, decode has a program for each
span and one that merges, so that a single row keeps the whole device busy: both add in the same
order in every step. The query heads of one KV head are rows of one tile, which reads its
keys and values once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinphase.backends.torch.kernels.tiles import tile_of

# Positions of a tile and of a span; every sum depends on them.
KEYS = 32
SPAN = 512
# Limits on query rows times heads of a group in one program; of sums in all by compute capability.
PREFILL_ROWS = 128
PREFILL_SUMS = {0: 64 * 128, 90: 128 * 128, 120: 64 * 128}
# On 9.0, 64 rows are the least that the unit of prefill (`wgmma`) multiplies: a smaller tile would
# use another unit, whose sums round differently.
DECODE_ROWS = {0: 16, 90: 64, 120: 16}
# By whether it is decode. With fewer warps the two sums of prefill spill.
WARPS = {True: 4, False: 8}
STAGES = 2


class Shape(NamedTuple):
    """Sizes and options of a layer's attention; 0 stands for no window and no softcap."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    softcap: float
    window: int


class Tiles(NamedTuple):
    """Programs of one phase: int64 [tiles] each, the sequence and its first and end row.

    `rows` are rows times heads of a group in a program, `longest` is the longest context.
    """

    sequence: Tensor
    first: Tensor
    end: Tensor
    rows: int
    longest: int


def columns_of(head_dim: int) -> int:
    """Columns of a tile: a power of two, and at least the minimum of a tensor core."""
    return max(16, triton.next_power_of_2(head_dim))


def rows_of_tile(group: int, head_dim: int, decode: bool, capability: int = 0) -> int:
    """Rows times heads of a group in a program, a power of two."""
    if decode:
        wanted = tile_of(DECODE_ROWS, capability)
    else:
        wanted = min(PREFILL_ROWS, tile_of(PREFILL_SUMS, capability) // columns_of(head_dim))
    return max(wanted, triton.next_power_of_2(group))


@triton.jit
def _merge(top, weight, total, top2, weight2, total2):
    """Merges two parts of a softmax: largest logit, sum of exponentials, and weighted values."""
    new = tl.maximum(top, top2)
    safe = tl.where(new == float("-inf"), 0.0, new)
    one = tl.exp(top - safe)
    other = tl.exp(top2 - safe)
    return new, weight * one + weight2 * other, total * one[:, None] + total2 * other[:, None]


@triton.jit
def _span(
    q,
    positions,
    keys_ptr,
    values_ptr,
    table_ptr,
    kv_head,
    start,
    end,
    scale,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The part of positions `start` to `end`; a tile that a row does not see keeps its bits."""
    d = tl.arange(0, COLUMNS)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(start, end, TILE):
        at = tile + tl.arange(0, TILE)
        block = tl.load(table_ptr + at // BLOCK_SIZE, mask=at < end, other=0)
        slot = ((block * BLOCK_SIZE + at % BLOCK_SIZE) * KV_HEADS + kv_head)[:, None] * DIM + d
        inside = (at < end)[:, None] & (d < DIM)
        k = tl.load(keys_ptr + slot, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP > 0:
            scores = SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)  # tanh
        seen = at[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen &= at[None, :] > positions[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(scores - safe[:, None])
        shrink = tl.exp(top - safe)
        v = tl.load(values_ptr + slot, mask=inside, other=0.0)
        weight = weight * shrink + tl.sum(p, 1)
        total = tl.dot(p.to(v.dtype), v, total * shrink[:, None], input_precision=PRECISION)
        top = new
    return top, weight, total


@triton.jit
def _queries(
    q_ptr,
    positions_ptr,
    first,
    end,
    kv_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Heads of a group of rows `first` to `end`: queries, offsets, which exist, and positions."""
    i = tl.arange(0, ROWS)
    d = tl.arange(0, COLUMNS)[None, :]
    row = first + i // GROUP
    real = (row < end) & (i // GROUP < ROWS // GROUP)
    at = (row * HEADS + kv_head * GROUP + i % GROUP)[:, None] * DIM + d
    inside = real[:, None] & (d < DIM)
    return (
        tl.load(q_ptr + at, mask=inside, other=0.0),
        at,
        inside,
        tl.load(positions_ptr + row, mask=real, other=-1),
    )


@triton.jit(do_not_specialize=["table_width"])
def prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    sinks_ptr,
    out_ptr,
    positions_ptr,
    tables_ptr,
    sequence_ptr,
    first_ptr,
    end_ptr,
    table_width,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The rows of a tile, all spans in order; KV tiles that no row sees are skipped."""
    # The last rows first: they see the most, so they take longest.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    first = tl.load(first_ptr + tile)
    end = tl.load(end_ptr + tile)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    q, at, inside, positions = _queries(
        q_ptr, positions_ptr, first, end, kv_head, HEADS, GROUP, DIM, ROWS, COLUMNS
    )
    lowest = tl.load(positions_ptr + first)
    length = tl.load(positions_ptr + end - 1) + 1
    begin = tl.maximum(lowest - WINDOW + 1, 0) // TILE * TILE if WINDOW > 0 else lowest * 0
    table_ptr = tables_ptr + tl.load(sequence_ptr + tile) * table_width
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks_ptr + kv_head * GROUP + tl.arange(0, ROWS) % GROUP)
        weight += 1.0
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for span in range(begin // SPAN_SIZE * SPAN_SIZE, length, SPAN_SIZE):
        top2, weight2, total2 = _span(
            q,
            positions,
            keys_ptr,
            values_ptr,
            table_ptr,
            kv_head,
            tl.maximum(span, begin),
            tl.minimum(span + SPAN_SIZE, length),
            scale,
            KV_HEADS,
            DIM,
            BLOCK_SIZE,
            SOFTCAP,
            WINDOW,
            ROWS,
            COLUMNS,
            TILE,
            PRECISION,
        )
        top, weight, total = _merge(top, weight, total, top2, weight2, total2)
    tl.store(
        out_ptr + at,
        (total / tl.where(weight > 0, weight, 1.0)[:, None]).to(out_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit(do_not_specialize=["table_width"])
def decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tops_ptr,
    weights_ptr,
    totals_ptr,
    positions_ptr,
    tables_ptr,
    sequence_ptr,
    first_ptr,
    end_ptr,
    table_width,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One span of the rows of a tile; `merge_kernel` merges the results."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    first = tl.load(first_ptr + tile)
    end = tl.load(end_ptr + tile)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    lowest = tl.load(positions_ptr + first)
    length = tl.load(positions_ptr + end - 1) + 1
    begin = tl.maximum(lowest - WINDOW + 1, 0) // TILE * TILE if WINDOW > 0 else lowest * 0
    start = tl.maximum(part * SPAN_SIZE, begin)
    stop = tl.minimum((part + 1) * SPAN_SIZE, length)
    if start < stop:
        q, _, _, positions = _queries(
            q_ptr, positions_ptr, first, end, kv_head, HEADS, GROUP, DIM, ROWS, COLUMNS
        )
        top, weight, total = _span(
            q,
            positions,
            keys_ptr,
            values_ptr,
            tables_ptr + tl.load(sequence_ptr + tile) * table_width,
            kv_head,
            start,
            stop,
            scale,
            KV_HEADS,
            DIM,
            BLOCK_SIZE,
            SOFTCAP,
            WINDOW,
            ROWS,
            COLUMNS,
            TILE,
            PRECISION,
        )
        at = (
            (tile * KV_HEADS + kv_head).to(tl.int64) * tl.num_programs(2) + part
        ) * ROWS + tl.arange(0, ROWS)
        tl.store(tops_ptr + at, top)
        tl.store(weights_ptr + at, weight)
        tl.store(totals_ptr + at[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], total)


@triton.jit(do_not_specialize=["num_parts"])
def merge_kernel(
    tops_ptr,
    weights_ptr,
    totals_ptr,
    sinks_ptr,
    out_ptr,
    positions_ptr,
    first_ptr,
    end_ptr,
    num_parts,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN_SIZE: tl.constexpr,
):
    """The spans of a tile, in order."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    first = tl.load(first_ptr + tile)
    end = tl.load(end_ptr + tile)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    lowest = tl.load(positions_ptr + first)
    length = tl.load(positions_ptr + end - 1) + 1
    begin = tl.maximum(lowest - WINDOW + 1, 0) // TILE * TILE if WINDOW > 0 else lowest * 0
    i = tl.arange(0, ROWS)
    d = tl.arange(0, COLUMNS)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks_ptr + kv_head * GROUP + i % GROUP)
        weight += 1.0
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for span in range(begin // SPAN_SIZE * SPAN_SIZE, length, SPAN_SIZE):
        at = ((tile * KV_HEADS + kv_head).to(tl.int64) * num_parts + span // SPAN_SIZE) * ROWS + i
        part = tl.load(totals_ptr + at[:, None] * COLUMNS + d)
        top, weight, total = _merge(
            top, weight, total, tl.load(tops_ptr + at), tl.load(weights_ptr + at), part
        )
    row = first + i // GROUP
    inside = ((row < end) & (i // GROUP < ROWS // GROUP))[:, None] & (d < DIM)
    out = (total / tl.where(weight > 0, weight, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(
        out_ptr + (row * HEADS + kv_head * GROUP + i % GROUP)[:, None] * DIM + d, out, mask=inside
    )


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    shape: Shape,
    sinks: Tensor | None,
    positions: Tensor,
    tables: Tensor,
    tiles: Tiles,
    decode: bool,
) -> None:
    """softmax(scale * q k^T) v of the rows of `tiles`, into their rows of `out`.

    `q` and `out` are [rows, num_heads, head_dim], `keys` and `values` [slots, kv_heads, head_dim],
    `tables` int64 [sequences, blocks], `positions` int64 [rows].
    """
    sizes = {
        "HEADS": shape.num_heads,
        "KV_HEADS": shape.num_kv_heads,
        "DIM": shape.head_dim,
        "WINDOW": shape.window,
        "ROWS": tiles.rows,
        "COLUMNS": columns_of(shape.head_dim),
        "TILE": KEYS,
        "SPAN_SIZE": SPAN,
        "num_warps": WARPS[decode],
        "num_stages": STAGES,
    }
    products = {
        "BLOCK_SIZE": shape.block_size,
        "SOFTCAP": shape.softcap,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
    count = len(tiles.sequence)
    has_sinks = sinks is not None
    where = positions, tables, tiles.sequence, tiles.first, tiles.end, tables.stride(0), shape.scale
    if not decode:
        prefill_kernel[(count, shape.num_kv_heads)](
            q, keys, values, sinks, out, *where, HAS_SINKS=has_sinks, **products, **sizes
        )
        return
    parts = triton.cdiv(tiles.longest, SPAN)
    rows = torch.empty(
        2, count, shape.num_kv_heads, parts, tiles.rows, dtype=torch.float32, device=q.device
    )
    totals = rows.new_empty(*rows.shape[1:], sizes["COLUMNS"])
    decode_kernel[(count, shape.num_kv_heads, parts)](
        q, keys, values, rows[0], rows[1], totals, *where, **products, **sizes
    )
    merge_kernel[(count, shape.num_kv_heads)](
        rows[0],
        rows[1],
        totals,
        sinks,
        out,
        positions,
        tiles.first,
        tiles.end,
        parts,
        HAS_SINKS=has_sinks,
        **sizes,
    )
