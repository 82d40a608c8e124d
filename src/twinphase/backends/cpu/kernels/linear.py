"""Linear layers of both phases: a register tile of rows x outputs, and the loops around it.

Prefill has many rows: the widest tile, each weight unpacked once for all its rows. Decode has one
or a few: the narrow tiles, bound by how fast weights stream from memory. Every row's sum runs over
the groups in the same order in every tile, so a row's bits do not depend on the number of rows
computed with it.
"""

from __future__ import annotations

import itertools
from typing import Any

from numba import njit

from twinphase.backends.cpu.emit import F16, F32, I16, I32, Emit, Value, vector
from twinphase.backends.cpu.formats import FORMATS, GROUPS_PER_SUPERBLOCK, STRIP_OUTPUTS
from twinphase.backends.cpu.intrinsics import (
    KERNEL_SIGNATURE,
    Kernel,
    call_kernel,
    emitted,
    fields,
    load_i64,
)
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.bf16_tiles import strips_in_bf16_tiles
from twinphase.backends.cpu.kernels.gate_tile import write_record
from twinphase.backends.cpu.kernels.linear_tiles import strips_in_matrix_tiles
from twinphase.backends.cpu.kernels.panels import strips_in_panels
from twinphase.backends.cpu.kernels.register_tile import (
    AHEAD_LINES,
    OPERANDS,
    TILE_OPERANDS,
    Inputs,
    RegisterTile,
    Weights,
    store_tile,
    tile_operands,
    totals_in_memory,
)
from twinphase.backends.cpu.kernels.whole_tile import WholeTile
from twinphase.backends.cpu.tiling import (
    GATE_RECORD_BYTES,
    MATRIX_MIN_ROWS,
    SLOT_INTS,
    panel_min_rows,
)

# Arguments of a linear layer's kernel after its operands: how tiles are cut, and their gate.
SIZES = 6


def quantized_linear(isa: Isa, format_name: str) -> Kernel:
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus residual[m, n]; x in int8 groups, w packed.

    Arguments: operands (w, groups, data, data stride, scale, fsum, scale stride, isum, out, out
    stride, residual, residual stride), strips, addresses of the row count, of the strips and of the
    rows that a tile takes; then the address of the gate's kernel and `results_at` (see
    `_linear_kernel`), both 0 without a gate, and the arguments of `gate_tile`. Strides are bytes.
    Where weights are multiplied in bfloat16 tiles, x is as `quantize.round_rows` writes it, and
    scale, fsum and isum are not read.
    """
    if isa.takes_bf16(format_name):
        return _linear_kernel(strips_in_bf16_tiles(isa, format_name))
    return _linear_kernel(_quantized_run(isa, format_name))


def quantized_experts(isa: Isa, format_name: str) -> Kernel:
    """Multiply each row by the weights of its expert; rows are sorted by expert.

    See `_experts_kernel`.
    """
    return _experts_kernel(_quantized_run(isa, format_name))


def dense_linear(isa: Isa, dtype: str) -> Kernel:
    """Multiply float32 rows by F32, F16 or BF16 weights, strips of [inputs][32 outputs].

    Arguments as above: groups is the number of inputs; scale, fsum and isum are not read. Where
    BF16 weights are multiplied in matrix tiles, x is as `quantize.round_rows` writes it, and strips
    are [32 inputs][32 outputs][input].
    """
    if isa.takes_bf16(dtype):
        return _linear_kernel(strips_in_bf16_tiles(isa, dtype))
    return _linear_kernel(_strips_kernel(isa, *_dense(isa, dtype)))


def dense_experts(isa: Isa, dtype: str) -> Kernel:
    """Multiply each row by the dense weights of its expert."""
    return _experts_kernel(_strips_kernel(isa, *_dense(isa, dtype)))


def _quantized_run(isa: Isa, format_name: str) -> Any:
    """Some rows through some strips of packed weights; many rows in panels or matrix tiles."""
    few = _strips_kernel(isa, *_quantized(isa, format_name), packed=True)
    if not isa.takes_panels(FORMATS[format_name]) and not isa.matrix_tiles:
        return few
    some = few
    if isa.takes_panels(FORMATS[format_name]):
        some = strips_in_panels(isa, format_name)
    many = strips_in_matrix_tiles(isa, format_name) if isa.matrix_tiles else some
    from_some = panel_min_rows(isa, FORMATS[format_name])
    from_many = MATRIX_MIN_ROWS

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def few_or_some(operands, first_strip, end_strip, first_row, rows, scratch):
        if rows >= from_some:
            some(operands, first_strip, end_strip, first_row, rows, scratch)
        else:
            few(operands, first_strip, end_strip, first_row, rows, scratch)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def any_number(operands, first_strip, end_strip, first_row, rows, scratch):
        if rows >= from_many:
            many(operands, first_strip, end_strip, first_row, rows, scratch)
        else:
            few_or_some(operands, first_strip, end_strip, first_row, rows, scratch)

    return any_number if isa.matrix_tiles else few_or_some


def _quantized(isa: Isa, format_name: str) -> tuple[Any, int, int]:
    """What emits a register tile of packed weights, bytes of a record and of a header."""
    fmt = FORMATS[format_name]
    kind = WholeTile if isa.whole_scales(fmt) else RegisterTile

    def write(e: Emit, w: Weights, x: Inputs, totals: list[list[Any]]) -> None:
        rows = len(totals)
        tile = kind(e, fmt, rows, len(totals[0]), w.block)

        def fetch(g: Value, record: Value) -> None:
            w.fetch(e, rows, g, record, fmt.record_bytes)

        tile.add_groups(w.address, w.groups, x, totals, fetch)

    return write, fmt.record_bytes, fmt.header_bytes


# Type of a loaded element, and its size in bytes.
DENSE_ELEMENTS = {"F32": (F32, 4), "F16": (F16, 2), "BF16": (I16, 2)}


def dense_values(e: Emit, dtype: str, raw: Value) -> Value:
    """A vector of a dense type's elements in float32."""
    if dtype == "F16":
        return e.widen(raw)
    if dtype == "F32":
        return raw
    ints = vector(I32, raw.type.count)
    wide = e.b.shl(e.b.zext(raw, ints), e.splat(ints, 16))
    return e.b.bitcast(wide, vector(F32, raw.type.count))


