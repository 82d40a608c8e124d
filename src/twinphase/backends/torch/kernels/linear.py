"""Linear layers with weights that stay quantized: unpacked in registers, for tensor cores.

Few rows stream the weights, many rows share them; both add a row's products in the same order: 32
inputs after 32 within a chunk of `CHUNK` inputs, and then chunk after chunk. Where few rows meet
few outputs, each chunk has a program of its own, so that the whole device reads weights, and the
last program to finish adds the chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import TritonError as TritonError

from twinphase.backends.torch.kernels.experts import Routed
from twinphase.backends.torch.kernels.tiles import (
    FEW,
    MULTIPROCESSORS,
    TILES,
    Tile,
    rows_of_program,
    tile_for,
    tile_for_rows,
    tile_of,
)
from twinphase.backends.torch.weights import PAIR, Packed

# Inputs that one sum covers; the bits of every sum depend on it.
CHUNK = 4096
# With fewer programs than this, two per multiprocessor, chunks have programs of their own.
MIN_PROGRAMS = 2 * MULTIPROCESSORS
_finished: dict[torch.device, Tensor] = {}


@triton.jit
def _of_group(pointers, mask, GROUP: tl.constexpr):
    """Scales or minima of each output for 32 inputs, [outputs, 1 or 32], loaded once for all."""
    values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)[:, None]
    if GROUP == 16:
        behind = tl.load(pointers + 1, mask=mask, other=0.0).to(tl.float32)[:, None]
        values = tl.where(tl.arange(0, 32)[None, :] < 16, values, behind)
    return values


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    minimum_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    pairs_ptr,  # where there are experts, see `Routed`
    tiles_ptr,
    parts_ptr,  # sums of each chunk, and how many programs of a tile have finished
    finished_ptr,
    num_rows,
    num_outputs,
    num_inputs,  # of x
    padded,  # inputs as the weights are stored
    BITS: tl.constexpr,  # 4 or 8, or 0 where the codes are the weights
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT4: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    USED: tl.constexpr,  # pairs of experts that share a row of x; 0 without experts
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    DIVIDED: tl.constexpr,  # a program for each chunk
    PRECISION: tl.constexpr,
):
    """out [rows, outputs] = x [rows, inputs] @ weights.T + bias + residual, added in float32.

    With experts a row of `out` is a pair of `Routed`.
    """
    # All rows of some outputs, then the next outputs: programs that run at once read the same
    # weights.
    tile = tl.program_id(0)
    output = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    n = output[:, None]
    groups = padded // GROUP
    if USED == 0:
        m = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[None, :]
        real = m < num_rows
        row = m
    else:
        num_tiles = tl.num_programs(0)
        first = tl.load(tiles_ptr + num_tiles + tile)
        end = tl.load(tiles_ptr + 2 * num_tiles + tile)
        if first >= end:
            return
        at = (first + tl.arange(0, ROWS))[None, :]
        real = at < end
        m = tl.load(pairs_ptr + at, mask=real, other=0).to(tl.int64)
        row = m // USED
        skipped = tl.load(tiles_ptr + tile).to(tl.int64) * num_outputs
        codes_ptr += skipped * (padded // 2 if BITS == 4 else padded)
        if BITS > 0:
            scale_ptr += skipped * groups
        if HAS_MINIMUM:
            minimum_ptr += skipped * groups
        if HAS_BIAS:
            bias_ptr += skipped
    j = tl.arange(0, 32)
    # Sums of this program's tile, without gaps.
    program = tile * tl.num_programs(1) + tl.program_id(1)
    cells = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    if CHUNKS > 1:
        parts_ptr += program.to(tl.int64) * (OUTPUTS * ROWS)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    chunk = tl.program_id(2)
    for _ in range(1 if DIVIDED else CHUNKS):
        total = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for k0 in range(chunk * CHUNK_SIZE, tl.minimum((chunk + 1) * CHUNK_SIZE, padded), 64):
            if BITS == 4:  # one byte holds an input of each half
                packed = tl.load(
                    codes_ptr + n * (padded // 2) + k0 // 2 + j[None, :],
                    mask=n < num_outputs,
                    other=0,
                )
            for half in tl.static_range(2):
                k = k0 + 32 * half + j
                x = tl.load(
                    x_ptr + row * num_inputs + k[:, None],
                    mask=real & (k[:, None] < num_inputs),
                    other=0.0,
                )
                if BITS == 0:
                    known = (n < num_outputs) & (k[None, :] < padded)
                    w = tl.load(codes_ptr + n * padded + k[None, :], mask=known, other=0.0)
                else:
                    if BITS == 4:
                        q = (packed >> (4 * half)) & 15
                        if FLOAT4:  # its bits are those of a float16 that is 2**14 times smaller
                            q = ((q & 8) << 4 | (q & 7) << 1).to(tl.uint16) << 8
                            q = q.to(tl.float16, bitcast=True).to(tl.float32) * 32768
                    else:
                        q = tl.load(
                            codes_ptr + n * padded + k[None, :], mask=n < num_outputs, other=0
                        )
                    group = output * groups + (k0 + 32 * half) // GROUP
                    values = (q.to(tl.float32) - OFFSET) * _of_group(
                        scale_ptr + group, output < num_outputs, GROUP
                    )
                    if HAS_MINIMUM:
                        values += _of_group(minimum_ptr + group, output < num_outputs, GROUP)
                    w = values.to(x_ptr.dtype.element_ty)
                total = tl.dot(w, x, total, input_precision=PRECISION)
        if CHUNKS > 1 and not DIVIDED:
            # Earlier chunks wait in memory: registers for two sums would leave room for half as
            # many programs.
            if chunk > 0:
                total += tl.load(parts_ptr + cells)
            if chunk < CHUNKS - 1:
                tl.store(parts_ptr + cells, total)
                tl.debug_barrier()
            chunk += 1
    if DIVIDED:
        size = tl.num_programs(0) * tl.num_programs(1) * OUTPUTS * ROWS
        tl.store(parts_ptr + chunk * size + cells, total)
        tl.debug_barrier()
        if tl.atomic_add(finished_ptr + program, 1) < CHUNKS - 1:
            return
        tl.store(finished_ptr + program, 0)
        total = tl.load(parts_ptr + cells, cache_modifier=".cg")
        for other in range(1, CHUNKS):
            total += tl.load(parts_ptr + other * size + cells, cache_modifier=".cg")
    inside = (n < num_outputs) & real
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < num_outputs, other=0.0)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + m * num_outputs + n, mask=inside, other=0.0)
    tl.store(out_ptr + m * num_outputs + n, total.to(out_ptr.dtype.element_ty), mask=inside)


def linear(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    capability: int = 0,
    tile: Tile | None = None,
    routed: Routed | None = None,
) -> Tensor:
    """x @ weight.T + bias + residual, [rows, outputs]; float32 if anything is added.

    Without a `tile`, the tables choose it. With `routed`, weights and biases have experts in front,
    and the result has a row for each pair.
    """
    x = x.contiguous()
    rows = len(x) if routed is None else len(routed.pairs)
    outputs = weight.codes.shape[-2]
    added = bias is not None or residual is not None
    out = torch.empty(rows, outputs, dtype=torch.float32 if added else x.dtype, device=x.device)
    if not rows:
        return out
    shape = weight.bits, outputs, weight.padded, capability
    pairs = None
    tiles = None
    if routed is None:
        tile = tile or tile_for_rows(rows, *shape)
        of_tile = rows_of_program(rows, tile)
        count = triton.cdiv(rows, of_tile)
    else:  # many rows are cut as in the table that ships
        tile = tile_for(True, *shape) if routed.few else tile_of(TILES[False], capability)
        of_tile = routed.rows
        pairs = routed.pairs
        tiles = routed.tiles
        count = routed.tiles.shape[1]
    grid = count, triton.cdiv(outputs, tile.outputs), 1
    chunks = triton.cdiv(weight.padded, CHUNK)
    divided = chunks > 1 and rows <= FEW and routed is None and count * grid[1] < MIN_PROGRAMS
    parts = None
    finished = None
    if chunks > 1:
        cells = grid[0] * grid[1] * of_tile * tile.outputs
        parts = torch.empty(chunks if divided else 1, cells, dtype=torch.float32, device=x.device)
    if divided:
        grid = *grid[:2], chunks
        finished = _finished.get(x.device)
        if finished is None:
            finished = torch.zeros(MIN_PROGRAMS, dtype=torch.int32, device=x.device)
            _finished[x.device] = finished
    linear_kernel[grid](
        x,
        weight.codes,
        weight.scale,
        weight.minimum,
        bias,
        residual,
        out,
        pairs,
        tiles,
        parts,
        finished,
        rows,
        outputs,
        x.shape[1],
        weight.padded,
        BITS=weight.bits,
        GROUP=weight.group,
        OFFSET=weight.offset,
        FLOAT4=weight.float4,
        HAS_MINIMUM=weight.minimum is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        USED=routed.used if routed else 0,
        ROWS=of_tile,
        OUTPUTS=tile.outputs,
        CHUNKS=chunks,
        CHUNK_SIZE=CHUNK,
        DIVIDED=divided,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


assert PAIR == 64, "the kernel unpacks nibbles of two groups of 32"
