"""The scan of recurrent layers whose state is a matrix for each head.

The rows of a sequence are taken one after another, in prefill as in decode, by one loop. A state
matrix is kept in strips of columns, which fit the first-level cache and never meet: sums run over
the rows of a strip, in four parts that are added in one order. So neither chunks nor threads change
a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from twinphase.backends.cpu.emit import F32, I64, Emit, Value, Variable, vector
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
        """Parse the dimensions in a kernel's name."""
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
    """Scan of the gated delta rule (see `_scan`)."""
    return _scan(isa, Heads.of(*heads))


def space_scan(isa: Isa, *heads: str) -> Kernel:
    """Scan of a selective state space (see `_scan`)."""
    return _scan(isa, Heads.of(*heads)._replace(space=True))


def _scan(isa: Isa, h: Heads) -> Kernel:
    """A strip of columns of a value head's matrix, over all rows of a sequence.

    With X a column of S: w = X . q, and the result is a w + (q . k) d; then X <- a X + k d, which
    the next row reads. In a delta rule, d = beta (v - a X . k); in a state space, d is the step
    times v, and the result has a multiple of v added. Rows of the slot's log are applied first.
    Rows that the new state does not take up go into a log; with such rows alone, none is written.

    Arguments: the convolution's rows, their stride, rows of `delta_gates` or `space_gates`, their
    stride, plans and snapshots of `StateMemory`, the layer's memory, offsets of its log and of its
    matrices, a state space's D, out, its stride.
    """
    width = delta_columns(isa, h.value_dim)
    columns = vector(F32, width)
    strips = h.value_dim // width
    strip_bytes = 4 * width * h.key_dim
    log_bytes = 4 * h.values * (h.key_dim + h.value_dim + 1)
    # Of a row in a log: the first head's change, and decay, after the keys.
    changes_at = 4 * h.values * h.key_dim
    decays_at = changes_at + 4 * h.values * h.value_dim

    def changed(e: Emit, x: Value, k: Value, i: Value, d: Value, a: Value) -> Value:
        """Row i of a strip after a rank-one change."""
        return e.fma(e.broadcast(e.load(F32, k, i), width), d, e.b.fmul(a, x))

    def pass_over(
        e: Emit,
        count: Value,
        source: Value,
        to: Value,
        change: Callable[[list[Value], Value], list[Value]],
        products: Sequence[tuple[list[Variable], Value]] = (),
    ) -> None:
        """Change a strip's rows on the way from `source` to `to`, and add up their products."""
        with e.loop(0, count, SUM_PARTS) as i:
            at = e.mul(i, 4 * width)
            places = [e.add(at, 4 * width * part) for part in range(SUM_PARTS)]
            x = change([e.load(columns, source, place) for place in places], e.mul(i, 4))
            for part in range(SUM_PARTS):
                e.store(x[part], to, places[part])
                for sums, row in products:
                    factor = e.broadcast(e.load(F32, row, e.mul(i, 4), 4 * part), width)
                    sums[part].set(e.fma(x[part], factor, sums[part].get()))

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
        log_at,
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
        first, final, logged, _, target, pending, source, log_row = (
            e.load(I64, plan, 8 * i) for i in range(PLAN_INTS)
        )
        rows = e.add(final, logged)
        column = e.add(e.mul(head, 4 * h.value_dim), e.mul(strip, 4 * width))
        mine = e.add(matrices_at, e.mul(e.add(e.mul(head, strips), strip), strip_bytes))
        # This head's key, this strip's change, and the decay.
        key_at = e.mul(head, 4 * h.key_dim)
        change_at = e.add(column, changes_at)
        decay_at = e.add(e.mul(head, 4), decays_at)
        change_here = e.add(scratch, strip_bytes)
        old_log = e.add(memory, source, log_at)
        new_log = e.add(memory, target, log_at, e.mul(log_row, log_bytes))
        zero = e.splat(columns, 0.0)
        none = e.i64(0)
        # The row before this one: where its change is, and where the state after it goes.
        state = e.variable(e.add(memory, source, mine))
        to = e.variable(scratch)
        change_place = e.variable(change_here)

        def apply_log(x: list[Value], i: Value) -> list[Value]:
            totals = [e.variable(one) for one in x]
            with e.loop(0, pending) as p:
                row = e.add(old_log, e.mul(p, log_bytes))
                d = e.load(columns, row, change_at)
                a = e.broadcast(e.load(F32, row, decay_at), width)
                for part, total in enumerate(totals):
                    k_at = e.add(key_at, i, 4 * part)
                    total.set(changed(e, total.get(), row, k_at, d, a))
            return [total.get() for total in totals]

        def row_of(r: Value) -> tuple[Value, Value, Value]:
            """Queries, keys and gates of a row of the step."""
            row = e.add(x, e.mul(e.add(first, r), stride))
            q, k = (e.add(row, 4 * at, e.mul(key_head, 4 * h.key_dim)) for at in (h.q_at, h.k_at))
            return q, k, e.add(gates, e.mul(e.add(first, r), pitch))

        def take_up(r: Value, count: Value, products: Sequence[Any] = ()) -> None:
            """Row r's change, on `count` rows of the strip, and a snapshot of what results."""
            _, k, gate = row_of(r)
            d = e.load(columns, change_place.get())
            a = e.broadcast(e.load(F32, gate, e.mul(head, 4)), width)

            def change(x: list[Value], i: Value) -> list[Value]:
                return [changed(e, one, k, e.add(i, 4 * part), d, a) for part, one in enumerate(x)]

            pass_over(e, count, state.get(), to.get(), change, products)
            state.set(to.get())
            snapshot = e.load(I64, snapshots, e.mul(e.add(first, r), 8))
            wanted = b.icmp_signed(">=", snapshot, none)
            with e.loop(0, b.select(wanted, e.i64(h.key_dim), none)) as i:
                at = e.mul(i, 4 * width)
                place = e.add(memory, snapshot, mine)
                e.store(e.load(columns, state.get(), at), place, at)

        sums = [[e.variable(zero) for _ in range(SUM_PARTS)] for _ in range(2 - h.space)]
        with e.loop(0, rows) as r:
            for total in (one for parts in sums for one in parts):
                total.set(zero)
            q, k, gate = row_of(r)
            products = list(zip(sums, (q, k), strict=False))
            is_first = b.icmp_signed("==", r, none)
            all_rows = e.i64(h.key_dim)
            enter = b.select(is_first, all_rows, none)
            pass_over(e, enter, state.get(), scratch, apply_log, products)
            state.set(b.select(is_first, scratch, state.get()))
            with e.loop(b.select(is_first, e.i64(1), none), 1):
                take_up(b.sub(r, e.i64(1)), all_rows, products)
            m = e.add(first, r)
            kept = e.load(F32, gate, e.mul(head, 4))
            rate = e.broadcast(e.load(F32, gate, 4 * h.padded, e.mul(head, 4)), width)
            both = e.broadcast(e.load(F32, gate, 8 * h.padded, e.mul(key_head, 4)), width)
            a = e.broadcast(kept, width)
            w, *u = (
                b.fadd(b.fadd(t[0].get(), t[1].get()), b.fadd(t[2].get(), t[3].get())) for t in sums
            )
            v = e.load(columns, x, e.mul(m, stride), 4 * h.v_at, column)
            if h.space:
                change = b.fmul(rate, v)
                result = e.fma(both, change, b.fmul(a, w))
                result = e.fma(e.broadcast(e.load(F32, skip, e.mul(head, 4)), width), v, result)
            else:
                change = b.fmul(rate, e.fma(b.fneg(a), u[0], v))
                result = e.fma(both, change, b.fmul(a, w))
            e.store(result, out, e.mul(m, out_stride), column)
            after = b.sub(r, final)
            is_logged = b.icmp_signed(">=", after, none)
            log = e.add(new_log, e.mul(after, log_bytes))
            change_place.set(b.select(is_logged, e.add(log, change_at), change_here))
            e.store(change, change_place.get())
            is_last = b.icmp_signed("==", after, e.i64(-1))
            to.set(b.select(is_last, e.add(memory, target, mine), scratch))
            # One strip of each head writes what all of them share.
            writes = b.and_(is_logged, b.icmp_signed("==", strip, none))
            with e.loop(0, b.select(writes, all_rows, none), 16) as i:
                e.store(e.load(vector(F32, 16), k, e.mul(i, 4)), log, key_at, e.mul(i, 4))
                e.store(kept, log, decay_at)
        # Nothing reads the state after a last row that was logged, but for a snapshot.
        last = b.sub(rows, e.i64(1))
        snapshot = e.load(I64, snapshots, e.mul(e.add(first, last), 8))
        unread = b.icmp_signed("<", snapshot, none)
        skipped = b.and_(unread, b.icmp_signed(">", logged, none))
        take_up(last, b.select(skipped, none, e.i64(h.key_dim)))

    scan = emitted(isa, write)
    arguments = fields(12)

    def kernel(args: int, tile: int, scratch: int) -> None:
        scan(tile, scratch, *arguments(args))

    return KERNEL_SIGNATURE, kernel
