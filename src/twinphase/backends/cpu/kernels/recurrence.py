"""Causal convolutions over each sequence, whose earlier rows lie in a slot (`backends/states.py`).

A row is computed from its own sequence's rows alone, in the order of its taps: neither the chunk
that it is in, nor other sequences, nor the number of threads change its bits.
"""

from __future__ import annotations

from twinphase.backends.cpu.emit import F32, Emit, Value, vector
from twinphase.backends.cpu.intrinsics import Kernel, row_kernel, tile_kernel
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.elementwise import part_of_row, store_group
from twinphase.backends.cpu.tiling import GATE_TILES_PER_ROW, PLAN_INTS

GROUP = vector(F32, 32)


def multiply(isa: Isa) -> Kernel:
    """out = x * y. Arguments: address of the row count, x, y, their stride, groups, out."""

    def write(e: Emit, m, x, y, stride, groups, out):
        row = e.mul(m, stride)
        with e.loop(0, groups) as g:
            at = e.mul(g, 128)
            values = (e.load(GROUP, source, row, at) for source in (x, y))
            e.store(e.b.fmul(*values), out, e.mul(e.mul(m, groups), 128), at)

    return row_kernel(isa, write)


def _row(e: Emit, index: Value, here: Value, stride: Value, before: Value, row_bytes: Value):
    """Address of row `index` of a sequence: from `here` on in the step, below 0 in its history."""
    in_step = e.add(here, e.mul(index, stride))
    return e.b.select(
        e.b.icmp_signed(">=", index, e.i64(0)), in_step, e.add(before, e.mul(index, row_bytes))
    )


def causal_conv(isa: Isa, taps: str, form: str, kind: str) -> Kernel:
    """out = sum over j of weight[j] * x[t - taps + 1 + j], a part of a row per tile.

    It is multiplied by a gate ("gated"), or goes through SiLU, with a bias ("biased") or without
    ("silu").

    Arguments: x, its stride, groups, each row's place (int64 pairs: its number in its sequence, and
    the offset of the end of its history), the layer's memory, weight [taps, channels], gate or
    bias, the gate's stride, out, scale, fsum, isum.
    """
    count = int(taps)

    def write(e: Emit, tile, x, stride, groups, places, memory, weight, gate, pitch, *out):
        m, first, end = part_of_row(e, tile, GATE_TILES_PER_ROW, groups)
        number, offset = (e.load(e.i64(0).type, places, e.mul(m, 16), at) for at in (0, 8))
        row_bytes = e.mul(groups, 128)
        here = e.add(x, e.mul(e.b.sub(m, number), stride))
        before = e.add(memory, offset)
        rows = [
            _row(e, e.add(number, tap - count + 1), here, stride, before, row_bytes)
            for tap in range(count)
        ]
        with e.loop(first, end) as g:
            at = e.mul(g, 128)
            total = None
            for tap, row in enumerate(rows):
                factor = e.load(GROUP, weight, e.mul(row_bytes, tap), at)
                value = e.load(GROUP, row, at)
                total = e.b.fmul(value, factor) if total is None else e.fma(value, factor, total)
            if form == "gated":
                total = e.b.fmul(total, e.load(GROUP, gate, e.mul(m, pitch), at))
            else:
                if form == "biased":
                    total = e.b.fadd(total, e.load(GROUP, gate, at))
                total = e.silu(total)
            store_group(e, kind, total, e.add(e.mul(m, groups), g), *out)

    return tile_kernel(isa, write, starred=4)


def keep_history(isa: Isa, taps: str) -> Kernel:
    """Write the rows that the next step needs to a state's slot, a part of them per tile.

    Arguments: x, its stride, groups, the plan of each state (`StateMemory.plans`), the layer's
    memory.
    """
    before_first = int(taps) - 1

    def write(e: Emit, tile, x, stride, groups, plans, memory):
        state, begin, end = part_of_row(e, tile, GATE_TILES_PER_ROW, groups)
        plan = e.mul(state, 8 * PLAN_INTS)
        first, final, logged, before, target, _, _, log_at = (
            e.load(e.i64(0).type, plans, plan, 8 * i) for i in range(PLAN_INTS)
        )
        # The rows before a log that grows are there already.
        grows = e.b.icmp_signed("==", final, e.i64(0))
        begin_row = e.b.select(grows, e.i64(before_first), e.i64(0))
        row_bytes = e.mul(groups, 128)
        here = e.add(x, e.mul(first, stride))
        with e.loop(begin_row, e.add(logged, before_first)) as r:
            index = e.add(r, final, -before_first)
            source = _row(e, index, here, stride, e.add(memory, before), row_bytes)
            out = e.add(memory, target, e.mul(e.add(r, log_at), row_bytes))
            with e.loop(begin, end) as g:
                at = e.mul(g, 128)
                e.store(e.load(GROUP, source, at), out, at)

    return tile_kernel(isa, write)