def _dense(isa: Isa, dtype: str) -> tuple[Any, int, int]:
    """What emits a register tile of dense weights, bytes of an input's weights, and no header."""
    element, size = DENSE_ELEMENTS[dtype]

    def write(e: Emit, w: Weights, x: Inputs, totals: list[list[Any]]) -> None:
        vectors = len(totals[0])
        with e.loop(0, w.groups) as k:
            at = e.add(w.address, e.mul(k, STRIP_OUTPUTS * size), e.mul(w.block, 16 * size))
            loads = [
                e.load(vector(element, isa.lanes), at, n * isa.lanes * size) for n in range(vectors)
            ]
            weights = [dense_values(e, dtype, raw) for raw in loads]
            for m, row in enumerate(totals):
                value = e.broadcast(
                    e.load(F32, x.data, e.mul(x.data_stride, m), e.mul(k, 4)), isa.lanes
                )
                for n, total in enumerate(row):
                    total.set(e.fma(value, weights[n], total.get()))

    return write, STRIP_OUTPUTS * size, 0


def _strips_kernel(isa: Isa, write: Any, record: int, header: int, packed: bool = False) -> Any:
    """Numba function of some rows through some strips: loops around tiles of every height.

    Args:
        isa: the path.
        write: emits what adds to a tile's totals, for each row a vector or more of outputs.
        record: bytes of a group of a strip.
        header: bytes in front of every `GROUPS_PER_SUPERBLOCK` records, or 0.
        packed: whether weights are quantized.
    """
    pieces = 1 if isa.lanes == 16 else 2  # a narrow register file holds one block of 16 outputs
    columns = STRIP_OUTPUTS // pieces
    nested = header > 0
    most = isa.linear_rows

    vectors = columns // isa.lanes
    floats = vector(F32, isa.lanes)

    def tiles(e: Emit, size, w, groups, block, ahead, step, scratch, *operands):
        weights = Weights(w, groups, block, ahead, step)
        for rows in range(most, 0, -1):
            with e.b.if_then(e.b.icmp_signed("==", size, e.i64(rows))):
                totals: list[list[Any]] = totals_in_memory(e, rows, vectors, scratch, 64)
                if not packed or not isa.keeps_totals_in_memory(rows):
                    totals = [[e.variable(e.splat(floats, 0.0)) for _ in row] for row in totals]
                for total in itertools.chain(*totals):
                    total.set(e.splat(floats, 0.0))
                write(e, weights, Inputs(*operands[:6]), totals)
                store_tile(e, totals, *operands[6:])

    tile_of = emitted(isa, tiles, starred=TILE_OPERANDS)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def run(operands, first_strip, end_strip, first_row, rows, scratch):
        w, groups = operands[:2]
        strip_bytes = groups * record
        if nested:
            strip_bytes += groups // GROUPS_PER_SUPERBLOCK * header
        blocks = (rows + most - 1) // most  # of as equal heights as can be
        # Each of several blocks fetches its share of the next strip; a single one keeps the memory
        # busy by itself.
        step = 0 if blocks == 1 else min(64 * AHEAD_LINES, (record // 64 + blocks) // blocks * 64)
        for s in range(first_strip, end_strip):
            ahead = w + (s + 1) * strip_bytes
            for piece in range(pieces):
                for i in range(blocks):
                    m = first_row + i * rows // blocks
                    end = first_row + (i + 1) * rows // blocks
                    tile_of(
                        end - m,
                        w + s * strip_bytes,
                        groups,
                        piece,
                        ahead + i * groups * step,
                        step,
                        scratch,
                        *tile_operands(operands, m, s * STRIP_OUTPUTS + piece * columns, 0),
                    )

    return run


def _linear_kernel(run: Any) -> Kernel:
    """Tiles of a linear layer: chunks of rows, in each of them strips.

    With the address of a gate's kernel (`gate_tile.py`), strips are pairs, and that kernel writes
    the result. It finds rows in scratch memory at `results_at`; where this is 0, `run` calls it.
    """
    operands_of = fields(OPERANDS)
    sizes_of = fields(SIZES)
    gate_arguments = 8 * (OPERANDS + SIZES)

    def kernel(args, tile, scratch):
        strips, count, per_tile, chunk, gate, results_at = sizes_of(args + 8 * OPERANDS)
        per_tile = load_i64(per_tile)
        chunk = load_i64(chunk)
        strip_tiles = (strips + per_tile - 1) // per_tile
        first_row = tile // strip_tiles * chunk
        first_strip = tile % strip_tiles * per_tile
        end_strip = min(strips, first_strip + per_tile)
        rows = min(load_i64(count) - first_row, chunk)
        operands = operands_of(args)
        out, out_stride = operands[8:10]
        results = scratch + results_at + GATE_RECORD_BYTES
        if results_at:
            out_stride = 4 * STRIP_OUTPUTS * (end_strip - first_strip)
            out = results - first_row * out_stride - 4 * STRIP_OUTPUTS * first_strip
        of_sums = 0 if results_at else gate
        how = (of_sums, args + gate_arguments)
        operands = (*operands[:8], out, out_stride, *operands[10:], *how)
        run(operands, first_strip, end_strip, first_row, rows, scratch)
        if results_at:
            write_record(
                scratch + results_at,
                results,
                out_stride,
                first_row,
                rows,
                first_strip // 2,
                (end_strip - first_strip) // 2,
            )
            call_kernel(gate, args + gate_arguments, 0, scratch + results_at)

    return KERNEL_SIGNATURE, kernel


def _experts_kernel(run: Any) -> Kernel:
    """Tiles of the same linear layer of many experts: experts with rows, and their strips.

    Arguments: operands, w that of the first expert, and in place of the residual the bias of the
    first expert and the bytes to the next one's; bytes to the next expert's w, strips, slots
    (`routing.py`), address of the strips that a tile takes. There are as many tiles as experts that
    could have rows: those of empty slots do nothing.
    """
    operands_of = fields(OPERANDS)
    sizes_of = fields(4)
    slot_of = fields(SLOT_INTS, I32)

    def kernel(args, tile, scratch):
        w_stride, strips, slots, per_tile = sizes_of(args + 8 * OPERANDS)
        per_tile = load_i64(per_tile)
        strip_tiles = (strips + per_tile - 1) // per_tile
        first_strip = tile % strip_tiles * per_tile
        end_strip = min(strips, first_strip + per_tile)
        expert, first, end = slot_of(slots + 4 * SLOT_INTS * (tile // strip_tiles))
        if first < end:
            all_experts = operands_of(args)
            w = all_experts[0] + expert * w_stride
            bias = all_experts[10] + expert * all_experts[11]
            operands = (w, *all_experts[1:10], bias, 0)
            run(operands, first_strip, end_strip, first, end - first, scratch)

    return KERNEL_SIGNATURE, kernel
