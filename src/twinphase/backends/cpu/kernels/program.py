"""Runs a captured program: the walk of every thread of the pool over the commands of a step.

A command is a kernel, its arguments and a number of tiles. Each thread has a contiguous range of
the tiles, so that it reads memory in order, and takes them one by one; a thread that has finished
its own takes from the ends of the others' ranges. What a command waits for is that the tiles before
it are *done*, not that every thread has *arrived* (an OpenMP barrier waits for arrival, and turns 6
us into 8 ms when another process wants the core): a thread that the operating system has put aside
costs nothing unless it is inside a tile. When it comes late it finds the counters advanced to the
next epoch and goes back to sleep. Waiting spins briefly, then sleeps on a futex, which leaves its
core free for the thread it waits for; if that one was put aside inside a tile, it is moved there.

Memory (`program_layout.py`): control words; per command its record, a done counter, and a claim
word for each thread: epoch << 36 | first tile << 18 | end of tiles, both shrinking towards each
other.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from twinphase.backends.cpu.emit import I32, I64, Value
from twinphase.backends.cpu.intrinsics import (
    built,
    call_kernel,
    helper,
    load_i64,
    load_u32,
    store_i64,
)
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.program_layout import (
    CLOCK_GETTIME_CALL,
    COMMAND_ARGS,
    COMMAND_BARRIER,
    COMMAND_BYTES,
    COMMAND_KERNEL_ADDRESS,
    COMMAND_TILE_COUNT_ADDRESS,
    COUNTER_BYTES,
    CPU_SET_BYTES,
    CTL_CLAIMS_ADDRESS,
    CTL_COMMANDS_ADDRESS,
    CTL_COUNT,
    CTL_DONE_COUNTERS_ADDRESS,
    CTL_EPOCH,
    CTL_LENDING,
    CTL_LIBC_ADDRESS,
    CTL_SCRATCH_ADDRESS,
    CTL_SCRATCH_BYTES_PER_THREAD,
    CTL_SHUTDOWN,
    CTL_SLEEPERS,
    CTL_STATES_ADDRESS,
    CTL_STEP_SPINS,
    CTL_THREADS,
    CTL_TILE_SPINS,
    CTL_WAKE,
    EPOCH_MASK,
    EPOCH_SHIFT,
    FUTEX_CALL,
    GETAFFINITY_CALL,
    GETCPU_CALL,
    GETTID_CALL,
    HAS_FUTEX,
    SETAFFINITY_CALL,
    SHUTDOWN_THREAD,
    STATE_BYTES,
    STATE_CPU,
    STATE_CPU_SET,
    STATE_IN_COMMAND,
    STATE_IS_GUEST,
    STATE_PART_OF_SET,
    STATE_TID,
    STATE_TIMESPEC,
    TILE_BITS,
)

FUTEX_WAIT_PRIVATE = 128
FUTEX_WAKE_PRIVATE = 129
# Looks at a tile between two readings of the clock that counts its thread's time, and nanoseconds
# after which a sleeper looks whether that thread has been put aside since.
LENDING_SPINS = 60
LOOK_AGAIN_NANOSECONDS = 500_000
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
def _call_libc(b: ir.IRBuilder, function, number, first, second, third, fourth) -> Value:
    """syscall(number, first, second, third, fourth, 0, 0), or sched_yield() without a futex."""
    if not HAS_FUTEX:
        b.call(b.inttoptr(function, ir.FunctionType(I32, []).as_pointer()), [])
        return ir.Constant(I64, -1)
    fn_type = ir.FunctionType(I64, [I64], var_arg=True)
    none = ir.Constant(I64, 0)
    fn = b.inttoptr(function, fn_type.as_pointer())
    return b.call(fn, [number, first, second, third, fourth, none, none])


@helper
def _system_call(control, number, first, second, third):
    return _call_libc(load_i64(control + CTL_LIBC_ADDRESS), number, first, second, third, 0)


@helper
def _futex(control, operation, value, timeout):
    """Linux's futex(2) on the wake word; elsewhere, give up the rest of the time slice."""
    libc = load_i64(control + CTL_LIBC_ADDRESS)
    _call_libc(libc, FUTEX_CALL, control + CTL_WAKE, operation, value, timeout)


@helper
def _state(control, thread):
    return load_i64(control + CTL_STATES_ADDRESS) + thread * STATE_BYTES


@helper
def _processor_time(control, thread, mine):
    """Nanoseconds that a thread has run; negative where the system does not tell."""
    # The kernel's number of the clock that counts a thread's time on processors.
    clock = ~load_i64(_state(control, thread) + STATE_TID) << 3 | 6
    if _system_call(control, CLOCK_GETTIME_CALL, clock, mine + STATE_TIMESPEC, 0) != 0:
        return -1
    return load_i64(mine + STATE_TIMESPEC) * 1000000000 + load_i64(mine + STATE_TIMESPEC + 8)


