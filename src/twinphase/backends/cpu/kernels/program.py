"""Runs a captured program: the walk of every thread of the pool over the commands of a step.

A command is a kernel, its arguments and a number of tiles. Each thread has a contiguous range of
the tiles, so that it reads memory in order, and takes them one by one; a thread that has finished
its own takes from the ends of the others' ranges. What a command waits for is that the tiles before
it are *done*, not that every thread has *arrived* (an OpenMP barrier waits for arrival, and turns 6
us into 8 ms when another process wants the core): a thread that the operating system has put aside
costs nothing unless it is inside a tile. When it comes late it finds the counters advanced to the
next epoch and goes back to sleep. Waiting spins briefly, then sleeps on a futex, which leaves its
core free for the thread it waits for.

Memory (`program_layout.py`): control words; per command its record, a done counter, and a claim
word for each thread: epoch << 36 | first tile << 18 | end of tiles, both shrinking towards each
other.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from twinphase.backends.cpu.emit import I32, I64, Value
from twinphase.backends.cpu.intrinsics import built, load_i64
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.program_layout import (
    COMMAND_ARGS,
    COMMAND_BARRIER,
    COMMAND_BYTES,
    COMMAND_KERNEL_ADDRESS,
    COMMAND_TILE_COUNT_ADDRESS,
    COUNTER_BYTES,
    CTL_CLAIMS_ADDRESS,
    CTL_COMMANDS_ADDRESS,
    CTL_COUNT,
    CTL_DONE_COUNTERS_ADDRESS,
    CTL_EPOCH,
    CTL_LIBC_ADDRESS,
    CTL_SCRATCH_ADDRESS,
    CTL_SCRATCH_BYTES_PER_THREAD,
    CTL_SHUTDOWN,
    CTL_SLEEPERS,
    CTL_STEP_SPINS,
    CTL_THREADS,
    CTL_TILE_SPINS,
    CTL_WAKE,
    EPOCH_MASK,
    EPOCH_SHIFT,
    FUTEX_CALL,
    SHUTDOWN_THREAD,
    TILE_BITS,
)

FUTEX_WAIT_PRIVATE = 128
FUTEX_WAKE_PRIVATE = 129
NO_TILE = -1
LATE = -2
TILE_MASK = (1 << TILE_BITS) - 1


def _word(b: ir.IRBuilder, address: Value, ty: ir.Type = I64) -> Value:
    return b.inttoptr(address, ty.as_pointer())


@built
def atomic_load(b: ir.IRBuilder, address) -> Value:
    return b.load_atomic(_word(b, address), "seq_cst", 8, typ=I64)


@built
def atomic_store(b: ir.IRBuilder, address, value):
    b.store_atomic(value, _word(b, address), "seq_cst", 8)


@built
def _atomic_add(b: ir.IRBuilder, address, value) -> Value:
    """Add and return the old value."""
    return b.atomic_rmw("add", _word(b, address), value, "seq_cst")


@built
def _compare_and_swap(b: ir.IRBuilder, address, expected, new) -> Value:
    """1 when the word was `expected` and now is `new`, else 0."""
    pair = b.cmpxchg(_word(b, address), expected, new, "seq_cst", "seq_cst")
    return b.zext(b.extract_value(pair, 1), I64)


@built
def pause(b: ir.IRBuilder):
    """Tell the processor that this is a spin loop."""
    if platform.machine() in ("x86_64", "AMD64"):
        fn_type = ir.FunctionType(ir.VoidType(), [])
        name = "llvm.x86.sse2.pause"
        b.call(b.module.globals.get(name) or ir.Function(b.module, fn_type, name), [])


@built
def _call_libc(b: ir.IRBuilder, function, address, operation, value) -> Value | None:
    """syscall(SYS_futex, address, operation, value, 0, 0, 0), or sched_yield() without a futex."""
    if FUTEX_CALL is None:
        b.call(b.inttoptr(function, ir.FunctionType(I32, []).as_pointer()), [])
        return None
    fn_type = ir.FunctionType(I64, [I64], var_arg=True)
    number = ir.Constant(I64, FUTEX_CALL)
    none = ir.Constant(I64, 0)
    fn = b.inttoptr(function, fn_type.as_pointer())
    return b.call(fn, [number, address, operation, b.trunc(value, I32), none, none, none])


@njit  # type: ignore[untyped-decorator]
def _futex(control, operation, value):
    """Linux's futex(2) on the wake word; elsewhere, give up the rest of the time slice."""
    _call_libc(load_i64(control + CTL_LIBC_ADDRESS), control + CTL_WAKE, operation, value)


