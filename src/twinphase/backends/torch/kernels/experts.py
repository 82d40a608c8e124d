"""A mixture of experts without the host: the device finds the rows of each expert.

A (row, choice) pair is numbered row * used + choice. Pairs are sorted by their expert and cut into
tiles of rows that have one expert each. The shapes alone limit the number of tiles; surplus tiles
are empty. The linear kernel reads from its tile which expert's weights it multiplies with which
rows: one launch for all experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from twinphase.backends.torch.kernels.tiles import FEW, TILES, rows_of_program, tile_of
from twinphase.blueprint import Experts

BLOCK = 512


@dataclass(frozen=True)
class Routed:
    """Where the pairs of a step go.

    Attributes:
        weights: float32 [rows, used], of each chosen expert.
        pairs: int32 [rows * used], sorted by expert; the order among equals is kept.
        tiles: int32 [3, tiles]: an expert, the first of the tile's `pairs`, and the end of the
            expert's pairs; the tile is empty unless the end is larger.
        rows: maximum pairs of a tile.
        used: consecutive pairs that share a row of `linear`'s input: `used`, or 1 after the first
            product.
        few: whether reading the weights dominates the time.
    """

    weights: Tensor
    pairs: Tensor
    tiles: Tensor
    rows: int
    used: int
    few: bool


@triton.jit
def choose_kernel(
    logits_ptr,
    chosen_ptr,
    weights_ptr,
    num_experts,
    USED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest logits of a row, the first of equals, and their softmax over all or chosen."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    k = tl.arange(0, CHOICES)
    left = tl.load(
        logits_ptr + row * num_experts + e, mask=e < num_experts, other=float("-inf")
    ).to(tl.float32)
    p = tl.exp(left - tl.max(left, 0))
    p = p / tl.sum(p, 0)
    # With NaN there would be no largest, and each index has to exist.
    left = tl.where(left == left, left, float("-inf"))
    chosen = tl.zeros((CHOICES,), tl.int32)
    weights = tl.zeros((CHOICES,), tl.float32)
    total = 0.0
    for i in tl.static_range(USED):
        best = tl.min(tl.where(left == tl.max(left, 0), e, BLOCK), 0)
        weight = tl.sum(tl.where(e == best, p, 0.0), 0)
        chosen = tl.where(k == i, best, chosen)
        weights = tl.where(k == i, weight, weights)
        total = total + weight
        left = tl.where(e == best, float("-inf"), left)
    if RENORMALIZE:
        weights = weights / total
    tl.store(chosen_ptr + row * USED + k, chosen, mask=k < USED)
    tl.store(weights_ptr + row * USED + k, weights, mask=k < USED)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def sort_kernel(
    chosen_ptr,
    pairs_ptr,
    tiles_ptr,
    num_pairs,
    num_tiles,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One expert's pairs and tiles, after those of earlier experts; BINS exceeds the experts."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    i = tl.arange(0, BLOCK)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        chosen = tl.load(chosen_ptr + start + i, mask=start + i < num_pairs, other=BINS - 1)
        counts += tl.histogram(chosen, BINS)
    own = tl.sum(tl.where(bins == expert, counts, 0), 0)
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    tile = tl.sum(tl.where(bins < expert, (counts + ROWS - 1) // ROWS, 0), 0)
    last_tile = tile + (own + ROWS - 1) // ROWS
    for start in range(tile, last_tile, BLOCK):
        at = tiles_ptr + start + i
        inside = start + i < last_tile
        tl.store(at, expert + tl.zeros_like(i), mask=inside)
        tl.store(at + num_tiles, first + (start + i - tile) * ROWS, mask=inside)
        tl.store(at + 2 * num_tiles, first + own + tl.zeros_like(i), mask=inside)
    if expert == tl.num_programs(0) - 1:
        for start in range(last_tile, 3 * num_tiles, BLOCK):
            at = start + i
            tl.store(
                tiles_ptr + at,
                tl.zeros_like(i),
                mask=(at < 3 * num_tiles) & (at % num_tiles >= last_tile),
            )
    if own > 0:
        for start in range(0, num_pairs, BLOCK):
            mine = (
                tl.load(chosen_ptr + start + i, mask=start + i < num_pairs, other=BINS - 1)
                == expert
            )
            behind = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(pairs_ptr + first + behind - 1, start + i, mask=mine)
            first += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def combine_kernel(
    results_ptr, weights_ptr, out_ptr, width, USED: tl.constexpr, BLOCK: tl.constexpr
):
    """A part of a row of out = sum of weights * results, in the order of the choices."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(USED):
        result = tl.load(
            results_ptr + (row * USED + k) * width + at, mask=at < width, other=0.0
        ).to(tl.float32)
        total += tl.load(weights_ptr + row * USED + k) * result
    tl.store(out_ptr + row * width + at, total, mask=at < width)


def route(logits: Tensor, experts: Experts, capability: int) -> Routed:
    """The experts of each row of the router's `logits` [rows, experts.count]."""
    rows = len(logits)
    count = experts.count
    used = experts.used
    device = logits.device
    weights = torch.empty(rows, used, dtype=torch.float32, device=device)
    # Each by itself: Triton compiles again for pointers that are not multiples of 16 bytes.
    chosen, pairs = (torch.empty(rows * used, dtype=torch.int32, device=device) for _ in range(2))
    average = max(1, rows * used // count)
    few = average <= FEW
    of_tile = rows_of_program(average, tile_of(TILES[few], capability))
    # An expert that has pairs fills all of its tiles but one, which has at least one row.
    most = (rows * used + min(count, rows * used) * (of_tile - 1)) // of_tile
    tiles = torch.empty(3, most, dtype=torch.int32, device=device)
    if rows:
        choose_kernel[(rows,)](
            logits.contiguous(),
            chosen,
            weights,
            count,
            USED=used,
            RENORMALIZE=experts.renormalize,
            CHOICES=triton.next_power_of_2(used),
            BLOCK=triton.next_power_of_2(count),
            num_warps=1,
        )
        bins = max(32, triton.next_power_of_2(count + 1))
        sort_kernel[(count,)](
            chosen,
            pairs,
            tiles,
            len(pairs),
            most,
            ROWS=of_tile,
            BINS=bins,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return Routed(weights, pairs, tiles, of_tile, used, few)


def combine(results: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each row's `results` [rows * used, width], float32 [rows, width]."""
    (rows, used) = weights.shape
    width = results.shape[1]
    out = torch.empty(rows, width, dtype=torch.float32, device=results.device)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        combine_kernel[grid](results, weights, out, width, USED=used, BLOCK=BLOCK, num_warps=4)
    return out