@helper
def _move(control, tid, mine, to_here: bool):
    """Put a thread on the caller's processor, or on any other; its set of processors stays."""
    whole = mine + STATE_CPU_SET
    part = mine + STATE_PART_OF_SET
    if _system_call(control, GETAFFINITY_CALL, tid, CPU_SET_BYTES, whole) <= 0:
        return
    _system_call(control, GETCPU_CALL, mine + STATE_CPU, 0, 0)
    cpu = load_u32(mine + STATE_CPU)
    word = cpu // 64 * 8
    bit = 1 << cpu % 64
    if word >= CPU_SET_BYTES or load_i64(whole + word) & bit == 0:
        return
    for i in range(0, CPU_SET_BYTES, 8):
        if to_here:
            store_i64(part + i, bit if i == word else 0)
        else:
            store_i64(part + i, load_i64(whole + i) & ~(bit if i == word else 0))
    _system_call(control, SETAFFINITY_CALL, tid, CPU_SET_BYTES, part)
    _system_call(control, SETAFFINITY_CALL, tid, CPU_SET_BYTES, whole)


@helper
def _leave(control, thread):
    """Move from the processor that another thread has lent for a tile to any other."""
    state = _state(control, thread)
    if _compare_and_swap(control + CTL_LENDING, 0, 1):
        store_i64(state + STATE_IS_GUEST, 0)
        _move(control, load_i64(state + STATE_TID), state, False)
        atomic_store(control + CTL_LENDING, 0)


@helper
def _lend_processor(control, index, thread, done, tiles):
    """Move a thread that was put aside inside a tile of the command to this thread's processor.

    Another program has taken its own, for milliseconds; this thread sleeps next.
    """
    mine = _state(control, thread)
    for other in range(load_i64(control + CTL_THREADS)):
        place = _state(control, other) + STATE_IN_COMMAND
        if other == thread or atomic_load(place) != index + 1:
            continue
        before = _processor_time(control, other, mine)
        for _ in range(LENDING_SPINS):
            if atomic_load(done) >= tiles:
                return
            pause()
        runs = _processor_time(control, other, mine) != before
        # One thread at a time: each restores the set of processors that it has found.
        if before < 0 or runs or not _compare_and_swap(control + CTL_LENDING, 0, 1):
            continue
        if atomic_load(place) == index + 1:
            its = _state(control, other)
            atomic_store(its + STATE_IS_GUEST, 1)
            _move(control, load_i64(its + STATE_TID), mine, True)
        atomic_store(control + CTL_LENDING, 0)
        return


@helper
def _wake_sleepers(control):
    if atomic_load(control + CTL_SLEEPERS) > 0:
        _atomic_add(control + CTL_WAKE, 1)
        _futex(control, FUTEX_WAKE_PRIVATE, 1 << 30, 0)


@helper
def _over(claims, index, thread, threads, epoch):
    """Whether the step is over, so that this thread came late."""
    return atomic_load(claims + (index * threads + thread) * COUNTER_BYTES) >> EPOCH_SHIFT != epoch


@helper
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
        if HAS_FUTEX:
            _lend_processor(control, index, thread, done, tiles)
        _atomic_add(control + CTL_SLEEPERS, 1)
        ticket = atomic_load(control + CTL_WAKE)
        if atomic_load(done) < tiles and not _over(claims, index, thread, threads, epoch):
            timeout = _state(control, thread) + STATE_TIMESPEC
            store_i64(timeout, 0)
            store_i64(timeout + 8, LOOK_AGAIN_NANOSECONDS)
            _futex(control, FUTEX_WAIT_PRIVATE, ticket, timeout)
        _atomic_add(control + CTL_SLEEPERS, -1)


@helper
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


@helper
def _run_tiles(control, index, command, thread, epoch):
    """Run tiles of a command until none is left; how many, or LATE."""
    threads = load_i64(control + CTL_THREADS)
    mine = 0
    scratch = load_i64(control + CTL_SCRATCH_ADDRESS) + thread * load_i64(
        control + CTL_SCRATCH_BYTES_PER_THREAD
    )
    words = load_i64(control + CTL_CLAIMS_ADDRESS) + index * threads * COUNTER_BYTES
    fn = load_i64(command + COMMAND_KERNEL_ADDRESS)
    state = _state(control, thread)
    inside = state + STATE_IN_COMMAND
    for i in range(threads):
        owner = (thread + i) % threads
        while True:
            tile = _claim(words + owner * COUNTER_BYTES, epoch, i == 0)
            if tile == LATE:
                return LATE
            if tile == NO_TILE:
                break
            atomic_store(inside, index + 1)
            call_kernel(fn, command + COMMAND_ARGS, tile, scratch)
            atomic_store(inside, 0)
            mine += 1
    return mine


@helper
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
        if load_i64(_state(control, thread) + STATE_IS_GUEST):
            _leave(control, thread)


@helper
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


@helper
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
        store_i64(_state(control, thread) + STATE_TID, _system_call(control, GETTID_CALL, 0, 0, 0))
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
                    _futex(control, FUTEX_WAIT_PRIVATE, ticket, 0)
                _atomic_add(control + CTL_SLEEPERS, -1)
            if atomic_load(control + CTL_SHUTDOWN):
                return seen
            seen = atomic_load(control + CTL_EPOCH)
            _walk(control, thread, seen)

    return types.int64(types.int64, types.int64), entry
