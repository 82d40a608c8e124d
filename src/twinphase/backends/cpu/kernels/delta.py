"""The gates around the gated delta rule (Yang et al., 2024, arXiv:2412.06464); not for its scan."""

from __future__ import annotations

from llvmlite import ir

from twinphase.backends.cpu.emit import F32, LOG2_E, Emit, Value, vector
from twinphase.backends.cpu.intrinsics import Kernel, row_kernel, tile_kernel
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.elementwise import inverse_rms, part_of_row, store_group
from twinphase.backends.cpu.kernels.scan import Heads, dots
from twinphase.backends.cpu.tiling import GATE_TILES_PER_ROW

GROUP = vector(F32, 32)
LENGTH_EPS = 1e-6


def delta_gates(isa: Isa, *heads: str) -> Kernel:
    """Decays and betas of a row's value heads; its queries and keys to length 1, in place.

    Queries are divided by sqrt(key_dim) too. Out goes [decays, betas, products of query and key], a
    number per head, the first two padded to 32.

    Arguments: address of the row count, the convolution's rows, their stride, alpha and beta of row
    0, their stride, A, bias, out, its stride.
    """
    h = Heads.of(*heads)

    def unit(e: Emit, x: Value, factor: float) -> None:
        squares = e.variable(e.splat(vector(F32, 16), 0.0))
        with e.loop(0, h.key_dim, 16) as i:
            values = e.load(vector(F32, 16), x, e.mul(i, 4))
            squares.set(e.fma(values, values, squares.get()))
        total = e.b.fadd(e.reduce_add(squares.get()), ir.Constant(F32, LENGTH_EPS))
        inverse = e.b.fdiv(ir.Constant(F32, factor), e.unary("sqrt", total))
        with e.loop(0, h.key_dim, 16) as i:
            at = e.mul(i, 4)
            values = e.load(vector(F32, 16), x, at)
            e.store(e.b.fmul(values, e.broadcast(inverse, 16)), x, at)

    def write(e: Emit, m, x, stride, alpha, beta, pitch, decay, bias, out, out_stride):
        row = e.mul(m, pitch)
        to = e.add(out, e.mul(m, out_stride))
        for g in range(0, h.padded, 32):
            steps = e.b.fadd(e.load(GROUP, alpha, row, 4 * g), e.load(GROUP, bias, 4 * g))
            exponents = e.b.fmul(e.softplus(steps), e.load(GROUP, decay, 4 * g))
            e.store(e.exp2(e.b.fmul(exponents, e.splat(GROUP, LOG2_E))), to, 4 * g)
            e.store(e.sigmoid(e.load(GROUP, beta, row, 4 * g)), to, 4 * (h.padded + g))
        queries = e.add(x, e.mul(m, stride))
        keys = e.add(queries, 4 * h.keys * h.key_dim)
        with e.loop(0, h.keys) as head:
            at = e.mul(head, 4 * h.key_dim)
            q = e.add(queries, at)
            k = e.add(keys, at)
            unit(e, q, h.key_dim**-0.5)
            unit(e, k, 1.0)
            e.store(dots(e, q, k, h.key_dim), to, 8 * h.padded, e.mul(head, 4))

    return row_kernel(isa, write)


def gated_norm(isa: Isa, dim: str, kind: str) -> Kernel:
    """out = rms_norm of each head of x, times weight and silu(gate); a part of a row per tile.

    Arguments: x, its stride, weight, eps bits, gate, its stride, heads, out, scale, fsum, isum.
    """
    size = int(dim)
    groups = size // 32

    def write(e: Emit, tile, x, stride, weight, eps, gate, pitch, heads, *out):
        m, first, end = part_of_row(e, tile, GATE_TILES_PER_ROW, heads)
        with e.loop(first, end) as head:
            at = e.mul(head, 4 * size)
            row = e.add(x, e.mul(m, stride), at)
            inverse = inverse_rms(e, row, e.i64(size), e.i64(size), eps, 32)
            factor = e.broadcast(inverse, 32)
            for g in range(groups):
                normed = e.b.fmul(e.load(GROUP, row, 128 * g), factor)
                normed = e.b.fmul(normed, e.load(GROUP, weight, 128 * g))
                opened = e.silu(e.load(GROUP, gate, e.mul(m, pitch), at, 128 * g))
                place = e.add(e.mul(e.add(e.mul(m, heads), head), groups), g)
                store_group(e, kind, e.b.fmul(normed, opened), place, *out)

    return tile_kernel(isa, write, starred=4)


def gate_heads(isa: Isa, dim: str, kind: str) -> Kernel:
    """out = x * sigmoid(gate), where each head's gate lies behind its queries.

    Arguments: x, its stride, queries, their stride, heads, out, scale, fsum, isum.
    """
    size = int(dim)
    groups = size // 32

    def write(e: Emit, tile, x, stride, queries, pitch, heads, *out):
        m, first, end = part_of_row(e, tile, GATE_TILES_PER_ROW, heads)
        with e.loop(first, end) as head:
            for g in range(groups):
                at = e.add(e.mul(head, 4 * size), 128 * g)
                values = e.load(GROUP, x, e.mul(m, stride), at)
                gate_at = e.add(e.mul(head, 8 * size), 4 * size + 128 * g)
                opened = e.sigmoid(e.load(GROUP, queries, e.mul(m, pitch), gate_at))
                place = e.add(e.mul(e.add(e.mul(m, heads), head), groups), g)
                store_group(e, kind, e.b.fmul(values, opened), place, *out)

    return tile_kernel(isa, write, starred=4)
