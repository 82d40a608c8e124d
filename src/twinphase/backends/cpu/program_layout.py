"""Byte offsets of the memory that Python and the compiled program runner share."""

from __future__ import annotations

import platform
import sys

# Offsets of control words. Words that threads write often have a cache line of their own. A thread
# polls CTL_TILE_SPINS times for a tile, or CTL_STEP_SPINS times for a step, then sleeps until
# CTL_WAKE changes. The function at CTL_LIBC_ADDRESS is syscall() or sched_yield().
CTL_EPOCH = 0
CTL_WAKE = 64
CTL_SLEEPERS = 128
CTL_SHUTDOWN = 192
CTL_COMMANDS_ADDRESS = 256
CTL_COUNT = 264
CTL_CLAIMS_ADDRESS = 272
CTL_DONE_COUNTERS_ADDRESS = 280
CTL_SCRATCH_ADDRESS = 288
CTL_SCRATCH_BYTES_PER_THREAD = 296
CTL_TILE_SPINS = 304
CTL_STEP_SPINS = 312
CTL_LIBC_ADDRESS = 320
CTL_THREADS = 328
CTL_STATES_ADDRESS = 336
CTL_LENDING = 384
CTL_BYTES = 448

# A thread's state: its number in the system, the command in one of whose tiles it is, counted from
# 1, whether it is on a core that another thread has lent, and memory for what it asks the system.
STATE_TID = 0
STATE_IN_COMMAND = 8
STATE_TIMESPEC = 16
STATE_CPU = 32
STATE_IS_GUEST = 40
STATE_CPU_SET = 64
STATE_PART_OF_SET = 192
STATE_BYTES = 320
CPU_SET_BYTES = 128

# A command has fewer than 2^18 tiles.
TILE_BITS = 18
EPOCH_SHIFT = 2 * TILE_BITS
# Epochs are counted modulo a power of two, so that a claim word stays positive.
EPOCH_MASK = (1 << 63 - EPOCH_SHIFT) - 1

# Numbers of Linux's system calls: futex, gettid, getcpu, clock_gettime, sched_setaffinity and
# sched_getaffinity.
_SYSTEM_CALLS = (
    {"x86_64": (202, 186, 309, 228, 203, 204), "aarch64": (98, 178, 168, 113, 122, 123)}.get(
        platform.machine()
    )
    if sys.platform == "linux"
    else None
)
HAS_FUTEX = _SYSTEM_CALLS is not None
(
    FUTEX_CALL,
    GETTID_CALL,
    GETCPU_CALL,
    CLOCK_GETTIME_CALL,
    SETAFFINITY_CALL,
    GETAFFINITY_CALL,
) = _SYSTEM_CALLS or 6 * (0,)

# Running the program with this thread number ends the threads.
SHUTDOWN_THREAD = -1

# Claim words and done counters have a cache line each.
COUNTER_BYTES = 64

# The tile count has an address because it changes from step to step. A command with a barrier waits
# until all earlier commands are done.
COMMAND_KERNEL_ADDRESS = 0
COMMAND_TILE_COUNT_ADDRESS = 8
COMMAND_BARRIER = 16
COMMAND_ARGS = 24
COMMAND_MAX_ARGS = 29
COMMAND_BYTES = COMMAND_ARGS + 8 * COMMAND_MAX_ARGS