@built
def _call_kernel(b: ir.IRBuilder, function, arguments, tile, scratch):
    """Call a kernel by address, in Numba's calling convention (two result pointers first)."""
    pointer = ir.IntType(8).as_pointer()
    fn_type = ir.FunctionType(I32, [pointer, pointer, I64, I64, I64])
    place = b.bitcast(cgutils.alloca_once(b, ir.ArrayType(I64, 8)), pointer)
    fn = b.inttoptr(function, fn_type.as_pointer())
    b.call(fn, [place, place, arguments, tile, scratch])


@njit  # type: ignore[untyped-decorator]
def _wake_sleepers(control):
    if atomic_load(control + CTL_SLEEPERS) > 0:
        _atomic_add(control + CTL_WAKE, 1)
        _futex(control, FUTEX_WAKE_PRIVATE, 1 << 30)


@njit  # type: ignore[untyped-decorator]
def _over(claims, index, thread, threads, epoch):
    """Whether the step is over, so that this thread came late."""
    return atomic_load(claims + (index * threads + thread) * COUNTER_BYTES) >> EPOCH_SHIFT != epoch


@njit  # type: ignore[untyped-decorator]
def _wait_done(control, index, tiles, thread, epoch):
    """Wait until a command's tiles are done; False when this thread came late."""
    done = load_i64(control + CTL_DONE_COUNTERS_ADDRESS) + index * COUNTER_BYTES
    claims = load_i64(control + CTL_CLAIMS_ADDRESS)
    threads = load_i64(control + CTL_THREADS)
    spins = 0
    while True:
        if _over(claims, index, thread, threads, epoch):
            return False
        if atomic_load(done) >= tiles:
            return True
        spins += 1
        if spins < load_i64(control + CTL_TILE_SPINS):
            pause()
            continue
        _atomic_add(control + CTL_SLEEPERS, 1)
        ticket = atomic_load(control + CTL_WAKE)
        if atomic_load(done) < tiles and not _over(claims, index, thread, threads, epoch):
            _futex(control, FUTEX_WAIT_PRIVATE, ticket)
        _atomic_add(control + CTL_SLEEPERS, -1)


@njit  # type: ignore[untyped-decorator]
def _claim(word, epoch, own: bool):
    """A tile from the front of the thread's range or the back of another; NO_TILE or LATE."""
    while True:
        now = atomic_load(word)
        if now >> EPOCH_SHIFT != epoch:
            return LATE
        first = now >> TILE_BITS & TILE_MASK
        end = now & TILE_MASK
        if first >= end:
            return NO_TILE
        if own and _compare_and_swap(word, now, now + (1 << TILE_BITS)):
            return first
        if not own and _compare_and_swap(word, now, now - 1):
            return end - 1


@njit  # type: ignore[untyped-decorator]
def _run_tiles(control, index, command, thread, epoch):
    """Run tiles of a command until none is left; how many, or LATE."""
    threads = load_i64(control + CTL_THREADS)
    mine = 0
    scratch = load_i64(control + CTL_SCRATCH_ADDRESS) + thread * load_i64(
        control + CTL_SCRATCH_BYTES_PER_THREAD
    )
    words = load_i64(control + CTL_CLAIMS_ADDRESS) + index * threads * COUNTER_BYTES
    fn = load_i64(command + COMMAND_KERNEL_ADDRESS)
    for i in range(threads):
        owner = (thread + i) % threads
        while True:
            tile = _claim(words + owner * COUNTER_BYTES, epoch, i == 0)
            if tile == LATE:
                return LATE
            if tile == NO_TILE:
                break
            _call_kernel(fn, command + COMMAND_ARGS, tile, scratch)
            mine += 1
    return mine


