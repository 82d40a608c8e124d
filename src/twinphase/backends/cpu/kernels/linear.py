"""Linear layers on quantized weights, both phases: a register tile of rows x outputs, and the loops around it.

Prefill has many rows: the widest tile, each weight unpacked once for all its rows. Decode has one or a few: the
narrow tiles, bound by how fast weights stream from memory. Every row's sum runs over the groups in the same order
whatever the tile, so a row's bits do not depend on how many others are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from twinphase.backends.cpu.formats import FORMATS, GROUP, STRIP, SUPER, PackedFormat
from twinphase.backends.cpu.intrinsics import F16, F32, I8, I16, I32, KERNEL_SIGNATURE, Emit, Value, emitted, load_i64, vector
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.tiling import ROW_CHUNK

__all__ = ["dense_linear", "quantized_linear"]

PREFETCH_BYTES = 8192  # how far ahead a single row asks for weights


class _Tile:
    """Emits one register tile: `rows` rows times `vectors` vectors of outputs."""

    def __init__(self, e: Emit, fmt: PackedFormat, rows: int, vectors: int, block: Value) -> None:
        self.e, self.fmt, self.rows, self.vectors = e, fmt, rows, vectors
        self.lanes = e.isa.lanes
        self.ints, self.floats = vector(I32, self.lanes), vector(F32, self.lanes)
        # Byte offsets of the first block: 0, or those of the strip's second block of 16 outputs.
        self.low_at = e.mul(block, 64 * fmt.low_lines)
        self.plane_at = e.mul(block, 64 * fmt.plane_lines)
        self.scale_at = e.mul(block, 16 * (1 if fmt.nested else 2))
        self.shared_at = e.mul(block, 32)

    def codes(self, record: Value, quad: int, n: int) -> Value:
        """Codes of 4 inputs (the quad) of vector n's outputs, bytes in int32 lanes."""
        e, b, fmt = self.e, self.e.b, self.fmt
        per_block = 16 // self.lanes
        block, part = n // per_block, n % per_block * 4 * self.lanes
        if fmt.bits == 8:
            return e.load(self.ints, record, self.low_at, (block * 8 + quad) * 64 + part)
        low = e.load(self.ints, record, self.low_at, (block * 4 + quad // 2) * 64 + part)
        low = b.and_(b.lshr(low, e.splat(self.ints, 4 * (quad % 2))), e.splat(self.ints, 0x0F0F0F0F))
        if not fmt.plane_lines:
            return low
        high_bits = fmt.bits - 4
        per_line = 8 // fmt.plane_lines  # quads whose high bits share a line
        line = 2 * 4 * 64 + (block * fmt.plane_lines + quad // per_line) * 64 + part
        shift = high_bits * (quad % per_line) - 4
        plane = e.load(self.ints, record, self.plane_at, line)
        moved = b.shl(plane, e.splat(self.ints, -shift)) if shift < 0 else b.lshr(plane, e.splat(self.ints, shift))
        mask = 0x10101010 if high_bits == 1 else 0x30303030
        return b.or_(low, b.and_(moved, e.splat(self.ints, mask)))

    def scales(self, address: Value, offset: int, header: tuple[Value, int] | None, n: int, signed: bool) -> Value:
        """Scales (or minima) of vector n's outputs, float32."""
        e, b = self.e, self.e.b
        if header is None:
            return e.widen(e.load(vector(F16, self.lanes), address, self.scale_at, offset + 2 * n * self.lanes))
        small = e.load(vector(I8, self.lanes), address, self.scale_at, offset + n * self.lanes)
        wide = b.sext(small, self.ints) if signed else b.zext(small, self.ints)
        shared = e.widen(e.load(vector(F16, self.lanes), header[0], self.shared_at, header[1] + 2 * n * self.lanes))
        return b.fmul(b.sitofp(wide, self.floats), shared)

    def group(self, record: Value, header: Value | None, x: dict[str, Value], g: Value, totals: list[Any]) -> None:
        """Add one group of 32 inputs to the totals."""
        e, b, fmt = self.e, self.e.b, self.fmt
        signed = e.dot_is_signed(fmt.bits)
        offset = 0 if signed else fmt.offset
        quads = fmt.group // 4
        for part in range(GROUP // fmt.group):
            sums = []
            for m in range(self.rows):
                start: Value = e.splat(self.ints, 0)
                if offset:
                    place = e.add(e.mul(x["sum_stride"], m), e.mul(g, 8), 4 * part * (fmt.group // 16))
                    total = e.load(I32, x["isum"], place)
                    if fmt.group == 32:
                        total = b.add(total, e.load(I32, x["isum"], place, 4))
                    start = e.broadcast(b.mul(total, ir.Constant(I32, -offset)), self.lanes)
                sums.append([start] * self.vectors)
            for quad in range(part * quads, (part + 1) * quads):
                codes = [self.codes(record, quad, n) for n in range(self.vectors)]
                for m in range(self.rows):
                    where = e.add(e.mul(x["data_stride"], m), e.mul(g, GROUP), 4 * quad)
                    inputs = e.broadcast(e.load(I32, x["data"], where), self.lanes)
                    for n in range(self.vectors):
                        sums[m][n] = e.dot(sums[m][n], codes[n], inputs, signed=signed)
            self._scale(record, header, x, g, totals, sums, part)

    def _scale(self, record: Value, header: Value | None, x: dict[str, Value], g: Value, totals: list[Any],
               sums: list[list[Value]], part: int) -> None:  # fmt: skip
        e, b, fmt = self.e, self.e.b, self.fmt
        scale_at = fmt.code_bytes + part * STRIP * (1 if fmt.nested else 2)
        shared = None if header is None else (header, 0)
        scales = [self.scales(record, scale_at, shared, n, fmt.name == "Q6_K") for n in range(self.vectors)]
        if fmt.minimum:
            shared = None if header is None else (header, 2 * STRIP)
            at = fmt.code_bytes + fmt.scale_bytes
            minima = [self.scales(record, at, shared, n, False) for n in range(self.vectors)]
        for m in range(self.rows):
            here = e.add(e.mul(x["scale_stride"], m), e.mul(g, 4))
            token_scale = e.broadcast(e.load(F32, x["scale"], here), self.lanes)
            token_sum = e.broadcast(e.load(F32, x["fsum"], here), self.lanes) if fmt.minimum else None
            for n in range(self.vectors):
                value = b.sitofp(sums[m][n], self.floats)
                total = e.fma(value, b.fmul(scales[n], token_scale), totals[m][n].get())
                if token_sum is not None:
                    total = e.fma(minima[n], token_sum, total)
                totals[m][n].set(total)


def _store_tile(e: Emit, totals: list[list[Any]], out: Value, out_stride: Value, residual: Value, stride: Value) -> None:
    for m, row in enumerate(totals):
        for n, total in enumerate(row):
            value, at = total.get(), 4 * n * e.isa.lanes
            base = e.load(value.type, residual, e.mul(stride, m), at)
            e.store(e.b.fadd(value, base), out, e.mul(out_stride, m), at)


def _tile(isa: Isa, fmt: PackedFormat, rows: int, vectors: int) -> Callable[..., int]:
    """The register tile as a Numba-callable function on addresses."""

    def write(e: Emit, w: Value, groups: Value, data: Value, data_stride: Value, scale: Value, fsum: Value,
              scale_stride: Value, isum: Value, out: Value, out_stride: Value, residual: Value,
              residual_stride: Value, block: Value) -> None:  # fmt: skip
        tile = _Tile(e, fmt, rows, vectors, block)
        x = {"data": data, "data_stride": data_stride, "scale": scale, "fsum": fsum, "scale_stride": scale_stride,
             "isum": isum, "sum_stride": e.mul(scale_stride, 2)}  # fmt: skip
        totals = [[e.variable(e.splat(tile.floats, 0.0)) for _ in range(vectors)] for _ in range(rows)]
        per_header = SUPER if fmt.nested else 1
        stride = fmt.header_bytes + per_header * fmt.record_bytes
        with e.loop(0, e.b.sdiv(groups, e.i64(per_header))) as i:
            header = e.add(w, e.mul(i, stride))
            if rows == 1:
                for line in range(0, stride if not fmt.nested else 0, 64):
                    e.prefetch(header, PREFETCH_BYTES + line)
            if fmt.nested:
                with e.loop(0, per_header) as j:
                    record = e.add(header, fmt.header_bytes, e.mul(j, fmt.record_bytes))
                    tile.group(record, header, x, e.add(e.mul(i, per_header), j), totals)
            else:
                tile.group(header, None, x, i, totals)
        _store_tile(e, totals, out, out_stride, residual, residual_stride)

    return emitted(isa, 13, write)


def quantized_linear(isa: Isa, format_name: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus residual[m, n]; x in int8 groups, w packed.

    Arguments (int64 each): w, groups, strips, data, data_stride, scale, fsum, scale_stride, isum, out, out_stride,
    residual, residual_stride, address of the row count, address of the strips a tile takes. Strides are bytes.
    """
    fmt = FORMATS[format_name]
    return _linear(isa, lambda rows, vectors: _tile(isa, fmt, rows, vectors), fmt.record_bytes, fmt.header_bytes)


def dense_linear(isa: Isa, dtype: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """The same on weights of F32, F16 or BF16, strips of [inputs][32 outputs]; x in float32.

    Arguments as above: groups is the number of inputs; scale, fsum and isum are not read.
    """
    element, size = {"F32": (F32, 4), "F16": (F16, 2), "BF16": (I16, 2)}[dtype]

    def make(rows: int, vectors: int) -> Any:
        def write(e: Emit, w: Value, inputs: Value, data: Value, data_stride: Value, scale: Value, fsum: Value,
                  scale_stride: Value, isum: Value, out: Value, out_stride: Value, residual: Value,
                  residual_stride: Value, block: Value) -> None:  # fmt: skip
            floats = vector(F32, isa.lanes)
            totals = [[e.variable(e.splat(floats, 0.0)) for _ in range(vectors)] for _ in range(rows)]
            with e.loop(0, inputs) as k:
                weights = []
                for n in range(vectors):
                    at = (e.mul(k, STRIP * size), e.mul(block, 16 * size), n * isa.lanes * size)
                    raw = e.load(vector(element, isa.lanes), w, *at)
                    if dtype == "F16":
                        raw = e.widen(raw)
                    elif dtype == "BF16":
                        wide = e.b.zext(raw, vector(I32, isa.lanes))
                        raw = e.b.bitcast(e.b.shl(wide, e.splat(wide.type, 16)), floats)
                    weights.append(raw)
                for m in range(rows):
                    value = e.broadcast(e.load(F32, data, e.mul(data_stride, m), e.mul(k, 4)), isa.lanes)
                    for n in range(vectors):
                        totals[m][n].set(e.fma(value, weights[n], totals[m][n].get()))
            _store_tile(e, totals, out, out_stride, residual, residual_stride)

        return emitted(isa, 13, write)

    return _linear(isa, make, STRIP * size, 0)


def _linear(isa: Isa, make_tile: Callable[[int, int], Any], record: int, header: int) -> tuple[Any, Callable[[int, int, int], None]]:
    """The loops over rows and strips around register tiles of every height."""
    pieces = 1 if isa.lanes == 16 else 2  # a narrow register file holds one block of 16 outputs
    sizes = isa.row_tiles
    tiles = [make_tile(rows, STRIP // pieces // isa.lanes) for rows in sizes]
    sizes, tiles = sizes + sizes[-1:] * (4 - len(sizes)), tiles + tiles[-1:] * (4 - len(tiles))
    size0, size1, size2, size3 = sizes
    tile0, tile1, tile2, tile3 = tiles
    columns, nested = STRIP // pieces, header > 0

    def kernel(args: int, tile: int, scratch: int) -> None:
        w, groups, strips = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        data, data_stride, scale, fsum = (
            load_i64(args + 24), load_i64(args + 32), load_i64(args + 40), load_i64(args + 48))  # fmt: skip
        scale_stride, isum, out, out_stride = (
            load_i64(args + 56), load_i64(args + 64), load_i64(args + 72), load_i64(args + 80))  # fmt: skip
        residual, residual_stride = load_i64(args + 88), load_i64(args + 96)
        rows, per_tile = load_i64(load_i64(args + 104)), load_i64(load_i64(args + 112))
        strip_bytes = groups * record
        if nested:
            strip_bytes += groups // SUPER * header
        strip_tiles = (strips + per_tile - 1) // per_tile
        first_row = tile // strip_tiles * ROW_CHUNK
        last_row = min(rows, first_row + ROW_CHUNK)
        first_strip = tile % strip_tiles * per_tile
        for s in range(first_strip, min(strips, first_strip + per_tile)):
            for piece in range(pieces):
                column = 4 * (s * 32 + piece * columns)
                m = first_row
                # The widest tile that fits; where rows are left over, the last tile starts early and computes
                # some rows twice, to the same bits.
                left = last_row - first_row
                size = size0 if left >= size0 else size1 if left >= size1 else size2 if left >= size2 else size3
                while m < last_row:
                    m = min(m, last_row - size)
                    x, o = data + m * data_stride, out + m * out_stride + column
                    sc, fs, su = scale + m * scale_stride, fsum + m * scale_stride, isum + m * scale_stride * 2
                    r = residual + m * residual_stride + column
                    at = w + s * strip_bytes
                    if size == size0:
                        tile0(at, groups, x, data_stride, sc, fs, scale_stride, su, o, out_stride, r, residual_stride, piece)
                    elif size == size1:
                        tile1(at, groups, x, data_stride, sc, fs, scale_stride, su, o, out_stride, r, residual_stride, piece)
                    elif size == size2:
                        tile2(at, groups, x, data_stride, sc, fs, scale_stride, su, o, out_stride, r, residual_stride, piece)
                    else:
                        tile3(at, groups, x, data_stride, sc, fs, scale_stride, su, o, out_stride, r, residual_stride, piece)
                    m += size

    return KERNEL_SIGNATURE, kernel
