"""Kernels that connect the ranks of a model: copy columns to shared memory, and wait for all."""

from __future__ import annotations

import time
from typing import Any

from llvmlite import ir

from twinphase.backends.cpu.emit import I32, I64, Emit, Value, vector
from twinphase.backends.cpu.intrinsics import (
    KERNEL_SIGNATURE,
    Kernel,
    built,
    emitted,
    fields,
    load_i64,
    tile_kernel,
)
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kernels.program import atomic_load, atomic_store, pause
from twinphase.backends.cpu.tiling import ELEMENTWISE_TILE_ROWS

# A row in int8 groups has codes, scales, and float and integer sums; other rows have fewer arrays.
ARRAYS_PER_ROW = 4
WORD_BYTES = 64
# About 0.1 ms.
SPINS_BEFORE_SLEEP = 5000
SLEEP_MICROSECONDS = 20


def _copy(isa: Isa) -> Any:
    """Numba-callable (source, target, bytes, a multiple of 4)."""

    def write(e: Emit, source, target, nbytes):
        most = e.b.and_(nbytes, e.i64(-64))
        for kind, start, end, step in ((vector(I32, 16), 0, most, 64), (I32, most, nbytes, 4)):
            with e.loop(start, end, step) as at:
                e.store(e.load(kind, source, at), target, at)

    return emitted(isa, write)


def copy_columns(isa: Isa) -> Kernel:
    """A rank's columns into rows of all ranks.

    Arguments: address of the row count; for each of ARRAYS_PER_ROW arrays the source, its stride,
    the target, its stride and the bytes of a row, a multiple of 4.
    """
    copy = _copy(isa)

    def kernel(args, tile, scratch):
        first = tile * ELEMENTWISE_TILE_ROWS
        rows = min(load_i64(load_i64(args)), first + ELEMENTWISE_TILE_ROWS)
        for array in range(ARRAYS_PER_ROW):
            place = args + 8 + 40 * array
            source = load_i64(place)
            stride = load_i64(place + 8)
            target = load_i64(place + 16)
            target_stride = load_i64(place + 24)
            nbytes = load_i64(place + 32)
            for row in range(first, rows):
                copy(source + row * stride, target + row * target_stride, nbytes)

    return KERNEL_SIGNATURE, kernel


@built
def _sleep(b: ir.IRBuilder, usleep, microseconds):
    """usleep(3), by its address."""
    fn = b.inttoptr(usleep, ir.FunctionType(I32, [I32]).as_pointer())
    b.call(fn, [b.trunc(microseconds, I32)])


def _leave_time(b: ir.IRBuilder, clock_gettime: Value, place: Value) -> None:
    """Leave the monotonic clock's seconds and nanoseconds at `place`."""
    fn = b.inttoptr(clock_gettime, ir.FunctionType(I32, [I32, I64]).as_pointer())
    b.call(fn, [ir.Constant(I32, time.CLOCK_MONOTONIC), place])


leave_time = built(_leave_time)


def stamp(isa: Isa) -> Kernel:
    """Reads the clock. Arguments: addresses of clock_gettime and of the timespec to write."""

    def write(e: Emit, tile, clock_gettime, place):
        _leave_time(e.b, clock_gettime, place)

    return tile_kernel(isa, write)


def meet(isa: Isa) -> Kernel:
    """Waits until all ranks have come here, or the first of the group's words says that it is over.

    The nanoseconds it waits are added to the word behind this rank's. Arguments: address of the
    group's words, this rank, how many ranks, addresses of usleep and clock_gettime.
    """
    arguments = fields(5)

    def kernel(args, tile, scratch):
        words, rank, ranks, usleep, clock = arguments(args)
        own = words + (1 + rank) * WORD_BYTES
        mine = atomic_load(own) + 1
        atomic_store(own, mine)
        waited = False
        for other in range(ranks):
            looks = 0
            while atomic_load(words + (1 + other) * WORD_BYTES) < mine and not atomic_load(words):
                if not waited:
                    waited = True
                    leave_time(clock, scratch)
                looks += 1
                if looks < SPINS_BEFORE_SLEEP:
                    pause()
                else:
                    _sleep(usleep, SLEEP_MICROSECONDS)
        if waited:
            leave_time(clock, scratch + 16)
            seconds = load_i64(scratch + 16) - load_i64(scratch)
            nanoseconds = load_i64(scratch + 24) - load_i64(scratch + 8)
            atomic_store(own + 8, atomic_load(own + 8) + 1_000_000_000 * seconds + nanoseconds)

    return KERNEL_SIGNATURE, kernel