@njit  # type: ignore[untyped-decorator]
def _walk(control, thread, epoch):
    commands = load_i64(control + CTL_COMMANDS_ADDRESS)
    count = load_i64(control + CTL_COUNT)
    dones = load_i64(control + CTL_DONE_COUNTERS_ADDRESS)
    unfinished = 0  # first command not yet known to be done
    for i in range(count + 1):
        command = commands + i * COMMAND_BYTES
        if i == count or load_i64(command + COMMAND_BARRIER):
            for j in range(unfinished, i):
                tiles = load_i64(
                    load_i64(commands + j * COMMAND_BYTES + COMMAND_TILE_COUNT_ADDRESS)
                )
                if not _wait_done(control, j, tiles, thread, epoch):
                    return
            unfinished = i
        if i == count:
            return
        mine = _run_tiles(control, i, command, thread, epoch)
        if mine == LATE:
            return
        if mine and _atomic_add(dones + i * COUNTER_BYTES, mine) + mine >= load_i64(
            load_i64(command + COMMAND_TILE_COUNT_ADDRESS)
        ):
            _wake_sleepers(control)


@njit  # type: ignore[untyped-decorator]
def _open(control, epoch):
    """Share out every command's tiles among the threads."""
    commands = load_i64(control + CTL_COMMANDS_ADDRESS)
    threads = load_i64(control + CTL_THREADS)
    claims = load_i64(control + CTL_CLAIMS_ADDRESS)
    for i in range(load_i64(control + CTL_COUNT)):
        tiles = load_i64(load_i64(commands + i * COMMAND_BYTES + COMMAND_TILE_COUNT_ADDRESS))
        for t in range(threads):
            first = t * tiles // threads
            end = (t + 1) * tiles // threads
            atomic_store(claims, epoch << EPOCH_SHIFT | first << TILE_BITS | end)
            claims += COUNTER_BYTES


@njit  # type: ignore[untyped-decorator]
def _close(control, epoch):
    """Leave nothing to claim before tile counts change; late threads see the next epoch."""
    threads = load_i64(control + CTL_THREADS)
    claims = load_i64(control + CTL_CLAIMS_ADDRESS)
    done = load_i64(control + CTL_DONE_COUNTERS_ADDRESS)
    for _ in range(load_i64(control + CTL_COUNT)):
        for _t in range(threads):
            atomic_store(claims, (epoch + 1 & EPOCH_MASK) << EPOCH_SHIFT)
            claims += COUNTER_BYTES
        atomic_store(done, 0)
        done += COUNTER_BYTES


def run_program(isa: Isa) -> tuple[Any, Callable[[int, int], int]]:
    """The entry of every thread: thread 0 runs one step, the others serve steps until shutdown.

    Arguments: address of the control words, number of the thread (SHUTDOWN_THREAD ends the others).
    """

    def entry(control, thread):
        if thread == SHUTDOWN_THREAD:
            atomic_store(control + CTL_SHUTDOWN, 1)
            _wake_sleepers(control)
            return 0
        if thread == 0:
            epoch = atomic_load(control + CTL_EPOCH) + 1 & EPOCH_MASK
            _open(control, epoch)
            atomic_store(control + CTL_EPOCH, epoch)
            _wake_sleepers(control)
            _walk(control, 0, epoch)
            _close(control, epoch)
            _wake_sleepers(control)
            return epoch
        seen = 0
        while True:
            spins = 0
            while atomic_load(control + CTL_EPOCH) == seen and not atomic_load(
                control + CTL_SHUTDOWN
            ):
                spins += 1
                if spins < load_i64(control + CTL_STEP_SPINS):
                    pause()
                    continue
                _atomic_add(control + CTL_SLEEPERS, 1)
                ticket = atomic_load(control + CTL_WAKE)
                if atomic_load(control + CTL_EPOCH) == seen and not atomic_load(
                    control + CTL_SHUTDOWN
                ):
                    _futex(control, FUTEX_WAIT_PRIVATE, ticket)
                _atomic_add(control + CTL_SLEEPERS, -1)
            if atomic_load(control + CTL_SHUTDOWN):
                return seen
            seen = atomic_load(control + CTL_EPOCH)
            _walk(control, thread, seen)

    return types.int64(types.int64, types.int64), entry
