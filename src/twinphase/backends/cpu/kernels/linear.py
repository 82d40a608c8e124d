"""Linear layers on quantized weights, both phases: a register tile of rows x outputs, and the loops around it.

Prefill has many rows: the widest tile, each weight unpacked once for all its rows. Decode has one or a few: the
narrow tiles, bound by how fast weights stream from memory. Every row's sum runs over the groups in the same order
whatever the tile, so a row's bits do not depend on how many others are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import njit

from twinphase.backends.cpu.emit import F16, F32, I8, I16, I32, Emit, Value, vector
from twinphase.backends.cpu.formats import FORMATS, GROUP, STRIP, SUPER, PackedFormat
from twinphase.backends.cpu.intrinsics import KERNEL_SIGNATURE, emitted, fields, load_i64
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.tiling import SLOT

__all__ = ["dense_experts", "dense_linear", "quantized_experts", "quantized_linear"]


AHEAD_LINES = 3  # lines of the next strip's weights that a tile asks for in each group
FEWEST_AHEAD = 4  # rows of the smallest tile that does: fewer are never one of several


class Inputs(NamedTuple):
    """Addresses of a tile's first input row, and the bytes between rows."""

    data: Value
    data_stride: Value
    scale: Value
    fsum: Value
    scale_stride: Value
    isum: Value


class Weights(NamedTuple):
    """A strip's weights, and those to fetch while a tile computes: from `ahead` on, `step` bytes for each group."""

    address: Value
    groups: Value
    block: Value  # first block of 16 outputs
    ahead: Value
    step: Value

    def fetch(self, e: Emit, g: Value) -> None:
        """Ask for what comes next, in iteration g."""
        for line in range(AHEAD_LINES):
            e.prefetch(self.ahead, e.mul(g, self.step), 64 * line)


