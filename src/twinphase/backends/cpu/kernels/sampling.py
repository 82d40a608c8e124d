"""Samples tokens from rows of logits: the arithmetic of `sampling/`, one row a tile.

The result is the host's, token for token. Logits are edited, compared and divided in the same
float32 operations, and exponentials are NumPy's bit for bit where NumPy has vector instructions for
them (x86). Weights are added up in float64, in one order for a row, so that a token does not depend
on the step's other rows. The host adds in other orders, and for top-p partly in float32: a token
differs only where a random number or a border of top-p lies within that rounding.

A token's depth is (largest logit - its logit) / temperature, so it has the weight e^-depth. Depths
are not negative, so their bits, taken as an integer, have their order: `_border` bisects integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from twinphase.backends.cpu.emit import F32, F64, I32, I64, LOG2_E, Emit, Value, vector
from twinphase.backends.cpu.intrinsics import (
    KERNEL_SIGNATURE,
    Kernel,
    emitted,
    fields,
    helper,
    load_f32,
    load_f64,
    load_i64,
    load_u32,
    store_f32,
    store_f64,
    store_i32,
    store_i64,
)
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.tiling import (
    EDITS,
    GROUPS_PER_EDGE,
    KEY_OF_INFINITY,
    NOT_SCORED,
    PLANNED_INTS,
    RECORD_INTS,
    SAMPLED_INTS,
    SAMPLED_TOKEN,
)

FLOATS = vector(F32, 32)
INTS = vector(I32, 32)
DOUBLES = vector(F64, 32)
KEY_OF_NOTHING = 0x7FFFFFFF
# The key of 4.0, the first guess at a border, and what doubles a number.
FIRST_KEY = 0x40800000
DOUBLED = 1 << 23
LAST_KEY = FIRST_KEY + 4 * DOUBLED
# Bisecting so few keys costs less than picking those that are left.
FEW_KEYS = 256

# e^x = 2^n e^r with r = x - n ln 2, and e^r the quotient of two polynomials: the constants and the
# order of NumPy's `simd_exp_f32`, highest power first.
LN_2 = (-6.93145752e-1, -1.42860677e-6)
NUMERATOR = (
    5.082762527590693718096e-04,
    6.757896990527504603057e-03,
    5.114512081637298353406e-02,
    2.473615434895520810817e-01,
    7.257664613233124478488e-01,
    9.999999999980870924916e-01,
)
DENOMINATOR = (2.159509375685829852307e-02, -2.742335390411667452936e-01, 1.0)
# e^-86 is a normal number, and is nothing beside the best token's weight of 1.
LEAST_EXPONENT = -86.0
BITS_OF_ONE = 0x3F800000


def _exp(e: Emit, x: Value) -> Value:
    """e^x of a float32 vector for x <= 0; 0 below `LEAST_EXPONENT`."""
    b = e.b
    least = e.splat(FLOATS, LEAST_EXPONENT)
    small = b.fcmp_ordered("<", x, least)
    x = b.select(small, least, x)
    # Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
    magic = e.splat(FLOATS, 12582912.0)
    shifted = b.fadd(b.fmul(x, e.splat(FLOATS, LOG2_E)), magic)
    n = b.fsub(shifted, magic)
    for part in LN_2:
        x = e.fma(n, e.splat(FLOATS, part), x)
    sums: list[Value] = []
    for coefficients in (NUMERATOR, DENOMINATOR):
        p = e.splat(FLOATS, coefficients[0])
        for c in coefficients[1:]:
            p = e.fma(p, x, e.splat(FLOATS, c))
        sums.append(b.bitcast(b.fdiv(sums[0], p), INTS) if sums else p)
    exponent = b.shl(b.bitcast(shifted, INTS), e.splat(INTS, 23))
    result = b.bitcast(b.add(sums[1], exponent), FLOATS)
    return b.select(small, e.splat(FLOATS, 0.0), result)


def _bits(e: Emit, mask: Value) -> Value:
    """Lanes of a mask as the low bits of an int64."""
    return e.b.zext(e.b.bitcast(mask, I32), I64)


def _largest(isa: Isa) -> Any:
    """Numba-callable (row, groups): the first place of the largest logit, -1 if not finite."""

    def write(e: Emit, row, groups) -> Value:
        b = e.b
        most = e.variable(e.splat(FLOATS, -np.inf))
        place = e.variable(e.splat(INTS, 0))
        broken = e.variable(e.splat(INTS, 0))
        with e.loop(0, groups) as g:
            values = e.load(FLOATS, row, e.mul(g, 128))
            larger = b.fcmp_ordered(">", values, most.get())
            most.set(b.select(larger, values, most.get()))
            here = e.broadcast(b.trunc(e.mul(g, 32), I32), 32)
            place.set(b.select(larger, here, place.get()))
            nan = b.fcmp_unordered("uno", values, values)
            broken.set(b.or_(broken.get(), b.sext(nan, INTS)))
        lanes = ir.Constant(INTS, list(range(32)))
        best = e.reduce_max(most.get())
        is_best = b.fcmp_ordered("==", most.get(), e.broadcast(best, 32))
        places = b.select(is_best, b.add(place.get(), lanes), e.splat(INTS, KEY_OF_NOTHING))
        first = b.zext(e.call("llvm.vector.reduce.smin.v32i32", I32, places), I64)
        nan = _bits(e, b.icmp_signed("!=", broken.get(), e.splat(INTS, 0)))
        magnitude = b.and_(b.bitcast(best, I32), ir.Constant(I32, KEY_OF_NOTHING))
        finite = b.icmp_signed("<", magnitude, ir.Constant(I32, KEY_OF_INFINITY))
        good = b.and_(finite, b.icmp_signed("==", nan, e.i64(0)))
        return b.select(good, first, e.i64(-1))

    return emitted(isa, write)


def _depths(isa: Isa) -> Any:
    """Numba-callable (row, groups, place of the largest, bits of the temperature, out, out least).

    The least depth of each group is stored too.
    """

    def write(e: Emit, row, groups, place, temperature, out, least):
        best = e.broadcast(e.load(F32, row, e.mul(place, 4)), 32)
        divisor = e.broadcast(e.float_of(temperature), 32)
        with e.loop(0, groups) as g:
            at = e.mul(g, 128)
            depths = e.b.fdiv(e.b.fsub(best, e.load(FLOATS, row, at)), divisor)
            depths = e.unary("fabs", depths)  # The difference of zeros may be -0.
            e.store(depths, out, at)
            keys = e.b.bitcast(depths, INTS)
            e.store(e.call("llvm.vector.reduce.umin.v32i32", I32, keys), least, e.mul(g, 4))

    return emitted(isa, write)


def _weights(isa: Isa) -> Any:
    """Numba-callable (depths, groups, limit, out): weights of keys up to the limit, else 0."""

    def write(e: Emit, depths, groups, limit, out):
        b = e.b
        limits = e.broadcast(b.trunc(limit, I32), 32)
        with e.loop(0, groups) as g:
            at = e.mul(g, 128)
            depth = e.load(FLOATS, depths, at)
            kept = b.icmp_signed("<=", b.bitcast(depth, INTS), limits)
            e.store(e.splat(FLOATS, 0.0), out, at)
            with b.if_then(b.icmp_signed("!=", _bits(e, kept), e.i64(0))):
                weight = _exp(e, b.fneg(depth))
                e.store(b.select(kept, weight, e.splat(FLOATS, 0.0)), out, at)

    return emitted(isa, write)


def _edges(isa: Isa) -> Any:
    """Numba-callable (keys, weights, groups, limit, out): sums of blocks, float64.

    They are of the weights whose keys are up to the limit.
    """

    def write(e: Emit, keys, weights, groups, limit, out):
        b = e.b
        limits = e.broadcast(b.trunc(limit, I32), 32)
        with e.loop(0, groups, GROUPS_PER_EDGE) as first:
            total = e.variable(e.splat(DOUBLES, 0.0))
            with e.loop(first, e.least(e.add(first, GROUPS_PER_EDGE), groups)) as g:
                at = e.mul(g, 128)
                kept = b.icmp_signed("<=", e.load(INTS, keys, at), limits)
                with b.if_then(b.icmp_signed("!=", _bits(e, kept), e.i64(0))):
                    weight = b.select(kept, e.load(FLOATS, weights, at), e.splat(FLOATS, 0.0))
                    total.set(b.fadd(total.get(), b.fpext(weight, DOUBLES)))
            e.store(e.reduce_add(total.get()), out, b.udiv(e.mul(first, 8), e.i64(GROUPS_PER_EDGE)))

    return emitted(isa, write)


def _keep(isa: Isa) -> Any:
    """Numba-callable (keys, values, groups, above, limit, out keys, out values): how many.

    Keeps keys above the first and up to the second limit, with their values; may write over itself.
    """

    def write(e: Emit, keys, values, groups, above, limit, out_keys, out_values) -> Value:
        b = e.b
        low, high = (e.broadcast(b.trunc(bound, I32), 32) for bound in (above, limit))
        count = e.variable(e.i64(0))
        left = e.variable(e.i64(0))
        with e.loop(0, groups) as g:
            found = e.load(INTS, keys, e.mul(g, 128))
            kept = b.and_(b.icmp_signed(">", found, low), b.icmp_signed("<=", found, high))
            left.set(_bits(e, kept))
            with e.loop(0, e.call("llvm.ctpop.i64", I64, left.get())):
                lane = b.call(
                    e.function("llvm.cttz.i64", I64, [I64, ir.IntType(1)]),
                    [left.get(), ir.Constant(ir.IntType(1), 1)],
                )
                left.set(b.and_(left.get(), b.sub(left.get(), e.i64(1))))
                at = e.mul(e.add(e.mul(g, 32), lane), 4)
                to = e.mul(count.get(), 4)
                e.store(e.load(I32, keys, at), out_keys, to)
                e.store(e.load(I32, values, at), out_values, to)
                count.set(e.add(count.get(), 1))
        return count.get()

    return emitted(isa, write)


def _rank(isa: Isa) -> Any:
    """Numba-callable (row, groups, place): how many logits are at least that at the place."""

    def write(e: Emit, row, groups, place) -> Value:
        value = e.broadcast(e.load(F32, row, e.mul(place, 4)), 32)
        counts = e.variable(e.splat(INTS, 0))
        with e.loop(0, groups) as g:
            values = e.load(FLOATS, row, e.mul(g, 128))
            counts.set(e.b.sub(counts.get(), e.b.sext(e.b.fcmp_ordered(">=", values, value), INTS)))
        return e.b.zext(e.reduce_add(counts.get()), I64)

    return emitted(isa, write)


def _masked(isa: Isa) -> Any:
    """Numba-callable (row, groups, mask, out): a copy, with -inf where the mask's bit is 0.

    Without a mask (0) it is a plain copy.
    """

    def write(e: Emit, row, groups, mask, out):
        b = e.b
        every = e.variable(ir.Constant(I32, -1))
        with e.loop(0, groups) as g:
            with b.if_then(b.icmp_signed("!=", mask, e.i64(0))):
                every.set(e.load(I32, mask, e.mul(g, 4)))
            allowed = b.bitcast(every.get(), vector(ir.IntType(1), 32))
            values = e.load(FLOATS, row, e.mul(g, 128))
            e.store(b.select(allowed, values, e.splat(FLOATS, -np.inf)), out, e.mul(g, 128))

    return emitted(isa, write)


@helper
def _total(edges, groups):
    total = 0.0
    for block in range((groups + GROUPS_PER_EDGE - 1) // GROUPS_PER_EDGE):
        total += load_f64(edges + 8 * block)
    return total


def _border(edges_of: Any, keep: Any) -> Any:
    """Numba-callable: the least key such that the weights of keys up to it reach a mass.

    Arguments: keys, weights, groups, mass, a first guess, memory for edges, and for as many keys
    and weights. If rounding keeps the total below the mass, the key is infinity's.
    """

    @helper
    def border(keys, weights, groups, mass, high, edges, some_keys, some_weights):
        low = -1
        above = 0.0
        edges_of(keys, weights, groups, high, edges)
        reached = _total(edges, groups)
        while reached < mass:
            if high == KEY_OF_INFINITY:
                return KEY_OF_INFINITY
            low = high
            above = reached
            high = high + DOUBLED if high < LAST_KEY else KEY_OF_INFINITY
            edges_of(keys, weights, groups, high, edges)
            reached = _total(edges, groups)
        many = True
        while low + 1 < high:
            if many:
                count = keep(keys, weights, groups, low, high, some_keys, some_weights)
                groups = (count + 31) // 32
                for i in range(count, 32 * groups):
                    store_i32(some_keys + 4 * i, KEY_OF_NOTHING)
                    store_f32(some_weights + 4 * i, np.float32(0.0))
                keys = some_keys
                weights = some_weights
                many = count > FEW_KEYS
                base = above
            middle = (low + high) // 2
            edges_of(keys, weights, groups, middle, edges)
            reached = base + _total(edges, groups)
            if reached >= mass:
                high = middle
            else:
                low = middle
                above = reached
        return high

    return border


def _count_border(border: Any) -> Any:
    """Numba-callable: the key that the smallest `count` keys go up to; arguments as of `_border`.

    The least keys of groups give a first guess: that number of groups has a key up to it.
    """

    @helper
    def count_border(keys, least, ones, groups, count, edges, some_keys, some_weights):
        blocks = (groups + 31) // 32
        for i in range(groups, 32 * blocks):
            store_i32(least + 4 * i, KEY_OF_NOTHING)
        guess = border(least, ones, blocks, float(count), FIRST_KEY, edges, some_keys, some_weights)
        if guess == KEY_OF_INFINITY:
            guess = FIRST_KEY
        return border(keys, ones, groups, float(count), guess, edges, some_keys, some_weights)

    return count_border


def _pick(edges_of: Any) -> Any:
    """Numba-callable (depths, weights, groups, limit, share, edges): the token drawn.

    It is the first one of positive weight whose cumulative weight exceeds that share of the total,
    of the weights of keys up to the limit.
    """

    @helper
    def pick(depths, weights, groups, limit, share, edges):
        edges_of(depths, weights, groups, limit, edges)
        target = share * _total(edges, groups)
        blocks = (groups + GROUPS_PER_EDGE - 1) // GROUPS_PER_EDGE
        before = 0.0
        block = 0
        while block + 1 < blocks and before + load_f64(edges + 8 * block) <= target:
            before += load_f64(edges + 8 * block)
            block += 1
        target -= before
        running = 0.0
        first = 32 * GROUPS_PER_EDGE * block
        for i in range(first, min(32 * groups, first + 32 * GROUPS_PER_EDGE)):
            weight = load_f32(weights + 4 * i)
            if weight > 0 and load_u32(depths + 4 * i) <= limit:
                running += weight
                if running > target:
                    return i
        # By rounding, the target is on the end.
        i = min(32 * groups, first + 32 * GROUPS_PER_EDGE) - 1
        while load_f32(weights + 4 * i) == 0 or load_u32(depths + 4 * i) > limit:
            i -= 1
        return i

    return pick


@helper
def _edit(row, tile, vocab, edits):
    """Apply a row's edits in place: `sampling/logit_edits.py`."""
    for operation in range(EDITS):
        starts = load_i64(edits + 24 * operation)
        ids = load_i64(edits + 24 * operation + 8)
        operands = load_i64(edits + 24 * operation + 16)
        for i in range(load_i64(starts + 8 * tile), load_i64(starts + 8 * tile + 8)):
            place = row + 4 * (load_i64(ids + 8 * i) - tile * vocab)
            logit = load_f32(place)
            operand = load_f32(operands + 4 * i)
            if operation == 0:
                logit += operand
            elif operation == 2:
                logit -= operand
            elif logit > 0:
                logit /= operand
            else:
                logit *= operand
            store_f32(place, logit)


