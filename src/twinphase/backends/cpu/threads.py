"""The thread pool: Python threads inside one compiled loop, which run programs together.

The calling thread is thread 0; the others wait for the next step. See `kernels/program.py` for how
tiles are shared.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.cpu import program_layout as at
from twinphase.backends.cpu.memory import aligned

ENTRY = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
)


@dataclass(frozen=True)
class Command:
    """One kernel of a program.

    Attributes:
        fn: address of the kernel.
        tiles: address of the int64 that says how many tiles it has in this step.
        sync: whether all earlier commands must be done before it starts.
        args: int64 arguments; a kernel finds zeros after them.
    """

    fn: int
    tiles: int
    sync: bool
    args: Sequence[int]


class ThreadPool:
    """Runs one program, step after step, on `threads` threads."""

    def __init__(
        self, entry: int, threads: int, scratch_bytes: int, spins: int = 500, idle_spins: int = 5000
    ) -> None:
        """Start `threads` - 1 threads.

        Args:
            entry: address of `run_program`.
            threads: threads in all, the caller included.
            scratch_bytes: private memory of each thread.
            spins: polls of a thread that waits for another's tile, before it sleeps.
            idle_spins: polls of a thread that waits for the next step, before it sleeps; waking it
                costs more than the scheduler and the sampler take between two steps.
        """
        scratch_bytes = -(-scratch_bytes // 64) * 64
        self.threads = threads
        self._scratch = aligned(threads * scratch_bytes, np.uint8)
        self._control = aligned(at.CTL_BYTES, np.uint8)
        self._set(at.CTL_SCRATCH_ADDRESS, self._scratch.ctypes.data)
        self._set(at.CTL_SCRATCH_BYTES_PER_THREAD, scratch_bytes)
        self._set(at.CTL_TILE_SPINS, spins)
        self._set(at.CTL_STEP_SPINS, idle_spins)
        self._states = aligned(threads * at.STATE_BYTES, np.uint8)
        self._set(at.CTL_STATES_ADDRESS, self._states.ctypes.data)
        self._set(at.CTL_LIBC_ADDRESS, libc_address("syscall" if at.HAS_FUTEX else "sched_yield"))
        self._entry = ENTRY(entry)
        self._result = ctypes.create_string_buffer(64)
        self._program: list[NDArray[np.generic]] = []
        self._workers: list[threading.Thread] = []
        # The threads must not keep the pool alive, and must stop when it goes.
        self._stop = weakref.finalize(
            self, _stop, self._entry, self._control, self._workers, (self._scratch, self._states)
        )

    def _set(self, offset: int, value: int) -> None:
        self._control[offset : offset + 8].view(np.int64)[0] = value

    def load(self, commands: Sequence[Command]) -> None:
        """Set the program; call it once, before the first step."""
        if self._program:
            raise RuntimeError("a pool runs one program; make another pool")
        records = aligned(max(1, len(commands)) * at.COMMAND_BYTES // 8, np.int64).reshape(
            -1, at.COMMAND_BYTES // 8
        )
        for record, command in zip(records, commands, strict=True):
            record[:3] = command.fn, command.tiles, command.sync
            record[3 : 3 + len(command.args)] = command.args
        claims = aligned(len(commands) * self.threads * at.COUNTER_BYTES // 8, np.int64)
        done = aligned(len(commands) * at.COUNTER_BYTES // 8, np.int64)
        self._program = [records, claims, done]
        for offset, array in (
            (at.CTL_COMMANDS_ADDRESS, records),
            (at.CTL_CLAIMS_ADDRESS, claims),
            (at.CTL_DONE_COUNTERS_ADDRESS, done),
        ):
            self._set(offset, array.ctypes.data)
        self._set(at.CTL_COUNT, len(commands))
        self._set(at.CTL_THREADS, self.threads)
        for index in range(1, self.threads):
            worker = threading.Thread(
                target=_serve,
                args=(self._entry, self._control, index),
                name=f"twinphase-{index}",
                daemon=True,
            )
            worker.start()
            self._workers.append(worker)

    def run(self) -> None:
        """Run one step: every command of the program, in order, without the GIL."""
        place = ctypes.addressof(self._result)
        self._entry(place, place, self._control.ctypes.data, 0)

    def close(self) -> None:
        """Stop the threads; the pool cannot run again."""
        self._stop()


def libc_address(name: str) -> int:
    """Address of a function of libc, for kernels to call."""
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0


def _serve(entry: Callable[..., int], control: NDArray[np.generic], index: int) -> None:
    """Body of a worker thread: compiled code until shutdown."""
    result = ctypes.create_string_buffer(64)
    place = ctypes.addressof(result)
    entry(place, place, control.ctypes.data, index)


def _stop(
    entry: Callable[..., int],
    control: NDArray[np.generic],
    workers: list[threading.Thread],
    scratch: object,
) -> None:
    """End the workers; the arguments keep the memory that they use until they have ended."""
    result = ctypes.create_string_buffer(64)
    place = ctypes.addressof(result)
    entry(place, place, control.ctypes.data, at.SHUTDOWN_THREAD)
    for worker in workers:
        worker.join()