class _Tile:
    """Emits one register tile: `rows` rows times `vectors` vectors of outputs."""

    def __init__(self, e: Emit, fmt: PackedFormat, rows: int, vectors: int, block: Value) -> None:
        self.e, self.fmt, self.rows, self.vectors = e, fmt, rows, vectors
        self.lanes = e.isa.lanes
        self.ints, self.floats = vector(I32, self.lanes), vector(F32, self.lanes)
        # Byte offsets of the first block: 0, or those of the strip's second block of 16 outputs.
        self.low_at = e.mul(block, 64)
        self.scale_at = e.mul(block, 16 * fmt.scale_size)
        self.shared_at = e.mul(block, 32)

    def codes(self, record: Value, quad: int, n: int) -> Value:
        """Codes of 4 inputs (the quad) of vector n's outputs, bytes in int32 lanes."""
        e, b, fmt = self.e, self.e.b, self.fmt
        per_block = 16 // self.lanes
        block, part = n // per_block, n % per_block * 4 * self.lanes
        if fmt.bits == 8:
            return e.load(self.ints, record, self.low_at, (2 * quad + block) * 64 + part)
        low = e.load(self.ints, record, self.low_at, (2 * (quad // 2) + block) * 64 + part)
        low = b.and_(b.lshr(low, e.splat(self.ints, 4 * (quad % 2))), e.splat(self.ints, 0x0F0F0F0F))
        if fmt.values:
            return e.lookup(low, [value + 128 for value in fmt.values])
        if not fmt.plane_lines:
            return low
        high_bits = fmt.bits - 4
        per_line = 8 // fmt.plane_lines  # quads whose high bits share a line
        line = 2 * 4 * 64 + (2 * (quad // per_line) + block) * 64 + part
        shift = high_bits * (quad % per_line) - 4
        plane = e.load(self.ints, record, self.low_at, line)
        moved = b.shl(plane, e.splat(self.ints, -shift)) if shift < 0 else b.lshr(plane, e.splat(self.ints, shift))
        mask = 0x10101010 if high_bits == 1 else 0x30303030
        return b.or_(low, b.and_(moved, e.splat(self.ints, mask)))

    def scales(self, address: Value, offset: int, header: tuple[Value, int] | None, n: int, signed: bool) -> Value:
        """Scales (or minima) of vector n's outputs, float32."""
        e, b = self.e, self.e.b
        if self.fmt.exponents:  # 0, the padding's, is 0
            small = e.load(vector(I8, self.lanes), address, self.scale_at, offset + n * self.lanes)
            power = b.bitcast(b.shl(b.zext(small, self.ints), e.splat(self.ints, 23)), self.floats)
            return b.fmul(power, e.splat(self.floats, 0.5))
        if header is None:
            return e.widen(e.load(vector(F16, self.lanes), address, self.scale_at, offset + 2 * n * self.lanes))
        small = e.load(vector(I8, self.lanes), address, self.scale_at, offset + n * self.lanes)
        wide = b.sext(small, self.ints) if signed else b.zext(small, self.ints)
        shared = e.widen(e.load(vector(F16, self.lanes), header[0], self.shared_at, header[1] + 2 * n * self.lanes))
        return b.fmul(b.sitofp(wide, self.floats), shared)

    def group(self, record: Value, header: Value | None, x: Inputs, g: Value, totals: list[Any]) -> None:
        """Add one group of 32 inputs to the totals."""
        e, b, fmt = self.e, self.e.b, self.fmt
        signed = e.dot_is_signed(fmt.bits_multiplied)
        offset = 0 if signed else fmt.offset
        quads = fmt.group // 4
        for part in range(GROUP // fmt.group):
            sums = []
            for m in range(self.rows):
                start: Value = e.splat(self.ints, 0)
                if offset:
                    place = e.add(e.mul(e.mul(x.scale_stride, 2), m), e.mul(g, 8), 4 * part * (fmt.group // 16))
                    total = e.load(I32, x.isum, place)
                    if fmt.group == 32:
                        total = b.add(total, e.load(I32, x.isum, place, 4))
                    start = e.broadcast(b.mul(total, ir.Constant(I32, -offset)), self.lanes)
                sums.append([start] * self.vectors)
            for quad in range(part * quads, (part + 1) * quads):
                codes = [self.codes(record, quad, n) for n in range(self.vectors)]
                for m in range(self.rows):
                    where = e.add(e.mul(x.data_stride, m), e.mul(g, GROUP), 4 * quad)
                    inputs = e.broadcast(e.load(I32, x.data, where), self.lanes)
                    for n in range(self.vectors):
                        sums[m][n] = e.dot(sums[m][n], codes[n], inputs, signed=signed)
            self._scale(record, header, x, g, totals, sums, part)

    def _scale(self, record: Value, header: Value | None, x: Inputs, g: Value, totals: list[Any],
               sums: list[list[Value]], part: int) -> None:  # fmt: skip
        e, b, fmt = self.e, self.e.b, self.fmt
        scale_at = fmt.code_bytes + part * STRIP * fmt.scale_size
        shared = None if header is None else (header, 0)
        scales = [self.scales(record, scale_at, shared, n, fmt.signed_scales) for n in range(self.vectors)]
        if fmt.minimum:
            shared = None if header is None else (header, 2 * STRIP)
            at = scale_at + fmt.scale_bytes
            minima = [self.scales(record, at, shared, n, False) for n in range(self.vectors)]
        for m in range(self.rows):
            here = e.add(e.mul(x.scale_stride, m), e.mul(g, 4))
            token_scale = e.broadcast(e.load(F32, x.scale, here), self.lanes)
            token_sum = None
            if fmt.minimum and fmt.group == 32:
                token_sum = e.broadcast(e.load(F32, x.fsum, here), self.lanes)
            elif fmt.minimum:
                total = e.load(I32, x.isum, e.mul(here, 2), 4 * part)
                token_sum = b.fmul(token_scale, e.broadcast(b.sitofp(total, F32), self.lanes))
            for n in range(self.vectors):
                value = b.sitofp(sums[m][n], self.floats)
                total = e.fma(value, b.fmul(scales[n], token_scale), totals[m][n].get())
                if token_sum is not None:
                    total = e.fma(minima[n], token_sum, total)
                totals[m][n].set(total)


def _store_tile(
    e: Emit, totals: list[list[Any]], out: Value, out_stride: Value, residual: Value, stride: Value
) -> None:
    for m, row in enumerate(totals):
        for n, total in enumerate(row):
            value, at = total.get(), 4 * n * e.isa.lanes
            base = e.load(value.type, residual, e.mul(stride, m), at)
            e.store(e.b.fadd(value, base), out, e.mul(out_stride, m), at)


def quantized_linear(isa: Isa, format_name: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus residual[m, n]; x in int8 groups, w packed.

    Arguments: w, groups, strips, data, data stride, scale, fsum, scale stride, isum, out, out stride, residual,
    residual stride, addresses of the row count, of the strips and of the rows that a tile takes. Strides are bytes.
    """
    return _linear_kernel(isa, *_quantized(isa, format_name))


def quantized_experts(isa: Isa, format_name: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """The same, each row by the weights of its expert; rows are sorted by expert. See `_experts_kernel`."""
    return _experts_kernel(isa, *_quantized(isa, format_name))


def dense_linear(isa: Isa, dtype: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """The same on weights of F32, F16 or BF16, strips of [inputs][32 outputs]; x in float32.

    Arguments as above: groups is the number of inputs; scale, fsum and isum are not read.
    """
    return _linear_kernel(isa, *_dense(isa, dtype))


def dense_experts(isa: Isa, dtype: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """The same for experts."""
    return _experts_kernel(isa, *_dense(isa, dtype))


def _quantized(isa: Isa, format_name: str) -> tuple[Any, int, int]:
    """What emits a register tile of packed weights, bytes of a record and of a header."""
    fmt = FORMATS[format_name]
    per_header = SUPER if fmt.nested else 1
    step = fmt.header_bytes + per_header * fmt.record_bytes

    def write(e: Emit, rows: int, vectors: int, w: Weights, x: Inputs) -> list[list[Any]]:
        tile = _Tile(e, fmt, rows, vectors, w.block)
        totals = [[e.variable(e.splat(tile.floats, 0.0)) for _ in range(vectors)] for _ in range(rows)]
        with e.loop(0, e.b.sdiv(w.groups, e.i64(per_header))) as i:
            header = e.add(w.address, e.mul(i, step))
            if not fmt.nested:
                if rows >= FEWEST_AHEAD:
                    w.fetch(e, i)
                tile.group(header, None, x, i, totals)
            else:
                with e.loop(0, per_header) as j:
                    record = e.add(header, fmt.header_bytes, e.mul(j, fmt.record_bytes))
                    g = e.add(e.mul(i, per_header), j)
                    if rows >= FEWEST_AHEAD:
                        w.fetch(e, g)
                    tile.group(record, header, x, g, totals)
        return totals

    return write, fmt.record_bytes, fmt.header_bytes


def _dense(isa: Isa, dtype: str) -> tuple[Any, int, int]:
    """The same for dense weights."""
    element, size = {"F32": (F32, 4), "F16": (F16, 2), "BF16": (I16, 2)}[dtype]
    floats = vector(F32, isa.lanes)

    def widened(e: Emit, raw: Value) -> Value:
        if dtype == "F16":
            return e.widen(raw)
        if dtype == "BF16":
            wide = e.b.zext(raw, vector(I32, isa.lanes))
            return e.b.bitcast(e.b.shl(wide, e.splat(wide.type, 16)), floats)
        return raw

    def write(e: Emit, rows: int, vectors: int, w: Weights, x: Inputs) -> list[list[Any]]:
        totals = [[e.variable(e.splat(floats, 0.0)) for _ in range(vectors)] for _ in range(rows)]
        with e.loop(0, w.groups) as k:
            at = e.add(w.address, e.mul(k, STRIP * size), e.mul(w.block, 16 * size))
            loads = [e.load(vector(element, isa.lanes), at, n * isa.lanes * size) for n in range(vectors)]
            weights = [widened(e, raw) for raw in loads]
            for m in range(rows):
                value = e.broadcast(e.load(F32, x.data, e.mul(x.data_stride, m), e.mul(k, 4)), isa.lanes)
                for n in range(vectors):
                    totals[m][n].set(e.fma(value, weights[n], totals[m][n].get()))
        return totals

    return write, STRIP * size, 0


def _strips_kernel(isa: Isa, write: Any, record: int, header: int) -> Any:
    """Numba function of some rows through some strips: the loops around register tiles of every height.

    Args:
        isa: the path.
        write: emits a tile of (rows, vectors of outputs) and returns its totals.
        record: bytes of a group of a strip.
        header: bytes in front of every `SUPER` records, or 0.
    """
    pieces = 1 if isa.lanes == 16 else 2  # a narrow register file holds one block of 16 outputs
    columns, nested = STRIP // pieces, header > 0
    most = isa.linear_rows

    def tiles(e: Emit, size: Value, w: Value, groups: Value, data: Value, data_stride: Value, scale: Value, fsum: Value,
              scale_stride: Value, isum: Value, out: Value, out_stride: Value, residual: Value, residual_stride: Value,
              block: Value, ahead: Value, step: Value) -> None:  # fmt: skip
        for rows in range(most, 0, -1):
            with e.b.if_then(e.b.icmp_signed("==", size, e.i64(rows))):
                x = Inputs(data, data_stride, scale, fsum, scale_stride, isum)
                totals = write(e, rows, columns // isa.lanes, Weights(w, groups, block, ahead, step), x)
                _store_tile(e, totals, out, out_stride, residual, residual_stride)

    tile_of = emitted(isa, 16, tiles)

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def run(w: int, groups: int, first_strip: int, end_strip: int, data: int, data_stride: int, scale: int, fsum: int,
            scale_stride: int, isum: int, out: int, out_stride: int, residual: int, residual_stride: int,
            first_row: int, rows: int) -> None:  # fmt: skip
        strip_bytes = groups * record
        if nested:
            strip_bytes += groups // SUPER * header
        blocks = (rows + most - 1) // most  # of as equal heights as can be
        # Each of several blocks fetches its share of the next strip; a single one keeps the memory busy by itself.
        step = 0 if blocks == 1 else min(64 * AHEAD_LINES, (record // 64 + blocks) // blocks * 64)
        for s in range(first_strip, end_strip):
            ahead = data if blocks == 1 else w + (s + 1) * strip_bytes
            for piece in range(pieces):
                column = 4 * (s * STRIP + piece * columns)
                for i in range(blocks):
                    m, end = first_row + i * rows // blocks, first_row + (i + 1) * rows // blocks
                    at = m * scale_stride
                    tile_of(end - m, w + s * strip_bytes, groups, data + m * data_stride, data_stride, scale + at,
                            fsum + at, scale_stride, isum + 2 * at, out + m * out_stride + column, out_stride,
                            residual + m * residual_stride + column, residual_stride, piece, ahead + i * groups * step,
                            step)  # fmt: skip

    return run


def _linear_kernel(isa: Isa, write: Any, record: int, header: int) -> tuple[Any, Callable[[int, int, int], None]]:
    """Tiles of a linear layer: chunks of rows, in each of them strips."""
    run, arguments = _strips_kernel(isa, write, record, header), fields(16)

    def kernel(args: int, tile: int, scratch: int) -> None:
        (w, groups, strips, data, data_stride, scale, fsum, scale_stride, isum, out, out_stride, residual,
         residual_stride, count, per_tile, chunk) = arguments(args)  # fmt: skip
        per_tile, chunk = load_i64(per_tile), load_i64(chunk)
        strip_tiles = (strips + per_tile - 1) // per_tile
        first_row, first_strip = tile // strip_tiles * chunk, tile % strip_tiles * per_tile
        rows = min(load_i64(count) - first_row, chunk)
        run(w, groups, first_strip, min(strips, first_strip + per_tile), data, data_stride, scale, fsum, scale_stride,
            isum, out, out_stride, residual, residual_stride, first_row, rows)  # fmt: skip

    return KERNEL_SIGNATURE, kernel


def _experts_kernel(isa: Isa, write: Any, record: int, header: int) -> tuple[Any, Callable[[int, int, int], None]]:
    """Tiles of the same linear layer of many experts: an expert with rows, of it strips.

    Arguments: w of the first expert, bytes to the next, groups, strips, data, data stride, scale, fsum, scale stride,
    isum, out, out stride, bias of the first expert, bytes to the next, slots (`routing.py`), address of the strips
    that a tile takes. There are as many tiles as experts that could have rows: those of empty slots do nothing.
    """
    run, arguments, slot_of = _strips_kernel(isa, write, record, header), fields(16), fields(SLOT, I32)

    def kernel(args: int, tile: int, scratch: int) -> None:
        (w, w_stride, groups, strips, data, data_stride, scale, fsum, scale_stride, isum, out, out_stride, bias,
         bias_stride, slots, per_tile) = arguments(args)  # fmt: skip
        per_tile = load_i64(per_tile)
        strip_tiles = (strips + per_tile - 1) // per_tile
        first_strip = tile % strip_tiles * per_tile
        expert, first, end = slot_of(slots + 4 * SLOT * (tile // strip_tiles))
        if first < end:
            run(w + expert * w_stride, groups, first_strip, min(strips, first_strip + per_tile), data, data_stride,
                scale, fsum, scale_stride, isum, out, out_stride, bias + expert * bias_stride, 0, first,
                end - first)  # fmt: skip

    return KERNEL_SIGNATURE, kernel
