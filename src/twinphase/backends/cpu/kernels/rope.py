"""Rotary embedding of queries and keys, and the writing of keys and values to the paged cache.

Queries leave as int8 with one scale a head, since attention multiplies them with the keys in
integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from twinphase.backends.cpu.emit import F32, I8, I16, I32, Emit, Value, vector
from twinphase.backends.cpu.intrinsics import (
    KERNEL_SIGNATURE,
    Kernel,
    emitted,
    fields,
    load_i64,
    load_u32,
    tile_kernel,
)
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.elementwise import inverse_rms
from twinphase.backends.cpu.kernels.quantize import absmax_scale, round_to_int
from twinphase.backends.cpu.kv_layout import (
    CELL_TOKENS,
    CHUNK_CELLS,
    key_bytes,
    scale_bytes,
    spread_size,
    value_bytes,
)

MAX_FLOAT16 = 65504.0
# (count, index): that many floats of a head, from its dimension `index` on
Load = Callable[[int, int], Value]


class Form(NamedTuple):
    """Dimensions of a head, how many of them are rotated and how, and whether it is normalized."""

    dim: int
    rotary: int
    interleaved: bool
    normalized: bool


def _loader(e: Emit, x: Value, form: Form, weight: Value, eps: Value) -> Load:
    """Reads the head at address x, normalized where it has a norm (its weights, eps bits)."""
    end = e.i64(form.dim)
    factor = inverse_rms(e, x, end, end, eps, 16) if form.normalized else None

    def load(count: int, index: int) -> Value:
        value = e.load(vector(F32, count), x, 4 * index)
        if factor is None:
            return value
        value = e.b.fmul(value, e.broadcast(factor, count))
        return e.b.fmul(value, e.load(value.type, weight, 4 * index))

    return load


def _rotated(e: Emit, load: Load, cos: Value, sin: Value, form: Form) -> list[Value]:
    """A head rotated (RoFormer, Su et al., 2021), as vectors of floats in order."""
    b = e.b
    dim, rotary, interleaved, _ = form
    pairs = math.gcd(rotary // 2, 16)
    half = vector(F32, pairs)
    pieces: dict[int, Value] = {}
    for i in range(0, rotary // 2, pairs):
        c = e.load(half, cos, 4 * i)
        s = e.load(half, sin, 4 * i)
        if interleaved:
            both = load(2 * pairs, 2 * i)
            first, second = (e.shuffle(both, None, range(n, 2 * pairs, 2)) for n in (0, 1))
        else:
            first = load(pairs, i)
            second = load(pairs, i + rotary // 2)
        turned = (
            b.fsub(b.fmul(first, c), b.fmul(second, s)),
            b.fadd(b.fmul(first, s), b.fmul(second, c)),
        )
        if interleaved:
            order = [lane for k in range(pairs) for lane in (k, pairs + k)]
            pieces[2 * i] = e.shuffle(*turned, order)
        else:
            pieces[i], pieces[i + rotary // 2] = turned
    rest = math.gcd(rotary, 16)
    for i in range(rotary, dim, rest):
        pieces[i] = load(rest, i)
    return [pieces[i] for i in sorted(pieces)]


def _spread(e: Emit, pieces: list[Value], size: int) -> list[Value]:
    """Hadamard transform of each run of `size` dimensions, times sqrt(size).

    Queries and keys are turned alike, so their products stay the same, but a dimension with
    outliers is spread over all of them, and int8 with one scale loses less (QuaRot, Ashkboos et
    al., 2024, arXiv:2404.00456).
    """
    b = e.b
    count = pieces[0].type.count
    for h in [1 << i for i in range(min(size, count).bit_length() - 1)]:
        signs = ir.Constant(pieces[0].type, [-1.0 if lane & h else 1.0 for lane in range(count)])
        order = [lane ^ h for lane in range(count)]
        pieces = [b.fadd(b.fmul(piece, signs), e.shuffle(piece, None, order)) for piece in pieces]
    step = 1
    while step * count < size:
        for i in range(len(pieces)):
            if not i & step:
                left = pieces[i]
                right = pieces[i | step]
                pieces[i] = b.fadd(left, right)
                pieces[i | step] = b.fsub(left, right)
        step *= 2
    return pieces


def _head(
    e: Emit, form: Form, x: Value, cos: Value, sin: Value, norm: Value, eps: Value
) -> tuple[list[Value], Value]:
    """A query or key head in int32 vectors of 16, normalized, rotated and spread, and its scale."""
    pieces = _rotated(e, _loader(e, x, form, norm, eps), cos, sin, form)
    pieces = _spread(e, _sixteens(e, pieces), spread_size(form.dim))
    scale, inverse = absmax_scale(e, _largest(e, pieces))
    factor = e.broadcast(inverse, 16)
    return [round_to_int(e, piece, factor) for piece in pieces], scale


def _sixteens(e: Emit, pieces: list[Value]) -> list[Value]:
    """The same lanes in vectors of 16."""
    if all(piece.type.count % 16 == 0 for piece in pieces):
        return [
            e.shuffle(p, None, range(i, i + 16)) for p in pieces for i in range(0, p.type.count, 16)
        ]
    lanes = [
        e.b.extract_element(p, ir.Constant(I32, i)) for p in pieces for i in range(p.type.count)
    ]
    out = []
    for start in range(0, len(lanes), 16):
        value: Value = ir.Constant(vector(F32, 16), ir.Undefined)
        for i, lane in enumerate(lanes[start : start + 16]):
            value = e.b.insert_element(value, lane, ir.Constant(I32, i))
        out.append(value)
    return out


def _largest(e: Emit, pieces: list[Value]) -> Value:
    largest = e.reduce_max(e.unary("fabs", pieces[0]))
    for piece in pieces[1:]:
        largest = e.maximum(largest, e.reduce_max(e.unary("fabs", piece)))
    return largest


def _query(isa: Isa, form: Form) -> Any:
    """Numba-callable: one query head to int8.

    Arguments: x, cos, sin, data, scale, sum, softmax scale bits, norm, eps bits.
    """

    def write(e: Emit, x, cos, sin, data, scale, total, factor, norm, eps):
        pieces, step = _head(e, form, x, cos, sin, norm, eps)
        sums = ir.Constant(I32, 0)
        for i, numbers in enumerate(pieces):
            sums = e.b.add(sums, e.reduce_add(numbers))
            e.store(e.b.trunc(numbers, vector(I8, 16)), data, 16 * i)
        # The scale carries 1 / sqrt(head_dim) and log2(e): attention exponentiates in base 2.
        e.store(e.b.fmul(step, e.float_of(factor)), scale)
        e.store(sums, total)

    return emitted(isa, write)


def _key(isa: Isa, form: Form) -> Any:
    """Numba-callable: one key head to the cache.

    Arguments: x, cos, sin, cell's keys, cell's scales, token in the cell, norm, eps bits.
    """

    def write(e: Emit, x, cos, sin, keys, scales, token, norm, eps):
        pieces, step = _head(e, form, x, cos, sin, norm, eps)
        for i, numbers in enumerate(pieces):
            codes = e.b.trunc(numbers, vector(I8, 16))
            quads = e.b.bitcast(e.b.xor(codes, e.splat(codes.type, -128)), vector(I32, 4))
            for q in range(4):
                lane = e.b.extract_element(quads, ir.Constant(I32, q))
                e.store(lane, keys, (4 * i + q) * 4 * CELL_TOKENS, e.mul(token, 4))
        e.store(step, scales, e.mul(token, 4))

    return emitted(isa, write)


def _value(isa: Isa, dim: int, dtype: str, normalized: bool) -> Any:
    """Numba-callable: one value head to the cache, normalized without weights or as it is.

    Arguments: x, cell's values, cell's scales, token in the cell, eps bits.
    """
    words = vector(I16, 16)
    size = 1 if dtype == "int8" else 2

    def write(e: Emit, x, values, scales, token, eps):
        width = e.i64(dim)
        factor = e.broadcast(inverse_rms(e, x, width, width, eps, 16), 16) if normalized else None
        pair = e.b.ashr(token, e.i64(1))
        side = e.b.and_(token, e.i64(1))
        to = e.add(values, e.mul(pair, 2 * size * dim), e.mul(side, size))
        pieces = []
        for i in range(0, dim, 16):
            piece = e.load(vector(F32, 16), x, 4 * i)
            if factor is not None:
                piece = e.b.fmul(piece, factor)
            # A value that is not finite must not outlive its request: times a weight of 0 it would
            # poison another's.
            finite = e.b.fcmp_ordered("<", e.unary("fabs", piece), e.splat(piece.type, MAX_FLOAT16))
            pieces.append(e.b.select(finite, piece, e.splat(piece.type, 0.0)))
        inverse = None
        if dtype == "int8":
            step, inverse = absmax_scale(e, _largest(e, pieces))
            e.store(step, scales, e.mul(token, 4), 4 * CELL_TOKENS)
        for i, piece in zip(range(0, dim, 16), pieces, strict=True):
            if inverse is not None:
                small = e.b.trunc(round_to_int(e, piece, e.broadcast(inverse, 16)), vector(I8, 16))
            elif isa.bf16_dot:
                both = e.b.bitcast(e.to_bf16(piece, piece), vector(I16, 32))
                small = e.shuffle(both, None, range(16))
            else:
                small = e.b.bitcast(e.narrow(piece), words)
            for k in range(16):
                e.store(e.b.extract_element(small, ir.Constant(I32, k)), to, 2 * size * (i + k))

    return emitted(isa, write)


def norm_columns(isa: Isa) -> Kernel:
    """One row a tile: RMSNorm of some columns, in place; other ranks may have the other columns.

    Arguments: the whole rows, their stride and width; the columns in row 0, their stride and
    number; weights, eps bits.
    """

    def write(e: Emit, tile, whole, whole_stride, width, x, stride, count, weight, eps):
        row = e.add(whole, e.mul(tile, whole_stride))
        factor = e.broadcast(inverse_rms(e, row, width, width, eps, 16), 16)
        columns = e.add(x, e.mul(tile, stride))
        with e.loop(0, count, 16) as i:
            at = e.mul(i, 4)
            value = e.b.fmul(e.load(vector(F32, 16), columns, at), factor)
            e.store(e.b.fmul(value, e.load(value.type, weight, at)), columns, at)

    return tile_kernel(isa, write)


def rope_kv_write(
    isa: Isa,
    head_dim: str,
    rotary: str,
    interleaved: str,
    dtype: str,
    qk_norm: str,
    *more: str,
) -> Kernel:
    """One row a tile: RMSNorm of each head of queries and keys (or "none"), rotation, writing.

    More words are "gated", where each head's queries are followed by as many columns of its gate,
    "values", where these are normalized too, and "scales". Without KV heads only queries are made.

    Arguments: q, k, v of row 0, their stride, cos, sin, positions (int32), slots (int64), heads, KV
    heads, keys, scales and values of the layer, int8 queries, their scales, their sums, softmax
    scale bits (with "scales" the address of a float32 for each position), cells of a chunk, weights
    of the norms of q and k, eps bits.
    """
    dim = int(head_dim)
    form = Form(dim, int(rotary), interleaved == "1", qk_norm == "head")
    query = _query(isa, form)
    key = _key(isa, form)
    value = _value(isa, dim, dtype, "values" in more)
    cell_bytes = key_bytes(dim)
    scale_size = scale_bytes(dtype)
    value_size = value_bytes(dim, dtype)
    query_stride = 4 * dim * (2 if "gated" in more else 1)
    table_stride = 4 * (form.rotary // 2)
    by_position = "scales" in more
    arguments = fields(21)

    def kernel(args, tile, scratch):
        (
            q,
            k,
            v,
            stride,
            cos,
            sin,
            positions,
            slots,
            heads,
            kv_heads,
            keys,
            scales,
            values,
            data,
            query_scales,
            sums,
            factor,
            per_chunk,
            q_norm,
            k_norm,
            eps,
        ) = arguments(args)
        position = load_u32(positions + 4 * tile)
        cos = cos + position * table_stride
        sin = sin + position * table_stride
        if by_position:
            factor = load_u32(factor + 4 * position)
        slot = load_i64(slots + 8 * tile)
        for head in range(heads):
            at = tile * heads + head
            query(
                q + tile * stride + head * query_stride,
                cos,
                sin,
                data + at * dim,
                query_scales + 4 * at,
                sums + 4 * at,
                factor,
                q_norm,
                eps,
            )
        for head in range(kv_heads):
            at = (
                slot // (CELL_TOKENS * CHUNK_CELLS) * per_chunk
                + head * CHUNK_CELLS
                + slot // CELL_TOKENS % CHUNK_CELLS
            )
            here = tile * stride + head * dim * 4
            key(
                k + here,
                cos,
                sin,
                keys + at * cell_bytes,
                scales + at * scale_size,
                slot % CELL_TOKENS,
                k_norm,
                eps,
            )
            value(
                v + here,
                values + at * value_size,
                scales + at * scale_size,
                slot % CELL_TOKENS,
                eps,
            )

    return KERNEL_SIGNATURE, kernel
