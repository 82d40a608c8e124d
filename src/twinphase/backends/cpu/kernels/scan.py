"""The scan of recurrent layers whose state is a matrix for each head.

The rows of a sequence are taken one after another, in prefill as in decode, by one loop. A state
matrix is kept in strips of columns, which fit the first-level cache and never meet: sums run over
the rows of a strip, in four parts that are added in one order. So neither chunks nor threads change
a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from twinphase.backends.cpu.emit import F32, I64, Emit, Value, vector
from twinphase.backends.cpu.intrinsics import KERNEL_SIGNATURE, Kernel, emitted, fields
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.tiling import PLAN_INTS, SUM_PARTS, delta_columns


class Heads(NamedTuple):
    """Key heads, value heads, their sizes, and the order of value heads.

    A row of the convolution has queries, keys and values; in a state space (`space`) values, keys
    and queries.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    tiled: bool
    space: bool = False

    @classmethod
    def of(cls, keys: str, values: str, key_dim: str, value_dim: str, tiled: str) -> Heads:
        """From a kernel's name."""
        return cls(int(keys), int(values), int(key_dim), int(value_dim), tiled == "1")

    @property
    def padded(self) -> int:
        """Value heads rounded up to whole groups."""
        return -(-self.values // 32) * 32

    @property
    def q_at(self) -> int:
        """First column of the queries in a row of the convolution."""
        return self.values * self.value_dim + self.keys * self.key_dim if self.space else 0

    @property
    def k_at(self) -> int:
        """First column of the keys."""
        return self.values * self.value_dim if self.space else self.keys * self.key_dim

    @property
    def v_at(self) -> int:
        """First column of the values."""
        return 0 if self.space else 2 * self.keys * self.key_dim


def dots(e: Emit, x: Value, y: Value, size: int) -> Value:
    """x . y of two runs of `size` numbers."""
    products = e.variable(e.splat(vector(F32, 16), 0.0))
    with e.loop(0, size, 16) as i:
        both = [e.load(vector(F32, 16), side, e.mul(i, 4)) for side in (x, y)]
        products.set(e.fma(both[0], both[1], products.get()))
    return e.reduce_add(products.get())


def delta_scan(isa: Isa, *heads: str) -> Kernel:
    """Of the gated delta rule (`_scan`)."""
    return _scan(isa, Heads.of(*heads))


def space_scan(isa: Isa, *heads: str) -> Kernel:
    """Of a selective state space (`_scan`)."""
    return _scan(isa, Heads.of(*heads)._replace(space=True))


def _scan(isa: Isa, h: Heads) -> Kernel:
    """A strip of columns of a value head's matrix, over all rows of a sequence.

    With X a column of S: w = X . q, and the result is a w + (q . k) d; then X <- a X + k d, which
    the next row reads. In a delta rule, d = beta (v - a X . k); in a state space, d is the step
    times v, and the result has a multiple of v added. Accepted drafts of the step before are
    applied first. The rows of new drafts go into the slot, beside the state that they do not
    change.

    Arguments: the convolution's rows, their stride, rows of `delta_gates` or `space_gates`, their
    stride, plans and snapshots of `StateMemory`, the layer's memory, offsets of its drafts and of
    its matrices, a state space's D, out, its stride.
    """
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

    def products(e: Emit, source: Value, rows: Sequence[Value]) -> list[Value]:
        """X . row of each column, for each of the rows."""
        zero = e.splat(columns, 0.0)
        sums = [[e.variable(zero) for _ in range(SUM_PARTS)] for _ in rows]
        with e.loop(0, h.key_dim, SUM_PARTS) as i:
            for part in range(SUM_PARTS):
                x = e.load(columns, source, e.mul(i, 4 * width), 4 * width * part)
                for vector_of, total in zip(rows, sums, strict=True):
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
        skip,
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
            q, k = (e.add(row, 4 * at, e.mul(key_head, 4 * h.key_dim)) for at in (h.q_at, h.k_at))
            gate = e.add(gates, e.mul(m, pitch))
            kept = e.load(F32, gate, e.mul(head, 4))
            rate = e.broadcast(e.load(F32, gate, 4 * h.padded, e.mul(head, 4)), width)
            both = e.broadcast(e.load(F32, gate, 8 * h.padded, e.mul(key_head, 4)), width)
            a = e.broadcast(kept, width)
            v = e.load(columns, row, 4 * h.v_at, column)
            if h.space:
                (w,) = products(e, state.get(), [q])
                change = b.fmul(rate, v)
                result = e.fma(both, change, b.fmul(a, w))
                result = e.fma(e.broadcast(e.load(F32, skip, e.mul(head, 4)), width), v, result)
            else:
                u, w = products(e, state.get(), [k, q])
                change = b.fmul(rate, e.fma(b.fneg(a), u, v))
                result = e.fma(both, change, b.fmul(a, w))
            e.store(result, out, e.mul(m, out_stride), column)
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
    arguments = fields(12)

    def kernel(args: int, tile: int, scratch: int) -> None:
        scan(tile, scratch, *arguments(args))

    return KERNEL_SIGNATURE, kernel
