"""Mixtures of experts: choose each row's experts, sort rows by expert, add up the results.

Rows go through the linear kernels sorted by expert, so that an expert's weights are read once for
all of its rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit

from twinphase.backends.cpu.emit import F32, I32, I64, LOG2_E, Emit, Value, vector
from twinphase.backends.cpu.intrinsics import (
    KERNEL_SIGNATURE,
    Kernel,
    emitted,
    fields,
    load_f32,
    load_i64,
    load_u32,
    row_kernel,
    store_f32,
    store_i32,
)
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.tiling import SLOT_INTS


def _powers(isa: Isa) -> Any:
    """Numba-callable (logits, count, largest's address, out): e^(logit - largest), their sum."""

    def write(e: Emit, logits, count, largest, out) -> Value:
        four = vector(F32, 4)  # the narrowest vector of all paths
        top = e.broadcast(e.load(F32, largest), 4)
        total = e.variable(ir.Constant(F32, 0.0))
        with e.loop(0, count) as i:
            at = e.mul(i, 4)
            x = e.b.fsub(e.broadcast(e.load(F32, logits, at), 4), top)
            power = e.exp2(e.b.fmul(x, e.splat(four, LOG2_E)))
            value = e.b.extract_element(power, ir.Constant(I32, 0))
            total.set(e.b.fadd(total.get(), value))
            e.store(value, out, at)
        return e.b.zext(e.b.bitcast(total.get(), I32), I64)

    return emitted(isa, write)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _choose(scores, experts, used, numbers):
    """Store the numbers of the `used` largest scores, which are lost."""
    for k in range(used):
        best = 0
        largest = np.float32(-np.inf)
        for i in range(experts):
            if load_f32(scores + 4 * i) > largest:  # of equal ones the smaller number
                best = i
                largest = load_f32(scores + 4 * i)
        store_i32(numbers + 4 * k, best)
        store_f32(scores + 4 * best, np.float32(-np.inf))


def route(isa: Isa) -> Kernel:
    """One row a tile: the numbers and weights of the `used` experts with the largest logits.

    Arguments: logits, their stride, experts, used, whether weights are divided by their sum (else
    they are the softmax over all experts), numbers out (int32), weights out.
    """
    powers = _powers(isa)
    arguments = fields(7)

    def kernel(args, tile, scratch):
        logits, stride, experts, used, renormalize, numbers, weights = arguments(args)
        logits += tile * stride
        numbers += 4 * used * tile
        weights += 4 * used * tile
        for i in range(experts):
            store_f32(scratch + 4 * i, load_f32(logits + 4 * i))
        _choose(scratch, experts, used, numbers)
        for k in range(used):
            store_f32(weights + 4 * k, load_f32(logits + 4 * load_u32(numbers + 4 * k)))
        first = logits + 4 * load_u32(numbers)
        total = 0
        if not renormalize:
            total = powers(logits, experts, first, scratch)
        chosen = powers(weights, used, first, weights)
        if renormalize:
            total = chosen
        store_i32(scratch, total)
        for k in range(used):
            store_f32(weights + 4 * k, load_f32(weights + 4 * k) / load_f32(scratch))

    return KERNEL_SIGNATURE, kernel


def route_sigmoid(isa: Isa) -> Kernel:
    """As `route`, of the experts with the largest sigmoid of their logit, plus their bias.

    Arguments: logits, their stride, experts, used, bias (float32, for the choice alone), whether
    weights, which are sigmoids, are divided by their sum + 1e-6, bits of what they are multiplied
    by, numbers out (int32), weights out.
    """

    def write(e: Emit, logits, count, out):
        four = vector(F32, 4)  # the narrowest vector of all paths
        with e.loop(0, count) as i:
            at = e.mul(i, 4)
            value = e.sigmoid(e.broadcast(e.load(F32, logits, at), four.count))
            e.store(e.b.extract_element(value, ir.Constant(I32, 0)), out, at)

    sigmoids = emitted(isa, write)
    arguments = fields(9)

    def kernel(args, tile, scratch):
        logits, stride, experts, used, bias, renormalize, scale, numbers, weights = arguments(args)
        numbers += 4 * used * tile
        weights += 4 * used * tile
        gates = scratch + 4 * experts
        sigmoids(logits + tile * stride, experts, gates)
        for i in range(experts):
            store_f32(scratch + 4 * i, load_f32(gates + 4 * i) + load_f32(bias + 4 * i))
        _choose(scratch, experts, used, numbers)
        total = np.float32(1e-6 if renormalize else 1.0)
        for k in range(used):
            weight = load_f32(gates + 4 * load_u32(numbers + 4 * k))
            store_f32(weights + 4 * k, weight)
            if renormalize:
                total += weight
        store_i32(scratch, scale)
        for k in range(used):
            weight = load_f32(weights + 4 * k) / total * load_f32(scratch)
            store_f32(weights + 4 * k, weight)

    return KERNEL_SIGNATURE, kernel


def sort_rows(isa: Isa) -> Kernel:
    """The step's rows sorted by expert, in one tile.

    Arguments: address of the row count, experts, used, numbers of the chosen experts, then what is
    written, int32: the row of each sorted row, the place of each row's choices among the sorted,
    and the slots: (expert, its first sorted row, the end of them) of each expert that has rows,
    empty ones behind.
    """
    arguments = fields(7)

    def kernel(args, tile, scratch):
        count, experts, used, numbers, rows, places, slots = arguments(args)
        pairs = load_i64(count) * used
        for expert in range(experts):
            store_i32(scratch + 4 * expert, 0)
            for i in range(SLOT_INTS):
                store_i32(slots + 4 * (SLOT_INTS * expert + i), 0)
        for pair in range(pairs):
            at = scratch + 4 * load_u32(numbers + 4 * pair)
            store_i32(at, load_u32(at) + 1)
        start = slot = 0
        for expert in range(experts):
            size = load_u32(scratch + 4 * expert)
            store_i32(scratch + 4 * expert, start)  # where the expert's next row goes
            if size:
                store_i32(slots + 4 * SLOT_INTS * slot, expert)
                store_i32(slots + 4 * SLOT_INTS * slot + 4, start)
                store_i32(slots + 4 * SLOT_INTS * slot + 8, start + size)
                slot += 1
            start += size
        for pair in range(pairs):
            at = scratch + 4 * load_u32(numbers + 4 * pair)
            place = load_u32(at)
            store_i32(at, place + 1)
            store_i32(rows + 4 * place, pair // used)
            store_i32(places + 4 * pair, place)

    return KERNEL_SIGNATURE, kernel


def combine(isa: Isa) -> Kernel:
    """out[m] = the sum over a row's choices, in order, of weight * result.

    Arguments: address of the row count, used, places, weights, results, groups of 32 columns, out.
    """
    wide = vector(F32, 32)

    def write(e: Emit, m, used, places, weights, results, groups, out):
        first = e.mul(m, used)
        to = e.mul(m, groups)
        with e.loop(0, groups) as g:
            total = e.variable(e.splat(wide, 0.0))
            with e.loop(0, used) as k:
                at = e.mul(e.add(first, k), 4)
                place = e.b.zext(e.load(I32, places, at), I64)
                value = e.load(wide, results, e.mul(e.add(e.mul(place, groups), g), 128))
                total.set(e.fma(value, e.broadcast(e.load(F32, weights, at), 32), total.get()))
            e.store(total.get(), out, e.mul(e.add(to, g), 128))

    return row_kernel(isa, write)