@helper
def _sort_top(row, ids, count, top, num_top):
    """The `num_top` largest of `count` logits, whose ids rise; of equal ones the lower id first."""
    found = 0
    for i in range(count):
        token = load_u32(ids + 4 * i)
        logit = load_f32(row + 4 * token)
        to = found
        while to > 0 and load_f32(row + 4 * load_i64(top + 8 * to - 8)) < logit:
            if to < num_top:
                store_i64(top + 8 * to, load_i64(top + 8 * to - 8))
            to -= 1
        if to < num_top:
            store_i64(top + 8 * to, token)
            found = min(found + 1, num_top)


def sample_rows(isa: Isa) -> Kernel:
    """One row a tile.

    Argument: address of the record that `backends/cpu/sampling.py` fills in for every step.
    """
    largest = _largest(isa)
    depths_of = _depths(isa)
    weights_of = _weights(isa)
    edges_of = _edges(isa)
    keep = _keep(isa)
    rank_of = _rank(isa)
    masked = _masked(isa)
    border = _border(edges_of, keep)
    count_border = _count_border(border)
    pick = _pick(edges_of)
    record = fields(RECORD_INTS)
    planned = fields(6)

    def kernel(args, tile, scratch):
        logits, stride, groups, vocab, ones, numbers, plans, results, tops, num_top, edits = record(
            load_i64(args)
        )
        row = logits + tile * stride
        plan = plans + 8 * PLANNED_INTS * tile
        temperature, limit, top_k, mask, is_edited, scored = planned(plan)
        top_p = load_f64(plan + 48)
        copy = scratch
        depths = copy + 128 * groups
        weights = depths + 128 * groups
        some_keys = weights + 128 * groups
        some_weights = some_keys + 128 * groups
        least = some_weights + 128 * groups
        edges = least + 4 * groups + 128

        token = largest(row, groups)
        processed = row
        if token >= 0 and is_edited:
            processed = copy
            masked(row, groups, 0, copy)
            _edit(copy, tile, vocab, edits)
            if mask:
                masked(copy, groups, mask, copy)
            token = largest(copy, groups)
        if token >= 0 and temperature:
            depths_of(processed, groups, token, temperature, depths, least)
            if top_k:
                k = count_border(depths, least, ones, groups, top_k, edges, some_keys, some_weights)
                limit = min(limit, k)
            weights_of(depths, groups, limit, weights)
            if top_p < 1:
                edges_of(depths, weights, groups, limit, edges)
                mass = top_p * _total(edges, groups)
                p = border(depths, weights, groups, mass, FIRST_KEY, edges, some_keys, some_weights)
                limit = min(limit, p)
            token = pick(depths, weights, groups, limit, load_f64(plan + 56), edges)
        result = results + 8 * SAMPLED_INTS * tile
        store_i64(result, token)
        store_i64(result + 16, -1)
        if token < 0 or scored == NOT_SCORED:
            return
        best = largest(row, groups)
        depths_of(row, groups, best, BITS_OF_ONE, depths, least)
        weights_of(depths, groups, KEY_OF_INFINITY, weights)
        edges_of(depths, weights, groups, KEY_OF_INFINITY, edges)
        token = token if scored == SAMPLED_TOKEN else scored
        store_i64(result + 8, token)
        store_i64(result + 16, best)
        store_i64(result + 24, rank_of(row, groups, token))
        store_f64(result + 32, _total(edges, groups))
        if num_top:
            k = count_border(depths, least, ones, groups, num_top, edges, some_keys, some_weights)
            count = keep(depths, numbers, groups, -1, k, some_keys, some_weights)
            _sort_top(row, some_weights, count, tops + 8 * num_top * tile, num_top)

    return KERNEL_SIGNATURE, kernel
