"""The gated delta rule (Yang et al., 2024, arXiv:2412.06464), and the gates around it.

The rows of a sequence are taken one after another, in prefill as in decode, by one loop. A state
matrix is kept in strips of columns, which fit the first-level cache and never meet: sums run over
the rows of a strip, in four parts that are added in one order. So neither chunks nor threads change
a bit.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from twinphase.backends.cpu.emit import F32, I64, LOG2_E, Emit, Value, vector
from twinphase.backends.cpu.intrinsics import (
    KERNEL_SIGNATURE,
    Kernel,
    emitted,
    fields,
    row_kernel,
    tile_kernel,
)
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.elementwise import inverse_rms, part_of_row, store_group
from twinphase.backends.cpu.tiling import (
    GATE_TILES_PER_ROW,
    PLAN_INTS,
    SUM_PARTS,
    delta_columns,
)

GROUP = vector(F32, 32)
LENGTH_EPS = 1e-6


class Heads(NamedTuple):
    """Of a delta rule: key heads, value heads, their sizes, and the order of value heads."""

    keys: int
    values: int
    key_dim: int
    value_dim: int
    tiled: bool

    @classmethod
    def of(cls, keys: str, values: str, key_dim: str, value_dim: str, tiled: str) -> Heads:
        return cls(int(keys), int(values), int(key_dim), int(value_dim), tiled == "1")

    @property
    def padded(self) -> int:
        """Value heads rounded up to whole groups."""
        return -(-self.values // 32) * 32


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
            products = e.variable(e.splat(vector(F32, 16), 0.0))
            with e.loop(0, h.key_dim, 16) as i:
                both = [e.load(vector(F32, 16), side, e.mul(i, 4)) for side in (q, k)]
                products.set(e.fma(both[0], both[1], products.get()))
            e.store(e.reduce_add(products.get()), to, 8 * h.padded, e.mul(head, 4))

    return row_kernel(isa, write)


def delta_scan(isa: Isa, *heads: str) -> Kernel:
    """A strip of columns of a value head's matrix, over all rows of a sequence.

    With X a column of S: u = X . k, w = X . q, d = beta (v - a u), and the result is a w + (q . k)
    d; then X <- a X + k d, which the next row reads. Accepted drafts of the step before are applied
    first. The rows of new drafts go into the slot, beside the state that they do not change.

    Arguments: the convolution's rows, their stride, rows of `delta_gates`, their stride, plans and
    snapshots of `StateMemory`, the layer's memory, offsets of its drafts and of its matrices, out,
    its stride.
    """
    h = Heads.of(*heads)
    width = delta_columns(isa, h.value_dim)
    columns = vector(F32, width)
    strips = h.value_dim // width
    strip_bytes = 4 * width * h.key_dim
    draft_bytes = 4 * h.values * (h.key_dim + h.value_dim + 1)

    def update(e: Emit, source: Value, to: Value, k: Value, change: Value, kept: Value) -> None:
        """A row's rank-one change."""
        d = e.load(columns, change)
        a = e.broadcast(kept, width)
        with e.loop(0, h.key_dim, SUM_PARTS) as i:
            for part in range(SUM_PARTS):
                at = e.add(e.mul(i, 4 * width), 4 * width * part)
                key = e.broadcast(e.load(F32, k, e.mul(i, 4), 4 * part), width)
                e.store(e.fma(key, d, e.b.fmul(a, e.load(columns, source, at))), to, at)

    def products(e: Emit, source: Value, k: Value, q: Value) -> list[Value]:
        """X . k and X . q of each column."""
        zero = e.splat(columns, 0.0)
        sums = [[e.variable(zero) for _ in range(SUM_PARTS)] for _ in (k, q)]
        with e.loop(0, h.key_dim, SUM_PARTS) as i:
            for part in range(SUM_PARTS):
                x = e.load(columns, source, e.mul(i, 4 * width), 4 * width * part)
                for vector_of, total in zip((k, q), sums, strict=True):
                    factor = e.broadcast(e.load(F32, vector_of, e.mul(i, 4), 4 * part), width)
                    total[part].set(e.fma(x, factor, total[part].get()))
        add = e.b.fadd
        return [add(add(t[0].get(), t[1].get()), add(t[2].get(), t[3].get())) for t in sums]

    def copy(e: Emit, source: Value, to: Value, count: Value) -> None:
        """`count` of a strip's rows."""
        with e.loop(0, count) as i:
            at = e.mul(i, 4 * width)
            e.store(e.load(columns, source, at), to, at)

    def write(
        e: Emit,
        tile,
        scratch,
        x,
        stride,
        gates,
        pitch,
        plans,
        snapshots,
        memory,
        drafts_at,
        matrices_at,
        out,
        out_stride,
    ):
        b = e.b
        strip = b.srem(tile, e.i64(strips))
        number = b.sdiv(tile, e.i64(strips))
        head = b.srem(number, e.i64(h.values))
        sequence = b.sdiv(number, e.i64(h.values))
        shared = e.i64(h.keys if h.tiled else h.values // h.keys)
        key_head = b.srem(head, shared) if h.tiled else b.sdiv(head, shared)
        plan = e.add(plans, e.mul(sequence, 8 * PLAN_INTS))
        first, final, drafts, _, target, pending, source = (
            e.load(I64, plan, 8 * i) for i in range(PLAN_INTS)
        )
        column = e.add(e.mul(head, 4 * h.value_dim), e.mul(strip, 4 * width))
        mine = e.add(matrices_at, e.mul(e.add(e.mul(head, strips), strip), strip_bytes))
        # Of a draft in a slot: this head's key, this strip's change, and the decay.
        key_at = e.mul(head, 4 * h.key_dim)
        change_at = e.add(column, 4 * h.values * h.key_dim)
        kept_at = e.add(e.mul(head, 4), 4 * h.values * (h.key_dim + h.value_dim))
        change_here = e.add(scratch, strip_bytes)
        state = e.variable(e.add(memory, source, mine))
        with e.loop(0, pending) as p:
            row = e.add(memory, source, drafts_at, e.mul(p, draft_bytes))
            kept = e.load(F32, row, kept_at)
            update(e, state.get(), scratch, e.add(row, key_at), e.add(row, change_at), kept)
            state.set(scratch)
        with e.loop(0, e.add(final, drafts)) as r:
            m = e.add(first, r)
            row = e.add(x, e.mul(m, stride))
            q = e.add(row, e.mul(key_head, 4 * h.key_dim))
            k = e.add(q, 4 * h.keys * h.key_dim)
            gate = e.add(gates, e.mul(m, pitch))
            kept = e.load(F32, gate, e.mul(head, 4))
            beta = e.broadcast(e.load(F32, gate, 4 * h.padded, e.mul(head, 4)), width)
            both = e.broadcast(e.load(F32, gate, 8 * h.padded, e.mul(key_head, 4)), width)
            a = e.broadcast(kept, width)
            u, w = products(e, state.get(), k, q)
            v = e.load(columns, row, 8 * h.keys * h.key_dim, column)
            change = b.fmul(beta, e.fma(b.fneg(a), u, v))
            e.store(e.fma(both, change, b.fmul(a, w)), out, e.mul(m, out_stride), column)
            draft = b.sub(r, final)
            is_draft = b.icmp_signed(">=", draft, e.i64(0))
            log = e.add(memory, target, drafts_at, e.mul(draft, draft_bytes))
            place = b.select(is_draft, e.add(log, change_at), change_here)
            e.store(change, place)
            is_last = b.icmp_signed("==", draft, e.i64(-1))
            to = b.select(is_last, e.add(memory, target, mine), scratch)
            update(e, state.get(), to, k, place, kept)
            state.set(to)
            # One strip of each head writes what all of them share.
            writes = b.and_(is_draft, b.icmp_signed("==", strip, e.i64(0)))
            with e.loop(0, b.select(writes, e.i64(h.key_dim), e.i64(0)), 16) as i:
                e.store(e.load(vector(F32, 16), k, e.mul(i, 4)), log, key_at, e.mul(i, 4))
                e.store(kept, log, kept_at)
            snapshot = e.load(I64, snapshots, e.mul(m, 8))
            wanted = b.icmp_signed(">=", snapshot, e.i64(0))
            rows = b.select(wanted, e.i64(h.key_dim), e.i64(0))
            copy(e, to, e.add(memory, snapshot, mine), rows)

    scan = emitted(isa, write)
    arguments = fields(11)

    def kernel(args: int, tile: int, scratch: int) -> None:
        scan(tile, scratch, *arguments(args))

    return KERNEL_SIGNATURE, kernel


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
