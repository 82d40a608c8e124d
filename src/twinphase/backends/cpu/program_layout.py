"""Byte offsets of the memory that Python and the compiled program runner share."""

from __future__ import annotations

import platform
import sys

# Control words. Those that threads write often have a cache line of their own.
CTL_EPOCH = 0  # number of the step being run
CTL_WAKE = 64  # changes when sleepers should look again
CTL_SLEEPERS = 128  # threads that sleep or are about to
CTL_SHUTDOWN = 192
CTL_COMMANDS = 256  # address of the commands
CTL_COUNT = 264
CTL_CLAIMS = 272  # address of the claim words
CTL_DONE = 280  # address of the done counters
CTL_SCRATCH = 288  # address of the threads' scratch memory
CTL_SCRATCH_BYTES = 296  # of one thread
CTL_SPINS = 304  # looks before a thread that waits for a tile sleeps
CTL_IDLE_SPINS = 312  # looks before a thread that waits for a step sleeps
CTL_LIBC = 320  # address of syscall() or sched_yield()
CTL_THREADS = 328
CTL_BYTES = 336

TILE_BITS = 18  # a command has fewer than 2^18 tiles
EPOCH_SHIFT = 2 * TILE_BITS
EPOCH_MASK = (
    1 << 63 - EPOCH_SHIFT
) - 1  # epochs count modulo this, so that a claim word stays positive

FUTEX_CALL = (
    {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
)

SHUTDOWN_THREAD = -1  # the thread number that tells all others to end

COUNTER_BYTES = 64  # a claim word or done counter, a cache line each

COMMAND_FN = 0  # kernel's address
COMMAND_TILES = 8  # address of the tile count, which may change from step to step
COMMAND_SYNC = 16  # whether earlier commands must be done first
COMMAND_ARGS = 24
COMMAND_MAX_ARGS = 21
COMMAND_BYTES = COMMAND_ARGS + 8 * COMMAND_MAX_ARGS
