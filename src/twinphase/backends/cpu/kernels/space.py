"""The gates around the selective state space of Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060)."""

from __future__ import annotations

from llvmlite import ir

from twinphase.backends.cpu.emit import F32, LOG2_E, Emit, vector
from twinphase.backends.cpu.intrinsics import Kernel, row_kernel, tile_kernel
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.elementwise import store_group
from twinphase.backends.cpu.kernels.scan import Heads, dots

GROUP = vector(F32, 32)


def space_gates(isa: Isa, *heads: str) -> Kernel:
    """Decays and steps of a row's heads, and the products of B and C.

    Out goes [decays, steps, products], a number per head or group, the first two padded to 32.

    Arguments: address of the row count, the convolution's rows, their stride, steps of row 0, their
    stride, A, bias, out, its stride.
    """
    h = Heads.of(*heads)._replace(space=True)

    def write(e: Emit, m, x, stride, steps, pitch, decay, bias, out, out_stride):
        row = e.mul(m, pitch)
        to = e.add(out, e.mul(m, out_stride))
        for g in range(0, h.padded, 32):
            raw = e.b.fadd(e.load(GROUP, steps, row, 4 * g), e.load(GROUP, bias, 4 * g))
            taken = e.softplus(raw)
            exponents = e.b.fmul(taken, e.load(GROUP, decay, 4 * g))
            e.store(e.exp2(e.b.fmul(exponents, e.splat(GROUP, LOG2_E))), to, 4 * g)
            e.store(taken, to, 4 * (h.padded + g))
        own = e.add(x, e.mul(m, stride))
        with e.loop(0, h.keys) as group:
            k, q = (e.add(own, 4 * at, e.mul(group, 4 * h.key_dim)) for at in (h.k_at, h.q_at))
            e.store(dots(e, q, k, h.key_dim), to, 8 * h.padded, e.mul(group, 4))

    return row_kernel(isa, write)


def gate_norm(isa: Isa, norm: str, kind: str) -> Kernel:
    """out = rms_norm of x * silu(gate) times weight, a run of a row's groups of 32 per tile.

    With `norm` "before_gate", rms_norm of x times weight, times silu(gate).

    Arguments: x, its stride, weight, eps bits, gate, its stride, runs of a row, groups of a run,
    out, scale, fsum, isum.
    """

    def write(e: Emit, tile, x, stride, weight, eps, gate, pitch, runs, groups, *out):
        m = e.b.sdiv(tile, runs)
        run = e.b.srem(tile, runs)
        first = e.mul(run, groups)

        def gated(g, values):
            at = e.mul(e.add(first, g), 128)
            return e.b.fmul(values, e.silu(e.load(GROUP, gate, e.mul(m, pitch), at)))

        def normalized(g):
            values = e.load(GROUP, x, e.mul(m, stride), e.mul(e.add(first, g), 128))
            return values if norm == "before_gate" else gated(g, values)

        squares = e.variable(e.splat(GROUP, 0.0))
        with e.loop(0, groups) as g:
            values = normalized(g)
            squares.set(e.fma(values, values, squares.get()))
        mean = e.b.fdiv(e.reduce_add(squares.get()), e.b.sitofp(e.mul(groups, 32), F32))
        root = e.unary("sqrt", e.b.fadd(mean, e.float_of(eps)))
        factor = e.broadcast(e.b.fdiv(ir.Constant(F32, 1.0), root), 32)
        with e.loop(0, groups) as g:
            normed = e.b.fmul(normalized(g), factor)
            normed = e.b.fmul(normed, e.load(GROUP, weight, e.mul(e.add(first, g), 128)))
            normed = gated(g, normed) if norm == "before_gate" else normed
            place = e.add(e.mul(e.mul(m, runs), groups), first, g)
            store_group(e, kind, normed, place, *out)

    return tile_kernel(isa, write, starred=4)
